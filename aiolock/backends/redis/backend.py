"""Redis backend: from requests to claims, renewals and events of one server."""

from __future__ import annotations

import asyncio
import secrets
from abc import abstractmethod
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, Self

from redis.asyncio.connection import AbstractConnection

from aiolock.backends.dialects import scheme_of
from aiolock.backends.redis import admin
from aiolock.backends.redis.claim import GONE, Context, RedisClaim, Released, SharedClaim, renewal
from aiolock.backends.redis.commands import (
    LOADED,
    PUBLISH,
    SCRIPTS,
    Commands,
    Format,
    Issue,
    MutexCommands,
    Scripts,
    Tokens,
    encode,
)
from aiolock.backends.redis.connection import Connection, Pairing
from aiolock.backends.redis.diagnosis import assess, examine, may_publish, probe
from aiolock.backends.redis.pubsub import Messages, Subscriber
from aiolock.backends.redis.register import RedisRegister, Registers
from aiolock.backends.redis.run_id import RunId
from aiolock.backends.redis.same_server import SameServer
from aiolock.backends.redis.sentinel import SCHEMES as SENTINELS
from aiolock.backends.redis.sentinel import Sentinels, Switching
from aiolock.backends.redis.url import Endpoint
from aiolock.backends.redis.waiting import BATCH, Wakeups
from aiolock.backends.transport import Options, Transport
from aiolock.backends.urls import Host
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
from aiolock.core.logs import Log, get_logger
from aiolock.errors import BackendUnavailable, ConfigError, UnsafeBackend, forgets_arguments
from aiolock.types import MUTEX, Family, Finding, LockInfo
from aiolock.validation import escape

__all__ = ["BaseBackend", "RedisBackend"]

log: Log = get_logger("aiolock")

GRACE = 0.05
"""Seconds that opening may take longer than it should."""


