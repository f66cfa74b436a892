"""Decorators `locked` and `once`, and the name templates they share with the web integrations."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing
from string import Formatter
from typing import Any, ParamSpec, TypeVar, cast

from aiolock.core.hooks import Moment
from aiolock.core.logs import Log, get_logger
from aiolock.core.present import named
from aiolock.core.runtime import Generations, Runtime
from aiolock.errors import ConfigError, LockLost, UnsupportedKind, name_of, shorten
from aiolock.lease import hold_of
from aiolock.lock import Lock
from aiolock.types import SkipEvent
from aiolock.validation import OnError

__all__ = ["Locked", "Once", "Template", "do_once", "run_counts"]

log: Log = get_logger("aiolock.once")

# --- templates of names

HINT = "write it as in 'order:{order_id}'"


class Template:
    """A text with names in braces, such as ``order:{order_id}``.

    The attributes, indices, conversions and formats of ``str.format`` are refused: with them a value could decide what is
    read, and two values could make one name.
    """

    __slots__ = ("_parts", "fields", "text")

    def __init__(self, text: object) -> None:
        if not isinstance(text, str) or not text:
            raise ConfigError(f"the name of a lock must be a text, not {shorten(text)}; {HINT}")
        try:
            parts = list(Formatter().parse(text))
        except ValueError as error:
            raise ConfigError(f"{shorten(text)} is no template: {error}; {HINT}") from error
        for _, field, form, conversion in parts:
            if field is not None and (not field.isidentifier() or form or conversion):
                raise ConfigError(f"{shorten(text)} has more than a name in its braces; {HINT}")
        self.text: str = text
        self.fields: tuple[str, ...] = tuple(
            dict.fromkeys(field for _, field, _, _ in parts if field is not None)
        )
        """The names in braces, each once."""
        self._parts = [(literal, field) for literal, field, _, _ in parts]

    def fill(self, values: Mapping[str, object]) -> str:
        """Return the text with every name replaced by its value; raise :class:`ConfigError` if one has none."""
        missing = [field for field in self.fields if field not in values]
        if missing:
            raise ConfigError(
                f"there is no {', '.join(missing)} here to make a name of {shorten(self.text)}; "
                f"there is {', '.join(sorted(values)) or 'nothing'}"
            )
        return "".join(
            literal if field is None else f"{literal}{values[field]}" for literal, field in self._parts
        )

    def of_calls(self, function: Callable[..., object]) -> Callable[[tuple[Any, ...], dict[str, Any]], str]:
        """Return a function that fills the text from the arguments of a call of ``function``.

        Raises :class:`ConfigError` if a name in braces is no parameter of it.
        """
        signature = inspect.signature(function)
        unknown = [field for field in self.fields if field not in signature.parameters]
        if unknown:
            raise ConfigError(
                f"{shorten(self.text)} must name parameters of {name_of(function)}{signature}, not {', '.join(unknown)}"
            )

        def fill(args: tuple[Any, ...], options: dict[str, Any]) -> str:
            if not self.fields:
                return self.fill({})
            given = signature.bind(*args, **options)
            given.apply_defaults()
            return self.fill(given.arguments)

        return fill


# --- decorators

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Coroutine[Any, Any, Any] | AsyncIterator[Any]])


class Locked:
    """The decorator of :meth:`Client.locked`, for coroutine functions and async generator functions."""

    __slots__ = ("make", "template")

    def __init__(self, make: Callable[[str], Lock], template: str) -> None:
        self.make: Callable[[str], Lock] = make
        """Makes the lock of a name that was filled in."""
        self.template: Template = Template(template)

    def __call__(self, function: F) -> F:
        """Return the function with a lock held while it runs; signature and types stay the same."""
        generates = inspect.isasyncgenfunction(function)
        if not generates and not inspect.iscoroutinefunction(function):
            raise ConfigError(
                "locked must decorate a function made by `async def`, with or without `yield`, not "
                + shorten(function)
            )
        name = self.template.of_calls(function)

        @functools.wraps(function)
        async def run(*args: Any, **options: Any) -> Any:
            async with self.make(name(args, options)):
                return await cast("Awaitable[Any]", function(*args, **options))

        @functools.wraps(function)
        async def generate(*args: Any, **options: Any) -> AsyncGenerator[Any, Any]:
            async with (
                self.make(name(args, options)) as lease,
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
                    except BaseException as error:  # noqa: BLE001 - it is thrown into the inner generator
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
    """The decorator of :meth:`Client.once`, for a job that one worker does and others skip."""

    __slots__ = ("at_least", "generations", "make", "on_error", "template")

    def __init__(
        self,
        generations: Generations,
        make: Callable[[str], Lock],
        template: str,
        at_least: float,
        on_error: OnError,
    ) -> None:
        self.generations: Generations = generations
        self.make: Callable[[str], Lock] = make
        """Makes the lock of a name that was filled in."""
        self.template: Template = Template(template)
        self.at_least: float = at_least
        self.on_error: OnError = on_error

    def __call__(
        self, function: Callable[P, Coroutine[Any, Any, R]]
    ) -> Callable[P, Coroutine[Any, Any, R | None]]:
        """Return the job, which returns its result, or ``None`` if it was skipped."""
        if not inspect.iscoroutinefunction(function):
            raise ConfigError(
                f"once must decorate a function made by `async def` without `yield`, not {shorten(function)}"
            )
        name = self.template.of_calls(function)

        @functools.wraps(function)
        async def run(*args: P.args, **options: P.kwargs) -> R | None:
            return await do_once(self, self.make(name(args, options)), lambda: function(*args, **options))

        return run


async def do_once(once: Once, lock: Lock, job: Callable[[], Coroutine[Any, Any, R]]) -> R | None:
    """Do ``job`` under ``lock`` by the rules of ``once``, or return ``None`` if another has it.

    Cancelling it cancels the job, which then does not count: the lock is released.
    """
    runtime = once.generations.latest
    runtime.guard()
    await runtime.reach()
    if once.at_least and "keep" not in runtime.backend.capabilities:
        raise UnsupportedKind("once(at_least=…)", runtime.backend.name, "use at_least=0")
    runtime.stats.skipped_by_template.count(once.template.text, 0)
    lease = await lock.try_acquire()
    if lease is None:
        await _report_skip(runtime, lock, once.template.text)
        return None
    begin, hold = runtime.clock(), hold_of(lease)
    error: BaseException | None = None
    try:
        with lease.guard():
            return await job()
    except BaseException as caught:
        error = caught
        raise
    finally:
        # A job that took longer than `at_least` needs no keeping. A lost hold is not kept either, although the server may not
        # have ended it yet.
        counts = run_counts(error, once.on_error) and not hold.lost()
        await hold.close(error, keep=max(0.0, begin + once.at_least - runtime.clock()) if counts else 0.0)


async def _report_skip(runtime: Runtime, lock: Lock, template: str) -> None:
    """Count and log that a job was skipped, and report it to the callbacks of the client.

    The server is asked who has the lock if there is a callback. Cancelling it leaves the skip counted and not reported.
    """
    runtime.stats.skipped_by_template.count(template)
    info = None
    if runtime.hooks.listen(Moment.SKIPPED):
        try:
            info = await lock.inspect()
        except Exception as error:  # noqa: BLE001 - a holder that is not known is no reason to fail
            log.debug(
                "the holder of %s is not known: %s", shorten(lock.name), error, extra={"lock": lock.name}
            )
    event = SkipEvent.of(lock.name, template, info)
    one = event.holder or event.kept
    who = named(one) if one else ""
    known = {"holder": who, "until": event.until.isoformat(timespec="milliseconds")} if event.until else {}
    log.debug(
        "skipped %s%s",
        shorten(event.name),
        f", {'held' if event.holder else 'kept'}{f' by {shorten(who)}' * bool(who)} until {known['until']}"
        if known
        else "",
        extra={"lock": event.name, "template": template, **known},
    )
    runtime.hooks.call(Moment.SKIPPED, event)


def run_counts(error: BaseException | None, on_error: OnError) -> bool:
    """Return whether a run of a job that ended with ``error`` counts, so that others skip the job for ``at_least``.

    A run that was cancelled never counts, nor does one that an exit of the program ended.
    """
    return error is None or (isinstance(error, Exception) and on_error == "keep")
