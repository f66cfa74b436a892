"""Sentinel: find the primary of a service, and follow failovers.

The Sentinels are asked whenever a connection is made. A server that ceases to be the primary closes its connections,
answers READONLY, or stays silent; the connection is then made anew. Because the old primary may take writes for seconds
until a Sentinel reaches it, and locks taken there exist a second time at the new one, the Sentinels' announcements are
subscribed to as well.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, Unpack
from urllib.parse import unquote
from weakref import WeakKeyDictionary

from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection
from redis.exceptions import NoPermissionError, ReadOnlyError

from aiolock.backends.diagnosis import ok, warning
from aiolock.backends.foreign_parameters import REDIS
from aiolock.backends.redis.pubsub import Subscriber
from aiolock.backends.redis.url import (
    BESIDE,
    IN_URL,
    Endpoint,
    Verify,
    credentials,
    form_of,
)
from aiolock.backends.survey import answers, survey, why_none
from aiolock.backends.transport import Options
from aiolock.backends.urls import Form, Host, Reader, parse, text
from aiolock.core.logs import Log, get_logger
from aiolock.core.tasks import TaskSet, end
from aiolock.errors import BackendError, BackendRefused, BackendUnavailable, shorten
from aiolock.types import Finding

__all__ = ["CHANNEL", "OF_SENTINELS", "RIGHTS", "SCHEMES", "Sentinels", "Switching"]

log: Log = get_logger("aiolock")

CHANNEL = "+switch-master"
"""Where Sentinels announce that another server has become the primary."""
RIGHTS = f"+ping +sentinel|get-master-addr-by-name +subscribe &{CHANNEL}"
"""Rights that an account needs at a Sentinel."""
SOON = 2.0
"""Seconds after which a healthy Sentinel has answered."""
FEWEST = 3
"""Sentinels that a service should have."""
SHARE = 0.5
"""Share of the time to connect that the question to the Sentinels may take."""
LATE = 10.0
"""Seconds after a failover for which a Sentinel, or the old primary itself, may not know of it."""

SCHEMES = ("redis+sentinel", "rediss+sentinel")
OF_SENTINELS: Final[Mapping[str, Reader]] = {"sentinel_username": text, "sentinel_password": text}
"""Options for the Sentinels themselves."""
_FORM = Form(
    "Redis",
    "redis+sentinel://user:password@h1:26379,h2:26379/service/0",
    SCHEMES,
    26379,
    {**IN_URL, **OF_SENTINELS},
    BESIDE,
    several=True,
    foreign=REDIS,
    reserved="/",
)

# --- one Sentinel

_LOGIN = "Sentinels have passwords of their own, sentinel_password= and perhaps sentinel_username="
_NO_SENTINEL = "is no Sentinel: the address names those, which know where the servers are"


async def _named(sentinel: Endpoint, service: str, timeout: float) -> Host:
    """Return the primary that one Sentinel names, within ``timeout`` seconds; raises :class:`BackendError`."""
    reply = await _asked(sentinel, timeout, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", service)
    if reply is None:
        raise BackendRefused(f"{sentinel} watches no service that is called {shorten(service)}")
    try:
        name, port = (part.decode() for part in reply)
        return Host(name, int(port))
    except (AttributeError, TypeError, ValueError) as error:
        raise BackendRefused(f"{sentinel} {_NO_SENTINEL}") from error


async def _announces(sentinel: Endpoint, timeout: float) -> bool:
    """Return whether this account may subscribe to failovers; raises :class:`BackendUnavailable`."""
    try:
        await _asked(sentinel, timeout, "SUBSCRIBE", CHANNEL)
    except BackendRefused:
        return False
    return True


async def _asked(sentinel: Endpoint, timeout: float, *arguments: str) -> Any:
    """Send one command; an error that any server may answer is worded for a Sentinel."""
    try:
        return await sentinel.ask(timeout, *arguments)
    except BackendError as error:
        message = str(error)
        if "unknown command" in message:
            message = f"{sentinel} {_NO_SENTINEL}"
        elif "NOAUTH: " in message:
            message = f"{sentinel}: NOAUTH: it asks for a password: {_LOGIN}"
        elif "WRONGPASS: " in message:
            message = f"{sentinel}: WRONGPASS: it knows no enabled user with this name and password: {_LOGIN}"
        elif "NOPERM: " in message:
            message = f"{sentinel}: NOPERM: this account may not ask it: grant it {RIGHTS}"
        raise type(error)(message, retryable=error.retryable) from error.__cause__


# --- all of them


class Sentinels(Endpoint):
    """The primary of a service, wherever it is at the moment.

    :param url: ``redis+sentinel://[user:password@]host:26379,host:26379,host:26379/service[/db]``; name and password are
        those of the servers. ``rediss+sentinel://`` is TLS for all of them.
    :param sentinel_username: the same for the Sentinels themselves, if they ask for it.
    :param sentinel_password: see there. Both may also stand in the query of the URL.
    :param options: those of :class:`Endpoint`.
    """

    moves = True

    def __init__(
        self,
        url: str,
        *,
        sentinel_username: str | None = None,
        sentinel_password: str | None = None,
        **options: Any,
    ) -> None:
        given = options | {
            "sentinel_username": sentinel_username,
            "sentinel_password": sentinel_password,
        }
        address = parse(form_of(_FORM, url), url, given)
        service, _, db = address.path[1:].partition("/")
        if not service:
            raise _FORM.error("it names hosts but no service")
        self.replicas = address.options.pop("replicas", 0)
        theirs = {name: address.options.pop(f"sentinel_{name}", None) for name in ("username", "password")}
        kind = SSLConnection if address.scheme == "rediss+sentinel" else Connection
        self._set(kind, credentials(address, db))
        self.service = unquote(service)
        self.primaries: WeakKeyDictionary[asyncio.Protocol, Host] = WeakKeyDictionary()
        """The address that each connection leads to, as the Sentinels name it."""
        self._failed: Host | None = None
        """The latest one that could not be connected to."""
        self._latest: Host | None = None
        """The latest primary that was announced."""
        self._replaced: dict[Host, float] = {}
        """Earlier primaries, and until when (by the loop's clock) a Sentinel that names one is late."""
        self.watchers = [
            self.elsewhere(Endpoint, host, **theirs, db=0, client_name=None, credential_provider=None)
            for host in address.hosts
        ]
        self.address = (
            f"{address.scheme}://{self.user}{address.host_list}/{service}/{self._kwargs.get('db') or 0}"
        )

    async def connect(
        self, timeout: float, protocol: asyncio.Protocol, verify: Verify | None = None
    ) -> asyncio.WriteTransport:
        """Connect to the server that most Sentinels name, if its own ``ROLE`` is that of a primary."""
        loop = asyncio.get_running_loop()
        end, latest = loop.time() + timeout, self._latest
        host = await self.primary(SHARE * timeout)
        primary = self.elsewhere(_Primary, host)
        try:
            transport = await primary.connect(max(0.0, end - loop.time()), protocol, verify)
        except BackendError as error:
            self._failed = host
            raise type(error)(f"{self.address}: {error}", retryable=error.retryable) from error.__cause__
        if self._latest is not latest and self._latest != host:
            # Announced while this connection was being made, so that it was not among those that were dropped.
            transport.set_protocol(asyncio.Protocol())
            transport.abort()
            raise BackendUnavailable(f"{self.address}: another server has taken over")
        self.primaries[protocol] = host
        return transport

    def learn(self, new: Host, old: Host | None = None) -> None:
        """Note that ``new`` is the primary; Sentinels may name ``old`` for a while."""
        self._latest = new
        self._replaced.pop(new, None)
        if old is not None and old != new:
            self._replaced[old] = asyncio.get_running_loop().time() + LATE

    async def diagnose(self, timeout: float) -> list[Finding]:
        """Report whether all Sentinels answer soon, and name the same primary. Cancelling it leaves no socket behind."""
        soon = min(timeout, SOON)

        async def examine(watcher: Endpoint) -> tuple[Host, bool]:
            return await _named(watcher, self.service, soon), await _announces(watcher, soon)

        tasks = await survey(map(examine, self.watchers))
        silent = [error for task in tasks if (error := task.exception()) is not None]
        found = answers(tasks)
        hosts, count = {host for host, _ in found}, len(tasks)
        if len(hosts) > 1:
            them = ", ".join(sorted(f"{name} {port}" for name, port in hosts))
            problem = f"they name {len(hosts)} different primaries ({them}): there is a failover, or some of them are cut off"
            advice = "repeat the diagnosis; if it stays so, see SENTINEL CKQUORUM"
        elif silent:
            problem = f"{len(silent)} of {count} cannot be asked: {silent[0]}"
            advice = "bring it back, or take it out of the address"
        elif not all(announced for _, announced in found):
            problem = f"an account may not subscribe to {CHANNEL}: a failover is noticed only when the old primary learns of it"
            advice = f"grant it {RIGHTS} at all of them"
        elif count < FEWEST:
            problem = f"the address names {count}: if it is away, the primary cannot be found"
            advice = "name all of them, which should be three or more"
        else:
            return [ok("sentinels", f"all {count} answer, and name the same primary")]
        return [warning("sentinels", problem, advice)]

    async def primary(self, timeout: float) -> Host:
        """Return the primary that a majority names, or else most of the Sentinels that answer in time.

        An earlier primary of a moment ago does not count. Raises :class:`BackendUnavailable`, or
        :class:`BackendRefused` if all of them refuse. Cancelling it leaves no socket behind.
        """

        def majority(replies: list[Host]) -> bool | None:
            votes = self._votes(replies)
            return 2 * max(votes.values()) > len(self.watchers) if votes else None

        tasks = await survey(
            (_named(watcher, self.service, timeout) for watcher in self.watchers), enough=majority
        )
        replies = answers(tasks)
        if votes := self._votes(replies):
            # Of two with as many votes, one may be gone.
            return max(votes, key=lambda host: (votes[host], host != self._failed))
        if replies:
            raise BackendUnavailable(f"{self.address}: no Sentinel that answers knows the new primary yet")
        raise why_none(tasks, f"{self.address}: no Sentinel names the primary")

    def _votes(self, replies: list[Host]) -> Counter[Host]:
        """Count the primaries that were named, without those that were replaced a moment ago."""
        now = asyncio.get_running_loop().time()
        self._replaced = {host: until for host, until in self._replaced.items() if now < until}
        return Counter(host for host in replies if host not in self._replaced)


class _Primary(Endpoint):
    """A server that has to be a primary."""

    async def _check_server(self, driver: AbstractConnection) -> None:
        await super()._check_server(driver)
        await driver.send_command("ROLE")
        # An account without the right to ask learns it from the answer to the first lock.
        with contextlib.suppress(NoPermissionError):
            role = await driver.read_response()
            if not role or role[0] not in {b"master", "master"}:
                raise ReadOnlyError("READONLY it is not the primary any more, or not yet")


# --- failovers


class Switching:
    """A subscription at each Sentinel; ``switched(host)`` is called with a primary that took over.

    It is also called when a subscription is back and that Sentinel names another server than the one in use: then with the
    primary that most Sentinels name now.
    """

    def __init__(
        self,
        endpoint: Sentinels,
        *,
        switched: Callable[[Host], object],
        **options: Unpack[Options],
    ) -> None:
        self._endpoint = endpoint
        self._timeout = options["command_timeout"]
        # An outage is one of the servers with the locks.
        options["outages"] = None
        self._switched = switched
        self._tasks = TaskSet()
        self._closed = False
        self._subscribers = [
            Subscriber(
                one, lambda: [CHANNEL], on_message=self._announced, on_up=partial(self._up, one), **options
            )
            for one in endpoint.watchers
        ]

    def open(self) -> None:
        """Subscribe in the background: a Sentinel may be away, and come later."""
        for subscriber in self._subscribers:
            subscriber.begin().add_done_callback(partial(self._begun, subscriber))

    async def aclose(self) -> None:
        """End all subscriptions. Cancelling it may leave some open, for another call."""
        self._closed = True
        await end(self._tasks)
        await asyncio.gather(*(subscriber.aclose() for subscriber in self._subscribers))

    def _begun(self, subscriber: Subscriber, _: asyncio.Future[None]) -> None:
        if subscriber.denied is not None:
            log.warning(
                "%s: an account may not subscribe to failovers there, which are then noticed late; grant it %s",
                self._endpoint,
                RIGHTS,
            )

    def _announced(self, payload: bytes) -> None:
        # The service, where its primary was, and where it is.
        fields = payload.decode("utf-8", "replace").rsplit(" ", 4)
        if len(fields) != 5 or fields[0] != self._endpoint.service:
            return
        with contextlib.suppress(ValueError):
            old, new = Host(fields[1], int(fields[2])), Host(fields[3], int(fields[4]))
            self._endpoint.learn(new, old)
            self._switched(new)

    def _up(self, sentinel: Endpoint) -> None:
        # Not if a subscription came back while another one was being closed.
        if not self._closed:
            self._tasks.spawn(self._ask(sentinel), "aiolock-redis-sentinel")

    async def _ask(self, sentinel: Endpoint) -> None:
        # The announcements of the others count as well, so this Sentinel need not be asked until it answers.
        with contextlib.suppress(BackendError):
            host = await _named(sentinel, self._endpoint.service, self._timeout)
            if any(host != other for other in list(self._endpoint.primaries.values())):
                # A Sentinel that was away itself may name an earlier primary.
                host = await self._endpoint.primary(self._timeout)
                self._endpoint.learn(host)
                self._switched(host)
