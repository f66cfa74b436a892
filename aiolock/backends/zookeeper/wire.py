"""The requests that we send, those that aiozk lacks, and what a server's refusal means to a caller."""

from __future__ import annotations

import math
import struct
from typing import Any

from aiozk import exc, protocol
from aiozk.protocol.acl import ACL
from aiozk.protocol.primitives import Long, UString
from aiozk.protocol.response import Response
from aiozk.protocol.stat import Stat

from aiolock.errors import BackendError, BackendRefused, BackendUnavailable

__all__ = [
    "CREATOR",
    "OPEN",
    "InDoubt",
    "Names",
    "NotSent",
    "SessionChanged",
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
    "translate",
    "unwatch",
]

OPEN: list[ACL] = [protocol.UNRESTRICTED_ACCESS]
CREATOR: list[ACL] = [protocol.AUTHED_UNRESTRICTED]

EPHEMERAL = 1
SEQUENTIAL = 2
CONTAINER = 4
DATA_WATCHES = 2
LASTING = 5
"""Persistent, with a time to live."""

LONGEST = 2**40 - 1
"""Milliseconds that a time to live may have."""


class InDoubt(exc.ConnectError):  # type: ignore[misc]
    """Written and not answered: the server may have done it, or not."""


class NotSent(exc.ZKError):  # type: ignore[misc]
    """Never written: the server has not done it."""

    def __str__(self) -> str:
        return "there is no connection to the ensemble"


class SessionChanged(exc.ZKError):  # type: ignore[misc]
    """The session that the request belongs to is not the present one; it was not sent."""

    def __str__(self) -> str:
        return "the session has ended"


class _RequestTimeout(exc.ResponseError):  # type: ignore[misc]
    error_code = -122


class _ReconfigDisabled(exc.ResponseError):  # type: ignore[misc]
    error_code = -123


class _SessionClosedRequireSasl(exc.ResponseError):  # type: ignore[misc]
    error_code = -124


class _QuotaExceeded(exc.ResponseError):  # type: ignore[misc]
    error_code = -125


class _ThrottledOp(exc.ResponseError):  # type: ignore[misc]
    # Declaring the codes that aiozk lacks keeps its UnknownError away, which prints to stdout.
    error_code = -127


class CreateContainerRequest(protocol.CreateRequest):  # type: ignore[misc]
    """A node that the server removes some time after its last child."""

    opcode = 19


class CreateTTLRequest(protocol.CreateRequest):  # type: ignore[misc]
    """A node that the server removes once it has not been written to for so long."""

    opcode = 21
    parts = (*protocol.CreateRequest.parts, ("ttl", Long))


class CreateTTLResponse(Response):  # type: ignore[misc]
    """As that of Create2."""

    opcode = 21
    parts = (("path", UString), ("stat", Stat))


class CreateContainerResponse(Response):  # type: ignore[misc]
    """As that of Create2."""

    opcode = 19
    parts = (("path", UString), ("stat", Stat))


class Login(protocol.AuthRequest):  # type: ignore[misc]
    """Digest authentication; aiozk logs what it sends, and this must show nothing."""

    def __str__(self) -> str:
        return "Login(***)"

    __repr__ = __str__


class Names(Response):  # type: ignore[misc]
    """The names of the children, read five times as fast as aiozk does: there may be thousands."""

    opcode = -8
    """No server says so: a connection puts it where aiozk looks up how to read a reply."""

    def __init__(self, children: list[str]) -> None:
        super().__init__()
        self.children = children

    @classmethod
    def deserialize(cls, raw_bytes: bytes) -> Names:
        """From the bytes of a reply."""
        children = []
        at = _INT.size
        for _ in range(_INT.unpack_from(raw_bytes)[0]):
            begin = at + _INT.size
            at = begin + _INT.unpack_from(raw_bytes, at)[0]
            children.append(raw_bytes[begin:at].decode())
        return cls(children)


_INT = struct.Struct("!i")


def create(path: str, data: bytes, acl: list[ACL], *, sequential: bool) -> protocol.Create2Request:
    """An ephemeral node; the reply has its name and its Stat."""
    flags = EPHEMERAL | (SEQUENTIAL if sequential else 0)
    return protocol.Create2Request(path=path, data=data, acl=acl, flags=flags)


def container(path: str, acl: list[ACL], data: bytes = b"") -> CreateContainerRequest:
    """A parent."""
    return CreateContainerRequest(path=path, data=data, acl=acl, flags=CONTAINER)


