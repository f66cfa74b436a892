"""Errors of the driver and the server by number, and their translation to errors of this library.

By number, because texts differ between versions, languages and MySQL and MariaDB."""

from __future__ import annotations

import asyncio
import re
import ssl

import pymysql.err

from aiolock.backends.urls import NAME_AUTHORITY, ended_by_peer
from aiolock.errors import BackendRefused, BackendUnavailable, DeadlockDetected, LockError, shorten

__all__ = [
    "ACCOUNT_LIMIT",
    "DEADLOCK",
    "DENIED",
    "INTERRUPTED",
    "NOT_NOW",
    "NO_CONNECTION",
    "NO_SUCH_SAVEPOINT",
    "NO_SUCH_TABLE",
    "NO_SUCH_VARIABLE",
    "OUTDATED",
    "XA_ENDED",
    "Late",
    "Outdated",
    "code",
    "deadly",
    "hit",
    "locked",
    "takes_no_writes",
    "translate",
]

DEADLOCK = {1213, 3058}
OUTDATED = {1020}
"""A row is younger than the snapshot of the transaction; with `innodb_snapshot_isolation` the server undoes all of it then."""
INTERRUPTED = {1048, 1105, 1210, 1317, 1969, 3024}
"""The statement was ended by KILL QUERY or a limit of time. In the middle of an expression, the value of a subquery is NULL
then, which a column refuses (1048), and SLEEP (1210, MySQL); MySQL has no number for the end of an UPDATE of a join (1105)."""
NO_SUCH_TABLE = {1146}
NO_SUCH_VARIABLE = {1193}
DENIED = {1044, 1045, 1095, 1142, 1143, 1227, 1698}
ACCOUNT_LIMIT = {1203, 1226}
"""The account has as many connections as it may have."""
NO_CONNECTION = {1040, 1041} | ACCOUNT_LIMIT
"""The account, or the server, has as many connections as it may have."""
NOT_NOW = {1205, 3572}
"""A row lock that is not to be had now."""
READ_ONLY = {1836, 1874}
OPTION_FORBIDS = {1290}
"""An option of the server forbids the statement: the text names it, in every language."""
READ_ONLY_OPTION = re.compile(r"read[-_]only", re.IGNORECASE)
NODE_NOT_READY = {1047}
"""On Galera, if the text has its name: this node is outside of the primary component."""
READ_ONLY_TRANSACTION = {1792}
NO_SUCH_SAVEPOINT = {1305}
XA_ENDED = {1399}
"""An XA transaction that takes no more statements, and has its locks until XA COMMIT or XA ROLLBACK."""
TLS_ALONE = {1045, 3159, 1698}
"""A login that was refused, perhaps because it came without TLS: an account that must use it is refused in the words of a wrong password."""
DIRECT = "if this port speaks TLS from the beginning, as that of a proxy may, name one that begins without it, with tls=verify"
NO_USE = {2026, 2061}
"""TLS, or a way of logging in, that one of both sides does not have: another try cannot help."""
ENDING = {1053, 1077, 1079, 1152, 1158, 1159, 1160, 1161, 1184, 1927, 2006, 2013, 2014, 2027, 2055, 4031}
"""The connection is over or out of step."""


class Late(BackendUnavailable):
    """No answer in time: the server is silent, or the statement waits for a row that another transaction has locked."""


class Outdated(DeadlockDetected):
    """As of a deadlock, nothing is left of the transaction, and the same one again may well succeed."""

    def __str__(self) -> str:
        [what] = self.cycle
        return (
            f"{shorten(what)}: the server rolled the whole transaction back, because a row that it was to lock is younger "
            "than what it had read before (innodb_snapshot_isolation): begin it again, as retry_on_conflict() does, and "
            "take the lock before anything else"
        )


def code(error: BaseException | None) -> int:
    """Return the number of a driver's error, 0 if it has none."""
    if isinstance(error, pymysql.err.Error) and error.args and isinstance(error.args[0], int):
        return error.args[0]
    return 0


def deadly(error: Exception) -> bool:
    """Return whether the connection on which this was raised is of no more use."""
    number = code(error)
    return number in ENDING or not number or 2000 <= number < 3000


def takes_no_writes(error: BaseException | None) -> bool:
    """Return whether the driver's error says that the server, a demoted one perhaps, executes no statement that writes."""
    number = code(error)
    if number in OPTION_FORBIDS:
        return READ_ONLY_OPTION.search(str(error)) is not None
    return number in READ_ONLY or (number in NODE_NOT_READY and "WSREP" in str(error))


def hit(error: BaseException) -> bool:
    """Return whether a translated error means that the statement was ended, and nothing else is known to be wrong."""
    return code(error.__cause__) in INTERRUPTED


def locked(error: BaseException) -> bool:
    """Return whether a statement with this translated error waited, as far as is known, for a locked row."""
    return isinstance(error, Late) or code(error.__cause__) in NOT_NOW


def _login_hint(error: Exception, *, plain: bool) -> str:
    """Return what may be wrong with TLS, if a login over a network failed with this error."""
    number = code(error)
    certificate = (
        "if the server demands a certificate of the client, give tls= an ssl.SSLContext that has one"
    )
    if number in TLS_ALONE and plain:
        return (
            "; if the server or this account admits TLS alone, write tls=verify into the address or beside it"
        )
    if number in TLS_ALONE:
        return f"; {certificate}"
    if isinstance(error.__cause__, ssl.SSLCertVerificationError):
        return ""
    if number in ENDING or ended_by_peer(error):
        return f"; {DIRECT}" if plain else f"; {certificate}; {DIRECT}"
    # A server speaks first; one of TLS waits for the client.
    return f"; {DIRECT}" if isinstance(error, TimeoutError) else ""


def translate(error: Exception, address: str, *, plain: bool | None = None) -> LockError:
    """Return the error of this library for one of the driver's; the caller chains it.

    :param plain: whether it is of a login over a network without TLS; ``None`` for anything but such a login.
    """
    number = code(error)
    text = f"{address}: {_sentence(error)}{'' if plain is None else _login_hint(error, plain=plain)}"
    if isinstance(error.__cause__, ssl.SSLCertVerificationError):
        return BackendRefused(f"{text}; {NAME_AUTHORITY}")
    if number in DEADLOCK:
        return DeadlockDetected([address])
    if number in OUTDATED:
        return Outdated([address])
    if takes_no_writes(error):
        # It may be promoted, the setting be taken back, or the name come to mean another server.
        return BackendUnavailable(f"{text}; locks need a server that takes writes")
    if number in READ_ONLY_TRANSACTION:
        return BackendRefused(
            f"{text}; the transaction is READ ONLY, and cannot lock a row: begin one that may write"
        )
    if (
        isinstance(error, asyncio.TimeoutError | OSError)
        or number in INTERRUPTED | NO_CONNECTION | NOT_NOW
        or deadly(error)
    ):
        return BackendRefused(text) if number in NO_USE else BackendUnavailable(text)
    return BackendRefused(text)


def _sentence(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if code(error):
        cause = error.__cause__
        detail = f" ({cause})" if code(error) == 2003 and cause is not None and str(cause) else ""
        number, *text = error.args
        return f"{text[0] if text else 'error'}{detail} [{number}]"
    return str(error) or type(error).__name__