class BaseBackend(Administration, RegisterStore, Diagnosis):
    """Claims, renewals, registers and administration: the common part of a single server and a cluster.

    ``bind`` builds everything, and ``open`` may be called again after a failure: claims made before it stay valid.
    """

    keeps_values = True

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self.address = str(endpoint)
        self._process = secrets.token_hex(16)
        self._count = 0
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
        self._format = Format(settings.namespace, self._verified)
        self._asked_format: asyncio.Future[Any] | None = None
        self._released = Released(settings.clock) if self._endpoint.moves else None
        clock, limit = settings.clock, settings.command_timeout
        self._options: Options = {"clock": clock, "command_timeout": limit, "outages": settings.outages}
        self._issue, scripts, pairing = self._connect()

        def context(commands: Commands) -> Context:
            # In a cluster a call is about one slot, which two locks seldom share.
            batch = 1 if pairing is None else BATCH
            wakeups = Wakeups(
                commands.heartbeat, commands.tickets, clock=clock, random=settings.random, batch=batch
            )
            return Context(clock, limit, commands, wakeups, self.claims, self._released, pairing)

        names = self._tokens, self._prefix, self._process
        self._mutex = context(MutexCommands(self._issue, scripts, *names))
        self._shared = context(Commands(self._issue, scripts, *names, family="many_"))
        self._contexts = self._mutex, self._shared
        self._registers = Registers(
            self._issue, scripts, self._process, clock, pushed=lambda: self._mutex.wakeups.pushed
        )
        self._messages = Messages(self._mutex, self.events, self._registers.notify)

    @abstractmethod
    def _connect(self) -> tuple[Issue, Scripts, Pairing | None]:
        """Make the connections without opening them.

        Return the destination of commands, the scripts for it, and the pairing of server and local time: ``None`` in a
        cluster, where a reply may have the time of any node.
        """

    # --- opening and closing

    async def open(self) -> None:
        """Connect, and find out what the server can do."""
        limit = self.settings.command_timeout
        for context in self._contexts:
            context.wakeups.open()
        self._registers.open()
        try:
            # Each step has the same limit and a better message; this one bounds their sum.
            async with asyncio.timeout(limit + GRACE):
                await self._open()
        except TimeoutError as error:
            for transport in self._transports():
                if transport.failure is not None:
                    raise transport.failure from transport.failure.__cause__
            raise BackendUnavailable(
                f"{self._endpoint} did not answer everything that it was asked within {limit:g} s"
            ) from error

    @abstractmethod
    async def _open(self) -> None:
        """Connect; see :meth:`open`."""

    @abstractmethod
    def _transports(self) -> list[Transport]:
        """Return the connections whose failure explains why opening failed."""

    @abstractmethod
    def _verified(self, error: UnsafeBackend | None) -> None:
        """Record the format of the namespace's data: why it cannot be used, if it cannot."""

    def _stop(self) -> None:
        """End timers and waits, before the connections are closed."""
        for context in self._contexts:
            context.wakeups.close()
        self._registers.close()
        self.claims.clear()

    def _push(self, *, pushed: bool) -> None:
        """Note whether messages are pushed to this client, and check all waiters, because some messages may have been missed."""
        for context in self._contexts:
            context.wakeups.set_pushed(pushed=pushed)
        self._check_all()

    def _check_all(self) -> None:
        for context in self._contexts:
            context.wakeups.now()
        self._registers.wake_all()

    # --- claims and registers

    def claim(self, request: Request) -> RedisClaim:
        """Return a claim with a request id of its own."""
        self._count = number = self._count + 1
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

    def _ask_format(self) -> None:
        """Read the format anew: a hold is gone, and all data may be, so that a client of another version came first."""
        # One question is enough for thousands of holds.
        if self._asked_format is None or self._asked_format.done():
            self._asked_format = self._issue(encode(*self._format.question))
            self._asked_format.add_done_callback(self._reported_format)

    def _reported_format(self, reply: asyncio.Future[Any]) -> None:
        if not reply.cancelled() and reply.exception() is None:
            self._verified(self._format.refusal(reply.result()))

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
        return await admin.names(self._calls(), self._prefix, pattern, self.inspect)

    @abstractmethod
    def _calls(self) -> list[admin.Call]:
        """Return for each server the function that sends it a command."""


