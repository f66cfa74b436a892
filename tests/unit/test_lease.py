"""A lease by itself: what it says by the clock, and the arithmetic of cancelling a task for its loss."""

from __future__ import annotations

import asyncio
import contextlib
from random import Random
from types import SimpleNamespace

import pytest

import aiolock
from aiolock.backends.memory.backend import MemoryClaim
from aiolock.core.backend import Claim, Grant, Request
from aiolock.core.cancellation import CancelScope
from aiolock.core.hold import Hold
from aiolock.core.renewal import Validity
from aiolock.core.runtime import Runtime, State
from aiolock.errors import BackendUnavailable, ConfigError, LockLost, UnsupportedKind
from aiolock.lease import Lease
from aiolock.types import MUTEX

LOST = LockLost("x", "expired")


class Recorded(Claim):
    """A claim that writes down its releases."""

    def __init__(self) -> None:
        super().__init__(Request("x", MUTEX, 10.0, "test"))
        self.released: list[float] = []

    async def acquire(self, wait): ...

    async def release(self, keep: float = 0) -> None:
        self.released.append(keep)


class Home:
    """Where the lease of a test comes from: a runtime that has a clock, and no server."""

    def __init__(self) -> None:
        self.now = 0.0
        self.left: list[tuple[Hold, float]] = []
        backend = SimpleNamespace(name="none", capabilities={"keep"}, concurrency=1)
        self.runtime = Runtime(
            backend,
            clock=lambda: self.now,
            random=Random(1),
            command_timeout=1.0,
            label="test",
            caller="host:1",
        )
        self.runtime.state = State.OPEN
        self.runtime.loop = asyncio.get_running_loop()
        self.claim = Recorded()
        self.hold = Hold(
            self, Validity(self.claim, Grant(7, 1, 8.0, demand=False), 0.0, self.report), "cancel", 7
        )
        self.lease = Lease(self.hold)

    @property
    def kind(self):
        return self.claim.request.kind

    def leave(self, hold, keep=0):
        self.left.append((hold, keep))
        return self.claim

    def report(self, event):
        self.hold.lose(event.reason)


@pytest.fixture
async def home() -> Home:
    return Home()


async def in_a_task(work) -> None:
    await asyncio.create_task(work())


# --- by the clock


async def test_a_lease_is_held_exactly_until_its_term_ends(home):
    for now, remaining in [(0.0, 8.0), (3.5, 4.5), (7.999, 8.0 - 7.999)]:
        home.now = now
        assert home.lease.remaining() == remaining
        assert home.lease.held
        assert not home.lease.lost
        home.lease.check()
    for now in (8.0, 9.0, 1e9):
        home.now = now
        assert home.lease.remaining() == 0.0
        assert not home.lease.held
        assert home.lease.lost
        with pytest.raises(LockLost, match="expired"):
            home.lease.check()


async def test_a_verdict_counts_at_once_whatever_the_clock_says(home):
    home.hold.lose("revoked")
    assert not home.lease.held
    assert home.lease.lost
    assert home.lease.remaining() == 0.0
    with pytest.raises(LockLost, match="revoked"):
        home.lease.check()


async def test_the_first_reason_stands(home):
    home.hold.lose("max_hold")
    home.hold.lose("expired")
    assert await home.lease.wait_lost() == "max_hold"


async def test_what_was_released_is_not_lost_any_more(home):
    await home.lease.release()
    home.hold.lose("expired")
    home.now = 1e9
    assert not home.lease.lost
    assert await home.lease.wait_lost() is None
    with pytest.raises(RuntimeError, match="released"):
        home.lease.check()


async def test_what_was_lost_stays_lost_after_its_release(home):
    home.hold.lose("expired")
    await home.lease.release()
    assert home.lease.lost
    with pytest.raises(LockLost):
        home.lease.check()


async def test_the_hold_is_given_back_once(home):
    await home.lease.release()
    await home.lease.release()
    home.hold.abandon()
    assert home.left == [(home.hold, 0)]
    assert home.claim.released == [0]


async def test_keep_goes_to_the_server(home):
    await home.lease.release(keep=3)
    assert home.left == [(home.hold, 3.0)]
    assert home.claim.released == [3.0]


@pytest.mark.parametrize("keep", [-1, float("nan"), float("inf"), "1", True])
async def test_a_keep_that_cannot_be_meant_is_refused_and_nothing_is_released(home, keep):
    with pytest.raises(ConfigError, match="keep"):
        await home.lease.release(keep=keep)
    assert home.left == []


