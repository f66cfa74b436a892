"""The resource that locks protect: perfect, in the controller's process, and strict about what it is told.

Every name has two values that know nothing of each other. The *fenced* one rejects a token below the highest that it accepted, and an equal
one from another owner. The *unfenced* one is the control: it accepts everything and counts the damage. In both,

* a write is stale if its token is below the highest accepted so far: its writer lost the lock and does not know;
* an update is lost if somebody wrote between the reading that a write rests on and the write.

A fenced read shows its token as well and raises the mark: else a stale write could slip in between the new holder's read and write.
One request is one line of JSON on a unix socket, and one line is the answer.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from aiolock.testing.history import Recorder


@dataclass
class Counter:
    """One value, and the highest token accepted for it with the owner that showed it."""

    value: int = 0
    version: int = 0
    token: int = 0
    owner: str = ""


@dataclass
class Tally:
    accepted: int = 0
    rejected: int = 0
    stale: int = 0  # accepted though stale
    lost_updates: int = 0


@dataclass
class FencedStore:
    """`fenced` and `unfenced` tell what happened; a recorder gets every write in the order of the decisions."""

    path: Path
    recorder: Recorder | None = None
    fenced: Tally = field(default_factory=Tally)
    unfenced: Tally = field(default_factory=Tally)

    def __post_init__(self) -> None:
        self._counters: dict[tuple[str, bool], Counter] = {}
        self._writers: set[asyncio.StreamWriter] = set()

    def counter(self, name: str, *, fenced: bool) -> Counter:
        return self._counters.setdefault((name, fenced), Counter())

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._serve, self.path)
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        while self._writers:  # noqa: ASYNC110  # each handler ends at its next step
            await asyncio.sleep(0)
        self.path.unlink(missing_ok=True)

    def read(self, name: str, owner: str, token: int, *, fenced: bool) -> Counter | None:
        """The value and its version; None if a fenced reader came too late."""
        counter = self.counter(name, fenced=fenced)
        if fenced and not self._admit(counter, owner, token):
            return None
        return counter

    def write(self, name: str, owner: str, token: int, *, value: int, base: int, fenced: bool) -> bool:
        """Write `value`, found from the reading of version `base`, and say whether it was accepted."""
        counter, tally = self.counter(name, fenced=fenced), self.fenced if fenced else self.unfenced
        stale, accepted = token < counter.token, not fenced or self._admit(counter, owner, token)
        if accepted:
            tally.accepted += 1
            tally.stale += stale
            tally.lost_updates += base != counter.version
            counter.value, counter.version = value, counter.version + 1
            if token > counter.token:
                counter.token, counter.owner = token, owner
        else:
            tally.rejected += 1
        if self.recorder is not None:
            self.recorder.stored(name, owner, token, accepted=accepted, fenced=fenced)
        return accepted

    @staticmethod
    def _admit(counter: Counter, owner: str, token: int) -> bool:
        if token > counter.token:
            counter.token, counter.owner = token, owner
        return (token, owner) == (counter.token, counter.owner)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while line := await reader.readline():
                request = json.loads(line)
                if request.pop("op") == "read":
                    counter = self.read(**request)
                    answer: object = counter and [counter.value, counter.version]
                else:
                    answer = self.write(**request)
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        except ConnectionError:
            pass  # a worker was killed: what it had sent is decided, nobody waits for the answer
        finally:
            self._writers.discard(writer)
            writer.close()


class StoreClient:
    """One task's way to the store. A call that is interrupted leaves a reply unread, so the connection goes with it."""

    def __init__(self, path: Path | str) -> None:
        self._path = path
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._bases: dict[tuple[str, bool], int] = {}

    async def read(self, name: str, owner: str, token: int, *, fenced: bool) -> int | None:
        """The value, or None for a fenced read that came too late. The next write of this name rests on this reading."""
        answer = await self._ask(op="read", name=name, owner=owner, token=token, fenced=fenced)
        if answer is None:
            return None
        value, self._bases[name, fenced] = answer
        return value

    async def write(self, name: str, owner: str, token: int, value: int, *, fenced: bool) -> bool:
        base = self._bases.get((name, fenced), 0)
        return await self._ask(
            op="write", name=name, owner=owner, token=token, value=value, base=base, fenced=fenced
        )

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None

    async def _ask(self, **request: object):
        try:
            if self._streams is None:
                self._streams = await asyncio.open_unix_connection(self._path)
            reader, writer = self._streams
            writer.write(json.dumps(request).encode() + b"\n")
            return json.loads(await reader.readuntil(b"\n"))
        except BaseException:
            self.close()
            raise
