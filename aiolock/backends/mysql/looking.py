"""The waiters in the server's list of sessions and their statements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aiolock.backends.mysql.failures import DENIED, code
from aiolock.contract import Waiting
from aiolock.errors import BackendRefused

if TYPE_CHECKING:
    from aiolock.backends.mysql.backend import MySQLBackend

__all__ = ["in_line", "waiters"]


async def in_line(backend: MySQLBackend, rows: Sequence[Sequence[Any]]) -> tuple[Waiting, ...]:
    """Return the statements in a list of processes as waiters, in the order of their arrival.

    The list of a MySQL counts whole seconds. It is asked for more, which an account may see that may SELECT from
    `performance_schema`. Cancelling it has no effect on the server.
    """
    if len(rows) < 2 or backend.fine_times:
        return waiters(rows)
    sessions = ", ".join(str(int(row[0])) for row in rows)
    try:
        [arrivals] = await backend.ask(backend.statements("arrivals", sessions=sessions))
    except BackendRefused as error:
        if code(error.__cause__) not in DENIED:
            raise
        return waiters(rows)
    return waiters(rows, {int(number): int(began) for number, began in arrivals.rows if began is not None})


def waiters(rows: Sequence[Sequence[Any]], began: Mapping[int, int] | None = None) -> tuple[Waiting, ...]:
    """Return the statements in a list of processes as waiters, in the order of their arrival.

    A row begins with ID, USER, HOST, DB, COMMAND, TIME, STATE, INFO; on MariaDB TIME_MS follows. ``began`` says when their
    statements began, by ID; without it those with the same TIME are in the order of their connections.
    """
    if began and all(int(row[0]) in began for row in rows):
        known = began
        return tuple(Waiting(_label(row[7])) for row in sorted(rows, key=lambda row: known[int(row[0])]))
    return tuple(Waiting(_label(row[7])) for row in sorted(rows, key=_arrival))


def _arrival(row: Sequence[Any]) -> tuple[float, int]:
    # MySQL has the name of an engine there.
    fine = row[8] if len(row) > 8 and not isinstance(row[8], str) else None
    return -float(row[5] * 1000 if fine is None else fine), int(row[0])


def _label(statement: str) -> str:
    who = statement.rpartition("/*")[2].removesuffix("*/")
    try:
        return bytes.fromhex(who).decode()
    except ValueError:
        return "?"
