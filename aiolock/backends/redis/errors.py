"""Errors of a Redis server and of connecting to it, as sentences that name the remedy."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterator

from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    InvalidResponse,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from aiolock.backends.urls import ended_by_peer, is_alert
from aiolock.errors import BackendError, BackendRefused, BackendUnavailable

__all__ = ["from_driver", "from_reply", "not_sent", "was_sent"]


_NOT_SENT = "not_sent"
"""Marks such an error, whose class is the one that users know."""


def not_sent(text: str) -> BackendUnavailable:
    """Return the error of a command that the server has certainly not executed, most likely because it never left this process."""
    error = BackendUnavailable(text)
    vars(error)[_NOT_SENT] = True
    return error


def was_sent(error: BackendError) -> bool:
    """Return whether the server may have executed the command that failed with ``error``."""
    return _NOT_SENT not in vars(error)


_CLUSTER = "this server is a node of a cluster: use redis+cluster:// with the addresses of its nodes, or a standalone server"
_REPLICA = "this server is a replica, which takes no writes: give the address of the primary"
_RIGHTS = "this account may not do in a script what locks need: grant it the commands, keys and channels of the documented ACL line"

_NOT_EXECUTED = {
    "READONLY": "this server is a replica, which takes no writes: if the address does not lead to the primary soon, give that "
    "of the primary",
}
"""The server has become a replica: a new connection finds the primary, if the address leads there."""
_UNAVAILABLE = {
    "LOADING": "the server is still loading its data; it serves when that is done",
    "BUSY": "the server is busy with a script that runs for too long: find it, or end it with SCRIPT KILL",
    "MASTERDOWN": f"{_REPLICA} (it has lost its own at the moment)",
    "CLUSTERDOWN": "the cluster is down: some of its slots have no live primary",
    "TRYAGAIN": "the cluster is moving this lock to another node",
}
_REFUSED_FOR_NOW = {
    "OOM": "the server has used up its maxmemory: raise it, or remove what needs no lock server",
    "MISCONF": "the server takes no writes because it cannot save to its disk: its log says why",
    "NOREPLICAS": "the server takes no writes because too few replicas follow it (min-replicas-to-write)",
}
_REFUSED = {
    "NOAUTH": "the server asks for a password: redis://user:password@host, or username=, password=, credential_provider=",
    "WRONGPASS": "the server knows no enabled user with this name and password: check username and password",
    "DENIED": "the server is in protected mode and serves its own machine only: set a password there, or bind it on purpose",
    "MOVED": _CLUSTER,
    "ASK": _CLUSTER,
    "CROSSSLOT": _CLUSTER,
    "WRONGTYPE": "a key that should be a lock is something else: another program uses the same keys, so choose another "
    "namespace=",
}
"""By the code of the error reply."""

_PHRASES = {
    "db index": "the server has no database of this number: choose a lower db, the default is 0",
    "select is not allowed in cluster mode": f"{_CLUSTER}, and without a db",
    "without any password configured": "a password was given, but the server has none for the default user: leave it out, or "
    "name the user",
    "cluster support disabled": "this server is no node of a cluster: use redis:// with its address",
    "invalid password": _REFUSED["WRONGPASS"],
    # Where redis-py removes the code.
    "invalid username-password pair": _REFUSED["WRONGPASS"],
    "authentication required": _REFUSED["NOAUTH"],
    "unauthenticated": _REFUSED["NOAUTH"],
    "user executing the script can't": _RIGHTS,
    "acl failure in script": _RIGHTS,
}
"""Refusals by a part of the text, where the code is not specific enough."""
_PHRASES_UNAVAILABLE = {
    "max number of clients": "the server has as many connections as it may: raise maxclients, or find who holds them with "
    "CLIENT LIST",
    # With cluster-allow-reads-when-down a script begins, and is stopped at its first write.
    "while the cluster is down": _UNAVAILABLE["CLUSTERDOWN"],
}

_IN_SCRIPT = re.compile(r"(?:ERR .*)?@user_script: ?\d+: -?([A-Z]+) ")
"""Before version 7, the error of a command inside a script follows an ERR of the script, or its line if the script caught
the error."""

_REMOVED: dict[type[RedisError], str] = {
    BusyLoadingError: "LOADING",
    ClusterDownError: "CLUSTERDOWN",
    NoPermissionError: "NOPERM",
    OutOfMemoryError: "OOM",
    ReadOnlyError: "READONLY",
}
"""Codes that stand for one class of redis-py alone. AuthenticationError stands for several, which differ in their text."""


def from_reply(text: str) -> BackendError:
    """Translate an error reply such as ``"OOM command not allowed"``."""
    # The arguments that follow may be passwords or owner ids.
    text = text.partition(", with args beginning with")[0]
    code, _, words = text.partition(" ")
    if inner := _IN_SCRIPT.match(text):
        code = inner[1]
    if code in _NOT_EXECUTED:
        return not_sent(f"{code}: {_NOT_EXECUTED[code]}")
    if code in _UNAVAILABLE:
        return BackendUnavailable(f"{code}: {_UNAVAILABLE[code]}")
    if code in _REFUSED_FOR_NOW:
        return BackendRefused(f"{code}: {_REFUSED_FOR_NOW[code]}", retryable=True)
    if code in _REFUSED:
        return BackendRefused(f"{code}: {_REFUSED[code]}")
    if code == "NOPERM":
        return BackendRefused(
            f"NOPERM: {words}; grant it what locks need: scripts, and the keys and channels of the namespace"
        )
    lower = text.lower()
    for phrase, sentence in _PHRASES_UNAVAILABLE.items():
        if phrase in lower:
            return BackendUnavailable(sentence)
    for phrase, sentence in _PHRASES.items():
        if phrase in lower:
            return BackendRefused(sentence)
    if "unknown command" in lower:
        return BackendRefused(
            f"the server answered {text!r}: locks need Redis 6.2 or later, or a server that has the same scripts "
            "(if it is a Sentinel, say redis+sentinel://host:26379/service)"
        )
    return BackendRefused(f"the server answered {text!r}")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _reply(error: BaseException) -> str | None:
    """Return the error reply behind an exception of the driver, as the server sent it."""
    if not isinstance(error, RedisError):
        return None
    # Older versions of redis-py remove the code from the text; only the class shows it.
    code = getattr(error, "status_code", None) or _REMOVED.get(type(error))
    if code:
        return f"{code} {error}"
    if isinstance(error, ResponseError | AuthenticationError) or "max number of clients" in str(error):
        return str(error)
    return None


PLAIN_PORT = "; if it does not speak TLS at this port, use redis://"


def _tls(error: ssl.SSLError) -> BackendError:
    if isinstance(error, ssl.SSLCertVerificationError):
        if "mismatch" in error.verify_message.lower():
            return BackendRefused(
                f"the server's certificate is for another name ({error.verify_message}): "
                "use a name that is in it, or ssl_check_hostname=False"
            )
        return BackendRefused(
            f"the server's certificate is not trusted ({error.verify_message}): "
            "name the authority that signed it with ssl_ca_certs="
        )
    reason = error.reason or "unknown reason"
    if reason in {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE"}:
        return BackendRefused(f"the server does not speak TLS at this port ({reason}): use redis://")
    return BackendRefused(
        f"TLS could not be set up ({reason}): check ssl_ca_certs, and ssl_certfile and ssl_keyfile if the server "
        "asks its clients for a certificate"
    )


def from_driver(error: BaseException, *, tls: bool, local: bool) -> BackendError:
    """Translate a failure to connect; ``local`` for a socket in the file system."""
    for link in _chain(error):
        if (text := _reply(link)) is not None:
            return from_reply(text)
        if isinstance(link, InvalidResponse):
            # A TLS server answers plain text with an alert (byte 21).
            if "\\x15" in str(link):
                return BackendRefused("the server speaks TLS at this port: use rediss://")
            return BackendRefused(
                "something answers there, but not as a Redis server does: check host and port"
            )
        if isinstance(link, ssl.SSLError) and not ended_by_peer(link):
            return _tls(link)
        if isinstance(link, socket.gaierror):
            return BackendUnavailable(f"its host name cannot be resolved ({link.strerror}): check the name")
        if isinstance(link, ConnectionRefusedError):
            return BackendUnavailable("nothing listens there: is the server running, and is the port right?")
        if isinstance(link, FileNotFoundError):
            if local:
                return BackendUnavailable(
                    "there is no such socket: is the server running with unixsocket set?"
                )
            return BackendRefused("a file of ssl_ca_certs, ssl_certfile or ssl_keyfile does not exist")
        if isinstance(link, PermissionError) and (local or tls):
            return BackendRefused(f"this user may not open its {'socket' if local else 'certificate files'}")
        if isinstance(link, ConnectionError | ssl.SSLError) or "closed by server" in str(link):
            hint = "; if it speaks TLS at this port, use rediss://"
            if tls:
                hint = "; if it asks its clients for a certificate, check ssl_certfile and ssl_keyfile"
                if isinstance(link, ssl.SSLError) and is_alert(link):
                    hint += f" ({link.reason})"
                else:
                    hint += PLAIN_PORT
            hint = "" if local else hint
            return BackendUnavailable(f"it closed the connection before it answered{hint}")
        if isinstance(link, TimeoutError):
            hint = PLAIN_PORT if tls else ""
            return BackendUnavailable(f"it did not answer in time{hint}")
        if isinstance(link, OSError):
            return BackendUnavailable(f"the operating system says: {link.strerror or type(link).__name__}")
    # A credential provider, for example. Its message may contain secrets, so only its type is repeated.
    return BackendUnavailable(f"setting up the connection failed with {type(error).__name__}")
