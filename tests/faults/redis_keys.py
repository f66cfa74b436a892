"""What the tests of the Redis backend look at on the server: holders, places, keys, connections."""

from __future__ import annotations

import time
from dataclasses import astuple, dataclass
from pathlib import Path

import redis.asyncio

from aiolock.backends.redis.commands import SCRIPTS
from tests.faults.staging import until

ENTERS, RELEASES, RENEWS = (SCRIPTS[name].sha.encode() for name in ("enter", "release", "renew"))
"""What frames with these scripts contain."""
ENTERED = b"*5\r\n:1\r\n"
"""How the answer to an `enter` begins that was granted."""


def is_grant(frame: bytes) -> bool:
    """Whether a frame pushes a grant."""
    return frame.startswith(b"*3\r\n$7\r\nmessage\r\n") and b"\r\ng " in frame


@dataclass(frozen=True)
class Traces:
    """What the keys of a namespace say."""

    keys: int = 0
    lasting: int = 0
    """Keys that do not expire."""
    holders: int = 0
    places: int = 0
    """Fields of all kinds that belong to somebody in line."""
    graves: int = 0

    @property
    def clean(self) -> bool:
        """Whether nobody holds anything or waits, and every key will go."""
        return not (self.lasting or self.holders or self.places)

    def plus(self, other: Traces) -> Traces:
        """Both together."""
        return Traces(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


async def traces(admin: redis.asyncio.Redis, namespace: str) -> Traces:
    """Look at every key of a namespace."""
    keys = lasting = holders = places = graves = 0
    names = [key async for key in admin.scan_iter(f"{namespace}:1:*", count=1000)]
    async with admin.pipeline(transaction=False) as pipeline:
        # Thousands of keys are no matter of thousands of round trips.
        for name in names:
            pipeline.hkeys(name)
            pipeline.pttl(name)
        answers = await pipeline.execute()
    for fields, left in zip(answers[::2], answers[1::2], strict=True):
        keys += left != -2
        lasting += left == -1
        holders += (b"owner" in fields) + sum(field[:2] == b"h:" for field in fields)
        places += sum(field[:2] in {b"q:", b"r:", b"p:"} for field in fields)
        graves += sum(field[:2] == b"x:" for field in fields)
    return Traces(keys, lasting, holders, places, graves)


async def nothing_is_left(admin: redis.asyncio.Redis, namespace: str) -> None:
    """Wait until nobody holds anything or waits."""

    async def clean() -> bool:
        return (await traces(admin, namespace)).clean

    await until(clean, "an empty server")


async def subscriptions(admin: redis.asyncio.Redis, namespace: str) -> int:
    """How many clients of a namespace listen: each has a channel for all its subscriptions, and one for each."""
    channels = [channel.decode() for channel in await admin.pubsub_channels(f"{namespace}:1:to:*")]
    return len({channel.removeprefix(f"{namespace}:1:to:").partition(":")[0] for channel in channels})


def descriptors() -> int:
    """How many files and sockets this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        """How long it has been."""
        return time.monotonic() - self._start
