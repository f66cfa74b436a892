"""Backend of a dialect: claims, renewals and administration of locks in the format of another library.

A lock is one key of that library. What the clients of this library need to know of each other is in a hash beside it, the note, which no other
library reads: without it nothing is unsafe.
"""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any, ClassVar, NamedTuple

from aiolock.backends.diagnosis import note, ok, warning
from aiolock.backends.redis.admin import MOST, STEP
from aiolock.backends.redis.commands import Arg, Reply, Script, source
from aiolock.backends.redis.diagnosis import FENCE
from aiolock.backends.redis.errors import was_sent
from aiolock.backends.redis.server import Concerned, PairingOf, RedisServer, SingleServer, Usage
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
from aiolock.core.capabilities import Administration, Diagnosis
from aiolock.core.inbox import WakeReason
from aiolock.core.logs import Log, get_logger, log_change
from aiolock.errors import BackendError, BackendRefused, InvalidName, UnsafeBackend, UnsupportedKind, shorten
from aiolock.types import MUTEX, Family, Finding, Holder, LockInfo, Waiting

__all__ = ["DialectBackend", "DialectClaim", "EnterAnswer", "key_of_note", "note_of", "scripts"]

log: Log = get_logger("aiolock.claim")

COUNT = 1 << 10
"""Most times that a hold may be handed over inside this process."""
SHOWN = 8
"""Characters of a foreign value that are shown: it may be another program's secret."""
REMEMBERED = 256
"""Locks of which it is remembered that a foreign client had them when they were last asked for."""
SCANNED = 10_000
"""Most keys that a diagnosis looks through for foreign holders without an expiry."""


def scripts(dialect: str, *names: str) -> Mapping[str, Script]:
    """Read the scripts of a dialect."""
    return {name: Script(source(f"dialects/{dialect}_{name}")) for name in names}


# --- keys


def _tag(key: str) -> str | None:
    """Return the hash tag of a key; ``None`` if it has none."""
    start = key.find("{")
    end = key.find("}", start + 1)
    return key[start + 1 : end] if start >= 0 and start + 1 < end else None


def note_of(namespace: str, dialect: str, key: str) -> str:
    """Return the key of the note beside a foreign key, in the same hash slot; no two keys have the same one.

    A key without a hash tag is one as a whole. With a closing brace it cannot be: then the slot is another one.
    """
    tag, start = _tag(key), f"{namespace}:{dialect}:1:"
    if tag is not None:
        return f"{start}{{{tag}}}{key}"
    return f"{start}{{}}{key}" if "}" in key else f"{start}{{{key}}}"


def key_of_note(namespace: str, dialect: str, note: str) -> str:
    """Return the foreign key that a note is beside."""
    tag, _, rest = note.removeprefix(f"{namespace}:{dialect}:1:{{").partition("}")
    return rest or tag


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")


# --- claims


class DialectState(Enum):
    """The state of a claim at the server, as far as this client knows."""

    NEW = "not requested"
    ASKED = "requested"
    HELD = "held"
    LEAVING = "being given up"


class EnterAnswer(NamedTuple):
    """The answer of the server to a request."""

    granted: bool
    demand: bool = False
    """True if other clients are known to wait."""
    quiet: float = 0.0
    """Seconds for which no other client is assumed to wait if none is known to."""
    again: float = 0.0
    """Seconds after which a request that was refused is repeated."""


