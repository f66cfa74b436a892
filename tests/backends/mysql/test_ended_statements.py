"""Somebody ends our statements by KILL QUERY, at any moment: they are sent again, and nothing else happens."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import aiomysql
import pymysql.err
import pytest

from aiolock import BackendUnavailable
from aiolock.backends.mysql.errors import hit, translate
from tests.backends.mysql.tools import Deaf, as_root, sessions
from tests.faults.staging import until

ROUNDS = {"lease": 60, "session": 200, "row": 200}
"""How often each task gets its lock."""


async def end_statements(server, seed: int, ended: list[int]) -> None:
    """Of the sessions of this folder's account: now of one, now of several at once."""
    dice = random.Random(seed)
    admin = await aiomysql.connect(**{**server.admin, "db": "test"}, autocommit=True)
    try:
        async with admin.cursor(Deaf) as cursor:
            while True:
                await cursor.execute("SELECT ID FROM information_schema.processlist WHERE USER = 'app'")
                numbers = [row[0] for row in await cursor.fetchall()]
                for number in dice.sample(numbers, min(len(numbers), dice.randint(1, 4))):
                    with suppress(pymysql.err.Error):
                        await cursor.execute(f"KILL QUERY {number}")
                        ended.append(number)
                await asyncio.sleep(dice.uniform(0, 0.01))
    finally:
        admin.close()


@pytest.mark.parametrize("mode", ["lease", "session", "row"])
async def test_statements_that_are_ended_at_random_cost_time_and_nothing_else(deployment, mode):
    inside: dict[str, int] = {}

    async def rounds(make, name: str, most: int) -> None:
        for _ in range(ROUNDS[mode]):
            async with make() as lease:
                inside[name] = inside.get(name, 0) + 1
                assert inside[name] <= most
                await asyncio.sleep(0.001)
                inside[name] -= 1
                lease.check()

    async with (
        deployment.connect(mode, connections=24) as one,
        deployment.connect(mode, connections=24) as other,
    ):
        kept = [await one.lock("kept by one").acquire(), await other.lock("kept by other").acquire()]
        if mode == "lease":
            kept += [await client.semaphore("kept", 2).acquire() for client in (one, other)]
            kept += [await client.rwlock("kept").read().acquire() for client in (one, other)]
        mains = [await client._backend.sessions.main() for client in (one, other)]
        ended: list[int] = []
        ending = asyncio.create_task(end_statements(deployment.server, 7, ended))
        try:
            async with asyncio.timeout(60), asyncio.TaskGroup() as group:
                for client, free in ((one, "free for one"), (other, "free for other")):
                    for _ in range(3):
                        group.create_task(rounds(lambda client=client: client.lock("x"), "x", 1))
                    group.create_task(rounds(lambda client=client, free=free: client.lock(free), free, 1))
                    for _ in range(2 if mode == "lease" else 0):
                        group.create_task(
                            rounds(lambda client=client: client.semaphore("s", 2), "permits", 2)
                        )
                        group.create_task(rounds(lambda client=client: client.rwlock("w").write(), "w", 1))
                for lease in kept:
                    for _ in range(3):
                        # Asks in each of them whether it is there; what was ended is asked again by the renewal scheduler.
                        with suppress(BackendUnavailable):
                            await lease.renew()
                        await asyncio.sleep(0.05)
        finally:
            ending.cancel()
            await asyncio.wait([ending])
        assert len(ended) > 50
        for lease in kept:
            lease.check()
            await lease.release()
        # They are in step, and have never been given up.
        assert [await client._backend.sessions.main() for client in (one, other)] == mains
        assert [client.stats()["lost"] for client in (one, other)] == [0, 0]

    async def nobody() -> bool:
        return not await sessions(deployment.server)

    await until(nobody)
    if mode == "lease":
        held = "expires_at > UTC_TIMESTAMP(6)"
        where = f"namespace = '{deployment.namespace}'"
        assert not await as_root(
            deployment.server, f"SELECT name FROM aiolock WHERE {where} AND owner IS NOT NULL AND {held}"
        )
        assert not await as_root(
            deployment.server,
            "SELECT b.mode, b.state FROM aiolock_requests AS b JOIN aiolock AS t ON t.id = b.lock_id "
            f"WHERE t.{where} AND b.{held}",
        )


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1317, "Query execution was interrupted"),
        (1969, "Query execution was interrupted (max_statement_time exceeded)"),
        (1048, "Column 'token' cannot be null"),
        (1105, "An error occurred in multi-table update"),
        (1210, "Incorrect arguments to sleep."),
    ],
)
def test_what_a_server_says_of_a_statement_that_was_ended_is_no_refusal(number, text):
    cause = pymysql.err.OperationalError(number, text)
    error = translate(cause, "mysql://host/db")
    error.__cause__ = cause
    assert isinstance(error, BackendUnavailable)
    assert hit(error)
    assert not hit(BackendUnavailable("no answer"))
