"""Locks on memcached: a dead holder, what a forgotten item does to them, several servers and a changed list of them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys

import pytest

import aiolock
from aiolock import BackendUnavailable, LockLost
from aiolock.backends.memcached.url import choose
from tests.backends.memcached.conftest import figure, say
from tests.faults.staging import until
from tests.servers import Memcached

HOLD = """
import asyncio, sys, aiolock
async def main():
    async with aiolock.connect(sys.argv[1], namespace=sys.argv[2], ttl=1, command_timeout=15) as client, client.lock("a"):
        print("held", flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


# --- one server


async def test_thousands_of_releases_at_once_do_not_make_the_row_of_their_session_too_long():
    """An item that is too long is refused, and what it was to replace is deleted: the session, and with it all other holds."""
    with Memcached(extra=["-I", "96k", "-o", "slab_chunk_max=32768"]) as small:
        async with aiolock.connect(small.url, ttl=10, command_timeout=15) as client:
            lease = await client.lock("other").acquire()
            engine = client._runtime.backend.servers[0]._engine
            [session] = engine.sessions.open.values()
            for number in range(10_000):
                # What releases begin with; their answers are on the way.
                session.ended.begin(f"{number:016x}", "aiolock/l/lock/x", "x")
            await engine.renew(session)
            async with aiolock.connect(small.url, ttl=10, command_timeout=15) as rival:
                assert await rival.lock("other").try_acquire() is None
            await engine.renew(session)
            assert lease.held
            for number in range(10_000):
                session.ended.removed(f"{number:016x}", flushed=True, connection=0, order=0)
            await lease.release()


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_process_that_starts_after_the_death_of_a_holder_need_not_observe_it(server, sign):
    """The item of the session expires by itself, which proves the death to clients that come later."""
    namespace = f"dead{sign}"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLD, server.url, namespace, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert await process.stdout.readline() == b"held\n"
        process.send_signal(sign)
        stopped = asyncio.get_running_loop().time()
        lease = None
        async with asyncio.timeout(30):
            while lease is None:
                # A new client each time, which tries once: none observes anything.
                async with aiolock.connect(
                    server.url, namespace=namespace, ttl=1, command_timeout=15
                ) as client:
                    lease = await client.lock("a").try_acquire()
                    if lease is not None:
                        assert asyncio.get_running_loop().time() - stopped >= 0.5
                        await lease.release()
                await asyncio.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_a_restart_forgets_every_hold_and_its_holder_learns_it(own):
    async with (
        aiolock.connect(own.url, ttl=3, on_loss="signal") as client,
        aiolock.connect(own.url, ttl=3) as rival,
    ):
        lease = await client.lock("a").acquire()
        first = lease.token
        await until(lambda: int(figure(own, "uptime")) >= 4)
        own.restart()
        await until(lambda: not lease.held)
        async with asyncio.timeout(30):
            second = await rival.lock("a").acquire()
        with pytest.raises(LockLost):
            lease.check()
        assert second.token > first
        await second.release()
        with contextlib.suppress(LockLost):
            await lease.release()
        async with client.lock("a") as third:
            assert third.token > second.token


async def test_clients_that_were_open_during_a_restart_exclude_each_other_after_it(own):
    """Each enters under a session that the server has forgotten, and the other must not take its hold for that of a dead client."""
    async with (
        aiolock.connect(own.url, ttl=60) as one,
        aiolock.connect(own.url, ttl=60) as two,
    ):
        for client in (one, two):
            async with client.lock("warm"):
                pass
        own.restart()
        # Both are connected again before either asks: what is tested is no outage.
        for client in (one, two):
            await until(lambda client=client: _answers(client))
        async with one.lock("a"):
            assert await two.lock("a").try_acquire() is None
            waiting = asyncio.create_task(two.lock("a").acquire())
            await until(lambda: two.stats()["waiting"] == 1)
            assert not waiting.done()
        await (await waiting).release()


async def _answers(client: aiolock.Client) -> bool:
    """Whether a read is answered."""
    try:
        await client.lock("other").inspect()
    except BackendUnavailable:
        return False
    return True


@pytest.mark.parametrize("what", ["lock", "session", "everything"])
async def test_an_item_that_is_evicted_ends_its_holds_and_the_next_client_enters(own, what):
    async with (
        aiolock.connect(own.url, ttl=3, on_loss="signal") as client,
        aiolock.connect(own.url, ttl=3) as rival,
    ):
        lease = await client.lock("a").acquire()
        engine = client._runtime.backend.servers[0]._engine
        [session] = engine.sessions.open.values()
        keys = {"lock": ["aiolock/l/lock/a"], "session": [session.key]}.get(what)
        if keys is None:
            assert say(own, b"flush_all\r\n", b"\r\n") == b"OK\r\n"
        else:
            for key in keys:
                assert say(own, f"md {key}\r\n".encode(), b"\r\n") == b"HD\r\n"
        async with asyncio.timeout(30):
            second = await rival.lock("a").acquire()
        assert second.token > lease.token
        await until(lambda: not lease.held)
        await second.release()
        with contextlib.suppress(LockLost):
            await lease.release()
        async with asyncio.timeout(30), client.lock("a"):
            pass


async def test_after_flush_all_another_client_gets_what_is_acquired_before_the_next_renewal(own):
    async with (
        aiolock.connect(own.url, ttl=30, on_loss="signal") as client,
        aiolock.connect(own.url, ttl=30) as rival,
    ):
        leases = [await client.lock("a").acquire()]
        assert say(own, b"flush_all\r\n", b"\r\n") == b"OK\r\n"
        # It does not know yet that its session is forgotten, and its connection did not break.
        leases.append(await client.lock("b").acquire())
        for lease in leases:
            async with asyncio.timeout(30), rival.lock(lease.name) as second:
                assert second.token > lease.token
        async with asyncio.timeout(60):
            assert [await lease.wait_lost() for lease in leases] == ["revoked", "revoked"]


async def test_a_server_that_is_full_evicts_what_was_not_used_for_longest():
    """The locks of clients that renew stay, and one that was kept for a long time is forgotten."""
    with Memcached(extra=["-m", "8"]) as server:
        async with (
            aiolock.connect(server.url, ttl=4, command_timeout=10) as client,
            aiolock.connect(server.url, ttl=1, command_timeout=10) as rival,
        ):
            kept = await client.lock("kept").acquire()
            await kept.release(keep=600)
            assert await rival.lock("kept").try_acquire() is None
            number = 0
            async with asyncio.timeout(60), client.lock("renewed") as lease:
                while int(figure(server, "evictions")) < 200:
                    body = b"".join(
                        b"ms cache%d 200 q\r\n%s\r\n" % (each, b"x" * 200)
                        for each in range(number, number + 500)
                    )
                    await asyncio.to_thread(say, server, body + b"mn\r\n", b"MN\r\n")
                    number += 500
                    # So that the whole is replaced in more time than passes between two renewals.
                    await asyncio.sleep(0.1)
                assert lease.held
            found = {finding.subject: finding for finding in await client.diagnose()}
        assert "were evicted" in found["memory"].text


async def test_a_server_without_eviction_refuses_when_it_is_full_and_goes_on_when_it_is_not():
    with Memcached(extra=["-m", "8", "-M"]) as server:
        async with aiolock.connect(server.url, ttl=3, command_timeout=2) as client:
            number = 0
            while b"SERVER_ERROR" not in (
                answer := await asyncio.to_thread(
                    say,
                    server,
                    b"".join(
                        b"ms c%d 60000 q\r\n%s\r\n" % (each, b"x" * 60_000)
                        for each in range(number, number + 20)
                    )
                    + b"mn\r\n",
                    b"MN\r\n",
                )
            ):
                number += 20
            assert b"out of memory" in answer
            findings = {finding.subject: finding for finding in await client.diagnose()}
            assert "without -M" in findings["memory"].advice
            assert say(server, b"flush_all\r\n", b"\r\n") == b"OK\r\n"
            async with asyncio.timeout(30), client.lock("a"):
                pass


async def test_locks_are_listed_until_the_server_lists_no_keys(own):
    async with aiolock.connect(own.url) as client:
        async with client.lock("a"), client.rwlock("b/ä").read():
            assert [lock.name for lock in await client.locks()] == ["a", "b/ä"]
        assert await client.locks() == []
    own.stop()
    own.set("-o", "no_lru_crawler")
    own.start()
    async with aiolock.connect(own.url) as client:
        with pytest.raises(aiolock.BackendRefused, match="ERROR"):
            await client.locks()
        assert (
            "no_lru_crawler" in {finding.subject: finding.text for finding in await client.diagnose()}["list"]
        )


async def test_a_diagnosis_of_a_sound_server_has_no_warning(server):
    async with aiolock.connect(server.url) as client:
        found = {finding.subject: finding for finding in await client.diagnose()}
    assert {"version", "uptime", "memory"} <= set(found)
    assert {finding.level.value for finding in found.values()} <= {"ok", "note"}
    assert "memcached 1." in found["version"].text


# --- several servers


@pytest.fixture
def three():
    with Memcached() as first, Memcached() as second, Memcached() as third:
        yield [first, second, third]


def url_of(servers):
    return "memcached://" + ",".join(f"127.0.0.1:{server.port}" for server in servers)


def at(servers, number, namespace="aiolock"):
    """A name of a lock that lives on the server of that number."""
    hosts = sorted(f"127.0.0.1:{server.port}" for server in servers)
    index = hosts.index(f"127.0.0.1:{servers[number].port}")
    return next(name for name in map(str, range(1_000)) if choose(hosts, f"{namespace}/lock/{name}") == index)


async def test_a_lock_and_its_session_live_on_one_server(three):
    async with aiolock.connect(url_of(three)) as client:
        async with client.lock(name := at(three, 1)):
            assert [lock.name for lock in await client.locks()] == [name]
            counts = [int(figure(server, "curr_items")) for server in three]
        # The mark of the namespace is on each.
        assert counts == [1, 3, 1]
        assert len(await client.diagnose()) == 9


async def test_a_server_that_is_away_concerns_its_own_locks_only(three):
    url = url_of(three)
    async with (
        aiolock.connect(url, ttl=3, command_timeout=1, on_loss="signal") as client,
        aiolock.connect(url, ttl=3, command_timeout=1) as rival,
    ):
        here = await client.lock(at(three, 0)).acquire()
        gone = await client.lock(at(three, 1)).acquire()
        three[1].kill()
        await until(lambda: not gone.held)
        with pytest.raises(BackendUnavailable):
            await rival.lock(at(three, 1)).acquire(timeout=2)
        assert here.held
        await here.renew()
        tries = [rival.lock(at(three, 0)).try_acquire(timeout=each) for each in (0, 0, 0.2, 0.2)]
        assert await asyncio.gather(*tries) == [None] * 4
        async with rival.lock(at(three, 2)):
            pass
        await here.release()
        async with rival.lock(at(three, 0)):
            pass
        three[1].start()
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(BackendUnavailable):
                    async with rival.lock(at(three, 1)):
                        break
        with contextlib.suppress(LockLost, BackendUnavailable):
            await gone.release()


async def test_clients_with_other_lists_exclude_each_other_only_where_they_agree(three):
    """Neither is told: a list is to be changed while nothing is held, or at a price that the page names."""
    two = three[:2]
    moved = next(
        name
        for name in map(str, range(1_000))
        if choose(sorted(f"127.0.0.1:{server.port}" for server in three), f"aiolock/lock/{name}")
        == sorted(f"127.0.0.1:{server.port}" for server in three).index(f"127.0.0.1:{three[2].port}")
    )
    stays = at(three, 0)
    async with (
        aiolock.connect(url_of(two)) as before,
        aiolock.connect(url_of(three)) as after,
        before.lock(moved),
        before.lock(stays),
    ):
        assert await after.lock(stays).try_acquire() is None
        both = await after.lock(moved).try_acquire()
        assert both is not None
        await both.release()


async def test_hosts_in_another_order_are_the_same_servers(three):
    async with (
        aiolock.connect(url_of(three)) as client,
        aiolock.connect(url_of(three[::-1])) as other,
    ):
        names = [str(number) for number in range(12)]
        leases = [await client.lock(name).acquire() for name in names]
        assert [await other.lock(name).try_acquire() for name in names] == [None] * 12
        assert [lock.name for lock in await other.locks()] == sorted(names)
        for lease in leases:
            await lease.release()


async def test_tokens_rise_over_openings_for_each_server(three):
    client = aiolock.connect(url_of(three))
    seen = {}
    for _ in range(3):
        async with client:
            for number in range(6):
                async with client.lock(str(number)) as lease:
                    assert lease.token > seen.get(number, 0)
                    seen[number] = lease.token
        for server in three:
            say(server, b"flush_all\r\n", b"\r\n")
