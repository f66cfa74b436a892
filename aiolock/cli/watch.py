"""Command `watch`: print the changes of locks."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import chain, repeat
from signal import Signals
from typing import Any

from aiolock.cli import settings
from aiolock.cli.admin import HEAD, NUMBERS, SPARE, row
from aiolock.cli.exit_status import ended_by
from aiolock.cli.output import Output, cut, lay_out
from aiolock.cli.run.signals import LEAVE, SignalQueue, size, stop
from aiolock.client import Client
from aiolock.clock import system_clock
from aiolock.core.present import named
from aiolock.errors import BackendError
from aiolock.types import Holder, Kept, LockInfo

__all__ = ["changes", "picture", "watch"]

# --- changes


def changes(before: Iterable[LockInfo], after: Iterable[LockInfo]) -> Iterator[dict[str, Any]]:
    """Compare two lists of locks; yield ``released``, ``kept``, ``granted`` and ``waiting``, in order of names.

    ``kept`` is a hold that has begun to stay taken without a holder.

    ``waiting`` is the length of the queue, or the number of waiters in the processes of the holders, if either has changed.

    A hold is identified by its token, label and process. A hold that began *and* ended in between is missed.
    """
    old = {_key(info): info for info in before}
    new = {_key(info): info for info in after}
    for key in sorted(old.keys() | new.keys()):
        was, now = old.get(key), new.get(key)
        held, holds = _holders(was), _holders(now)
        for who, holder in held.items():
            if who not in holds:
                yield _event("released", key, holder, now)
        for kept in _begun(was, now):
            yield {
                "event": "kept",
                "name": key[0],
                "family": key[1],
                "label": kept.last_holder,
                "host": kept.host,
                "pid": kept.pid,
                "permits": kept.permits,
                "until": kept.until.isoformat(),
                **_waiting(now),
            }
        for who, holder in holds.items():
            if who not in held:
                yield _event("granted", key, holder, now)
        waited, waiting = _waiting(was), _waiting(now)
        # Not known counts as none.
        if any((waited[what] or 0) != (count or 0) for what, count in waiting.items()):
            yield {"event": "waiting", "name": key[0], "family": key[1], **waiting}


def _key(info: LockInfo) -> tuple[str, str]:
    return info.name, info.family.value


def _holders(info: LockInfo | None) -> dict[tuple[int, str], Holder]:
    return {} if info is None else {(holder.token, named(holder)): holder for holder in info.holders}


def _begun(was: LockInfo | None, now: LockInfo | None) -> list[Kept]:
    """Return what is kept now and was not before; its end, computed from what is left, is never quite the same twice."""
    known = Counter((named(one), one.permits) for one in (was.kept if was else ()))
    begun = []
    for one in now.kept if now else ():
        known[named(one), one.permits] -= 1
        if known[named(one), one.permits] < 0:
            begun.append(one)
    return begun


def _waiting(info: LockInfo | None) -> dict[str, int | None]:
    if info is None:
        return {"waiting": 0, "local_waiters": None}
    return {"waiting": len(info.waiters), "local_waiters": info.local_waiters}


def _event(what: str, key: tuple[str, str], holder: Holder, now: LockInfo | None) -> dict[str, Any]:
    return {
        "event": what,
        "name": key[0],
        "family": key[1],
        "label": holder.label,
        "host": holder.host,
        "pid": holder.pid,
        "token": holder.token or None,
        "mode": holder.mode,
        "permits": holder.permits,
        "since": holder.since.isoformat(),
        **_waiting(now),
    }


# --- watch


ENTER, LEAVE_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""Switch to the alternate screen without a cursor, and back."""

HOME, END_OF_LINE, END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
"""Overwriting the screen does not flicker, as clearing it first would."""


async def watch(options: argparse.Namespace, output: Output) -> int:
    """Print changes until a signal or Ctrl-C. Cancelling it restores the terminal and closes the client."""
    async with settings.connect(options) as client:
        if output.out.isatty() and not output.json and os.environ.get("TERM") != "dumb":
            return await _live(client, options, output)
        return await _stream(client, options, output)


