"""Waiting in this process: one claim for many tasks, hand-overs, and what becomes of a claim when things go wrong."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from random import Random

import pytest

from aiolock.core.backend import Backend, Claim, Grant, Request, margin
from aiolock.core.hold import LeaseOptions
from aiolock.core.inbox import WakeReason
from aiolock.core.local_queue import LONGEST_HANDING_OVER, MOST_HAND_OVERS, Waiters, ask, may_hand_over
from aiolock.core.runtime import Runtime, State
from aiolock.errors import BackendError, BackendRefused, BackendUnavailable
from aiolock.lease import Lease
from aiolock.types import MUTEX

REQUEST = Request("x", MUTEX, ttl=10.0, label="test")
OPTIONS = LeaseOptions(None, "signal")


def grant(token: int, until: float = 10.0, *, count: int = 1024, demand: bool = False) -> Grant:
    return Grant(token, count, until, demand)


class Script(Claim):
    """A claim that answers from its backend's script, and writes down what was asked of it."""

    def __init__(self, request: Request, backend: ScriptedBackend) -> None:
        super().__init__(request)
        self.backend = backend
        self.number = len(backend.claims)
        self.calls: list[str] = []

    async def acquire(self, wait: bool) -> Grant | None:
        self.calls.append("acquire" if wait else "try")
        answer = self.backend.answers.popleft()
        if isinstance(answer, asyncio.Future):
            answer = await answer
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def release(self, keep: float = 0) -> None:
        self.calls.append(f"release {keep:g}" if keep else "release")
        if self.backend.release_errors:
            raise self.backend.release_errors.popleft()


class ScriptedBackend(Backend):
    name = "scripted"

    def __init__(self, *answers) -> None:
        self.answers = deque(answers)
        self.release_errors: deque[Exception] = deque()
        self.claims: list[Script] = []

    async def open(self) -> None: ...
    async def aclose(self) -> None: ...
    async def renew(self, claims): ...
    async def inspect(self, name, family): ...
    async def force_release(self, name, family): ...

    def claim(self, request: Request) -> Script:
        self.claims.append(Script(request, self))
        return self.claims[-1]


class Stage:
    """A runtime over a script, with a clock that stands until it is set."""

    def __init__(self, *answers) -> None:
        self.now = 0.0
        self.backend = ScriptedBackend(*answers)
        self.runtime = Runtime(
            self.backend,
            clock=lambda: self.now,
            random=Random(1),
            command_timeout=5.0,
            label="test",
            caller="host:1",
        )
        self.runtime.state = State.OPEN
        self.runtime.loop = asyncio.get_running_loop()

    async def ask(self, timeout: float | None = None, request: Request = REQUEST):
        hold = await ask(self.runtime, request, OPTIONS, timeout)
        return None if hold is None else Lease(hold)

    def asking(self, timeout: float | None = None) -> asyncio.Task:
        return asyncio.create_task(self.ask(timeout))

    def change(self) -> None:
        """Have the server announce a change."""
        self.backend.claims[-1].inbox.wake(WakeReason.NOTIFIED)

    def calls(self, number: int) -> list[str]:
        return self.backend.claims[number].calls

    async def settled(self) -> None:
        """Until the client's own tasks have come to rest."""
        for _ in range(10):
            await asyncio.sleep(0)
        if self.runtime.cleanups:
            await asyncio.wait(self.runtime.cleanups, timeout=10)

    async def end(self, lease) -> None:
        await lease.release()
        await self.settled()
        assert self.runtime.contending == []
        assert self.runtime.shared == {}
        assert not self.runtime.tasks


@pytest.fixture
async def make():
    """Makes the stage of a test, on its loop."""
    return Stage


# --- the rule of handing over

FREE = {"left": 5, "certain": 5.0, "margin": margin(10.0), "hand_overs": 0, "contended_for": None}


