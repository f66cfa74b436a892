"""The backend over a row store: a server is an adapter of :class:`RowStore` and a subclass that makes it."""

from __future__ import annotations

import asyncio
import secrets
from abc import abstractmethod
from collections.abc import Coroutine, Iterable, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any, Self, TypeVar

from aiolock.backends.diagnosis import failure
from aiolock.backends.rows.claim import RowClaim, RowRegister
from aiolock.backends.rows.context import Context, row_key, unreadable
from aiolock.backends.rows.engine import Engine
from aiolock.backends.rows.liveness import SessionRow, Verdict, decode_session, judge, observe, remaining
from aiolock.backends.rows.lockrow import (
    Ask,
    Force,
    ForceOne,
    Liveness,
    LockRow,
    RowHold,
    RowRequest,
    SetLimit,
    UnknownFormat,
    decode,
)
from aiolock.backends.rows.session import session_key
from aiolock.backends.rows.store import Edit, Listener, RowStore
from aiolock.backends.rows.writer import MemberState
from aiolock.clock import wall_clock
from aiolock.core.backend import NEVER, Claim, Grant, Renewal, Request, Settings
from aiolock.core.capabilities import Administration, Diagnosis, Purging, RegisterStore, decode_register
from aiolock.core.present import PresentLease, has_token, presented
from aiolock.errors import BackendError, BackendUnavailable, UnsupportedKind
from aiolock.types import LOCK_FAMILIES, PERMIT, Family, Finding, Holder, LockInfo, Waiting
from aiolock.validation import check_idle, unescape

__all__ = ["RowBackend"]

T = TypeVar("T")

PURGES = 1_000
"""The number of openings of which one deletes rows that were not used for long."""
SHOWN = 5
"""Rows of an unknown format that a diagnosis names."""
IDLE = 86_400.0
"""Seconds after the end of its ttl for which a row stays before it is purged."""


