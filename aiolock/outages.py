"""Tell people when a client that holds or waits loses its connection, and when it is back: once for each outage."""

from __future__ import annotations

from collections.abc import Callable

from aiolock.clock import Clock
from aiolock.logs import Log, get_logger

__all__ = ["Outages"]

log: Log = get_logger("aiolock.connection")


class _Outage:
    """One server that some connections of a client are away from."""

    __slots__ = ("since", "told", "without")

    def __init__(self, since: float, *, told: bool) -> None:
        self.since = since
        self.told = told
        self.without: set[object] = set()
        """The connections that were lost and are not back."""


class Outages:
    """The outages of one client. Backends report connections; this decides what is logged.

    An outage of a server begins with the first connection to it that is lost and ends when none of them is away, so that
    several connections to one server are one outage.
    """

    __slots__ = ("_clock", "_open", "in_use")

    def __init__(self, clock: Clock, in_use: Callable[[], bool] = lambda: True) -> None:
        self._clock = clock
        self.in_use: Callable[[], bool] = in_use
        """True while the client holds or waits for a lock."""
        self._open: dict[str, _Outage] = {}

    def down(self, connection: object, address: str, why: object) -> None:
        """An established connection was lost; ``address`` names the server and has no password."""
        outage = self._open.get(address)
        if outage is None:
            outage = self._open[address] = _Outage(self._clock(), told=False)
        outage.without.add(connection)
        if not outage.told and self.in_use():
            outage.told = True
            log.warning("lost the connection to %s: %s", address, why, extra={"address": address})

    def up(self, connection: object, address: str) -> None:
        """A connection is there (again)."""
        outage = self._open.get(address)
        if outage is None:
            return
        outage.without.discard(connection)
        if outage.without:
            return
        del self._open[address]
        if outage.told:
            seconds = self._clock() - outage.since
            log.info(
                "the connection to %s is back after %.1f s",
                address,
                seconds,
                extra={"address": address, "seconds": seconds},
            )

    def forget(self, connection: object, address: str) -> None:
        """Forget a connection that was given up for good: its return is not awaited."""
        outage = self._open.get(address)
        if outage is not None:
            outage.without.discard(connection)
            if not outage.without:
                del self._open[address]
