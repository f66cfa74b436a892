"""What the list of the server's statements says about those who wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiolock.contract import Waiting

__all__ = ["waiters"]


def waiters(rows: Sequence[Sequence[Any]]) -> tuple[Waiting, ...]:
    """The statements in a list of processes as waiters, in the order of their arrival.

    A row begins with ID, USER, HOST, DB, COMMAND, TIME, STATE, INFO; on MariaDB TIME_MS follows.
    """
    return tuple(Waiting(_label(row[7])) for row in sorted(rows, key=_arrival))


def _arrival(row: Sequence[Any]) -> tuple[float, int]:
    fine = row[8] if len(row) > 8 else None
    return -float(row[5] * 1000 if fine is None else fine), int(row[0])


def _label(statement: str) -> str:
    who = statement.rpartition("/*")[2].removesuffix("*/")
    try:
        return bytes.fromhex(who).decode()
    except ValueError:
        return "?"
