"""Server of a Redis backend: its connections, how they are opened, and its diagnosis.

A backend speaks one protocol over them. It names what it needs in a :class:`Usage`, which is the same for a single server, the
primary of a service that Sentinels name, and a cluster.
"""

from __future__ import annotations

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from redis.asyncio.connection import AbstractConnection

from aiolock.backends.foreign_parameters import scheme_of
from aiolock.backends.redis.admin import Call
from aiolock.backends.redis.commands import PROBE, PUBLISH, Format, Issue, Reply, Script
from aiolock.backends.redis.connection import Connection, Pairing
from aiolock.backends.redis.diagnosis import assess, examine, may_publish, probe
from aiolock.backends.redis.pubsub import Subscriber
from aiolock.backends.redis.replicas import Barriers, Confirm
from aiolock.backends.redis.run_id import RunId
from aiolock.backends.redis.same_server import SameServer
from aiolock.backends.redis.sentinel import SCHEMES as SENTINELS
from aiolock.backends.redis.sentinel import Sentinels, Switching
from aiolock.backends.redis.url import REPLICAS, SPOKEN, Endpoint
from aiolock.backends.transport import Options, Transport
from aiolock.backends.urls import Host
from aiolock.core.backend import Settings
from aiolock.core.logs import Log, get_logger
from aiolock.errors import BackendUnavailable, ConfigError, UnsafeBackend
from aiolock.types import Finding

__all__ = ["Concerned", "Keyed", "PairingOf", "RedisServer", "SingleServer", "Usage"]

log: Log = get_logger("aiolock")

GRACE = 0.05
"""Seconds that opening may take longer than it should."""


class Keyed(Protocol):
    """A claim, as far as a server knows it."""

    @property
    def key(self) -> str:
        """Key of the lock."""
        ...


PairingOf = Callable[[Keyed], Pairing | None]
"""Return the pairing of the server that published a message about a claim; ``None`` if another one may have the lock."""
Concerned = Callable[[str], bool]
"""Return whether what happened at a server may be about the lock with this key."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The needs of a backend: names, settings, and functions that its server calls."""

    settings: Settings
    prefix: str
    """Of keys."""
    channel: str
    """The channel of this client, of all its subscriptions."""
    scripts: Sequence[Script]
    """Are loaded whenever a server is connected."""
    format: Format | None
    """Is asked for whenever a server is connected; ``None`` for locks in the format of another library."""
    on_message: Callable[[PairingOf, bytes], object]
    """Is called with each message on the channel."""
    on_push: Callable[[str | None], object]
    """Is called when some messages may have been missed, with what the name of the present subscription's own channel has behind
    :attr:`channel`; ``None`` if no messages arrive."""
    on_mute: Callable[[], object]
    """Is called, while it is opened, if the server takes no script that sends messages."""
    on_up: Callable[[Concerned | None], object]
    """Is called when a server may be another one now, or may have lost data; ``None`` is every lock."""
    on_moved: Callable[[Concerned], object]
    """Is called when messages about some locks may have been missed, because they are at another node now."""
    probe: Script = PROBE
    """Tests whether the account may do what the scripts do."""


