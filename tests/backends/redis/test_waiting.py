"""When a process looks after its positions: heartbeats, deadlines, claims, in virtual time with a scripted server."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from aiolock.backends.redis import waiting
from aiolock.backends.redis.waiting import (
    BATCH,
    FEW,
    LIFE,
    LONGEST_WINDOW,
    PERIOD,
    PERIOD_WITHOUT_PUSH,
    SLACK,
    Waiter,
    Wakeups,
)
from aiolock.core.inbox import Inbox, WakeReason
from aiolock.errors import BackendRefused, BackendUnavailable, UnsafeBackend
from tests.simulation import virtual

SOON = 0.001
"""Seconds within which things happen at once."""


class Reasons(Inbox):
    """An inbox that keeps every wake-up."""

    def __init__(self, name: str, reasons: list[WakeReason]) -> None:
        super().__init__(name)
        self.reasons = reasons

    def wake(self, reason: WakeReason, error: BaseException | None = None) -> None:
        del error
        self.reasons.append(reason)


class RecordingWaiter(Waiter):
    """A claim that waits."""

    def __init__(self, key: str = "x", ttl: float = 30.0, *, queued: bool = True) -> None:
        self.reasons: list[WakeReason] = []
        super().__init__(key, id(self), ttl, Reasons(key, self.reasons))
        self.queued = queued

    @property
    def woken(self) -> int:
        return len(self.reasons)


class Server:
    """What heartbeats are sent to: keeps when and what, and answers from a table."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.start = self.loop.time()
        self.heartbeats: list[tuple[float, list[str], list[int], int]] = []
        self.answers: dict[str, list[int]] = {}
        self.error: Exception | None = None
        self.silent = False
        self.gone: set[int] = set()
        """Claims that have no position in any queue."""
        self.asked: list[int] = []
        """How many claims each question about tickets named."""
        self.refuses: Exception | None = None
        """The answer to questions about tickets."""
        self.wakeups = Wakeups(self.heartbeat, self.tickets, clock=self.loop.time, random=Random(1))

    @property
    def now(self) -> float:
        return self.loop.time() - self.start

    @property
    def times(self) -> list[float]:
        return [round(when, 3) for when, *_ in self.heartbeats]

    def heartbeat(
        self, keys: Sequence[str], counts: Sequence[int], life: int, notified: str
    ) -> asyncio.Future[Any]:
        assert (notified[0] == "s") is self.wakeups.pushed
        self.heartbeats.append((self.now, list(keys), list(counts), life))
        reply: asyncio.Future[Any] = self.loop.create_future()
        if self.error is not None:
            reply.set_exception(self.error)
        elif not self.silent:
            reply.set_result([0, *(self.answers.get(key, [0, 0, 0]) for key in keys)])
        return reply

    def tickets(self, key: str, numbers: Sequence[int]) -> asyncio.Future[Any]:
        self.asked.append(len(numbers))
        reply: asyncio.Future[Any] = self.loop.create_future()
        if self.refuses is not None:
            reply.set_exception(self.refuses)
        else:
            reply.set_result([None if number in self.gone else b"7" for number in numbers])
        return reply


