"""Packets as they go out, and the errors that come back.

Statements go out as text, or by the number of one that was prepared.
"""

from __future__ import annotations

from functools import lru_cache

import pymysql.err
from pymysql.constants import COMMAND, CR, ER

__all__ = ["closing", "dropped", "error_of", "execution", "frame", "known_frame", "lost", "preparing"]

MOST = 0xFFFFFF
"""Bytes of one packet; what is longer goes into several."""
KNOWN = 256
"""How many statements that are sent again and again are remembered."""


def frame(packet: str) -> tuple[bytes, int]:
    """What is sent for a packet of statements, and the number of the first packet of its answer."""
    payload = bytes([COMMAND.COM_QUERY]) + packet.encode("utf-8", "surrogateescape")
    if len(payload) < MOST:
        return len(payload).to_bytes(3, "little") + b"\0" + payload, 1
    pieces = [payload[start : start + MOST] for start in range(0, len(payload) + 1, MOST)]
    data = b"".join(
        len(piece).to_bytes(3, "little") + bytes([place & 255]) + piece for place, piece in enumerate(pieces)
    )
    return data, len(pieces)


def _short(command: int, payload: bytes) -> bytes:
    return (len(payload) + 1).to_bytes(3, "little") + b"\0" + bytes([command]) + payload


@lru_cache(KNOWN)
def execution(number: int) -> bytes:
    """What carries out a prepared statement."""
    # Without a cursor, once.
    return _short(COMMAND.COM_STMT_EXECUTE, number.to_bytes(4, "little") + b"\0\1\0\0\0")


known_frame = lru_cache(KNOWN)(frame)
"""The same for those that are sent again and again."""


def lost(error: Exception | None) -> Exception:
    """What those hear who are not answered."""
    said: Exception = pymysql.err.OperationalError(CR.CR_SERVER_LOST, "the connection was lost")
    said.__cause__ = error
    return said


def dropped() -> Exception:
    """What those hear of whose statements the server has dropped some; as it says itself when it ends one."""
    said: Exception = pymysql.err.OperationalError(ER.QUERY_INTERRUPTED, "the server dropped the rest")
    return said


def error_of(packet: bytes) -> Exception:
    """What the server refused a statement with."""
    try:
        pymysql.err.raise_mysql_exception(packet)
    except pymysql.err.MySQLError as error:
        said: Exception = error
        return said
    raise ValueError(packet)  # it always raises


def preparing(statement: str) -> bytes:
    """What prepares a statement."""
    return _short(COMMAND.COM_STMT_PREPARE, statement.encode("utf-8", "surrogateescape"))


def closing(number: int) -> bytes:
    """What forgets a prepared statement."""
    return _short(COMMAND.COM_STMT_CLOSE, number.to_bytes(4, "little"))
