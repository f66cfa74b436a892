"""Errors of etcd by their gRPC status, and of the way to it, translated to errors of this library."""

from __future__ import annotations

import ssl

from aiolock.backends.urls import Host, ended_by_peer
from aiolock.errors import BackendError, BackendRefused, BackendUnavailable, shorten

__all__ = [
    "DENIED",
    "INTERNAL",
    "LEASE_GONE",
    "NOT_ENABLED",
    "UNAVAILABLE",
    "UNIMPLEMENTED",
    "RpcError",
    "lost_login",
    "refused",
    "translate",
    "unreachable",
]

INVALID, DENIED = 3, 7
UNIMPLEMENTED, INTERNAL, UNAVAILABLE, DATA_LOSS, UNAUTHENTICATED = 12, 13, 14, 15, 16

LEASE_GONE = "lease not found"
NOT_ENABLED = "authentication is not enabled"
NO_SPACE = "database space exceeded"
OLD_LOGIN = "revision of auth store is old"
NO_LOGIN = "user name is empty"


class RpcError(Exception):
    """A status that etcd answered with: the cause of an error of this library."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"gRPC status {code}: {text}")
        self.code = code
        self.text = text


def lost_login(error: RpcError) -> bool:
    """Return whether the login has ended, by its time or because rights were changed: another one helps."""
    return error.code == UNAUTHENTICATED or OLD_LOGIN in error.text


def translate(address: str, error: RpcError) -> BackendError:
    """Return the error of this library for a status; its cause is the status."""
    made = _translated(address, error)
    made.__cause__ = error
    return made


def _translated(address: str, error: RpcError) -> BackendError:
    first, *_ = error.text.splitlines() or [""]
    text = f"{address}: {first[:300] or 'it failed without a reason'} [gRPC status {error.code}]"
    if NO_SPACE in error.text:
        return BackendRefused(
            f"{text}; etcd takes no writes until its database is compacted and defragmented and the alarm is disarmed",
            retryable=True,
        )
    if NO_LOGIN in error.text:
        return BackendRefused(f"{text}; the cluster demands a login: user:password@ in the address")
    if error.code == DENIED:
        return BackendRefused(
            f"{text}; the user needs the right to read and write all keys that begin with the namespace and a slash"
        )
    if error.code == INVALID and "authentication failed" in error.text:
        return BackendRefused(text)
    if error.code == UNIMPLEMENTED:
        return BackendRefused(f"{text}; this is no etcd with the API of version 3")
    if error.code == DATA_LOSS:
        return BackendRefused(f"{text}; the cluster has raised the alarm CORRUPT")
    if error.code == INVALID and not lost_login(error):
        return BackendRefused(text)
    return BackendUnavailable(text)


def refused(host: Host, answer: bytes, *, tls: bool) -> BackendRefused:
    """Return the error for a server that does not speak HTTP/2."""
    hint = "" if tls else ", or it demands TLS: tls=true"
    return BackendRefused(
        f"{host} is no etcd{hint}: its answer is no HTTP/2, but begins with {shorten(answer[:40])}"
    )


def unreachable(host: Host, error: BaseException, *, tls: bool) -> BackendError:
    """Return the error of this library for one that came while a connection was made; the caller chains it."""
    if isinstance(error, BackendError):
        return error
    if isinstance(error, TimeoutError):
        return BackendUnavailable(f"{host} did not answer in time")
    if isinstance(error, ssl.SSLCertVerificationError):
        return BackendRefused(
            f"{host}: its certificate is not accepted ({error.verify_message}): name its authority with tls_ca=, and the "
            "server as its certificate does"
        )
    if isinstance(error, ssl.SSLError) and not ended_by_peer(error):
        return BackendRefused(
            f"{host} does not speak TLS at this port ({error.reason or error}): leave tls away, or name its port for TLS"
        )
    if not ended_by_peer(error):
        return BackendUnavailable(f"{host} cannot be reached: {error}")
    if not tls:
        return BackendUnavailable(f"{host} closed the connection; it may demand TLS: tls=true, or be no etcd")
    # Which of an alert and the end of the connection arrives is chance, so the sentence is the same; the cause has the alert.
    return BackendUnavailable(
        f"{host} ended the TLS connection before it could be used; it may demand a certificate of the client, or speak no TLS "
        "that this client accepts at this port: see tls, tls_cert and tls_key"
    )
