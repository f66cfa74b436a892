"""Commands `ls`, `inspect`, `force-release`, `schema` and `purge`."""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from aiolock.cli import settings
from aiolock.cli.exit_status import NOT_ACQUIRED, Ended
from aiolock.cli.output import (
    Output,
    age,
    clean,
    holder_of,
    kept_after,
    lay_out,
    seconds,
    state_of,
    time_left,
)
from aiolock.core.capabilities import UnreadableLock
from aiolock.core.present import has_token, named
from aiolock.errors import ConfigError, UnsupportedKind, shorten
from aiolock.lock import Lock
from aiolock.types import LockInfo

__all__ = ["HEAD", "NUMBERS", "SPARE", "force_release", "inspect", "ls", "purge", "row", "schema"]

HEAD = ("NAME", "KIND", "HOLDER", "TOKEN", "HELD", "TTL LEFT", "WAITING", "LOCAL")
NUMBERS = (3, 4, 5, 6, 7)
"""The columns that are aligned to the right."""

SPARE = (3, 5, 7, 1, 4)
"""The columns that are left out on a narrow terminal, in this order."""

# --- views of a lock


def _as_json(info: LockInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "family": info.family.value,
        "limit": info.limit,
        "locked": info.locked,
        "holders": [
            {
                "label": holder.label,
                "host": holder.host,
                "pid": holder.pid,
                "token": holder.token or None,
                "since": holder.since.isoformat(),
                "remaining": None if holder.remaining == math.inf else round(holder.remaining, 3),
                "mode": holder.mode,
                "permits": holder.permits,
                "local_waiters": holder.local_waiters,
            }
            for holder in info.holders
        ],
        "kept": [
            {
                "until": kept.until.isoformat(),
                "permits": kept.permits,
                "last_holder": kept.last_holder,
                "host": kept.host,
                "pid": kept.pid,
            }
            for kept in info.kept
        ],
        "waiters": [asdict(waiting) for waiting in info.waiters],
        "local_waiters": info.local_waiters,
        **({"unreadable": info.unreadable} if info.unreadable else {}),
    }


def row(info: LockInfo) -> tuple[str, ...]:
    """Return a lock as a row of the table."""
    name, kind, waiting = clean(info.name), _kind(info), str(len(info.waiters))
    if not info.holders:
        if info.kept:
            left = seconds(max(map(time_left, info.kept)))
            return name, kind, kept_after(info), "", "", left, waiting, ""
        return name, kind, "?" if info.unreadable else "-", "", "", "", waiting, ""
    first = info.holders[0]
    return (
        name,
        kind,
        holder_of(info),
        str(first.token or "-"),
        seconds(age(first)),
        seconds(first.remaining),
        waiting,
        "-" if info.local_waiters is None else str(info.local_waiters),
    )


def _kind(info: LockInfo) -> str:
    if info.family.counted:
        out = info.permits
        paused = ", paused" if info.limit == 0 else ""
        return f"{out} of {'?' if info.limit is None else info.limit} permits{paused}"
    modes = {holder.mode for holder in info.holders} or {waiting.mode for waiting in info.waiters}
    return modes.pop() if info.family.shareable and len(modes) == 1 else info.family.value


# --- the commands


async def ls(options: argparse.Namespace, output: Output) -> int:
    """List every lock that is held or waited for. Cancelling it closes the client, and changes nothing."""
    async with settings.connect(options) as client:
        infos = await client.locks(options.pattern)
    if output.json:
        output.document([_as_json(info) for info in infos])
    elif infos:
        head, *lines = lay_out([HEAD, *map(row, infos)], right=NUMBERS)
        output.line(output.style(head, "bold"))
        for line in lines:
            output.line(line)
        for info in infos:
            if info.unreadable:
                output.line(f"? {clean(info.unreadable)}")
    if not infos:
        what = "no lock" if options.pattern == "*" else f"no lock that matches {options.pattern!r}"
        output.message(
            f"{what} in namespace {settings.namespace(options)!r} of {settings.server(options)} is held or waited for",
            event="empty",
            namespace=settings.namespace(options),
            server=settings.server(options),
        )
    return 0