async def test_keep_is_refused_where_there_is_none_and_nothing_is_released(home):
    home.runtime.backend.capabilities = set()
    with pytest.raises(UnsupportedKind):
        await home.lease.release(keep=1)
    assert home.left == []
    assert home.lease.held


async def test_the_repr_says_how_it_stands(home):
    assert repr(home.lease) == "<Lease 'x' mutex token=7 8.000 s>"
    await home.lease.release()
    assert repr(home.lease) == "<Lease 'x' mutex token=7 released>"
    other = Home()
    other.hold.lose("revoked")
    assert repr(other.lease) == "<Lease 'x' mutex token=7 lost (revoked)>"


# --- leaving a block


async def test_a_term_that_ended_unnoticed_is_ended_at_the_end_of_the_block(home):
    home.runtime.scheduler.add(home.hold.validity)
    home.hold.enter(asyncio.current_task(), cancel=True)
    home.now = 9.0
    with pytest.raises(LockLost, match="expired"):
        await home.hold.leave(asyncio.current_task(), None)
    assert home.hold.validity.over
    assert len(home.runtime.scheduler) == 0
    assert asyncio.current_task().cancelling() == 0


async def test_another_level_is_lost_with_the_first_and_has_its_token(home):
    level = home.hold.level(home)
    assert level.token == home.hold.token
    home.hold.lose("revoked")
    assert level.lost()
    assert await Lease(level).wait_lost() == "revoked"


# --- the arithmetic of a cancel scope


async def resolve(error, *, fired: bool, outer: int, before: int = 0) -> tuple[object, int]:
    """What a block that ends with `error` raises, and the task's count, after `outer` cancellations from outside."""
    result: list = []

    async def work() -> None:
        task = asyncio.current_task()
        for _ in range(before):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
        scope = CancelScope(task)
        scope.depth = 1
        for _ in range(outer):
            task.cancel()
        if fired:
            scope.cancel()
            scope.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        scope.depth = 0
        result.extend([scope.resolve(error, LOST), task.cancelling()])

    await in_a_task(work)
    return result[0], result[1]


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize(
    ("error", "fired", "outer", "raised"),
    [
        (None, False, 0, LOST),
        (None, True, 0, LOST),
        (asyncio.CancelledError(), True, 0, LOST),
        (asyncio.CancelledError(), False, 1, None),
        (asyncio.CancelledError(), True, 1, None),
        (asyncio.CancelledError(), True, 2, None),
        (ValueError("of the block"), False, 0, None),
        (ValueError("of the block"), True, 0, None),
        (ValueError("of the block"), True, 1, None),
        (LockLost("x", "revoked"), True, 0, None),
    ],
)
async def test_a_loss_is_raised_unless_something_else_wins(error, fired, outer, raised, before):
    verdict, count = await resolve(error, fired=fired, outer=outer, before=before)
    assert verdict is raised
    # Our own cancellation is taken back, those of others are left.
    assert count == before + outer


async def test_the_loss_is_a_note_on_what_wins_but_not_on_itself():
    error, own = ValueError("of the block"), LockLost("x", "revoked")
    await resolve(error, fired=True, outer=0)
    await resolve(own, fired=True, outer=0)
    assert error.__notes__ == [str(LOST)]
    assert not hasattr(own, "__notes__")


async def test_a_scope_that_was_left_cancels_nothing():
    async def work() -> None:
        scope = CancelScope(asyncio.current_task())
        scope.cancel()
        await asyncio.sleep(0)
        assert not scope.cancelled

    await in_a_task(work)


async def test_a_shared_scope_takes_its_cancellation_back_once():
    async def work() -> None:
        task = asyncio.current_task()
        scope = CancelScope(task)
        scope.depth = 2
        scope.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await asyncio.sleep(0)
        assert scope.resolve(caught.value, LOST) is LOST
        assert scope.resolve(None, LOST) is LOST
        assert task.cancelling() == 0

    await in_a_task(work)


async def test_a_request_to_extend_that_is_not_answered_does_not_watch_a_hold_that_was_released(monkeypatch):
    async def unanswered(self: MemoryClaim, seconds: float, number: int) -> Grant:
        raise BackendUnavailable("no answer")

    monkeypatch.setattr(MemoryClaim, "extend", unanswered)
    async with aiolock.connect("memory://") as client:
        lease = await client.lock("x", ttl=5, renew=False).acquire()
        extending = asyncio.create_task(lease.extend(1))
        await asyncio.sleep(0)
        await lease.release()
        with pytest.raises(RuntimeError, match="was released"):
            await extending
        assert not len(client._runtime.scheduler)
