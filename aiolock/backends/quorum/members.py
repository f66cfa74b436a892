"""All servers of a quorum: opening and closing them, the tasks in which they are asked, and what to say when too few answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from random import Random
from typing import Any, TypeVar

from aiolock.backends.quorum.member import Member
from aiolock.backends.quorum.rules import lacking, majority, promised, rotation
from aiolock.backends.quorum.twins import check_twins
from aiolock.contract import Backend, Settings
from aiolock.errors import (
    BackendError,
    BackendRefused,
    BackendUnavailable,
    ConfigError,
    UnsafeBackend,
    shorten,
)
from aiolock.logs import Log, get_logger
from aiolock.tasks import start

__all__ = ["Members"]

log: Log = get_logger("aiolock")

T = TypeVar("T")

FEWEST = 3
"""With two servers, each of them would be able to stop everything."""


class Members:
    """Three servers or more."""

    settings: Settings
    """Those of each of them."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        if not isinstance(backends, list | tuple) or not all(isinstance(one, Backend) for one in backends):
            raise ConfigError(f"members must be a list of backends, not {shorten(backends)}")
        if len(backends) < FEWEST:
            raise ConfigError(
                f"a quorum needs at least {FEWEST} servers, so that it works without one of them, not {len(backends)}"
            )
        if len({id(one) for one in backends}) < len(backends):
            raise ConfigError("a quorum needs a backend of its own for each server: one is named twice")
        self.all = [Member(one) for one in backends]
        self.needed = majority(len(backends))
        """How many votes are more than half."""
        self.random = Random()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.leaving: dict[asyncio.Task[Any], float] = {}
        """What gives something back, and since when."""

    def __repr__(self) -> str:
        return ", ".join(map(repr, self.all))

    def bind(self, settings: Settings) -> None:
        """Each server gets half of the time, so that there is some left for what its silence means."""
        self._required = settings.require
        self.settings = replace(settings, command_timeout=settings.command_timeout / 2, require=frozenset())
        for member in self.all:
            member.backend.bind(self.settings)

    def order(self, name: str) -> list[Member]:
        """All of them, the one that decides about that lock first."""
        start = rotation(name, len(self.all))
        return self.all[start:] + self.all[:start]

    # --- opening and closing

    async def open(self, opened: Callable[[Member], None]) -> frozenset[str]:
        """Open those that can be reached, which must be most; the others are tried again until they are there.

        What they promise together. ``opened`` is called with each, also with those that come later.
        """
        tries = [self.spawn(member.try_to_open(), "aiolock-quorum-open") for member in self.all]
        try:
            await asyncio.wait(tries)
        finally:
            for one in tries:
                one.cancel()
            await asyncio.wait(tries)
        for one in tries:
            # What nobody can retry is an error in the address of that server, or in its rights.
            one.result()
        there = [member for member in self.all if member.open]
        if len(there) < self.needed:
            raise self.failure([member.failure for member in self.all if member.failure is not None])
        await self._check_twins(there)
        for member in self.all:
            if member.open:
                opened(member)
            else:
                log.warning("%r cannot be reached, going on without it: %s", member, member.failure)
                self.spawn(self._open_later(member, opened), "aiolock-quorum-open")
        return promised([member.backend.capabilities for member in there])

    async def _open_later(self, member: Member, opened: Callable[[Member], None]) -> None:
        async def suits() -> None:
            missing = lacking(self._required, member.backend.capabilities)
            if missing:
                raise UnsafeBackend(f"{member!r} does not promise {', '.join(sorted(missing))}")
            await self._check_twins([*(other for other in self.all if other.open), member])

        await member.open_later(self.random, suits)
        if member.open:
            opened(member)

    async def _check_twins(self, members: Sequence[Member]) -> None:
        settings = self.settings
        backends = [member.backend for member in members]
        await check_twins(backends, ttl=settings.ttl, limit=settings.command_timeout, later=self.leave)

    async def settle(self, timeout: float) -> None:
        """Wait for what is given back, for at most ``timeout`` seconds, and for each no longer than a command may take."""
        now = self.settings.clock()
        limits = {task: since + self.settings.command_timeout - now for task, since in self.leaving.items()}
        limit = min(timeout, max(limits.values(), default=0.0))
        if limit > 0:
            await asyncio.wait(limits, timeout=limit)

    async def aclose(self) -> None:
        """End what is under way, and close every server."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        closing = [asyncio.ensure_future(member.backend.aclose()) for member in self.all if member.open]
        for member in self.all:
            member.open = False
        if closing:
            await asyncio.wait(closing)

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run ``work`` until it ends or everything is closed."""
        task = start(work, name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()

    def failure(self, errors: Sequence[Exception]) -> BackendError:
        """What to say when too few servers can be asked, and why they cannot."""
        kind = (
            BackendRefused
            if errors and all(isinstance(one, BackendRefused) for one in errors)
            else BackendUnavailable
        )
        retryable = not errors or any(getattr(one, "retryable", True) for one in errors)
        why = f": {'; '.join(dict.fromkeys(map(str, errors)))}" if errors else ""
        failure = kind(
            f"{len(errors)} of {len(self.all)} servers cannot be asked, and {self.needed} are needed{why}",
            retryable=retryable,
        )
        failure.__cause__ = errors[0] if errors else None
        return failure

    def leave(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Give something back by ``work``, in the background."""
        task = self.spawn(work, "aiolock-quorum-clean-up")
        self.leaving[task] = self.settings.clock()
        task.add_done_callback(self._left)
        return task

    def _left(self, task: asyncio.Task[Any]) -> None:
        self.leaving.pop(task, None)
