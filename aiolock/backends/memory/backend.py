"""Locks in the memory of this process.

Server, backend and claims in one file: they are all there is.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from aiolock.backends.diagnosis import note
from aiolock.backends.rows.rules import BLOCK, Answer, Hold, Machine, Message, StoredRequest
from aiolock.clock import Clock, Deadline, system_clock
from aiolock.core.backend import (
    NEVER,
    Claim,
    Event,
    EventKind,
    Grant,
    Release,
    Renewal,
    Request,
    Settings,
    expires_at,
)
from aiolock.core.capabilities import (
    Administration,
    Diagnosis,
    Downgrade,
    Entry,
    Extension,
    Register,
    RegisterStore,
)
from aiolock.core.inbox import Inbox, WakeReason
from aiolock.core.present import encode_value, presented
from aiolock.errors import ConfigError, LockError, LockLost, forgets_arguments, shorten
from aiolock.types import PERMIT, READ, Family, Finding, Holder, LockInfo, Waiting

__all__ = ["MemoryBackend", "MemoryRegister", "MemoryServer", "Transport"]

T = TypeVar("T")

Key = tuple[str, str]
Deliver = Callable[[Message], None]
Transport = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Carries a step to the server and its answer back; simulations put delays and losses here."""

POLL = 2.0
"""Seconds after which a register is read again without a notification: one may get lost, and none reports an expiry."""


# --- the server


class MemoryServer:
    """Locks shared by all clients of this process that connect to it, from any event loop or thread."""

    def __init__(self, clock: Clock = system_clock) -> None:
        self.clock = clock
        self._machine = Machine()
        self._mutex = threading.Lock()
        self._clients: dict[str, Deliver] = {}

    def attach(self, client: str, deliver: Deliver) -> None:
        """Send messages to ids that begin with ``client`` and a colon to ``deliver``."""
        self._clients[client] = deliver

    def detach(self, client: str) -> None:
        """Send no more messages to a client; its holds end by their ttl."""
        self._clients.pop(client, None)
        with self._mutex:
            self._machine.registers.forget_client(f"{client}:")

    def abandon(self, client: str) -> None:
        """Detach a client that is certainly gone, and give up its holds and positions."""
        self.detach(client)
        self.ask(lambda machine, now: machine.abandon(f"{client}:", now))

    def ask(self, step: Callable[[Machine, float], T]) -> T:
        """Run one atomic step of the state machine, and deliver the messages that follow from it."""
        with self._mutex:
            answer = step(self._machine, self.clock())
            if not self._machine.outbox:
                return answer
            messages, self._machine.outbox = self._machine.outbox, []
        for message in messages:
            deliver = self._clients.get(message.to.partition(":")[0])
            if deliver is not None:
                deliver(message)
        return answer


_servers: dict[str, MemoryServer] = {}


def shared(name: str) -> MemoryServer:
    """Return the server of that name in this process; its tokens grow for as long as the process lives."""
    return _servers.setdefault(name, MemoryServer())


@dataclass(frozen=True, slots=True)
class Context:
    """The part of the backend that claims and registers use."""

    server: MemoryServer
    transport: Transport | None
    clock: Clock

    async def ask(self, step: Callable[[Machine, float], T]) -> T:
        """Run one step at the server.

        Without a transport it does not wait; cancelling it with one leaves open whether the step was run.
        """
        if self.transport is None:
            return self.server.ask(step)
        answer: T = await self.transport(lambda: self.server.ask(step))
        return answer


# --- registers


