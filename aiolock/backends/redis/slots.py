"""Where a key is in a cluster: its hash slot, and which node says that it serves which slots; pure.

A lock is one key whose hash tag is its name, so everything about a lock is in one slot, and so is its document.
"""

from __future__ import annotations

from binascii import crc_hqx
from collections.abc import Container
from typing import Any, NamedTuple

__all__ = ["SLOTS", "Layout", "Place", "key_in", "key_of", "parse", "redirection", "shown", "slot_of"]

SLOTS = 16384

Place = tuple[str, int]
"""A host and a port."""


class Layout(NamedTuple):
    """Who serves what, as one node says it."""

    ranges: tuple[tuple[int, int, Place], ...]
    """First and last slot, and the primary; sorted."""
    replicas: tuple[tuple[Place, int], ...]
    """How many follow each primary."""

    @property
    def primaries(self) -> tuple[Place, ...]:
        """Each once, in the order of their slots."""
        return tuple(dict.fromkeys(place for _, _, place in self.ranges))

    @property
    def covered(self) -> int:
        """How many slots somebody serves."""
        return sum(last - first + 1 for first, last, _ in self.ranges)


def slot_of(key: bytes) -> int:
    """The hash slot of a key, by the part in braces if there is one."""
    start = key.find(b"{")
    end = key.find(b"}", start + 1) if start >= 0 else -1
    return crc_hqx(key[start + 1 : end] if end > start + 1 else key, 0) % SLOTS


def key_of(command: bytes) -> bytes | None:
    """The key of a command as it stands on the wire; ``None`` if it is not about one."""
    words = command.split(b"\r\n", 9)
    if words[2] in {b"EVALSHA", b"EVAL"}:
        return words[8]
    return words[4] if words[2] == b"HMGET" else None


def key_in(slots: Container[int], prefix: str) -> str:
    """A key of which the slot is one of these, which must not be none."""
    number = 0
    while crc_hqx(b"%d" % number, 0) % SLOTS not in slots:
        number += 1
    return f"{prefix}{{{number}}}"


def parse(reply: Any, asked: str) -> Layout:
    """The answer to ``CLUSTER SLOTS`` of a node that was asked at the host ``asked``.

    Raises :class:`ValueError` for what is none.
    """
    ranges, replicas = [], {}
    try:
        for first, last, primary, *others in reply:
            place = _text(primary[0]) or asked, int(primary[1])
            ranges.append((int(first), int(last), place))
            replicas[place] = len(others)
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise ValueError("this is no answer to CLUSTER SLOTS") from error
    return Layout(tuple(sorted(ranges)), tuple(sorted(replicas.items())))


def redirection(text: str, asked: str) -> tuple[int, Place] | None:
    """What ``MOVED 3999 host:port`` or ``ASK …`` says: a slot, and where it is; ``None`` if it does not say where."""
    try:
        _, slot, place = text.split(" ")[:3]
        host, _, port = place.rpartition(":")
        return (int(slot), (_known(host) or asked, int(port))) if host != "?" else None
    except ValueError:
        return None


def shown(place: Place) -> str:
    """As people write it."""
    host, port = place
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _text(value: bytes | str | None) -> str:
    return _known(value.decode() if isinstance(value, bytes) else value or "")


def _known(host: str) -> str:
    """A node that does not know its name says nothing, or a question mark."""
    return "" if host == "?" else host
