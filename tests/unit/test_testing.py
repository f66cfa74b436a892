"""The help for other people's tests: a world whose time is moved by hand, and accidents."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import aiolock
from aiolock.lease import hold_of
from aiolock.testing import Deadlock, World, lose, run
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
