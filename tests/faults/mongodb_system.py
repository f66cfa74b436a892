"""The MongoDB of a history run, which is a stand-in for one: how its frames look, what hurts it, and what must be left at the end: nothing.

python -m tests.faults.mongodb_system mongodb --seconds 60 --processes 6 --names 12 --seed 1 --ttls 2,3

What is shown is that this library and the stand-in agree; no MongoDB was asked.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import aiolock
from tests.faults import run
from tests.faults.injector import Fault, FaultInjector
from tests.faults.proxy import mongodb_frames
from tests.faults.system import System
from tests.faults.verdict import DELETED, RESTART
from tests.servers import MongoStandIn

QUEUE, HOLDS = b'"q":[', b'"h":['
"""How a queue and holds stand in the value of a lock row."""
FAIL = {"configureFailPoint": "failCommand"}
WRITES = ["findAndModify"]


class MongoDBInjector(FaultInjector):
    """Hurts processes, links, and the server in the ways in which a primary can go."""

    system: MongoDBSystem  # type: ignore[assignment]  # alike, not related

    def _table(self) -> list[tuple[int, str, Fault]]:
        concern = {
            "code": 64,
            "codeName": "WriteConcernFailed",
            "errmsg": "waiting for replication timed out",
        }
        return [
            *self._general(RESTART),
            (3, "kill server", partial(self._end, "kill")),
            (2, "stop server", partial(self._end, "stop")),
            (3, "step down", self._step_down),
            (3, "no majority", partial(self._fail, {"writeConcernError": concern})),
            (3, "close before a write", partial(self._fail, {"closeConnection": True})),
            (2, "write conflict", partial(self._fail, {"errorCode": 112})),
            (2, DELETED, self._delete),
        ]

    async def _end(self, how: str, rng: random.Random, name: str) -> bool:
        async with self.system.busy:
            self.recorder.down(name)
            await asyncio.to_thread(getattr(self.system.server, how))
            await asyncio.sleep(rng.choice((0, rng.uniform(0, 0.5))))
            # It ends with the thread that starts it.
            self.system.server.children[0].start()
            await self.system.until_it_answers()
            self.recorder.up(name)
            return True

    async def _step_down(self, rng: random.Random, name: str) -> bool:
        """For a time nothing is written, as during an election."""
        async with self.system.busy:
            seconds = rng.choice((1, 1, 2))
            self.recorder.down(name)
            await self.system.ask({"replSetStepDown": seconds, "force": True}, "admin")
            await asyncio.sleep(seconds + 0.1)
            self.recorder.up(name)
            return True

    async def _fail(self, data: Mapping[str, Any], rng: random.Random, _name: str) -> bool:
        """Some of the next writes are made without a majority, or not made, and their writers cannot tell."""
        async with self.system.busy:
            times = {"times": rng.randint(1, 5)}
            await self.system.ask({**FAIL, "mode": times, "data": {"failCommands": WRITES, **data}}, "admin")
            await asyncio.sleep(rng.uniform(0.05, 0.3))
            return True

    async def _delete(self, rng: random.Random, name: str) -> bool:
        """Delete the documents of locks, those of sessions, or both: an exception of the page."""
        which = rng.choice(("/[ls]/", "/l/", "/s/"))

        async def delete() -> None:
            await self.system.ask(
                {"delete": "aiolock", "deletes": [{"q": {"_id": {"$regex": which}}, "limit": 0}]}
            )

        return await self._void(name, delete)


class MongoDBSystem(System):
    """One private stand-in, whose writes are on its disk before they are answered."""

    framing = staticmethod(mongodb_frames)
    injector = MongoDBInjector
    lateness = 2.0

    def __init__(self) -> None:
        super().__init__(MongoStandIn(extra=["--enable-test-commands", "--sync-on-commit"]))

    def url(self, host: str, port: int, number: int, seed: int) -> str:  # noqa: ARG002 - as of other systems
        """Where a worker connects."""
        return f"mongodb://{host}:{port}/test?directConnection=true"

    async def ask(self, command: Mapping[str, Any], database: str = "test") -> None:
        """Say something to it, over a connection that no proxy hurts."""
        await asyncio.to_thread(self.server.ask, command, database=database)

    async def until_it_answers(self) -> None:
        """Wait until it serves again."""
        while True:
            try:
                await self.ask({"ping": 1})
            except Exception:  # noqa: BLE001, PERF203 - whatever the driver says
                await asyncio.sleep(0.05)
            else:
                return

    async def prepare(self) -> None:
        """Make the collection."""
        async with aiolock.connect(self.server.url, namespace=self.namespace, command_timeout=60):
            pass

    @staticmethod
    def placed(direction: str, frame: bytes) -> bool:
        """A client writes a row in which there is a queue."""
        return direction == "up" and QUEUE in frame

    @staticmethod
    def granted(direction: str, frame: bytes) -> bool:
        """A client reads a row in which there are holds: most often one that waits, and has seen that the row changed."""
        return direction == "down" and HOLDS in frame

    @staticmethod
    def reply(frame: bytes) -> bool:
        """The answer to a read or a write of rows."""
        return b"firstBatch" in frame or b"lastErrorObject" in frame

    async def hygiene(self, names: Sequence[str], ttl: float) -> list[str]:
        """After all workers have left: every lock can be had, and nobody holds or waits."""
        await self.ask({**FAIL, "mode": "off"}, "admin")
        return await super().hygiene(names, ttl)


EXPECTED = "locks on MongoDB are experimental"
"""The warning of connect(), of which nothing is told here; workers have it from the environment."""

warnings.filterwarnings("ignore", EXPECTED)
os.environ["PYTHONWARNINGS"] = f"ignore:{EXPECTED}"
run.SYSTEMS.update({"mongodb": MongoDBSystem})

if __name__ == "__main__":
    sys.exit(run.main())
