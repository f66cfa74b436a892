"""The help for other people's tests: a world whose time is moved by hand, accidents, and interruptions everywhere."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import aiolock
from aiolock.lease import hold_of
from aiolock.testing import Deadlock, World, interrupt_everywhere, lose, run
from tests.faults.staging import until

ROOT = Path(__file__).parents[2]


@pytest.fixture
def world() -> World:
    return World()


# --- the world


async def test_time_stands_still_until_it_is_moved(world):
    async with world.connect(ttl=10) as client:
        lease = await client.lock("x").acquire()
        left = lease.remaining()
        await asyncio.sleep(0.01)
        assert lease.remaining() == left
        now = world.now()
        await world.advance(1)
        assert world.now() == pytest.approx(now + 1)
        assert lease.remaining() == pytest.approx(left - 1)
        await lease.release()


async def test_leases_are_renewed_while_time_goes_on(world):
    async with world.connect(ttl=10) as client, client.lock("x") as lease:
        await world.advance(3600)
        assert lease.held
        assert client.stats()["renewals"] > 300


async def test_a_pause_longer_than_the_ttl_loses_the_lease_and_cancels_its_block(world):
    async with world.connect(ttl=10) as client, world.connect() as rival:
        with pytest.raises(aiolock.LockLost) as caught:
            async with client.lock("x") as lease:
                world.pause(20)
                assert not lease.held
                await asyncio.Event().wait()
        assert caught.value.reason == "expired"
        async with rival.lock("x", timeout=0) as next_lease:
            assert next_lease.token > lease.token


async def test_a_pause_shorter_than_that_does_nothing(world):
    async with world.connect(ttl=10) as client, client.lock("x") as lease:
        for _ in range(10):
            world.pause(3)
            await world.settle()
        assert lease.held


async def test_whoever_waits_gets_the_lock_of_a_holder_that_was_paused(world):
    async with world.connect(ttl=10) as client, world.connect() as rival:
        lease = await client.lock("x").acquire()
        waiter = asyncio.create_task(rival.lock("x").acquire())
        await until(lambda: rival.stats()["waiting"] == 1)
        world.pause(20)
        after = await waiter
        assert after.token > lease.token
        assert lease.lost
        await after.release()


async def test_a_client_that_is_cut_off_loses_its_lease_before_anybody_else_can_have_it(world):
    async with world.connect(ttl=10) as client, world.connect() as rival:
        lease = await client.lock("x").acquire()
        waiter = asyncio.create_task(rival.lock("x").acquire())
        await until(lambda: rival.stats()["waiting"] == 1)
        with world.cut(client):
            with pytest.raises(aiolock.BackendUnavailable):
                await client.lock("y").acquire()
            while not waiter.done():
                assert world.now() < 1100
                held = lease.held
                await world.advance(0.5)
                assert not (held and lease.held and waiter.done())
            assert lease.lost
        await (await waiter).release()
        async with client.lock("x"):
            pass


async def test_a_short_cut_is_survived(world):
    async with world.connect(ttl=10) as client, client.lock("x") as lease:
        with world.cut(client):
            await world.advance(8)
        await world.advance(60)
        assert lease.held
    assert client.stats()["renewal_failures"] > 0


async def test_a_lease_can_be_lost_for_every_reason(world):
    async with world.connect() as client, world.connect() as rival:
        for reason in ("expired", "revoked", "session", "force-released"):
            with pytest.raises(aiolock.LockLost) as caught:
                async with client.lock("x") as lease:
                    world.lose(lease, reason)
                    await asyncio.Event().wait()
            assert caught.value.reason == reason
            async with rival.lock("x", timeout=5):
                pass


async def test_several_locks_are_lost_with_one_of_them(world):
    async with world.connect() as client:
        with pytest.raises(aiolock.LockLost):
            async with aiolock.lock_all(client.lock("a"), client.lock("b")) as lease:
                lose(lease)
                await asyncio.Event().wait()


async def test_a_lease_that_was_released_takes_no_other_lease_with_it(world):
    async with world.connect() as client:
        first = await client.lock("x").acquire()
        waiting = asyncio.create_task(client.lock("x").acquire())
        await until(lambda: client.stats()["waiting"])
        await first.release()
        second = await waiting
        assert hold_of(first).validity is hold_of(second).validity
        lose(first)
        assert not first.lost
        assert second.held
        lose(second)
        assert second.lost


async def test_bad_arguments_are_named(world):
    async with world.connect() as client, client.lock("x") as lease:
        with pytest.raises(aiolock.ConfigError, match="reason"):
            lose(lease, "bad luck")
        with pytest.raises(aiolock.ConfigError, match="lease"):
            lose(client)
        with pytest.raises(aiolock.ConfigError, match="seconds"):
            world.pause(-1)
        with pytest.raises(aiolock.ConfigError, match="seconds"):
            await world.advance("soon")
        with pytest.raises(aiolock.ConfigError, match="clients of this world"), world.cut(World().connect()):
            pass


# --- virtual time


def test_in_virtual_time_nobody_waits_for_a_timeout(world):
    async def main() -> None:
        async with world.connect(ttl=10) as client:
            async with client.lock("x") as lease:
                before = world.now()
                with pytest.raises(aiolock.AcquireTimeout):
                    async with world.connect() as rival:
                        await rival.lock("x").acquire(timeout=600)
                assert 600 <= world.now() - before < 601
                assert lease.held
            with pytest.raises(aiolock.LockLost):
                async with client.lock("x"):
                    world.pause(20)
                    await asyncio.sleep(0)
            await world.advance(5)

    run(main())


def test_what_would_hang_for_ever_is_an_error_that_says_who_waits():
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match=r"test_testing\.py"):
        run(main())


def test_the_same_work_takes_the_same_course():
    def course() -> list[float]:
        seen: list[float] = []
        world = World()

        async def work(client: aiolock.Client, number: int) -> None:
            for _ in range(5):
                async with client.lock("x"):
                    await asyncio.sleep(0.1 * number)
                    seen.append(world.now())

        async def main() -> None:
            async with world.connect() as one, world.connect() as two:
                await asyncio.gather(work(one, 1), work(two, 2), work(two, 3))

        run(main())
        return seen

    first = course()
    assert len(first) == 15
    assert first == course()


# --- interruptions


async def test_right_work_passes_and_says_how_often_it_was_interrupted(world):
    balance = [100]

    async with world.connect() as client, world.connect() as rival:

        async def work() -> None:
            async with client.lock("account", timeout=5) as lease:
                await asyncio.sleep(0)
                lease.check()
                balance[0] -= 1
                await asyncio.sleep(0)

        async def check() -> None:
            async with rival.lock("account", timeout=5):
                assert balance[0] in (99, 100)
            balance[0] = 100

        report = await interrupt_everywhere(
            work, clients=[client], check=check, ways=("cancel", "race", "twice", "timeout", "loss")
        )
    assert report.attempts == sum(report.points.values()) + 5
    assert set(report.points) == {"cancel", "race", "twice", "timeout", "loss"}
    assert min(report.points.values()) >= 2


async def test_waiting_is_interrupted_as_well(world):
    async with world.connect() as client, world.connect() as rival:

        async def work() -> None:
            lease = await rival.lock("x").acquire()
            waiting = asyncio.create_task(client.lock("x").acquire(timeout=20))
            try:
                await until(lambda: client.stats()["waiting"] == 1)
            finally:
                await lease.release()
                waiting.cancel()
                await asyncio.wait([waiting])
            if not waiting.cancelled():
                await waiting.result().release()

        await interrupt_everywhere(work, clients=[client, rival], ways=["cancel"])


@pytest.mark.parametrize("way", ["cancel", "race", "timeout"])
async def test_a_swallowed_cancellation_is_found_where_it_happens(way):
    async def work() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.001)

    with pytest.raises(AssertionError, match=r"swallowed") as caught:
        await interrupt_everywhere(work, ways=[way])
    assert f"{way} at await 1" in str(caught.value)
    # The place is the user's, not where asyncio sleeps.
    line = work.__code__.co_firstlineno + 2
    assert f"{work.__qualname__} ({__file__}:{line})" in str(caught.value)


async def test_a_lock_that_stays_is_found(world, monkeypatch):
    monkeypatch.setattr("aiolock.testing.interrupt.GRACE", 0.05)
    async with world.connect() as client:
        kept = []

        async def work() -> None:
            lease = await client.lock(f"x{len(kept)}").acquire()
            kept.append(lease)
            await asyncio.sleep(0)
            await lease.release()

        with pytest.raises(AssertionError, match="still has 1 leases"):
            await interrupt_everywhere(work, clients=client, ways=["cancel"])
        for lease in kept:
            await lease.release()


async def test_a_lock_that_stays_is_not_waited_for_by_the_next_attempt(world, monkeypatch):
    monkeypatch.setattr("aiolock.testing.interrupt.GRACE", 0.05)
    kept = []
    async with world.connect() as client:

        async def work() -> None:
            kept.append(await client.lock("x").acquire())
            await asyncio.sleep(0)
            await kept.pop().release()

        with pytest.raises(AssertionError, match="still has 1 leases") as caught:
            async with asyncio.timeout(30):
                await interrupt_everywhere(work, clients=client)
        assert "1 fault(s) in " in str(caught.value)
        await kept.pop().release()


async def test_a_task_that_stays_is_found(monkeypatch):
    monkeypatch.setattr("aiolock.testing.interrupt.GRACE", 0.05)
    tasks = []

    async def work() -> None:
        tasks.append(asyncio.create_task(asyncio.sleep(60), name="forgotten"))
        await asyncio.sleep(0)
        tasks[-1].cancel()

    with pytest.raises(AssertionError, match="forgotten"):
        await interrupt_everywhere(work, ways=["cancel"])
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_a_failed_check_is_found():
    done = []

    async def work() -> None:
        done.append("first")
        await asyncio.sleep(0)
        done.append("second")

    def check() -> None:
        half = len(done) % 2
        done.clear()
        assert not half, "only half of it was done"

    with pytest.raises(AssertionError, match="only half"):
        await interrupt_everywhere(work, ways=["cancel"], check=check)


async def test_losses_in_a_task_group_are_no_fault_and_other_errors_beside_them_are(world):
    async with world.connect() as client:

        async def group(error: type[Exception] | None = None) -> None:
            async def block(number: int) -> None:
                try:
                    async with client.lock(f"x{number}"):
                        await asyncio.sleep(0)
                except aiolock.LockLost:
                    if error is not None and number:
                        raise error from None
                    raise

            async with asyncio.TaskGroup() as tasks:
                for number in range(2):
                    tasks.create_task(block(number))

        await interrupt_everywhere(group, clients=client, ways=["loss"])
        with pytest.raises(AssertionError, match="it lost its lease, and ended with ExceptionGroup"):
            await interrupt_everywhere(lambda: group(KeyError), clients=client, ways=["loss"])


async def test_ignoring_a_loss_is_found_and_catching_it_is_not(world):
    async with world.connect() as client:

        async def careless() -> None:
            lease = await client.lock("x").acquire()
            await asyncio.sleep(0)
            if lease.lost:
                raise KeyError("it fell over")
            await lease.release()

        async def careful() -> None:
            try:
                async with client.lock("x"):
                    await asyncio.sleep(0)
            except aiolock.LockLost:
                await asyncio.sleep(0)

        with pytest.raises(AssertionError, match="lost its lease, and ended with KeyError"):
            await interrupt_everywhere(careless, clients=client, ways=["loss"])
        assert (await interrupt_everywhere(careful, clients=client)).attempts > 4
        assert await interrupt_everywhere(careless, clients=client, ways=["loss"], raises=(KeyError,))


async def test_work_that_fails_by_itself_is_found():
    async def work() -> None:
        raise KeyError("x")

    with pytest.raises(AssertionError, match="without being interrupted"):
        await interrupt_everywhere(work, ways=["cancel"])


async def test_work_that_hangs_after_an_interruption_is_found(monkeypatch):
    monkeypatch.setattr("aiolock.testing.interrupt.GRACE", 0.05)

    async def work() -> None:
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            await asyncio.sleep(3600)

    with pytest.raises(AssertionError, match="went on for more than"):
        await interrupt_everywhere(work, ways=["cancel"])


async def test_what_cannot_be_interrupted_is_named():
    async def work() -> None: ...

    with pytest.raises(aiolock.ConfigError, match="ways"):
        await interrupt_everywhere(work, ways=["magic"])
    with pytest.raises(aiolock.ConfigError, match="clients="):
        await interrupt_everywhere(work, ways=["loss"])
    with pytest.raises(aiolock.ConfigError, match="clients"):
        await interrupt_everywhere(work, clients=[7])


# --- the plugin


def pytest_run(folder: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    """A test run of somebody else, in a process of its own."""
    (folder / "test_theirs.py").write_text(textwrap.dedent(text))
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "pytest_aiolock", *options]
    return subprocess.run(
        [*argv, "--rootdir", str(folder), str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_the_fixtures_work_with_nothing_but_pytest(tmp_path):
    done = pytest_run(
        tmp_path,
        """
        import asyncio

        def test_one(aiolock_client, aiolock_world):
            async def main():
                async with aiolock_client, aiolock_client.lock("x") as lease:
                    await aiolock_world.advance(100)
                    assert lease.held
            asyncio.run(main())

        def test_each_has_its_own(aiolock_world):
            assert aiolock_world.now() == 1000
        """,
        "-p",
        "no:asyncio",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_the_client_of_the_fixture_is_open(tmp_path):
    done = pytest_run(
        tmp_path,
        """
        import asyncio
        import pytest

        @pytest.fixture
        def lock(aiolock_client):
            return aiolock_client.lock("x", ttl=10)

        async def test_without_entering_it(aiolock_client, lock):
            async with lock as lease:
                assert lease.held
            assert aiolock_client.stats()["acquired"] == 1

        async def test_with_a_lease_that_is_never_given_back(aiolock_client, lock):
            test_with_a_lease_that_is_never_given_back.lease = await lock.acquire()

        async def test_entered_all_the_same(aiolock_client, lock):
            async with lock:
                pass
            async with aiolock_client, lock:
                pass
            with pytest.raises(RuntimeError, match="closed"):
                await lock.acquire()

        def test_without_a_plugin(aiolock_client, lock, aiolock_world):
            async def main():
                async with lock as lease:
                    await aiolock_world.advance(100)
                    assert lease.held
            asyncio.run(main())
        """,
        "-p",
        "pytest_asyncio",
        "-o",
        "asyncio_mode=auto",
        "-W",
        "error::pytest.PytestUnraisableExceptionWarning",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


def test_nothing_is_imported_before_a_fixture_is_used(tmp_path):
    done = pytest_run(
        tmp_path,
        """
        import sys

        def test_unused():
            assert not [name for name in sys.modules if name.partition(".")[0] == "aiolock"]

        def test_used(aiolock_world):
            assert "aiolock.testing" in sys.modules
        """,
    )
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_the_library_does_not_import_it():
    program = "import sys, aiolock; aiolock.connect('memory://'); print('aiolock.testing' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