class DialectClaim(Claim):
    """One request, with an owner id of its own, so that the tasks of one client exclude each other as well."""

    __slots__ = ("_backend", "_begun", "_doubts", "_left", "_state", "key", "owner")

    asks_again = True

    def __init__(self, backend: DialectBackend, request: Request, key: str, owner: str) -> None:
        super().__init__(request)
        self._backend = backend
        self.key: str = key
        self.owner: str = owner
        """Name of the claim at the server, which no other claim ever has."""
        self._state = DialectState.NEW
        self._doubts = 0
        """Requests that were sent and not answered: they may still arrive."""
        self._left = 0
        """Releases that were sent."""
        self._begun: Reply | None = None
        """A release whose answer has not been awaited yet."""

    async def acquire(self, wait: bool) -> Grant | None:
        """Send one ``enter``; with ``wait``, the inbox wakes the waiter when another one is due."""
        backend, request = self._backend, self.request
        self.inbox.take()
        if wait:
            backend.wait(self)
        before = self._state
        self._become(DialectState.ASKED)
        self._doubts += 1
        sent = backend.settings.clock()
        try:
            answer = await backend.enter(self, wait=wait)
        except BackendError as error:
            if not was_sent(error):
                self._doubts -= 1
                if before is DialectState.NEW:
                    self._become(before)
            elif isinstance(error, BackendRefused):
                # It has arrived. What it wrote before it was refused is for ``leave`` to find.
                self._doubts -= 1
            raise backend.refusal(error, self.key) from error.__cause__
        self._doubts -= 1
        if answer.granted:
            backend.stop_waiting(self)
            self._become(DialectState.HELD)
            # Who polls cannot be seen: that others wait is assumed after a while.
            self.note_waiters(backend.settings.clock() + (0.0 if answer.demand else answer.quiet))
            return Grant(0, COUNT, expires_at(sent, request.ttl), answer.demand)
        if wait:
            self.inbox.wake_after(answer.again, WakeReason.POLL)
        return None

    def _become(self, state: DialectState) -> None:
        """Change the state; all transitions pass through here."""
        if state is not self._state:
            log_change(log, f"claim {self.owner}", self.request.name, self._state, state)
            self._state = state

    async def release(self, keep: float = 0) -> Release:
        """Give up the hold, and a request that may still arrive."""
        answer = self.begin_release(keep)
        if answer is Release.RELEASED:
            return answer
        begun, self._begun = self._begun, None
        assert begun is not None  # noqa: S101 - it has just begun
        try:
            held = await begun
        except BackendError as error:
            if not was_sent(error):
                self._left -= 1
            raise
        return Release.of(bool(held), first=self._left == 1)

    def begin_release(self, keep: float = 0) -> Release:
        """Send the release; nothing is lost if its answer is never awaited."""
        if self._state is DialectState.NEW:
            return Release.RELEASED
        if self._begun is None:
            self.inbox.close()
            self._backend.stop_waiting(self)
            self._become(DialectState.LEAVING)
            self._left += 1
            self._begun = self._backend.leave(self, tombstone=self._doubts > 0, keep=keep)
        return Release.UNKNOWN


# --- the backend


