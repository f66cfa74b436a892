"""A reply wakes its task at once, and nothing else about futures changes: order, context, cancellation, errors."""

from __future__ import annotations

import asyncio
import contextvars
import math
import socket

import pytest

from aiolock.core.wakeup import _expected, _first, answer, expect, read_little, wake

WORD: contextvars.ContextVar[str] = contextvars.ContextVar("word", default="none")


def deliver(*replies: tuple[asyncio.Future[str], str]) -> None:
    """As a connection does it, outside of any task."""
    wakings = [waking for future, reply in replies if (waking := answer(future, reply)) is not None]
    if wakings:
        wake(wakings)


async def passes(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def outside(*replies: tuple[asyncio.Future[str], str]) -> None:
    """Deliver in a callback of the loop, and come back when that has run."""
    asyncio.get_running_loop().call_soon(deliver, *replies)
    await passes()


async def test_a_task_goes_on_before_the_callback_that_read_its_reply_ends():
    loop = asyncio.get_running_loop()
    story: list[str] = []

    async def caller(future: asyncio.Future[str], name: str) -> None:
        story.append(f"{name} got {await future}")

    futures = [loop.create_future() for _ in range(2)]
    tasks = [asyncio.create_task(caller(future, name)) for future, name in zip(futures, "ab", strict=True)]
    await passes()

    def read() -> None:
        deliver((futures[0], "1"), (futures[1], "2"))
        story.append("read")

    loop.call_soon(read)
    await asyncio.gather(*tasks)
    assert story == ["a got 1", "b got 2", "read"]


async def test_a_task_keeps_its_context_and_its_name():
    future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    seen: list[object] = []

    async def caller() -> None:
        WORD.set("mine")
        await future
        seen.append((WORD.get(), asyncio.current_task()))

    task = asyncio.create_task(caller())
    await passes()
    await outside((future, "x"))
    assert seen == [("mine", task)]
    assert WORD.get() == "none"


async def test_no_task_begins_inside_of_another():
    future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    story: list[str] = []

    async def caller() -> None:
        await future
        story.append("caller")

    task = asyncio.create_task(caller())
    await passes()
    deliver((future, "x"))
    story.append("deliverer")
    await task
    assert story == ["deliverer", "caller"]


async def test_who_asks_twice_or_not_yet_is_served_by_the_loop():
    loop = asyncio.get_running_loop()
    shared, early = loop.create_future(), loop.create_future()

    async def caller(future: asyncio.Future[str]) -> str:
        return await future

    tasks = [asyncio.create_task(caller(shared)) for _ in range(3)]
    await passes()
    await outside((shared, "all"), (early, "early"))
    assert await asyncio.gather(*tasks) == ["all"] * 3
    assert await caller(early) == "early"


async def test_plain_callbacks_run_in_a_later_pass():
    loop = asyncio.get_running_loop()
    future: asyncio.Future[str] = loop.create_future()
    story: list[str] = []
    future.add_done_callback(lambda _: story.append("called"))

    def read() -> None:
        deliver((future, "x"))
        story.append("read")

    loop.call_soon(read)
    await passes()
    assert story == ["read", "called"]


async def test_a_task_that_is_cancelled_first_stays_cancelled():
    future: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def caller() -> str:
        return await future

    task = asyncio.create_task(caller())
    await passes()
    task.cancel()
    assert future.done(), "a connection drops the reply to what is done"
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_what_ends_a_program_ends_it_after_the_others_had_their_replies(error):
    story: list[str] = []
    tasks: list[asyncio.Task[None]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        first, second = loop.create_future(), loop.create_future()

        async def ends() -> None:
            await first
            raise error("over")

        async def goes_on() -> None:
            story.append(await second)

        tasks.extend((asyncio.create_task(ends()), asyncio.create_task(goes_on())))
        await passes()
        loop.call_soon(deliver, (first, "1"), (second, "2"))
        await asyncio.wait(tasks)
        await passes()
        story.append("and on")

    loop = asyncio.new_event_loop()
    task = loop.create_task(main())
    with pytest.raises(error):
        loop.run_until_complete(task)
    assert story == ["2"]
    assert isinstance(tasks[0].exception(), error)
    loop.run_until_complete(task)
    assert story == ["2", "and on"]
    loop.close()


async def test_a_connection_reads_no_more_at_a_time_than_answers_are_long():
    """What this relies on is no promise of asyncio's; if it goes, reads cost several times as much again."""
    near, far = socket.socketpair()
    sizes: list[int] = []

    class Watched(asyncio.Protocol):
        def connection_made(self, transport):
            read_little(transport)

        def data_received(self, data):
            sizes.append(len(data))

    transport, _ = await asyncio.get_running_loop().create_connection(Watched, sock=near)
    try:
        far.setblocking(False)
        far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        sent = far.send(bytes(1 << 18))
        async with asyncio.timeout(10):
            while sum(sizes) < sent:  # noqa: ASYNC110 - another socket's state
                await asyncio.sleep(0.001)
        assert sent > 65536
        assert max(sizes) <= 65536
    finally:
        transport.abort()
        far.close()


def test_other_transports_have_other_ways():
    read_little(object())


@pytest.mark.parametrize("stopped", [True, False])
async def test_no_task_goes_on_at_once_while_a_timer_is_overdue(stopped):
    loop = asyncio.get_running_loop()
    story: list[str] = []
    now = 100.0
    near, far = object(), object()

    async def caller(future: asyncio.Future[str]) -> None:
        story.append(await future)

    async def ask(reply: str) -> None:
        future: asyncio.Future[str] = loop.create_future()
        task = asyncio.create_task(caller(future))
        await passes()

        def read() -> None:
            deliver((future, reply))
            story.append("read")

        loop.call_soon(read)
        await task
        await passes()

    expect(loop, far, 300.0, lambda: now)
    expect(loop, near, 200.0, lambda: now)
    try:
        now = 250.0 if stopped else 199.0
        await ask("first")
        # Its timer was called, that of the other is not due.
        expect(loop, near, math.inf, lambda: now)
        await ask("second")
        expect(loop, far, math.inf, lambda: now)
        now = 1000.0
        await ask("third")
    finally:
        for owner in (near, far):
            expect(loop, owner, math.inf, lambda: now)
    first = ["read", "first"] if stopped else ["first", "read"]
    assert story == [*first, "second", "read", "third", "read"]


def test_nothing_is_kept_of_timers_that_were_called_and_of_loops_that_are_closed():
    before = dict(_expected)
    closed, loop = asyncio.new_event_loop(), asyncio.new_event_loop()
    owner = object()
    expect(closed, owner, 1.0, float)
    closed.close()
    expect(loop, owner, 1.0, float)
    assert closed not in _expected
    assert closed not in _first
    assert loop in _first
    expect(loop, owner, math.inf, float)
    loop.close()
    assert loop not in _expected
    assert loop not in _first
    assert set(_expected) <= set(before)