class RedisServer(ABC):
    """The connections of one client to a single server or to a cluster.

    ``bind`` makes them, and ``open`` may be called again after a failure.
    """

    issue: Issue
    """Issue an encoded command; set by :meth:`bind`."""
    pairing: Pairing | None = None
    """The pairing of server and local time; ``None`` in a cluster, where a reply may have the time of any node."""
    confirm: Confirm | None = None
    """Waits until enough replicas have what was answered; ``None`` if what the primary answers counts."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.address = str(endpoint)
        self.capabilities: frozenset[str] = frozenset()

    def bind(self, usage: Usage) -> None:
        """Make the connections without opening them."""
        self._usage = usage
        settings = usage.settings
        self._limit = settings.command_timeout
        self._options: Options = {
            "clock": settings.clock,
            "command_timeout": settings.command_timeout,
            "outages": settings.outages,
        }
        self._connect()

    @abstractmethod
    def _connect(self) -> None:
        """Make the connections; set :attr:`issue` and :attr:`pairing`."""

    async def open(self) -> frozenset[str]:
        """Connect, and return the capabilities of this deployment.

        Raises :class:`BackendError`. Cancelling it leaves neither task nor socket behind.
        """
        limit = self._limit
        try:
            # Each step has the same limit and a better message; this one bounds their sum.
            async with asyncio.timeout(limit + GRACE):
                await self._open()
        except TimeoutError as error:
            for transport in self._transports():
                if transport.failure is not None:
                    raise transport.failure from transport.failure.__cause__
            raise BackendUnavailable(
                f"{self.endpoint} did not answer everything that it was asked within {limit:g} s"
            ) from error
        return self.capabilities

    @abstractmethod
    async def _open(self) -> None:
        """Connect, and set :attr:`capabilities`; see :meth:`open`."""

    @abstractmethod
    def _transports(self) -> list[Transport]:
        """Return the connections whose failure explains why opening failed."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close all connections. Cancelling it aborts them."""

    @abstractmethod
    def verified(self, error: UnsafeBackend | None) -> None:
        """Record the format of the namespace's data: why it cannot be used, if it cannot."""

    @abstractmethod
    def calls(self) -> list[Call]:
        """Return for each server the function that sends it a command."""

    @abstractmethod
    async def diagnose(self, settings: Settings) -> list[Finding]:
        """Examine the server over separate connections, so that it works also where opening fails.

        Cancelling it leaves no socket behind.
        """


