"""RESP encoding, Lua scripts, the version of their data format, and the commands of each family of locks."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import hiredis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ResponseError

from aiolock.core.backend import Request
from aiolock.core.present import encode_value
from aiolock.errors import UnsafeBackend, shorten
from aiolock.types import Family
from aiolock.validation import escape

__all__ = [
    "FORMAT",
    "LOADED",
    "NOTHING",
    "PROBE",
    "PUBLISH",
    "SCRIPTS",
    "WHOLE",
    "Arg",
    "Commands",
    "Format",
    "Issue",
    "MutexCommands",
    "Reply",
    "Script",
    "Scripts",
    "Tokens",
    "as_eval",
    "encode",
    "labelled",
    "load",
    "source",
]

MOST_TOKENS = 1024
"""Most tokens of one grant: how often a hold may be handed over inside this process."""
WHOLE = 2**30
"""Weight of a write hold, and limit of a read-write lock; the scripts have the same number."""
KEPT = 256
"""Number of requests whose encoded commands are kept."""

# --- RESP

Arg = str | bytes | int
Reply = asyncio.Future[Any]
"""The future of a command's reply."""
Issue = Callable[[bytes], Reply]
"""Issue an encoded command: on a connection to one server, or to the node of a cluster that serves its key."""
NOTHING = object()
"""Returned by a hiredis reader that has no complete reply."""

_pack: Callable[[tuple[Arg, ...]], bytes] = hiredis.pack_command  # type: ignore[assignment]  # its stub takes one

_EVALSHA = b"$7\r\nEVALSHA\r\n$40\r\n"


def encode(*args: Arg) -> bytes:
    """Encode a command."""
    return _pack(args)


def _literal(*args: str | int) -> str:
    """Encode arguments as part of a command that is completed with ``%``."""
    return "".join([f"${len(str(arg).encode())}\r\n{arg}\r\n" for arg in args]).replace("%", "%%")


# --- scripts

_INCLUDE = re.compile(r"^-- include ([\w/]+)\n", re.MULTILINE)
_COMMENTS = re.compile(r"^ *--.*\n", re.MULTILINE)
_sources: dict[bytes, bytes] = {}
"""By SHA-1, for :func:`as_eval`. Scripts are constants of the program, so this does not grow."""


def source(name: str, *, cluster: bool = False, mute: bool = False) -> str:
    """Return the text of ``lua/name.lua`` with includes filled in and comments left out.

    In a cluster, the channel of a client has another name at each node. A ``mute`` script sends no messages.
    """
    file = name
    if cluster and name == "channel":
        file = "cluster_channel"
    elif mute and name == "messages":
        file = "mute"
    text = files("aiolock.backends.redis").joinpath("lua", f"{file}.lua").read_text(encoding="utf-8")
    return _COMMENTS.sub("", _INCLUDE.sub(lambda match: source(match[1], cluster=cluster, mute=mute), text))


class Script:
    """A Lua script, called by its SHA-1."""

    __slots__ = ("load", "sha", "source")

    def __init__(self, source: str) -> None:
        self.source = source.encode()
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest()
        self.load = encode("SCRIPT", "LOAD", self.source)
        """The command that makes the server know the script."""
        _sources[self.sha.encode()] = self.source

    def encode(self, keys: Sequence[Arg], args: Sequence[Arg] = ()) -> bytes:
        """Encode ``EVALSHA`` with these keys and arguments."""
        return encode("EVALSHA", self.sha, len(keys), *keys, *args)


def as_eval(command: bytes) -> bytes | None:
    """Return the ``EVAL`` equivalent of an encoded ``EVALSHA``; ``None`` for other commands and unknown scripts."""
    count, _, rest = command.partition(b"\r\n")
    if not rest.startswith(_EVALSHA):
        return None
    sha, _, tail = rest[len(_EVALSHA) :].partition(b"\r\n")
    source = _sources.get(sha)
    if source is None:
        return None
    return b"%b\r\n$4\r\nEVAL\r\n$%d\r\n%b\r\n%b" % (count, len(source), source, tail)


LOADED = ("enter", "release", "leave", "renew", "heartbeat", "force", "inspect", "request_release")
"""The scripts of a family of locks; those of mutexes are loaded whenever a server is connected."""


@functools.cache
def load(*, cluster: bool = False, mute: bool = False) -> Mapping[str, Script]:
    """Read all scripts by the names of their files, in the variant for a node of a cluster, and for no messages, if asked."""
    shared = [f"many_{name}" for name in (*LOADED, "extend", "downgrade", "limit")]
    names = (*LOADED, "extend", *shared, "register_write", "register_watch")
    return {name: Script(source(name, cluster=cluster, mute=mute)) for name in names}


class Scripts(dict[str, Script]):
    """The scripts of one client, by the names of their files."""

    def __init__(self, *, cluster: bool = False) -> None:
        self._cluster = cluster
        super().__init__(load(cluster=cluster))
        self.loaded = [self[name] for name in LOADED]
        """Those that are loaded whenever a server is connected."""

    def mute(self) -> None:
        """Replace them by those that send no messages, before the first lock: the server takes no others."""
        self.update(load(cluster=self._cluster, mute=True))
        self.loaded[:] = [self[name] for name in LOADED]


