"""Requests and replies as bytes: those that locks are made of, written and read by hand.

aiozk builds an object for each field of each message, which costs more than the rest of a turn. What stands here gives
the same bytes and the same fields under the same names; tests compare the two. What is sent rarely is aiozk's own.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any, NamedTuple

from aiozk import exc

__all__ = [
    "INT",
    "Changed",
    "Created",
    "Data",
    "Event",
    "Names",
    "Request",
    "Several",
    "Stat",
    "buffer",
    "done",
    "read_created",
    "read_data",
    "read_event",
    "read_names",
    "read_several",
    "read_stat",
    "several",
    "text",
]

INT = Struct("!i")
_STAT = Struct("!qqqqiiiqiiq")
_EVENT = Struct("!iii")
_PART = Struct("!i?i")
"""What stands before each part of a transaction and of the answer to it: its opcode, whether it is the end, an error."""


class Request(NamedTuple):
    """A request without its header, and how to read the body of its reply."""

    opcode: int
    body: bytes
    read: Callable[[bytes], Any]


class Stat(NamedTuple):
    """What the server knows of a node; as aiozk calls it."""

    created_zxid: int
    last_modified_zxid: int
    created: int
    modified: int
    version: int
    child_version: int
    acl_version: int
    ephemeral_owner: int
    data_length: int
    num_children: int
    last_modified_children: int


class Created(NamedTuple):
    """A node has been made."""

    path: str
    stat: Stat


class Data(NamedTuple):
    """What a node says; ``None`` is what some clients write for nothing."""

    data: bytes | None
    stat: Stat


class Changed(NamedTuple):
    """What is known of a node that was written to, or that is there."""

    stat: Stat


class Names(NamedTuple):
    """The names of the children."""

    children: list[str]


class Several(NamedTuple):
    """The answers to the parts of a transaction, each a reply or an error."""

    responses: list[Any]


class Event(NamedTuple):
    """Something that was watched has happened."""

    type: int
    state: int
    path: str


# --- writing


def buffer(data: bytes) -> bytes:
    """Bytes after their length."""
    return INT.pack(len(data)) + data


def text(value: str) -> bytes:
    """A text in UTF-8 after its length."""
    data = value.encode()
    return INT.pack(len(data)) + data


def several(requests: tuple[Request, ...]) -> bytes:
    """The body of a transaction."""
    parts = [_PART.pack(request.opcode, False, -1) + request.body for request in requests]  # noqa: FBT003 - a field
    return b"".join([*parts, _PART.pack(-1, True, -1)])  # noqa: FBT003


# --- reading


def done(body: bytes) -> bool:  # noqa: ARG001 - there is nothing in it for us
    """A reply that says no more than that it was done."""
    return True


def _stat(body: bytes, at: int) -> Stat:
    return Stat._make(_STAT.unpack_from(body, at))


def _string(body: bytes, at: int) -> tuple[bytes, int]:
    begin = at + 4
    end = begin + INT.unpack_from(body, at)[0]
    if not begin <= end <= len(body):
        raise ValueError("a length that does not fit")
    return body[begin:end], end


def read_created(body: bytes) -> Created:
    """A path and a Stat."""
    path, at = _string(body, 0)
    return Created(path.decode(), _stat(body, at))


def read_data(body: bytes) -> Data:
    """Bytes and a Stat."""
    if body.startswith(b"\xff\xff\xff\xff"):
        return Data(None, _stat(body, 4))
    data, at = _string(body, 0)
    return Data(data, _stat(body, at))


def read_stat(body: bytes) -> Changed:
    """A Stat."""
    return Changed(_stat(body, 0))


def read_names(body: bytes) -> Names:
    """A list of texts; there may be thousands."""
    children = []
    at, unpack = 4, INT.unpack_from
    for _ in range(unpack(body)[0]):
        begin = at + 4
        at = begin + unpack(body, at)[0]
        children.append(body[begin:at].decode())
    if at != len(body):
        raise ValueError("a list that does not end with its message")
    return Names(children)


def read_several(body: bytes) -> Several:
    """The answers to the parts of a transaction."""
    answers: list[Any] = []
    at = 0
    while True:
        opcode, last, _ = _PART.unpack_from(body, at)
        at += _PART.size
        if last:
            return Several(answers)
        if opcode == -1:
            answers.append(exc.get_response_error(INT.unpack_from(body, at)[0]))
            at += 4
        elif opcode in _WITH_STAT:
            answers.append(read_stat(body[at:]))
            at += _STAT.size
        elif opcode in _CREATES:
            created = read_created(body[at:])
            answers.append(created)
            at += INT.unpack_from(body, at)[0] + 4 + _STAT.size
        elif opcode == _CREATE:
            # As servers answer a create2 in a transaction.
            path, end = _string(body, at)
            answers.append(path.decode())
            at = end
        elif opcode in _SILENT:
            answers.append(True)  # noqa: FBT003 - it was done
        else:
            raise ValueError(f"an answer to a part of a transaction that nobody sent: {opcode}")


_CREATE = 1
_CREATES = frozenset({15, 19, 21})
_WITH_STAT = frozenset({5})
_SILENT = frozenset({2, 13})


def read_event(message: bytes) -> Event:
    """What comes without having been asked for, header included."""
    kind, state, length = _EVENT.unpack_from(message, 16)
    return Event(kind, state, message[28 : 28 + length].decode())
