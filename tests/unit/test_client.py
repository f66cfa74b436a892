"""The client: from a URL to locks, and orderly closing."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

import aiolock
from aiolock.backends.memory import MemoryBackend, MemoryServer
from aiolock.core.capabilities import UnreadableLock
from aiolock.core.hold import Hold


@pytest.fixture
def server():
    return MemoryServer()


@pytest.fixture
def connect(server):
    def make(cls=MemoryBackend, **options) -> aiolock.Client:
        return aiolock.Client(cls(server=server), **options)

    return make


async def test_nothing_happens_before_it_is_entered(connect):
    class Loud(MemoryBackend):
        async def open(self) -> None:
            raise AssertionError("I/O before `async with`")

    client = connect(Loud)
    assert client.lock("a").name == "a"
    assert client.stats()["held"] == 0
    assert repr(client) == "<Client of memory, not open>"


async def test_memory_urls_name_servers():
    async with (
        aiolock.connect("memory://one") as one,
        aiolock.connect("memory://one") as same,
        aiolock.connect("memory://two") as other,
        one.lock("a"),
    ):
        assert await same.lock("a").locked()
        assert not await other.lock("a").locked()


async def test_namespaces_are_apart(connect):
    async with connect(namespace="a") as one, connect(namespace="b") as other, one.lock("x"):
        assert not await other.lock("x").locked()


async def test_options_of_the_client_are_the_defaults_of_its_locks(connect):
    async with connect(ttl=7, label="clerk") as client:
        async with client.lock("a") as lease:
            assert lease.ttl == 7
            assert (await client.lock("a").inspect()).holders[0].label == "clerk"
        async with client.lock("a", ttl=9, label="other") as lease:
            assert lease.ttl == 9
            assert (await client.lock("a").inspect()).holders[0].label == "other"


async def test_a_holder_is_named_by_its_process_and_by_its_label_if_it_has_one(connect):
    async with connect() as client, client.lock("a") as lease:
        [holder] = (await client.lock("a").inspect()).holders
        assert (holder.label, holder.host, holder.pid) == ("", socket.gethostname(), os.getpid())
        assert holder.token == lease.token
    async with connect(label="a: 5") as client, client.lock("a"):
        [holder] = (await client.lock("a").inspect()).holders
        assert (holder.label, holder.host, holder.pid) == ("a: 5", socket.gethostname(), os.getpid())


async def test_requirements_that_are_met(connect):
    async with connect(require={"fencing", "fifo", "exclusion"}) as client:
        assert {"fencing", "fifo"} <= client.capabilities


async def test_an_open_that_fails_leaves_nothing_and_can_be_tried_again(connect):
    class Shaky(MemoryBackend):
        fails = True
        closed = 0

        async def open(self) -> None:
            await super().open()
            if self.fails:
                raise aiolock.BackendUnavailable("memory is down")

        async def aclose(self) -> None:
            self.closed += 1
            await super().aclose()

    backend = Shaky(server=MemoryServer())
    client = aiolock.Client(backend)
    with pytest.raises(aiolock.BackendUnavailable):
        await client.open()
    assert backend.closed == 1
    backend.fails = False
    async with client:
        assert not await client.lock("a").locked()
    assert backend.closed == 2


async def test_an_open_that_is_cancelled_leaves_nothing_and_can_be_tried_again(connect):
    class Slow(MemoryBackend):
        slow = True
        closed = 0

        async def open(self) -> None:
            await super().open()
            if self.slow:
                await asyncio.get_running_loop().create_future()

        async def aclose(self) -> None:
            self.closed += 1
            await super().aclose()

    backend = Slow(server=MemoryServer())
    client = aiolock.Client(backend)
    opening = asyncio.ensure_future(client.open())
    await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert backend.closed == 1
    backend.slow = False
    async with client:
        assert not await client.lock("a").locked()


async def test_closing_ends_leases_waiters_and_tasks(connect, server):
    before = asyncio.all_tasks()
    client = await connect().open()
    lease = await client.lock("a").acquire()
    waiting = asyncio.ensure_future(client.lock("a").acquire())
    fair = asyncio.ensure_future(client.lock("a", fair=True).acquire())
    told = asyncio.ensure_future(lease.wait_lost())
    await until(lambda: client.stats()["waiting"] == 2)
    await client.aclose()
    assert await told == "closed"
    assert lease.lost
    assert not lease.held
    for waiter in (waiting, fair):
        with pytest.raises(RuntimeError, match="the client was closed while this task waited"):
            await waiter
    assert asyncio.all_tasks() == before
    assert repr(client) == "<Client of memory, closed>"
    async with connect() as other:
        info = await other.lock("a").inspect()
        assert info.holders == info.waiters == ()


async def test_closing_cancels_blocks_that_are_open(connect):
    client = await connect().open()
    entered = asyncio.Event()

    async def work() -> None:
        async with client.lock("a"):
            entered.set()
            await asyncio.get_running_loop().create_future()

    task = asyncio.ensure_future(work())
    await entered.wait()
    await client.aclose()
    with pytest.raises(aiolock.LockLost) as caught:
        await task
    assert caught.value.reason == "closed"


async def test_closing_twice_or_unopened_is_nothing(connect):
    client = connect()
    await client.aclose()
    async with client:
        await asyncio.gather(client.aclose(), client.aclose())
        await client.aclose()
    await client.aclose(timeout=0)


async def test_a_closing_that_is_not_waited_for_goes_on(connect):
    class Slow(MemoryBackend):
        gone = None

        async def aclose(self) -> None:
            await super().aclose()
            if self.gone is not None:
                await self.gone

    backend = Slow(server=MemoryServer())
    client = await aiolock.Client(backend).open()
    backend.gone = asyncio.get_running_loop().create_future()
    closing = asyncio.ensure_future(client.aclose())
    await asyncio.sleep(0.01)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    backend.gone.set_result(None)
    await client.aclose()
    assert repr(client) == "<Client of memory, closed>"


async def test_closing_many_holds_leaves_time_to_other_tasks(connect):
    client = await connect(ttl=30).open()
    leases = [await client.lock(f"{number}").acquire() for number in range(1_000)]
    closing = asyncio.ensure_future(client.aclose())
    seen = set()
    while not closing.done():
        seen.add(sum(lease.lost for lease in leases))
        await asyncio.sleep(0)
    assert max(seen) == 1_000
    assert len(seen) > 3


def test_every_hold_is_lost_also_where_the_end_of_the_loop_cancels_the_closing(server):
    async def main() -> list[aiolock.Lease]:
        client = await aiolock.Client(MemoryBackend(server=server), ttl=30).open()
        leases = [await client.lock(f"{number}").acquire() for number in range(1_000)]
        asyncio.ensure_future(client.aclose())  # noqa: RUF006 - the end of the loop cancels it
        await leases[0].wait_lost()
        assert not leases[-1].lost
        return leases

    assert all(lease.lost for lease in asyncio.run(main()))


async def test_closing_waits_for_a_dead_server_no_longer_than_told():
    async def dead(step):
        if cut:
            await asyncio.get_running_loop().create_future()
        return step()

    cut = False
    before = asyncio.all_tasks()
    client = await aiolock.Client(MemoryBackend(server=MemoryServer(), transport=dead), ttl=30).open()
    lease = await client.lock("a").acquire()
    cut = True
    async with asyncio.timeout(20):
        await client.aclose(timeout=0.05)
    assert lease.lost
    assert asyncio.all_tasks() == before


async def test_a_client_belongs_to_its_loop(connect):
    def elsewhere(call) -> str:
        async def main() -> None:
            await call()

        try:
            asyncio.run(main())
        except RuntimeError as error:
            return str(error)
        return "no error"

    async with connect() as client, client.lock("a") as lease:
        lock = client.lock("b")
        for call in (
            lock.acquire,
            lock.try_acquire,
            lock.inspect,
            lock.__aenter__,
            lease.renew,
            lease.release,
            client.aclose,
        ):
            assert "belongs to another event loop or thread" in await asyncio.to_thread(elsewhere, call)
        assert lease.held


async def test_stats_count(connect):
    async with connect() as client:
        lock = client.lock("a")
        lease = await lock.acquire()
        assert client.stats()["held"] == 1
        with pytest.raises(aiolock.AcquireTimeout):
            await lock.acquire(timeout=0.01)
        waiting = asyncio.ensure_future(enter_and_leave(lock))
        await until(lambda: client.stats()["waiting"])
        await lease.release()
        await waiting
        with pytest.raises(aiolock.LockLost):
            async with lock:
                await lock.force_release()
                await asyncio.sleep(30)
        stats = client.stats()
    assert stats["acquired"] == 3
    assert stats["passed"] == 1
    assert stats["timeouts"] == 1
    assert stats["lost"] == 1
    assert stats["held"] == stats["waiting"] == 0


async def enter_and_leave(lock: aiolock.Lock) -> None:
    async with lock:
        pass


async def until(condition) -> None:
    """Let the loop run until something that needs nothing else has happened."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("nothing happened")


