"""Outcomes of a request (in doubt, not sent, refused), and their translation into errors of aiolock."""

from __future__ import annotations

import ssl
from typing import TypeVar

from aiozk import exc

from aiolock.backends.urls import NAME_AUTHORITY, ended_by_peer, is_alert
from aiolock.errors import BackendError, BackendRefused, BackendUnavailable

__all__ = ["InDoubt", "NotSent", "Refused", "SessionChanged", "tls_hint", "translate", "unwrap"]

T = TypeVar("T")


class Refused(Exception):
    """A server accepted the connection and closed it instead of answering the handshake."""


class InDoubt(exc.ConnectError):  # type: ignore[misc]
    """The request was written and not answered: the server may have carried it out."""


class NotSent(exc.ZKError):  # type: ignore[misc]
    """The request was never written: the server has not carried it out."""

    def __str__(self) -> str:
        return "there is no connection to the ensemble"


class SessionChanged(exc.ZKError):  # type: ignore[misc]
    """The request belongs to an earlier session and was not sent."""

    def __str__(self) -> str:
        return "the session has ended"


# aiozk lacks these codes, and prints its UnknownError for them to stdout; creating a class registers its code.
_CODES = {
    "RequestTimeout": -122,
    "ReconfigDisabled": -123,
    "SessionClosedRequireSasl": -124,
    "QuotaExceeded": -125,
    "ThrottledOp": -127,
}
_ADDED = {name: type(name, (exc.ResponseError,), {"error_code": code}) for name, code in _CODES.items()}

_RETRYABLE = (
    exc.ConnectionLoss,
    exc.OperationTimeout,
    exc.NoNode,
    _ADDED["RequestTimeout"],
    _ADDED["ThrottledOp"],
)


def unwrap(reply: T | BaseException) -> T:
    """Return one of several replies, or raise the error in its place."""
    if isinstance(reply, BaseException):
        raise reply
    return reply


def tls_hint(error: BaseException, *, tls: bool) -> str:
    """Return what may be wrong with TLS, if an attempt to connect failed with this error."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"; {NAME_AUTHORITY}"
    if isinstance(error, Refused) or ended_by_peer(error):
        if not tls:
            return "; it may demand TLS: tls=true"
        other = "" if is_alert(error) else ", or not speak TLS at this port (tls)"
        return f"; it may demand a certificate of the client: tls_cert and tls_key{other}"
    if isinstance(error, ssl.SSLError):
        return "; it does not speak TLS at this port: leave tls away, or name its port for TLS"
    return ""


def translate(error: Exception) -> BackendError:
    """Return the error of aiolock for an error of aiozk; raise it ``from`` that error."""
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