class MemoryRegister(Register):
    """One client's view of a register; ``id`` is the address of its notifications."""

    def __init__(self, context: Context, key: Key, address: str) -> None:
        self.id: str = address
        self.inbox: Inbox[None] = Inbox(key[1])
        self._context = context
        self._key = key
        self._watched = False
        """True if the server may know of a watch."""

    async def read(self) -> Entry:
        """Return the value and its stamp."""
        return Entry(*await self._context.ask(lambda machine, now: machine.registers.read(self._key, now)))

    async def write(self, value: bytes, stamp: str, keep: float) -> str | None:
        """Replace the version ``stamp``, and notify the watchers."""

        def step(machine: Machine, now: float) -> str | None:
            written, watchers = machine.registers.write(self._key, value, stamp, keep, now)
            machine.outbox += [Message(watcher, "changed", now) for watcher in watchers]
            return written

        return await self._context.ask(step)

    async def changed(self, stamp: str) -> None:
        """Wait for a notification, at most until the next poll."""
        self._watched = True
        # The notification may come before the answer to the watch.
        self.inbox.take()
        if await self._context.ask(
            lambda machine, now: machine.registers.watch(self._key, self.id, stamp, now)
        ):
            await self.inbox.wait(Deadline.after(POLL, self._context.clock))

    async def aclose(self) -> None:
        """End the watch; a notification that is not delivered does no harm."""
        if self._watched:
            self._watched = False
            with suppress(LockError):
                await self._context.ask(lambda machine, _: machine.registers.forget(self._key, self.id))


# --- claims


class MemoryClaim(Downgrade, Extension):
    """One request at the server."""

    __slots__ = ("__weakref__", "_answer", "_unanswered", "context", "key", "requested", "stored")

    asks_again = True

    def __init__(self, context: Context, request: Request, key: Key, address: str) -> None:
        super().__init__(request)
        self.context = context
        self.key = key
        kind = request.kind
        self.stored = StoredRequest(
            id=address,
            mode=kind.mode.value,
            ttl=request.ttl,
            label=request.label,
            permits=kind.permits,
            limit=kind.limit,
            block=1 if request.fair or not kind.exclusive else BLOCK,
            value=encode_value(request.value),
        )
        self.requested: str | None = None
        """The reason of the last request to release it."""
        self._unanswered = 0
        """Number of attempts that were sent and not answered."""
        self._answer: Release | None = None
        """The answer to the release; UNKNOWN from its sending."""

    async def acquire(self, wait: bool) -> Grant | None:
        """Acquire the lock or join the queue, or take a grant that was pushed."""
        if self._inbox is not None and (grant := self._inbox.take()) is not None:
            return grant
        sent = self.context.clock()
        self._unanswered += 1
        answer = await self.context.ask(
            lambda machine, now: machine.enter(self.key, self.stored, now, wait=wait)
        )
        self._unanswered -= 1
        if answer.token:
            return self.granted(answer, sent)
        if answer.limit is not None:
            raise ConfigError(
                f"semaphore {shorten(self.request.name)} has {answer.limit} permits, not {self.request.kind.limit}: "
                "every client has to name the same limit; set_limit() changes it"
            )
        if wait:
            # A millisecond later, so that the hold ahead has ended when the server is asked.
            self.inbox.wake_after(answer.seconds + 0.001, WakeReason.EXPIRED)
        return None

    async def downgrade(self) -> Grant:
        """Turn the write hold into a read hold."""
        sent = self.context.clock()
        prolong = not self.fixed
        answer = await self.context.ask(
            lambda machine, now: machine.downgrade(self.key, self.stored, now, prolong=prolong)
        )
        if answer is None:
            raise LockLost(self.request.name, "revoked")
        self.request = replace(self.request, kind=READ)
        self.stored = replace(self.stored, mode=READ.mode.value, block=1)
        return self.granted(answer, sent)

    async def extend(self, seconds: float, number: int) -> Grant:
        """Give the hold another life."""
        sent = self.context.clock()
        answer = await self.context.ask(
            lambda machine, now: machine.extend(self.key, self.stored, seconds, number, now)
        )
        if answer is None:
            raise LockLost(self.request.name, "revoked")
        return Grant(answer.token, 0, expires_at(sent, seconds), answer.demand)

    async def release(self, keep: float = 0) -> Release:
        """Release the hold or give up the position."""
        if (answer := self.begin_release(keep)) is not None:
            return answer
        first, self._answer = self._answer is None, Release.UNKNOWN
        held = await self.context.ask(self._leave(keep))
        return Release.of(held, first=first)

    def begin_release(self, keep: float = 0) -> Release | None:
        """Release at once if the server is only a function call away."""
        if self.context.transport is not None:
            return None
        if self._answer is None:
            held = self.context.server.ask(self._leave(keep))
            self._answer = Release.RELEASED if held else Release.NOT_HELD
        return self._answer

    def _leave(self, keep: float) -> Callable[[Machine, float], bool]:
        if self._inbox is not None:
            self._inbox.close()
        tombstone = self._unanswered > 0
        return lambda machine, now: machine.leave(self.key, self.stored, now, keep, tombstone=tombstone)

    def granted(self, answer: Answer, sent: float) -> Grant:
        """Return the grant in an answer to a request that was sent at ``sent``."""
        until = NEVER if self.fixed else expires_at(sent, answer.seconds)
        return Grant(answer.token, answer.count, until, answer.demand)


