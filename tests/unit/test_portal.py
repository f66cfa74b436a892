"""Synchronous use: threads ask, wait, lose and leave by the rules that tasks have, as far as threads can."""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

import aiolock
from aiolock import _threads, portal
from aiolock.backends.memory import MemoryBackend, MemoryServer
from aiolock.portal import SyncClient


def until(condition, seconds: float = 30.0) -> None:
    """Wait for something that another thread does; only a defect takes as long as `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.002)


@pytest.fixture
def server():
    return MemoryServer()


@pytest.fixture
def connect(server):
    """Clients of one private server."""

    def make(**options) -> SyncClient:
        return SyncClient(aiolock.Client(MemoryBackend(server=server), **options))

    return make


@pytest.fixture
def client(connect):
    with connect() as made:
        yield made


def test_a_block_holds_and_releases(client):
    lock = client.lock("a", ttl=20)
    with lock as lease:
        assert lease.held
        assert not lease.lost
        assert lease.name == lock.name == "a"
        assert lease.kind == lock.kind
        assert 0 < lease.remaining() < lease.ttl == 20
        lease.check()
        lease.renew()
        assert lock.locked()
        assert [holder.token for holder in lock.inspect().holders] == [lease.token]
    assert not lock.locked()
    assert not lease.held
    with pytest.raises(RuntimeError, match="was released"):
        lease.check()


def test_connect_takes_a_url():
    with portal.connect("memory://portal", namespace="x", ttl=5) as client, client.lock("a") as lease:
        assert lease.ttl == 5
        assert client.stats()["held"] == 1


def test_acquire_and_try_acquire_give_leases_that_are_released_by_hand(client):
    lock = client.lock("a")
    lease = lock.acquire(timeout=1)
    assert lock.try_acquire() is None
    with pytest.raises(aiolock.AcquireTimeout, match="was not free within 0 s"):
        lock.acquire(timeout=0)
    lease.release()
    lease.release()
    again = lock.try_acquire()
    assert again is not None
    assert again.token > lease.token
    with again:
        assert again.held
    assert not lock.locked()


def test_the_options_of_the_lock_count(client):
    holder = client.lock("a").acquire()
    with pytest.raises(aiolock.AcquireTimeout, match=r"within 0\.05 s"), client.lock("a", timeout=0.05):
        pytest.fail("entered a lock that is held")
    holder.release()
    with client.lock("a", label="clerk"):
        assert client.lock("a").inspect().holders[0].label == "clerk"


def test_release_can_keep_the_lock_taken(client):
    lock = client.lock("a")
    lock.acquire().release(keep=300)
    assert lock.locked()


def test_threads_exclude_each_other(client):
    lock = client.lock("counter")
    inside = 0
    most = 0
    tokens = []

    def work(_) -> None:
        nonlocal inside, most
        for _ in range(5):
            with lock as lease:
                inside += 1
                most = max(most, inside)
                time.sleep(0.0005)
                tokens.append(lease.token)
                inside -= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert most == 1
    assert len(tokens) == 40
    assert tokens == sorted(set(tokens))


def test_two_clients_exclude_each_other(connect):
    with connect() as one, connect() as two, one.lock("a"):
        assert two.lock("a").try_acquire() is None


def test_a_thread_inside_its_own_block_is_refused_instead_of_hanging(client):
    with client.lock("a"):
        with pytest.raises(RuntimeError, match="inside its own block of lock 'a'"):
            client.lock("a").acquire()
        with pytest.raises(RuntimeError, match="inside its own block"), client.lock("a"):
            pytest.fail("entered twice")
        assert client.lock("a").try_acquire() is None
        with client.lock("b") as other:
            assert other.held
    with client.lock("a") as lease:
        assert lease.held


def test_a_thread_that_released_by_hand_may_ask_again_inside_its_block(client):
    with client.lock("a") as outer:
        outer.release()
        with client.lock("a") as inner:
            assert inner.token > outer.token
            with pytest.raises(RuntimeError, match="inside its own block"):
                client.lock("a").acquire()
        again = client.lock("a").try_acquire()
        assert again is not None
        again.release()
    with client.lock("a"):
        pass


def test_leaving_a_lost_block_raises_the_loss(client):
    with pytest.raises(aiolock.LockLost) as caught, client.lock("a") as lease:
        assert client.lock("a").force_release()
        assert lease.wait_lost() == "force-released"
        assert lease.lost
        assert not lease.held
        with pytest.raises(aiolock.LockLost):
            lease.check()
    assert caught.value.reason == "force-released"
    assert not client.lock("a").locked()


def forget(client, name: str) -> None:
    """Have the server drop its hold, and tell nobody."""
    server = client._client._backend.server

    def step(machine, now: float) -> None:
        [key] = [key for key in machine.locks if key[1] == name]
        machine.locks[key].holds.clear()

    server.ask(step)


def test_a_block_whose_hold_the_server_forgot_raises_at_its_end(client):
    with pytest.raises(aiolock.LockLost) as caught, client.lock("a") as lease:
        forget(client, "a")
    assert caught.value.reason == "revoked"
    assert lease.lost
    assert client.stats()["losses"]["revoked"] == 1


def test_a_release_by_hand_of_what_the_server_forgot_does_not_raise(client):
    lease = client.lock("a").acquire()
    forget(client, "a")
    lease.release()
    assert lease.lost


def test_an_exception_of_the_block_wins_and_gets_the_loss_as_a_note(client):
    with pytest.raises(ZeroDivisionError) as caught, client.lock("a") as lease:
        client.lock("a").force_release()
        lease.wait_lost()
        raise ZeroDivisionError
    assert any("was lost (force-released)" in note for note in caught.value.__notes__)


def test_a_lost_lease_of_a_bare_acquire_says_so_at_the_end_of_its_block(client):
    lease = client.lock("a").acquire()
    client.lock("a").force_release()
    assert lease.wait_lost() == "force-released"
    lease.release()
    with pytest.raises(aiolock.LockLost), lease:
        pytest.fail("a lost lease was entered")


def test_max_hold_ends_a_lease(client):
    with pytest.raises(aiolock.LockLost, match="max_hold"), client.lock("a", max_hold=0.05) as lease:
        assert lease.wait_lost() == "max_hold"


def test_a_hold_that_is_not_renewed_ends_by_itself(client):
    lease = client.lock("a", ttl=30, renew=False, grace=0.1).acquire()
    assert lease.remaining() < 29.9
    with pytest.raises(TypeError, match="renew=False"):
        lease.renew()
    lease.extend(60)
    assert lease.remaining() > 50
    # Three times 0.1 is more than 0.3, in binary fractions.
    lease.extend(0.3)
    assert lease.wait_lost() == "expired"
    lease.release()


def test_wait_lost_ends_with_its_timeout_or_the_release(client):
    lease = client.lock("a").acquire()
    assert lease.wait_lost(timeout=0.01) is None
    assert lease.held
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lease.wait_lost)
        lease.release()
        assert waiting.result(30) is None


def test_closing_wakes_whoever_waits(connect):
    with connect() as client:
        lease = client.lock("a").acquire()
        pool = ThreadPoolExecutor(2)
        told = pool.submit(lease.wait_lost)
        waiting = pool.submit(client.lock("a").acquire)
        until(lambda: client.stats()["waiting"] == 1)
        until(lambda: lease._inner._hold.rare().watchers)
    assert told.result(30) == "closed"
    with pytest.raises(RuntimeError, match="closed while this task waited"):
        waiting.result(30)
    pool.shutdown()
    with pytest.raises(RuntimeError, match="not open"):
        client.lock("a").acquire()


def test_a_client_is_entered_again_after_its_block_and_not_inside_of_it(connect):
    client = connect()
    lock = client.lock("a")
    tokens = []
    for _ in range(3):
        with pytest.raises(RuntimeError, match="is not open: enter it with `with`"):
            lock.locked()
        with client:
            with pytest.raises(RuntimeError, match="is open already"), client:
                pytest.fail("entered twice")
            with lock as lease:
                tokens.append(lease.token)
            kept = lock.acquire()
        assert kept.lost
    assert tokens == sorted(set(tokens))


def test_its_thread_ends_with_it(connect):
    before = set(threading.enumerate())
    with connect() as client, client.lock("a"):
        assert [thread.name for thread in set(threading.enumerate()) - before] == ["aiolock-portal"]
    assert set(threading.enumerate()) == before


def test_a_server_that_cannot_be_opened_leaves_no_thread(server):
    class Down(MemoryBackend):
        async def open(self) -> None:
            raise aiolock.BackendUnavailable("memory is down")

    before = set(threading.enumerate())
    client = SyncClient(aiolock.Client(Down(server=server)))
    with pytest.raises(aiolock.BackendUnavailable, match="is down"), client:
        pytest.fail("entered")
    assert set(threading.enumerate()) == before


def test_mistakes_are_refused_before_anything_happens(client):
    before = set(threading.enumerate())
    with pytest.raises(aiolock.ConfigError, match="on_loss cannot be chosen here"):
        portal.connect("memory://", on_loss="cancel")
    with pytest.raises(aiolock.ConfigError, match="names no backend"):
        portal.connect("nonsense://")
    with pytest.raises(aiolock.ConfigError, match=r"needs an aiolock\.Client"):
        SyncClient("memory://")
    with pytest.raises(aiolock.InvalidName):
        client.lock("")
    with pytest.raises(TypeError, match="on_loss"):
        client.lock("a", on_loss="signal")
    with pytest.raises(aiolock.ConfigError, match="timeout must be"):
        client.lock("a").acquire(timeout=-1)
    with client.lock("a") as lease, pytest.raises(aiolock.ConfigError, match="timeout must be"):
        lease.wait_lost(timeout="soon")
    assert set(threading.enumerate()) == before


def test_without_anyio_the_message_is_the_command_that_helps():
    program = (
        "import sys; sys.modules['anyio'] = None\n"
        "import aiolock.portal\n"
        "try: aiolock.portal.connect('memory://')\n"
        "except aiolock.MissingDriver as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == 'anyio is not installed; run: pip install "python-aiolock[portal]"\n'


@pytest.fixture
def ctrl_c(monkeypatch):
    """`KeyboardInterrupt` in the main thread, whatever handler is installed around the tests."""
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield _thread.interrupt_main
    signal.signal(signal.SIGINT, earlier)


def test_ctrl_c_while_waiting_leaves_nothing_behind(client, ctrl_c):
    holder = client.lock("a").acquire()

    def interrupt() -> None:
        until(lambda: client.stats()["waiting"] == 1)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        client.lock("a").acquire()
    thread.join()
    until(lambda: client.stats()["waiting"] == 0)
    holder.release()
    assert not client.lock("a").locked()


def test_ctrl_c_inside_a_block_releases(client, ctrl_c):
    with pytest.raises(KeyboardInterrupt), client.lock("a"):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)
    assert not client.lock("a").locked()


@pytest.fixture
def interrupted(monkeypatch):
    """Makes the next call of this thread end with an exception of a signal handler: `interrupted(when)`."""

    def arrange(when) -> None:
        class Interrupted(Future):
            def result(self, timeout=None):
                if threading.current_thread() is not threading.main_thread():
                    return super().result(timeout)
                monkeypatch.setattr(_threads, "Future", Future)
                when(super())
                raise KeyboardInterrupt

        monkeypatch.setattr(_threads, "Future", Interrupted)

    return arrange


def grants(client) -> int:
    return client.stats()["acquired"]


@pytest.mark.parametrize("enter", [True, False])
def test_a_grant_that_crosses_the_interruption_is_given_back(client, interrupted, enter):
    """The thread is interrupted while the answer of the loop is already on its way to it."""
    lock = client.lock("a")
    assert not lock.locked()
    before = grants(client)
    interrupted(lambda future: future.result())
    with pytest.raises(KeyboardInterrupt):
        if enter:
            with lock:
                pytest.fail("entered")
        else:
            lock.acquire()
    assert grants(client) == before + 1
    assert not lock.locked()
    with lock as lease:
        assert lease.held


def test_a_grant_that_comes_after_the_interruption_is_given_back(client, interrupted):
    """The cancellation comes too late for the coroutine, which ends with a lease."""
    lock = client.lock("a")
    assert not lock.locked()

    async def stubborn():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return await lock._inner.acquire()

    begun = []
    interrupted(lambda future: until(lambda: begun))
    with pytest.raises(KeyboardInterrupt):
        client.loop.run(lambda: begun.append(1) or stubborn(), lambda lease: lease.release())
    assert grants(client) == 1
    assert not lock.locked()


def test_a_call_that_had_not_begun_is_never_made(client, interrupted):
    """The thread is interrupted twice: it leaves a call that does not end, and then its next one."""
    calls = []
    go_on = threading.Event()

    async def endless() -> None:
        calls.append("endless")
        while not go_on.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.001)

    async def later() -> None:
        calls.append("later")

    loop = client.loop
    real = loop._portal.start_task_soon
    client.lock("a").locked()

    def leave(work, *args):
        future = real(work, *args)
        loop._portal.start_task_soon = real
        raise KeyboardInterrupt if future else AssertionError

    loop._portal.start_task_soon = leave
    interrupted(lambda future: until(lambda: calls))
    with pytest.raises(KeyboardInterrupt):
        loop.run(endless)
    interrupted(lambda future: None)
    with pytest.raises(KeyboardInterrupt):
        loop.run(later)
    go_on.set()
    client.lock("a").locked()
    assert calls == ["endless"]


def test_a_thread_that_ends_leaves_no_task_on_the_loop(client):
    async def tasks() -> int:
        return len(asyncio.all_tasks())

    before = client.loop.run(tasks)
    for _ in range(5):
        thread = threading.Thread(target=lambda: client.lock("a").locked())
        thread.start()
        thread.join()
    until(lambda: client.loop.run(tasks) == before)


def test_a_forked_child_is_told_at_once(connect):
    """In a process of its own: forking a process with threads warns, and this one has threads."""
    program = """
import os, warnings
import aiolock.portal
warnings.simplefilter("ignore")
with aiolock.portal.connect("memory://") as client:
    with client.lock("a") as lease:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                client.lock("b").acquire()
            except RuntimeError as error:
                code = 7 if "fork" in str(error) else 2
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert lease.held
    pid = os.fork()
    if not pid:
        raise SystemExit(3)  # leaves the block of the client, in a child where its thread does not exist
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    print(client.lock("a").locked())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["3", "False"]


def test_it_can_be_used_beside_a_running_loop(client):
    async def main() -> bool:
        def work() -> bool:
            with client.lock("a") as lease:
                return lease.held

        return await asyncio.to_thread(work)

    assert asyncio.run(main())
