"""``aiolock ls``, ``inspect`` and ``force-release``; and which lock the options of a command mean."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from aiolock.cli import settings
from aiolock.cli.output import Output, clean
from aiolock.cli.statuses import NOT_ACQUIRED, Ended
from aiolock.cli.table import age, lay_out, seconds
from aiolock.client import Client
from aiolock.errors import ConfigError, UnsupportedKind, shorten
from aiolock.info import Holder, LockInfo, Waiting
from aiolock.kinds import MUTEX, READ, WRITE, Family, Kind, permits
from aiolock.lease import Lease
from aiolock.lock import Lock
from aiolock.semaphore import Semaphore

__all__ = [
    "HEAD",
    "NUMBERS",
    "SPARE",
    "as_json",
    "ask",
    "choose",
    "force_release",
    "inspect",
    "kind_of",
    "ls",
    "row",
]

HEAD = ("NAME", "KIND", "HOLDER", "TOKEN", "HELD", "TTL LEFT", "WAITING")
NUMBERS = (3, 4, 5, 6)
"""The columns that stand on the right."""

SPARE = (3, 5, 1, 4)
"""The columns that a narrow terminal can do without."""

LOOKED_AT = (Family.LOCK, Family.RW, Family.SEMAPHORE, Family.ELECTION)
"""The families that share a name, and that somebody who names only that may mean."""


def kind_of(options: argparse.Namespace) -> Kind:
    """Who may be inside together, as ``-s``, ``-x`` and ``--permits`` say."""
    if options.permits is not None:
        return permits(*options.permits)
    if options.shared:
        return READ
    return WRITE if options.exclusive else MUTEX


def choose(client: Client, options: argparse.Namespace) -> Lock:
    """The lock that ``run`` is about."""
    kind = kind_of(options)
    return _of_family(client, options.name, kind.family, shared=options.shared, limit=kind.limit)


async def ask(lock: Lock, options: argparse.Namespace) -> Lease:
    """Acquire it, for as long as the options say and with as many permits."""
    if isinstance(lock, Semaphore):
        return await lock.acquire(options.wait, permits=kind_of(options).permits)
    return await lock.acquire(options.wait)


def _of_family(client: Client, name: str, family: Family, *, shared: bool = True, limit: int = 1) -> Lock:
    match family:
        case Family.RW:
            return client.rwlock(name).read() if shared else client.rwlock(name).write()
        case Family.SEMAPHORE:
            return client.semaphore(name, limit)
        case Family.ELECTION:
            return client.election(name).campaign()
    return client.lock(name)


# --- what people and programs are shown


def as_json(info: LockInfo) -> dict[str, Any]:
    """A lock as JSON."""
    return {
        "name": info.name,
        "family": info.family.value,
        "limit": info.limit,
        "locked": info.locked,
        "holders": [_holder(holder) for holder in info.holders],
        "waiters": [_waiting(waiting) for waiting in info.waiters],
    }


def _holder(holder: Holder) -> dict[str, Any]:
    return {
        "label": holder.label,
        "token": holder.token,
        "since": holder.since.isoformat(),
        "remaining": round(holder.remaining, 3),
        "mode": holder.mode,
        "permits": holder.permits,
    }


def _waiting(waiting: Waiting) -> dict[str, Any]:
    return {"label": waiting.label, "mode": waiting.mode, "permits": waiting.permits}


def row(info: LockInfo) -> tuple[str, ...]:
    """A lock as a row of a table."""
    if not info.holders:
        return clean(info.name), _kind(info), "nobody", "", "", "", str(len(info.waiters))
    first = info.holders[0]
    more = f" and {len(info.holders) - 1} more" if len(info.holders) > 1 else ""
    return (
        clean(info.name),
        _kind(info),
        clean(first.label) + more,
        str(first.token),
        seconds(age(first)),
        seconds(first.remaining),
        str(len(info.waiters)),
    )


def _kind(info: LockInfo) -> str:
    if info.family is Family.SEMAPHORE:
        out = sum(holder.permits for holder in info.holders)
        return f"{out} of {'?' if info.limit is None else info.limit} permits"
    modes = {holder.mode for holder in info.holders} or {waiting.mode for waiting in info.waiters}
    return modes.pop() if info.family is Family.RW and len(modes) == 1 else info.family.value


# --- the commands


async def ls(options: argparse.Namespace, output: Output) -> int:
    """Every lock that is held or waited for."""
    async with settings.connect(options) as client:
        infos = await client.locks(options.pattern)
    if output.json:
        output.document([as_json(info) for info in infos])
    elif infos:
        head, *lines = lay_out([HEAD, *map(row, infos)], right=NUMBERS)
        output.line(output.style(head, "bold"))
        for line in lines:
            output.line(line)
    elif output.chatty:
        output.message(f"no lock that matches {options.pattern!r} is held or waited for")
    return 0


def _candidates(client: Client, options: argparse.Namespace) -> list[Lock]:
    """The lock of the family that was asked for, or those of all families of that name."""
    families = LOOKED_AT if options.family is None else [Family(options.family)]
    return [_of_family(client, options.name, family) for family in families]


async def _in_use(locks: Sequence[Lock]) -> list[tuple[Lock, LockInfo]]:
    """Those of them that somebody holds or waits for."""
    found = []
    for lock in locks:
        try:
            info = await lock.inspect()
        except UnsupportedKind:
            if len(locks) == 1:
                raise
            continue
        if info.holders or info.waiters:
            found.append((lock, info))
    return found


async def inspect(options: argparse.Namespace, output: Output) -> int:
    """Who holds a lock, and who waits for it in which order; status 1 if nobody holds it."""
    client = settings.connect(options)
    candidates = _candidates(client, options)
    async with client:
        found = [info for _, info in await _in_use(candidates)]
    status = 0 if any(info.holders for info in found) else NOT_ACQUIRED
    if output.json:
        output.document({"name": options.name, "locks": [as_json(info) for info in found]})
        return status
    if not found:
        output.line(f"{clean(options.name)}: nobody holds it and nobody waits")
    for info in found:
        for line in _describe(info, output):
            output.line(line)
    return status


def _describe(info: LockInfo, output: Output) -> list[str]:
    lines = [f"{output.style(clean(info.name), 'bold')}  {_kind(info)}"]
    for holder in info.holders:
        what = f"{holder.permits} permits, " if holder.permits > 1 else ""
        lines.append(
            f"  held by {clean(holder.label)} ({what}token {holder.token}) for {seconds(age(holder))}, "
            f"since {holder.since.astimezone():%Y-%m-%d %H:%M:%S}; without renewal it ends in {seconds(holder.remaining)}"
        )
    if not info.holders:
        lines.append("  held by nobody")
    for place, waiting in enumerate(info.waiters, start=1):
        what = f" ({waiting.permits} permits)" if waiting.permits > 1 else ""
        lines.append(f"  {place}. in line: {clean(waiting.label)}{what}")
    return lines


async def force_release(options: argparse.Namespace, output: Output) -> int:
    """Take a lock from whoever holds it."""
    client = settings.connect(options)
    candidates = _candidates(client, options)
    async with client:
        held = [(lock, info) for lock, info in await _in_use(candidates) if info.holders]
        if not held:
            raise Ended(NOT_ACQUIRED, f"nobody holds {shorten(options.name)}")
        if len(held) > 1:
            families = ", ".join(info.family.value for _, info in held)
            raise ConfigError(
                f"{shorten(options.name)} names several locks that are held ({families}): say which one with --family"
            )
        [(lock, info)] = held
        if not options.yes and sys.stdin.isatty() and not await _agreed(info, output):
            raise Ended(NOT_ACQUIRED, "nothing was done")
        taken = await lock.force_release()
    if not taken:
        raise Ended(NOT_ACQUIRED, f"nobody holds {shorten(options.name)} any more")
    if output.json:
        output.document({"released": True, **as_json(info)})
    else:
        who = ", ".join(clean(holder.label) for holder in info.holders)
        output.line(f"{clean(options.name)} was taken from {who}, who will hear of it")
    return 0


async def _agreed(info: LockInfo, output: Output) -> bool:
    who = ", ".join(f"{clean(holder.label)} ({seconds(age(holder))})" for holder in info.holders)
    question = f"{clean(info.name)} is held by {who}, who may still be at work when the next one begins.\nTake it away? [y/N] "
    try:
        # Where the answer is typed: stderr may be a file, or be JSON.
        with open("/dev/tty", "w", errors="backslashreplace") as terminal:  # noqa: PTH123, ASYNC230 - it is no file
            terminal.write(question)
    except OSError:
        output.say(question)
    return (await _answer()).strip().lower() in ("y", "yes")


async def _answer() -> str:
    """The next line that is typed. Cancelling it reads nothing: a thread that reads could not be stopped."""
    loop = asyncio.get_running_loop()
    typed = loop.create_future()
    fd = sys.stdin.fileno()

    def tell() -> None:
        if not typed.done():
            typed.set_result(None)

    loop.add_reader(fd, tell)
    try:
        await typed
    finally:
        loop.remove_reader(fd)
    return sys.stdin.readline()
