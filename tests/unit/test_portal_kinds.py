"""Every kind of lock and decorator for threads: one use of each, and the rules in which a thread stands for a task."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import aiolock
from aiolock.backends.memory import MemoryBackend, MemoryServer
from aiolock.portal import SyncClient, lock_all
from tests.unit.test_portal import until


@pytest.fixture
def client():
    # The client's own on_loss would cancel a task: a lock for threads never does.
    with SyncClient(aiolock.Client(MemoryBackend(server=MemoryServer()), on_loss="cancel")) as made:
        yield made


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as made:
        yield made


def test_open_and_close_without_a_block(client):
    other = SyncClient(aiolock.Client(MemoryBackend(server=MemoryServer())))
    other.close()
    assert other.open() is other
    with pytest.raises(RuntimeError, match="is open already"):
        other.open()
    lease = other.lock("a").acquire()
    other.close(timeout=1)
    other.close()
    assert lease.lost
    with other.open().lock("a") as again:
        assert again.token > lease.token
    other.close()


def test_a_thread_enters_a_reentrant_lock_again_and_other_threads_do_not(client, pool):
    lock = client.reentrant_lock("a")
    with lock as outer, client.reentrant_lock("a") as inner:
        assert inner.token == outer.token
        third = lock.acquire(timeout=0)
        third.release()
        assert pool.submit(lock.try_acquire).result() is None
    assert not lock.locked()


def test_the_next_thread_inherits_no_hold(client):
    """A thread that ended may have had the same number."""
    kept = []

    def forget() -> None:
        kept.append(client.reentrant_lock("a").acquire())

    for _ in range(2):
        thread = (
            threading.Thread(target=forget)
            if not kept
            else threading.Thread(target=lambda: kept.append(client.reentrant_lock("a").try_acquire()))
        )
        thread.start()
        thread.join()
    assert kept[0].held
    assert kept[1] is None
    kept[0].release()


def test_readers_share_and_a_writer_excludes(client, pool):
    lock = client.rwlock("a")
    with lock.read() as one, lock.read() as level:
        assert level.token == one.token
        other = pool.submit(lock.read().try_acquire).result()
        assert other is not None
        other.release()
        assert lock.write().try_acquire() is None
        with pytest.raises(RuntimeError, match="inside its own read block"):
            lock.write().acquire()
    with lock.write() as lease:
        assert pool.submit(lock.read().try_acquire).result() is None
        lease.downgrade()
        other = pool.submit(lock.read().acquire, 20).result()
        other.release()


def test_permits(client):
    semaphore = client.semaphore("a", 3)
    assert semaphore.limit == 3
    two = semaphore.acquire(permits=2)
    assert semaphore.available() == 1
    assert semaphore.try_acquire(permits=2) is None
    with semaphore:
        assert semaphore.locked()
    semaphore.set_limit(4)
    assert semaphore.inspect().limit == 4
    two.release()


def test_a_latch_and_a_barrier(client, pool):
    latch = client.latch("a", 2)
    waiting = pool.submit(latch.wait, 30)
    assert latch.count_down(request_id="1") == 1
    assert latch.count_down(request_id="1") == 1
    assert latch.count() == 1
    with pytest.raises(aiolock.WaitTimeout):
        latch.wait(timeout=0)
    latch.count_down()
    waiting.result()
    barrier = client.barrier("b", 3)
    assert barrier.parties == 3
    assert barrier.waiting() == 0
    parties = [pool.submit(barrier.wait, 30) for _ in range(3)]
    assert sorted(party.result() for party in parties) == [0, 1, 2]


def test_an_election_is_campaigned_for_observed_and_resigned(client):
    election = client.election("a", label="me")
    seen = election.observe()
    assert next(seen) is None
    with election.campaign() as term:
        assert election.campaign().ttl == term.ttl
        leader = next(seen)
        assert leader is not None
        assert (leader.holder.label, leader.token) == ("me", term.token)
        again = election.leader()
        assert again is not None
        assert again.token == term.token
        assert election.resign()
        assert not term.held
    assert next(seen) is None


def test_several_locks_are_one(client, pool):
    a, b = client.lock("a"), client.semaphore("b", 2)
    both = lock_all(b, a, timeout=0)
    with both as lease:
        assert [part.name for part in lease.parts] == ["a", "b"]
        with pytest.raises(AttributeError):
            _ = lease.token
        assert both.try_acquire() is None
        assert pool.submit(a.try_acquire).result() is None
    lease = lock_all(both, client.lock("c")).acquire()
    assert lease.name == "a, b, c"
    lease.release()
    assert not a.locked()
    other = SyncClient(aiolock.Client(MemoryBackend(server=MemoryServer())))
    with pytest.raises(aiolock.ConfigError, match="locks of one client"):
        lock_all(a, other.lock("b"))
    with pytest.raises(aiolock.ConfigError, match="must be given locks"):
        lock_all("a")
    with pytest.raises(aiolock.ConfigError, match="at least one lock"):
        lock_all()


def test_a_release_is_asked_for(client, pool):
    with client.lock("a") as lease:
        assert not lease.release_requested
        asked = pool.submit(lease.release_requested.wait)
        assert client.lock("a").request_release("backup")
        assert asked.result() == "backup"
        assert lease.release_requested.reason == "backup"
    assert lease.release_requested.wait(timeout=0) in ("backup", None)
    with client.lock("a") as lease:
        assert lease.release_requested.wait(timeout=0.01) is None


def test_another_thread_works_under_a_guard(client):
    lease = client.lock("a").acquire()
    with lease.guard() as same:
        assert same is lease
    with pytest.raises(aiolock.LockLost), lease.guard():
        client.lock("a").force_release()
        lease.wait_lost()
    with pytest.raises(aiolock.LockLost), lease.guard():
        pytest.fail("entered under a lost lease")
    lease = client.lock("a").acquire()
    with pytest.raises(ZeroDivisionError) as caught, lease.guard():
        client.lock("a").force_release()
        lease.wait_lost()
        raise ZeroDivisionError
    assert "was lost" in caught.value.__notes__[0]


def test_a_lost_block_goes_on_to_its_end(client):
    steps = []
    with pytest.raises(aiolock.LockLost), client.rwlock("a").write() as lease:
        client.rwlock("a").write().force_release()
        lease.wait_lost()
        steps.append("after the loss")
        assert not client.lock("b").locked()
    assert steps == ["after the loss"]


def test_a_function_under_a_lock(client):
    @client.locked("order:{order_id}", timeout=0)
    def pay(order_id: int, amount: float = 1.5) -> str:
        "Pay."
        assert client.lock(f"order:{order_id}").locked()
        return f"{order_id} {amount}"

    assert pay(7) == "7 1.5"
    assert pay.__doc__ == "Pay."
    with client.lock("order:7"), pytest.raises(RuntimeError, match="inside its own block"):
        pay(order_id=7)
    assert not client.lock("order:7").locked()


def test_what_cannot_be_decorated(client):
    def rows():
        yield 1

    async def work() -> None: ...

    class Task:
        def __call__(self) -> None: ...

    for wrong in (rows, work, Task()):
        with pytest.raises(aiolock.ConfigError, match="locked must decorate a function made by `def`"):
            client.locked("a")(wrong)
        with pytest.raises(aiolock.ConfigError, match="once must decorate a function made by `def`"):
            client.once("a", at_most=1)(wrong)
    with pytest.raises(aiolock.ConfigError, match="must name parameters of"):
        client.locked("a:{b}")(lambda c: c)
    with pytest.raises(TypeError, match="on_loss"):
        client.locked("a", on_loss="signal")


def test_a_job_is_done_once(client, pool):
    done = []

    @client.once("job", at_most=60, at_least=30)
    def job(number: int) -> int:
        with client.lock("inside"):
            done.append(number)
        return number

    results = [each.result() for each in [pool.submit(job, number) for number in range(8)]]
    assert len(done) == 1
    assert [each for each in results if each is not None] == done
    assert results.count(None) == 7
    assert client.lock("job").locked()


def test_a_job_that_fails_counts_and_one_that_was_lost_says_so(client):
    @client.once("fails", at_most=60, at_least=30)
    def fails() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert fails() is None

    steps = []

    @client.once("lost", at_most=60)
    def lost(*, fail: bool) -> None:
        client.lock("lost").force_release()
        until(lambda: client.stats()["lost"] > len(steps))
        steps.append("on to the end")
        if fail:
            raise ZeroDivisionError

    with pytest.raises(aiolock.LockLost):
        lost(fail=False)
    with pytest.raises(ZeroDivisionError) as caught:
        lost(fail=True)
    assert "was lost" in caught.value.__notes__[0]
    assert len(steps) == 2


def test_a_job_in_a_thread_counts_as_one_on_a_loop(client):
    done = []

    @client.once("job:{number}", at_least=60, on_error="release")
    def job(number: int, error: BaseException | None = None) -> int:
        done.append(number)
        if error is not None:
            raise error
        return number

    for error in (ZeroDivisionError(), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught:
            job(1, error)
        assert caught.value is error
        assert not hasattr(error, "__notes__")
        assert not client.lock("job:1").locked()
    assert job(1) == 1
    assert job(2) == 2
    assert job(1) is None
    assert done == [1, 1, 1, 2]
    assert sorted(info.name for info in client.locks()) == ["job:1", "job:2"]


def test_a_job_longer_than_at_most_is_told_at_its_end(client):
    @client.once("long", at_most=0.1)
    def long() -> None:
        until(lambda: client.stats()["lost"])

    with pytest.raises(aiolock.LockLost):
        long()


def test_administration(client):
    with client.lock("a"):
        assert [info.name for info in client.locks("a*")] == ["a"]
        assert "fencing" in client.capabilities
        assert client.diagnose()


def test_nothing_can_be_pickled(client):
    lease = client.lock("a").acquire()
    for each in (client, client.lock("a"), lease, client.latch("a", 1), client.rwlock("a")):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            pickle.dumps(each)
    lease.release()


def test_the_loop_cannot_wait_for_itself(client):
    async def inside() -> None:
        client.lock("a").locked()

    with pytest.raises(RuntimeError, match="event loop"):
        client.loop.run(inside)