@pytest.mark.parametrize(
    ("change", "allowed"),
    [
        ({}, True),
        ({"left": 1}, True),
        ({"left": 0}, False),
        ({"certain": margin(10.0)}, False),
        ({"certain": margin(10.0) + 0.001}, True),
        ({"certain": -1.0}, False),
        ({"hand_overs": 10_000}, True),
        ({"contended_for": 0.0}, True),
        ({"contended_for": -1.0}, True),
        ({"contended_for": 0.0, "hand_overs": MOST_HAND_OVERS - 1}, True),
        ({"contended_for": 0.0, "hand_overs": MOST_HAND_OVERS}, False),
        ({"contended_for": LONGEST_HANDING_OVER * 0.99}, True),
        ({"contended_for": LONGEST_HANDING_OVER}, False),
        ({"contended_for": 0.0, "left": 0}, False),
    ],
)
def test_a_hold_is_handed_over_only_while_that_is_safe_and_just(change, allowed):
    assert may_hand_over(**{**FREE, **change}) is allowed


async def test_local_waiters_get_the_tokens_of_one_grant_in_turn(make):
    stage = make(grant(100, count=3))
    first = await stage.ask()
    waiters = [stage.asking() for _ in range(2)]
    await asyncio.sleep(0)
    leases = [first]
    for waiter in waiters:
        await leases[-1].release()
        leases.append(await waiter)
    assert [lease.token for lease in leases] == [100, 101, 102]
    assert stage.calls(0) == ["acquire"]
    await stage.end(leases[-1])
    assert stage.calls(0) == ["acquire", "release"]


async def test_when_the_tokens_are_used_up_the_local_queue_asks_again(make):
    stage = make(grant(100, count=1), grant(200))
    first = await stage.ask()
    waiter = stage.asking()
    await asyncio.sleep(0)
    await first.release()
    second = await waiter
    assert second.token == 200
    assert stage.calls(0) == ["acquire", "release"]
    assert stage.calls(1) == ["acquire"]
    await stage.end(second)


async def test_a_hold_about_to_end_is_not_passed_on(make):
    stage = make(grant(100), grant(200, until=20.0))
    first = await stage.ask()
    waiter = stage.asking()
    await asyncio.sleep(0)
    stage.now = 10.0 - margin(10.0)
    await first.release()
    second = await waiter
    assert second.token == 200
    await stage.end(second)


@pytest.mark.parametrize("limit", ["hand_overs", "time"])
async def test_with_demand_passing_ends_by_number_and_by_time(make, limit):
    stage = make(grant(1, demand=True), grant(2000))
    lease = await stage.ask()
    waiters = deque(stage.asking() for _ in range(30))
    await asyncio.sleep(0)
    served = 0
    while lease.token < 2000:
        await lease.release()
        lease = await waiters.popleft()
        served += 1
        if limit == "time" and served == 4:
            stage.now += LONGEST_HANDING_OVER
    assert served == (MOST_HAND_OVERS + 1 if limit == "hand_overs" else 5)
    # The next hold may be passed on anew.
    while waiters:
        await lease.release()
        lease = await waiters.popleft()
    assert stage.runtime.stats.passed == 30 - 1
    await stage.end(lease)


async def test_fair_bids_share_nothing(make):
    fair = Request("x", MUTEX, 10.0, "test", fair=True)
    stage = make(grant(1, count=1), None)
    first = await stage.ask(request=fair)
    assert await stage.ask(0, request=fair) is None
    assert stage.calls(1) == ["try"]
    await stage.end(first)


async def test_a_try_while_somebody_here_has_it_asks_nobody(make):
    stage = make(grant(1))
    lease = await stage.ask()
    assert await stage.ask(0) is None
    assert len(stage.backend.claims) == 1
    await stage.end(lease)


async def test_the_first_to_ask_is_the_first_to_be_served(make):
    answer = asyncio.get_running_loop().create_future()
    stage = make(answer, grant(5))
    leader = stage.asking()
    await asyncio.sleep(0)
    follower = stage.asking()
    await asyncio.sleep(0)
    answer.set_result(None)
    await stage.settled()
    stage.change()
    first = await leader
    assert not follower.done()
    await first.release()
    await stage.end(await follower)


