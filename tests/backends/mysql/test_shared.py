"""Decisions for many at once, on MariaDB: what they cost, and what becomes of those whom nobody told."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest

from aiolock.backends.mysql.decisions import Action, PendingDecision, together
from tests.backends.mysql.tools import as_root, sessions
from tests.faults.proxy import Proxy, mysql_frames
from tests.faults.staging import PATIENCE, passes, queued, until, waiting


async def counted(server, name: str) -> int:
    """A counter of the server."""
    return int((await as_root(server, f"SHOW GLOBAL STATUS LIKE '{name}'"))[0][1])


async def no_requests(deployment) -> bool:
    rows = await as_root(
        deployment.server,
        f"SELECT COUNT(*) FROM aiolock_requests b JOIN aiolock t ON t.id = b.lock_id WHERE t.namespace = '{deployment.namespace}'",
    )
    return rows[0][0] == 0


# --- together


async def line(*wishes: tuple[Action, int]) -> deque[PendingDecision]:
    return deque(PendingDecision(action, weight=weight) for action, weight in wishes)


async def test_those_who_wait_and_leave_are_decided_together_in_their_order():
    requests = await line((Action.WAIT, 1), (Action.LEAVE, 1), (Action.WAIT, 5), (Action.LEAVE, 5))
    taken = list(requests)
    assert together(requests) == taken
    assert not requests


async def test_somebody_who_tries_is_in_nobodys_way():
    requests = await line(
        (Action.WAIT, 1), (Action.TRY, 2), (Action.TRY, 2), (Action.TRY, 1), (Action.WAIT, 1)
    )
    taken = list(requests)
    assert together(requests) == taken[:3]
    assert together(requests) == taken[3:4]
    assert together(requests) == taken[4:]


async def test_a_decision_takes_no_more_than_it_should_and_nothing_that_nobody_wants():
    requests = await line(*[(Action.WAIT, 1)] * 5)
    taken = list(requests)
    taken[1].answer.cancel()
    assert together(requests, 2) == [taken[0], taken[2]]
    assert together(requests) == taken[3:]


async def test_many_who_come_and_go_at_once_cost_a_few_transactions(deployment, mariadb):
    async with deployment.connect() as client:
        lock = client.semaphore("x", 40)
        await (await lock.acquire()).release()
        before = await counted(mariadb, "Com_begin")
        leases = await asyncio.gather(*(lock.acquire(timeout=PATIENCE) for _ in range(40)))
        assert len({lease.token for lease in leases}) == 40
        assert await lock.try_acquire() is None
        await asyncio.gather(*(lease.release() for lease in leases))
        # Each of the 81 by itself would be one.
        assert await counted(mariadb, "Com_begin") - before <= 12
        assert await lock.available() == 40
    assert await no_requests(deployment)


async def test_tries_of_one_client_have_the_answers_that_each_alone_would_have(deployment):
    async with deployment.connect() as client:
        lock = client.semaphore("x", 5)
        held = await lock.acquire()
        many, few, none = await asyncio.gather(
            lock.try_acquire(permits=5), lock.try_acquire(permits=4), lock.try_acquire(permits=5)
        )
        assert many is none is None
        assert few is not None
        await few.release()
        await held.release()
    assert await no_requests(deployment)


async def test_a_wish_that_is_taken_back_in_time_is_never_sent(deployment):
    async with deployment.connect() as client, deployment.connect() as rival:
        lock = client.semaphore("x", 1)
        first = await lock.acquire()
        # The second waits for the answer to the decision that takes the first.
        waiters = [asyncio.create_task(lock.acquire())]
        await passes(4)
        waiters += [asyncio.create_task(lock.acquire()) for _ in range(5)]
        await passes(2)
        for waiter in waiters[1:]:
            waiter.cancel()
        assert [type(each) for each in await asyncio.gather(*waiters[1:], return_exceptions=True)] == [
            asyncio.CancelledError
        ] * 5
        await queued(rival.semaphore("x", 1), 1)
        await first.release()
        async with asyncio.timeout(PATIENCE):
            await (await waiters[0]).release()
        await until(lambda: not client._runtime.cleanups)
    assert await no_requests(deployment)


# --- those of ours who wait


async def test_order_holds_between_clients_whose_requests_are_decided_together(deployment):
    async with deployment.connect() as one, deployment.connect() as other:
        tokens: dict[int, int] = {}

        async def turn(client, number: int) -> None:
            async with client.semaphore("x", 2) as lease:
                tokens[number] = lease.token

        first = await one.semaphore("x", 2).acquire(permits=2)
        turns = []
        for number in range(12):
            turns.append(asyncio.create_task(turn((one, other)[number % 2], number)))
            await queued(one.semaphore("x", 2), number + 1)
        await first.release()
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*turns)
        # Tokens rise in the order in which they were let in.
        rising = [first.token, *(tokens[number] for number in range(12))]
        assert rising == sorted(set(rising))
    assert await no_requests(deployment)


async def test_a_waiter_that_was_let_in_by_a_decision_without_an_answer_gets_its_hold(deployment):
    async with (
        Proxy(deployment.server.host, deployment.server.port, framing=mysql_frames) as proxy,
        deployment.connect(port=proxy.port, ttl=60) as client,
    ):
        lock = client.semaphore("x", 1)
        for _ in range(5):
            lease = await lock.acquire(timeout=PATIENCE)
            waiter = asyncio.create_task(lock.acquire())
            await waiting(client, 1)
            await queued(lock, 1)
            cut = proxy.down.drop_next(1, reset=True)
            await lease.release()
            await cut.wait()
            async with asyncio.timeout(PATIENCE):
                successor = await waiter
            successor.check()
            assert successor.token > lease.token
            await successor.release()
    assert await no_requests(deployment)


@pytest.mark.parametrize("pass_", range(1, 7))
async def test_waiters_that_were_let_in_by_a_call_that_was_cancelled_get_their_holds(deployment, pass_):
    async with deployment.connect(ttl=60) as client:
        lock = client.semaphore("x", 1)
        held = await lock.acquire()
        waiters = [asyncio.create_task(lock.acquire()) for _ in range(3)]
        await queued(lock, 3)
        call = asyncio.create_task(lock.set_limit(4))
        await passes(pass_)
        call.cancel()
        await asyncio.wait([call])
        if (await lock.inspect()).limit != 4:
            await lock.set_limit(4)
        async with asyncio.timeout(PATIENCE):
            leases = await asyncio.gather(*waiters)
        for lease in (held, *leases):
            lease.check()
            await lease.release()
    assert await no_requests(deployment)


# --- the listener's sleep


async def asleep(mariadb, client) -> bool:
    """Whether the listener sleeps in the way in which nobody who wakes it has to wait."""
    listener = await client._backend.sessions.listener()
    [version] = (await as_root(mariadb, "SELECT VERSION()"))[0]
    state = "User lock" if "MariaDB" in version else "User sleep"
    return any(found[:2] == (listener.id, state) for found in await sessions(mariadb))


async def test_the_listener_sleeps_so_that_waking_it_never_takes_seconds(deployment, mariadb):
    """On MariaDB KILL QUERY and a SLEEP that begins may wait for each other for 2 s, which no test can stage."""
    async with deployment.connect(ttl=30) as client, deployment.connect(ttl=30) as rival:
        lease = await rival.semaphore("x", 1).acquire()
        waiter = asyncio.create_task(client.semaphore("x", 1).acquire())
        await queued(rival.semaphore("x", 1), 1)
        await until(lambda: asleep(mariadb, client))
        await lease.release()
        async with asyncio.timeout(PATIENCE):
            await (await waiter).release()


async def test_the_listener_goes_on_sleeping_when_the_main_session_is_gone(deployment, mariadb):
    async with deployment.connect(ttl=30) as client, deployment.connect(ttl=30) as rival:
        lease = await rival.semaphore("x", 1).acquire()
        waiter = asyncio.create_task(client.semaphore("x", 1).acquire())
        await queued(rival.semaphore("x", 1), 1)
        for _ in range(3):
            await until(lambda: asleep(mariadb, client))
            main = await client._backend.sessions.main()
            await as_root(mariadb, f"KILL {main.id}")
            await until(lambda main=main: not main.alive)
        await until(lambda: asleep(mariadb, client))
        before = await counted(mariadb, "Questions")
        await asyncio.sleep(2)
        # As seldom as before: a look of a few statements each second; and what root asked.
        assert await counted(mariadb, "Questions") - before < 40
        await lease.release()
        async with asyncio.timeout(PATIENCE):
            await (await waiter).release()
    assert await no_requests(deployment)
