"""ZooKeeper client protocol: jute encoding, requests and replies.

aiozk builds an object for each field of each message, which costs more than the rest of a lock and its release. The
frequent messages are therefore encoded and decoded here, with aiozk's bytes and field names; tests compare the two.
Rare requests (authentication, ACLs, watch removal) are aiozk's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from struct import Struct
from typing import Any, NamedTuple

from aiozk import exc
from aiozk import protocol as aiozk_protocol
from aiozk.protocol.acl import ACL

__all__ = [
    "CREATOR",
    "INT",
    "OPEN",
    "Data",
    "Operation",
    "WatchEvent",
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
    "login",
    "persistent",
    "proof",
    "put",
    "read_event",
    "rights",
    "sync",
    "together",
    "unwatch",
]

# --- replies, with aiozk's field names


class Stat(NamedTuple):
    created_zxid: int
    last_modified_zxid: int
    created: int
    modified: int
    version: int
    child_version: int
    acl_version: int
    ephemeral_owner: int
    data_length: int
    num_children: int
    last_modified_children: int


class Created(NamedTuple):
    path: str
    stat: Stat


class Data(NamedTuple):
    data: bytes | None
    """``None`` if a client wrote null."""
    stat: Stat


class Changed(NamedTuple):
    """The reply to a write or an existence check."""

    stat: Stat


class Names(NamedTuple):
    children: list[str]


class Several(NamedTuple):
    """The replies to the parts of a transaction, each a reply or an error."""

    responses: list[Any]


class WatchEvent(NamedTuple):
    type: int
    state: int
    path: str


INT = Struct("!i")
_STAT = Struct("!qqqqiiiqiiq")
_EVENT = Struct("!iii")
_PART = Struct("!i?i")
"""Header of each part of a transaction and of its reply: opcode, end marker, error."""


def _done(body: bytes) -> bool:  # noqa: ARG001 - the decoder of an empty reply
    return True


def _string(body: bytes, at: int) -> tuple[bytes, int]:
    begin = at + 4
    end = begin + INT.unpack_from(body, at)[0]
    if not begin <= end <= len(body):
        raise ValueError("a length that does not fit")
    return body[begin:end], end


def read_created(body: bytes) -> Created:
    path, at = _string(body, 0)
    return Created(path.decode(), Stat._make(_STAT.unpack_from(body, at)))


def read_data(body: bytes) -> Data:
    data, at = (None, 4) if body.startswith(b"\xff\xff\xff\xff") else _string(body, 0)
    return Data(data, Stat._make(_STAT.unpack_from(body, at)))


def read_stat(body: bytes) -> Changed:
    return Changed(Stat._make(_STAT.unpack_from(body)))


def read_names(body: bytes) -> Names:
    """Decode a list of strings, which may have thousands of items."""
    children = []
    at, unpack = 4, INT.unpack_from
    for _ in range(unpack(body)[0]):
        begin = at + 4
        at = begin + unpack(body, at)[0]
        children.append(body[begin:at].decode())
    if at != len(body):
        raise ValueError("a list that does not end with its message")
    return Names(children)


def read_several(body: bytes) -> Several:
    replies: list[Any] = []
    at = 0
    while True:
        opcode, last, _ = _PART.unpack_from(body, at)
        at += _PART.size
        if last:
            return Several(replies)
        if opcode == -1:
            replies.append(exc.get_response_error(INT.unpack_from(body, at)[0]))
            at += INT.size
        elif opcode == _PUT:
            replies.append(read_stat(body[at:]))
            at += _STAT.size
        elif opcode in (_CREATE2, _CREATE_CONTAINER, _CREATE_TTL):
            replies.append(read_created(body[at:]))
            at = _string(body, at)[1] + _STAT.size
        elif opcode == _CREATE:
            # Some versions answer a create2 inside a transaction with the opcode of create.
            path, at = _string(body, at)
            replies.append(path.decode())
        elif opcode in (_DELETE, _CHECK):
            replies.append(True)
        else:
            raise ValueError(f"a reply to a part that was not sent: opcode {opcode}")


def read_event(message: bytes) -> WatchEvent:
    """Decode a watch event, header included."""
    kind, state, length = _EVENT.unpack_from(message, 16)
    return WatchEvent(kind, state, message[28 : 28 + length].decode())


# --- requests

_CREATE, _DELETE, _EXISTS, _GET, _PUT, _LIST, _SYNC = 1, 2, 3, 4, 5, 8, 9
_CHECK, _MULTI, _CREATE2, _CREATE_CONTAINER, _CREATE_TTL, _CLOSE = 13, 14, 15, 19, 21, -11

_PERSISTENT, _EPHEMERAL, _EPHEMERAL_SEQUENTIAL, _CONTAINER, _TTL = map(INT.pack, (0, 1, 3, 4, 5))

MAX_TTL = 2**40 - 1
"""The longest time to live of a node, in milliseconds."""


class Operation(NamedTuple):
    """A request without its header, and the decoder of its reply."""

    opcode: int
    body: bytes
    read: Callable[[bytes], Any]


def acl(*entries: ACL) -> bytes:
    """Encode an access control list."""
    message = aiozk_protocol.Create2Request(path="", data=b"", acl=list(entries), flags=0).serialize()
    # It stands between an opcode with two empty fields and the flags.
    return bytes(message[12:-4])


OPEN = acl(aiozk_protocol.UNRESTRICTED_ACCESS)
CREATOR = acl(aiozk_protocol.AUTHED_UNRESTRICTED)


def _buffer(data: bytes) -> bytes:
    return INT.pack(len(data)) + data


def _text(value: str) -> bytes:
    return _buffer(value.encode())


def _node(opcode: int, path: str, data: bytes, acl: bytes, flags: bytes) -> Operation:
    return Operation(opcode, _text(path) + _buffer(data) + acl + flags, read_created)


def create(path: str, data: bytes, acl: bytes, *, sequential: bool) -> Operation:
    """Create an ephemeral node; the reply has its path and Stat."""
    return _node(_CREATE2, path, data, acl, _EPHEMERAL_SEQUENTIAL if sequential else _EPHEMERAL)


def container(path: str, acl: bytes, data: bytes = b"") -> Operation:
    """Create a parent, which the server removes some time after its last child."""
    return _node(_CREATE_CONTAINER, path, data, acl, _CONTAINER)


def persistent(path: str, data: bytes, acl: bytes) -> Operation:
    """Create a node that stays until it is deleted."""
    return _node(_CREATE2, path, data, acl, _PERSISTENT)


def lasting(path: str, data: bytes, acl: bytes, seconds: float) -> Operation:
    """Create a node that the server removes ``seconds`` after its last write; an optional feature of servers."""
    ttl = min(MAX_TTL, max(1, math.ceil(seconds * 1000))).to_bytes(8, "big")
    return _node(_CREATE_TTL, path, data, acl, _TTL + ttl)


def listing(path: str, *, watch: bool) -> Operation:
    """List the names of the children."""
    return Operation(_LIST, _text(path) + (b"\x01" if watch else b"\x00"), read_names)


def get(path: str, *, watch: bool) -> Operation:
    """Read data and Stat; unlike ``exists``, leaves no watch on a node that does not exist."""
    return Operation(_GET, _text(path) + (b"\x01" if watch else b"\x00"), read_data)


def exists(path: str, *, watch: bool = False) -> Operation:
    """Read the Stat."""
    return Operation(_EXISTS, _text(path) + (b"\x01" if watch else b"\x00"), read_stat)


def put(path: str, data: bytes, version: int = -1) -> Operation:
    """Replace the data of a node if it has this version; -1 is any."""
    return Operation(_PUT, _text(path) + _buffer(data) + INT.pack(version), read_stat)


def delete(path: str, version: int = -1) -> Operation:
    """Delete a node if it has this version; -1 is any."""
    return Operation(_DELETE, _text(path) + INT.pack(version), _done)


def check(path: str) -> Operation:
    """Fail the transaction if the node does not exist."""
    return Operation(_CHECK, _text(path) + INT.pack(-1), _done)


def sync() -> Operation:
    """Bring the server up to date with the leader as of this request."""
    return Operation(_SYNC, _text("/"), _done)


def proof() -> Operation:
    """Write nothing, but wait until a quorum has logged the transaction."""
    return together(check("/"))


def close() -> Operation:
    """End the session and delete its ephemeral nodes."""
    return Operation(_CLOSE, b"", _done)


def together(*parts: Operation) -> Operation:
    """Combine requests into a transaction, all of them or none; see :func:`failure`."""
    body = [_PART.pack(part.opcode, False, -1) + part.body for part in parts]  # noqa: FBT003 - a field
    return Operation(_MULTI, b"".join([*body, _PART.pack(-1, True, -1)]), read_several)  # noqa: FBT003


def failure(reply: Several) -> exc.ResponseError | None:
    """Return the error that a transaction failed with; ``None`` if it was carried out."""
    # The parts before and after the failed one have errors of their own, which are not the cause.
    others = (exc.RolledBack, exc.RuntimeInconsistency)
    errors = (part for part in reply.responses if isinstance(part, exc.ResponseError))
    return next((error for error in errors if not isinstance(error, others)), None)


def rights(path: str) -> aiozk_protocol.GetACLRequest:
    """Make the request for the access control list of a node."""
    return aiozk_protocol.GetACLRequest(path=path)


def unwatch(path: str) -> aiozk_protocol.RemoveWatchesRequest:
    """Remove the data watches of this session on a node."""
    return aiozk_protocol.RemoveWatchesRequest(path=path, type=2)


class _Login(aiozk_protocol.AuthRequest):  # type: ignore[misc]
    def __repr__(self) -> str:
        # aiozk logs what it sends.
        return "Login(***)"

    __str__ = __repr__


def login(credentials: bytes) -> _Login:
    """Authenticate the connection by digest; it acts as that user from the reply on."""
    return _Login(type=0, scheme="digest", auth=credentials)