async def _list(client: Client, pattern: str) -> tuple[list[LockInfo] | None, str]:
    try:
        return await client.locks(pattern), ""
    except BackendError as error:
        # An outage is shown, and ends.
        return None, str(error)


async def _stream(client: Client, options: argparse.Namespace, output: Output) -> int:
    seen: list[LockInfo] = []
    outage = ""
    # A failure of the first request ends the command.
    infos: list[LockInfo] | None = await client.locks(options.pattern)
    trouble = ""
    next_poll = system_clock()
    while True:
        at = {"at": datetime.now(UTC).isoformat(timespec="milliseconds")}
        if infos is not None:
            if outage:
                output.data({**at, "event": "reachable"})
            for change in changes(seen, infos):
                output.data({**at, **change})
            seen = infos
        elif not outage:
            output.data({**at, "event": "unreachable", "message": trouble})
        outage = trouble
        next_poll = max(system_clock(), next_poll + options.interval)
        await asyncio.sleep(next_poll - system_clock())
        infos, trouble = await _list(client, options.pattern)


# --- in a terminal


async def _live(client: Client, options: argparse.Namespace, output: Output) -> int:
    queue = SignalQueue()
    last: list[LockInfo] = await client.locks(options.pattern)
    trouble, next_poll = "", system_clock() + options.interval
    listing: asyncio.Task[tuple[list[LockInfo] | None, str]] | None = None
    with queue.listen(*LEAVE, Signals.SIGWINCH, Signals.SIGTSTP, Signals.SIGCONT):
        output.paint(ENTER)
        try:
            while True:
                _paint(output, options, last, trouble)
                # The answer to a request that is under way sets the event.
                await queue.wait(60.0 if listing else max(0.0, next_poll - system_clock()))
                for number in queue.taken():
                    if number is Signals.SIGINT:
                        return 0
                    if number in LEAVE:
                        raise ended_by(number)
                    if number is Signals.SIGTSTP:
                        # Ctrl-Z: stop with the terminal as it was before.
                        output.paint(LEAVE_SCREEN)
                        stop(job=False)
                        output.paint(ENTER)
                    elif number is Signals.SIGCONT:
                        # The shell has used the terminal.
                        output.paint(ENTER)
                if listing is not None and listing.done():
                    infos, trouble = listing.result()
                    last = last if infos is None else infos
                    next_poll, listing = system_clock() + options.interval, None
                elif listing is None and system_clock() >= next_poll:
                    listing = asyncio.create_task(_list(client, options.pattern))
                    queue.watch(listing)
        finally:
            output.paint(LEAVE_SCREEN)
            if listing is not None:
                listing.cancel()
                await asyncio.wait([listing])


def _paint(output: Output, options: argparse.Namespace, infos: Sequence[LockInfo], trouble: str) -> None:
    columns, rows = size(output.out)
    title = f"{settings.server(options)}  {settings.namespace(options)}  {options.pattern}"
    lines = picture(infos, title, trouble, columns, rows)
    styles = chain(("dim", "red" if trouble else "", "bold"), repeat(""))
    styled = [output.style(line, style) for line, style in zip(lines, styles, strict=False)]
    # A line break after the last line would scroll a full screen.
    output.paint(HOME + f"{END_OF_LINE}\n".join(styled) + END_OF_LINE + END_OF_SCREEN)


def picture(infos: Sequence[LockInfo], title: str, trouble: str, columns: int, rows: int) -> list[str]:
    """Return the lines of a screen, at most of that size."""
    held = sum(info.locked for info in infos)
    waiting = sum(len(info.waiters) for info in infos)
    now = datetime.now().astimezone()
    state = trouble or f"{held} held, {waiting} waiting   Ctrl-C ends   {now:%H:%M:%S}"
    room = max(0, rows - 3)
    # Locks with the longest queues are the interesting ones.
    order = sorted(infos, key=lambda info: (-len(info.waiters), info.name, info.family.value))
    shown = order if len(order) <= room else order[: max(0, room - 1)]
    table = lay_out([HEAD, *map(row, shown)], most=columns, right=NUMBERS, spare=SPARE)
    if len(shown) < len(infos):
        table.append(cut(f"… and {len(infos) - len(shown)} more", columns))
    return [cut(title, columns), cut(state, columns), *table][:rows]
