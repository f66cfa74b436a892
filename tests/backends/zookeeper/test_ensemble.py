"""An ensemble of three that loses servers and links: nobody believes in a lock that somebody else may have."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest

import aiolock
from aiolock import AcquireTimeout, BackendUnavailable, Lease
from tests.faults.proxy import Proxy, raw
from tests.faults.staging import passes
from tests.servers import ZooKeeper
from tests.verification import verifying


@pytest.fixture(scope="module")
def three():
    with ZooKeeper(3) as running:
        yield running


@pytest.fixture
def ensemble(three):
    """All three, whatever the test before has done to them; elected anew, because returning one by one may take long."""
    if not all(child.running for child in three.children):
        three.restart()
    for number, child in enumerate(three.children):
        if child.frozen:
            three.thaw(number)
    give_up = time.monotonic() + 6
    while any(three.mode(number) is None for number in range(3)):
        if time.monotonic() > give_up:
            three.restart()
            give_up += 60
        time.sleep(0.05)
    return three


def followers(ensemble) -> list[int]:
    leader = ensemble.leader()
    return [number for number in range(3) if number != leader]


async def waiting(tools, lock) -> asyncio.Task:
    task = asyncio.create_task(lock.acquire())

    async def in_line() -> bool:
        return len((await lock.inspect()).waiters) > 0

    await tools.until(in_line)
    return task


class Beliefs:
    """When a lease was lost, and when the next one was granted, on one clock."""

    def __init__(self, lease: Lease, following: asyncio.Task) -> None:
        self._lease, self._following = lease, following
        self.reason: str | None = None

    async def judge(self, within: float) -> float:
        """Seconds by which the loss came before the grant."""

        async def lost() -> float:
            self.reason = await self._lease.wait_lost()
            return time.monotonic()

        async def granted() -> float:
            await self._following
            at = time.monotonic()
            # By its own clock; a busy machine may run what is due at the same time a step later.
            assert not self._lease.held
            await passes(10)
            assert told.done(), "the holder was not told before the next grant"
            return at

        async with asyncio.timeout(within):
            told = asyncio.create_task(lost())
            lost_at, granted_at = await asyncio.gather(told, granted())
        assert self._following.result().token > self._lease.token
        return granted_at - lost_at


# --- servers that die


async def test_verify_finds_nothing_when_the_leader_dies(ensemble):
    hosts = ",".join(f"127.0.0.1:{port}" for port in ensemble.ports)
    async with verifying(f"zookeeper://{hosts}?tick_time=0.5", 6) as command:
        await command.contending()
        await asyncio.sleep(1)
        ensemble.kill(ensemble.leader())
        status, report = await command.report()
    assert report["grants"] > 50, report
    assert any(one["outages"] for one in report["connections"]), report
    assert (status, report["kept"], report["contradicted"]) == (0, True, []), report
    assert report["overlaps"] == report["tokens"] == report["told_late"] == [], report
    async with aiolock.connect(f"zookeeper://{hosts}", namespace=report["namespace"]) as client:
        # Only the node of the namespace itself, which this client has made.
        assert await client.locks() == []


async def test_z4_a_leader_that_dies_takes_no_lock_with_it(ensemble, tools):
    query = "session_timeout=10&tick_time=0.5"
    async with (
        tools.connect(*ensemble.ports, query=query) as client,
        tools.connect(*ensemble.ports, query=query) as rival,
    ):
        lease = await client.lock("x").acquire()
        following = await waiting(tools, rival.lock("x"))
        ensemble.kill(ensemble.leader())
        begin = time.monotonic()

        async def granted() -> bool:
            try:
                async with client.lock("probe", timeout=5):
                    return True
            except BackendUnavailable:
                return False

        await tools.until(granted)
        print(f"first grant {time.monotonic() - begin:.2f} s after the death of the leader")
        lease.check()
        assert not following.done()
        await lease.release()
        async with asyncio.timeout(tools.PATIENCE):
            next_lease = await following
        assert next_lease.token > lease.token
        await next_lease.release()


async def test_z5_without_a_quorum_a_lock_is_lost_in_time_and_had_again_after(ensemble, tools):
    async with tools.connect(*ensemble.ports, command_timeout=1) as client:
        lease = await client.lock("x").acquire()
        killed = [ensemble.leader(), followers(ensemble)[0]]
        for number in killed:
            ensemble.kill(number)
        async with asyncio.timeout(tools.PATIENCE):
            assert await lease.wait_lost() == "expired"
        begin = time.monotonic()
        with pytest.raises((BackendUnavailable, AcquireTimeout)):
            await client.lock("x").acquire(timeout=2)
        assert time.monotonic() - begin < 10
        await asyncio.gather(*(asyncio.to_thread(ensemble.start, number) for number in killed))
        await tools.session_of(client).ready()

        async def again() -> bool:
            try:
                async with client.lock("x", timeout=5) as next_lease:
                    return next_lease.token > lease.token
            except (BackendUnavailable, AcquireTimeout):
                return False

        await tools.until(again)


@pytest.mark.parametrize("attempt", range(2))
async def test_a_follower_that_dies_right_after_an_answer_deceives_nobody(ensemble, tools, attempt):
    """The leader has not heard of the last heartbeats, and ends the session early: the holder has to be earlier."""
    victim = followers(ensemble)[attempt]
    query = "session_timeout=4"
    async with (
        tools.connect(ensemble.ports[victim], query=query) as client,
        tools.connect(ensemble.ports[ensemble.leader()], query=query) as rival,
    ):
        lease = await client.lock("x").acquire()
        following = await waiting(tools, rival.lock("x"))
        session = tools.session_of(client)
        await asyncio.sleep(2)
        seen = session.deadline
        await tools.until(lambda: session.deadline != seen)
        ensemble.kill(victim)
        beliefs = Beliefs(lease, following)
        spare = await beliefs.judge(tools.PATIENCE)
        print(f"told {spare:.2f} s before the next grant")
        await following.result().release()


# --- links that break


@contextlib.asynccontextmanager
async def led_from_behind() -> AsyncIterator[tuple[ZooKeeper, list[Proxy]]]:
    """Three servers, the last of which leads; it and the others reach each other through proxies."""
    server = ZooKeeper(3)
    try:
        async with contextlib.AsyncExitStack() as stack:
            proxies = []
            for number, peers in ((1, (3,)), (2, (3,)), (3, (1, 2))):
                config = server.folder / str(number) / "zoo.cfg"
                text = config.read_text()
                for peer in peers:
                    [line] = [line for line in text.splitlines() if line.startswith(f"server.{peer}=")]
                    address, quorum, election = line.partition("=")[2].split(":")
                    proxy = await stack.enter_async_context(Proxy(address, int(quorum), framing=raw))
                    proxies.append(proxy)
                    text = text.replace(line, f"server.{peer}={address}:{proxy.port}:{election}")
                config.write_text(text)
            await asyncio.gather(*(asyncio.to_thread(server.start, number) for number in (0, 2)))
            await asyncio.to_thread(server.start, 1)
            yield server, proxies
    finally:
        server.close()


@contextlib.asynccontextmanager
async def divided() -> AsyncIterator[tuple[ZooKeeper, list[Proxy]]]:
    """Three servers of which the last reaches the others through proxies."""
    server = ZooKeeper(3)
    try:
        config = server.folder / "3" / "zoo.cfg"
        text = config.read_text()
        async with contextlib.AsyncExitStack() as stack:
            proxies = []
            for line in text.splitlines():
                if line.startswith(("server.1=", "server.2=")):
                    address, quorum, election = line.partition("=")[2].split(":")
                    proxy = await stack.enter_async_context(Proxy(address, int(quorum), framing=raw))
                    proxies.append(proxy)
                    text = text.replace(line, f"{line.partition('=')[0]}={address}:{proxy.port}:{election}")
            config.write_text(text)
            await asyncio.gather(*(asyncio.to_thread(server.start, number) for number in (0, 1)))
            await asyncio.to_thread(server.start, 2)
            yield server, proxies
    finally:
        server.close()


async def test_a_follower_cut_from_the_leader_deceives_nobody(tools):
    """It goes on to serve reads for seconds after the session has ended and the lock is somebody else's."""
    async with divided() as (server, proxies):
        assert server.mode(2) == "follower"
        query = "session_timeout=4"
        async with (
            tools.connect(server.ports[2], query=query) as client,
            tools.connect(*server.ports[:2], query=query) as rival,
        ):
            lease = await client.lock("x").acquire()
            following = await waiting(tools, rival.lock("x"))
            await asyncio.sleep(2)
            for proxy in proxies:
                proxy.blackhole()
            spare = await Beliefs(lease, following).judge(tools.PATIENCE)
            print(f"told {spare:.2f} s before the next grant")
            for proxy in proxies:
                proxy.heal()
            await following.result().release()


