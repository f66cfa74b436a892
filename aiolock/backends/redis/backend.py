"""Redis backend: from requests to claims, renewals and events of one server."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, Generic, Self, TypeVar

from aiolock.backends.redis import admin
from aiolock.backends.redis.claim import GONE, Context, RedisClaim, Released, SharedClaim, renewal
from aiolock.backends.redis.commands import (
    Commands,
    Format,
    MutexCommands,
    Reply,
    Scripts,
    Tokens,
    encode,
)
from aiolock.backends.redis.pubsub import Messages
from aiolock.backends.redis.register import RedisRegister, Registers
from aiolock.backends.redis.sentinel import OF_SENTINELS
from aiolock.backends.redis.sentinel import SCHEMES as SENTINELS
from aiolock.backends.redis.server import Concerned, RedisServer, SingleServer, Usage
from aiolock.backends.redis.url import BESIDE, IN_URL
from aiolock.backends.redis.waiting import BATCH, Wakeups
from aiolock.core.backend import (
    NEVER,
    Claim,
    Event,
    EventKind,
    Grant,
    Renewal,
    Request,
    Settings,
    expires_at,
)
from aiolock.core.capabilities import Administration, Diagnosis, RegisterStore
from aiolock.errors import BackendUnavailable, forgets_arguments
from aiolock.types import MUTEX, Family, Finding, LockInfo
from aiolock.validation import escape

__all__ = ["BaseBackend", "RedisBackend"]

FEW = 16
"""Most holds that are verified one by one when their slots have moved; of more, all holds are."""

S = TypeVar("S", bound=RedisServer)


class BaseBackend(Administration, RegisterStore, Diagnosis, Generic[S]):
    """The library's own protocol: claims, renewals, registers and administration, on a single server or a cluster.

    ``bind`` builds everything, and ``open`` may be called again after a failure: claims made before it stay valid.
    """

    keeps_values = True
    clustered: ClassVar[bool] = False

    @staticmethod
    def passed_on(scheme: str) -> list[str]:
        """Return the names of the options that go to the address of this scheme."""
        return [*IN_URL, *(OF_SENTINELS if scheme in SENTINELS else ()), *BESIDE]

    def __init__(self, server: S) -> None:
        self._server = server
        self.address = server.address
        self._process = secrets.token_hex(16)
        self._numbers = itertools.count(1)
        self._tokens = Tokens()
        self.claims: dict[int, RedisClaim] = {}
        """Claims that the server may know, by number."""

    def again(self) -> Self:
        """Return a backend for the same server that knows the highest token."""
        backend = super().again()
        backend._tokens.highest = self._tokens.highest  # noqa: SLF001 - its own class
        return backend

    def bind(self, settings: Settings) -> None:
        """Take the client's settings, name keys and channels by them, and make connections and registers, without I/O."""
        super().bind(settings)
        self._prefix = f"{settings.namespace}:1:"
        self._channel = f"{settings.namespace}:1:to:{self._process}"
        self._format = Format(settings.namespace, self._server.verified)
        self._asked_format: asyncio.Future[Any] | None = None
        self._released = Released(settings.clock) if self._server.endpoint.moves else None
        clock, limit = settings.clock, settings.command_timeout
        self._scripts = scripts = Scripts(cluster=self.clustered)
        self._server.bind(
            Usage(
                settings,
                prefix=self._prefix,
                channel=self._channel,
                scripts=scripts.loaded,
                format=self._format,
                on_message=lambda *message: self._messages.dispatch(*message),
                on_push=self._push,
                on_mute=scripts.mute,
                on_up=self._doubt,
                on_moved=self._check,
            )
        )
        self._issue, pairing = self._server.issue, self._server.pairing

        def context(commands: Commands) -> Context:
            # In a cluster a call is about one slot, which two locks seldom share.
            batch = 1 if pairing is None else BATCH
            wakeups = Wakeups(
                commands.heartbeat, commands.tickets, clock=clock, random=settings.random, batch=batch
            )
            confirm, numbers = self._server.confirm, self._numbers
            return Context(
                clock, limit, commands, wakeups, self.claims, self._released, pairing, confirm, numbers
            )

        names = self._tokens, self._prefix, self._process
        self._mutex = context(MutexCommands(self._issue, scripts, *names))
        self._shared = context(Commands(self._issue, scripts, *names, family="many_"))
        self._contexts = self._mutex, self._shared
        self._registers = Registers(
            self._issue, scripts, self._process, clock, pushed=lambda: self._mutex.wakeups.pushed
        )
        self._messages = Messages(self._mutex, self.events, self._registers.notify)

    # --- opening and closing

    async def open(self) -> None:
        """Connect, and find out what the server can do."""
        for context in self._contexts:
            context.wakeups.open()
        self._registers.open()
        self.capabilities = await self._server.open()

    async def aclose(self) -> None:
        """Close all connections."""
        # A timer that is due while the connections are closed has nothing to ask any more.
        self._stop()
        await self._server.aclose()

    def _stop(self) -> None:
        """End timers and waits, before the connections are closed."""
        for context in self._contexts:
            context.wakeups.close()
        self._registers.close()
        self.claims.clear()

    def _push(self, subscription: str | None) -> None:
        """Note whether messages are pushed to this client, and check all waiters, because some messages may have been missed."""
        for context in self._contexts:
            context.wakeups.set_pushed(subscription)
        self._check_all()

    def _check_all(self) -> None:
        for context in self._contexts:
            context.wakeups.now()
        self._registers.wake_all()

    def _check(self, concerned: Concerned) -> None:
        """Check the waiters of some locks: their slots have moved."""
        # Not at everything: there may be thousands of waiters, and in a resharding one such occasion after the other.
        for context in self._contexts:
            context.wakeups.soon(concerned)
        self._registers.wake_all()

    def _doubt(self, concerned: Concerned | None) -> None:
        """Verify the holds whose server may not know everything, and repeat the latest releases there."""
        # The server may be another one now, or have lost data.
        for claim, keep in self._released.again() if self._released is not None else ():
            if concerned is None or concerned(claim.key):
                claim.leave_again(keep)
        if concerned is None:
            self.events.put(Event(EventKind.DOUBT))
            self._check_all()
            return
        held = [claim for claim in self.claims.values() if concerned(claim.key)]
        for claim_or_all in held if len(held) <= FEW else (None,):
            self.events.put(Event(EventKind.DOUBT, claim_or_all))

    # --- claims and registers

    def claim(self, request: Request) -> RedisClaim:
        """Return a claim with a request id of its own."""
        number = next(self._numbers)
        if request.kind is not MUTEX and request.kind.shareable:
            return SharedClaim(self._shared, request, number)
        return RedisClaim(self._mutex, request, number)

    def register(self, name: str, family: Family) -> RedisRegister:
        """Return a view of a hash of its own."""
        key = f"{self._prefix}{family.value}.register:{{{escape(name)}}}"
        return RedisRegister(self._registers, key, name)

    def _renewed(self, claim: RedisClaim, state: int | list[Any], sent: float) -> Renewal:
        """Read the answer for one hold whose renewal was sent at ``sent``."""
        if type(state) is list:
            state, rest = state
            self._messages.ask(claim, rest.decode("utf-8", "replace").partition(" ")[2])
        assert type(state) is int  # noqa: S101 - the scripts answer nothing else
        if state == 0:
            self._ask_format()
        if state <= 0:
            return GONE[state]
        until = NEVER if claim.fixed else expires_at(sent, claim.request.ttl)
        return Grant(0, 0, until, demand=state == 2)

    async def _confirmed(
        self, reply: Reply, claims: Sequence[Claim], answers: Sequence[Renewal], sent: float
    ) -> list[Renewal]:
        """Wait until enough replicas have what was prolonged, which is unknown if too few do; a loss is told at once."""
        ends = [answer.until for answer in answers if isinstance(answer, Grant) and answer.until > NEVER]
        if not ends or self._server.confirm is None:
            return list(answers)
        for claim, answer in zip(claims, answers, strict=True):
            if isinstance(answer, str):
                self.events.put(Event(EventKind.LOST, claim, answer))
        try:
            await self._server.confirm(reply, min(ends), sent)
        except BackendUnavailable as error:
            return [error if isinstance(each, Grant) and each.until > NEVER else each for each in answers]
        return list(answers)

    def _ask_format(self) -> None:
        """Read the format anew: a hold is gone, and all data may be, so that a client of another version came first."""
        # One question is enough for thousands of holds.
        if self._asked_format is None or self._asked_format.done():
            self._asked_format = self._issue(encode(*self._format.question))
            self._asked_format.add_done_callback(self._reported_format)

    def _reported_format(self, reply: asyncio.Future[Any]) -> None:
        if not reply.cancelled() and reply.exception() is None:
            self._server.verified(self._format.refusal(reply.result()))

    # --- administration

    def _context(self, name: str, family: Family) -> tuple[Context, str]:
        """Return the context of a family, and the key of a lock."""
        context = self._shared if family.shareable else self._mutex
        return context, context.commands.key(name, family)

    async def inspect(self, name: str, family: Family) -> LockInfo:
        """Send one script, which writes nothing."""
        context, key = self._context(name, family)
        return admin.read(await context.commands.inspect(key), name, family)

    async def force_release(self, name: str, family: Family, token: int | None = None) -> bool:
        """Send one script, which notifies the holders."""
        context, key = self._context(name, family)
        taken, claim = await context.commands.force(key, token)
        context.wakeups.handed_over(key, claim)
        return bool(taken)

    async def request_release(self, name: str, family: Family, reason: str) -> bool:
        """Send one script, which notifies the holders, and has their next renewals repeat the request."""
        context, key = self._context(name, family)
        return bool(await context.commands.ask(key, reason))

    async def set_limit(self, name: str, limit: int) -> None:
        """Send one script, which grants the waiters that fit then."""
        context, key = self._context(name, Family.SEMAPHORE)
        context.wakeups.handed_over(key, await context.commands.limit(key, limit))

    async def names(self, pattern: str) -> list[tuple[str, Family]]:
        """Scan the keys, and inspect what they belong to."""
        return await admin.names(self._server.calls(), self._prefix, pattern, self.inspect)

    async def empty(self) -> None:
        """Delete the keys of the namespace, also that of its format."""
        await admin.empty(self._server.calls(), self.settings.namespace)

    async def diagnose(self) -> list[Finding]:
        """Examine the server over separate connections, so that it works also where opening fails."""
        return await self._server.diagnose(self.settings)


