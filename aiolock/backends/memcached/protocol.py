"""The meta commands of memcached that rows need, and their answers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import ceil
from typing import NamedTuple

from aiolock.errors import BackendError, BackendRefused, BackendUnavailable

__all__ = [
    "ERRORS",
    "NOOP",
    "Parser",
    "ProtocolError",
    "Response",
    "delete",
    "expiry",
    "fits",
    "read",
    "refusal",
    "write",
]

NOOP = b"mn\r\n"

MONTH = 30 * 86_400
"""Seconds beyond which memcached takes an expiry for a time since 1970."""
LONGEST = 4_096
"""Bytes of a line; those of memcached are shorter."""

_LINE = re.compile(rb"(HD|EN|EX|NF|NS|MN|VA +([0-9]{1,9}))(?: +c([0-9]{1,20}))?(?: .*)?")
ERRORS = b"ERROR", b"CLIENT_ERROR", b"SERVER_ERROR"
_CODES = {
    b"mg": {b"HD", b"VA", b"EN"},
    b"ms": {b"HD", b"EX", b"NF", b"NS"},
    b"md": {b"HD", b"EX", b"NF"},
    b"mn": {b"MN"},
}
"""The answers to each command."""


def read(key: str, *, value: bool = True) -> bytes:
    """Return the command that reads an item and its CAS id, or only its CAS id."""
    return f"mg {key} {'v ' if value else ''}c\r\n".encode()


def write(key: str, value: bytes, cas: str, expires: int) -> bytes:
    """Return the command that replaces an item with this CAS id; with ``""``, it adds an item where there is none."""
    condition = f"C{cas}" if cas else "ME"
    return f"ms {key} {len(value)} {condition} T{expires} c\r\n".encode() + value + b"\r\n"


def delete(key: str, cas: str) -> bytes:
    """Return the command that deletes an item with this CAS id."""
    return f"md {key} C{cas}\r\n".encode()


def expiry(ttl: float | None, now: float) -> int:
    """Return when an item expires that has to stay for ``ttl`` seconds; ``now`` is the time of the server, or later.

    memcached counts by a clock that moves once a second, and in time skips one, because its ticks are a second apart and a
    little more: an item that is to stay n seconds stays n - 2 to n.
    """
    if ttl is None:
        return 0
    seconds = ceil(ttl) + 2
    return seconds if seconds <= MONTH else min(ceil(now + ttl) + 2, 2**31 - 1)


class Response(NamedTuple):
    """An answer: its code, and the CAS id and the value if they were asked for."""

    code: bytes
    cas: str = ""
    value: bytes = b""
    """The value of an item, or the text of an error."""

    @property
    def done(self) -> bool:
        """True if the item was found, written or deleted."""
        return self.code in (b"HD", b"VA")


class ProtocolError(Exception):
    """Bytes that are no answer to what was asked."""


class Parser:
    """Split what a server sends into answers."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Response]:
        """Yield the answers that are complete. Raises :class:`ProtocolError`."""
        data, start = self._rest + data, 0
        while (end := data.find(b"\r\n", start)) >= 0:
            line, stop = data[start:end], end + 2
            if line.partition(b" ")[0] in ERRORS:
                answer = Response(b"ERROR", value=line)
            elif (match := _LINE.fullmatch(line)) is None:
                raise ProtocolError
            elif match[2] is None:
                answer = Response(match[1], (match[3] or b"").decode())
            else:
                stop += int(match[2]) + 2
                if len(data) < stop:
                    break
                if data[stop - 2 : stop] != b"\r\n":
                    raise ProtocolError
                answer = Response(b"VA", (match[3] or b"").decode(), data[end + 2 : stop - 2])
            start = stop
            self._rest = data[start:]
            yield answer
        self._rest = data[start:]
        if end < 0 and len(self._rest) > LONGEST:
            raise ProtocolError


def fits(command: bytes, answer: Response) -> bool:
    """Test whether an answer can be one to this command."""
    verb = command[:2]
    if answer.code == b"ERROR":
        return True
    return answer.code in _CODES[verb] and (verb == b"md" or not answer.done or bool(answer.cas))


def refusal(address: str, line: bytes) -> BackendError:
    """Return the error for an error line of the server."""
    text = f"{address}: {line.decode(errors='replace')}"
    if b"unauthenticated" in line:
        return BackendRefused(
            f"{text}: it demands a password (-Y), which is not supported; let only trusted machines reach it instead"
        )
    if b"out of memory" in line:
        return BackendRefused(
            f"{text}: its memory is full and nothing could be evicted; give it more, and start it without -M",
            retryable=True,
        )
    if line.startswith(b"SERVER_ERROR") or b"connections" in line:
        return BackendUnavailable(text)
    return BackendRefused(text)
