"""Hooks: the callbacks of a client, for the moments of a lease and for jobs that are skipped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import replace
from enum import Enum
from inspect import iscoroutinefunction
from typing import TypeVar

from aiolock.core.logs import Log, get_logger
from aiolock.errors import ConfigError, LossReason, shorten
from aiolock.types import LockEvent, SkipEvent

__all__ = ["C", "Callback", "Hooks", "Moment", "Observed", "S", "check_callback"]

log: Log = get_logger("aiolock")

Callback = Callable[[LockEvent], object]
C = TypeVar("C", bound=Callback)
S = TypeVar("S", bound=Callable[[SkipEvent], object])
F = TypeVar("F", bound=Callable[..., object])


class Moment(Enum):
    """The moments at which callbacks are called: those of a lease, and the skip of a job."""

    ACQUIRED = "on_acquired"
    RELEASED = "on_released"
    LOST = "on_lost"
    RENEWAL_FAILING = "on_renewal_failing"
    SKIPPED = "on_skipped"


def check_callback(moment: Moment, callback: object) -> None:
    """Raise :class:`ConfigError` unless ``callback`` is a plain function."""
    if iscoroutinefunction(callback) or not callable(callback):
        raise ConfigError(f"{moment.value} must be given a plain function, not {shorten(callback)}")


class Hooks:
    """The callbacks of one client. An error of a callback is logged; only what ends the program, as SystemExit, is raised."""

    __slots__ = ("_callbacks", "active")

    def __init__(self) -> None:
        self._callbacks: dict[Moment, tuple[Callable[..., object], ...]] = dict.fromkeys(Moment, ())
        self.active: bool = False
        """True once there is a callback for leases; read for every acquire."""

    def add(self, moment: Moment, callback: F) -> F:
        """Call ``callback`` at that moment of each lease that is acquired, or job that is skipped, from now on; return it."""
        check_callback(moment, callback)
        self._callbacks[moment] += (callback,)
        self.active = self.active or moment is not Moment.SKIPPED
        return callback

    def listen(self, moment: Moment) -> bool:
        """Return whether there is a callback for this moment."""
        return bool(self._callbacks[moment])

    def call(self, moment: Moment, event: LockEvent | SkipEvent) -> None:
        """Call the callbacks of a moment, in the order in which they were added."""
        for callback in self._callbacks[moment]:
            try:
                callback(event)
            except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - raised by code of the application
                log.error(
                    "a callback of %s raised %s for lock %s",
                    moment.value,
                    type(error).__name__,
                    shorten(event.name),
                    exc_info=error,
                    extra={"lock": event.name},
                )


class Observed:
    """A hold whose acquire was reported to the callbacks, so that its end is reported as well.

    Its end is reported in a copy of the context (:mod:`contextvars`) of the acquire: a loss is noticed by a task of the client.
    """

    __slots__ = ("_context", "_event", "_failing", "_granted", "_hooks")

    def __init__(self, hooks: Hooks, event: LockEvent, granted: float) -> None:
        hooks.call(Moment.ACQUIRED, event)
        self._hooks = hooks
        self._event = event
        self._granted = granted
        self._failing = 0.0
        """The end of the lease at the last report that its renewal fails: a renewal that succeeds moves it."""
        self._context = copy_context()

    def released(self, now: float) -> None:
        """Report that the holder gave it back."""
        self._event = replace(self._event, held=now - self._granted, released=True)
        self._context.run(self._hooks.call, Moment.RELEASED, self._event)

    def renewal_failed(self, error: str, until: float, now: float) -> None:
        """Report that a renewal has failed of a lease that holds until then, unless one before it failed as well."""
        if self._failing != until:
            self._failing = until
            event = replace(self._event, held=now - self._granted, remaining=until - now, error=error)
            self._context.run(self._hooks.call, Moment.RENEWAL_FAILING, event)

    def lost(self, reason: LossReason, now: float) -> None:
        """Report the loss; after the release, if only its answer reported the loss."""
        event = self._event
        held = event.held if event.released else now - self._granted
        self._event = replace(event, held=held, reason=reason)
        self._context.run(self._hooks.call, Moment.LOST, self._event)
