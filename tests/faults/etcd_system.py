"""The cluster of a history run: how its frames look, what hurts it, and what must be left at the end: nothing.

python -m tests.faults.etcd_system etcd --seconds 60 --processes 8 --names 16 --seed 1

Three members that keep their data, of which one at a time is killed or stopped; or all refuse to write as with a full disk. Half of the workers know one of them,
through their proxy; the others know all.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import urllib.request
from collections.abc import Sequence

from tests.faults import run
from tests.faults.injector import Fault, FaultInjector
from tests.faults.proxy import http2_frames
from tests.faults.zookeeper_system import FAULTS, OneByChance, SystemOfThree
from tests.servers import Etcd, ServerFailed

QUEUE, HOLDS = b'"q":[', b'"h":['
"""How a queue and holds stand in the value of a lock row."""
DATA = 0
"""The type of a frame of HTTP/2 that carries a request or an answer."""


FULL = "full disk"


class Cluster(OneByChance, Etcd):
    """A cluster of three."""

    def full(self, action: str) -> None:
        """Raise the alarm of a data base that has reached its quota (``ACTIVATE``), or end it; a member may not answer."""
        request = json.dumps({"action": action, "memberID": 0, "alarm": "NOSPACE"}).encode()
        for attempt in range(100):
            url = f"http://127.0.0.1:{self.ports[attempt % 3]}/v3/maintenance/alarm"
            try:
                with urllib.request.urlopen(urllib.request.Request(url, request), timeout=1):
                    return
            except OSError:
                continue
        raise ServerFailed(f"etcd did not {action} the alarm")


class EtcdInjector(FaultInjector):
    """Hurts processes, links and members, and lets the cluster refuse all writes, as one does whose disk is full."""

    system: EtcdSystem  # type: ignore[assignment]  # alike, not related

    def _table(self) -> list[tuple[int, str, Fault]]:
        return [*super()._table(), (2, FULL, self._fill)]

    async def _fill(self, rng: random.Random, name: str) -> bool:
        """Deletions and leases go on meanwhile."""
        async with self.system.busy:
            self.recorder.down(name)
            try:
                await asyncio.to_thread(self.system.server.full, "ACTIVATE")
                await asyncio.sleep(rng.uniform(0.2, 1.5) * self.ttl)
            finally:
                await asyncio.to_thread(self.system.server.full, "DEACTIVATE")
                self.recorder.up(name)
            return True


class EtcdSystem(SystemOfThree):
    """One private cluster."""

    framing = staticmethod(http2_frames)
    injector = EtcdInjector
    lateness = 2.0

    def __init__(self) -> None:
        super().__init__(Cluster())

    @staticmethod
    def placed(direction: str, frame: bytes) -> bool:
        """A client writes a row in which there is a queue."""
        return direction == "up" and frame[3:4] == b"\0" and QUEUE in frame

    @staticmethod
    def granted(direction: str, frame: bytes) -> bool:
        """A client reads a row in which there are holds: most often one that waits, and has seen that the row changed."""
        return direction == "down" and frame[3:4] == b"\0" and HOLDS in frame

    @staticmethod
    def reply(frame: bytes) -> bool:
        """An answer."""
        return len(frame) > 9 and frame[3] == DATA

    async def hygiene(self, names: Sequence[str], ttl: float) -> list[str]:
        """After all workers have left: every lock can be had, nobody holds or waits, and sessions have ended."""
        self.start_all()
        return await super().hygiene(names, ttl)


def prepare() -> None:
    """Make the cluster known."""
    run.SYSTEMS["etcd"] = EtcdSystem


def main() -> int:
    prepare()
    if "--only" not in sys.argv:
        sys.argv += [word for fault in (*FAULTS, FULL) for word in ("--only", fault)]
    return run.main()


if __name__ == "__main__":
    sys.exit(main())
