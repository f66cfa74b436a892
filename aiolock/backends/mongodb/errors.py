"""Errors of MongoDB by their codes, and of the driver, translated to errors of this library."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pymongo.errors import ConfigurationError, OperationFailure, ProtocolError, ServerSelectionTimeoutError

from aiolock.errors import BackendError, BackendRefused, BackendUnavailable

__all__ = ["DUPLICATE", "code", "translate"]

DUPLICATE = 11000
DISK_FULL = 14031
REFUSALS = {
    13: "the user needs the rights to find, insert, update and remove in this collection",
    18: "another database than that of the address is named with authSource=, if that is where the user is",
    20: "it does not let locks be kept",
    59: "this is no MongoDB of version 4.4 or later",
    72: "it does not read linearizably",
    73: "authSource= must name a database",
    115: "this is no MongoDB of version 4.4 or later",
    371: "writes are blocked",
    8000: "",
    DUPLICATE: "",
}
"""Codes after which the same request fails again, and what they mean here."""
FOREIGN = re.compile(r"Message length|opcode|response id|not authenticate|InvalidBSON", re.IGNORECASE)
"""Complaints of the driver about a server that is none of MongoDB."""
ENDED = re.compile(r"connection (is already )?closed|SSL handshake failed", re.IGNORECASE)
"""Words of the driver about a server that ended a connection before it answered."""
CONFIGURED = re.compile(r" \(configured timeouts: [^)]*\)")


def code(error: BaseException | None) -> int:
    """Return the code of a server's error, 0 for any other error."""
    return int(error.code or 0) if isinstance(error, OperationFailure) else 0


def translate(error: Exception, address: str) -> BackendError:
    """Return the error of this library for one of the driver's; the caller chains it."""
    number, sentence = code(error), _sentence(error)
    text = f"{address}: {sentence}{f' [{number}]' if number else ''}"
    if number in REFUSALS:
        return BackendRefused("; ".join(filter(None, (text, REFUSALS[number]))))
    if number == DISK_FULL:
        return BackendRefused(text, retryable=True)
    if "CERTIFICATE_VERIFY_FAILED" in sentence:
        return BackendRefused(f"{text}; name its authority with tls_ca=, and the members as it does")
    if isinstance(error, ProtocolError) or FOREIGN.search(sentence):
        return BackendRefused(f"{text}; this is no MongoDB, or it demands TLS: tls=true")
    if ENDED.search(sentence):
        return BackendUnavailable(
            f"{text}; it may demand TLS (tls=true), or a certificate of the client (tls_cert=)"
        )
    if "SASLprep" in sentence:
        return BackendRefused(f"{text}; the password has characters that SCRAM-SHA-256 does not allow")
    if isinstance(error, ConfigurationError):
        return BackendRefused(text)
    return BackendUnavailable(text)


def _sentence(error: Exception) -> str:
    """Return what the driver says, without what it adds for its own developers."""
    details = getattr(error, "details", None)
    text = str((details.get("errmsg") if isinstance(details, Mapping) else None) or error)
    if isinstance(error, ServerSelectionTimeoutError):
        text = text.partition(", Timeout: ")[0]
    [first, *_] = CONFIGURED.sub("", text).splitlines() or [""]
    return first[:500] or type(error).__name__