def persistent(path: str, data: bytes, acl: list[ACL]) -> protocol.Create2Request:
    """A node that stays until somebody deletes it."""
    return protocol.Create2Request(path=path, data=data, acl=acl, flags=0)


def lasting(path: str, data: bytes, acl: list[ACL], seconds: float) -> CreateTTLRequest:
    """A node that stays for so many seconds after it was last written to; not every server has that."""
    ttl = min(LONGEST, max(1, math.ceil(seconds * 1000)))
    return CreateTTLRequest(path=path, data=data, acl=acl, flags=LASTING, ttl=ttl)


def listing(path: str, *, watch: bool) -> protocol.GetChildrenRequest:
    """The names of the children."""
    return protocol.GetChildrenRequest(path=path, watch=watch)


def get(path: str, *, watch: bool) -> protocol.GetDataRequest:
    """Data and Stat; unlike with ``exists``, no watch is left on a node that is not there."""
    return protocol.GetDataRequest(path=path, watch=watch)


def exists(path: str, *, watch: bool = False) -> protocol.ExistsRequest:
    """The Stat."""
    return protocol.ExistsRequest(path=path, watch=watch)


def put(path: str, data: bytes, version: int = -1) -> protocol.SetDataRequest:
    """Replace the data, if this is its version; -1 is any."""
    return protocol.SetDataRequest(path=path, data=data, version=version)


def delete(path: str, version: int = -1) -> protocol.DeleteRequest:
    """Whatever the version, unless one is named: the names of contenders are unique."""
    return protocol.DeleteRequest(path=path, version=version)


def check(path: str) -> protocol.CheckVersionRequest:
    """Part of a transaction that fails if there is no such node."""
    return protocol.CheckVersionRequest(path=path, version=-1)


def rights(path: str) -> protocol.GetACLRequest:
    """Who may do what there."""
    return protocol.GetACLRequest(path=path)


def unwatch(path: str) -> protocol.RemoveWatchesRequest:
    """Be told no more of changes of the data."""
    return protocol.RemoveWatchesRequest(path=path, type=DATA_WATCHES)


def together(*requests: Any) -> protocol.TransactionRequest:
    """All of them or none; see :func:`failure`."""
    transaction = protocol.TransactionRequest()
    for request in requests:
        transaction.add(request)
    return transaction


def failure(reply: Any) -> exc.ResponseError | None:
    """Why a transaction was not carried out; ``None`` if it was."""
    for answer in reply.responses:
        if isinstance(answer, exc.ResponseError) and not isinstance(answer, _NOT_THE_REASON):
            return answer
    return None


def sync() -> protocol.SyncRequest:
    """Answered once our server has seen what the leader had decided when it was asked."""
    return protocol.SyncRequest(path="/")


def proof() -> protocol.TransactionRequest:
    """Writes nothing, but is answered only once a quorum has put it into its logs."""
    return together(check("/"))


def close() -> protocol.CloseRequest:
    """The end of the session, and of every ephemeral node in it."""
    return protocol.CloseRequest()


def mark(credentials: bytes) -> Login:
    """Digest authentication; from its answer on, the connection acts as that user."""
    return Login(type=0, scheme="digest", auth=credentials)


def translate(error: Exception) -> BackendError:
    """The error of ours that says what an error of aiozk's means to a caller; raise it ``from`` that one."""
    if isinstance(error, exc.NoAuth):
        return BackendRefused(
            "this user lacks a right that locks need: READ, CREATE and DELETE on the parent, READ on its children"
        )
    if isinstance(error, exc.AuthFailed):
        return BackendRefused("the ensemble does not accept this user and password")
    if isinstance(error, exc.NotReadOnly):
        return BackendRefused("this server is read-only: it has lost its quorum", retryable=True)
    if isinstance(error, exc.Unimplemented):
        return BackendRefused("this server is too old: aiolock needs ZooKeeper 3.5.1 or later")
    if isinstance(error, _RETRYABLE) or not isinstance(error, exc.ResponseError):
        return BackendUnavailable(
            f"ZooKeeper did not answer for certain: {str(error) or type(error).__name__}"
        )
    return BackendRefused(f"ZooKeeper refused: {error}")


_NOT_THE_REASON = (exc.RolledBack, exc.RuntimeInconsistency)
"""What those before and after the failed part of a transaction are answered."""

_RETRYABLE = (
    exc.ConnectionLoss,
    exc.OperationTimeout,
    exc.NoNode,
    _RequestTimeout,
    _ThrottledOp,
)
