"""How old a pushed grant is: arithmetic on pairs of server and local time, without a clock.

Every reply that carries the server's time is sent and received at known local times, so the server's clock stood at
that value somewhere in between. What the server stamps later can be placed on the local clock with an error of half
that round trip, plus drift. A server clock that is stepped breaks the pairs made before it, and shows as an age that
cannot be; "deadline minus estimated now" would overstate the life of a grant instead.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Age", "Pairing"]

FRESH = 30.0
"""For how many seconds a pair can be used."""
DRIFT = 0.01
"""By how much two clocks may differ in speed."""


class Age(NamedTuple):
    """Seconds since something was stamped, at best knowledge, and how wrong that may be."""

    seconds: float
    error: float

    @property
    def most(self) -> float:
        """The age that it certainly does not exceed."""
        return self.seconds + self.error

    def credible(self, claim: float) -> bool:
        """Whether a grant of that age may be entered before it is confirmed."""
        return self.seconds >= -self.error and self.most <= claim / 2


class Pairing:
    """The freshest pair of server time and local time."""

    __slots__ = ("latest",)

    def __init__(self) -> None:
        self.latest: tuple[int, float, float] | None = None
        """Of the latest reply: server time in µs, and when by the local clock its request was sent and it arrived."""

    def learn(self, server: float, sent: float, received: float) -> None:
        """A reply: server time in seconds, and when by the local clock its request was sent and it arrived."""
        self.latest = round(server * 1_000_000), sent, received

    def forget(self) -> None:
        """The server may be another one now."""
        self.latest = None

    def age(self, stamp: float, now: float) -> Age | None:
        """How old what the server stamped ``stamp`` is at local time ``now``; ``None`` without a fresh pair."""
        if self.latest is None:
            return None
        server, sent, received = self.latest
        since = now - received
        if since > FRESH:
            return None
        half = (received - sent) / 2
        middle = sent + half
        return Age((now - middle) - (stamp - server / 1_000_000), half + DRIFT * (since + half))
