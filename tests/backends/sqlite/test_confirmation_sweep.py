"""Cancelling `confirm()` at any await point leaves the connection, the transaction and the hold as they were."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import aiolock
from aiolock import BackendUnavailable, Client
from tests.faults.staging import left_at_the_server, left_in_the_loop
from tests.sweep import MODES, Attempt, Mode, attempt, sweep

aiosqlite = pytest.importorskip("aiosqlite", reason="pip install --group test")

SHIFTS: dict[Mode, int] = {"before": 6, "double": 4, "timeout": 3, "scope": 4}
"""How many passes of the loop later the interruption comes, at most: others make progress meanwhile."""

_numbers = itertools.count(1)

SITUATIONS = "begun", "written", "refused"
"""What the transaction of the caller has done before; in the last one another transaction writes meanwhile."""


@dataclass
class Stage:
    """Who takes part: the client whose lease is confirmed, another one, the caller's connection, and another program's."""

    client: Client
    rival: Client
    connection: Any
    other: sqlite3.Connection


async def fetch(connection: Any, statement: str) -> list[Any]:
    async with connection.execute(statement) as cursor:
        return [row[0] for row in await cursor.fetchall()]


def is_free(other: sqlite3.Connection) -> bool:
    """Whether another transaction can write to the file."""
    try:
        other.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError:
        return False
    other.execute("ROLLBACK")
    return True


async def refused(work: Coroutine[Any, Any, None]) -> None:
    with pytest.raises(BackendUnavailable):
        await work


async def one_attempt(
    stage: Stage, situation: str, mode: Mode, at: int, shift: int
) -> tuple[Attempt, list[tuple[str, str]]]:
    """Begin, interrupt, and look at what is left: on the connection, in the file, in the loop."""
    violations: list[tuple[str, str]] = []
    connection, other, name = stage.connection, stage.other, f"swept {next(_numbers)}"
    before = asyncio.all_tasks()
    lease = await stage.client.lock(name).acquire()
    await connection.execute("BEGIN")
    if situation == "written":
        await connection.execute(f"INSERT INTO work VALUES ({at})")
    work = lease.confirm(connection)
    if situation == "refused":
        other.execute("BEGIN IMMEDIATE")
        work = refused(work)
    result = await attempt(work, mode, at, shift)
    # At once: nothing of ours may be on its way to the next statement.
    answers = [await fetch(connection, f"SELECT {number}") for number in range(3)]
    if answers != [[0], [1], [2]]:
        violations.append(("wrong", f"the answers to SELECT 0, 1, 2 are {answers}"))
    if not connection.in_transaction:
        violations.append(("left", "no transaction"))
    if (found := await fetch(connection, "SELECT n FROM work")) != [at] * (situation == "written"):
        violations.append(("left", f"a transaction without its work: {found}"))
    if situation == "refused":
        other.rollback()
    elif result.returned and is_free(other):
        violations.append(("double", "another transaction can write beside ours"))
    if not lease.held:
        violations.append(("wrong", f"the hold: {lease!r}"))
    await connection.rollback()
    if not is_free(other):
        violations.append(("left", "the file is locked"))
    # The connection is as good as before.
    await connection.execute("BEGIN")
    await lease.confirm(connection)
    await connection.rollback()
    await lease.release()
    violations += await left_at_the_server(stage.rival, name)
    return result, violations + await left_in_the_loop(before)


def connect(path: Path) -> Client:
    return aiolock.connect(f"sqlite://{path}", ttl=100.0)


@pytest.mark.parametrize(
    ("situation", "mode"),
    [
        (situation, mode)
        for situation in SITUATIONS
        for mode in MODES
        # There the driver keeps a future with an error that is not asked for.
        if (situation, mode) != ("refused", "raise")
    ],
)
async def test_a_confirmation_interrupted_anywhere_leaves_everything_as_it_was(
    path, situation, mode, no_error_is_logged
):
    async with (
        connect(path) as client,
        connect(path) as rival,
        aiosqlite.connect(path, isolation_level=None, timeout=30) as connection,
    ):
        other = sqlite3.connect(path, isolation_level=None, timeout=0)
        other.execute("CREATE TABLE work (n INT)")
        # So that the tasks of a client that stay are there before.
        async with client.lock("warm"), rival.lock("warmer"):
            pass
        stage = Stage(client, rival, connection, other)

        async def once(at: int, shift: int) -> tuple[Attempt, list[tuple[str, str]]]:
            return await one_attempt(stage, situation, mode, at, shift)

        account = await sweep(mode, once, SHIFTS.get(mode, 1))
        other.close()
    assert account.faults == []
    assert account.points > 1


async def test_on_a_connection_of_the_loop_s_own_thread_it_is_interrupted_in_no_statement_of_that(path):
    async with connect(path) as client, client.lock("x") as lease:
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute("BEGIN")
        result = await attempt(lease.confirm(connection), "before", 1)
        # It waits once, for the client's own look at the file.
        assert result.suspensions == 1
        assert isinstance(result.error, asyncio.CancelledError)
        assert connection.in_transaction
        await lease.confirm(connection)
        connection.execute("COMMIT")
        connection.close()
