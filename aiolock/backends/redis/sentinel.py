"""A server that is found by asking Sentinels: which one is the primary is theirs to say, whenever we connect.

There is nothing to be told of a failover: whoever ceases to be the primary is made to close its connections, or answers
READONLY, or nothing at all. Then we connect anew, and ask.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Any
from urllib.parse import unquote, urlsplit
from weakref import WeakKeyDictionary

from hiredis import ProtocolError, Reader, ReplyError
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import NoPermissionError, ReadOnlyError

from aiolock.backends.redis.commands import encode
from aiolock.backends.redis.endpoint import Endpoint
from aiolock.backends.redis.replies import from_reply
from aiolock.contract import Finding
from aiolock.errors import BackendError, BackendRefused, BackendUnavailable, ConfigError, shorten
from aiolock.info import Level

__all__ = ["SCHEMES", "Place", "Sentinels", "named"]

SCHEMES = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
"""Those of addresses that name Sentinels, and of the connections that are made."""
PORT = 26379
GRACE = 0.25
"""Seconds that the others have to answer once one has; who is named has to say itself that it is the primary."""
SOON = 2.0
"""Seconds after which one that is healthy has answered."""
FEWEST = 3
"""Sentinels that a service should have."""
SHARE = 0.5
"""Of the time to connect, for asking the Sentinels."""

_NOTHING = object()

Place = tuple[str, int]
"""A host and a port."""


class Sentinels(Endpoint):
    """The primary of a service, wherever it is at the moment.

    :param url: ``redis+sentinel://[user:password@]host:26379,host:26379,host:26379/service[/db]``; name and password are
        those of the servers. ``rediss+sentinel://`` is TLS for all of them.
    :param sentinel_username: the same for the Sentinels themselves, if they ask for it.
    :param sentinel_password: see there. Both may also stand in the query of the URL.
    :param options: those of :class:`Endpoint`.
    """

    __slots__ = ("places", "service", "watchers")

    moves = True

    def __init__(
        self,
        url: str,
        *,
        sentinel_username: str | None = None,
        sentinel_password: str | None = None,
        **options: Any,
    ) -> None:
        scheme, _, rest = url.partition("://")
        place, mark, query = rest.partition("?")
        account, at, hosts_and_path = place.rpartition("@")
        hosts, _, path = hosts_and_path.partition("/")
        service, _, db = path.partition("/")
        if not service or not hosts:
            raise ConfigError(
                "the address of Sentinels names hosts and a service, as in redis+sentinel://h1:26379,h2:26379/service/0"
            )
        theirs: dict[str, Any] = {"username": sentinel_username, "password": sentinel_password}
        kept = []
        for word in query.split("&") if mark else ():
            name, _, value = word.partition("=")
            if name in {"sentinel_username", "sentinel_password"}:
                if theirs[name.removeprefix("sentinel_")] is not None:
                    raise ConfigError(f"{name} is given twice; say it once")
                theirs[name.removeprefix("sentinel_")] = unquote(value)
            else:
                kept.append(word)
        query = f"?{'&'.join(kept)}" if kept else ""
        kind = SCHEMES[scheme.lower()]
        super().__init__(f"{kind}://{account}{at}localhost/{db}{query}", **options)
        self.service = unquote(service)
        self.places: WeakKeyDictionary[asyncio.Protocol, Place] = WeakKeyDictionary()
        """Where those are connected who are, as Sentinels call it."""
        files = {name: value for name, value in self._kwargs.items() if name.startswith("ssl_")}
        self.watchers = [Endpoint(_of_sentinel(kind, host), **theirs, **files) for host in hosts.split(",")]
        user = f"{self._kwargs['username']}@" if self._kwargs.get("username") else ""
        self.address = f"{scheme}://{user}{hosts}/{service}/{self._kwargs.get('db') or 0}"

    async def connect(self, timeout: float, protocol: asyncio.Protocol) -> asyncio.WriteTransport:
        """As that of one server, to the one that most Sentinels name, if it says itself that it is the primary."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        host, port = place = await self.primary(SHARE * timeout)
        primary = _Primary.__new__(_Primary)
        primary._set(self._kind, self._kwargs | {"host": host, "port": port})  # noqa: SLF001 - its own class
        try:
            transport = await primary.connect(max(0.0, end - loop.time()), protocol)
        except BackendError as error:
            # Who was the primary may still be named for a while; soon it is another one.
            kind = BackendUnavailable if isinstance(error.__cause__, ReadOnlyError) else type(error)
            failure = kind(f"{self.address}: {error}", retryable=error.retryable)
            raise failure from error.__cause__
        self.places[protocol] = place
        return transport

    async def look(self, timeout: float) -> list[Finding]:
        """Whether they all answer soon, and name the same primary."""
        soon = min(timeout, SOON)
        asked = [asyncio.ensure_future(named(one, self.service, soon)) for one in self.watchers]
        try:
            await asyncio.wait(asked)
        finally:
            for one in asked:
                one.cancel()
        silent = [error for one in asked if (error := one.exception()) is not None]
        places = {one.result() for one in asked if one.exception() is None}
        count = len(asked)
        if len(places) > 1:
            text = f"they name {len(places)} different primaries: there is a failover, or some of them are cut off"
            return [
                Finding(Level.WARNING, "sentinels", text, "look again; if it stays so, see SENTINEL CKQUORUM")
            ]
        if silent:
            text = f"{len(silent)} of {count} cannot be asked: {silent[0]}"
            return [Finding(Level.WARNING, "sentinels", text, "bring it back, or take it out of the address")]
        if count < FEWEST:
            text = f"the address names {count}: if it is away, nobody finds the primary"
            return [
                Finding(Level.WARNING, "sentinels", text, "name all of them, which should be three or more")
            ]
        return [Finding(Level.OK, "sentinels", f"all {count} answer, and name the same primary")]

    async def primary(self, timeout: float) -> Place:
        """Where most of those say that it is who answer in time, or all who can be asked."""
        asked: list[asyncio.Future[Place]] = [
            asyncio.ensure_future(named(one, self.service, timeout)) for one in self.watchers
        ]
        try:
            left: set[asyncio.Future[Place]] = set(asked)
            while left:
                more = GRACE if _said(asked) else None
                done, left = await asyncio.wait(left, timeout=more, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                for place, count in _said(asked).items():
                    if 2 * count > len(asked):
                        return place
        finally:
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        if said := _said(asked):
            return said.most_common(1)[0][0]
        errors = [error for one in asked if isinstance(error := one.exception(), BackendError)]
        known = [error for error in errors if isinstance(error, BackendRefused)]
        first = (known or errors)[0]
        failure = type(first) if len(known) in {0, len(asked)} else BackendUnavailable
        raise failure(f"{self.address}: no Sentinel names the primary: {first}") from first.__cause__


class _Primary(Endpoint):
    """A server that has to be one that is written to."""

    __slots__ = ()

    async def _look(self, driver: AbstractConnection) -> None:
        await super()._look(driver)
        await driver.send_command("ROLE")
        with contextlib.suppress(NoPermissionError):
            # Who may not ask learns it from what the server says to the first lock.
            role = await driver.read_response()
            if role[0] not in {b"master", "master"}:
                raise ReadOnlyError("READONLY it is not the primary any more, or not yet")


class _Question(asyncio.Protocol):
    """One command and its answer."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._reader = Reader(notEnoughData=_NOTHING)

    def data_received(self, data: bytes) -> None:
        """Take in what came."""
        try:
            self._reader.feed(data)
            reply = self._reader.gets()
        except ProtocolError as error:
            reply = error
        if reply is _NOTHING or self.answer.done():
            return
        if isinstance(reply, ReplyError):
            refused = from_reply(str(reply))
            refused.__cause__ = reply
            self.answer.set_exception(refused)
        elif isinstance(reply, Exception):
            self.answer.set_exception(reply)
        else:
            self.answer.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        """No answer comes any more."""
        if not self.answer.done():
            self.answer.set_exception(exc or ConnectionResetError("the connection broke"))


async def named(sentinel: Endpoint, service: str, timeout: float) -> Place:
    """Where one Sentinel says that the primary is, within ``timeout`` seconds; raises :class:`BackendError`."""
    try:
        async with asyncio.timeout(timeout):
            question = _Question()
            transport = await sentinel.connect(timeout, question)
            try:
                transport.write(encode("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service))
                reply = await question.answer
            finally:
                transport.abort()
    except BackendError:
        raise
    except Exception as error:
        raise BackendUnavailable(
            f"{sentinel} did not answer: {str(error) or type(error).__name__}"
        ) from error
    if reply is None:
        raise BackendRefused(f"{sentinel} watches no service that is called {shorten(service)}")
    host, port = (part.decode() for part in reply)
    return host, int(port)


def _said(asked: list[asyncio.Future[Place]]) -> Counter[Place]:
    """How many have named which place so far."""
    return Counter(
        one.result() for one in asked if one.done() and not one.cancelled() and one.exception() is None
    )


def _of_sentinel(kind: str, host: str) -> str:
    """The address of one of them."""
    url = f"{kind}://{host}"
    try:
        return url if urlsplit(url).port else f"{url}:{PORT}"
    except ValueError:
        raise ConfigError("one of the addresses of Sentinels is no host and port, as h1:26379 is") from None