class SingleServer(RedisServer):
    """One Redis or Valkey server, version 6.2 or later, or the primary of a service that Sentinels name.

    :param url: ``redis://[user:password@]host:6379/0``, ``rediss://…`` (TLS), ``unix:///path/to.sock?db=0``; or
        ``redis+sentinel://host:26379,host:26379/service/0``, for the primary that :class:`Sentinels` name.
    :param client: an application's own ``redis.asyncio.Redis`` instead: connections are made the same way, with the same
        credentials, but are separate ones.
    :param options: those of a connection; :class:`Endpoint` lists them.
    """

    def __init__(self, url: str | None = None, *, client: Any = None, **options: Any) -> None:
        if client is not None:
            spoken = {
                name: SPOKEN[name](name, options.pop(name))
                for name in SPOKEN
                if options.get(name) is not None
            }
            replicas = REPLICAS("replicas", options.pop("replicas", None) or 0)
            if given := [*(["an address"] if url is not None else []), *options]:
                raise ConfigError(
                    f"{', '.join(given)}: the client brings its address and options with it; give nothing beside it"
                )
            endpoint = Endpoint.of(client)
            endpoint.spoken = spoken
            endpoint.replicas = replicas
        elif isinstance(url, str) and scheme_of(url) in SENTINELS:
            endpoint = Sentinels(url, **options)
        else:
            endpoint = Endpoint(url, **options)
        super().__init__(endpoint)
        self.switching: Switching | None = None
        self._subscriptions = 0
        self.barriers: Barriers | None = None

    def _connect(self) -> None:
        usage = self._usage
        commands, messages = RunId(), RunId()

        async def verify(driver: AbstractConnection) -> None:
            # In one round trip.
            await driver.send_command(*commands.question)
            if usage.format is not None:
                await driver.send_command(*usage.format.question)
            await commands.read(driver)
            if usage.format is not None:
                await usage.format.read(driver)

        connection = self.connection = Connection(
            self.endpoint,
            scripts=usage.scripts,
            verify=verify,
            on_up=self._up,
            on_down=lambda: self.same.check(),
            **self._options,
        )
        subscriber = self.subscriber = Subscriber(
            self.endpoint,
            self._new_channels,
            on_message=self._message,
            server=messages,
            on_up=self._subscribed,
            on_down=partial(usage.on_push, None),
            **self._options,
        )

        def count() -> Reply:
            return connection.call("PUBSUB", "NUMSUB", usage.channel + self._subscription)

        untold = partial(usage.on_push, None)
        self.same = SameServer(
            connection, subscriber, (commands, messages), count, untold, usage.settings.random
        )
        self.issue = connection.issue
        self.pairing = connection.pairing
        if replicas := self.endpoint.replicas:
            key = f"{usage.prefix}replicas:{{}}"
            barriers = self.barriers = Barriers(
                self.endpoint, replicas, connection, commands, lambda: key, **self._options
            )
            self.confirm = lambda _, until, sent: barriers.confirm(until, sent)

    async def _open(self) -> None:
        usage, endpoint = self._usage, self.endpoint
        connection, subscriber = self.connection, self.subscriber
        await connection.open()
        key = f"{usage.prefix}probe:{{{secrets.token_hex(16)}}}"
        publishing = connection.call("EVAL", PUBLISH.source, "1", key, usage.channel)
        version = None if usage.format is None else connection.call(*usage.format.question)
        info = await probe(connection.call, key, usage.probe)
        publishes = await may_publish(publishing)
        if publishes is None:
            usage.on_mute()
        if isinstance(endpoint, Sentinels):
            self.switching = Switching(endpoint, switched=partial(self._switched, endpoint), **self._options)
            self.switching.open()
        # Other clients of an account that may not publish most likely may not either.
        if publishes:
            # The subscriber reports whether messages arrive.
            await subscriber.open()
        else:
            usage.on_push(None)
        pushed = bool(publishes) and subscriber.denied is None
        if usage.format is None or version is None:
            # Waiters poll in any case, so this is no loss.
            verdict = assess(info, pushed=True)
        else:
            verdict = assess(info, pushed=pushed, mute=publishes is None)
            usage.format.check(await version)
        if self.barriers is not None:
            await self.barriers.connection.open()
            await self.barriers.check()
        self.capabilities = verdict.capabilities
        for warning in verdict.warnings:
            log.warning("%s: %s", endpoint, warning)

    async def aclose(self) -> None:
        """Close all connections. Cancelling it may leave some open, for another call."""
        if self.switching is not None:
            await self.switching.aclose()
        for transport in (self.subscriber, self.connection):
            await transport.aclose()
        if self.barriers is not None:
            await self.barriers.aclose()

    def _transports(self) -> list[Transport]:
        more = [] if self.barriers is None else [self.barriers.connection]
        return [self.connection, self.subscriber, *more]

    @property
    def _subscription(self) -> str:
        """The end of the name of the present subscription's own channel: the server may still count an earlier one."""
        return f":{self._subscriptions}"

    def _new_channels(self) -> tuple[str, str]:
        self._subscriptions += 1
        return self._usage.channel, self._usage.channel + self._subscription

    def _subscribed(self) -> None:
        self.same.check()
        # Not if the subscription was given up at once.
        if self.subscriber.subscribed:
            self._usage.on_push(self._subscription)

    def _message(self, payload: bytes) -> None:
        pairing = self.connection.pairing if self.same.known else None
        self._usage.on_message(lambda _: pairing, payload)

    def _up(self) -> None:
        self.same.check()
        if self.barriers is not None:
            self.barriers.compare()
        self._usage.on_up(None)

    def _switched(self, endpoint: Sentinels, primary: Host) -> None:
        for transport in self._transports():
            if endpoint.primaries.get(transport) != primary:
                transport.leave()

    def verified(self, error: UnsafeBackend | None) -> None:
        """Have the connection made anew, which is refused."""
        if error is not None:
            # Connecting anew is refused.
            self.connection.leave()

    def calls(self) -> list[Call]:
        """Return the function that sends a command."""
        return [self.connection.call]

    async def diagnose(self, settings: Settings) -> list[Finding]:
        """Examine the server, and the Sentinels that name it. Cancelling it leaves no connection open."""
        found = await examine(self.endpoint, settings, probe=self._usage.probe)
        if isinstance(self.endpoint, Sentinels):
            found += await self.endpoint.diagnose(settings.command_timeout)
        return found
