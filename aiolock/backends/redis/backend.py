"""The Redis backend: scripts go out on one connection, grants come in on another."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime
from random import Random
from typing import Any, Self

from aiolock.backends.redis.capabilities import is_allowed, judge, probe
from aiolock.backends.redis.claim import RedisClaim
from aiolock.backends.redis.commands import Arg, Script, Wire
from aiolock.backends.redis.connection import Connection
from aiolock.backends.redis.doctor import examine
from aiolock.backends.redis.document import Documents, RedisDocument
from aiolock.backends.redis.endpoint import Endpoint
from aiolock.backends.redis.format import SCRIPT as FORMAT
from aiolock.backends.redis.format import Format
from aiolock.backends.redis.forms import ENTER, MOST_TOKENS, RELEASE, Forms, request
from aiolock.backends.redis.link import Link
from aiolock.backends.redis.listing import busy
from aiolock.backends.redis.many import ASK as ASK_MANY
from aiolock.backends.redis.many import FAMILIES, Many
from aiolock.backends.redis.many import RENEW as RENEW_MANY
from aiolock.backends.redis.many_claim import ManyClaim
from aiolock.backends.redis.pairing import Pairing
from aiolock.backends.redis.pubsub import Subscriber
from aiolock.backends.redis.pushes import GONE, Pushes
from aiolock.backends.redis.recent import Recent
from aiolock.backends.redis.replies import NotSent
from aiolock.backends.redis.scripts import source
from aiolock.backends.redis.sentinel import SCHEMES as SENTINELS
from aiolock.backends.redis.sentinel import Sentinels
from aiolock.backends.redis.switching import Switching
from aiolock.backends.redis.wakeups import Wakeups
from aiolock.backends.redis.watcher import Place
from aiolock.contract import (
    NEVER,
    Backend,
    Bid,
    Claim,
    Family,
    Finding,
    Grant,
    Holder,
    LockInfo,
    Mode,
    News,
    Notice,
    Renewal,
    Settings,
    Waiting,
    certain_until,
)
from aiolock.errors import BackendError, BackendUnavailable, UnsafeBackend
from aiolock.logs import Log, get_logger
from aiolock.names import escape
from aiolock.notices import Notices

__all__ = ["RedisBackend"]

log: Log = get_logger("aiolock")

LEAVE, RENEW, BEAT, FORCE, LOOK, ASK = (
    Script(source(name)) for name in ("leave", "renew", "beat", "force", "look", "ask")
)
SCRIPTS = (ENTER, RELEASE, LEAVE, RENEW, BEAT, FORCE, LOOK, ASK)
PROBE = Script(source("probe"))

MUTEX = Mode.MUTEX

RENEWED = 100
"""How many holds one call renews: what a round of renewals asks of the server is spread over several calls."""

GRACE = 0.05
"""Seconds that opening may take longer than it should."""


class RedisBackend(Backend):
    """One Redis or Valkey server, version 6.2 or later.

    :param url: ``redis://[user:password@]host:6379/0``, ``rediss://…`` (TLS), ``unix:///path/to.sock?db=0``; or
        ``redis+sentinel://host:26379,host:26379/service/0``, for the primary that :class:`Sentinels` name.
    :param client: an application's own ``redis.asyncio.Redis`` instead: its connections are made the same way, with
        the same credentials, but are our own.
    :param options: those of a connection; :class:`Endpoint` lists them.
    """

    name = "Redis"

    def __init__(self, url: str | None = None, *, client: Any = None, **options: Any) -> None:
        self._endpoint = Endpoint.of(client) if client is not None else self._where(url, options)
        self.address = str(self._endpoint)
        self._process = secrets.token_hex(16)
        self._count = 0
        self._floor = 0
        """The highest token that this client has seen in its namespace."""
        self._pairing = Pairing()
        self._notices = Notices()
        self._wire: Wire | None = None
        """Where commands go."""
        self._connection: Connection | None = None
        self._subscriber: Subscriber | None = None
        self._switching: Switching | None = None
        self.claims: dict[int, RedisClaim] = {}
        """By their numbers: those that the server may know."""
        self.wakeups: Wakeups

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._endpoint!r}>"

    def _where(self, url: str | None, options: dict[str, Any]) -> Endpoint:
        if isinstance(url, str) and url.partition("://")[0].lower() in SENTINELS:
            return Sentinels(url, **options)
        return Endpoint(url, **options)

    # --- opening and closing

    def again(self) -> Self:
        """The same server, in a client that knows the highest token."""
        backend = super().again()
        backend.saw(self._floor)
        return backend

    def bind(self, settings: Settings) -> None:
        """Work out the names of keys and channels."""
        super().bind(settings)
        self._prefix = f"{settings.namespace}:1:"
        self._channels = f"{settings.namespace}:1:to:"
        self.clock = settings.clock
        self.wakeups = Wakeups(self._beat, self.tickets, clock=settings.clock, random=Random())
        self.recent = Recent(settings.clock) if self._endpoint.moves else None
        self._forms = Forms(self._prefix, self._process)
        self._many = Many(self)
        self._documents = Documents(self)
        self._format = Format(settings.namespace)
        self._asked_format: asyncio.Future[Any] | None = None
        self._pushes = Pushes(self, self._notices, self._pairing, self._documents)

    async def open(self) -> None:
        """Connect both connections, and find out what the server can do."""
        limit = self.settings.command_timeout
        try:
            # Each step has the same limit, and a better sentence: this is for their sum.
            async with asyncio.timeout(limit + GRACE):
                await self._open()
        except TimeoutError as error:
            for link in self._links():
                if link.failure is not None:
                    raise link.failure from link.failure.__cause__
            raise BackendUnavailable(
                f"{self._endpoint} did not answer everything that it was asked within {limit:g} s"
            ) from error

    def _links(self) -> list[Link]:
        return [link for link in (self._connection, self._subscriber) if link is not None]

    async def _open(self) -> None:
        settings = self.settings
        connection = self._wire = self._connection = Connection(
            self._endpoint,
            clock=settings.clock,
            command_timeout=settings.command_timeout,
            scripts=SCRIPTS,
            on_up=self._up,
            on_down=self._pairing.forget,
            verify=self._format.verify,
        )
        connection.outages = settings.outages
        await connection.open()
        channel = self._channels + self._process
        publishing = connection.call("PUBLISH", channel, "")
        version = connection.call("EVAL", FORMAT.source, "1", *self._format.words)
        info = await probe(connection.call, PROBE, f"{self._prefix}probe:{{{self._process}}}")
        publishes = await is_allowed(publishing)
        subscriber = self._subscriber = Subscriber(
            self._endpoint,
            channel,
            clock=settings.clock,
            command_timeout=settings.command_timeout,
            on_message=self._pushes.heard,
            on_up=self._subscribed,
            on_down=self._unsubscribed,
        )
        subscriber.outages = settings.outages
        if isinstance(self._endpoint, Sentinels):
            self._switching = Switching(
                self._endpoint,
                clock=settings.clock,
                command_timeout=settings.command_timeout,
                switched=self._switched,
            )
            self._switching.open()
        # Who may not publish is most likely not heard from by others of the same account, either.
        if publishes:
            await subscriber.open()
        pushed = publishes and subscriber.denied is None
        self._hear(pushed=pushed)
        verdict = judge(info, pushed=pushed)
        self._format.check(await version)
        self.capabilities = verdict.capabilities
        for warning in verdict.warnings:
            log.warning("%s: %s", self._endpoint, warning)

    async def aclose(self) -> None:
        """Close both connections."""
        self.wakeups.close()
        self._many.wakeups.close()
        for part in (self._switching, self._subscriber, self._connection):
            if part is not None:
                await part.aclose()
        self._switching = self._subscriber = self._connection = self._wire = None
        self._documents.look()
        self.claims.clear()

    def _switched(self, place: Place) -> None:
        for link in (self._connection, self._subscriber):
            if (
                link is not None
                and isinstance(self._endpoint, Sentinels)
                and self._endpoint.places.get(link) != place
            ):
                link.leave()

    def _link(self) -> Wire:
        assert self._wire is not None  # noqa: S101 - the client lets nobody in before open and after aclose
        return self._wire

    def _up(self) -> None:
        # Whatever happened in between, the server may be another one, or have lost what it knew.
        self._pairing.forget()
        if self.recent is not None:
            for claim, keep in self.recent.again():
                claim.leave_again(keep)
        self._notices.put(Notice(News.DOUBT))
        self._look_at_everything()

    def _subscribed(self) -> None:
        self._hear(pushed=True)
        self._look_at_everything()

    def _unsubscribed(self) -> None:
        self._hear(pushed=False)
        self._look_at_everything()

    def _hear(self, *, pushed: bool) -> None:
        self.wakeups.pushed = self._many.wakeups.pushed = pushed

    def _look_at_everything(self) -> None:
        self.wakeups.now()
        self._many.wakeups.now()
        self._documents.look()

    # --- claims

    def claim(self, bid: Bid) -> RedisClaim:
        """A claim with a request id of its own."""
        self._count = number = self._count + 1
        if bid.kind.mode is not MUTEX:
            return ManyClaim(self._many, bid, number)
        return RedisClaim(self, bid, number)

    def key(self, claim: RedisClaim) -> str:
        """Where the lock is on the server."""
        return self._forms.key(claim.bid)

    def request(self, claim: RedisClaim) -> str:
        """How the server calls a claim."""
        return request(self._process, claim.number)

    def _key(self, name: str, family: Family) -> str:
        return f"{self._prefix}{family.value}:{{{escape(name)}}}"

    @property
    def _hears(self) -> str:
        return "s" if self.wakeups.pushed else "n"

    def enter(self, claim: RedisClaim, wait: bool, ticket: int) -> asyncio.Future[Any]:
        """Ask for the lock."""
        bid, terms = claim.bid, self.wakeups.terms
        if wait and ticket < 0:
            form = self._forms.form(bid, terms)
            return self._wire.issue(form.enter % (claim.number, self._floor))  # type: ignore[union-attr] # it is open
        most = 1 if bid.fair else MOST_TOKENS
        place = f"{terms} {ticket}" if wait else ""
        words = claim.request, claim.ttl_ms, most, self._floor, bid.label, place
        return self._link().script(ENTER, (claim.key,), words)

    def release(self, claim: RedisClaim) -> asyncio.Future[Any]:
        """Give up a hold that is certainly ours, or certainly gone."""
        if self.recent is not None:
            self.recent.add(claim)
        form = self._forms.form(claim.bid, self.wakeups.terms)
        return self._wire.issue(form.release % (claim.number, self._floor))  # type: ignore[union-attr] # it is open

    def leave(self, claim: RedisClaim, *, bury: bool, keep: float) -> asyncio.Future[Any]:
        """Give up whatever there is."""
        if self.recent is not None:
            self.recent.add(claim, keep)
        return self._link().script(
            LEAVE, (claim.key,), (claim.request, self._floor, int(bury), round(keep * 1000))
        )

    def served(self, key: str, claim: int) -> None:
        """Somebody was handed the lock, with a claim of so many ms; or (-1) there is more to look through."""
        if claim > 0 or claim == -1:
            self.wakeups.claimed(key, claim / 1000)

    async def renew(self, claims: Sequence[Claim]) -> list[Renewal]:
        """As many as fit in one script, all in one write."""
        # Locks with many holders have a script of their own.
        many = [claim for claim in claims if isinstance(claim, ManyClaim)]
        mine = [
            claim for claim in claims if isinstance(claim, RedisClaim) and not isinstance(claim, ManyClaim)
        ]
        batches = [
            kind[start : start + RENEWED] for kind in (mine, many) for start in range(0, len(kind), RENEWED)
        ]
        sent = self.settings.clock()
        replies = [self.renewal(batch) for batch in batches]
        answers: list[Renewal] = []
        for batch, reply in zip(batches, replies, strict=True):
            try:
                states = await reply
            except BackendError as error:
                answers += [error] * len(batch)
            else:
                self.learn(states[0], sent)
                for claim, state in zip(batch, states[1:], strict=True):
                    answers.append(self.renewed(claim, state, sent))
        if mine and many:
            found: dict[Claim, Renewal] = dict(zip((*mine, *many), answers, strict=True))
            return [found[claim] for claim in claims]
        return answers

    def renewed(self, claim: RedisClaim, state: int | list[Any], sent: float) -> Renewal:
        """What the server says of a hold that was asked for at ``sent``."""
        if type(state) is list:
            state = self._told(state)
        assert type(state) is int  # noqa: S101 - our own script says nothing else
        if state == 0:
            self._ask_format()
        if state <= 0:
            return GONE[state]
        return Grant(0, 0, NEVER if claim.fixed else certain_until(sent, claim.ttl), demand=state == 2)

    def _ask_format(self) -> None:
        """Read the format anew: a hold is gone, and all data may be, so that a client of another version came first."""
        if self._wire is not None and (self._asked_format is None or self._asked_format.done()):
            # Thousands may be gone at once.
            self._asked_format = self._wire.call("EVAL", FORMAT.source, "1", *self._format.words)
            self._asked_format.add_done_callback(self._told_format)

    def _told_format(self, reply: asyncio.Future[Any]) -> None:
        if reply.cancelled() or reply.exception() is not None:
            return
        try:
            self._format.check(reply.result())
        except UnsafeBackend:
            if self._connection is not None:
                # Connecting anew is refused.
                self._connection.leave()

    def _told(self, answer: list[Any]) -> int:
        """What a renewal says of a hold that was asked to let go."""
        self._pushes.heard(b"a " + answer[1])
        return int(answer[0])

    async def notice(self) -> Notice:
        """The next thing that the server, or the state of the connection, says."""
        return await self._notices.get()

    # --- what others need to know

    def saw(self, token: int) -> None:
        """Remember the highest token; it travels with every attempt."""
        if token > self._floor:
            self._floor = token

    def learn(self, server: int, sent: float) -> None:
        """Pair the server's time in µs with ours."""
        # Worked out when it is needed, which is seldom.
        self._pairing.latest = server, sent, self._connection.received  # type: ignore[union-attr] # it answered

    def never_sent(self, error: BackendError) -> bool:
        """Whether a request certainly did not reach the server."""
        return isinstance(error, NotSent)

    # --- what is sent for those who wait, and what comes

    def _beat(self, keys: Sequence[str], counts: Sequence[int], life: int) -> asyncio.Future[Any]:
        return self._link().script(BEAT, keys, (self._process, life, self._hears, self._floor, *counts))

    def tickets(self, key: str, requests: Sequence[str]) -> asyncio.Future[Any]:
        """Read the tickets of requests that should be in the queue of a lock."""
        return self._link().call("HMGET", key, *[f"r:{request}" for request in requests])

    def renewal(self, batch: Sequence[RedisClaim]) -> asyncio.Future[Any]:
        """Ask for a full ttl for claims of one kind, or for none if they are fixed, in one call."""
        arguments: list[str | int] = []
        for claim in batch:
            arguments += (claim.request, 0 if claim.fixed else claim.ttl_ms)
        script = RENEW_MANY if isinstance(batch[0], ManyClaim) else RENEW
        return self._link().script(script, [claim.key for claim in batch], arguments)

    # --- what people ask

    async def inspect(self, name: str, family: Family) -> LockInfo:
        """One script, which writes nothing."""
        if family in FAMILIES:
            return await self._many.inspect(self._key(name, family), name, family)
        now, until, token, since, label, *waiting = await self._link().script(
            LOOK, (self._key(name, family),), ()
        )
        holders: tuple[Holder, ...] = ()
        if until:
            holder = Holder(
                label=_text(label),
                token=int(token),
                since=datetime.fromtimestamp(int(since) / 1_000_000, UTC),
                remaining=(int(until) - now) / 1_000_000,
            )
            holders = (holder,)
        return LockInfo(name, holders, tuple(Waiting(_text(other)) for other in waiting), family)

    async def force_release(self, name: str, family: Family) -> bool:
        """One script, which tells the holder."""
        key = self._key(name, family)
        if family in FAMILIES:
            return await self._many.force_release(key)
        taken, claim = await self._link().script(FORCE, (key,), (self._floor,))
        self.served(key, claim)
        return bool(taken)

    async def request_release(self, name: str, family: Family, reason: str) -> bool:
        """One script: it tells the holders, and leaves word for their next renewals."""
        script = ASK_MANY if family in FAMILIES else ASK
        return bool(await self._link().script(script, (self._key(name, family),), (reason,)))

    async def set_limit(self, name: str, limit: int) -> None:
        """One script, which lets in whoever fits then."""
        await self._many.set_limit(self._key(name, Family.SEMAPHORE), limit)

    def document(self, name: str, family: Family) -> RedisDocument:
        """A view of a hash of its own."""
        return self._documents.document(f"{self._prefix}{family.value}.doc:{{{escape(name)}}}")

    async def names(self, pattern: str) -> list[tuple[str, Family]]:
        """By ``SCAN``, and a look at each key."""
        return await busy(self, (self.call,), self._prefix, pattern)

    async def diagnose(self) -> list[Finding]:
        """Over connections of its own, so that it is right also where opening fails."""
        found = await examine(self._endpoint, PROBE, self.settings)
        if isinstance(self._endpoint, Sentinels):
            found += await self._endpoint.look(self.settings.command_timeout)
        return found

    # --- what locks with many holders and documents are made of

    def send(self, script: Script, keys: Sequence[str], words: Sequence[Arg]) -> asyncio.Future[Any]:
        """Issue a script; see :meth:`Connection.script`."""
        return self._link().script(script, keys, words)

    def call(self, *words: Arg) -> asyncio.Future[Any]:
        """Issue a command; see :meth:`Connection.call`."""
        return self._link().call(*words)

    @property
    def usable(self) -> bool:
        """Whether there is a connection, or one will be."""
        return self._wire is not None

    @property
    def process(self) -> str:
        """How the server calls this client."""
        return self._process

    @property
    def channels(self) -> str:
        """What the names of channels begin with; a process follows."""
        return self._channels

    @property
    def floor(self) -> int:
        """The highest token that this client has seen."""
        return self._floor


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")