class RedisBackend(BaseBackend):
    """One Redis or Valkey server, version 6.2 or later.

    :param url: ``redis://[user:password@]host:6379/0``, ``rediss://…`` (TLS), ``unix:///path/to.sock?db=0``; or
        ``redis+sentinel://host:26379,host:26379/service/0``, for the primary that :class:`Sentinels` name.
    :param client: an application's own ``redis.asyncio.Redis`` instead: connections are made the same way, with the same
        credentials, but are separate ones.
    :param options: those of a connection; :class:`Endpoint` lists them.
    """

    name = "Redis"
    renewal_limit = 100
    """The work of a round of renewals is spread over several calls."""

    @forgets_arguments
    def __init__(self, url: str | None = None, *, client: Any = None, **options: Any) -> None:
        if client is not None:
            if given := [*(["an address"] if url is not None else []), *options]:
                raise ConfigError(
                    f"{', '.join(given)}: the client brings its address and options with it; give nothing beside it"
                )
            endpoint = Endpoint.of(client)
        elif isinstance(url, str) and scheme_of(url) in SENTINELS:
            endpoint = Sentinels(url, **options)
        else:
            endpoint = Endpoint(url, **options)
        super().__init__(endpoint)
        self._switching: Switching | None = None

    def _connect(self) -> tuple[Issue, Scripts, Pairing]:
        commands, messages = RunId(), RunId()

        async def verify(driver: AbstractConnection) -> None:
            # In one round trip.
            await driver.send_command(*commands.question)
            await driver.send_command(*self._format.question)
            await commands.read(driver)
            await self._format.read(driver)

        connection = self._connection = Connection(
            self._endpoint,
            scripts=[SCRIPTS[name] for name in LOADED],
            verify=verify,
            on_up=self._up,
            on_down=lambda: self._same.check(),
            **self._options,
        )
        subscriber = self._subscriber = Subscriber(
            self._endpoint,
            self._channel,
            on_message=self._message,
            server=messages,
            on_up=self._subscribed,
            on_down=partial(self._push, pushed=False),
            **self._options,
        )
        count = partial(connection.call, "PUBSUB", "NUMSUB", self._channel)
        untold = partial(self._push, pushed=False)
        self._same = SameServer(
            connection, subscriber, (commands, messages), count, untold, self.settings.random
        )
        return connection.issue, SCRIPTS, connection.pairing

    async def _open(self) -> None:
        endpoint, connection, subscriber = self._endpoint, self._connection, self._subscriber
        await connection.open()
        key = f"{self._prefix}probe:{{{self._process}}}"
        publishing = connection.call("EVAL", PUBLISH.source, "1", key, self._channel)
        version = connection.call(*self._format.question)
        info = await probe(connection.call, key)
        publishes = may_publish(await publishing)
        if isinstance(endpoint, Sentinels):
            self._switching = Switching(endpoint, switched=partial(self._switched, endpoint), **self._options)
            self._switching.open()
        # Other clients of an account that may not publish most likely may not either.
        if publishes:
            await subscriber.open()
        pushed = publishes and subscriber.denied is None
        self._push(pushed=pushed and subscriber.subscribed)
        verdict = assess(info, pushed=pushed)
        self._format.check(await version)
        self.capabilities = verdict.capabilities
        for warning in verdict.warnings:
            log.warning("%s: %s", endpoint, warning)

    async def aclose(self) -> None:
        """Close all connections."""
        self._stop()
        if self._switching is not None:
            await self._switching.aclose()
        for transport in (self._subscriber, self._connection):
            await transport.aclose()

    def _transports(self) -> list[Transport]:
        return [self._connection, self._subscriber]

    def _subscribed(self) -> None:
        self._same.check()
        # Not if the subscription was given up at once.
        if self._subscriber.subscribed:
            self._push(pushed=True)

    def _message(self, payload: bytes) -> None:
        pairing = self._connection.pairing if self._same.known else None
        self._messages.dispatch(lambda _: pairing, payload)

    def _up(self) -> None:
        self._same.check()
        # The server may be another one now, or have lost data.
        if self._released is not None:
            for claim, keep in self._released.again():
                claim.leave_again(keep)
        self.events.put(Event(EventKind.DOUBT))
        self._check_all()

    def _switched(self, endpoint: Sentinels, primary: Host) -> None:
        for transport in self._transports():
            if endpoint.primaries.get(transport) != primary:
                transport.leave()

    def _verified(self, error: UnsafeBackend | None) -> None:
        if error is not None:
            # Connecting anew is refused.
            self._connection.leave()

    def renewal_group(self, claim: Claim) -> Hashable:
        """Return the commands of the claim's family."""
        return claim.commands if isinstance(claim, RedisClaim) else None

    async def renew(self, claims: Sequence[Claim]) -> list[Renewal]:
        """Renew the holds of one family in one call; those of one round leave in one write."""
        mine = [claim for claim in claims if isinstance(claim, RedisClaim)]
        sent = self.settings.clock()
        server, *states = await renewal(mine)
        pairing = self._connection.pairing
        pairing.latest = server, sent, pairing.received
        return [self._renewed(claim, state, sent) for claim, state in zip(mine, states, strict=True)]

    def _calls(self) -> list[admin.Call]:
        return [self._connection.call]

    async def diagnose(self) -> list[Finding]:
        """Examine the server over separate connections, so that it works also where opening fails."""
        found = await examine(self._endpoint, self.settings)
        if isinstance(self._endpoint, Sentinels):
            found += await self._endpoint.diagnose(self.settings.command_timeout)
        return found
