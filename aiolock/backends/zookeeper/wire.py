"""The requests that we send, those that aiozk lacks, and what a server's refusal means to a caller."""

from __future__ import annotations

from aiozk import exc, protocol
from aiozk.protocol.acl import ACL
from aiozk.protocol.primitives import UString
from aiozk.protocol.response import Response
from aiozk.protocol.stat import Stat

from aiolock.errors import BackendError, BackendRefused, BackendUnavailable

__all__ = [
    "CREATOR",
    "OPEN",
    "InDoubt",
    "NotSent",
    "SessionChanged",
    "close",
    "container",
    "create",
    "delete",
    "exists",
    "get",
    "listing",
    "mark",
    "sync",
    "translate",
]

OPEN: list[ACL] = [protocol.UNRESTRICTED_ACCESS]
CREATOR: list[ACL] = [protocol.AUTHED_UNRESTRICTED]

EPHEMERAL = 1
SEQUENTIAL = 2
CONTAINER = 4


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


class CreateContainerResponse(Response):  # type: ignore[misc]
    """As that of Create2."""

    opcode = 19
    parts = (("path", UString), ("stat", Stat))


def create(path: str, data: bytes, acl: list[ACL], *, sequential: bool) -> protocol.Create2Request:
    """An ephemeral node; the reply has its name and its Stat."""
    flags = EPHEMERAL | (SEQUENTIAL if sequential else 0)
    return protocol.Create2Request(path=path, data=data, acl=acl, flags=flags)


def container(path: str, acl: list[ACL]) -> CreateContainerRequest:
    """A parent."""
    return CreateContainerRequest(path=path, data=b"", acl=acl, flags=CONTAINER)


def listing(path: str, *, watch: bool) -> protocol.GetChildrenRequest:
    """The names of the children."""
    return protocol.GetChildrenRequest(path=path, watch=watch)


def get(path: str, *, watch: bool) -> protocol.GetDataRequest:
    """Data and Stat; unlike with ``exists``, no watch is left on a node that is not there."""
    return protocol.GetDataRequest(path=path, watch=watch)


def exists(path: str) -> protocol.ExistsRequest:
    """The Stat."""
    return protocol.ExistsRequest(path=path, watch=False)


def delete(path: str) -> protocol.DeleteRequest:
    """Whatever the version: our names are unique."""
    return protocol.DeleteRequest(path=path, version=-1)


def sync() -> protocol.SyncRequest:
    """Answered once our server has seen what the leader had decided when it was asked."""
    return protocol.SyncRequest(path="/")


def close() -> protocol.CloseRequest:
    """The end of the session, and of every ephemeral node in it."""
    return protocol.CloseRequest()


def mark(credentials: bytes) -> protocol.AuthRequest:
    """Digest authentication; from its answer on, the connection acts as that user."""
    return protocol.AuthRequest(type=0, scheme="digest", auth=credentials)


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


_RETRYABLE = (
    exc.ConnectionLoss,
    exc.OperationTimeout,
    exc.NoNode,
    _RequestTimeout,
    _ThrottledOp,
)