class RedisBackend(BaseBackend[SingleServer]):
    """One Redis or Valkey server, or the primary of a service; :class:`SingleServer` has the parameters, and ``make`` returns one in their place."""

    name = "Redis"
    renewal_limit = 100
    """The work of a round of renewals is spread over several calls."""

    @forgets_arguments
    def __init__(
        self, url: str | None = None, *, make: Callable[[], SingleServer] | None = None, **options: Any
    ) -> None:
        super().__init__(SingleServer(url, **options) if make is None else make())

    def renewal_group(self, claim: Claim) -> Hashable:
        """Return the commands of the claim's family."""
        return claim.commands if isinstance(claim, RedisClaim) else None

    async def renew(self, claims: Sequence[Claim]) -> list[Renewal]:
        """Renew the holds of one family in one call; those of one round leave in one write."""
        mine = [claim for claim in claims if isinstance(claim, RedisClaim)]
        sent = self.settings.clock()
        reply = renewal(mine)
        server, *states = await reply
        pairing = self._server.pairing
        if pairing is not None:
            pairing.latest = server, sent, pairing.received
        answers: list[Renewal] = [
            self._renewed(claim, state, sent) for claim, state in zip(mine, states, strict=True)
        ]
        return answers if self._server.confirm is None else await self._confirmed(reply, mine, answers, sent)
