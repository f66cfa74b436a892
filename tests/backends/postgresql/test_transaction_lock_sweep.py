"""Cancelling `connection=` and `confirm()` at any await point leaves the connection, and the transaction, to the caller."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import asyncpg
import pytest

import aiolock
from aiolock import AcquireTimeout, Client
from tests.faults.staging import PATIENCE, left_in_the_loop, until
from tests.sweep import MODES, Attempt, Mode, attempt, sweep

SHIFTS: dict[Mode, int] = {"before": 6, "double": 4, "timeout": 3, "scope": 4}
"""How many passes of the loop later the interruption comes, at most: others make progress meanwhile."""

SHORT = (0.01, 0.1, 1.0)
"""Seconds of a wait that is in vain; the next if a busy machine did not get to the wait in this time."""

_numbers = itertools.count(1)


@dataclass
class Stage:
    """Who takes part: the client that is interrupted, the caller's connection, and another transaction."""

    client: Client
    connection: Any
    other: Any
    look: Any
    name: str
    short: float

    def lock(self, connection: Any = None, **options: Any) -> aiolock.TransactionLock:
        return self.client.lock(self.name, connection=connection or self.connection, **options)


Operation = Callable[[], Coroutine[Any, Any, Any]]
Situation = Callable[[Stage], AbstractAsyncContextManager[Operation]]
SITUATIONS: dict[str, Situation] = {}


def situation(name: str) -> Callable[[Callable[[Stage], AsyncIterator[Operation]]], None]:
    def register(prepare: Callable[[Stage], AsyncIterator[Operation]]) -> None:
        SITUATIONS[name] = asynccontextmanager(prepare)

    return register


@asynccontextmanager
async def held(stage: Stage) -> AsyncIterator[None]:
    """Another transaction has it until ours waits; at the latest until the end."""
    await stage.lock(stage.other).acquire()

    async def waited_for() -> bool:
        return bool((await stage.lock(stage.other).inspect()).waiters)

    async def let_go() -> None:
        await until(waited_for)
        await stage.other.execute("COMMIT; BEGIN")

    task = asyncio.create_task(let_go())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


@situation("acquire, free")
async def _(stage):
    yield stage.lock().acquire


@situation("acquire, held elsewhere")
async def _(stage):
    async with held(stage):
        yield stage.lock().acquire


@situation("acquire, held elsewhere, with a timeout")
async def _(stage):
    async with held(stage):
        yield stage.lock(timeout=PATIENCE).acquire


async def in_vain(wait: Callable[[], Coroutine[Any, Any, Any]]) -> bool:
    with pytest.raises(AcquireTimeout):
        await wait()
    return False


@situation("acquire, held elsewhere until the timeout")
async def _(stage):
    await stage.lock(stage.other).acquire()
    yield lambda: in_vain(stage.lock(timeout=stage.short).acquire)


@situation("try_acquire, taken")
async def _(stage):
    await stage.lock(stage.other).acquire()
    yield stage.lock().try_acquire


async def a_block(stage: Stage) -> None:
    async with stage.lock():
        pass


@situation("a block")
async def _(stage):
    yield lambda: a_block(stage)


# --- a lease that is confirmed: the same promises for the connection


@asynccontextmanager
async def leased(stage: Stage) -> AsyncIterator[aiolock.Lease]:
    async with stage.client.lock(f"{stage.name} leased") as lease:
        yield lease


@situation("confirm")
async def _(stage):
    async with leased(stage) as lease:
        yield lambda: in_order(lease.confirm(stage.connection))


@situation("confirm, while the row is locked")
async def _(stage):
    async with leased(stage) as lease:
        await stage.other.execute("SELECT FROM aiolock FOR UPDATE")

        async def let_go() -> None:
            await until(lambda: blocked(stage.look))
            await stage.other.execute("COMMIT; BEGIN")

        task = asyncio.create_task(let_go())
        try:
            yield lambda: in_order(lease.confirm(stage.connection))
        finally:
            task.cancel()
            await asyncio.wait([task])
            await stage.other.execute("COMMIT; BEGIN")


async def blocked(look: Any) -> bool:
    return await look.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted") > 0


async def in_order(work: Coroutine[Any, Any, Any]) -> bool:
    await work
    return False


async def one_attempt(
    prepare: Situation, stage: Stage, mode: Mode, at: int, shift: int
) -> tuple[Attempt, list[tuple[str, str]]]:
    """Begin, interrupt, and look at what is left: on the connection, at the server, in the loop."""
    violations: list[tuple[str, str]] = []
    before = asyncio.all_tasks()
    connection = stage.connection
    await connection.execute(f"BEGIN; INSERT INTO work VALUES ({at})")
    async with prepare(stage) as operation:
        result = await attempt(operation(), mode, at, shift)
        # At once: nothing of ours may be on its way to the next statement.
        answers = [await connection.fetchval(f"SELECT {number}") for number in range(3)]
        if answers != [0, 1, 2]:
            violations.append(("wrong", f"the answers to SELECT 0, 1, 2 are {answers}"))
        if (work := await connection.fetchval("SELECT array_agg(n) FROM work")) != [at]:
            violations.append(("left", f"a transaction without its work: {work}"))
    if result.value is not False and result.returned and mode != "raise":
        await stage.other.execute("COMMIT; BEGIN")
        if await stage.lock(stage.other).try_acquire():
            violations.append(("double", "another transaction has it beside ours"))
    await connection.execute("ROLLBACK")
    await stage.other.execute("COMMIT; BEGIN")
    if not await stage.lock(stage.other).try_acquire():
        violations.append(("left", f"{await stage.lock(stage.other).inspect()}"))
    await stage.other.execute("COMMIT; BEGIN")
    return result, violations + await left_in_the_loop(before)


@pytest.fixture
async def connections(server):
    """Three, which are closed also if the test fails: what is left would be a complaint of the next test."""
    opened = [await asyncpg.connect(server.url) for _ in range(3)]
    yield opened
    for each in opened:
        each.terminate()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SITUATIONS)
async def test_a_lock_in_a_transaction_interrupted_anywhere_leaves_it_as_it_was(
    server, connections, name, mode, no_error_is_logged
):
    namespace = secrets.token_hex(6)
    connection, other, look = connections
    await connection.execute("CREATE TEMPORARY TABLE work (n int)")
    await other.execute("BEGIN")
    async with aiolock.connect(server.url, namespace=namespace, ttl=100) as client:
        # So that the tasks of a client that stay are there before.
        async with client.lock("warm"):
            pass

        async def run(short: float, at: int, shift: int) -> tuple[Attempt, list[tuple[str, str]]]:
            stage = Stage(client, connection, other, look, f"swept {next(_numbers)}", short)
            return await one_attempt(SITUATIONS[name], stage, mode, at, shift)

        for short in SHORT:
            account = await sweep(mode, partial(run, short), SHIFTS.get(mode, 1))
            assert account.faults == []
            if account.points > 1:
                break
        assert account.points > 1
