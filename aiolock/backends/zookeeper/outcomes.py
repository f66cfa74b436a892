"""What becomes of a request that is not answered with success: in doubt, not sent, refused; and what that means to a caller."""

from __future__ import annotations

from typing import Any, TypeVar

from aiozk import exc

from aiolock.errors import BackendError, BackendRefused, BackendUnavailable

__all__ = ["InDoubt", "NotSent", "SessionChanged", "said", "translate"]

T = TypeVar("T")


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


def said(reply: T | BaseException) -> T:
    """One of several replies, or raise what came instead of it."""
    if isinstance(reply, BaseException):
        raise reply
    return reply


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


_RETRYABLE: tuple[Any, ...] = (
    exc.ConnectionLoss,
    exc.OperationTimeout,
    exc.NoNode,
    _RequestTimeout,
    _ThrottledOp,
)
