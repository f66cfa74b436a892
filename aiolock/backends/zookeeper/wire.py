"""The requests that we send."""

from __future__ import annotations

import math
from typing import Any

from aiozk import exc, protocol
from aiozk.protocol.acl import ACL

from aiolock.backends.zookeeper import frames
from aiolock.backends.zookeeper.frames import INT, Request, buffer, done, text

__all__ = [
    "CREATOR",
    "OPEN",
    "acl",
    "check",
    "close",
    "container",
    "create",
    "delete",
    "exists",
    "failure",
    "get",
    "lasting",
    "listing",
    "mark",
    "persistent",
    "proof",
    "put",
    "rights",
    "sync",
    "together",
    "unwatch",
]


def acl(*entries: ACL) -> bytes:
    """Who may do what with a node, as it is sent."""
    message = protocol.Create2Request(path="", data=b"", acl=list(entries), flags=0).serialize()
    # Between an opcode with two empty fields, and the flags.
    return bytes(message[12:-4])


OPEN = acl(protocol.UNRESTRICTED_ACCESS)
CREATOR = acl(protocol.AUTHED_UNRESTRICTED)

_EPHEMERAL, _EPHEMERAL_SEQUENTIAL, _CONTAINER, _LASTING = map(INT.pack, (1, 3, 4, 5))
_PERSISTENT = bytes(4)
_ANY = INT.pack(-1)
_DATA_WATCHES = 2

LONGEST = 2**40 - 1
"""Milliseconds that a time to live may have."""


class Login(protocol.AuthRequest):  # type: ignore[misc]
    """Digest authentication; aiozk logs what it sends, and this must show nothing."""

    def __str__(self) -> str:
        return "Login(***)"

    __repr__ = __str__


def create(path: str, data: bytes, acl: bytes, *, sequential: bool) -> Request:
    """An ephemeral node; the reply has its name and its Stat."""
    flags = _EPHEMERAL_SEQUENTIAL if sequential else _EPHEMERAL
    return Request(15, text(path) + buffer(data) + acl + flags, frames.read_created)


def container(path: str, acl: bytes, data: bytes = b"") -> Request:
    """A parent: the server removes it some time after its last child."""
    return Request(19, text(path) + buffer(data) + acl + _CONTAINER, frames.read_created)


def persistent(path: str, data: bytes, acl: bytes) -> Request:
    """A node that stays until somebody deletes it."""
    return Request(15, text(path) + buffer(data) + acl + _PERSISTENT, frames.read_created)


def lasting(path: str, data: bytes, acl: bytes, seconds: float) -> Request:
    """A node that stays for so many seconds after it was last written to; not every server has that."""
    ttl = min(LONGEST, max(1, math.ceil(seconds * 1000))).to_bytes(8, "big")
    return Request(21, text(path) + buffer(data) + acl + _LASTING + ttl, frames.read_created)


def listing(path: str, *, watch: bool) -> Request:
    """The names of the children."""
    return Request(8, text(path) + (b"\x01" if watch else b"\x00"), frames.read_names)


def get(path: str, *, watch: bool) -> Request:
    """Data and Stat; unlike with ``exists``, no watch is left on a node that is not there."""
    return Request(4, text(path) + (b"\x01" if watch else b"\x00"), frames.read_data)


def exists(path: str, *, watch: bool = False) -> Request:
    """The Stat."""
    return Request(3, text(path) + (b"\x01" if watch else b"\x00"), frames.read_stat)


def put(path: str, data: bytes, version: int = -1) -> Request:
    """Replace the data, if this is its version; -1 is any."""
    return Request(5, text(path) + buffer(data) + INT.pack(version), frames.read_stat)


def delete(path: str, version: int = -1) -> Request:
    """Whatever the version, unless one is named: the names of contenders are unique."""
    return Request(2, text(path) + INT.pack(version), done)


def check(path: str) -> Request:
    """Part of a transaction that fails if there is no such node."""
    return Request(13, text(path) + _ANY, done)


def rights(path: str) -> protocol.GetACLRequest:
    """Who may do what there."""
    return protocol.GetACLRequest(path=path)


def unwatch(path: str) -> protocol.RemoveWatchesRequest:
    """Be told no more of changes of the data."""
    return protocol.RemoveWatchesRequest(path=path, type=_DATA_WATCHES)


def together(*requests: Request) -> Request:
    """All of them or none; see :func:`failure`."""
    return Request(14, frames.several(requests), frames.read_several)


def failure(reply: Any) -> exc.ResponseError | None:
    """Why a transaction was not carried out; ``None`` if it was."""
    for answer in reply.responses:
        if isinstance(answer, exc.ResponseError) and not isinstance(answer, _NOT_THE_REASON):
            return answer
    return None


def sync() -> Request:
    """Answered once our server has seen what the leader had decided when it was asked."""
    return _SYNC


def proof() -> Request:
    """Writes nothing, but is answered only once a quorum has put it into its logs."""
    return together(check("/"))


def close() -> Request:
    """The end of the session, and of every ephemeral node in it."""
    return Request(-11, b"", done)


def mark(credentials: bytes) -> Login:
    """Digest authentication; from its answer on, the connection acts as that user."""
    return Login(type=0, scheme="digest", auth=credentials)


_SYNC = Request(9, text("/"), done)

_NOT_THE_REASON = (exc.RolledBack, exc.RuntimeInconsistency)
"""What those before and after the failed part of a transaction are answered."""