# --- answers that come late


async def test_a_grant_older_than_its_term_is_no_success(make):
    stage = make(grant(1, until=0.0), grant(2))
    lease = await stage.ask()
    assert lease.token == 2
    await stage.settled()
    assert stage.calls(0) == ["acquire", "release"]
    await stage.end(lease)


async def test_a_try_whose_answer_is_too_old_says_that_the_link_is_slow(make):
    stage = make(grant(1, until=0.0))
    with pytest.raises(BackendUnavailable, match="slower than that"):
        await stage.ask(0)
    await stage.settled()
    assert stage.calls(0) == ["try", "release"]
    assert stage.runtime.contending == []


async def test_an_error_of_a_try_is_its_own(make):
    answer = asyncio.get_running_loop().create_future()
    stage = make(answer, grant(2))
    attempt = stage.asking(0)
    await asyncio.sleep(0)
    followers = [stage.asking(), stage.asking()]
    await asyncio.sleep(0)
    answer.set_exception(BackendUnavailable("other clients changed the row first"))
    with pytest.raises(BackendUnavailable, match="first"):
        await attempt
    lease = await followers[0]
    assert lease.token == 2
    await lease.release()
    await stage.end(await followers[1])
    assert stage.calls(0) == ["try", "release"]


async def test_a_timeout_ends_an_attempt_that_does_not_answer(make):
    never = asyncio.get_running_loop().create_future()
    stage = make(never)
    assert await stage.ask(0.01) is None
    await stage.settled()
    assert stage.calls(0) == ["acquire", "release"]
    assert stage.runtime.contending == []


async def test_a_grant_in_the_step_of_the_timeout_is_given_back(make):
    loop = asyncio.get_running_loop()
    answer = loop.create_future()
    stage = make(answer)
    asking = stage.asking(0.01)
    await asyncio.sleep(0)
    # At the moment of the timeout, and just before it: both happen in one pass of the loop.
    loop.call_later(0.01, lambda: answer.done() or answer.set_result(grant(7)))
    lease = await asking
    if lease is not None:
        await lease.release()
    await stage.settled()
    assert stage.calls(0)[-1] == "release"
    assert stage.runtime.contending == []


# --- errors


async def test_an_error_of_the_first_attempt_is_everybodys(make):
    answer = asyncio.get_running_loop().create_future()
    stage = make(answer)
    leader = stage.asking()
    await asyncio.sleep(0)
    followers = [stage.asking() for _ in range(2)]
    await asyncio.sleep(0)
    cause = OSError("unreachable")
    error = BackendUnavailable("cannot be reached")
    error.__cause__ = cause
    answer.set_result(error)
    ends = await asyncio.gather(leader, *followers, return_exceptions=True)
    assert [type(end) for end in ends] == [BackendUnavailable] * 3
    assert all(end.__cause__ is cause for end in ends)
    assert len({id(end) for end in ends}) == 3
    await stage.settled()
    assert stage.calls(0) == ["acquire", "release"]
    assert stage.runtime.contending == []


