"""Requests beyond a limit wait in order for as long as the server answers, and none is counted twice or forgotten."""

from __future__ import annotations

import asyncio

import pytest

from aiolock import BackendRefused, BackendUnavailable
from aiolock.core.limiter import Limiter

TIMEOUT = 1.0


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Requests:
    """What is admitted, under way until it is told to end."""

    def __init__(self, clock: Clock) -> None:
        self.limiter = Limiter(2, clock, TIMEOUT)
        self.ends: dict[int, asyncio.Future[int]] = {}
        self.order: list[int] = []

    async def _request(self, number: int) -> int:
        if self.limiter.room:
            self.limiter.room -= 1
        else:
            await self.limiter.admission()
        self.order.append(number)
        self.ends[number] = asyncio.get_running_loop().create_future()
        try:
            answer = await self.ends[number]
        except BaseException as error:
            self.limiter.failed(error)
            raise
        self.limiter.answered()
        return answer

    async def begin(self, *numbers: int) -> list[asyncio.Task[int]]:
        tasks = [asyncio.create_task(self._request(number)) for number in numbers]
        await passes()
        return tasks

    async def answer(self, number: int) -> None:
        self.ends[number].set_result(number)
        await passes()

    async def fail(self, number: int, error: Exception) -> None:
        self.ends[number].set_exception(error)
        await passes()


async def passes() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def requests(clock) -> Requests:
    """Those of a limiter that admits two."""
    return Requests(clock)


async def test_two_are_under_way_and_the_others_follow_in_order(requests):
    tasks = await requests.begin(*range(5))
    assert requests.order == [0, 1]
    for number in range(5):
        await requests.answer(number)
    assert requests.order == [0, 1, 2, 3, 4]
    assert await asyncio.gather(*tasks) == [0, 1, 2, 3, 4]
    assert requests.limiter.room == 2


async def test_a_request_that_is_cancelled_gives_its_admission_to_the_next(requests):
    tasks = await requests.begin(*range(6))
    tasks[0].cancel()
    tasks[2].cancel()
    await passes()
    assert requests.order == [0, 1, 3]
    requests.ends[1].set_result(1)
    # The next one is admitted and cancelled in the same step.
    await asyncio.sleep(0)
    tasks[4].cancel()
    await passes()
    assert requests.order == [0, 1, 3, 5]
    await requests.answer(3)
    await requests.answer(5)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    gone = asyncio.CancelledError
    assert [one if isinstance(one, int) else type(one) for one in results] == [gone, 1, gone, 3, gone, 5]
    assert requests.limiter.room == 2
    assert not requests.limiter._queue


async def test_a_request_that_times_out_in_the_gate_starts_nothing(requests):
    tasks = await requests.begin(0, 1)

    async def impatient() -> None:
        async with asyncio.timeout(0.01):
            await requests._request(2)

    with pytest.raises(TimeoutError):
        await impatient()
    assert requests.order == [0, 1]
    assert not requests.limiter._queue
    await requests.answer(0)
    await requests.answer(1)
    await asyncio.gather(*tasks)
    assert requests.limiter.room == 2


async def test_a_silent_server_refuses_the_requests_that_have_waited_for_a_command_timeout(requests, clock):
    tasks = await requests.begin(0, 1, 2, 3)
    clock.now += TIMEOUT / 2
    late = await requests.begin(4, 5)
    clock.now += TIMEOUT / 2
    await requests.fail(0, BackendUnavailable("no answer"))
    assert [task.done() for task in (*tasks, *late)] == [True, False, True, True, False, False]
    for task in tasks[2:]:
        with pytest.raises(BackendUnavailable, match="no answer"):
            task.result()
    assert tasks[2].exception() is not tasks[0].exception()
    # The others still have their time.
    assert requests.order == [0, 1, 4]
    for number in (1, 4, 5):
        await requests.answer(number)
    assert await asyncio.gather(tasks[1], *late) == [1, 4, 5]
    assert requests.limiter.room == 2


@pytest.mark.parametrize(
    "error",
    [
        BackendUnavailable("refused at once"),
        BackendUnavailable("for good", retryable=False),
        BackendRefused("no"),
        RuntimeError("closed"),
    ],
    ids=repr,
)
async def test_a_failure_of_one_request_is_none_of_the_others_while_the_server_answers(
    requests, clock, error
):
    tasks = await requests.begin(*range(5))
    clock.now += 0.8 * TIMEOUT
    await requests.answer(0)
    clock.now += 0.8 * TIMEOUT
    # All others have waited for longer than a command timeout by now.
    await requests.fail(1, error)
    assert requests.order == [0, 1, 2, 3]
    for number in (2, 3, 4):
        await requests.answer(number)
    assert await asyncio.gather(*tasks[2:]) == [2, 3, 4]
    assert type(tasks[1].exception()) is type(error)
    assert requests.limiter.room == 2


async def test_only_an_unavailable_server_is_silent(requests, clock):
    tasks = await requests.begin(*range(4))
    clock.now += 2 * TIMEOUT
    await requests.fail(0, BackendRefused("this lock alone"))
    tasks[1].cancel()
    await passes()
    assert requests.order == [0, 1, 2, 3]
    await requests.answer(2)
    await requests.answer(3)
    assert await asyncio.gather(*tasks[2:]) == [2, 3]
    assert isinstance(tasks[0].exception(), BackendRefused)
