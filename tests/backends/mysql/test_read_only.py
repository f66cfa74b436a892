"""A server that becomes read_only while clients are connected: another one is likely to give out locks by now."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

import aiolock
from aiolock import BackendError, BackendRefused
from tests import servers
from tests.backends.mysql.conftest import ACCOUNT, Deployment
from tests.backends.mysql.tools import as_root
from tests.faults.staging import PATIENCE, gets_the_lock, waiting


@pytest.fixture(scope="module")
def own():
    """A server of this module's own: the setting is everybody's."""
    with servers.MariaDB(init=ACCOUNT) as server:
        yield server


@asynccontextmanager
async def demoted(server) -> AsyncIterator[None]:
    await as_root(server, "SET GLOBAL read_only = 1")
    try:
        yield
    finally:
        await as_root(server, "SET GLOBAL read_only = 0")


@pytest.mark.parametrize("mode", ["session", "row"])
async def test_holds_end_with_their_terms_and_no_new_ones_are_given(own, mode):
    deployment = Deployment(own)
    async with deployment.connect(mode, ttl=1.5) as client:
        lease = await client.lock("held").acquire()
        await gets_the_lock(client, "known")
        async with demoted(own):
            # By the server itself, or by us where the account may write all the same.
            with pytest.raises(BackendRefused, match=r"read.only"):
                await client.lock("known").acquire(timeout=PATIENCE)
            with pytest.raises(BackendError):
                await client.lock("new").acquire(timeout=PATIENCE)
            async with asyncio.timeout(PATIENCE):
                assert await lease.wait_lost() == "expired"
        for name in ("held", "known", "new"):
            await gets_the_lock(client, name)


@pytest.mark.parametrize("mode", ["session", "row"])
async def test_a_term_that_the_setting_outlives_not_goes_on(own, mode):
    """An administrator who is quick."""
    deployment = Deployment(own)
    async with deployment.connect(mode, ttl=6) as client:
        lease = await client.lock("held").acquire()
        async with demoted(own):
            with pytest.raises(BackendRefused, match=r"read.only"):
                await lease.renew()
        await lease.renew()
        assert lease.held
        await lease.release()


@pytest.mark.parametrize("mode", ["session", "row"])
async def test_whoever_waits_is_told_instead_of_let_in(own, mode):
    deployment = Deployment(own)
    async with deployment.connect(mode) as client, deployment.connect(mode) as rival:
        lease = await rival.lock("x").acquire()
        waiters = [asyncio.create_task(client.lock("x").acquire()) for _ in range(3)]
        await waiting(client, 3)
        async with demoted(own):
            await lease.release()
            async with asyncio.timeout(PATIENCE):
                await asyncio.wait(waiters)
            for waiter in waiters:
                assert isinstance(waiter.exception(), aiolock.BackendRefused)
        await gets_the_lock(rival, "x")


@pytest.mark.parametrize("mode", ["session", "row"])
async def test_an_account_that_may_write_all_the_same_gets_none_either(own, mode):
    url = f"{own.url}?mode={mode}"
    async with aiolock.connect(url, namespace=Deployment(own).namespace, ttl=5) as client:
        await gets_the_lock(client, "x")
        async with demoted(own):
            with pytest.raises(BackendRefused, match=r"read.only"):
                await client.lock("x").acquire(timeout=PATIENCE)
        await gets_the_lock(client, "x")


async def test_waiters_of_leases_get_their_turn_when_the_setting_is_taken_back(own):
    """The statement of a waiter is refused by the server, with number 1290: the same one may succeed later."""
    deployment = Deployment(own)
    async with deployment.connect("lease") as client, deployment.connect("lease") as rival:
        lease = await rival.lock("x").acquire()
        waiter = asyncio.create_task(client.lock("x").acquire(timeout=PATIENCE))
        await waiting(client, 1)
        async with demoted(own):
            with pytest.raises(BackendRefused, match=r"\[1290\]") as caught:
                await client.lock("y").acquire(timeout=PATIENCE)
            assert caught.value.retryable
            await lease.release()
            assert not waiter.done()
        async with asyncio.timeout(PATIENCE):
            await (await waiter).release()
