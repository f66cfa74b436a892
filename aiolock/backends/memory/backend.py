"""Claims on a server inside this process."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from typing import Any, TypeVar
from urllib.parse import urlsplit
from weakref import WeakValueDictionary

from aiolock.backends.memory.document import MemoryDocument
from aiolock.backends.memory.machine import BLOCK, Answer, Hold, Machine, Message, Request
from aiolock.backends.memory.server import MemoryServer, shared
from aiolock.contract import (
    NEVER,
    READ,
    Backend,
    Bid,
    Claim,
    Family,
    Finding,
    Grant,
    Holder,
    LockInfo,
    News,
    Notice,
    Release,
    Renewal,
    Waiting,
    certain_until,
)
from aiolock.errors import ConfigError, LockLost, shorten
from aiolock.info import Level
from aiolock.notices import Notices

__all__ = ["MemoryBackend", "Transport"]

T = TypeVar("T")

_RELEASED = Release.RELEASED
"""Looking a member up in its class costs 0.2 µs on Python 3.11."""

Transport = Callable[[Callable[[], Any]], Awaitable[Any]]
"""How a step reaches the server and its answer comes back; simulations put delays and losses here."""


class MemoryBackend(Backend):
    """``memory://`` (one server for the whole process) or ``memory://name`` (one for everybody who says that name).

    :param server: a server of one's own instead, for example with a clock of one's own.
    :param transport: for simulations: a coroutine function that carries out each step.
    """

    name = "memory"
    capabilities = frozenset({"exclusion", "fencing", "fifo", "keep", "no-eviction", "push"})

    def __init__(
        self,
        url: str = "memory://",
        *,
        server: MemoryServer | None = None,
        transport: Transport | None = None,
    ) -> None:
        parts = urlsplit(url)
        for part, given in (
            ("a path", parts.path.strip("/")),
            ("parameters", parts.query),
            ("#", parts.fragment),
        ):
            if given:
                raise ConfigError(
                    f"memory:// takes nothing but the name of a server, as in memory://tests, not {part}"
                )
        if "@" in parts.netloc:
            raise ConfigError(
                "memory:// takes nothing but the name of a server, as in memory://tests, not a password"
            )
        if server is not None and not isinstance(server, MemoryServer):
            raise ConfigError(f"server must be a MemoryServer, not {shorten(server)}")
        self._server = server or shared(parts.netloc)
        self.address = f"memory://{parts.netloc}"
        if transport is not None and not callable(transport):
            raise ConfigError(f"transport must be a coroutine function, not {shorten(transport)}")
        self._transport = transport
        self.near: MemoryServer | None = self._server if transport is None else None
        """The server, if nothing lies between it and its clients."""
        self._id = secrets.token_hex(16)
        self._count = 0
        self._claims: WeakValueDictionary[str, MemoryClaim] = WeakValueDictionary()
        """Whom messages find; a claim that nobody has any more gets none."""
        self._documents: WeakValueDictionary[str, MemoryDocument] = WeakValueDictionary()
        self._notices = Notices()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def open(self) -> None:
        """Become reachable for the server's messages."""
        self._loop = asyncio.get_running_loop()
        self._server.attach(self._id, self._deliver)

    async def aclose(self) -> None:
        """Be gone for the server."""
        self._server.detach(self._id)
        self._claims.clear()

    def abandon(self) -> None:
        """Give back what the tasks of a closed loop held or waited for: none of them will run again."""
        self._server.abandon(self._id)
        self._claims.clear()

    def claim(self, bid: Bid) -> MemoryClaim:
        """A new claim; every kind is there."""
        self._count += 1
        return MemoryClaim(self, bid, f"{self._id}:{self._count}")

    async def ask(self, question: Callable[[Machine, float], T]) -> T:
        """Have the server take one step."""
        if self._transport is None:
            return self._server.ask(question)
        answer: T = await self._transport(lambda: self._server.ask(question))
        return answer

    async def renew(self, claims: Sequence[Claim]) -> list[Renewal]:
        """All of them in one step."""
        sent = self.settings.clock()
        mine = [claim for claim in claims if isinstance(claim, MemoryClaim)]

        def question(machine: Machine, now: float) -> list[Answer | None]:
            return [machine.renew(claim.key, claim.request, now, prolong=not claim.fixed) for claim in mine]

        answers = await self.ask(question)
        for claim, answer in zip(mine, answers, strict=True):
            if answer is not None and answer.asked is not None:
                self.tell_request(claim, answer.asked)
        return [
            "revoked" if answer is None else self._renewed(claim, claim.granted(answer, sent))
            for claim, answer in zip(mine, answers, strict=True)
        ]

    @staticmethod
    def _renewed(claim: MemoryClaim, grant: Grant) -> Grant:
        return replace(grant, until=NEVER) if claim.fixed else grant

    async def notice(self) -> Notice:
        """The next message that is not a grant."""
        return await self._notices.get()

    async def inspect(self, name: str, family: Family) -> LockInfo:
        """What the machine knows at this moment."""
        key = self.key(name, family)
        moment = datetime.now(UTC)

        def question(machine: Machine, now: float) -> LockInfo:
            holds, queue = machine.look(key, now)
            return LockInfo(
                name,
                tuple(_holder(hold, now, moment) for hold in holds),
                tuple(
                    Waiting(place.request.label, place.request.mode, place.request.permits) for place in queue
                ),
                family,
                machine.limit(key, now),
            )

        return await self.ask(question)

    async def force_release(self, name: str, family: Family) -> bool:
        """Take it from whoever has it."""
        key = self.key(name, family)
        return await self.ask(lambda machine, now: machine.force(key, now))

    async def request_release(self, name: str, family: Family, reason: str) -> bool:
        """Tell whoever has it."""
        key = self.key(name, family)
        return await self.ask(lambda machine, now: machine.request(key, reason, now))

    async def set_limit(self, name: str, limit: int) -> None:
        """Another number of permits."""
        key = self.key(name, Family.SEMAPHORE)
        await self.ask(lambda machine, now: machine.set_limit(key, limit, now))

    def document(self, name: str, family: Family) -> MemoryDocument:
        """A view of one of the machine's papers."""
        self._count += 1
        document = MemoryDocument(self.ask, self.key(name, family), f"{self._id}:{self._count}")
        self._documents[document.id] = document
        return document

    async def names(self, pattern: str) -> list[tuple[str, Family]]:
        """What is held or waited for in this namespace."""
        prefix = f"{self.settings.namespace}:"

        def question(machine: Machine, now: float) -> list[tuple[str, Family]]:
            return sorted(
                (name, Family(space.removeprefix(prefix)))
                for space, name in machine.busy(now)
                if space.rpartition(":")[0] == self.settings.namespace and fnmatchcase(name, pattern)
            )

        return await self.ask(question)

    async def diagnose(self) -> list[Finding]:
        """What a server inside a process is good for."""
        return [
            Finding(
                Level.NOTE,
                "memory",
                "this server lives in this process: nobody outside of it sees its locks, and they end with it",
                "use redis://, zookeeper:// or mysql:// for locks between processes",
            )
        ]

    def key(self, name: str, family: Family) -> tuple[str, str]:
        """Where the machine keeps a lock."""
        return f"{self.settings.namespace}:{family.value}", name

    def register(self, claim: MemoryClaim) -> None:
        """Messages to this claim find it from now on; before its first byte is sent."""
        self._claims[claim.request.id] = claim

    def _deliver(self, message: Message) -> None:
        try:
            here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            here = False
        if here:
            self.receive(message)
        elif self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.receive, message)

    def receive(self, message: Message) -> None:
        """Take in a message, on the client's own loop."""
        if message.what == "changed":
            if (document := self._documents.get(message.to)) is not None:
                document.wake()
            return
        claim = self._claims.get(message.to)
        if claim is None:
            # A grant for somebody who left in the meantime: its release is on the way.
            return
        if message.what == "grant" and message.answer is not None:
            claim.push(message.answer, self._server.clock() - message.sent)
        elif message.what == "demand":
            claim.demanded_at = self.settings.clock()
        elif message.what == "requested":
            self.tell_request(claim, message.text)
        else:
            self._notices.put(Notice(News.LOST, claim, "force-released"))

    def tell_request(self, claim: MemoryClaim, reason: str) -> None:
        """The holder is asked to let go; said once for each reason, however often it is heard."""
        if claim.asked != reason:
            claim.asked = reason
            self._notices.put(Notice(News.REQUESTED, claim, text=reason))