async def test_a_leader_cut_from_the_others_deceives_nobody_whose_heartbeats_are_writes(tools):
    """It goes on to answer a ``sync`` until its syncLimit ends: holders that trust that are told after the next grant."""
    async with led_from_behind() as (server, proxies):
        assert server.mode(2) == "leader"
        query = "session_timeout=6&heartbeat=write"
        async with (
            tools.connect(server.ports[2], query=query) as client,
            tools.connect(*server.ports[:2], query=query) as rival,
        ):
            lease = await client.lock("x").acquire()
            following = await waiting(tools, rival.lock("x"))
            await asyncio.sleep(3)
            lease.check()
            for proxy in proxies:
                proxy.refuse = True
                proxy.blackhole()
                proxy.reset_all(proxy.up)
            spare = await Beliefs(lease, following).judge(tools.PATIENCE)
            print(f"told {spare:.2f} s before the next grant")
            await following.result().release()


# --- servers that stand still, or are behind


async def test_a_frozen_server_costs_neither_those_who_come_nor_those_who_are_there(ensemble, tools):
    frozen = followers(ensemble)[0]
    ports = [ensemble.ports[frozen], *(port for port in ensemble.ports if port != ensemble.ports[frozen])]
    query = "session_timeout=6&tick_time=0.5"
    there = [await tools.connect(*ports, query=query).open() for _ in range(4)]
    leases = [await client.lock(f"x{number}").acquire() for number, client in enumerate(there)]
    ensemble.freeze(frozen)
    for _ in range(4):
        async with tools.connect(*ports, query=query) as newcomer, newcomer.lock("y", timeout=10):
            pass
    await asyncio.sleep(5)
    for lease in leases:
        lease.check()
        await lease.release()
    for client in there:
        await client.aclose()


async def test_z11_what_was_released_at_one_server_is_free_at_every_other(ensemble, tools):
    leader = ensemble.leader()
    one, two = followers(ensemble)
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(tools.connect(ensemble.ports[number]))
            for number in (leader, one, two)
        ]
        token = 0
        for number in range(150):
            lease = await clients[number % 3].lock("x").try_acquire()
            assert lease is not None
            assert lease.token > token
            token = lease.token
            assert await clients[(number + 1) % 3].lock("x").try_acquire() is None
            await lease.release()


async def test_the_connect_string_of_an_ensemble_spreads_its_clients(ensemble, tools):
    ports = set()
    for _ in range(30):
        async with aiolock.connect(ensemble.url, namespace=tools.namespace) as client:
            ports.add(tools.session_of(client).conn.port)
        if len(ports) == 3:
            break
    assert ports == set(ensemble.ports)


async def test_an_ensemble_survives_a_failover_whoever_of_it_the_address_names(ensemble, tools):
    for ports in (ensemble.ports, ensemble.ports[:1]):
        async with tools.connect(*ports, require={"survives-failover", "no-eviction"}) as client:
            assert "survives-failover" in client.capabilities