async def test_a_lease_counts_as_dropped_only_if_it_is_collected_while_it_is_held(monkeypatch):
    dropped = []
    monkeypatch.setattr(Hold, "drop", lambda hold: dropped.append(hold.name))
    async with aiolock.connect("memory://dropping") as client:
        async with client.lock("a"), client.rwlock("a").write(), client.reentrant_lock("z"):
            pass
        async with aiolock.lock_all(client.lock("b"), client.lock("c")):
            pass
        async with await client.lock("d").acquire():
            pass
        assert dropped == []
        await client.lock("e").acquire()
        assert dropped == ["e"]


async def test_only_a_lock_of_another_version_is_listed_as_unreadable(connect):
    class Guarded(MemoryBackend):
        error: aiolock.BackendError

        async def inspect(self, name, family):
            raise self.error

    async with connect(Guarded) as client, client.lock("x"):
        Guarded.error = UnreadableLock("it has format '2', not '1'")
        assert [info.unreadable for info in await client.locks()] == ["it has format '2', not '1'"]
        Guarded.error = aiolock.BackendRefused("no permission")
        with pytest.raises(aiolock.BackendRefused, match="no permission"):
            await client.locks()


# --- the default timeout


DEFAULTED = {
    "lock": lambda client, **options: client.lock("x", **options),
    "reentrant_lock": lambda client, **options: client.reentrant_lock("x", **options),
    "read": lambda client, **options: client.rwlock("x").read(**options),
    "write": lambda client, **options: client.rwlock("x").write(**options),
    "semaphore": lambda client, **options: client.semaphore("x", 1, **options),
    "lock_all": lambda client, **options: aiolock.lock_all(
        client.lock("x", **options), client.lock("y", **options)
    ),
}