async def test_once_queued_an_outage_is_survived(make):
    stage = make(None, BackendUnavailable("gone"), BackendUnavailable("gone"), None, grant(3))
    asking = stage.asking()
    await asyncio.sleep(0)
    stage.change()
    stage.change()
    lease = await asking
    assert lease.token == 3
    # It asks again after an error; it waits for one of the two changes only when it knows its place.
    assert stage.calls(0) == ["acquire"] * 5
    await stage.end(lease)


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (BackendRefused("no rights"), BackendRefused),
        (BackendUnavailable("for good", retryable=False), BackendUnavailable),
        (KeyError("a defect"), BackendError),
    ],
)
async def test_what_waiting_longer_does_not_cure_ends_the_waiting(make, error, seen):
    stage = make(None, error)
    waiters = [stage.asking() for _ in range(3)]
    await asyncio.sleep(0)
    stage.change()
    ends = await asyncio.gather(*waiters, return_exceptions=True)
    assert [type(end) for end in ends] == [seen] * 3
    await stage.settled()
    assert stage.calls(0)[-1] == "release"
    assert stage.runtime.contending == []


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize(
    "answers", [[grant(1), grant(2, 40.0)], [None, grant(1), grant(2, 40.0)]], ids=["first", "later"]
)
async def test_an_answer_that_came_after_the_end_of_its_grant_is_no_success(
    make, monkeypatch, answers, again
):
    """The same request is repeated where that gives a full ttl; elsewhere the grant is given back for another request."""
    monkeypatch.setattr(Script, "asks_again", again)
    stage = make(*answers)
    stage.now = 20.0
    asking = stage.asking()
    await asyncio.sleep(0)
    stage.change()
    lease = await asking
    assert lease.token == 2
    await stage.settled()
    if again:
        assert stage.calls(0) == ["acquire"] * len(answers)
    else:
        assert stage.calls(0) == ["acquire"] * (len(answers) - 1) + ["release"]
        assert stage.calls(1) == ["acquire"]
    await stage.end(lease)
    assert len(stage.backend.claims) == (1 if again else 2)


async def test_a_push_that_came_after_the_end_of_its_grant_is_asked_for_again_by_the_same_request(make):
    """The server knows the claim, which may still be in: giving it back would cost it the place."""
    stage = make(None, grant(2, 40.0))
    asking = stage.asking()
    await asyncio.sleep(0)
    stage.now = 20.0
    [claim] = stage.backend.claims
    claim.inbox.put(grant(1))
    lease = await asking
    assert lease.token == 2
    assert claim.calls == ["acquire", "acquire"]
    await stage.end(lease)
    assert stage.backend.claims == [claim]


async def test_a_defect_in_the_first_attempt_passes_through_and_is_cleaned_up(make):
    stage = make(KeyError("a defect"), grant(1))
    leader = stage.asking()
    follower = stage.asking()
    with pytest.raises(KeyError):
        await leader
    # Who waited behind it is not concerned: the acquire is repeated.
    await stage.end(await follower)


async def test_a_release_that_fails_is_repeated_in_the_background(make):
    stage = make(grant(1))
    stage.backend.release_errors.extend([BackendUnavailable("gone"), BackendUnavailable("gone")])
    lease = await stage.ask()
    await lease.release()
    assert not lease.held
    await stage.settled()
    assert stage.calls(0) == ["acquire", "release", "release", "release"]
    assert stage.runtime.contending == []


async def test_a_cleanup_gives_up_after_one_ttl(make, caplog):
    stage = make(grant(1))
    lease = await stage.ask()
    stage.backend.release_errors.extend(BackendUnavailable("gone") for _ in range(50))
    with caplog.at_level(logging.WARNING, logger="aiolock"):
        await lease.release()
        # The clean-up begins, and counts from now.
        await asyncio.sleep(0)
        assert stage.calls(0) == ["acquire", "release", "release"]
        stage.now = 10.0
        await stage.settled()
    assert "gave up releasing 'x'" in caplog.text
    assert stage.calls(0) == ["acquire", "release", "release", "release"]


async def test_a_cleanup_that_is_refused_is_not_repeated(make, caplog):
    stage = make(grant(1))
    lease = await stage.ask()
    stage.backend.release_errors.extend([BackendRefused("no rights"), BackendRefused("no rights")])
    with caplog.at_level(logging.WARNING, logger="aiolock"):
        await lease.release()
        await stage.settled()
    assert stage.calls(0) == ["acquire", "release", "release"]
    assert "it ends by its ttl" in caplog.text


# --- losses