SCRIPTS = load()
PROBE = Script(source("probe"))
PUBLISH = Script(source("publish"))

# --- data format
# Each namespace has one version, in a key of its own whose name never changes. Every connection asks for it before its
# first command, because the server may be another one, or have lost its data.

FORMAT = 7
"""The version of keys, fields, scripts and channels. Formats 1, without a version of its own, to 6 were never released."""

_FORMAT = Script(source("format"))


class Format:
    """The data format that a client expects in its namespace; a client of another version refuses to work there.

    :param verified: is called with the outcome whenever a server has reported its version.
    """

    def __init__(
        self, namespace: str, verified: Callable[[UnsafeBackend | None], object] = lambda _: None
    ) -> None:
        self._namespace = namespace
        self._verified = verified
        self.key: str = f"{namespace}:format"

    @property
    def question(self) -> tuple[Arg, ...]:
        """The command that returns the version, and sets it if there is none."""
        return "EVAL", _FORMAT.source, "1", self.key, str(FORMAT)

    def refusal(self, version: object) -> UnsafeBackend | None:
        """Return why a namespace with data of ``version`` cannot be used, if it cannot."""
        text = version.decode("utf-8", "replace") if isinstance(version, bytes) else str(version)
        if text == str(FORMAT):
            return None
        shown = text if text.isdigit() else shorten(text)
        return UnsafeBackend(
            f"the data of namespace {shorten(self._namespace)} have format {shown}, and this version of aiolock "
            f"writes format {FORMAT}: use one version everywhere, or another namespace=; when no client of the other "
            f"version is left, delete the keys {self._namespace}:*"
        )

    def check(self, version: object) -> None:
        """Raise :class:`UnsafeBackend` if ``version`` is another one."""
        error = self.refusal(version)
        self._verified(error)
        if error is not None:
            raise error

    async def verify(self, driver: AbstractConnection) -> None:
        """Ask for the version on a new connection; raises :class:`UnsafeBackend`.

        A server that refuses the question (a replica, a missing right, another node's slot) refuses every lock as well.
        If it is cancelled, the caller has to close the connection; the server may have set the version.
        """
        await driver.send_command(*self.question)
        await self.read(driver)

    async def read(self, driver: AbstractConnection) -> None:
        """Read the answer to the question, sent before; raises, and is cancelled, as :meth:`verify`."""
        try:
            version = await driver.read_response()
        except ResponseError:
            return
        self.check(version)


# --- commands


def labelled(request: Request) -> str:
    """Return the label as keys have it: followed by the value of a campaign, in base64 on a line of its own."""
    return f"{request.label}\n{encode_value(request.value)}" if request.value else request.label


@dataclass(slots=True)
class Tokens:
    """The highest fencing token that this client has seen in its namespace; it travels with every request."""

    highest: int = 0


