"""Waiting for the lock: signals are heard meanwhile, and a terminal is shown how it goes."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from aiolock.cli.inbox import LEAVE, Inbox
from aiolock.cli.inner_runs import OuterHold
from aiolock.cli.output import Output, clean
from aiolock.cli.statuses import ended_by
from aiolock.cli.table import age, cut, seconds
from aiolock.cli.terminal import size
from aiolock.clock import system_clock
from aiolock.errors import LockError, shorten
from aiolock.info import LockInfo
from aiolock.lease import Lease
from aiolock.lock import Lock

__all__ = ["progress", "wait_for"]

Acquired = TypeVar("Acquired", Lease, OuterHold | None)

PATIENCE = 0.3
"""Seconds of waiting of which nobody needs to hear."""

LOOK = 1.0
"""Seconds between looks at the queue."""


async def wait_for(
    acquiring: asyncio.Task[Acquired], lock: Lock | None, label: str, inbox: Inbox, output: Output
) -> Acquired:
    """The lease, when it is there; raises what acquiring raises, and :class:`Ended` if a signal comes first.

    With a lock, a terminal is shown who has it.

    Whoever leaves early has left the queue when this ends.
    """
    showing = asyncio.create_task(_show(lock, label, output)) if output.live and lock is not None else None
    acquiring.add_done_callback(lambda _: inbox.wake.set())
    try:
        while not acquiring.done():
            await inbox.wait(60.0)
            while (number := inbox.take()) is not None:
                if number in LEAVE:
                    raise ended_by(number)
        return acquiring.result()
    except BaseException:
        await _leave(acquiring)
        raise
    finally:
        if showing is not None:
            showing.cancel()
            await asyncio.wait([showing])


async def _leave(acquiring: asyncio.Task[Acquired]) -> None:
    acquiring.cancel()
    await asyncio.wait([acquiring])
    if not acquiring.cancelled() and acquiring.exception() is None:
        # It was granted at the same moment.
        lease = acquiring.result()
        if lease is not None:
            await lease.release()


async def _show(lock: Lock, label: str, output: Output) -> None:
    start = system_clock()
    await asyncio.sleep(PATIENCE)
    try:
        while True:
            try:
                text = progress(await lock.inspect(), label, system_clock() - start)
            except LockError:
                text = f"waiting for {shorten(lock.name)} for {seconds(system_clock() - start)}: the server does not answer"
            columns = size(output.err).columns
            output.say(f"\r\x1b[K{output.style(cut(text, columns - 1), 'dim', output.err)}")
            await asyncio.sleep(LOOK)
    finally:
        output.say("\r\x1b[K")


def progress(info: LockInfo, label: str, waited: float) -> str:
    """How the waiting goes, on one line."""
    text = f"waiting for {shorten(info.name)} for {seconds(waited)}"
    labels = [waiting.label for waiting in info.waiters]
    if label in labels:
        text += f", place {labels.index(label) + 1} of {len(labels)}"
    if info.holders:
        first = info.holders[0]
        more = f" and {len(info.holders) - 1} more" if len(info.holders) > 1 else ""
        text += f"; held by {clean(first.label)}{more} for {seconds(age(first))}"
    return text