@pytest.mark.parametrize("reason", ["expired", "session", "revoked", "force-released"])
async def test_after_a_loss_those_who_wait_bid_anew(make, reason):
    stage = make(grant(1), grant(2))
    lease = await stage.ask()
    waiter = stage.asking()
    await asyncio.sleep(0)
    stage.runtime.scheduler.lose(lease._hold.validity, reason)
    assert lease.lost
    second = await waiter
    await stage.settled()
    assert second.token == 2
    # Also what the server took is given up: a request on its way may have taken a place since.
    assert stage.calls(0) == ["acquire", "release"]
    await lease.release()
    second.check()
    await stage.end(second)


async def test_max_hold_is_set_for_each_turn(make):
    stage = make(grant(1))
    brief = LeaseOptions(2.0, "signal")
    first = Lease(await ask(stage.runtime, REQUEST, brief, None))
    term = first._hold.validity
    assert term.limit == 2.0
    waiter = stage.asking()
    await asyncio.sleep(0)
    await first.release()
    second = await waiter
    assert second._hold.validity is term
    assert term.limit == math.inf
    await stage.end(second)


# --- closing


async def test_closing_tells_holder_and_waiters_and_returns_the_claim(make):
    stage = make(grant(1))
    lease = await stage.ask()
    waiters = [stage.asking() for _ in range(2)]
    await asyncio.sleep(0)
    (queue,) = stage.runtime.contending
    assert queue.waiting == 2
    assert queue.close() is stage.backend.claims[0]
    assert lease.lost
    assert await lease.wait_lost() == "closed"
    for end in await asyncio.gather(*waiters, return_exceptions=True):
        assert isinstance(end, RuntimeError)
    assert stage.runtime.contending == []


@pytest.mark.parametrize("answer", [grant(1), None, BackendUnavailable("closed under our feet")])
async def test_an_attempt_under_way_at_closing_ends_with_a_runtime_error(make, answer):
    future = asyncio.get_running_loop().create_future()
    stage = make(future)
    asking = stage.asking()
    await asyncio.sleep(0)
    (queue,) = stage.runtime.contending
    queue.close()
    future.set_result(answer)
    with pytest.raises(RuntimeError, match="closed"):
        await asking
    assert not stage.runtime.tasks


async def test_after_closing_nothing_is_cleaned_up_any_more(make):
    stage = make(grant(1))
    lease = await stage.ask()
    stage.backend.release_errors.append(BackendUnavailable("gone"))
    stage.runtime.state = State.CLOSED
    await lease.release()
    assert not stage.runtime.tasks
    assert stage.calls(0) == ["acquire", "release"]


# --- the waiters in their order


def futures(count: int) -> list[asyncio.Future]:
    return [asyncio.get_running_loop().create_future() for _ in range(count)]


async def test_waiters_come_out_in_the_order_in_which_they_came_in():
    waiters, tasks = Waiters(), futures(5)
    options = [LeaseOptions(float(number), "signal") for number in range(5)]
    assert not waiters
    for waiter, own in zip(tasks[1:], options[1:], strict=True):
        waiters.join(waiter, own)
    waiters.join(tasks[0], options[0], first=True)
    assert waiters.waiting() == tasks
    assert [waiters.next() for _ in range(6)] == [*zip(tasks, options, strict=True), None]
    assert not waiters


async def test_waiters_that_are_done_are_passed_over_and_do_not_count():
    waiters, tasks = Waiters(), futures(4)
    for waiter in tasks:
        waiters.join(waiter, OPTIONS)
    tasks[0].cancel()
    tasks[1].set_result(None)
    waiters.remove(tasks[3])
    waiters.remove(tasks[3])
    assert waiters
    assert waiters.waiting() == [tasks[2]]
    assert waiters.next() == (tasks[2], OPTIONS)
    assert not waiters
    assert waiters.next() is None


async def test_a_waiter_that_gives_up_after_its_turn_has_come_changes_nothing():
    waiters, [first, second] = Waiters(), futures(2)
    waiters.join(first, OPTIONS)
    waiters.join(second, OPTIONS)
    assert waiters.next() == (first, OPTIONS)
    first.set_result(None)
    waiters.remove(first)
    assert not first.cancelled()
    assert waiters.waiting() == [second]
    assert waiters.next() == (second, OPTIONS)