class Commands:
    """The commands of one family of locks. Each is sent when it is called; the future gets the reply.

    :param prefix: of keys.
    :param process: random identity of this client.
    :param family: prefix of the scripts' names; ``many_`` for read-write locks and semaphores, whose holds have weights.
    """

    def __init__(
        self,
        issue: Issue,
        scripts: Mapping[str, Script],
        tokens: Tokens,
        prefix: str,
        process: str,
        family: str = "",
    ) -> None:
        self._issue = issue
        self._family = family
        self._scripts = scripts
        self.tokens = tokens
        self._prefix = prefix
        self.process = process

    def key(self, name: str, family: Family) -> str:
        """Return the key of a lock."""
        # Without the cache of `escape`, which would keep every name.
        return f"{self._prefix}{family.value}:{{{escape.__wrapped__(name)}}}"

    def request_id(self, number: int) -> str:
        """Return the request id of a claim of this client."""
        return f"{self.process}:{number:012x}"

    def enter(self, request: Request, number: int, wait: bool, ticket: int, terms: str) -> Reply:
        """Request the lock; with ``wait``, join the queue under these terms, or return to ``ticket`` (-1: none)."""
        most = 1 if request.fair or not request.kind.exclusive else MOST_TOKENS
        position = f"{terms} {ticket}" if wait else ""
        arguments = (
            self.request_id(number),
            round(request.ttl * 1000),
            most,
            self.tokens.highest,
            labelled(request),
        )
        limits = request.kind.weigh(WHOLE) if self._family else ()
        return self._send("enter", request, *arguments, position, *limits)

    def release(self, request: Request, number: int) -> Reply:
        """Give up a hold that is certainly this claim's, or certainly gone."""
        return self._send("release", request, self.request_id(number), self.tokens.highest)

    def leave(self, request: Request, number: int, *, tombstone: bool, keep: float) -> Reply:
        """Give up the hold, the position in the queue, and with ``tombstone`` a request that may still arrive."""
        arguments = self.request_id(number), self.tokens.highest, int(tombstone), round(keep * 1000)
        return self._send("leave", request, *arguments)

    def renew(self, keys: Sequence[str], arguments: Sequence[Arg]) -> Reply:
        """Renew holds: for each key a request id, the ttl in ms (0 verifies without prolonging), and the present lease."""
        return self._call("renew", keys, *arguments)

    def heartbeat(self, keys: Sequence[str], counts: Sequence[int], life: int, notified: str) -> Reply:
        """Send a heartbeat: in the queue of each key this client has so many positions, which live ``life`` ms."""
        arguments: list[Arg] = [self.process, life, notified, self.tokens.highest, *counts]
        return self._call("heartbeat", keys, *arguments)

    def tickets(self, key: str, numbers: Sequence[int]) -> Reply:
        """Read the ticket of each of these claims in the queue of a lock; ``None`` for one that has none."""
        return self._issue(encode("HMGET", key, *[f"r:{self.request_id(number)}" for number in numbers]))

    def inspect(self, key: str) -> Reply:
        """Read holders and waiters."""
        return self._call("inspect", (key,))

    def force(self, key: str, token: int | None = None) -> Reply:
        """Take the lock from its holders, or from the one that has ``token``, who are notified."""
        return self._call("force", (key,), self.tokens.highest, "" if token is None else token)

    def ask(self, key: str, reason: str) -> Reply:
        """Ask the holders to release, now and with their next renewals."""
        return self._call("request_release", (key,), reason)

    def downgrade(self, request: Request, number: int, ttl: float) -> Reply:
        """Turn a write hold into a read hold, for another ``ttl`` (0 prolongs nothing)."""
        arguments = self.request_id(number), round(ttl * 1000), self.tokens.highest
        return self._send("downgrade", request, *arguments)

    def extend(self, request: Request, number: int, seconds: float, count: int) -> Reply:
        """Set the life of a hold that is not renewed, by request ``count`` for that."""
        return self._send("extend", request, self.request_id(number), round(seconds * 1000), count)

    def limit(self, key: str, limit: int) -> Reply:
        """Set the number of permits of a semaphore."""
        return self._call("limit", (key,), limit, self.tokens.highest)

    def _send(self, name: str, request: Request, *arguments: Arg) -> Reply:
        return self._call(name, (self.key(request.name, request.kind.family),), *arguments)

    def _call(self, name: str, keys: Sequence[str], *arguments: Arg) -> Reply:
        return self._issue(self._scripts[self._family + name].encode(keys, arguments))


class _Encoded:
    """The two commands of a free lock, complete but for the request number and the highest token.

    A lock is taken with the same name, ttl and label again and again. Number and token have a fixed number of digits, so
    that lengths on the wire are constant as well.
    """

    __slots__ = ("enter", "release", "request", "terms")

    def __init__(
        self, request: Request, commands: MutexCommands, scripts: Mapping[str, Script], terms: str
    ) -> None:
        self.request = request
        self.terms = terms
        ttl, most = round(request.ttl * 1000), 1 if request.fair else MOST_TOKENS
        key, length = _literal(commands.key(request.name, request.kind.family)), len(commands.request_id(0))
        number, token = f"${length}\r\n{commands.process}:%012x\r\n", "$20\r\n%020d\r\n"
        last = _literal(labelled(request), f"{terms} -1")
        enter, release = (_literal("EVALSHA", scripts[name].sha, 1) for name in ("enter", "release"))
        self.enter: bytes = f"*10\r\n{enter}{key}{number}{_literal(ttl, most)}{token}{last}".encode()
        self.release: bytes = f"*6\r\n{release}{key}{number}{token}".encode()


class MutexCommands(Commands):
    """The commands of locks with one holder."""

    def __init__(
        self, issue: Issue, scripts: Mapping[str, Script], tokens: Tokens, prefix: str, process: str
    ) -> None:
        super().__init__(issue, scripts, tokens, prefix, process)
        self._encoded: dict[int, _Encoded] = {}
        """By identity: requests are values, but comparing them takes longer than encoding a command."""

    def enter(self, request: Request, number: int, wait: bool, ticket: int, terms: str) -> Reply:
        """Request the lock; see :meth:`Commands.enter`."""
        if not wait or ticket >= 0:
            return super().enter(request, number, wait, ticket, terms)
        encoded = self._encoded.get(id(request))
        if encoded is None or encoded.request is not request or encoded.terms is not terms:
            encoded = self._encode(request, terms)
        return self._issue(encoded.enter % (number, self.tokens.highest))

    def release(self, request: Request, number: int) -> Reply:
        """Give up a hold that is certainly this claim's, or certainly gone."""
        encoded = self._encoded.get(id(request))
        if encoded is None or encoded.request is not request:
            return super().release(request, number)
        return self._issue(encoded.release % (number, self.tokens.highest))

    def _encode(self, request: Request, terms: str) -> _Encoded:
        if len(self._encoded) >= KEPT:
            self._encoded.clear()
        encoded = self._encoded[id(request)] = _Encoded(request, self, self._scripts, terms)
        return encoded
