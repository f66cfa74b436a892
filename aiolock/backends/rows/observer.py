"""Observe the sessions of those ahead in the queue, declare dead what is dead, and poll the rows that are waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from aiolock.backends.rows.context import Context, new_version
from aiolock.backends.rows.liveness import (
    DEAD,
    Series,
    SessionRow,
    Verdict,
    continued,
    decode_session,
    encode_session,
    judge,
    next_observation,
    observe,
)
from aiolock.backends.rows.lockrow import RowRequest, UnknownFormat
from aiolock.backends.rows.session import REMEMBERED, session_key
from aiolock.backends.rows.store import Edit, Row
from aiolock.backends.rows.writer import RowWriter
from aiolock.clock import wall_clock
from aiolock.core.logs import Log, get_logger
from aiolock.core.tasks import settle
from aiolock.errors import BackendError

__all__ = ["Observer"]

log: Log = get_logger("aiolock.rows")

MOST_POLL, GROWTH = 2.0, 1.25
"""Most seconds between two reads of a row that is waited for, and by what the time between them grows while nothing changes."""
KNOWN = 1_000
"""Sessions that a client remembers as dead or with ended claims; beyond it, it forgets them and reads anew those that it asks for."""


class Observer:
    """The observer of one client; it works in a task while a claim waits.

    :param rows: returns the rows in which a claim of this client waits.
    """

    def __init__(self, context: Context, rows: Callable[[], list[RowWriter]]) -> None:
        self.context = context
        self._rows = rows
        self._series: dict[str, Series] = {}
        self._news: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._pause = self._polled = 0.0
        """Seconds between two polls, and the time of the last one."""
        self._due = 0.0
        """The time of the next observation."""

    def wake(self, *, poll: bool = False) -> None:
        """Observe now: there is another claim that waits; with ``poll``, a row may have changed."""
        self._due = 0.0
        if poll:
            self._polled = self._pause = 0.0
        if self._news is not None:
            settle(self._news, None)
        if (self._task is None or self._task.done()) and not self.context.closed:
            self._task = self.context.tasks.spawn(self._run(), "aiolock-observer")

    def waiters_changed(self) -> None:
        """End the pause of the observer, if it runs: a claim may have ceased to wait."""
        if self._news is not None:
            settle(self._news, None)

    def interrupted(self) -> None:
        """Begin every series anew after a reconnect; what was read of dead sessions may have been undone."""
        self._series.clear()
        if not self.context.store.reads_prove:
            self.context.liveness.dead.clear()
        self._due = 0.0

    def observe_once(self, requests: Iterable[RowRequest]) -> asyncio.Future[bool]:
        """Read the sessions of requests once; the future says whether one of them turned out not to count."""
        return self.context.begin(self._observe(list(requests)), "aiolock-observe")

    async def _run(self) -> None:
        context, store = self.context, self.context.store
        while rows := self._rows():
            self._news = asyncio.get_running_loop().create_future()
            requests = {request.session: request for row in rows for request in row.ahead()}
            for session in [session for session in self._series if session not in requests]:
                del self._series[session]
            polls = context.clock() >= self._polled + self._pause
            try:
                if polls:
                    await self._poll(rows)
                unseen = requests.keys() - self._series.keys() - context.liveness.dead
                if unseen or context.clock() >= self._due:
                    self._due = context.clock() + next_observation([each.ttl for each in requests.values()])
                    await self._observe(requests.values())
            except BackendError as error:
                log.debug("observation failed: %s", error)
                self._polled = context.clock()
                for row in rows:
                    row.refuse(error)
            self._pause = max(self._pause, store.poll)
            if any(not context.liveness.counts(request) for request in requests.values()):
                for row in rows:
                    if any(not context.liveness.counts(request) for request in row.ahead()):
                        row.serve()
            next_one = min(self._due, self._polled + self._pause)
            await asyncio.wait({self._news}, timeout=max(0.001, next_one - context.clock()))
        self._series.clear()

    async def _poll(self, rows: list[RowWriter]) -> None:
        """Read the versions of the rows, in one request."""
        answers, flight = await self.context.versions([row.key for row in rows])
        self._polled = flight.sent
        changed = [
            row for row, answer in zip(rows, answers, strict=True) if not row.confirm(answer.version, flight)
        ]
        for row in changed:
            row.serve()
        store = self.context.store
        # A store without notifications is polled less often the longer nothing changes.
        self._pause = store.poll if changed else max(store.poll, min(self._pause * GROWTH, MOST_POLL))

    async def _observe(self, requests: Iterable[RowRequest]) -> bool:
        """Read the session rows of requests, in one request, and declare dead what has expired."""
        context, known = self.context, self.context.liveness
        if len(known.dead) + len(known.ended) > KNOWN:
            # What counts of those ahead is read again now.
            known.dead.clear()
            known.ended.clear()
        ttls = {
            request.session: request.ttl
            for request in requests
            if request.session not in known.own and request.session not in known.dead
        }
        if not ttls:
            return False
        rows, flight = await context.get(
            [session_key(context.settings.namespace, session) for session in ttls]
        )
        if flight.connection != context.connection:
            return False
        arrived, changed = context.clock(), False
        over: dict[str, Edit] = {}
        kept: list[Edit] = []
        for (session, ttl), row in zip(ttls.items(), rows, strict=True):
            series = self._series[session] = observe(
                self._series.get(session), row.version, _content(row), arrived
            )
            if series.row is not None and series.row.ended:
                known.ended[session] = frozenset(series.row.ended)
                changed = True
            verdict = judge(
                series,
                ttl,
                context.clock(),
                row.clock,
                trusted=context.clock_check.trusted(ttl, arrived),
                expires=context.store.expires,
                wall=wall_clock(),
            )
            if verdict is Verdict.DEAD:
                known.dead.add(session)
                changed = True
            elif verdict is Verdict.OVER:
                over[session] = self._edit(session, series.version, DEAD, REMEMBERED)
            elif verdict is Verdict.KEPT and series.row is not None and row.clock is not None:
                now = context.clock()
                present = continued(series.row, row.clock, flight.sent, now, wall_clock())
                kept.append(self._edit(session, series.version, present, present.ttl + REMEMBERED))
        if kept:
            # One of several observers is first, and the others see its write when they observe the session next.
            await context.store.compare_and_set(kept)
        if over:
            changed = await self._declare_dead(over) or changed
        return changed

    def _edit(self, session: str, version: str, row: SessionRow, ttl: float) -> Edit:
        """Return the write of a foreign session row against the version that was observed."""
        key = session_key(self.context.settings.namespace, session)
        return Edit(key, version, new_version(), encode_session(row), ttl)

    async def _declare_dead(self, over: dict[str, Edit]) -> bool:
        """Write sessions dead, each against the version that was observed."""
        answers = await self.context.store.compare_and_set(list(over.values()))
        dead = [session for session, answer in zip(over, answers, strict=True) if answer is not None]
        self.context.liveness.dead.update(dead)
        for session in dead:
            log.debug("session %s has expired: its holds and positions do not count from now on", session)
        for session in over:
            self._series.pop(session, None)
        return bool(dead)


def _content(row: Row) -> SessionRow | None:
    try:
        return decode_session(row.value) if row.version else None
    except UnknownFormat:
        return None
