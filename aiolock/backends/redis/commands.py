"""Commands as they stand on the wire. hiredis writes the arguments; what is the same each time is written once.

The two commands of a free lock are too frequent even for that: ``forms`` has them ready.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import hiredis

__all__ = ["Arg", "Script", "Wire", "as_eval", "encode"]

Arg = str | bytes | int

_pack: Callable[[tuple[Arg, ...]], bytes] = hiredis.pack_command  # type: ignore[assignment]  # its stub takes one

_EVALSHA = b"$7\r\nEVALSHA\r\n$40\r\n"
_sources: dict[bytes, bytes] = {}
"""By SHA-1, for :func:`as_eval`. Scripts are constants of the program, so this does not grow."""


def encode(*args: Arg) -> bytes:
    """A command of any kind."""
    return _pack(args)


class Script:
    """A Lua script, called by its SHA-1."""

    __slots__ = ("_heads", "load", "sha", "source")

    def __init__(self, source: str) -> None:
        self.source = source.encode()
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest()
        self.load = encode("SCRIPT", "LOAD", self.source)
        """The command that makes the server know it."""
        self._heads: dict[tuple[int, int], tuple[bytes, int]] = {}
        _sources[self.sha.encode()] = self.source

    def encode(self, keys: Sequence[Arg], args: Sequence[Arg] = ()) -> bytes:
        """``EVALSHA`` with these keys and arguments."""
        try:
            head, skip = self._heads[len(keys), len(args)]
        except KeyError:
            head, skip = self._head(len(keys), len(args))
        return head + _pack((*keys, *args))[skip:]

    def head(self, keys: int, args: int) -> str:
        """What stands before so many keys and arguments, for who writes those by hand."""
        return self._head(keys, args)[0].decode()

    def _head(self, keys: int, args: int) -> tuple[bytes, int]:
        """What stands before the keys, and how many bytes hiredis writes there instead."""
        number = b"%d" % keys
        head = b"*%d\r\n%b%b\r\n$%d\r\n%b\r\n" % (
            3 + keys + args,
            _EVALSHA,
            self.sha.encode(),
            len(number),
            number,
        )
        self._heads[keys, args] = found = (head, len(b"*%d\r\n" % (keys + args)))
        return found


class Wire(Protocol):
    """Where commands go: a connection to a server, or to all nodes of a cluster."""

    def issue(self, command: bytes) -> asyncio.Future[Any]:
        """Issue a command that is encoded already."""
        ...

    def call(self, *args: Arg) -> asyncio.Future[Any]:
        """Issue a command."""
        ...

    def script(self, script: Script, keys: Sequence[Arg], args: Sequence[Arg] = ()) -> asyncio.Future[Any]:
        """Issue a script."""
        ...


def as_eval(command: bytes) -> bytes | None:
    """The ``EVAL`` that does what an ``EVALSHA`` asked for; ``None`` for other commands and unknown scripts."""
    count, _, rest = command.partition(b"\r\n")
    if not rest.startswith(_EVALSHA):
        return None
    sha, _, tail = rest[len(_EVALSHA) :].partition(b"\r\n")
    source = _sources.get(sha)
    if source is None:
        return None
    return b"%b\r\n$4\r\nEVAL\r\n$%d\r\n%b\r\n%b" % (count, len(source), source, tail)
