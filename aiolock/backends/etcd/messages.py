"""The messages of etcd's API, version 3, as far as locks need them: encoded and decoded as protocol buffers.

Numbers of fields are those of ``rpc.proto`` and ``kv.proto`` of etcd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from aiolock.backends.diagnosis import numbers

__all__ = [
    "ALARM",
    "AUTHENTICATE",
    "GRANT",
    "MEMBERS",
    "RANGE",
    "STATUS",
    "TXN",
    "WATCH",
    "Event",
    "Fields",
    "KeyValue",
    "Malformed",
    "Reading",
    "Status",
    "Written",
    "alarms",
    "authenticate",
    "cluster_of",
    "delete",
    "events",
    "get",
    "grant",
    "granted",
    "members",
    "page",
    "put",
    "reading",
    "scan",
    "status",
    "token",
    "txn",
    "unchanged",
    "watch",
    "written",
]

RANGE = "/etcdserverpb.KV/Range"
TXN = "/etcdserverpb.KV/Txn"
WATCH = "/etcdserverpb.Watch/Watch"
GRANT = "/etcdserverpb.Lease/LeaseGrant"
AUTHENTICATE = "/etcdserverpb.Auth/Authenticate"
STATUS = "/etcdserverpb.Maintenance/Status"
ALARM = "/etcdserverpb.Maintenance/Alarm"
MEMBERS = "/etcdserverpb.Cluster/MemberList"

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""The wire types of protocol buffers."""


class Malformed(ValueError):
    """Bytes that are no protocol buffer of the kind that was expected."""


# --- protocol buffers


def _varint(number: int) -> bytes:
    number &= 0xFFFF_FFFF_FFFF_FFFF
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _message(*fields: tuple[int, int | bytes]) -> bytes:
    """Encode fields: their numbers, and whole numbers or bytes."""
    out = []
    for number, value in fields:
        if isinstance(value, int):
            out += [_varint(number << 3 | VARINT), _varint(value)]
        else:
            out += [_varint(number << 3 | BYTES), _varint(len(value)), value]
    return b"".join(out)


class Fields:
    """The fields of a decoded message. Raises :class:`Malformed`."""

    def __init__(self, data: bytes) -> None:
        self._fields: dict[int, list[int | bytes]] = {}
        at = 0
        while at < len(data):
            tag, at = self._read_varint(data, at)
            value: int | bytes
            kind = tag & 7
            if kind == VARINT:
                value, at = self._read_varint(data, at)
            else:
                if kind == BYTES:
                    size, at = self._read_varint(data, at)
                elif kind in (FIXED64, FIXED32):
                    size = 8 if kind == FIXED64 else 4
                else:
                    raise Malformed(f"wire type {kind}")
                value = data[at : at + size]
                at += size
                if at > len(data):
                    raise Malformed("a field is cut off")
            self._fields.setdefault(tag >> 3, []).append(value)

    @staticmethod
    def _read_varint(data: bytes, at: int) -> tuple[int, int]:
        number = shift = 0
        while True:
            if at >= len(data) or shift > 63:
                raise Malformed("a number is cut off")
            byte = data[at]
            at += 1
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return number, at
            shift += 7

    def number(self, field: int) -> int:
        """Return a whole number with a sign; 0 if it is absent."""
        value = self._fields.get(field, [0])[-1]
        if not isinstance(value, int):
            raise Malformed(f"field {field} is no number")
        return value - (1 << 64) if value >> 63 else value

    def data(self, field: int) -> bytes:
        """Return bytes; empty if they are absent."""
        return self.every(field)[-1] if field in self._fields else b""

    def every(self, field: int) -> list[bytes]:
        """Return each value of a repeated field."""
        values: list[bytes] = [value for value in self._fields.get(field, []) if isinstance(value, bytes)]
        if len(values) != len(self._fields.get(field, [])):
            raise Malformed(f"field {field} is a number")
        return values

    def text(self, field: int) -> str:
        """Return text, with what is no UTF-8 replaced."""
        return self.data(field).decode(errors="replace")


def cluster_of(answer: bytes) -> int:
    """Return the id of the cluster that gave an answer, from its header."""
    return Fields(Fields(answer).data(1)).number(1)


# --- keys


class KeyValue(NamedTuple):
    """A key, its value, and the revision of its last change."""

    key: bytes
    value: bytes
    revision: int


class Reading(NamedTuple):
    """The answer to a read: what is there of each key or range, and the revision at which it was read."""

    rows: list[list[KeyValue]]
    revision: int
    more: bool = False
    """True if a range was cut off at its limit."""


class Written(NamedTuple):
    """The answer to a conditional write: whether it was made, and the revision."""

    made: bool
    revision: int


