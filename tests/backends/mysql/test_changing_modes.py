"""Programs that move from one mode to another: tokens go on rising, and the rows of one mode are not in another's way."""

from __future__ import annotations

import asyncio
from itertools import permutations

import pytest

import aiolock
from aiolock import validation
from aiolock.backends.mysql import MySQLBackend
from aiolock.mysql import purge
from tests.backends.mysql.tools import as_root
from tests.faults.staging import PATIENCE, gets_the_lock

MODES = ("lease", "session", "row")


async def rows(deployment, what: str = "name") -> tuple:
    return await as_root(
        deployment.server,
        f"SELECT {what} FROM aiolock WHERE namespace = '{deployment.namespace}' ORDER BY name",
    )


@pytest.mark.parametrize("order", list(permutations(MODES)), ids="-".join)
async def test_tokens_rise_from_mode_to_mode_also_over_a_purge(deployment, order, monkeypatch):
    monkeypatch.setattr(validation, "LEAST_IDLE", 0)
    tokens: list[int] = []
    for purged in (False, True):
        for mode in order:
            async with deployment.connect(mode) as client:
                if purged and mode != "session":
                    # A row is not long ago in the microsecond in which it was left.
                    async with asyncio.timeout(PATIENCE):
                        while len(await rows(deployment)):
                            await purge(client, idle=0)
                for fair in (False, True, False):
                    lease = await client.lock("x", fair=fair).acquire()
                    tokens.append(lease.token)
                    await lease.release()
                # Those that the tasks of one client hand on.
                held = await client.lock("x").acquire()
                tasks = [asyncio.create_task(gets_the_lock(client, "x")) for _ in range(3)]
                await asyncio.sleep(0)
                await held.release()
                tokens += [held.token, *sorted(await asyncio.gather(*tasks))]
    assert tokens == sorted(set(tokens))


async def test_tokens_of_an_earlier_version_are_followed_by_greater_ones_in_every_mode(deployment):
    async with deployment.connect() as client:
        await gets_the_lock(client, "x")
        # Before, they were the clock alone.
        await as_root(
            deployment.server,
            f"UPDATE aiolock SET token = token DIV 64 WHERE namespace = '{deployment.namespace}'",
        )
        [[old]] = await rows(deployment, "token")
        last = await gets_the_lock(client, "x")
    async with deployment.connect("session") as client:
        assert old < last < await gets_the_lock(client, "x")


async def test_locks_of_the_row_mode_are_not_listed_as_held_in_the_lease_mode(deployment):
    async with deployment.connect("row") as other, deployment.connect() as client:
        held = await other.lock("held").acquire()
        await gets_the_lock(other, "old")
        async with client.lock("mine"), client.lock("held"):
            assert [info.name for info in await client.locks()] == ["held", "mine"]
            assert await client._backend.names("*") == [("held", "lock"), ("mine", "lock")]
        assert await client._backend.names("*") == []
        assert not await client.lock("old").locked()
        await held.release()


@pytest.mark.parametrize("mode", ["lease", "row"])
async def test_purging_deletes_what_either_mode_has_left_and_waits_for_no_hold(deployment, mode):
    backend = MySQLBackend(deployment.url(query=f"?mode={mode}"))
    async with (
        deployment.connect("row") as other,
        deployment.connect() as one,
        aiolock.Client(backend, namespace=deployment.namespace) as client,
    ):
        for each in (other, one):
            await gets_the_lock(each, "old")
        held = [await each.lock("held").acquire() for each in (other, one)]
        keys = await rows(deployment, "id")
        assert len(keys) == 4
        for (key,) in keys:
            if (await as_root(deployment.server, f"SELECT name FROM aiolock WHERE id = '{key}'"))[0][
                0
            ] == "old":
                await as_root(
                    deployment.server,
                    "UPDATE aiolock SET since = since - INTERVAL 2 HOUR, expires_at = "
                    "IF(expires_at > '9999-01-01', expires_at, expires_at - INTERVAL 2 HOUR), "
                    f"token = IF(token, token - 7200000000 * 64, 0) WHERE id = '{key}'",
                )
        assert await purge(client, idle=3600) == 2
        assert [name for (name,) in await rows(deployment)] == ["held", "held"]
        for lease in held:
            lease.check()
            await lease.release()
        for each in (other, one):
            await gets_the_lock(each, "old")