def in_virtual_time(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A test on a loop whose time jumps."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def main() -> None:
            server = Server()
            try:
                await test(server, *args, **kwargs)
            finally:
                server.wakeups.close()

        virtual.run(main())

    del run.__wrapped__  # type: ignore[attr-defined]  # pytest would ask for `server` as a fixture
    return run


# --- heartbeats


@in_virtual_time
async def test_after_the_end_nothing_is_sent_whatever_comes_in_late(server):
    server.wakeups.add(RecordingWaiter())
    server.wakeups.close()
    # The answer to an attempt that was under way.
    server.wakeups.add(RecordingWaiter())
    server.wakeups.ends("x", 0.5, first=True)
    server.wakeups.handed_over("x", 1000)
    server.wakeups.now()
    await asyncio.sleep(100)
    assert server.heartbeats == []


@in_virtual_time
async def test_without_places_there_is_no_heartbeat(server):
    server.wakeups.now()
    await asyncio.sleep(100)
    assert server.heartbeats == []


@in_virtual_time
async def test_one_heartbeat_looks_after_all_places(server):
    for key in "xyx":
        server.wakeups.add(RecordingWaiter(key))
    await asyncio.sleep(3 * PERIOD + SOON)
    assert server.times == [PERIOD, 2 * PERIOD, 3 * PERIOD]
    for _, keys, counts, life in server.heartbeats:
        assert dict(zip(keys, counts, strict=True)) == {"x": 2, "y": 1}
        assert life == 3 * PERIOD * 1000


@in_virtual_time
async def test_the_shortest_ttl_sets_the_pace(server):
    server.wakeups.add(RecordingWaiter(ttl=30))
    assert server.wakeups.period == PERIOD
    short = RecordingWaiter("y", ttl=0.9)
    server.wakeups.add(short)
    assert server.wakeups.period == pytest.approx(0.3)
    assert server.wakeups.life_ms == LIFE * 1000
    await asyncio.sleep(0.3 + SOON)
    assert server.times == [0.3]
    # Never faster than whoever only asks.
    server.wakeups.add(RecordingWaiter("z", ttl=0.1))
    assert server.wakeups.period == PERIOD_WITHOUT_PUSH


@in_virtual_time
async def test_the_pace_is_forgotten_when_nobody_waits(server):
    short = RecordingWaiter(ttl=0.9)
    server.wakeups.add(short)
    server.wakeups.remove(short)
    assert server.wakeups.period == PERIOD
    await asyncio.sleep(10)
    assert server.heartbeats == []
    server.wakeups.remove(short)


@in_virtual_time
async def test_without_pushes_it_asks_every_tenth_of_a_second_and_stops_when_they_are_back(server):
    server.wakeups.add(RecordingWaiter())
    server.wakeups.set_pushed(None)
    server.wakeups.now()
    await asyncio.sleep(1.05)
    assert server.times == pytest.approx([n / 10 for n in range(11)], abs=0.002)
    assert server.heartbeats[-1][3] == LIFE * 1000
    server.wakeups.set_pushed(":2")
    server.wakeups.now()
    server.heartbeats.clear()
    await asyncio.sleep(10)
    assert len(server.heartbeats) <= 6


@in_virtual_time
async def test_a_place_whose_attempt_is_under_way_is_not_counted_on(server):
    server.wakeups.add(RecordingWaiter())
    server.wakeups.add(RecordingWaiter(queued=False))
    server.wakeups.now()
    await asyncio.sleep(SOON)
    assert server.heartbeats[0][2] == [1]


@in_virtual_time
async def test_many_locks_are_looked_after_in_batches(server):
    for n in range(2 * BATCH + 1):
        server.wakeups.add(RecordingWaiter(f"x{n}"))
    server.wakeups.now()
    await asyncio.sleep(SOON)
    assert [len(keys) for _, keys, *_ in server.heartbeats] == [BATCH, BATCH, 1]


@in_virtual_time
async def test_a_server_that_is_slower_than_the_heartbeats_is_asked_one_call_at_a_time(server):
    replies: list[tuple[list[str], asyncio.Future[Any]]] = []
    most = 0

    def heartbeat(keys, counts, life, pushed):
        nonlocal most
        reply: asyncio.Future[Any] = server.loop.create_future()
        replies.append((list(keys), reply))
        most = max(most, sum(not other.done() for _, other in replies))
        # As long as three heartbeats.
        server.loop.call_later(6, reply.set_result, [0, *([0, 0, 0] for _ in keys)])
        return reply

    server.wakeups._heartbeat = heartbeat
    for n in range(2 * BATCH):
        server.wakeups.add(RecordingWaiter(f"x{n}"))
    await asyncio.sleep(40)
    # In a round there are two calls, and a pause follows.
    assert most == 1
    assert 4 <= len(replies) <= 7
    assert [len(keys) for keys, _ in replies[:4]] == [BATCH] * 4
    # What is due now goes before the rest of a round.
    server.wakeups.handed_over("urgent", -1)
    await asyncio.sleep(12)
    assert any(keys[0] == "urgent" for keys, _ in replies[-3:])


def _slow(server: Server, seconds: float) -> None:
    """Have each heartbeat answered after so many seconds."""

    def heartbeat(keys: Sequence[str], counts: Sequence[int], life: int, pushed: bool) -> asyncio.Future[Any]:
        server.heartbeats.append((server.now, list(keys), list(counts), life))
        reply: asyncio.Future[Any] = server.loop.create_future()
        server.loop.call_later(
            seconds, reply.set_result, [0, *(server.answers.get(key, [0, 0, 0]) for key in keys)]
        )
        return reply

    server.wakeups._heartbeat = heartbeat


@in_virtual_time
async def test_no_look_that_is_due_is_overtaken_by_later_ones(server):
    _slow(server, 0.2)
    for n in range(30):
        server.wakeups.add(RecordingWaiter(f"x{n}"))
        server.wakeups.ends(f"x{n}", n / 20, first=True)
    await asyncio.sleep(PERIOD - SOON)
    looked = {key: when for when, keys, *_ in server.heartbeats for key in keys}
    # A look waits for the call that is under way and for no other: all that becomes due meanwhile is in the next call.
    late = [looked[f"x{n}"] - n / 20 for n in range(30)]
    assert max(late) <= 0.2 + 0.01
    assert len(server.heartbeats) <= 10


@in_virtual_time
async def test_a_heartbeat_that_is_due_during_a_look_follows_it_at_once(server):
    _slow(server, 0.2)
    for key in "xyz":
        server.wakeups.add(RecordingWaiter(key))
    # Looks that are under way whenever a heartbeat is due.
    for n in range(1, 6):
        server.loop.call_later(n * PERIOD - 0.1, server.wakeups.handed_over, "w", -1)
    await asyncio.sleep(5 * PERIOD + 1)
    rounds = [when for when, keys, *_ in server.heartbeats if {*"xyz"} <= {*keys}]
    assert len(rounds) == 5
    assert all(when - PERIOD * n <= 0.5 for n, when in enumerate(rounds, start=1))


@in_virtual_time
async def test_a_node_of_a_cluster_that_does_not_answer_holds_up_no_heartbeat_of_others(server):
    server.wakeups.batch = 1
    server.silent = True
    for n in range(3):
        server.wakeups.add(RecordingWaiter(f"x{n}"))
    await asyncio.sleep(3 * PERIOD + SOON)
    assert len(server.heartbeats) == 9


async def _crowded(server):
    server.wakeups.batch = 1
    server.wakeups.set_pushed(None)
    for number in range(5):
        server.wakeups.add(RecordingWaiter(str(number)))
    await asyncio.sleep(5 + SOON)
    assert 30 <= len(server.heartbeats) <= 60
    # But often enough that every position stands.
    for number in range(200):
        server.wakeups.add(RecordingWaiter(str(number)))
    await asyncio.sleep(LIFE)
    server.heartbeats.clear()
    await asyncio.sleep(4 * LIFE)
    times = [when for when, [key], *_ in server.heartbeats if key == "7"]
    assert max(after - before for before, after in pairwise(times)) <= LIFE / 2
    assert {life for *_, life in server.heartbeats} == {LIFE * 1000}


def test_so_many_calls_that_nothing_else_had_time_are_not_made(monkeypatch):
    monkeypatch.setattr(waiting, "CALLS", 10)
    in_virtual_time(_crowded)()


@in_virtual_time
async def test_a_heartbeat_that_fails_is_followed_by_the_next(server):
    waiter = RecordingWaiter()
    server.wakeups.add(waiter)
    server.error = BackendUnavailable("gone")
    await asyncio.sleep(2 * PERIOD + SOON)
    server.error = None
    server.answers["x"] = [0, 0, 2]
    await asyncio.sleep(PERIOD)
    assert len(server.heartbeats) == 3
    assert waiter.woken == 1


# --- what is answered


@in_virtual_time
async def test_who_may_have_been_granted_or_lost_its_place_asks_again(server):
    waiters = [RecordingWaiter(), RecordingWaiter(), RecordingWaiter("y")]
    for waiter in waiters:
        server.wakeups.add(waiter)
    server.answers = {"x": [5_000_000, 0, 2], "y": [5_000_000, 0, 0]}
    await asyncio.sleep(PERIOD + SOON)
    assert [waiter.woken for waiter in waiters] == [1, 1, 0]


@in_virtual_time
async def test_a_waiter_is_told_why_it_wakes(server):
    # The first connection is no reason for those that wait later.
    server.wakeups.now()
    waiter = RecordingWaiter()
    server.wakeups.add(waiter)
    server.answers["x"] = [5_000_000, 0, 2]
    await asyncio.sleep(PERIOD + SOON)
    server.wakeups.ends("x", 0.5, first=True)
    await asyncio.sleep(0.6)
    server.wakeups.now()
    await asyncio.sleep(SOON)
    server.wakeups.soon(lambda key: key == "x")
    await asyncio.sleep(SOON)
    server.wakeups.set_pushed(None)
    await asyncio.sleep(PERIOD + SOON)
    server.error = UnsafeBackend("data of another version")
    await asyncio.sleep(PERIOD_WITHOUT_PUSH + SOON)
    reasons = [
        reason for n, reason in enumerate(waiter.reasons) if not n or waiter.reasons[n - 1] is not reason
    ]
    assert reasons == [
        WakeReason.LAPSED,
        WakeReason.EXPIRED,
        WakeReason.RECONNECTED,
        WakeReason.POLL,
        WakeReason.FAILED,
    ]


@in_virtual_time
async def test_of_many_waiters_of_one_lock_only_those_ask_again_whose_places_are_gone(server):
    waiters = [RecordingWaiter() for _ in range(BATCH + FEW)]
    asking, left = RecordingWaiter(queued=False), RecordingWaiter()
    for waiter in (*waiters, asking, left):
        server.wakeups.add(waiter)
    server.gone = {waiters[3].number, waiters[-1].number, asking.number, left.number}
    server.answers["x"] = [5_000_000, 0, 2]
    server.wakeups.now()
    await asyncio.sleep(0)
    server.wakeups.remove(left)
    await asyncio.sleep(SOON)
    assert sum(server.asked) == len(waiters)
    assert max(server.asked) <= BATCH
    assert [waiter for waiter in waiters if waiter.woken] == [waiters[3], waiters[-1]]
    assert asking.woken == left.woken == 0


@pytest.mark.parametrize("error", [BackendRefused("WRONGTYPE"), BackendUnavailable("gone")])
def test_many_waiters_of_a_broken_key_ask_again_and_those_of_a_broken_connection_wait(error):
    async def test(server):
        waiters = [RecordingWaiter() for _ in range(2 * FEW)]
        for waiter in waiters:
            server.wakeups.add(waiter)
        server.answers["x"] = [0, 0, 2]
        server.refuses = error
        server.wakeups.now()
        await asyncio.sleep(SOON)
        assert {waiter.woken for waiter in waiters} == {int(isinstance(error, BackendRefused))}

    in_virtual_time(test)()


@in_virtual_time
async def test_the_first_in_line_looks_when_the_hold_ends_and_the_others_a_little_later(server):
    server.wakeups.add(RecordingWaiter("x"))
    server.wakeups.add(RecordingWaiter("y"))
    server.wakeups.ends("x", 0.5, first=True)
    server.wakeups.ends("y", 0.5, first=False)
    await asyncio.sleep(0.5 + 0.1)
    (first, keys, *_), (second, others, *_) = server.heartbeats
    assert (keys, others) == (["x"], ["y"])
    assert 0.5 < first < 0.51
    assert 0.52 <= second <= 0.581


@in_virtual_time
async def test_every_answer_moves_the_next_look(server):
    server.wakeups.add(RecordingWaiter())
    server.wakeups.ends("x", 1.0, first=True)
    # The holder has renewed meanwhile.
    server.answers["x"] = [500_000, 0, 1]
    await asyncio.sleep(1.9)
    assert server.times == pytest.approx([1.002, 1.504], abs=0.002)
    # So has the heartbeat.
    await asyncio.sleep(0.7)
    assert server.times[2:] == pytest.approx([2.0, 2.502], abs=0.002)


@in_virtual_time
async def test_whoever_hands_on_looks_whether_the_claim_was_taken_although_it_does_not_wait(server):
    server.wakeups.handed_over("x", 1000)
    await asyncio.sleep(5)
    assert server.times == [1.002]
    assert server.heartbeats[0][1:3] == (["x"], [0])


@in_virtual_time
async def test_a_claim_given_by_a_heartbeat_is_looked_after_as_well(server):
    server.wakeups.handed_over("x", -1)
    server.answers["x"] = [0, 1500, 0]
    await asyncio.sleep(SOON * 3)
    server.answers["x"] = [0, 0, 0]
    await asyncio.sleep(5)
    assert server.times == pytest.approx([0.002, 1.504], abs=0.002)


@in_virtual_time
async def test_an_answer_that_says_to_go_on_is_followed_at_once(server):
    server.wakeups.handed_over("x", -1)
    server.answers["x"] = [0, -1, 0]
    await asyncio.sleep(0.003)
    server.answers["x"] = [0, 0, 0]
    await asyncio.sleep(1)
    assert server.times == pytest.approx([0.002, 0.004], abs=0.001)


@in_virtual_time
async def test_only_those_of_which_something_may_have_been_missed_are_looked_at(server):
    for key in "xyz":
        server.wakeups.add(RecordingWaiter(key))
    server.wakeups.soon(lambda key: key in {"y", "z", "nobody waits for it"})
    await asyncio.sleep(SOON)
    assert [keys for _, keys, *_ in server.heartbeats] == [["y", "z"]]
    await asyncio.sleep(PERIOD)
    assert server.times == [0.0, PERIOD]


@in_virtual_time
async def test_an_earlier_look_is_not_put_off_by_a_claim_nor_made_twice(server):
    server.wakeups.handed_over("x", 500)
    server.wakeups.handed_over("x", 3000)
    server.wakeups.handed_over("x", 200)
    await asyncio.sleep(5)
    assert server.times == [0.202]


@in_virtual_time
async def test_looks_that_were_moved_do_not_pile_up(server):
    # One that comes earlier than all of them, and so keeps them from being looked at.
    server.wakeups.handed_over("z", 1000)
    for n in range(50 * SLACK):
        server.wakeups.ends("x", 1e6 + n, first=True)
        server.wakeups.ends(f"y{n % 10}", 1e6 + n, first=True)
    assert len(server.wakeups._agenda) <= 2 * 12 + SLACK
    assert server.wakeups._ends.keys() == {"z", "x", *(f"y{n}" for n in range(10))}
    await asyncio.sleep(2)
    assert server.times == [1.002]


@in_virtual_time
async def test_locks_that_were_waited_for_once_leave_nothing_behind(server):
    for n in range(20 * SLACK):
        waiter = RecordingWaiter(f"x{n}", ttl=86_400)
        server.wakeups.add(waiter)
        server.wakeups.ends(waiter.key, 86_400, first=True)
        server.wakeups.remove(waiter)
        # The lock is handed on to a waiter of another process, whose provisional grant stands for a tenth of its ttl.
        server.wakeups.handed_over(waiter.key, 8_640_000)
    assert not server.wakeups._ends
    assert len(server.wakeups._agenda) <= SLACK
    await asyncio.sleep(10)
    assert server.heartbeats == []


@in_virtual_time
async def test_a_look_at_a_lock_that_was_handed_on_is_made_although_its_waiter_left(server):
    server.wakeups.handed_over("x", round(LONGEST_WINDOW * 1000))
    waiter = RecordingWaiter()
    server.wakeups.add(waiter)
    server.wakeups.remove(waiter)
    await asyncio.sleep(2 * LONGEST_WINDOW)
    assert server.times == [LONGEST_WINDOW + 0.002]


@in_virtual_time
async def test_the_pace_is_that_of_the_shortest_ttl_that_waits_now(server):
    short, shorter, long = RecordingWaiter(ttl=0.9), RecordingWaiter(ttl=0.3), RecordingWaiter(ttl=30)
    for waiter in (long, short, shorter, shorter):
        server.wakeups.add(waiter)
    assert server.wakeups.period == PERIOD_WITHOUT_PUSH
    server.wakeups.remove(shorter)
    assert server.wakeups.period == pytest.approx(0.3)
    server.wakeups.remove(short)
    assert server.wakeups.period == PERIOD


@in_virtual_time
async def test_adding_a_waiter_takes_no_longer_when_there_are_many(server):
    class Counted(RecordingWaiter):
        looks = 0

        @property
        def ttl(self):
            Counted.looks += 1
            return 0.1

        @ttl.setter
        def ttl(self, ttl):
            pass

    for n in range(500):
        server.wakeups.add(Counted(f"x{n}"))
    assert Counted.looks <= 5 * 500


@in_virtual_time
async def test_after_closing_nothing_is_sent(server):
    server.wakeups.add(RecordingWaiter())
    server.wakeups.handed_over("x", 500)
    server.wakeups.close()
    await asyncio.sleep(10)
    assert server.heartbeats == []


@in_virtual_time
async def test_what_is_opened_again_sends_heartbeats_again(server):
    server.wakeups.add(RecordingWaiter())
    server.wakeups.close()
    server.wakeups.open()
    server.wakeups.add(RecordingWaiter())
    await asyncio.sleep(PERIOD + SOON)
    assert server.times == [PERIOD]


@in_virtual_time
async def test_an_answer_that_comes_when_nobody_waits_any_more_is_no_trouble(server):
    waiter = RecordingWaiter()
    server.wakeups.add(waiter)
    server.answers["x"] = [1_000_000, 0, 2]
    server.wakeups.now()
    server.wakeups.remove(waiter)
    await asyncio.sleep(5)
    assert waiter.woken == 0