class DialectBackend(Administration, Diagnosis):
    """Mutexes in the format of another library.

    :param make: makes the server, whose endpoint has the options ``prefix`` and ``yield_to_foreign``.
    """

    shows_tokens = False
    renewal_limit = 100
    removed: ClassVar[frozenset[str]]
    """Capabilities of the server that this format has not."""
    scripts: ClassVar[Mapping[str, Script]]
    shares: ClassVar[str]
    """The libraries that the locks are shared with, for the diagnosis."""
    type: ClassVar[str]
    """The type of the keys."""

    def __init__(self, make: Callable[[], RedisServer]) -> None:
        self._server = make()
        self.address = self._server.address
        spoken = self._server.endpoint.spoken
        self.prefix: str = spoken.get("prefix", "")
        self.process: str = secrets.token_hex(16)
        self._count = 0
        self._waiting: dict[str, set[DialectClaim]] = {}
        self._foreign: dict[str, tuple[str, bool]] = {}
        """By key: the value of a foreign client, and whether it has an expiry, as of the latest answer."""
        # On a cluster, each lock may be at a node of its own.
        self._single = isinstance(self._server, SingleServer)
        if not self._single:
            self.renewal_limit = 1

    def bind(self, settings: Settings) -> None:
        """Take the client's settings, and make connections, without I/O."""
        super().bind(settings)
        if lacks := self.removed & settings.require:
            raise UnsafeBackend(
                f"{self.name} does not promise {', '.join(sorted(lacks))}: the format of other libraries has nothing for it"
            )
        self.channel = f"{settings.namespace}:{self.dialect}:1"
        self._server.bind(
            Usage(
                settings,
                prefix=f"{self.channel}:",
                channel=self.channel,
                scripts=list(self.scripts.values()),
                format=None,
                on_message=self._message,
                on_push=lambda _: None,
                on_mute=lambda: None,
                on_up=self._doubt,
                on_moved=self._check,
                probe=self.scripts["probe"],
            )
        )

    # --- opening and closing

    async def open(self) -> None:
        """Connect, and find out what the server can do."""
        self.capabilities = await self._server.open() - self.removed

    async def aclose(self) -> None:
        """Close all connections."""
        self._waiting.clear()
        await self._server.aclose()

    # --- waiters

    def wait(self, claim: DialectClaim) -> None:
        """Note that a claim waits."""
        self._waiting.setdefault(claim.key, set()).add(claim)

    def stop_waiting(self, claim: DialectClaim) -> None:
        """Note that a claim does not wait any more."""
        waiting = self._waiting.get(claim.key)
        if waiting is not None:
            waiting.discard(claim)
            if not waiting:
                del self._waiting[claim.key]

    def _message(self, _: PairingOf, payload: bytes) -> None:
        self._wake(_text(payload), WakeReason.NOTIFIED)

    def _wake(self, key: str, reason: WakeReason) -> None:
        for claim in list(self._waiting.get(key, ())):
            # A server sends messages in the order of subscription: without the pause, the first client would always win.
            claim.inbox.wake_after(self.settings.random.uniform(0, 0.005), reason)

    def _check(self, concerned: Concerned) -> None:
        for key in filter(concerned, list(self._waiting)):
            self._wake(key, WakeReason.RECONNECTED)

    def _doubt(self, concerned: Concerned | None) -> None:
        """Verify all holds, and have all waiters ask: a server may be another one now, or have lost data."""
        self.events.put(Event(EventKind.DOUBT))
        self._check(concerned or (lambda _: True))

    # --- claims

    def claim(self, request: Request) -> DialectClaim:
        """Return a claim with an owner id of its own."""
        if request.kind is not MUTEX:
            raise self._unsupported(request.kind.family.value)
        key = self.key(request.name)
        self._count += 1
        return DialectClaim(self, request, key, self._owner(request, self._count))

    def _unsupported(self, what: str) -> UnsupportedKind:
        return UnsupportedKind(
            what,
            self.name,
            "its locks are mutexes in the format of other libraries; use a client without dialect=",
        )

    def key(self, name: str) -> str:
        """Return the key of a lock, as other libraries write it; raises :class:`InvalidName`."""
        key = self.prefix + name
        if not self._single and "}" in key and _tag(key) is None:
            raise InvalidName(
                f"{shorten(key)} has a closing brace and no hash tag, so on a cluster nothing can be kept beside it: leave the "
                "brace away, or give the name a tag such as {order}"
            )
        return key

    def keys(self, key: str) -> tuple[str, str]:
        """Return the keys of the scripts: that of the lock, and that of the note beside it."""
        return key, note_of(self.settings.namespace, self.dialect, key)

    def call(self, name: str, key: str, *arguments: Arg) -> Reply:
        """Send a script about one lock."""
        return self._server.issue(self.scripts[name].encode(self.keys(key), arguments))

    def refusal(self, error: BackendError, key: str) -> BackendError:
        """Return the error to raise for one of the server's: a key of another type is explained."""
        if "WRONGTYPE" not in str(error):
            return error
        return BackendRefused(
            f"WRONGTYPE: the key {shorten(key)} is no lock of {self.name}: another program uses it, or another dialect; each name "
            "has one format and one kind of lock"
        )

    @abstractmethod
    def _owner(self, request: Request, number: int) -> str:
        """Return the owner id of a claim."""

    @abstractmethod
    async def enter(self, claim: DialectClaim, *, wait: bool) -> EnterAnswer:
        """Send one request. After an error it is unknown whether it arrived, as :func:`was_sent` says; so after a cancellation."""

    @abstractmethod
    def leave(self, claim: DialectClaim, *, tombstone: bool, keep: float) -> Reply:
        """Send one release, whose reply is 1 if the lock was held."""

    async def renew(self, claims: Sequence[Claim]) -> list[Renewal]:
        """Renew holds in one call; on a cluster, one hold."""
        mine = [claim for claim in claims if isinstance(claim, DialectClaim)]
        sent = self.settings.clock()
        arguments: list[Arg] = []
        for claim in mine:
            arguments += (claim.owner, 0 if claim.fixed else round(claim.request.ttl * 1000))
        states = await self._server.issue(
            self.scripts["renew"].encode([claim.key for claim in mine], arguments)
        )
        return [
            Grant(0, 0, NEVER if claim.fixed else expires_at(sent, claim.request.ttl), demand=False)
            if state
            else "revoked"
            for claim, state in zip(mine, states, strict=True)
        ]

    # --- foreign holders

    @abstractmethod
    def shown(self, value: str) -> str:
        """Return the label of the holder that a value at the server names; a foreign value is shortened."""

    def note_foreign(self, key: str, value: str, *, expires: bool) -> None:
        """Remember who held a lock that was asked for; an empty ``value`` is none, or one of this library."""
        self._foreign.pop(key, None)
        if value:
            if len(self._foreign) >= REMEMBERED:
                del self._foreign[next(iter(self._foreign))]
            self._foreign[key] = value, expires

    def obstacle(self, request: Request) -> str:
        """Return who had the lock, if that is a client of another library."""
        key = self.prefix + request.name
        value, expires = self._foreign.get(key, ("", True))
        if not value:
            return ""
        ends = "" if expires else ", without an expiry, so that only its release or DEL of the key ends it"
        return (
            f"another library has the key {shorten(key)} of dialect={self.dialect}, {self.shown(value)}{ends}"
        )

    # --- administration

    @abstractmethod
    def _read(self, answer: Sequence[Any]) -> tuple[list[Holder], list[str]]:
        """Return the holders, and the labels of waiters, by the answer of the script ``inspect``."""

    def _holder(self, label: str, left: int, age: int, *, kept: bool = False) -> Holder:
        """Return a holder; ``left`` and ``age`` are in ms, and negative if they are not known or infinite."""
        since = datetime.now(UTC) - timedelta(milliseconds=max(0, age))
        return Holder(label, 0, since, left / 1000 if left >= 0 else float("inf"), tokens=0 if kept else 1)

    async def inspect(self, name: str, family: Family) -> LockInfo:
        """Send one script, which writes nothing."""
        if family is not Family.LOCK:
            return LockInfo(name, (), (), family)
        key = self.key(name)
        try:
            answer = await self.call("inspect", key)
        except BackendError as error:
            raise self.refusal(error, key) from error.__cause__
        holders, waiters = self._read(answer)
        return LockInfo.of_holds(name, holders, map(Waiting, waiters), family)

    async def force_release(self, name: str, family: Family, token: int | None = None) -> bool:
        """Send one script; holders learn of it by their next renewal."""
        if token is not None:
            raise self._unsupported("fencing tokens")
        if family is not Family.LOCK:
            raise self._unsupported(family.value)
        key = self.key(name)
        try:
            return bool(await self.call("force", key, *self._force_arguments(key)))
        except BackendError as error:
            raise self.refusal(error, key) from error.__cause__

    @abstractmethod
    def _force_arguments(self, key: str) -> tuple[Arg, ...]:
        """Return the arguments of the script ``force``."""

    async def request_release(self, name: str, family: Family, reason: str) -> bool:
        """Refuse: other libraries' holders cannot be asked."""
        del name, family, reason
        raise self._unsupported("request_release")

    async def set_limit(self, name: str, limit: int) -> None:
        """Refuse: there are no semaphores."""
        del name, limit
        raise self._unsupported(Family.SEMAPHORE.value)

    async def names(self, pattern: str) -> list[tuple[str, Family]]:
        """List locks that clients of this namespace have used lately; with a prefix, also those of other libraries alone."""
        found: set[str] = set()
        async for key in self._known():
            name = key.removeprefix(self.prefix)
            if key.startswith(self.prefix) and name and fnmatchcase(name, pattern):
                found.add(name)
                if len(found) > MOST:
                    text = f"more than {MOST:,} locks match {shorten(pattern)}: narrow the pattern"
                    raise BackendRefused(text, retryable=False)
        used = []
        for name in sorted(found):
            info = await self.inspect(name, Family.LOCK)
            if info.locked or info.waiters:
                used.append((name, Family.LOCK))
        return used

    async def _known(self) -> AsyncIterator[str]:
        namespace, own = self.settings.namespace, f"{self.channel}:{{"
        async for note_key in self._scan(own, "hash"):
            yield key_of_note(namespace, self.dialect, note_key)
        if self.prefix:
            async for key in self._scan(self.prefix, self.type):
                if not key.startswith(own):
                    yield key

    async def _scan(self, prefix: str, kind: str) -> AsyncIterator[str]:
        pattern = "".join(f"\\{char}" if char in "*?[]\\^" else char for char in prefix)
        for call in self._server.calls():
            cursor = b""
            while cursor != b"0":
                scan = "SCAN", cursor or b"0", "MATCH", f"{pattern}*", "COUNT", STEP, "TYPE", kind
                cursor, keys = await call(*scan)
                for key in keys:
                    try:
                        yield key.decode()
                    except UnicodeDecodeError:
                        # No lock of this library has such a name.
                        continue

    # --- diagnosis

    async def diagnose(self) -> list[Finding]:
        """Examine the server, and describe the dialect; what waiters and tokens of native locks need is left out."""
        found = await self._server.diagnose(self.settings)
        return [
            ok(
                "dialect",
                f"dialect={self.dialect}: locks are shared with {self.shares}; a lock NAME is the key {self.prefix}NAME "
                f"({'no prefix' if not self.prefix else f'prefix {self.prefix!r}'}), with a note of this library's clients in "
                f"{self.channel}:…",
            ),
            *await self._foreign_holders(),
            *(
                replace(finding, advice=finding.advice.removesuffix(FENCE).removesuffix("; "))
                for finding in found
                if finding.subject not in {"data format", "pub/sub"}
            ),
        ]

    async def _foreign_holders(self) -> list[Finding]:
        """Name a foreign holder without an expiry, where the prefix tells which keys are locks."""
        if not self.prefix:
            text = "without prefix= it is not known which keys are locks, so none was read for"
            return [note("foreign holders", text, "give locks a prefix, in this library and in the others")]
        try:
            return [await self._without_expiry()]
        except (BackendError, RuntimeError):
            return []

    async def _without_expiry(self) -> Finding:
        read = 0
        async for key in self._scan(self.prefix, self.type):
            read += 1
            if read > SCANNED or key.startswith(f"{self.channel}:"):
                continue
            info = await self.inspect(key.removeprefix(self.prefix), Family.LOCK)
            for holder in info.holders:
                if holder.remaining == float("inf"):
                    return warning(
                        "foreign holders",
                        f"the key {shorten(key)} is held without an expiry by {holder.label}: it stays taken if its holder dies",
                        "give locks of the other library a timeout; DEL of the key ends this one",
                    )
        return ok("foreign holders", f"no key {self.prefix}… is held without an expiry")