class RowBackend(Administration, RegisterStore, Purging, Diagnosis):
    """Locks of every kind over a :class:`RowStore`."""

    purges = "row"
    keeps_values = True
    concurrency = 64
    """Enough that a store which carries out many calls at once is never idle, and so few that each is answered soon."""
    # One heartbeat renews all, so they go out together: two groups are never further apart than half of the time between two
    # renewals, and so become one.
    renewal_lead = 1 / 6
    floor = 0
    """The highest token that earlier openings have seen."""

    @abstractmethod
    def make_store(self) -> RowStore:
        """Return a new store; no I/O."""

    def bind(self, settings: Settings) -> None:
        """Make the store and the engine of this opening."""
        super().bind(settings)
        self.store = self.make_store()
        self._opened = False
        self.context = Context(self.store, settings, self.events, self.floor)
        self._engine = Engine(self.context)

    def again(self) -> Self:
        """Return a backend for the next opening, whose tokens are above all that this one has seen."""
        other = super().again()
        if hasattr(self, "context"):
            other.floor = self.context.floor
        return other

    def abandon(self) -> None:
        """Forget this opening: its sessions end by their ttl."""
        self.context.closed = True
        self.context.tasks.clear()
        self.store.abandon()

    async def open(self) -> None:
        """Open the store; again, if it was closed because an earlier attempt had failed."""
        self.context.closed = False
        await self.store.open(
            self.settings,
            Listener(
                self.context.address, self._engine.changed, self._engine.interrupted, self._engine.replaced
            ),
        )
        self.capabilities, self._opened = self.store.capabilities, True
        if self.context.random.random() < 1 / PURGES:
            # Of all namespaces: some are not used any more.
            self.context.begin(self._purge("", IDLE), "aiolock-purge")

    async def settle(self, timeout: float) -> None:
        """Wait for the releases under way."""
        await self._engine.settle(timeout)

    async def aclose(self) -> None:
        """End the sessions, all tasks and the store."""
        if hasattr(self, "context"):
            await self._engine.close()
            await self.store.aclose()

    def claim(self, request: Request) -> RowClaim:
        """Return a new claim, of any kind."""
        return RowClaim(self._engine, request)

    def register(self, name: str, family: Family) -> RowRegister:
        """Return a view of a register."""
        return RowRegister(self._engine, name, family)

    async def renew(self, claims: Sequence[Claim]) -> list[Renewal]:
        """Renew by one heartbeat for each ttl, and verify the rows of all claims in the same flight; those that are fixed in another.

        A heartbeat that is under way already counts as well, because another one may have to wait for longer than this.
        """
        called = self.settings.clock()
        members = {claim: claim.member for claim in claims if isinstance(claim, RowClaim)}
        sessions = {
            member.session: claim.fixed
            for claim, member in members.items()
            if member is not None and not member.session.dead
        }
        before = {session: session.answered for session in sessions}
        futures = {
            session: self._engine.begin_renewal(session) for session, fixed in sessions.items() if not fixed
        }
        if alone := {session for session, fixed in sessions.items() if fixed}:
            verified = self.context.begin(self._engine.verify(alone), "aiolock-verify")
            futures |= dict.fromkeys(alone, verified)
        if futures:
            await asyncio.wait(set(futures.values()), timeout=self.settings.command_timeout)
        renewals: list[Renewal] = []
        for claim in claims:
            member = members.get(claim) if isinstance(claim, RowClaim) else None
            if member is None or member.session.dead:
                renewals.append("revoked")
            elif member.state is MemberState.GONE:
                renewals.append(member.reason)
            elif member.shown >= called and (claim.fixed or member.session.answered > before[member.session]):
                demand = claim.contended_since is not None
                renewals.append(Grant(0, 0, NEVER if claim.fixed else member.until, demand))
            else:
                renewals.append(_trouble(futures.get(member.session)))
        return renewals

    # --- administration

    async def inspect(self, name: str, family: Family) -> LockInfo:
        """Return the holders and the queue of a lock, as far as they count; not what this client has given up before."""
        found, holders, known = await self._read(name, family)
        waiters = tuple(
            Waiting(request.label, request.mode, request.permits)
            for request in found.queue.values()
            if known.counts(request)
        )
        return LockInfo.of_holds(name, holders.values(), waiters, family, found.current)

    async def force_release(self, name: str, family: Family, token: int | None = None) -> bool:
        """End all holds of a lock, and replace a row of an unknown format; or end that of a token, by the id of its request."""
        if token is None:
            return await self._step(name, family, Force())
        _, holders, _ = await self._read(name, family)
        for owner, holder in holders.items():
            if has_token(holder, token):
                return await self._step(name, family, ForceOne(owner))
        return False

    async def _read(self, name: str, family: Family) -> tuple[LockRow, dict[str, Holder], Liveness]:
        """Read a lock; return its row, the holders that count by the ids of their requests, and what counts."""
        key = row_key(self.settings.namespace, "l", family, name)
        await self._engine.settle(self.context.timeout, key)
        [row], _ = await self._ask(self.context.get([key]))
        try:
            found = decode(row.value)
        except UnknownFormat as error:
            raise unreadable(name, error) from None
        requests = [*(hold.request for hold in found.holds.values()), *found.queue.values()]
        known, sessions = await self._ask(self._sessions(requests))
        holders = {
            owner: _holder(hold, *sessions.get(hold.request.session, (0.0, None)))
            for owner, hold in found.holds.items()
            if known.counts(hold.request)
        }
        return found, holders, known

    async def request_release(self, name: str, family: Family, reason: str) -> bool:
        """Notify the holders of a lock."""
        return await self._step(name, family, Ask(reason=reason))

    async def set_limit(self, name: str, limit: int) -> None:
        """Set the limit of a semaphore."""
        await self._step(name, PERMIT.family, SetLimit(limit=limit))

    async def names(self, pattern: str) -> list[tuple[str, Family]]:
        """Return the locks of this namespace that are held or waited for, without what this client has given up before.

        A lock whose row has an unknown format is among them, if its name stands in its key. Each page of rows is read within the
        command timeout; how many there are depends on the locks that were ever used.
        """
        await self._engine.settle(self.context.timeout)
        listing = self.context.begin(self._names(pattern), "aiolock-ask")
        await asyncio.wait({listing})
        return await self.context.answered(listing)

    async def empty(self) -> None:
        """Delete the rows of the namespace, one page after the other."""
        await self._engine.settle(self.context.timeout)
        await self._ask(self._empty())

    async def _empty(self) -> None:
        async for key, row in self.store.scan(f"{self.settings.namespace}/"):
            await self.store.compare_and_set([Edit(key, row.version, secrets.token_hex(8), None)])

    async def diagnose(self) -> list[Finding]:
        """Report what the store finds, and if it is open the rows that cannot be read."""
        found = await self.examine()
        if self._opened:
            try:
                found += await self._ask(self._unreadable())
            except BackendError as error:
                found.append(failure("rows", f"they cannot be read: {error}", "see the other findings"))
        return found

    async def examine(self) -> list[Finding]:
        """Examine the deployment; works also before :meth:`open` has succeeded. Cancelling it changes nothing."""
        return await self.store.diagnose()

    def check_purge(self, idle: object) -> float:
        """Return ``idle`` as seconds, if the store does not delete by itself what is not needed any more."""
        if self.make_store().expires:
            raise UnsupportedKind("rows to purge", self.name, self.elsewhere)
        return check_idle(idle)

    async def purge(self, idle: float) -> int:
        """Delete the rows of the namespace whose ttl ended so long ago; return their number."""
        return await self._purge(f"{self.settings.namespace}/", self.check_purge(idle))

    async def _purge(self, prefix: str, idle: float) -> int:
        """Purge, but for the sessions that a lock row names.

        A session without a row is observed for a whole ttl. So a client that tries once and leaves would never follow a holder that
        died, or a kept time that ended, longer ago.
        """
        named: set[str] = set()
        if not self.store.expires:
            async for key, row in self.store.scan(prefix):
                namespace, _, rest = key.partition("/")
                try:
                    found = decode(row.value) if rest.startswith("l/") else LockRow()
                except UnknownFormat:
                    continue
                requests = [*(hold.request for hold in found.holds.values()), *found.queue.values()]
                named |= {session_key(namespace, request.session) for request in requests}
        return await self.store.purge(prefix, idle, named)

    async def _step(self, name: str, family: Family, step: Ask | Force | ForceOne | SetLimit) -> bool:
        writer = self._engine.writer(name, family)
        return bool(await writer.answered(writer.submit(step), self.context.deadline()))

    async def _ask(self, work: Coroutine[Any, Any, T]) -> T:
        """Do work as a task of the client, which a cancellation of the caller does not end."""
        return await self.context.answered(self.context.begin(work, "aiolock-ask"))

    async def _names(self, pattern: str) -> list[tuple[str, Family]]:
        prefix = f"{self.settings.namespace}/l/"
        rows: dict[tuple[str, Family], LockRow] = {}
        unknown: set[tuple[str, Family]] = set()
        async for key, row in self.store.scan(prefix):
            family, _, text = key.removeprefix(prefix).partition("/")
            try:
                found = decode(row.value)
            except UnknownFormat:
                name = unescape(text)
                if family in LOCK_FAMILIES and fnmatchcase(name, pattern) and not text.startswith("%#"):
                    unknown.add((name, Family(family)))
                continue
            name = found.name or unescape(text)
            if family in LOCK_FAMILIES and fnmatchcase(name, pattern) and not found.free:
                rows[name, Family(family)] = found
        known, _ = await self._sessions(
            request
            for row in rows.values()
            for request in [*(hold.request for hold in row.holds.values()), *row.queue.values()]
        )
        used = {
            key
            for key, row in rows.items()
            if any(known.counts(hold.request) for hold in row.holds.values())
            or any(known.counts(request) for request in row.queue.values())
        }
        return sorted(used | unknown)

    async def _unreadable(self) -> list[Finding]:
        """Return a finding about the rows that have an unknown format, if there are any."""
        prefix, found = f"{self.settings.namespace}/", []
        readers = {"l": decode, "s": decode_session}
        async for key, row in self.store.scan(prefix):
            sort, _, text = key.removeprefix(prefix).partition("/")
            try:
                if sort in readers:
                    readers[sort](row.value)
                elif sort == "r" and decode_register(row.value) is None:
                    found.append(f"register {text}")
            except UnknownFormat as error:
                found.append(f"{text if sort == 'l' else f'session {text}'}: {error}")
        if not found:
            return []
        more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        text = f"rows that were not written by this version of the library: {'; '.join(found[:SHOWN])}{more}"
        advice = (
            "use one version everywhere; `aiolock force-release` replaces the row of a lock, and ends its holds; delete the "
            "row of a register when no program uses it"
        )
        return [failure("rows", text, advice)]

    async def _sessions(
        self, requests: Iterable[RowRequest]
    ) -> tuple[Liveness, dict[str, tuple[float, SessionRow]]]:
        """Read the sessions of requests; return what counts, and each session with the seconds that it has left."""
        known, found = Liveness(), {}
        ttls = {request.session: request.ttl for request in requests}
        sessions = list(ttls)
        while sessions:
            some, sessions = sessions[:500], sessions[500:]
            rows, _ = await self.context.get(
                [session_key(self.settings.namespace, session) for session in some]
            )
            for session, row in zip(some, rows, strict=True):
                try:
                    content = decode_session(row.value) if row.version else None
                except UnknownFormat:
                    continue
                now = self.settings.clock()
                verdict = judge(
                    observe(None, row.version, content, now),
                    ttls[session],
                    now,
                    row.clock,
                    expires=self.store.expires,
                    wall=wall_clock(),
                )
                if verdict in (Verdict.OVER, Verdict.DEAD):
                    known.dead.add(session)
                if content is not None:
                    known.ended[session] = frozenset(content.ended)
                    found[session] = remaining(content, row.clock, wall_clock()), content
        return known, found


def _trouble(future: asyncio.Future[None] | None) -> Exception:
    error = future.exception() if future is not None and future.done() and not future.cancelled() else None
    return error if isinstance(error, BackendError) else BackendUnavailable("the hold could not be verified")


def _holder(hold: RowHold, remaining: float, session: SessionRow | None) -> Holder:
    holder = hold.shown(datetime.fromtimestamp(hold.since, UTC), remaining)
    if session is None:
        return holder
    lease = session.leases.get(hold.request.id)
    if lease is None:
        return holder if session.more else presented(holder, None)
    token, since, label, waiting = lease
    return presented(holder, (PresentLease(token, 0.0, label, waiting), datetime.fromtimestamp(since, UTC)))