def _after(prefix: bytes) -> bytes:
    """Return the end of the range of keys that begin with ``prefix``."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def _range(key: bytes, *, value: bool) -> bytes:
    return _message((1, key)) if value else _message((1, key), (8, 1))


def get(keys: Sequence[str], *, values: bool = True) -> bytes:
    """Return the request, for :data:`TXN`, that reads keys, with their values or without."""
    return _message(*((2, _message((1, _range(key.encode(), value=values)))) for key in keys))


def scan(first: bytes, prefix: bytes, limit: int) -> bytes:
    """Return the request, for :data:`RANGE`, that reads the keys that begin with ``prefix``, from ``first`` on, by key."""
    return _message((1, first), (2, _after(prefix)), (3, limit))


def _rows(answer: Fields) -> list[KeyValue]:
    found = map(Fields, answer.every(2))
    return [KeyValue(each.data(1), each.data(5), each.number(3)) for each in found]


def reading(answer: bytes) -> Reading:
    """Decode the answer to :func:`get`."""
    fields = Fields(answer)
    revision = Fields(fields.data(1)).number(3)
    return Reading([_rows(Fields(Fields(each).data(1))) for each in fields.every(3)], revision)


def page(answer: bytes) -> Reading:
    """Decode the answer to :func:`scan`."""
    fields = Fields(answer)
    return Reading([_rows(fields)], Fields(fields.data(1)).number(3), bool(fields.number(3)))


def unchanged(key: str, revision: int) -> bytes:
    """Return the condition that a key was last changed at ``revision``; 0: that there is no such key."""
    # Of a key that is absent, the revision compares as 0.
    return _message((1, 0), (2, 2), (3, key.encode()), (6, revision))


def put(key: str, value: bytes, lease: int = 0) -> bytes:
    """Return the operation that sets a key, which is deleted with its lease; 0: with none."""
    return _message((2, _message((1, key.encode()), (2, value), (3, lease))))


def delete(key: str) -> bytes:
    """Return the operation that deletes a key."""
    return _message((3, _message((1, key.encode()))))


def txn(conditions: Sequence[bytes], operations: Sequence[bytes]) -> bytes:
    """Return the request, for :data:`TXN`, that makes the operations if all conditions hold."""
    return _message(
        *((1, condition) for condition in conditions), *((2, operation) for operation in operations)
    )


def written(answer: bytes) -> Written:
    """Decode the answer to :func:`txn`."""
    fields = Fields(answer)
    return Written(bool(fields.number(2)), Fields(fields.data(1)).number(3))


# --- leases


def grant(ttl: int) -> bytes:
    """Return the request, for :data:`GRANT`, for a lease of ``ttl`` seconds."""
    return _message((1, ttl))


def granted(answer: bytes) -> tuple[int, int]:
    """Decode the answer: the lease and its ttl in seconds."""
    fields = Fields(answer)
    return fields.number(2), fields.number(3)


# --- watches


class Event(NamedTuple):
    """A message of a watch."""

    created: bool
    canceled: bool
    reason: str
    """Why it was cancelled."""
    puts: list[KeyValue]


def watch(key: str) -> bytes:
    """Return the request, for :data:`WATCH`, to be notified of changes of a key."""
    return _message((1, _message((1, key.encode()))))


def events(message: bytes) -> Event:
    """Decode a message of a watch."""
    fields = Fields(message)
    puts = []
    for each in map(Fields, fields.every(11)):
        if not each.number(1):
            found = Fields(each.data(2))
            puts.append(KeyValue(found.data(1), found.data(5), found.number(3)))
    return Event(bool(fields.number(3)), bool(fields.number(4)), fields.text(6), puts)


# --- logging in, and maintenance


def authenticate(user: str, password: str) -> bytes:
    """Return the request, for :data:`AUTHENTICATE`, for a token."""
    return _message((1, user.encode()), (2, password.encode()))


def token(answer: bytes) -> str:
    """Decode the answer to :func:`authenticate`."""
    return Fields(answer).text(2)


class Status(NamedTuple):
    """The state of a member."""

    version: str
    size: int
    """Bytes of its database."""
    leader: int
    """The id of the leader; 0 if it knows of none."""
    member: int
    learner: bool

    @property
    def numbers(self) -> tuple[int, ...]:
        """The version as numbers."""
        return numbers(self.version)


def status(answer: bytes) -> Status:
    """Decode the answer to :data:`STATUS`."""
    fields = Fields(answer)
    member = Fields(fields.data(1)).number(2)
    return Status(fields.text(2), fields.number(3), fields.number(4), member, bool(fields.number(10)))


def members(answer: bytes) -> dict[int, str]:
    """Decode the answer to :data:`MEMBERS`: the id of each member, and its name or address."""
    found = {}
    for each in map(Fields, Fields(answer).every(2)):
        found[each.number(1)] = each.text(2) or each.text(3)
    return found


def alarms(answer: bytes) -> list[tuple[int, str]]:
    """Decode the answer to :data:`ALARM`: the member and the name of each alarm."""
    names = {1: "NOSPACE", 2: "CORRUPT"}
    found = []
    for each in map(Fields, Fields(answer).every(2)):
        kind = each.number(2)
        found.append((each.number(1), names.get(kind, str(kind))))
    return found
