"""Holds of a schedule that are not renewed: they are given other lives, several at once, and sometimes while they are released.

Only some of the worlds have them. The requests are delayed, lost and repeated by the network, and overtake each other; hosts
are stopped meanwhile, and the clock of the server runs at a pace of its own. What `invariants` says of belief, of being told
in time and of timeouts must hold as for any other lease. Beside that

* once the last request is answered, and until another begins, the hold stands for as long as it asked for, counted from
  its call at the earliest and from its answer at the latest;
* after a request that was not answered it stands for no longer than that asked for.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Any

from aiolock.core.backend import expires_at
from aiolock.core.capabilities import Extension
from aiolock.errors import BackendUnavailable, LockLost
from aiolock.lease import Lease
from tests.simulation.invariants import EPSILON, Op

if TYPE_CHECKING:
    from tests.simulation.world import Peer, World

__all__ = ["Lives"]

FAST = 1.005
"""The fastest of the clocks of clients."""


class Lives:
    """Chances of one world, which are no draws of its own: the worlds without such holds stay what they are."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.random = random = Random(f"lives of {world.outcome.seed}")
        self.share = random.choice([0.0, 0.0, 0.0, 0.3, 0.8])
        """How many of the holds are not renewed."""
        self.begun: Counter[tuple[str, int]] = Counter()
        """The number of requests to extend each hold, which is known by its task and token."""
        self.tasks: set[asyncio.Task[LockLost | None]] = set()

    def options(self) -> dict[str, Any]:
        """Return the options of the next lock."""
        return {"renew": False} if self.random.random() < self.share else {}

    async def change(self, peer: Peer, op: Op, lease: Lease) -> None:
        """Give a hold other lives, if it is not renewed; raise :class:`LockLost` if a request says that it is gone."""
        random = self.random
        if not self.has(lease) or not lease.held or not isinstance(lease._hold.validity.claim, Extension):
            return
        for _ in range(random.choice([0, 1, 1, 2])):
            requests = [
                asyncio.create_task(self._extend(peer, op, lease, self.draw()))
                for _ in range(random.choice([1, 1, 2, 3]))
            ]
            self.tasks.update(requests)
            for request in requests:
                request.add_done_callback(self.tasks.discard)
            if random.random() < 0.2:
                # They go on beside whatever is next, also the release.
                for _ in range(random.choice([0, 1, 2, 3])):
                    await asyncio.sleep(0)
                return
            for request in requests:
                if (error := await request) is not None:
                    raise error

    @staticmethod
    def has(lease: Lease) -> bool:
        """Test whether a hold has a life of its own."""
        return lease._hold.validity.claim.request.life < float("inf")

    def draw(self) -> float:
        """Draw the seconds of a life: no longer than the longest ttl of the world."""
        return max(0.1, self.world.unit * self.random.choice([0.4, 0.7, 1.0, 1.5, 2.0]))

    async def _extend(self, peer: Peer, op: Op, lease: Lease, seconds: float) -> LockLost | None:
        """Extend, and compare what is left with what was asked for."""
        world, hold = self.world, (str(op), lease.token)
        self.begun[hold] += 1
        number = self.begun[hold]
        answered, began = False, world.loop.now
        try:
            with world.invariants.timed(op, "extend()", peer.command_timeout):
                await lease.extend(seconds)
            answered = True
        except BackendUnavailable:
            pass
        except LockLost as error:
            return error
        except RuntimeError as error:
            # A client that is closed while its task waits for the processor asks no more.
            if not lease._hold.released and op.host not in world.invariants.closed:
                world.violated(op, f"extend(): {error!r}")
            return None
        left, took = lease.remaining(), world.loop.now - began
        world.log(
            op, f"has {lease!r} after extend({seconds:g}), {'answered' if answered else 'not answered'}"
        )
        world.outcome.lives += answered
        if number == self.begun[hold] and lease.held:
            most = expires_at(0, seconds)
            if left > most + EPSILON or (answered and left < most - FAST * took - EPSILON):
                world.violated(
                    op, f"has {left:.3f} s left after extend({seconds:g}), which took {took:.3f} s"
                )
        return None
