"""Registers: compare-and-set, stamps that never come twice, and who is told of a change, whatever gets lost."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from aiolock.backends.redis.register import RedisRegister
from aiolock.core.capabilities import ABSENT, MOST_BYTES
from aiolock.errors import BackendRefused, BackendUnavailable, ConfigError
from aiolock.types import ELECTION, Family
from tests.backends.redis.test_kinds import enters, opened, proxy
from tests.faults.staging import until

__all__ = ["opened", "proxy"]  # fixtures


def key_of(namespace: str, name: str = "d") -> str:
    return f"{namespace}:1:latch.register:{{{name}}}"


async def watchers(admin, namespace: str) -> int:
    """How many processes the server would tell."""
    return sum(field[:2] == b"w:" for field in await admin.hgetall(key_of(namespace)))


async def test_a_register_is_what_the_last_write_that_compared_made_it(opened):
    async with opened() as one, opened() as two:
        mine, theirs = one.register("d", Family.LATCH), two.register("d", Family.LATCH)
        assert await mine.read() == ABSENT
        assert await mine.write(b"a", "no such stamp", 60) is None
        first = await mine.write(b"\x00\xff\r\n", "", 60)
        assert first
        assert await theirs.read() == (b"\x00\xff\r\n", first)
        assert await theirs.write(b"b", "", 60) is None
        second = await theirs.write(b"", first, 60)
        assert second not in (None, first)
        assert await mine.write(b"c", first, 60) is None
        # One that is empty is not one that is absent.
        assert await mine.read() == (b"", second)


async def test_of_many_writes_at_once_one_wins(opened):
    async with opened() as one, opened() as two:
        registers = [backend.register("d", Family.LATCH) for backend in (one, two) for _ in range(10)]
        stamps = await asyncio.gather(
            *(register.write(b"%d" % n, "", 60) for n, register in enumerate(registers))
        )
        assert len([stamp for stamp in stamps if stamp]) == 1


async def test_stamps_never_come_twice_also_when_the_document_and_the_clock_are_lost(
    opened, admin, namespace
):
    async with opened() as backend:
        register = backend.register("d", Family.LATCH)
        stamps = []
        for _ in range(20):
            stamps.append(await register.write(b"x", "", 60))
            await admin.delete(key_of(namespace))
        # As if the server's clock stood far ahead once.
        ahead = f"{int(stamps[-1].partition('-')[0]) + 10**12}-0"
        await admin.hset(key_of(namespace), mapping={"value": "x", "stamp": ahead})
        stamps += [ahead, await register.write(b"x", ahead, 60)]
        await admin.delete(key_of(namespace))
        stamps.append(await register.write(b"x", "", 60))
        times = [int(stamp.partition("-")[0]) for stamp in stamps]
        assert times == sorted(set(times))


async def test_registers_and_locks_of_one_name_and_family_are_apart(opened):
    async with opened() as backend:
        register = backend.register("x", Family.ELECTION)
        await register.write(b"a", "", 60)
        claim, _ = await enters(backend, ELECTION)
        assert (await register.read()).value == b"a"
        assert await backend.names("*") == [("x", Family.ELECTION)]
        await claim.release()


async def test_a_register_is_kept_for_as_long_as_was_said_and_no_watch_makes_that_less(
    opened, admin, namespace
):
    async with opened() as backend:
        register = backend.register("d", Family.LATCH)
        stamp = await register.write(b"a", "", 3600)
        assert 3_590_000 < await admin.pttl(key_of(namespace)) <= 3_600_000
        watching = asyncio.create_task(register.changed(stamp))
        await until(lambda: _is(watchers(admin, namespace), 1))
        assert await admin.pttl(key_of(namespace)) > 3_590_000
        watching.cancel()
        await register.write(b"b", stamp, 0.05)
        await until(lambda: _is(admin.exists(key_of(namespace)), 0))
        assert await register.read() == ABSENT


async def _is(question, answer: object) -> bool:
    return await question == answer


async def test_who_watches_is_told_and_those_who_are_gone_are_forgotten(opened, admin, namespace):
    async with opened() as one, opened() as two, opened() as writer:
        register = writer.register("d", Family.LATCH)
        stamp = await register.write(b"a", "", 60)
        views = [backend.register("d", Family.LATCH) for backend in (one, one, two)]
        watching = [asyncio.create_task(view.changed(stamp)) for view in views]
        await until(lambda: _is(watchers(admin, namespace), 2))
        await admin.hset(key_of(namespace), "w:deadbeef", 1)
        stamp = await register.write(b"b", stamp, 60)
        await asyncio.gather(*watching)
        # Who looks for a version that is over is told at once.
        await views[0].changed("an old one")
        watching = [asyncio.create_task(view.changed(stamp)) for view in views]
        await until(lambda: _is(watchers(admin, namespace), 2))
        for view, task in zip(views, watching, strict=True):
            await view.aclose()
            await view.aclose()
            await task
        await until(lambda: _is(watchers(admin, namespace), 0))


async def test_closing_one_view_does_not_make_another_of_the_same_client_deaf(opened, admin, namespace):
    async with opened() as backend:
        one, two = backend.register("d", Family.LATCH), backend.register("d", Family.LATCH)
        waiting = asyncio.create_task(two.changed(""))
        watched = asyncio.create_task(one.changed(""))
        await until(lambda: _is(watchers(admin, namespace), 1))
        await one.aclose()
        await watched
        assert not waiting.done()
        await one.write(b"a", "", 60)
        await waiting


async def test_a_change_whose_message_was_lost_is_seen_by_looking(opened, proxy):
    async with opened(proxy.port) as far, opened() as writer:
        register, seen = writer.register("d", Family.LATCH), far.register("d", Family.LATCH)
        lost = proxy.down.drop_next(1, lambda frame: b"\r\nc " in frame)
        watching = asyncio.create_task(seen.changed(""))
        await until(lambda: bool(far._registers.watched))
        await seen.read()
        await register.write(b"a", "", 60)
        await lost.wait()
        await watching


async def test_waiting_again_after_an_outage_finds_the_change(opened, proxy):
    async def change(register: RedisRegister) -> None:
        """Wait as the writer of a latch does: an error is no end, and what wakes it is looked at."""
        with contextlib.suppress(BackendUnavailable):
            await register.changed("")

    async with opened(proxy.port, timeout=1.5) as far, opened() as writer:
        register, seen = writer.register("d", Family.LATCH), far.register("d", Family.LATCH)
        watching = asyncio.create_task(change(seen))
        await until(lambda: bool(far._registers.watched))
        proxy.refuse = True
        proxy.reset_all()
        with pytest.raises(BackendUnavailable):
            await seen.read()
        await register.write(b"a", "", 60)
        await watching
        with pytest.raises(BackendUnavailable):
            await seen.changed("")
        proxy.refuse = False
        while far._server.connection.generation == 1:
            await change(seen)
        assert (await seen.read()).value == b"a"


async def test_cancelling_a_wait_changes_nothing_and_leaves_nothing(opened):
    async with opened() as backend:
        register = backend.register("d", Family.LATCH)
        for _ in range(3):
            watching = asyncio.create_task(register.changed(""))
            await until(lambda: bool(backend._registers.watched))
            watching.cancel()
            with pytest.raises(asyncio.CancelledError):
                await watching
            assert backend._registers.watched == {}
        assert await register.write(b"a", "", 60)
        await register.aclose()


async def test_waiting_ends_when_the_client_is_closed(opened):
    async with opened() as backend:
        register = backend.register("d", Family.LATCH)
        watching = asyncio.create_task(register.changed(""))
        await until(lambda: bool(backend._registers.watched))
        await backend.aclose()
        await watching
        with pytest.raises(BackendUnavailable, match="closed"):
            await register.changed("")
        await register.aclose()


async def test_a_register_that_is_too_long_is_refused_before_it_is_sent(opened):
    async with opened() as backend:
        register = backend.register("d", Family.LATCH)
        with pytest.raises(ConfigError, match="65536 bytes, this one has 65537"):
            await register.write(b"x" * (MOST_BYTES + 1), "", 60)
        stamp = await register.write(b"x" * MOST_BYTES, "", 60)
        assert await register.read() == (b"x" * MOST_BYTES, stamp)


async def test_somebody_elses_key_is_refused_and_not_overwritten(opened, admin, namespace):
    async with opened() as backend:
        await admin.set(key_of(namespace), "of another program")
        register = backend.register("d", Family.LATCH)
        for call in (register.read(), register.write(b"a", "", 60), register.changed("")):
            with pytest.raises(BackendRefused, match="choose another namespace"):
                await call
        assert await admin.get(key_of(namespace)) == b"of another program"
        await register.aclose()
