"""Cancelling `confirm()` at any await point leaves the connection, the transaction and the hold as they were."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import aiomysql
import pytest

from aiolock import Client
from tests.backends.mysql.conftest import PASSWORD
from tests.backends.mysql.tools import as_root
from tests.faults.staging import left_at_the_server, left_in_the_loop, until
from tests.sweep import MODES, Attempt, Mode, attempt, sweep

SHIFTS: dict[Mode, int] = {"before": 6, "double": 4, "timeout": 3, "scope": 4}
"""How many passes of the loop later the interruption comes, at most: others make progress meanwhile."""

_numbers = itertools.count(1)

LOCKS: dict[str, Callable[[Client, str], Any]] = {
    "mutex": lambda client, name: client.lock(name),
    "write": lambda client, name: client.rwlock(name).write(),
}
"""Holds that are a row of their own, and holds among the requests for one."""


@dataclass
class Stage:
    """Who takes part: the client whose lease is confirmed, another one, the caller's connection, and another transaction."""

    server: Any
    client: Client
    rival: Client
    connection: Any
    other: Any


async def run(connection: Any, statement: str) -> tuple[tuple[Any, ...], ...]:
    async with connection.cursor() as cursor:
        await cursor.execute(statement)
        return await cursor.fetchall()


async def is_free(stage: Stage, key: str) -> bool:
    """Whether another transaction can lock the row."""
    try:
        await run(stage.other, f"SELECT id FROM aiolock WHERE id = '{key}' FOR UPDATE NOWAIT")
    except aiomysql.OperationalError:
        return False
    finally:
        await stage.other.rollback()
    return True


@asynccontextmanager
async def locked(stage: Stage, key: str) -> AsyncIterator[None]:
    """Another transaction has the row locked until ours waits for it; at the latest until the end."""
    over = False

    async def waited_for() -> bool:
        rows = await as_root(stage.server, "SELECT info FROM information_schema.processlist")
        return over or any("LOCK IN SHARE MODE" in (row[0] or "") for row in rows)

    async def let_go() -> None:
        await until(waited_for)
        await stage.other.rollback()

    await run(stage.other, f"SELECT id FROM aiolock WHERE id = '{key}' FOR UPDATE")
    task = asyncio.create_task(let_go())
    try:
        yield
    finally:
        over = True
        await task


async def one_attempt(
    stage: Stage, kind: str, mode: Mode, at: int, shift: int, *, busy: bool
) -> tuple[Attempt, list[tuple[str, str]]]:
    """Begin, interrupt, and look at what is left: on the connection, at the server, in the loop."""
    violations: list[tuple[str, str]] = []
    connection, name = stage.connection, f"swept {next(_numbers)}"
    before = asyncio.all_tasks()
    lease = await LOCKS[kind](stage.client, name).acquire()
    key = lease._hold.validity.claim.key
    await run(connection, f"INSERT INTO work VALUES ({at})")
    other: AbstractAsyncContextManager[None] = locked(stage, key) if busy else nullcontext()
    async with other:
        result = await attempt(lease.confirm(connection), mode, at, shift)
        # At once: nothing of ours may be on its way to the next statement.
        answers = [await run(connection, f"SELECT {number}") for number in range(3)]
        if answers != [((number,),) for number in range(3)]:
            violations.append(("wrong", f"the answers to SELECT 0, 1, 2 are {answers}"))
        if not connection.get_transaction_status():
            violations.append(("left", "no transaction"))
        if (work := await run(connection, "SELECT n FROM work")) != ((at,),):
            violations.append(("left", f"a transaction without its work: {work}"))
    if result.returned and await is_free(stage, key):
        violations.append(("double", "another transaction can change the row beside ours"))
    if not lease.held:
        violations.append(("wrong", f"the hold: {lease!r}"))
    # The transaction is as good as before.
    await lease.confirm(connection)
    await connection.rollback()
    if not await is_free(stage, key):
        violations.append(("left", "the row is locked"))
    await lease.release()
    violations += await left_at_the_server(stage.rival, name)
    return result, violations + await left_in_the_loop(before)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("busy", [False, True], ids=["free", "locked"])
@pytest.mark.parametrize("kind", LOCKS)
async def test_a_confirmation_interrupted_anywhere_leaves_everything_as_it_was(
    deployment, kind, busy, mode, no_error_is_logged
):
    server = deployment.server
    await as_root(server, "CREATE TABLE IF NOT EXISTS work (n INT)")
    connection, other = [
        await aiomysql.connect(host=server.host, port=server.port, user="app", password=PASSWORD, db="test")
        for _ in range(2)
    ]
    async with deployment.connect(ttl=100) as client, deployment.connect(ttl=100) as rival:
        # So that the tasks of a client that stay are there before.
        async with LOCKS[kind](client, "warm"), LOCKS[kind](rival, "warmer"):
            pass
        stage = Stage(server, client, rival, connection, other)

        async def once(at: int, shift: int) -> tuple[Attempt, list[tuple[str, str]]]:
            return await one_attempt(stage, kind, mode, at, shift, busy=busy)

        account = await sweep(mode, once, SHIFTS.get(mode, 1))
    for each in (connection, other):
        each.close()
    assert account.faults == []
    assert account.points > 1
