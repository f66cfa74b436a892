"""Log records that never raise, and the messages about lost and restored connections."""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any

from aiolock.clock import Clock
from aiolock.errors import shorten

__all__ = ["PREFIX", "Log", "Outages", "get_logger", "hide_debug", "log_change"]

# --- logs
# Loggers of the package: a log call never raises, and the fields of its records have a prefix.
#
# Filters, handlers and the LogRecord factory belong to the application and may raise. Renewal, loss and clean-up must
# go on then, so the error is printed to standard error, as ``logging`` does with those of handlers.


PREFIX = "aiolock_"
"""Precedes every key of ``extra``: a record has attributes of other libraries and of the application as well."""

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


class Log(_Adapter):
    """A logger with the methods of :class:`logging.Logger`, none of which raises an :class:`Exception`."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a message; the keys of ``extra`` get the prefix."""
        try:
            if not self.logger.isEnabledFor(level):
                return
            if extra := kwargs.get("extra"):
                kwargs["extra"] = {PREFIX + key: value for key, value in extra.items()}
            # The frame of this method is not the caller that the record names.
            self.logger.log(level, msg, *args, stacklevel=2, **kwargs)
        except Exception:  # noqa: BLE001 - raised by code of the application
            if logging.raiseExceptions and sys.stderr is not None:
                with contextlib.suppress(Exception):
                    traceback.print_exc()


def hide_debug(name: str) -> None:
    """Keep a driver's logger from DEBUG, at which it shows secrets, unless the program has set its level."""
    driver = logging.getLogger(name)
    if driver.level == logging.NOTSET:
        driver.setLevel(logging.INFO)


def get_logger(name: str) -> Log:
    """Return the logger of that name."""
    return Log(logging.getLogger(name), None)


def log_change(log: Log, what: str, lock: str, before: Enum, after: Enum, **fields: object) -> None:
    """Log at DEBUG that the state of something of a lock has changed; the record has ``fields`` and the two states."""
    extra = {"lock": lock, "before": before.value, "after": after.value, **fields}
    log.debug("%s of %s: %s -> %s", what, shorten(lock), before.value, after.value, extra=extra)


# --- outages
# Tell people when a client that holds or waits loses its connection, and when it is back: once for each outage.


log: Log = get_logger("aiolock.connection")


class _Outage:
    """One server that some connections of a client are away from."""

    __slots__ = ("logged", "since", "why", "without")

    def __init__(self, since: float, why: str) -> None:
        self.since = since
        self.why = why
        self.logged = False
        self.without: set[object] = set()
        """The connections that were lost and are not back."""


class Outages:
    """The outages of one client. Backends report connections; this decides what is logged.

    An outage of a server begins with the first connection to it that is lost and ends when none of them is away, so that
    several connections to one server are one outage.
    """

    __slots__ = ("_clock", "_known", "in_use", "open")

    def __init__(self, clock: Clock, in_use: Callable[[], bool] = lambda: True) -> None:
        self._clock = clock
        self.in_use: Callable[[], bool] = in_use
        """True while the client holds or waits for a lock."""
        self.open: dict[str, _Outage] = {}
        """The outages, by the addresses of the servers."""
        self._known: set[str] = set()
        """The servers that a connection was made to."""

    def down(self, connection: object, address: str, why: object) -> None:
        """Record that an established connection was lost; ``address`` names the server and has no password."""
        outage = self.open.get(address)
        if outage is None:
            outage = self.open[address] = _Outage(self._clock(), str(why))
        outage.without.add(connection)
        self.report()

    def report(self) -> None:
        """Log the outages that were not logged yet, if the client holds or waits; to be called when it begins to."""
        if not self.in_use():
            return
        for address, outage in self.open.items():
            if not outage.logged:
                outage.logged = True
                log.warning("lost the connection to %s: %s", address, outage.why, extra={"address": address})

    def describe(self) -> str:
        """Return which servers are away, since when and why; nothing unless all are: a lock may be on another one."""
        if not self._known <= self.open.keys():
            return ""
        now = self._clock()
        return "; ".join(
            f"the connection to {address} was lost {now - outage.since:.1f} s ago: {outage.why}"
            for address, outage in self.open.items()
        )

    def up(self, connection: object, address: str) -> None:
        """Record that a connection is there (again)."""
        self._known.add(address)
        outage = self.open.get(address)
        if outage is None:
            return
        outage.without.discard(connection)
        if outage.without:
            return
        del self.open[address]
        if outage.logged:
            seconds = self._clock() - outage.since
            log.info(
                "the connection to %s is back after %.1f s",
                address,
                seconds,
                extra={"address": address, "seconds": seconds},
            )

    def forget(self, connection: object, address: str) -> None:
        """Forget a connection that was given up for good: its return is not awaited."""
        self._known.discard(address)
        outage = self.open.get(address)
        if outage is not None:
            outage.without.discard(connection)
            if not outage.without:
                del self.open[address]
