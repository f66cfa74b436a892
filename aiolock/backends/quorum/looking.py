"""What people ask of several servers: each is asked, and most have to answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from aiolock.backends.quorum.member import Member
from aiolock.backends.quorum.members import Members
from aiolock.backends.quorum.rules import combined, rotation
from aiolock.contract import Backend, Family, Finding, LockInfo
from aiolock.errors import BackendError
from aiolock.info import Level

__all__ = ["all_of", "findings", "seen"]

T = TypeVar("T")


async def all_of(members: Members, ask: Callable[[Backend], Awaitable[T]]) -> list[T]:
    """The answers of all servers that gave one, which must be most, in their order."""

    async def one(member: Member) -> T:
        member.check()
        return await member.hear(ask(member.backend))

    asked = [members.spawn(one(member), "aiolock-quorum-look") for member in members.all]
    # Who did not answer the last time is not waited for if the others are enough.
    vital = [
        task for task, member in zip(asked, members.all, strict=True) if member.open and not member.silent
    ]
    try:
        if len(vital) >= members.needed:
            await asyncio.wait(vital)
        if len([task for task in asked if task.done() and task.exception() is None]) < members.needed:
            await asyncio.wait(asked)
    finally:
        for task in asked:
            task.cancel()
    heard = [task for task in asked if task.done() and not task.cancelled()]
    errors = [error for task in heard if (error := task.exception()) is not None]
    for error in errors:
        if not isinstance(error, BackendError):
            raise error
    answers = [task.result() for task in heard if task.exception() is None]
    if len(answers) < members.needed:
        raise members.failure([error for error in errors if isinstance(error, BackendError)])
    return answers


async def seen(members: Members, name: str, family: Family) -> LockInfo:
    """Who is inside as most servers see it; who waits as the first one does, or others."""
    count, start = len(members.all), rotation(name, len(members.all))
    infos = await all_of(members, lambda backend: backend.inspect(name, family))
    # With some missing, nobody knows which is the first: the longest line is likely to be that of most.
    if len(infos) == count:
        infos = infos[start:] + infos[:start]
    else:
        infos.sort(key=lambda info: -len(info.waiters))
    return combined(infos, members.needed)


async def findings(members: Members) -> list[Finding]:
    """What each of them says of itself, and which are away."""
    asked = [members.spawn(_of_one(member), "aiolock-quorum-look") for member in members.all]
    try:
        await asyncio.wait(asked)
    finally:
        for one in asked:
            one.cancel()
    return [finding for one in asked for finding in one.result()]


async def _of_one(member: Member) -> list[Finding]:
    try:
        found = await member.backend.diagnose()
    except BackendError as error:
        found = [
            Finding(
                Level.ERROR, "connection", f"{error}", "bring it back: the others can lose fewer until then"
            )
        ]
    return [replace(finding, subject=f"{member!r} {finding.subject}") for finding in found]