# --- the backend


class MemoryBackend(Administration, RegisterStore, Diagnosis):
    """``memory://`` (one server for the whole process) or ``memory://name`` (one for all clients that give that name).

    :param server: a server of your own instead, for example with another clock.
    :param transport: for simulations: a coroutine function that carries out each step.
    """

    name = "memory"
    keeps_values = True
    capabilities = frozenset({"exclusion", "fencing", "fifo", "keep", "no-eviction", "push"})

    @forgets_arguments
    def __init__(
        self,
        url: str = "memory://",
        *,
        server: MemoryServer | None = None,
        transport: Transport | None = None,
    ) -> None:
        if not isinstance(url, str):
            raise ConfigError(
                f"the address must be a text such as memory://tests, not a {type(url).__name__}"
            )
        shared_name = url.partition("://")[2].removesuffix("/")
        if set("/?#@[]") & set(shared_name):
            raise ConfigError(
                "memory:// takes nothing but the name of a server: memory://tests is one, this is not a URL of memory"
            )
        if server is not None and not isinstance(server, MemoryServer):
            raise ConfigError(f"server must be a MemoryServer, not {shorten(server)}")
        if transport is not None and not callable(transport):
            raise ConfigError(f"transport must be a coroutine function, not {shorten(transport)}")
        self.server: MemoryServer = server or shared(shared_name)
        self.address = f"memory://{shared_name}"
        self._transport = transport
        self._id = secrets.token_hex(16)
        self._count = 0
        self._claims: WeakValueDictionary[str, MemoryClaim] = WeakValueDictionary()
        """The recipients of messages; a claim that was dropped gets none."""
        self._registers: WeakValueDictionary[str, MemoryRegister] = WeakValueDictionary()
        self._loop: asyncio.AbstractEventLoop | None = None

    def bind(self, settings: Settings) -> None:
        """Make the context of claims and registers."""
        super().bind(settings)
        self._context = Context(self.server, self._transport, settings.clock)

    async def open(self) -> None:
        """Begin to receive the server's messages."""
        self._loop = asyncio.get_running_loop()
        self.server.attach(self._id, self._deliver)

    async def aclose(self) -> None:
        """Leave the server."""
        self.server.detach(self._id)
        self._claims.clear()

    def abandon(self) -> None:
        """Give up all holds and positions of a closed loop: none of its tasks will run again."""
        self.server.abandon(self._id)
        self._claims.clear()

    def key(self, name: str, family: Family) -> Key:
        """Return the key of a lock or register in the state machine."""
        return f"{self.settings.namespace}:{family.value}", name

    def _address(self) -> str:
        self._count += 1
        return f"{self._id}:{self._count}"

    def claim(self, request: Request) -> MemoryClaim:
        """Return a new claim, of any kind."""
        address = self._address()
        key = self.key(request.name, request.kind.family)
        claim = self._claims[address] = MemoryClaim(self._context, request, key, address)
        return claim

    def register(self, name: str, family: Family) -> MemoryRegister:
        """Return a view of a register."""
        address = self._address()
        register = self._registers[address] = MemoryRegister(self._context, self.key(name, family), address)
        return register

    async def renew(self, claims: Sequence[Claim]) -> list[Renewal]:
        """Renew all claims in one step."""
        sent = self.settings.clock()
        mine = [claim for claim in claims if isinstance(claim, MemoryClaim)]
        # As of now: the request may arrive later.
        asked = [(claim, not claim.fixed, claim.present) for claim in mine]

        def step(machine: Machine, now: float) -> list[Answer | None]:
            return [
                machine.renew(claim.key, claim.stored, now, prolong=prolong, present=present)
                for claim, prolong, present in asked
            ]

        renewals: list[Renewal] = []
        for claim, answer in zip(mine, await self._context.ask(step), strict=True):
            if answer is None:
                renewals.append("revoked")
                continue
            if answer.asked is not None:
                self._request(claim, answer.asked)
            renewals.append(claim.granted(answer, sent))
        return renewals

    # --- events

    def _deliver(self, message: Message) -> None:
        """Pass a message to the client's loop, from any thread."""
        try:
            here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            here = False
        if here:
            self.receive(message)
        elif self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.receive, message)

    def receive(self, message: Message) -> None:
        """Handle a message on the client's loop."""
        if message.what == "changed":
            if (register := self._registers.get(message.to)) is not None:
                register.inbox.wake(WakeReason.NOTIFIED)
            return
        claim = self._claims.get(message.to)
        if claim is None:
            # A grant to a claim that was dropped in the meantime: its release is on the way.
            return
        if message.what == "grant" and message.answer is not None:
            sent = self.settings.clock() - (self.server.clock() - message.sent)
            claim.inbox.put(claim.granted(message.answer, sent))
        elif message.what == "sooner":
            claim.inbox.wake(WakeReason.EXPIRED)
        elif message.what == "demand":
            claim.note_waiters(self.settings.clock())
        elif message.what == "requested":
            self._request(claim, message.text)
        else:
            self.events.put(Event(EventKind.LOST, claim, "force-released"))

    def _request(self, claim: MemoryClaim, reason: str) -> None:
        """Report a request to release the hold, once for each reason."""
        if claim.requested != reason:
            claim.requested = reason
            self.events.put(Event(EventKind.REQUESTED, claim, text=reason))

    # --- administration

    async def inspect(self, name: str, family: Family) -> LockInfo:
        """Return the holders and the queue of a lock."""
        key = self.key(name, family)
        now, (holds, queue), limit = await self._context.ask(
            lambda machine, now: (now, machine.inspect(key, now), machine.limit(key, now))
        )
        moment = datetime.now(UTC)
        holders = tuple(_holder(hold, now, moment) for hold in holds)
        waiters = tuple(Waiting(request.label, request.mode, request.permits) for request in queue)
        return LockInfo.of_holds(name, holders, waiters, family, limit)

    async def force_release(self, name: str, family: Family, token: int | None = None) -> bool:
        """End all holds of a lock, or that of a token."""
        key = self.key(name, family)
        return await self._context.ask(lambda machine, now: machine.force(key, now, token))

    async def request_release(self, name: str, family: Family, reason: str) -> bool:
        """Notify the holders of a lock."""
        key = self.key(name, family)
        return await self._context.ask(lambda machine, now: machine.request(key, reason, now))

    async def set_limit(self, name: str, limit: int) -> None:
        """Set the limit of a semaphore."""
        key = self.key(name, PERMIT.family)
        await self._context.ask(lambda machine, now: machine.set_limit(key, limit, now))

    async def names(self, pattern: str) -> list[tuple[str, Family]]:
        """Return the locks of this namespace that are held or waited for."""
        namespace = self.settings.namespace

        def step(machine: Machine, now: float) -> list[tuple[str, Family]]:
            found = ((name, space.rpartition(":")) for space, name in machine.busy(now))
            return sorted(
                (name, Family(family))
                for name, (space, _, family) in found
                if space == namespace and fnmatchcase(name, pattern)
            )

        return await self._context.ask(step)

    async def diagnose(self) -> list[Finding]:
        """Report the limits of a server inside one process."""
        text = "this server lives in this process: other processes do not see its locks, and they end with it"
        return [note("memory", text, "use redis://, zookeeper:// or mysql:// for locks between processes")]


def _holder(hold: Hold, now: float, moment: datetime) -> Holder:
    since = moment - timedelta(seconds=now - hold.since)
    holder = hold.shown(since, max(0.0, hold.deadline - now))
    if hold.present is None:
        return presented(holder, None)
    present, reported = hold.present
    return presented(holder, (present, moment - timedelta(seconds=now - reported)))
