"""Members of a quorum: opening, asking and closing several servers, and the detection of two addresses of one server."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, TypeVar

from aiolock.backends.quorum.rules import lacking, majority, promised, rotation
from aiolock.core.backend import Backend, Claim, Request, Settings
from aiolock.core.capabilities import Administration
from aiolock.core.logs import Log, get_logger
from aiolock.core.tasks import Backoff, TaskSet, end
from aiolock.errors import (
    BackendError,
    BackendRefused,
    BackendUnavailable,
    ConfigError,
    UnsafeBackend,
)
from aiolock.types import MUTEX

__all__ = ["Member", "Members"]

T = TypeVar("T")

log: Log = get_logger("aiolock")

RETRY = (0.5, 5.0)
"""Seconds between attempts to open a member that could not be reached: at first, and at most."""

FEWEST = 3
"""With two members, the loss of either would stop the quorum."""

CLEAN_UP = 0.1
"""Seconds that the release of the locks of the search for duplicates may take before it goes on in the background."""


class Member:
    """One server of a quorum, which may not be reachable yet."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.open = False
        """True once its backend was opened; from then on the backend reconnects by itself."""
        self.failure: BackendError | None = None
        """The error of the last attempt to open it."""
        self.silent = False
        """True if the last request was not answered."""

    def __repr__(self) -> str:
        return self.backend.address or repr(self.backend)

    async def ask(self, request: Callable[[], Awaitable[T]], *, proves: bool = True) -> T:
        """Return the answer to a request, and record whether there was one; raise if the member was never reached.

        ``proves`` is false for a request that may succeed without a question to the server. Cancelling it is cancelling
        the request.
        """
        if not self.open:
            raise BackendUnavailable(f"{self!r} could not be reached yet: {self.failure}") from self.failure
        try:
            answer = await request()
        except BackendError as error:
            self.silent = isinstance(error, BackendUnavailable)
            raise
        self.silent = self.silent and not proves
        return answer

    async def try_to_open(self, check: Callable[[], Awaitable[None]] | None = None) -> None:
        """Open it, or record an error that a later attempt may not have. Cancelling it leaves nothing open.

        ``check`` raises if the opened member may not take part; the member is not open before.
        """
        try:
            await self.backend.open()
            if check is not None:
                await check()
        except BaseException as error:
            await self.backend.aclose()
            if not isinstance(error, BackendError):
                raise
            self.failure = error
            if not error.retryable:
                raise
        else:
            self.open, self.silent, self.failure = True, False, None


