"""Functions under a lock, and jobs that run on one worker only."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, ParamSpec, TypeVar, cast

from aiolock.errors import ConfigError, LockLost, UnsupportedKind, name_of, shorten
from aiolock.lock import Lock
from aiolock.runtime import Generations
from aiolock.templates import Template

__all__ = ["Locked", "Once"]

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Coroutine[Any, Any, Any] | AsyncIterator[Any]])


class Locked:
    """What :meth:`Client.locked` returns: decorates a coroutine function or an async generator function."""

    __slots__ = ("_make", "_template")

    def __init__(self, make: Callable[[str], Lock], template: str) -> None:
        self._make = make
        self._template = Template(template)

    def __call__(self, function: F) -> F:
        """The function, which has the lock while it runs; with the same signature and the same types."""
        generates = inspect.isasyncgenfunction(function)
        if not generates and not inspect.iscoroutinefunction(function):
            raise ConfigError(
                "locked must decorate a function made by `async def`, with or without `yield`, not "
                + shorten(function)
            )
        signature = inspect.signature(function)
        unknown = [field for field in self._template.fields if field not in signature.parameters]
        if unknown:
            raise ConfigError(
                f"{shorten(self._template.text)} must name parameters of {name_of(function)}{signature}, "
                f"not {', '.join(unknown)}"
            )

        def lock(args: tuple[Any, ...], options: dict[str, Any]) -> Lock:
            if not self._template.fields:
                return self._make(self._template.fill({}))
            given = signature.bind(*args, **options)
            given.apply_defaults()
            return self._make(self._template.fill(given.arguments))

        @functools.wraps(function)
        async def run(*args: Any, **options: Any) -> Any:
            async with lock(args, options):
                return await cast("Awaitable[Any]", function(*args, **options))

        @functools.wraps(function)
        async def generate(*args: Any, **options: Any) -> AsyncGenerator[Any, Any]:
            async with (
                lock(args, options) as lease,
                aclosing(cast("AsyncGenerator[Any, Any]", function(*args, **options))) as inner,
            ):
                resume: Awaitable[Any] = anext(inner)
                while True:
                    try:
                        value = await resume
                    except StopAsyncIteration:
                        return
                    try:
                        sent = yield value
                    except GeneratorExit:
                        raise
                    except BaseException as error:  # noqa: BLE001 - whatever is thrown in is for the one inside
                        resume = inner.athrow(error)
                        continue
                    try:
                        lease.check()
                    except LockLost as loss:
                        resume = inner.athrow(loss)
                    else:
                        resume = inner.asend(sent)

        return cast("F", generate if generates else run)


class Once:
    """What :meth:`Client.once` returns: decorates a coroutine function, a job that one worker does and others skip."""

    __slots__ = ("_at_least", "_at_most", "_generations", "_lock")

    def __init__(self, generations: Generations, lock: Lock, at_most: float, at_least: float) -> None:
        self._generations = generations
        self._lock = lock
        self._at_most = at_most
        self._at_least = at_least

    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, R]]
    ) -> Callable[P, Coroutine[Any, Any, R | None]]:
        """The job, which returns its result, or ``None`` if it was skipped."""
        if not inspect.iscoroutinefunction(function):
            raise ConfigError(
                f"once must decorate a function made by `async def` without `yield`, not {shorten(function)}"
            )

        @functools.wraps(function)
        async def run(*args: P.args, **options: P.kwargs) -> R | None:
            runtime = self._generations.latest
            runtime.guard()
            if self._at_least and "keep" not in runtime.backend.capabilities:
                raise UnsupportedKind("once(at_least=…)", runtime.backend.name, "use at_least=0")
            lease = await self._lock.try_acquire()
            if lease is None:
                return None
            begin = runtime.clock()
            lease.stop_renewing(self._at_most)
            error: BaseException | None = None
            try:
                with lease.guard():
                    return await function(*args, **options)
            except BaseException as caught:
                error = caught
                raise
            finally:
                # What is late by now needs no keeping; and a cancelled job counts like any other.
                await lease.close(error, keep=max(0.0, begin + self._at_least - runtime.clock()))

        return run