class MemoryClaim(Claim):
    """One request of the machine's."""

    __slots__ = (
        "__weakref__",
        "_answer",
        "_backend",
        "_changed",
        "_doubts",
        "_look",
        "_pushed",
        "asked",
        "key",
        "request",
    )

    asks_again = True

    def __init__(self, backend: MemoryBackend, bid: Bid, request: str) -> None:
        super().__init__(bid)
        self._backend = backend
        self.key = backend.key(bid.name, bid.kind.family)
        self.request = Request(
            id=request,
            mode=bid.kind.mode.value,
            ttl=bid.ttl,
            label=bid.label,
            permits=bid.kind.permits,
            limit=bid.kind.limit,
            block=1 if bid.fair or not bid.kind.exclusive else BLOCK,
        )
        self._pushed: Grant | None = None
        self._changed: asyncio.Future[None] | None = None
        self._look = 0.0
        self._doubts = 0
        """How many attempts were sent and not answered."""
        self.asked: str | None = None
        """Why it was asked to let go, if it was."""
        self._answer: Release | None = None
        """The answer to the release; UNKNOWN from its sending."""

    async def attempt(self, wait: bool) -> Grant | None:
        """Enter the machine, or take a grant that was pushed."""
        if self._pushed is not None:
            grant, self._pushed = self._pushed, None
            return grant
        self._backend.register(self)
        sent = self._backend.settings.clock()
        self._doubts += 1
        answer = await self._backend.ask(
            lambda machine, now: machine.enter(self.key, self.request, now, wait=wait)
        )
        self._doubts -= 1
        if answer.token:
            return self.granted(answer, sent)
        if answer.limit:
            raise ConfigError(
                f"semaphore {shorten(self.bid.name)} has {answer.limit} permits, not {self.bid.kind.limit}: "
                "everybody has to name the same limit; set_limit() changes it"
            )
        self._look = answer.seconds
        return None

    async def changed(self) -> None:
        """Wait for a grant, and at most until a hold before us may have ended."""
        if self._pushed is not None:
            return
        loop = asyncio.get_running_loop()
        self._changed = loop.create_future()
        # A hold may end just after the moment that we were told; a look costs little.
        timer = loop.call_later(self._look + 0.001, self._wake)
        try:
            await self._changed
        finally:
            timer.cancel()
            self._changed = None

    async def downgrade(self) -> Grant:
        """Become a reader in the machine."""
        sent = self._backend.settings.clock()
        answer = await self._backend.ask(lambda machine, now: machine.downgrade(self.key, self.request, now))
        if answer is None:
            raise LockLost(self.bid.name, "revoked")
        self.bid = replace(self.bid, kind=READ)
        self.request = replace(self.request, mode=READ.mode.value, block=1)
        return self.granted(answer, sent)

    async def release(self, keep: float = 0) -> Release:
        """Leave the machine."""
        if self._backend.near is not None:
            return self._leave(self._backend.near, keep)
        first, self._answer = self._answer is None, Release.UNKNOWN
        held = await self._backend.ask(self._leaving(keep))
        return _RELEASED if held else Release.NOT_OURS if first else Release.UNKNOWN

    def begin_release(self, keep: float = 0) -> Release | None:
        """Leave the machine, if it is only a function call away."""
        near = self._backend.near
        return None if near is None else self._leave(near, keep)

    def _leave(self, server: MemoryServer, keep: float) -> Release:
        if self._answer is None:
            self._answer = _RELEASED if server.ask(self._leaving(keep)) else Release.NOT_OURS
        return self._answer

    def _leaving(self, keep: float) -> Callable[[Machine, float], bool]:
        bury = self._doubts > 0
        return lambda machine, now: machine.leave(self.key, self.request, now, keep, bury=bury)

    def push(self, answer: Answer, age: float) -> None:
        """The server made us the holder while we waited, ``age`` seconds ago."""
        self._pushed = self.granted(answer, self._backend.settings.clock() - age)
        self._wake()

    def granted(self, answer: Answer, sent: float) -> Grant:
        """The grant in an answer to a request of ours."""
        return Grant(answer.token, answer.count, certain_until(sent, answer.seconds), answer.demand)

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)


def _holder(hold: Hold, now: float, moment: datetime) -> Holder:
    return Holder(
        label=hold.request.label,
        token=hold.token,
        since=moment - timedelta(seconds=now - hold.since),
        remaining=max(0.0, hold.deadline - now),
        permits=hold.request.permits,
        mode=hold.request.mode,
    )
