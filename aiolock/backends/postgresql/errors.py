"""Errors of the driver and the server by SQLSTATE, and their translation to errors of this library.

By SQLSTATE, because texts differ between versions and languages; only the first line of a message is shown, because details
may name values."""

from __future__ import annotations

import ssl

import asyncpg

from aiolock.backends.urls import NAME_AUTHORITY, ended_by_peer
from aiolock.errors import BackendError, BackendRefused, BackendUnavailable, UnsafeBackend

__all__ = [
    "CREATED_MEANWHILE",
    "LOCKED",
    "NO_ROOM_TO_NOTIFY",
    "NO_TLS",
    "READ_ONLY",
    "SWAPPED",
    "sqlstate",
    "translate",
]

READ_ONLY = "25006"
DISK_FULL = "53100"
LOCKED = "55P03"
"""A row or table was locked for longer than the session waits."""
NO_ROOM_TO_NOTIFY = "54000"
"""The server's queue of notifications is full: the statement was rolled back."""
CREATED_MEANWHILE = {"23505", "42P06", "42P07", "42710"}
"""Another session created the same table or type at the same time."""
TEMPORARY = ("08", "40", "53", "55P03", "57", "58", "25P03", "25P04")
"""Beginnings of codes after which the same statement may succeed later: connection, conflict, resources, locked, shutdown,
I/O, time-outs."""

UNPREPARED = {"26000", "42P05"}
"""A statement that this connection has prepared is not there, or one that it has not: the session is another one."""
SWAPPED = (
    "a pooler such as PgBouncer stands in between and swaps the sessions that settings and notifications live in: have it pool "
    "sessions (pool_mode = session), or connect to the server itself"
)

NO_LOGIN = "28000"
CHECKS_HBA = "ClientAuthentication"
"""The function of the server that refuses logins by ``pg_hba.conf``."""
PLAIN = "if the server admits TLS alone, as managed ones do, write tls=verify into the address or beside it"
NO_TLS = "the server does not offer TLS, which tls= asks for"
CERTIFICATE = "if the server demands a certificate of the client, give tls= an ssl.SSLContext that has one"
DIRECT = "if this port speaks TLS from the beginning, as that of a proxy may, name one that begins without it"
"""No way to begin is known there: the protocol asks for TLS on a connection that has begun."""
CONNECTION = "08"
"""The beginning of the codes of a connection that has ended, or of none."""


def sqlstate(error: BaseException | None) -> str:
    """Return the code of a server's error, an empty string for any other error."""
    return str(getattr(error, "sqlstate", None) or "") if isinstance(error, asyncpg.PostgresError) else ""


def translate(error: Exception, address: str, *, plain: bool | None = None) -> BackendError:
    """Return the error of this library for one of the driver's; the caller chains it.

    :param plain: whether it is of a login over a network without TLS; ``None`` for anything but such a login.
    """
    code = sqlstate(error)
    text = f"{address}: {_sentence(error)}"
    if plain is not None and (ended := _ended(error)) | _demands_tls(error):
        hints = [] if NO_TLS in text else [PLAIN if plain else CERTIFICATE]
        text = "; ".join([text, *hints, *([DIRECT] if ended else [])])
    if code in UNPREPARED:
        return UnsafeBackend(f"{text}; {SWAPPED}")
    if code == READ_ONLY:
        # It may be promoted, the setting be taken back, or the name come to mean another server.
        return BackendUnavailable(f"{text}; locks need a server that takes writes")
    if code == DISK_FULL:
        return BackendRefused(text, retryable=True)
    if isinstance(error, ssl.SSLCertVerificationError):
        return BackendRefused(f"{text}; {NAME_AUTHORITY}")
    if NO_TLS in text:
        return BackendRefused(text)
    if not code or code.startswith(TEMPORARY):
        # Without a code: the way to the server, or the connection is out of step.
        return BackendUnavailable(text)
    return BackendRefused(text)


def _ended(error: Exception) -> bool:
    """Test whether the other side ended the connection, as one does that speaks TLS alone, or demands a certificate."""
    return sqlstate(error).startswith(CONNECTION) or ended_by_peer(error) or type(error) is ConnectionError


def _demands_tls(error: Exception) -> bool:
    """Test whether a server, or a proxy before it, may have refused a login because it came without TLS or without a certificate.

    A server says it by the function that found no line of ``pg_hba.conf``, because texts are translated; a proxy by words.
    """
    if sqlstate(error) == NO_LOGIN and getattr(error, "server_source_function", None) == CHECKS_HBA:
        return True
    return isinstance(error, asyncpg.PostgresError) and any(
        word in str(error).lower() for word in ("ssl", "tls", "insecure")
    )


def _sentence(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, ConnectionError) and "SSL upgrade" in str(error):
        return NO_TLS
    if isinstance(error, asyncpg.InternalClientError):
        # What the server says to a connection that does nothing, such as that it ends it, is unexpected to the driver.
        return f"the connection is out of step, as it is when the server has ended it: {error}"
    code = sqlstate(error)
    [first, *_] = str(error).splitlines() or [""]
    return f"{first or type(error).__name__}{f' [{code}]' if code else ''}"