async def test_waiters_that_gave_up_leave_nothing_behind():
    waiters, [stays] = Waiters(), futures(1)
    waiters.join(stays, OPTIONS)
    for _ in range(1000):
        [waiter] = futures(1)
        waiters.join(waiter, OPTIONS)
        waiters.remove(waiter)
    assert waiters._removed <= 64
    assert waiters.waiting() == [stays]


@pytest.mark.parametrize("seed", range(20))
async def test_waiters_are_a_list_in_which_none_is_searched_for(seed):
    random, waiters, model = Random(seed), Waiters(), []
    for _ in range(500):
        what = random.random()
        if what < 0.5:
            [waiter] = futures(1)
            if random.random() < 0.1:
                waiters.join(waiter, OPTIONS, first=True)
                model.insert(0, waiter)
            else:
                waiters.join(waiter, OPTIONS)
                model.append(waiter)
        elif what < 0.8 and model:
            waiters.remove(model.pop(random.randrange(len(model))))
        else:
            expected = (model.pop(0), OPTIONS) if model else None
            assert waiters.next() == expected
        assert waiters.waiting() == model
        assert bool(waiters) == bool(model)


# --- what the log tells


async def test_the_log_tells_each_transition_and_why_each_waiter_woke(make, caplog):
    stage = make(grant(1))
    with caplog.at_level(logging.DEBUG, "aiolock"):
        first = await stage.ask()
        waiters = [stage.asking(), stage.asking(0.001), stage.asking()]
        assert await waiters[1] is None
        waiters[2].cancel()
        await asyncio.wait([waiters[2]])
        await first.release()
        second = await waiters[0]
        await stage.end(second)
    states = [each.aiolock_after for each in caplog.records if each.name == "aiolock.queue"]
    assert states == ["requesting", "held", "ended"]
    reasons = [each.aiolock_reason for each in caplog.records if each.name == "aiolock.wait"]
    assert sorted(reasons) == ["CANCELLED", "HANDED_OVER", "TIMEOUT"]


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ([BackendRefused("no")], "BackendRefused: no"),
        ([KeyError("a defect")], "KeyError: 'a defect'"),
        ([None, BackendRefused("no")], "BackendRefused: no"),
    ],
    ids=["first", "defect", "later"],
)
async def test_the_log_names_the_error_of_a_request_that_failed(make, caplog, answers, error):
    stage = make(*answers)
    with caplog.at_level(logging.DEBUG, "aiolock.wait"):
        asking = stage.asking()
        await asyncio.sleep(0)
        if len(answers) > 1:
            stage.change()
        await asyncio.wait([asking])
    assert asking.exception() is not None
    failed = [record for record in caplog.records if record.aiolock_reason == "FAILED"]
    assert failed
    for record in failed:
        assert record.getMessage().endswith(f" for 'x' (mutex) wakes: the request failed: {error}")
        assert (record.aiolock_kind, record.aiolock_error) == ("mutex", error.partition(":")[0])


async def test_the_log_says_of_each_task_once_that_the_client_was_closed(make, caplog):
    stage = make(grant(1))
    lease = await stage.ask()
    with caplog.at_level(logging.DEBUG, "aiolock.wait"):
        waiters = [stage.asking() for _ in range(2)]
        await asyncio.sleep(0)
        (queue,) = stage.runtime.contending
        queue.close()
        await asyncio.wait(waiters)
    lines = [each for each in caplog.records if each.name == "aiolock.wait"]
    assert [each.aiolock_reason for each in lines] == ["CLOSED", "CLOSED"]
    assert all(each.getMessage().startswith("task ") for each in lines)
    assert all(isinstance(waiter.exception(), RuntimeError) for waiter in waiters)
    assert lease.lost
