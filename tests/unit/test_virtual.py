"""The virtual loop itself: time jumps, deadlocks are named, and hosts stop and sleep as processes and machines do."""

from __future__ import annotations

import asyncio
import selectors
import threading
import time

import pytest

from tests.simulation import virtual
from tests.simulation.virtual import Deadlock, Host, VirtualClock


def test_an_hour_passes_without_waiting():
    async def main():
        loop = asyncio.get_running_loop()
        start = loop.time()
        await asyncio.gather(*(asyncio.sleep(3600 - n) for n in range(100)))
        return loop.time() - start

    real = time.monotonic()
    assert virtual.run(main()) == pytest.approx(3600)
    assert time.monotonic() - real < 30


def test_timers_fire_in_their_order_and_at_their_time():
    async def main():
        seen = []
        loop = asyncio.get_running_loop()
        start = loop.time()
        for delay in (3.0, 1.0, 2.0, 1.0):
            loop.call_later(delay, lambda delay=delay: seen.append((delay, loop.time() - start)))
        await asyncio.sleep(10)
        return seen

    assert virtual.run(main()) == [(delay, pytest.approx(delay)) for delay in (1.0, 1.0, 2.0, 3.0)]


def test_timeouts_and_cancellation_work_as_on_a_real_loop():
    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        task = asyncio.create_task(asyncio.sleep(1e6))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    virtual.run(main())


def test_a_deadlock_is_an_error_that_says_who_waits_where():
    async def wait_for_nobody():
        await asyncio.Event().wait()

    async def main():
        task = asyncio.create_task(wait_for_nobody(), name="the forgotten one")
        await task

    with pytest.raises(Deadlock, match=r"the forgotten one at .*test_virtual\.py:\d+"):
        virtual.run(main())


@pytest.mark.parametrize("timer", [None, 3600])
def test_other_threads_may_wake_the_loop(monkeypatch, timer):
    """One that does so as the loop begins to wait: neither a deadlock, nor time that passes."""
    select = selectors.DefaultSelector.select

    async def main():
        loop = asyncio.get_running_loop()
        woken, start = loop.create_future(), loop.time()
        thread = threading.Thread(target=loop.call_soon_threadsafe, args=(woken.set_result, "hello"))

        def wake_then_select(selector, timeout=None):
            if thread.ident is None:
                thread.start()
                thread.join()
            return select(selector, timeout)

        monkeypatch.setattr(selectors.DefaultSelector, "select", wake_then_select)
        async with asyncio.timeout(timer):
            word = await woken
        return word, loop.time() - start

    assert virtual.run(main()) == ("hello", pytest.approx(0, abs=1))


def test_the_clock_follows_the_loop_at_its_rate_and_jumps_when_suspended():
    async def main():
        clock, fast = VirtualClock(offset=500), VirtualClock(rate=1.01)
        start = clock(), fast()
        await asyncio.sleep(10)
        assert clock() - start[0] == pytest.approx(10)
        assert fast() - start[1] == pytest.approx(10.1)
        clock.suspend(60)
        assert clock() - start[0] == pytest.approx(70)

    virtual.run(main())


async def ticks(seen: list[float]):
    loop = asyncio.get_running_loop()
    for _ in range(4):
        await asyncio.sleep(1)
        seen.append(loop.now)


def test_a_stopped_host_does_nothing_and_overdue_timers_fire_on_waking():
    async def main():
        mine, theirs = [], []
        host = Host("a")
        start = asyncio.get_running_loop().time()
        task = host.run(ticks(mine))
        other = asyncio.create_task(ticks(theirs))
        await asyncio.sleep(1.5)
        host.stop()
        await asyncio.sleep(10)
        assert len(mine) == 1
        assert len(theirs) == 4
        host.resume()
        await asyncio.gather(task, other)
        assert [moment - start for moment in mine] == pytest.approx([1, 11.5, 12.5, 13.5], abs=0.001)
        assert host.away == pytest.approx(10)

    virtual.run(main())


def test_on_a_suspended_host_timers_stand_still():
    async def main():
        mine = []
        host = Host("a")
        clock = VirtualClock()
        start = clock()
        task = host.run(ticks(mine))
        await asyncio.sleep(1.5)
        host.stop()
        await asyncio.sleep(10)
        host.resume(suspended=True)
        await task
        assert [moment - start for moment in mine] == pytest.approx([1, 12, 13, 14], abs=0.001)
        assert clock() - start == pytest.approx(14)
        assert host.context.run(asyncio.get_running_loop().time) == pytest.approx(start + 4)

    virtual.run(main())


def test_what_reaches_a_stopped_host_is_there_when_it_wakes():
    async def main():
        host = Host("a")
        loop = asyncio.get_running_loop()
        letter = loop.create_future()
        read_at = []

        async def read():
            await letter
            read_at.append(loop.now)

        start = loop.now
        task = host.run(read())
        await asyncio.sleep(1)
        host.stop()
        await asyncio.sleep(1)
        letter.set_result(None)
        await asyncio.sleep(5)
        assert not read_at
        host.resume()
        await task
        assert read_at == [pytest.approx(start + 7)]

    virtual.run(main())


def test_a_timer_that_was_cancelled_stays_silent_after_a_stop():
    async def main():
        host = Host("a")
        loop = asyncio.get_running_loop()
        seen = []
        timer = loop.call_later(1, seen.append, 1, context=host.context.copy())
        host.stop()
        await asyncio.sleep(2)
        timer.cancel()
        host.resume(suspended=True)
        await asyncio.sleep(10)
        assert not seen

    virtual.run(main())
