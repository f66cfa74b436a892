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

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import NoPermissionError, ReadOnlyError

from aiolock.backends.redis.endpoint import QUOTE, Endpoint
from aiolock.backends.redis.format import Verify
from aiolock.backends.redis.watcher import CHANNEL, RIGHTS, Place, hears, named
from aiolock.contract import Finding
from aiolock.errors import BackendError, BackendRefused, BackendUnavailable, ConfigError
from aiolock.info import Level

__all__ = ["SCHEMES", "Sentinels"]

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
LATE = 10.0
"""Seconds for which a Sentinel may not have heard yet that a primary was replaced, nor that primary itself."""


class Sentinels(Endpoint):
    """The primary of a service, wherever it is at the moment.

    :param url: ``redis+sentinel://[user:password@]host:26379,host:26379,host:26379/service[/db]``; name and password are
        those of the servers. ``rediss+sentinel://`` is TLS for all of them.
    :param sentinel_username: the same for the Sentinels themselves, if they ask for it.
    :param sentinel_password: see there. Both may also stand in the query of the URL.
    :param options: those of :class:`Endpoint`.
    """

    __slots__ = ("_failed", "_latest", "_replaced", "places", "service", "watchers")

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
                "the address of Sentinels names hosts and a service, as in redis+sentinel://h1:26379,h2:26379/service/0; "
                f"{QUOTE}"
            )
        if "@" in account:
            # As it is after a name and password before each of the hosts.
            raise ConfigError(
                f"name and password of the servers stand once, before the first of the Sentinels; {QUOTE}"
            )
        if "#" in service:
            raise ConfigError("write # in the name of a service as %23")
        places = [host.strip() for host in hosts.split(",")]
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
        self._failed: Place | None = None
        """Where it was tried in vain."""
        self._latest: Place | None = None
        """What a Sentinel said last, unasked."""
        self._replaced: dict[Place, float] = {}
        """Who was the primary, and until when (by the loop's clock) whoever names it is late."""
        files = {name: value for name, value in self._kwargs.items() if name.startswith("ssl_")}
        self.watchers = [Endpoint(_of_sentinel(kind, host), **theirs, **files) for host in places]
        if len({watcher.address for watcher in self.watchers}) < len(places):
            raise ConfigError("one of the Sentinels is named twice in the address")
        user = f"{self._kwargs['username']}@" if self._kwargs.get("username") else ""
        self.address = f"{scheme}://{user}{','.join(places)}/{service}/{self._kwargs.get('db') or 0}"

    async def connect(
        self, timeout: float, protocol: asyncio.Protocol, verify: Verify | None = None
    ) -> asyncio.WriteTransport:
        """As that of one server, to the one that most Sentinels name, if it says itself that it is the primary."""
        loop = asyncio.get_running_loop()
        end, latest = loop.time() + timeout, self._latest
        host, port = place = await self.primary(SHARE * timeout)
        primary = _Primary.__new__(_Primary)
        primary._set(self._kind, self._kwargs | {"host": host, "port": port})  # noqa: SLF001 - its own class
        try:
            transport = await primary.connect(max(0.0, end - loop.time()), protocol, verify)
        except BackendError as error:
            self._failed = place
            # Who was the primary may still be named for a while; soon it is another one.
            kind = BackendUnavailable if isinstance(error.__cause__, ReadOnlyError) else type(error)
            failure = kind(f"{self.address}: {error}", retryable=error.retryable)
            raise failure from error.__cause__
        if self._latest is not latest and self._latest != place:
            # Said while we were on our way, and who is on the way cannot be told to leave.
            transport.set_protocol(asyncio.Protocol())
            transport.abort()
            raise BackendUnavailable(f"{self.address}: another server has taken over")
        self.places[protocol] = place
        return transport

    def learn(self, new: Place, old: Place | None = None) -> None:
        """A Sentinel says who the primary is, and who it was before; others may name that one for a while."""
        self._latest = new
        self._replaced.pop(new, None)
        if old is not None and old != new:
            self._replaced[old] = asyncio.get_running_loop().time() + LATE

    async def look(self, timeout: float) -> list[Finding]:
        """Whether they all answer soon, and name the same primary."""
        soon = min(timeout, SOON)
        asked = [asyncio.ensure_future(self._look_at(one, soon)) for one in self.watchers]
        try:
            await asyncio.wait(asked)
        finally:
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        silent = [error for one in asked if (error := one.exception()) is not None]
        found = [one.result() for one in asked if one.exception() is None]
        places, deaf = {place for place, _ in found}, not all(told for _, told in found)
        count = len(asked)
        if len(places) > 1:
            them = ", ".join(sorted(f"{host} {port}" for host, port in places))
            text = f"they name {len(places)} different primaries ({them}): there is a failover, or some of them are cut off"
            return [
                Finding(Level.WARNING, "sentinels", text, "look again; if it stays so, see SENTINEL CKQUORUM")
            ]
        if silent:
            text = f"{len(silent)} of {count} cannot be asked: {silent[0]}"
            return [Finding(Level.WARNING, "sentinels", text, "bring it back, or take it out of the address")]
        if deaf:
            text = f"an account may not subscribe to {CHANNEL}: a failover is noticed only when the old primary hears of it"
            return [Finding(Level.WARNING, "sentinels", text, f"grant it {RIGHTS} at all of them")]
        if count < FEWEST:
            text = f"the address names {count}: if it is away, nobody finds the primary"
            return [
                Finding(Level.WARNING, "sentinels", text, "name all of them, which should be three or more")
            ]
        return [Finding(Level.OK, "sentinels", f"all {count} answer, and name the same primary")]

    async def primary(self, timeout: float) -> Place:
        """Where most of those say that it is who answer in time, or all who can be asked.

        Who names one that was replaced a moment ago is not counted. Raises :class:`BackendUnavailable`, or
        :class:`BackendRefused` if all of them refuse. Cancelling it leaves no socket behind.
        """
        asked: list[asyncio.Future[Place]] = [
            asyncio.ensure_future(named(one, self.service, timeout)) for one in self.watchers
        ]
        try:
            left: set[asyncio.Future[Place]] = set(asked)
            while left:
                more = GRACE if self._counted(asked) else None
                done, left = await asyncio.wait(left, timeout=more, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    break
                for place, count in self._counted(asked).items():
                    if 2 * count > len(asked):
                        return place
        finally:
            for one in asked:
                one.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
        if said := self._counted(asked):
            # Of two that as many name, one may be gone.
            return max(said, key=lambda place: (said[place], place != self._failed))
        if _said(asked):
            raise BackendUnavailable(f"{self.address}: no Sentinel that answers knows the new primary yet")
        errors = [error for one in asked if isinstance(error := one.exception(), BackendError)]
        known = [error for error in errors if isinstance(error, BackendRefused)]
        first = (known or errors)[0]
        failure = type(first) if len(known) in {0, len(asked)} else BackendUnavailable
        raise failure(f"{self.address}: no Sentinel names the primary: {first}") from first.__cause__

    async def _look_at(self, watcher: Endpoint, timeout: float) -> tuple[Place, bool]:
        """Whom one of them names, and whether we hear of it when that changes."""
        return await named(watcher, self.service, timeout), await hears(watcher, timeout)

    def _counted(self, asked: list[asyncio.Future[Place]]) -> Counter[Place]:
        """How many have named which place so far that was not replaced a moment ago."""
        now = asyncio.get_running_loop().time()
        self._replaced = {place: until for place, until in self._replaced.items() if now < until}
        return Counter({place: count for place, count in _said(asked).items() if place not in self._replaced})


class _Primary(Endpoint):
    """A server that has to be one that is written to."""

    __slots__ = ()

    async def _look(self, driver: AbstractConnection) -> None:
        await super()._look(driver)
        await driver.send_command("ROLE")
        with contextlib.suppress(NoPermissionError):
            # Who may not ask learns it from what the server says to the first lock.
            role = await driver.read_response()
            if not role or role[0] not in {b"master", "master"}:
                raise ReadOnlyError("READONLY it is not the primary any more, or not yet")


def _said(asked: list[asyncio.Future[Place]]) -> Counter[Place]:
    """How many have named which place so far."""
    return Counter(
        one.result() for one in asked if one.done() and not one.cancelled() and one.exception() is None
    )


def _of_sentinel(kind: str, host: str) -> str:
    """The address of one of them."""
    url = f"{kind}://{host}"
    try:
        return url if urlsplit(url).port is not None else f"{url}:{PORT}"
    except ValueError:
        raise ConfigError("one of the addresses of Sentinels is no host and port, as h1:26379 is") from None