async def _in_use(locks: Sequence[Lock]) -> list[tuple[Lock, LockInfo]]:
    """Return the locks that are held or waited for."""
    found = []
    for lock in locks:
        try:
            info = await lock.inspect()
        except UnsupportedKind:
            if len(locks) == 1:
                raise
            continue
        except UnreadableLock as error:
            # A call that replaces it may succeed.
            family = lock._request.kind.family  # noqa: SLF001 - not for programs
            info = LockInfo(lock.name, (), (), family, unreadable=str(error))
        if info.locked or info.waiters:
            found.append((lock, info))
    return found


async def inspect(options: argparse.Namespace, output: Output) -> int:
    """Show the holders and the queue of a lock; status 1 if it is not held.

    Cancelling it closes the client, and changes nothing.
    """
    client = settings.connect(options)
    candidates = settings.locks(client, options)
    async with client:
        found = [info for _, info in await _in_use(candidates)]
    status = 0 if any(info.locked for info in found) else NOT_ACQUIRED
    if output.json:
        output.document({"name": options.name, "locks": [_as_json(info) for info in found]})
        return status
    if not found:
        output.line(f"{clean(options.name)}: not held, and nothing waits for it")
    for info in found:
        for line in _describe(info, output):
            output.line(line)
    return status


def _describe(info: LockInfo, output: Output) -> list[str]:
    lines = [f"{output.style(clean(info.name), 'bold')}  {_kind(info)}"]
    for holder in info.holders:
        what = f"{holder.permits} permits, " if holder.permits > 1 else ""
        ends = "never" if holder.remaining == math.inf else f"in {seconds(holder.remaining)}"
        lines.append(
            f"  held by {clean(named(holder))} ({what}token {holder.token or '-'}) for {seconds(age(holder))}, "
            f"since {holder.since.astimezone():%Y-%m-%d %H:%M:%S}; without renewal it ends {ends}; "
            f"waiting in its process: {'-' if holder.local_waiters is None else holder.local_waiters}"
        )
    for kept in info.kept:
        what = f"{kept.permits} permits are kept" if kept.permits > 1 else "kept"
        lines.append(
            f"  {what} without a holder until {kept.until.astimezone():%Y-%m-%d %H:%M:%S}, for {seconds(time_left(kept))} more; "
            f"released by {clean(named(kept))}"
        )
    if not info.holders and not info.kept:
        lines.append(f"  {clean(info.unreadable) or 'not held'}")
    for position, waiting in enumerate(info.waiters, start=1):
        what = f" ({waiting.permits} permits)" if waiting.permits > 1 else ""
        lines.append(f"  {position}. in the queue: {clean(named(waiting))}{what}")
    return lines


async def force_release(options: argparse.Namespace, output: Output) -> int:
    """Take a lock away from its holders.

    Cancelling it closes the client, and leaves open whether the lock was taken away.
    """
    client, token = settings.connect(options), options.token
    candidates = settings.locks(client, options)
    candidates[0]._check_force(token)  # noqa: SLF001 - not for programs, which have the lock alone
    async with client:
        held = [(lock, info) for lock, info in await _in_use(candidates) if info.locked]
        if token is not None:
            seen, held = held, [(lock, one) for lock, info in held if (one := _under(info, token)).holders]
            if not held:
                raise Ended(NOT_ACQUIRED, _over(options.name, token, [info for _, info in seen]))
        if not held:
            raise Ended(NOT_ACQUIRED, f"{shorten(options.name)} is not held")
        if len(held) > 1:
            families = ", ".join(info.family.value for _, info in held)
            raise ConfigError(
                f"{shorten(options.name)} names several locks that are held ({families}): say which one with --family"
            )
        [(lock, info)] = held
        if not options.yes and sys.stdin.isatty() and not await _agreed(info, output):
            raise Ended(NOT_ACQUIRED, "nothing was done")
        if not await lock.force_release(token):
            if token is not None:
                raise Ended(NOT_ACQUIRED, _over(options.name, token, [await lock.inspect()]))
            raise Ended(NOT_ACQUIRED, f"{shorten(options.name)} is not held any more")
    if output.json:
        output.document({"released": True, **_as_json(info)})
    else:
        who = ", ".join(clean(named(holder)) for holder in info.holders)
        if who or not info.kept:
            holders = f"{who}, which is notified" if who else "holders that cannot be read"
            output.line(f"{clean(options.name)} was taken from {holders}")
        else:
            output.line(f"{clean(options.name)} was {kept_after(info)}, and is free")
    return 0