@pytest.mark.parametrize("make", DEFAULTED.values(), ids=DEFAULTED)
async def test_a_lock_without_a_timeout_of_its_own_waits_for_that_of_its_client(make):
    url = "memory://"
    async with aiolock.connect(url) as holder, aiolock.connect(url, timeout=0.05) as client:
        taken = await (
            aiolock.lock_all(holder.lock("x"))
            if make is DEFAULTED["lock_all"]
            else _conflicting(make, holder)
        ).acquire()
        for acquire in (make(client).acquire, make(client).__aenter__):
            with pytest.raises(aiolock.AcquireTimeout, match=r"0\.05 s"):
                await acquire()
        with pytest.raises(aiolock.AcquireTimeout, match=r"0\.01 s"):
            await make(client, timeout=0.01).acquire()
        # None, of the lock or of the call, waits for ever.
        patient = [
            asyncio.create_task(make(client, timeout=None).acquire()),
            asyncio.create_task(make(client).acquire(timeout=None)),
        ]
        await asyncio.wait(patient, timeout=0.3)
        assert not any(task.done() for task in patient)
        await taken.release()
        for task in asyncio.as_completed(patient):
            await (await task).release()


def _conflicting(make, client):
    return client.rwlock("x").write() if make is DEFAULTED["read"] else make(client)


async def test_the_default_timeout_is_of_locks_alone():
    url = "memory://"
    async with aiolock.connect(url) as holder, aiolock.connect(url, timeout=0.05) as client:

        @client.locked("x")
        async def work() -> None: ...

        @client.once("y")
        async def job() -> str:
            return "done"

        async with holder.lock("x"), holder.election("e").campaign():
            with pytest.raises(aiolock.AcquireTimeout):
                await work()
            waiting = [
                asyncio.create_task(client.election("e").campaign().acquire()),
                asyncio.create_task(client.latch("l", 1).wait()),
                asyncio.create_task(client.lock("x").try_acquire(timeout=None)),
            ]
            await asyncio.wait(waiting, timeout=0.3)
            assert not any(task.done() for task in waiting)
            assert await client.lock("x").try_acquire() is None
            assert await job() == "done"
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)


@pytest.mark.parametrize("timeout", ["3", -1, True, float("nan")])
def test_a_wrong_default_timeout_is_refused(timeout):
    with pytest.raises(aiolock.ConfigError, match="timeout must be"):
        aiolock.connect("memory://", timeout=timeout)
