"""Until when a session certainly lives: arithmetic over heartbeats, without a clock.

A follower answers for itself, and tells the leader of the sessions it has heard from only every half tick; the leader
alone ends sessions. So an acknowledged packet proves nothing about the leader yet. The rule: on the acknowledgement
of heartbeat k (a ``sync``, which passes through the leader), the session lives at least one session timeout from when
the newest heartbeat was *sent* that had been acknowledged at least a relay time before k was sent. Between those two
our server has answered a ping of the leader's that carried the news of the earlier one, and their link is FIFO.

A new session is a quorum write that happens after its ConnectRequest was sent, so it begins with that time.
"""

from __future__ import annotations

import math
from collections import deque

__all__ = ["Heartbeats", "interval"]


def interval(timeout: float) -> float:
    """How many seconds after an acknowledgement the next heartbeat is sent."""
    return max(0.6, timeout / 6)


class Heartbeats:
    """The deadline of one session, on the clock that the times of the heartbeats were read from."""

    def __init__(self, timeout: float, opened: float, tick_time: float | None = None) -> None:
        self.timeout = timeout
        self.margin = 0.2 + 0.01 * timeout
        # The shortest session timeout a server grants is two ticks unless it was told otherwise, so a quarter of ours
        # is at least half a tick. A whole tick, where it is known, allows for jitter between the servers as well.
        self.relay = timeout / 4 if tick_time is None else tick_time
        self.deadline = opened + timeout - self.margin
        self._acknowledged: deque[tuple[float, float]] = deque()

    def acknowledge(self, sent: float, now: float) -> bool:
        """A heartbeat that was sent at ``sent`` is acknowledged; whether that moved the deadline."""
        proof = -math.inf
        while self._acknowledged and self._acknowledged[0][1] <= sent - self.relay:
            proof, _ = self._acknowledged.popleft()
        self._acknowledged.append((sent, now))
        deadline = proof + self.timeout - self.margin
        moved = deadline > self.deadline
        self.deadline = max(self.deadline, deadline)
        return moved
