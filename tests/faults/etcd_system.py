"""The cluster of a history run: how its frames look, what hurts it, and what must be left at the end: nothing.

python -m tests.faults.etcd_system etcd --seconds 60 --processes 8 --names 16 --seed 1

Three members that keep their data, of which one at a time is killed or stopped. Half of the workers know one of them,
through their proxy; the others know all.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tests.faults import run
from tests.faults.proxy import http2_frames
from tests.faults.zookeeper_system import FAULTS, OneByChance, SystemOfThree
from tests.servers import Etcd

QUEUE, HOLDS = b'"q":[', b'"h":['
"""How a queue and holds stand in the value of a lock row."""
DATA = 0
"""The type of a frame of HTTP/2 that carries a request or an answer."""


class Cluster(OneByChance, Etcd):
    """A cluster of three."""


class EtcdSystem(SystemOfThree):
    """One private cluster."""

    framing = staticmethod(http2_frames)
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
        sys.argv += [word for fault in FAULTS for word in ("--only", fault)]
    return run.main()


if __name__ == "__main__":
    sys.exit(main())