class Members:
    """All servers of a quorum, and the tasks in which they are asked: the context of its claims."""

    settings: Settings
    """The settings of each member; its command timeout is half of the client's."""
    command_timeout: float
    """The command timeout of the client, in seconds."""
    random: Random
    """The client's source of pauses."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        if not isinstance(backends, list | tuple) or not all(isinstance(one, Backend) for one in backends):
            raise ConfigError("members must be a list of backends, such as RedisBackend")
        if len(backends) < FEWEST:
            raise ConfigError(
                f"a quorum needs at least {FEWEST} servers, so that it works without one of them, not {len(backends)}"
            )
        if len({id(one) for one in backends}) < len(backends):
            raise ConfigError("a quorum needs a backend of its own for each server: one is named twice")
        self.all = [Member(one) for one in backends]
        self.needed = majority(len(backends))
        """The number of votes that is more than half."""
        self.tasks: TaskSet = TaskSet(awaited=True)
        self.leaving: dict[asyncio.Task[Any], float] = {}
        """The tasks that release something, each with the time when it began."""

    def __repr__(self) -> str:
        return f"<quorum of {', '.join(map(repr, getattr(self, 'all', ())))}>"

    def bind(self, settings: Settings) -> None:
        """Give each member half of the time, so that the rest is left to act on its silence."""
        self._required = settings.require
        self.command_timeout, self.random = settings.command_timeout, settings.random
        self.settings = replace(settings, command_timeout=settings.command_timeout / 2, require=frozenset())
        for member in self.all:
            member.backend.bind(self.settings)

    def order(self, name: str) -> list[Member]:
        """Return all members, the one that decides about the lock ``name`` first."""
        first = rotation(name, len(self.all))
        return self.all[first:] + self.all[:first]

    # --- opening and closing

    async def open(self, opened: Callable[[Member], None]) -> frozenset[str]:
        """Open the members that can be reached, which must be a majority; go on trying the others in the background.

        Returns the capabilities of the quorum. ``opened`` is called with each member, also with those that come later.
        Cancelling it leaves members that were opened to :meth:`aclose`.
        """
        tries = [self.tasks.spawn(member.try_to_open(), "aiolock-quorum-open") for member in self.all]
        try:
            await asyncio.wait(tries)
        finally:
            await end(tries)
        for one in tries:
            # An error that no later attempt avoids is in the address of that member, or in its rights.
            one.result()
        reached = [member for member in self.all if member.open]
        if len(reached) < self.needed:
            raise self.failure([member.failure for member in self.all if member.failure is not None])
        await self._check_duplicates(reached)
        for member in self.all:
            if member.open:
                opened(member)
            else:
                log.warning("%r cannot be reached, going on without it: %s", member, member.failure)
                self.tasks.spawn(self._open_later(member, opened), "aiolock-quorum-open")
        return promised([member.backend.capabilities for member in reached])

    async def _open_later(self, member: Member, opened: Callable[[Member], None]) -> None:
        """Retry until the member is open, or until it is found that it can never take part."""

        async def check() -> None:
            if missing := lacking(self._required, member.backend.capabilities):
                raise UnsafeBackend(f"{member!r} does not promise {', '.join(sorted(missing))}")
            await self._check_duplicates([*(other for other in self.all if other.open), member])

        backoff = Backoff(self.random, *RETRY)
        while not member.open:
            await backoff.pause()
            before = str(member.failure)
            try:
                await member.try_to_open(check)
            except BackendError as error:
                # An operator can remove the cause, so go on trying.
                if str(error) != before:
                    log.warning("%r does not take part: %s", member, error)
            except ConfigError as error:
                extra = {"member": repr(member)}
                log.error("%r will not take part: %s", member, error, extra=extra)  # noqa: TRY400 - the traceback says nothing more
                return
        opened(member)

    async def _check_duplicates(self, members: Sequence[Member]) -> None:
        """Raise :class:`ConfigError` if two of these reached members are one server, which would have two votes.

        A lock of a random name is requested from all of them at once: a member that refuses has given it to another one.
        Several databases of one server count as several servers here. A member that stays silent passes. Cancelling it has the
        locks released in the background.
        """
        name = f"aiolock-quorum-{secrets.token_hex(16)}"
        claims = [
            member.backend.claim(Request(name, MUTEX, self.settings.ttl, label=str(number), fair=True))
            for number, member in enumerate(members)
        ]
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.settings.command_timeout):
                    await _find_duplicates(name, members, claims)
        finally:
            leaving = [self.leave(_release(claim)) for claim in claims]
            await asyncio.wait(leaving, timeout=CLEAN_UP)

    async def settle(self, timeout: float) -> None:
        """Wait for the releases in the background, at most ``timeout`` seconds, and a command timeout for each.

        Cancelling it ends the wait only.
        """
        now = self.settings.clock()
        limits = {task: since + self.settings.command_timeout - now for task, since in self.leaving.items()}
        limit = min(timeout, max(limits.values(), default=0.0))
        if limit > 0:
            await asyncio.wait(limits, timeout=limit)

    async def aclose(self) -> None:
        """End all tasks and close every member.

        Cancelling it leaves the members open, for another call, or lets the closing that has begun go on.
        """
        await end(self.tasks)
        closing = [asyncio.ensure_future(member.backend.aclose()) for member in self.all if member.open]
        for member in self.all:
            member.open = False
        if closing:
            await asyncio.wait(closing)

    # --- tasks

    def leave(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Release something in the background by ``work``."""
        task = self.tasks.spawn(work, "aiolock-quorum-clean-up")
        self.leaving[task] = self.settings.clock()
        task.add_done_callback(self.leaving.pop)
        return task

    async def until(
        self, condition: Callable[[], bool], tasks: Collection[asyncio.Task[Any]], end: float = math.inf
    ) -> bool:
        """Wait for ``condition``, which is tested as the tasks end; return False if they all end before, or at ``end``.

        Cancelling it ends the wait only.
        """
        while not condition():
            pending = [task for task in tasks if not task.done()]
            seconds = end - self.settings.clock()
            if not pending or seconds <= 0:
                return False
            timeout = seconds if seconds < math.inf else None
            await asyncio.wait(pending, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        return True

    # --- asking

    async def ask_all(self, ask: Callable[[Backend], Awaitable[T]]) -> list[T]:
        """Return the answers of all members that gave one, in their order; raise if they are no majority.

        Cancelling it cancels the requests.
        """
        asked = [
            self.tasks.spawn(member.ask(partial(ask, member.backend)), "aiolock-quorum-ask")
            for member in self.all
        ]
        # Members that were silent the last time are not waited for if the others are enough.
        vital = [
            task for task, member in zip(asked, self.all, strict=True) if member.open and not member.silent
        ]
        try:
            if len(vital) >= self.needed:
                await asyncio.wait(vital)
            if len([task for task in asked if task.done() and task.exception() is None]) < self.needed:
                await asyncio.wait(asked)
        finally:
            for task in asked:
                task.cancel()
        answers, errors = [], []
        for task in asked:
            if not task.done() or task.cancelled():
                continue
            if (error := task.exception()) is None:
                answers.append(task.result())
            elif isinstance(error, BackendError):
                errors.append(error)
            else:
                raise error
        if len(answers) < self.needed:
            raise self.failure(errors)
        return answers

    def failure(self, errors: Sequence[Exception]) -> BackendError:
        """Return the error for a majority that cannot be asked, with the reasons."""
        refused = errors and all(isinstance(one, BackendRefused | UnsafeBackend) for one in errors)
        why = f": {'; '.join(dict.fromkeys(map(str, errors)))}" if errors else ""
        failure = (BackendRefused if refused else BackendUnavailable)(
            f"{len(errors)} of {len(self.all)} servers cannot be asked, and {self.needed} are needed{why}",
            retryable=not errors or any(getattr(one, "retryable", True) for one in errors),
        )
        failure.__cause__ = errors[0] if errors else None
        return failure


async def _find_duplicates(name: str, members: Sequence[Member], claims: Sequence[Claim]) -> None:
    answers = await asyncio.gather(*(claim.acquire(wait=False) for claim in claims), return_exceptions=True)
    for member, answer in zip(members, answers, strict=True):
        if answer is None:
            info = await Administration.of(member.backend, "inspection").inspect(name, MUTEX.family)
            for holder in info.holders:
                raise ConfigError(
                    "a quorum is made of independent servers, but "
                    f"{members[int(holder.label)]!r} and {member!r} are the same one"
                )


async def _release(claim: Claim) -> None:
    await asyncio.gather(claim.release(), return_exceptions=True)