def _under(info: LockInfo, token: int) -> LockInfo:
    """Return a lock with no more than the hold that has a token."""
    return replace(info, holders=tuple(one for one in info.holders if has_token(one, token)), kept=())


def _over(name: str, token: int, infos: Sequence[LockInfo]) -> str:
    """Say that no hold has a token any more, and who holds the lock now."""
    now = [state_of(info) for info in infos if info.locked]
    return f"nothing was done: no holder of {shorten(name)} has token {token}; it is {' and '.join(now) or 'not held'}"


async def _agreed(info: LockInfo, output: Output) -> bool:
    who = ", ".join(f"{clean(named(holder))} ({seconds(age(holder))})" for holder in info.holders)
    if who or not info.kept:
        who = f"held by {who or 'holders that cannot be read'}, which may still be at work when the next holder begins"
    else:
        who = f"{kept_after(info)}, so that nothing takes it again before its time"
    question = f"{clean(info.name)} is {who}.\nTake it away? [y/N] "
    try:
        # The terminal, because stderr may be a file, or be JSON.
        with open("/dev/tty", "w", errors="backslashreplace") as terminal:  # noqa: PTH123, ASYNC230 - it is no file
            terminal.write(question)
    except OSError:
        output.say(question)
    return (await _answer()).strip().lower() in ("y", "yes")


async def _answer() -> str:
    """Read a line without a thread, which could not be stopped. Cancelling it reads nothing."""
    loop = asyncio.get_running_loop()
    typed = loop.create_future()
    fd = sys.stdin.fileno()

    def on_input() -> None:
        if not typed.done():
            typed.set_result(None)

    loop.add_reader(fd, on_input)
    try:
        await typed
    finally:
        loop.remove_reader(fd)
    return sys.stdin.readline()


async def schema(options: argparse.Namespace, output: Output) -> int:
    """Print the tables that a server needs."""
    # Imported here: the other commands of this module start sooner without it.
    from aiolock import mysql, postgresql  # noqa: PLC0415

    module = {"mysql": mysql, "postgresql": postgresql}[options.server]
    text = module.ddl(options.table).rstrip()
    if output.json:
        output.document({"server": options.server, "table": options.table, "statements": text})
    else:
        output.line(text)
    return 0


async def purge(options: argparse.Namespace, output: Output) -> int:
    """Delete unused rows, and print their number. Cancelling it closes the client, and leaves the rest of the rows."""
    from aiolock import _sql  # noqa: PLC0415 - as above

    client = settings.connect(options)
    backend = _sql.purging(client)
    backend.check_purge(options.idle)
    async with client:
        gone = await _sql.purge(client, idle=options.idle)
    if output.json:
        output.document({"namespace": settings.namespace(options), "idle": options.idle, "purged": gone})
    else:
        count = f"1 {backend.purges}" if gone == 1 else f"{gone} {backend.purges}s"
        output.line(
            f"purged from {settings.server(options)}: {count} that had not been used for {options.idle:.15g} s"
        )
    return 0
