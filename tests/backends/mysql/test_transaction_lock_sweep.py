"""Cancelling a lock in the caller's own transaction at any await point leaves the connection, and the transaction, to him."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiomysql
import pytest

from aiolock import AcquireTimeout, Client, Lease
from tests.backends.mysql.conftest import PASSWORD, Deployment
from tests.backends.mysql.tools import as_root, sessions
from tests.contract.primitives import released_on_demand
from tests.faults.staging import PATIENCE, left_at_the_server, left_in_the_loop, queued, until
from tests.sweep import MODES, Attempt, Mode, attempt, sweep

SHIFTS: dict[Mode, int] = {"before": 6, "double": 4, "timeout": 3, "scope": 4}
"""How many passes of the loop later the interruption comes, at most: others make progress meanwhile."""

SHORT = (0.01, 0.1, 1.0)
"""Seconds of a wait that is in vain; the next if a busy machine did not get to the wait in this time."""

_numbers = itertools.count(1)


@dataclass
class Stage:
    """Who takes part: the client that is interrupted, another one, and the caller's connection."""

    client: Client
    rival: Client
    connection: Any
    name: str
    short: float


Operation = Callable[[], Coroutine[Any, Any, Any]]
Situation = Callable[[Stage], AbstractAsyncContextManager[Operation]]
SITUATIONS: dict[str, Situation] = {}


def situation(name: str) -> Callable[[Callable[[Stage], AsyncIterator[Operation]]], None]:
    def register(prepare: Callable[[Stage], AsyncIterator[Operation]]) -> None:
        SITUATIONS[name] = asynccontextmanager(prepare)

    return register


@situation("acquire, free")
async def _(stage):
    yield stage.client.lock(stage.name, connection=stage.connection).acquire


@situation("acquire, held elsewhere")
async def _(stage):
    holder = await stage.rival.lock(stage.name).acquire()
    async with released_on_demand(holder, lambda: queued(stage.rival.lock(stage.name), 1)):
        yield stage.client.lock(stage.name, connection=stage.connection).acquire


@situation("acquire, held elsewhere, with a timeout")
async def _(stage):
    holder = await stage.rival.lock(stage.name).acquire()
    async with released_on_demand(holder, lambda: queued(stage.rival.lock(stage.name), 1)):
        yield stage.client.lock(stage.name, connection=stage.connection, timeout=PATIENCE).acquire


async def in_vain(stage: Stage, holder: Lease, wait: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    with pytest.raises(AcquireTimeout):
        await wait()
    assert holder.held


@situation("acquire, held elsewhere until the timeout")
async def _(stage):
    holder = await stage.rival.lock(stage.name).acquire()
    lock = stage.client.lock(stage.name, connection=stage.connection, timeout=stage.short)
    yield lambda: in_vain(stage, holder, lock.acquire)
    await holder.release()


@situation("try_acquire, taken")
async def _(stage):
    holder = await stage.rival.lock(stage.name).acquire()
    yield stage.client.lock(stage.name, connection=stage.connection).try_acquire
    await holder.release()


async def run(connection: Any, statement: str) -> tuple[tuple[Any, ...], ...]:
    async with connection.cursor() as cursor:
        await cursor.execute(statement)
        return await cursor.fetchall()


@pytest.fixture
async def connection(deployment: Deployment) -> AsyncIterator[Any]:
    """The caller's."""
    await as_root(deployment.server, "CREATE TABLE IF NOT EXISTS work (n INT)")
    server = deployment.server
    opened = await aiomysql.connect(
        host=server.host, port=server.port, user="app", password=PASSWORD, db="test"
    )
    yield opened
    opened.close()


async def one_attempt(
    prepare: Situation, stage: Stage, mode: Mode, at: int, shift: int
) -> tuple[Attempt, list[tuple[str, str]]]:
    """Begin, interrupt, and look at what is left: on the connection, at the server, in the loop."""
    violations: list[tuple[str, str]] = []
    before = asyncio.all_tasks()
    connection = stage.connection
    await connection.begin()
    await run(connection, f"INSERT INTO work VALUES ({at})")
    async with prepare(stage) as operation:
        result = await attempt(operation(), mode, at, shift)
        # At once: nothing of ours may be on its way to the next statement.
        try:
            answers = [await run(connection, f"SELECT {number}") for number in range(3)]
            if answers != [((number,),) for number in range(3)]:
                violations.append(("wrong", f"the answers to SELECT 0, 1, 2 are {answers}"))
            if not connection.get_transaction_status():
                violations.append(("left", "no transaction"))
            if (work := await run(connection, "SELECT n FROM work")) != ((at,),):
                violations.append(("left", f"a transaction without its work: {work}"))
        except Exception as error:
            violations.append(("wrong", f"the connection: {error!r}"))
            raise
        if result.value is not False and result.returned and mode != "raise":
            intruder = await stage.rival.lock(stage.name).try_acquire()
            if (
                intruder is not None
                and prepare is not SITUATIONS["acquire, held elsewhere until the timeout"]
            ):
                violations.append(("double", f"{intruder!r} beside the transaction"))
            if intruder is not None:
                await intruder.release()
        await connection.rollback()
    violations += await left_at_the_server(stage.rival, stage.name)
    return result, violations + await left_in_the_loop(before)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SITUATIONS)
async def test_a_lock_in_a_transaction_interrupted_anywhere_leaves_it_as_it_was(
    deployment, connection, name, mode, no_error_is_logged
):
    async with deployment.connect("row", ttl=100) as client, deployment.connect("row", ttl=100) as rival:
        # So that the tasks of a client that stay are there before.
        async with client.lock("warm"), rival.lock("warmer"):
            pass

        async def run(short: float, at: int, shift: int) -> tuple[Attempt, list[tuple[str, str]]]:
            stage = Stage(client, rival, connection, f"swept {next(_numbers)}", short)
            return await one_attempt(SITUATIONS[name], stage, mode, at, shift)

        for short in SHORT:
            account = await sweep(mode, partial(run, short), SHIFTS.get(mode, 1))
            assert account.faults == []
            if account.points > 1:
                break
        assert account.points > 1

        async def few() -> bool:
            return len(await sessions(deployment.server)) <= 8

        # The caller's, and the main, the control and a waiting one of each client: none was left behind.
        await until(few)
