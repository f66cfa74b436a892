"""The judges are judged: every invariant passes a clean history and catches a planted violation; the search agrees with brute force."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from itertools import combinations, permutations
from types import SimpleNamespace
from typing import Any

import pytest

from aiolock.testing import checker
from aiolock.testing.checker import (
    FENCED,
    MUTEX,
    READ_WRITE,
    REENTRANT,
    Op,
    linearizable,
    operations,
    semaphore,
)
from aiolock.testing.history import NEVER, History, Recorder, load
from aiolock.testing.views import Slowness, views
from tests.faults.fenced_store import FencedStore, StoreClient
from tests.faults.injector import FaultInjector
from tests.faults.verdict import _progress
from tests.scoreboard import after_kills, after_stops


class Story:
    """A history told by hand, in milliseconds."""

    def __init__(self) -> None:
        self.events: list[dict] = []
        self.holds = 0

    def note(self, t: float, kind: str, process: str = "injector", **fields) -> Story:
        self.events.append({"t": int(t * 1_000_000), "process": process, "kind": kind, **fields})
        return self

    def attempt(
        self,
        process: str,
        call: float,
        ret: float | None = None,
        token: int | None = None,
        *,
        until: float | None = None,
        lost: float | None = None,
        wrote: float | None = None,
        result: str = "ok",
        name: str = "x",
        mode: str = "mutex",
        permits: int = 1,
        owner: str | None = None,
        timeout: float | None = None,
        released: str = "ok",
    ) -> Story:
        self.holds += 1
        number = f"{process}#{self.holds}"
        about = {"name": name, "task": "main", "owner": owner or process, "mode": mode, "permits": permits}
        self.note(call, "acquire", process, id=number, timeout=timeout, **about)
        if ret is not None:
            self.note(ret, "acquire.ret", process, id=number, result=result, token=token)
        if until is not None:
            self.note(until, "release", process, id=number)
            self.note(until + 0.5, "release.ret", process, id=number, result=released)
        if lost is not None:
            self.note(lost, "lost", process, id=number)
        if wrote is not None:
            self.note(wrote, "wrote", process, id=number)
        return self

    def told(self) -> History:
        return History(self.events)


def clean() -> Story:
    """Three hand-overs: a release, a loss told in time, and a stop that outlives the ttl."""
    story = Story()
    story.attempt("a", 0, 1, 1, until=10)
    story.attempt("b", 2, 11, 2, lost=40, wrote=30)
    story.attempt("c", 3, 45, 3, lost=201)
    story.note(60, "stop", target="c").note(200, "cont", target="c")
    story.attempt("a", 50, 150, 4, until=160)
    return story


def test_a_clean_history_has_no_violation():
    history = clean().told()
    assert checker.check(history) == []
    assert checker.progress(history, bound=0.5) == []
    assert checker.punctual(history) == []
    assert linearizable(operations(history, "x"), FENCED) == []


# 1. Exclusion


def test_overlapping_beliefs_are_found():
    story = Story().attempt("a", 0, 1, 1, until=10).attempt("b", 2, 9, 2, until=20)
    [violation] = checker.exclusion(story.told())
    assert "a#1" in violation
    assert "b#2" in violation


def test_equal_stamps_are_concurrent_not_overlapping():
    assert checker.exclusion(Story().attempt("a", 0, 1, until=10).attempt("b", 2, 10, until=20).told()) == []


def test_names_and_families_do_not_exclude_each_other():
    story = Story().attempt("a", 0, 1, until=10).attempt("b", 0, 1, until=10, name="y")
    story.attempt("c", 0, 1, until=10, mode="write").attempt("d", 0, 1, until=10, mode="permits")
    assert checker.exclusion(story.told()) == []


@pytest.mark.parametrize(
    ("end", "violations"), [({"until": 5}, 0), ({"lost": 5}, 0), ({"until": 9}, 1), ({"lost": 9}, 1), ({}, 1)]
)
def test_belief_ends_with_release_or_loss(end, violations):
    story = Story().attempt("a", 0, 1, **end).attempt("b", 2, 8, until=20)
    assert len(checker.exclusion(story.told())) == violations


def test_belief_ends_with_death():
    story = Story().attempt("a", 0, 1).attempt("b", 2, 8, until=20)
    assert checker.exclusion(story.note(9, "kill", target="a").told())
    assert checker.exclusion(story.note(7, "kill", target="a").told()) == []


def test_a_stopped_holder_does_not_believe_but_a_woken_one_does():
    story = Story().attempt("a", 0, 1, lost=300).note(5, "stop", target="a")
    story.attempt("b", 0, 100, until=400)
    assert checker.exclusion(story.note(290, "cont", target="a").told(), grace=0.05) == []
    assert len(checker.exclusion(story.told(), grace=0.005)) == 1


def test_a_second_stop_signal_does_not_blind_the_checker():
    story = Story().attempt("a", 0, 1, until=900).attempt("b", 0, 500, until=600)
    story.note(5, "stop", target="a").note(6, "stop", target="a").note(10, "cont", target="a")
    assert len(checker.exclusion(story.told())) == 1


def test_windows_of_several_authors_are_kept_apart():
    story = Story().attempt("a", 0, 1, until=900).attempt("b", 0, 500, until=600)
    story.note(5, "stop", "a", target="a").note(6, "stop", target="a")
    story.note(10, "cont", target="a").note(700, "cont", "a", target="a")
    assert checker.exclusion(story.told()) == []


def test_a_process_is_blind_until_the_last_of_its_windows_is_over():
    story = Story().attempt("a", 0, 1, until=900, lost=560).attempt("b", 0, 500, until=600)
    story.note(5, "stop", "a", target="a", why="lag").note(6, "stop", "a", target="a")
    story.note(400, "cont", "a", target="a").note(550, "cont", "a", target="a", why="lag")
    assert checker.told(story.told()) == []


def test_readers_share_and_writers_do_not():
    story = Story().attempt("a", 0, 1, mode="read", until=10).attempt("b", 0, 2, mode="read", until=10)
    assert checker.exclusion(story.told()) == []
    story.attempt("c", 0, 9, mode="write", until=12)
    assert len(checker.exclusion(story.told())) == 2


def test_reentry_is_for_the_same_owner_only():
    story = Story().attempt("a", 0, 1, 1, mode="reentrant", until=10)
    story.attempt("a", 2, 3, 1, mode="reentrant", until=5)
    assert checker.check(story.told()) == []
    story.attempt("b", 4, 6, 2, mode="reentrant", until=7)
    assert len(checker.exclusion(story.told())) == 1


def test_a_plain_mutex_excludes_its_own_owner():
    story = Story().attempt("a", 0, 1, until=10).attempt("a", 2, 3, until=5)
    assert len(checker.exclusion(story.told())) == 1


def test_permits_add_up_to_the_capacity():
    story = Story().attempt("a", 0, 1, mode="permits", permits=2, until=10)
    story.attempt("b", 0, 2, mode="permits", until=10)
    assert checker.exclusion(story.told(), {"x": 3}) == []
    [violation] = checker.exclusion(story.told(), {"x": 2})
    assert "3 of 2 permits" in violation


# 2. Tokens


def test_a_token_given_twice_is_found():
    story = Story().attempt("a", 0, 1, 7, until=2).attempt("b", 3, 4, 7, until=5)
    assert any("share" in violation for violation in checker.tokens(story.told()))


def test_a_token_that_falls_is_found_also_between_concurrent_calls():
    after_call = Story().attempt("a", 0, 1, 7, until=2).attempt("b", 3, 4, 6, until=5)
    queued = Story().attempt("a", 0, 2, 7, until=3).attempt("b", 1, 4, 6, until=5)
    assert len(checker.tokens(after_call.told())) == 1
    assert len(checker.tokens(queued.told())) == 1


def test_tokens_of_other_names_do_not_matter():
    story = Story().attempt("a", 0, 1, 7, until=2).attempt("b", 3, 4, 7, until=5, name="y")
    assert checker.tokens(story.told()) == []


def test_a_grant_that_returned_after_a_stop_is_not_held_against_the_server():
    """Granted first, woken last: only a hold that returned awake tells the order of the grants."""
    story = Story().attempt("a", 0, 105, 1, lost=106).attempt("b", 0, 50, 2, until=60)
    story.note(5, "stop", target="a").note(104, "cont", target="a")
    assert checker.tokens(story.told()) == []


def downgraded(story: Story, number: str, call: float, ret: float) -> Story:
    process = number.partition("#")[0]
    return story.note(call, "downgrade", process, id=number).note(ret, "downgrade.ret", process, id=number)


def test_a_downgraded_hold_that_is_lost_is_one_for_reading():
    story = Story().attempt("a", 0, 1, 1, mode="write", lost=20)
    downgraded(story, "a#1", 5, 6).attempt("b", 2, 8, 2, mode="read", until=15)
    assert not checker.told(story.told())
    story.attempt("c", 3, 19, 3, mode="write", until=30)
    assert [found for found in checker.told(story.told()) if "told 1.0 ms after" in found]


def test_a_downgraded_hold_is_one_for_reading():
    story = Story().attempt("a", 0, 1, 1, mode="write", until=20)
    downgraded(story, "a#1", 5, 6)
    story.attempt("b", 2, 7, 2, mode="read", until=15)
    assert checker.exclusion(story.told()) == []
    assert linearizable(operations(story.told(), "x"), READ_WRITE) == []
    # Who read before it was one, and who writes while it still is, are found.
    early = Story().attempt("a", 0, 1, 1, mode="write", until=20)
    downgraded(early, "a#1", 5, 6).attempt("b", 2, 3, 2, mode="read", until=15)
    assert len(checker.exclusion(early.told())) == 1
    assert linearizable(operations(early.told(), "x"), READ_WRITE) != []
    late = Story().attempt("a", 0, 1, 1, mode="write", until=20)
    downgraded(late, "a#1", 5, 6).attempt("b", 2, 10, 2, mode="write", until=15)
    assert len(checker.exclusion(late.told())) == 1
    assert linearizable(operations(late.told(), "x"), READ_WRITE) != []


def test_readers_may_be_told_in_any_order_but_not_across_a_writer():
    story = Story().attempt("a", 0, 2, 2, mode="read", until=3).attempt("b", 0, 1, 3, mode="read", until=3)
    assert checker.tokens(story.told()) == []
    story.attempt("c", 0, 5, 5, mode="write", until=6).attempt("d", 0, 7, 4, mode="read", until=8)
    assert len(checker.tokens(story.told())) == 1
    below = Story().attempt("a", 0, 2, 9, mode="read", until=3).attempt("c", 0, 5, 5, mode="write", until=6)
    assert len(checker.tokens(below.told())) == 1


# 3. Told in time


def test_a_loss_told_after_the_next_grant_is_found():
    story = Story().attempt("a", 0, 1, 1, lost=12).attempt("b", 2, 10, 2, until=20)
    [violation] = checker.told(story.told())
    assert "2.0 ms after" in violation


def test_a_stopped_holder_must_be_told_soon_after_waking():
    def woken(told_at: float) -> History:
        story = Story().attempt("a", 0, 1, 1, lost=told_at).attempt("b", 2, 50, 2, until=60)
        return story.note(5, "stop", target="a").note(100, "cont", target="a").told()

    assert checker.told(woken(110), grace=0.05) == []
    assert len(checker.told(woken(151), grace=0.05)) == 1


def test_acting_after_being_told_is_found():
    story = Story().attempt("a", 0, 1, 1, lost=5, wrote=6)
    [violation] = checker.told(story.told())
    assert "acted" in violation


def test_margins_are_the_distances_of_losses_without_a_stop():
    assert checker.margins(clean().told()) == [pytest.approx(0.005)]


# 4. and 5.


def write(story: Story, t: float, token: int, owner: str, *, accepted=True, fenced=True, name="x") -> Story:
    return story.note(t, "store", name=name, owner=owner, token=token, accepted=accepted, fenced=fenced)


def test_a_store_that_accepts_a_stale_write_is_found():
    story = Story()
    for t, token in enumerate([1, 1, 5, 9]):
        write(story, t, token, f"owner{token}")
    write(story, 5, 3, "owner3", accepted=False)
    write(story, 6, 3, "owner3", fenced=False)
    write(story, 7, 1, "owner1", name="y")
    assert checker.stale_writes(story.told()) == []
    assert len(checker.stale_writes(write(story, 8, 5, "owner5").told())) == 1


def test_one_token_of_two_owners_is_found():
    story = write(write(Story(), 1, 4, "a"), 2, 4, "b")
    assert len(checker.stale_writes(story.told())) == 1


@pytest.mark.parametrize("action", ["release", "renew"])
def test_the_server_obeys_owners_only(action):
    def told(*steps: str) -> list[str]:
        story = Story()
        for t, step in enumerate(steps):
            what, owner = step.split()
            story.note(t, "server", action=what, name="x", owner=owner)
        return checker.ownership(story.told())

    assert told("grant a", "renew a", "release a", "grant b", "expire b", "grant a", f"{action} a") == []
    assert len(told("grant a", "expire a", "grant b", f"{action} a")) == 1
    assert len(told("grant a", f"{action} b")) == 1


# 6. Progress


def test_a_free_lock_with_a_sleeping_waiter_is_found():
    story = Story().attempt("a", 0, 1, until=10).attempt("b", 5, 500, until=510)
    assert len(checker.progress(story.told(), bound=0.4)) == 1
    assert checker.progress(story.told(), bound=0.6) == []


def test_a_waiter_that_waits_for_ever_is_found():
    story = Story().attempt("a", 0, 1, until=10).attempt("b", 5).note(900, "mark")
    assert len(checker.progress(story.told(), bound=0.4)) == 1


def test_waiting_while_held_or_stopped_or_without_a_server_is_in_order():
    held = Story().attempt("a", 0, 1, until=490).attempt("b", 5, 500, until=510)
    assert checker.progress(held.told(), bound=0.1) == []
    free = Story().attempt("a", 0, 1, until=10).attempt("b", 5, 500, until=510)
    stopped = free.note(20, "stop", target="b").note(490, "cont", target="b")
    assert checker.progress(stopped.told(), bound=0.1) == []
    free = Story().attempt("a", 0, 1, until=10).attempt("b", 5, 500, until=510)
    down = free.note(20, "down", target="s1").note(30, "down", target="s2")
    down.note(40, "up", target="s1").note(490, "up", target="s2")
    assert checker.progress(down.told(), bound=0.1) == []
    free = Story().attempt("a", 0, 1, until=10).attempt("b", 5).note(900, "mark")
    assert checker.progress(free.note(50, "kill", target="b").told(), bound=0.1) == []


def test_calls_that_outlive_their_timeout_are_found():
    late = Story().attempt("a", 0, 400, result="info", timeout=0.2)
    hung = Story().attempt("a", 0, timeout=0.2).note(400, "mark")
    for story in (late, hung):
        assert len(checker.punctual(story.told())) == 1
        assert checker.punctual(story.told(), grace=0.3) == []
    frozen = late.note(100, "stop", target="a").note(300, "cont", target="a")
    assert checker.punctual(frozen.told()) == []
    assert checker.punctual(hung.note(100, "kill", target="a").told()) == []
    slow = Story().attempt("a", 0, 1, until=10)
    slow.events[-1]["t"] = 900 * 1_000_000
    assert len(checker.punctual(slow.told(), release=0.5)) == 1


# The search


def acquire(call, ret, owner, result="ok", token=None, mode="mutex", permits=1) -> Op:
    return Op(call, ret, "acquire", owner, result, token, mode, permits)


def release(call, ret, owner, result="ok", mode="mutex", permits=1) -> Op:
    return Op(call, ret, "release", owner, result, None, mode, permits)


HELD = acquire(0, 1, "a", token=5)
CASES = [
    (MUTEX, True, [HELD, acquire(2, 3, "b", "fail"), release(4, 5, "a"), acquire(4, 6, "b")]),
    (MUTEX, False, [HELD, acquire(2, 3, "b")]),
    (MUTEX, False, [HELD, release(2, 3, "b")]),
    (MUTEX, True, [HELD, release(2, 3, "b", "fail")]),
    (MUTEX, False, [acquire(0, 1, "a", "fail")]),
    (MUTEX, True, [acquire(0, 9, "b"), acquire(1, 2, "a", "fail")]),
    (MUTEX, False, [HELD, release(2, 3, "a", "fail")]),
    (MUTEX, True, [HELD, Op(2, NEVER, "expire", "a"), release(3, 4, "a", "fail"), acquire(5, 6, "b")]),
    (MUTEX, False, [HELD, Op(7, NEVER, "expire", "a"), acquire(5, 6, "b")]),
    (MUTEX, True, [HELD, Op(2, 3, "ask", result=True), release(4, 5, "a"), Op(6, 7, "ask", result=False)]),
    (MUTEX, False, [HELD, Op(2, 3, "ask", result=False)]),
    (
        MUTEX,
        True,
        [acquire(0, NEVER, "a"), acquire(2, 3, "b", "fail")],
    ),  # an unknown acquire may have happened
    (MUTEX, True, [acquire(0, NEVER, "a"), acquire(2, 3, "b")]),  # or not
    (MUTEX, False, [acquire(0, NEVER, "a"), acquire(2, 3, "b", "fail"), acquire(4, 5, "c")]),
    (FENCED, True, [HELD, release(2, 3, "a"), acquire(4, 5, "b", token=6)]),
    (FENCED, False, [HELD, release(2, 3, "a"), acquire(4, 5, "b", token=5)]),
    (MUTEX, True, [HELD, release(2, 3, "a"), acquire(4, 5, "b", token=5)]),
    (FENCED, True, [HELD, release(2, 3, "a"), acquire(4, NEVER, "c"), acquire(4, 5, "b", token=6)]),
    (REENTRANT, True, [HELD, acquire(2, 3, "a"), release(4, 5, "a"), acquire(6, 7, "b", "fail")]),
    (REENTRANT, False, [HELD, acquire(2, 3, "a"), release(4, 5, "a"), acquire(6, 7, "b")]),
    (REENTRANT, False, [HELD, acquire(2, 3, "a", "fail")]),
    (READ_WRITE, True, [acquire(0, 1, "a", mode="read"), acquire(2, 3, "b", mode="read")]),
    (READ_WRITE, False, [acquire(0, 1, "a", mode="read"), acquire(2, 3, "b", mode="write")]),
    (READ_WRITE, False, [acquire(0, 1, "a", mode="write"), acquire(2, 3, "b", mode="read")]),
    (READ_WRITE, False, [acquire(0, 1, "a", mode="read"), acquire(2, 3, "b", "fail", mode="read")]),
    (semaphore(3), True, [acquire(0, 1, "a", permits=2), acquire(2, 3, "b"), acquire(4, 5, "c", "fail")]),
    (semaphore(3), False, [acquire(0, 1, "a", permits=2), acquire(2, 3, "b", permits=2)]),
    (semaphore(3), False, [acquire(0, 1, "a", permits=2), acquire(2, 3, "b", "fail")]),
    (semaphore(3), False, [acquire(0, 1, "a", permits=2), release(2, 3, "a", permits=1)]),
]


@pytest.mark.parametrize(("model", "possible", "ops"), CASES)
def test_models_of_the_locks(model, possible, ops):
    found = linearizable(ops, model)
    assert (found == []) is possible, found


def brute_force(ops: list[Op], model) -> bool:
    """Try every order of every choice of the operations that may not have happened."""
    certain = [op for op in ops if op.ret < NEVER]
    maybe = [op for op in ops if op.ret == NEVER]
    for size in range(len(maybe) + 1):
        for happened in combinations(maybe, size):
            for order in permutations([*certain, *happened]):
                pairs = combinations(order, 2)
                if all(first.call <= second.ret for first, second in pairs) and explains(order, model):
                    return True
    return False


def explains(order, model) -> bool:
    state = (0, ())
    for op in order:
        state = model.step(state, op)
        if state is None:
            return False
    return True


def some_ops(rng: random.Random, modes: list[str]) -> list[Op]:
    ops = []
    for _ in range(rng.randint(1, 6)):
        call = rng.randint(0, 12)
        ret = NEVER if rng.random() < 0.15 else call + rng.randint(0, 6)
        action = rng.choice(["acquire", "acquire", "acquire", "release", "release", "ask"])
        result = rng.choice([True, False]) if action == "ask" else "fail" if rng.random() < 0.2 else "ok"
        if ret == NEVER:
            action, result = rng.choice(["acquire", "release", "expire"]), "ok"
        token = rng.randint(1, 4) if action == "acquire" and ret < NEVER else None
        permits = rng.randint(1, 2) if modes == ["permits"] else 1
        ops.append(Op(call, ret, action, rng.choice("ab"), result, token, rng.choice(modes), permits))
    return ops


@pytest.mark.parametrize(
    ("model", "modes"),
    [
        (MUTEX, ["mutex"]),
        (FENCED, ["mutex"]),
        (REENTRANT, ["mutex"]),
        (READ_WRITE, ["read", "write"]),
        (semaphore(2), ["permits"]),
    ],
    ids=["mutex", "fenced", "reentrant", "read-write", "semaphore"],
)
def test_the_search_agrees_with_brute_force(model, modes):
    rng = random.Random(17)
    verdicts = []
    for _ in range(400):
        ops = some_ops(rng, modes)
        verdicts.append(linearizable(ops, model) == [])
        assert verdicts[-1] == brute_force(ops, model), ops
    assert 40 < sum(verdicts) < 360  # both verdicts were put to the test


def long_history(holds: int) -> list[Op]:
    """Sixteen clients take turns, and try in vain during the holds of others."""
    rng, ops, now = random.Random(5), [], 0.0
    for token in range(1, holds + 1):
        owner, began, now = f"c{rng.randrange(16)}", now - rng.random() * 3, now + 1
        ops.append(acquire(began, now, owner, token=token))
        ops.append(acquire(now + 0.1, now + 0.2 + rng.random(), "try", "fail"))
        ops.append(release(now + 1.5, now + 2, owner))
        now += 1.6
    return ops


def test_the_search_copes_with_thousands_of_operations_and_finds_one_flaw_among_them():
    ops = long_history(1000)
    assert linearizable(ops, FENCED) == []
    ops[1500] = ops[1500]._replace(token=499)
    [violation] = linearizable(ops, FENCED)
    assert violation.startswith("search: no order explains Op(")


def test_the_search_never_explores_a_state_twice():
    steps = []

    class Counting(checker.Model):
        def step(self, state, op):
            steps.append(op)
            return super().step(state, op)

    readers = [acquire(0, 10, f"r{number}", mode="read") for number in range(8)]
    assert linearizable([*readers, Op(11, 12, "ask", result=False)], Counting(READ_WRITE.admits)) != []
    assert len(steps) <= 8 * 2**8 + 8  # every choice of readers once, not every order of them


def test_operations_of_a_history_allow_what_may_have_happened():
    killed = Story().attempt("a", 0, 1, 1).note(5, "kill", target="a").attempt("b", 2, 9, 2, until=10)
    assert linearizable(operations(killed.told(), "x"), FENCED) == []
    untold = Story().attempt("a", 0, 1, 1).attempt("b", 2, 9, 2, until=10)
    assert linearizable(operations(untold.told(), "x"), FENCED) != []
    ghost = Story().attempt("a", 0, 1, result="info").attempt("b", 2, 3, result="fail").attempt("c", 4, 5, 2)
    assert linearizable(operations(ghost.told(), "x"), FENCED) == []
    baseless = Story().attempt("b", 2, 3, result="fail")
    assert linearizable(operations(baseless.told(), "x"), FENCED) != []
    story = Story().attempt("a", 0, 1, 1, until=5).note(2, "ask", "b", id="q", name="x")
    asked = story.note(3, "ask.ret", "b", id="q", locked=False)
    assert linearizable(operations(asked.told(), "x"), MUTEX) != []


# The recorder


def test_what_is_recorded_is_what_is_loaded(tmp_path):
    worker, injector = Recorder(tmp_path / "w", "w1.0"), Recorder(tmp_path / "n", "injector")
    hold = worker.acquiring("é\n/x", "t1", mode="permits", permits=2, timeout=1.5)
    injector.stop("w1.0")
    injector.cont("w1.0")
    worker.acquired(hold, 7)
    worker.wrote(hold)
    worker.releasing(hold)
    worker.released(hold, "info")
    other = worker.acquiring("y", owner="me")
    worker.acquired(other, 8)
    worker.lost(other)
    worker.refused(worker.acquiring("y"))
    worker.unknown(worker.acquiring("y"))
    worker.answered(worker.asking("y"), locked=True)
    injector.stored("y", "me", 8, accepted=True, fenced=True)
    injector.served("grant", "y", "me")
    injector.down()
    injector.up()
    injector.kill("w1.0")
    worker.close()
    injector.close()
    history = load([tmp_path / "w", tmp_path / "n"])
    first, second, *rest = history.attempts
    assert (first.name, first.process, first.task, first.owner) == ("é\n/x", "w1.0", "t1", "w1.0/t1")
    assert (first.mode, first.permits, first.timeout, first.token, first.result) == (
        "permits",
        2,
        1.5,
        7,
        "ok",
    )
    assert first.call < first.ret < first.wrote[0] < first.release_call < first.release_ret < second.call
    assert (first.release_result, first.lost) == ("info", NEVER)
    assert (second.owner, second.lost < NEVER, second.release_call) == ("me", True, NEVER)
    assert [attempt.result for attempt in rest] == ["fail", "info"]
    assert [question.locked for question in history.questions] == [True]
    assert [len(each) for each in (history.holds, history.store, history.server, history.outages)] == [
        2,
        1,
        1,
        1,
    ]
    [(stop, cont)] = history.stops["w1.0"]
    assert first.call < stop < cont < first.ret
    assert history.killed("w1.0") == history.end


def test_a_recorder_never_writes_over_an_earlier_one(tmp_path):
    for _ in range(2):
        worker = Recorder(tmp_path / "w", "w")
        worker.kill("somebody")
        worker.close()
    assert len(load([tmp_path / "w"]).events) == 2


def test_a_line_torn_by_a_kill_is_left_out(tmp_path):
    worker = Recorder(tmp_path / "w", "w")
    worker.acquired(worker.acquiring("x"), 1)
    worker.close()
    with (tmp_path / "w").open("ab") as file:
        file.write(b'{"t": 12, "proc')
    assert len(load([tmp_path / "w"]).holds) == 1


# The store


@pytest.fixture
async def store(tmp_path):
    recorder = Recorder(tmp_path / "store.log", "store")
    async with asyncio.timeout(30), FencedStore(tmp_path / "store", recorder) as store:
        yield store
    recorder.close()


async def test_the_fenced_store_rejects_who_came_too_late(store, tmp_path):
    old, new = StoreClient(store.path), StoreClient(store.path)
    assert await old.read("x", "a", 1, fenced=True) == 0
    assert await old.write("x", "a", 1, 10, fenced=True)
    assert await old.write("x", "a", 1, 11, fenced=True) is True  # its own token again
    assert await new.read("x", "b", 2, fenced=True) == 11
    assert await old.write("x", "a", 1, 12, fenced=True) is False
    assert await old.read("x", "a", 1, fenced=True) is None
    assert await new.write("x", "b", 2, 20, fenced=True)
    assert await old.write("x", "thief", 2, 30, fenced=True) is False  # an equal token, another owner
    assert store.counter("x", fenced=True).value == 20
    tally = store.fenced
    assert (tally.accepted, tally.rejected, tally.stale) == (3, 2, 0)
    history = load([tmp_path / "store.log"])
    assert [event["accepted"] for event in history.store] == [True, True, False, True, False]
    assert checker.stale_writes(history) == []
    old.close()
    new.close()


async def test_the_unfenced_store_accepts_everything_and_counts_the_damage(store):
    old, new = StoreClient(store.path), StoreClient(store.path)
    assert await old.read("x", "a", 1, fenced=False) == 0
    assert await new.read("x", "b", 2, fenced=False) == 0
    assert await new.write("x", "b", 2, 1, fenced=False)
    assert (store.unfenced.stale, store.unfenced.lost_updates) == (0, 0)
    assert await old.write("x", "a", 1, 1, fenced=False)
    assert (store.unfenced.stale, store.unfenced.lost_updates, store.unfenced.accepted) == (1, 1, 2)
    assert store.fenced.accepted == 0
    assert await new.read("y", "b", 2, fenced=False) == 0  # names are counted apart
    old.close()
    new.close()


async def test_an_interrupted_call_leaves_no_reply_for_the_next_one(store):
    client = StoreClient(store.path)
    assert await client.read("x", "a", 1, fenced=True) == 0
    call = asyncio.create_task(client.write("x", "a", 1, 5, fenced=True))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await client.read("y", "a", 1, fenced=True) == 0
    client.close()


async def test_a_leaving_client_is_no_error_and_a_leaving_store_is_one(tmp_path):
    async with FencedStore(tmp_path / "store") as store:
        client, leaver = StoreClient(store.path), StoreClient(store.path)
        await client.read("x", "a", 1, fenced=True)
        await leaver.read("x", "a", 1, fenced=True)
        leaver.close()
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await client.read("x", "a", 1, fenced=True)
    client.close()


@pytest.mark.parametrize(("breaking", "overlaps"), [(0.0, 1), (0.1, 0)])
def test_a_connection_that_breaks_excuses_its_holder_by_every_clock(breaking, overlaps):
    """Where a hold ends with its connection, the next one may be in before the holder has read of that."""
    story = (
        Story()
        .attempt("a", 1000, 1010, 1)
        .note(1020, "broken", "injector", target="a")
        .attempt("b", 1000, 1030, 2, until=1080)
    )
    story.note(1040, "lost", "a", id="a#1", until=1_040_000_000, reason="session")
    for view in views(History(story.events), breaking):
        assert len(checker.exclusion(view, grace=0)) == overlaps


async def test_only_holders_whose_connections_are_ended_are_excused(tmp_path):
    """Those whose statements wait are ended at the server, which names them by their ports; the others go on."""
    recorder = Recorder(tmp_path / "history", "injector")

    def kill_clients(kind: str, ending: Callable[[int], object]) -> None:
        assert kind == "pubsub"
        ending(4)
        ending(7)  # of no worker

    system: Any = SimpleNamespace(
        breaking=0.001, busy=asyncio.Lock(), placed=None, granted=None, kill_clients=kill_clients
    )
    workers: list[Any] = [
        SimpleNamespace(name=name, busy=asyncio.Lock(), proxies=[SimpleNamespace(ports=ports)])
        for name, ports in (("a", [3, 4]), ("c", [5, 6]))
    ]
    injector = FaultInjector(system, workers, recorder, seed=1, ttls=[1.0], names=["x"])
    assert await injector._kill_clients("pubsub", random.Random(1), "CLIENT KILL pubsub")
    recorder.close()
    [broken] = load([tmp_path / "history"]).events
    assert (broken["kind"], broken["target"]) == ("broken", "a")
    # The next one is in before either of them has given up: one was told that it lost its hold, and the other went wrong.
    began = broken["t"] / 1e6
    for holder, overlaps in (("a", 0), ("c", 1)):
        story = Story().attempt(holder, began - 20, began - 10, 1).attempt("b", began - 20, began + 10, 2)
        story.note(
            began + 20, "lost", holder, id=f"{holder}#1", until=broken["t"] + 20_000_000, reason="session"
        )
        for view in views(History([*story.events, broken]), 0.1):
            assert len(checker.exclusion(view, grace=0)) == overlaps


@pytest.mark.parametrize(("late", "overlaps"), [("a", 0), ("injector", 0), ("b", 1)])
def test_a_broken_connection_is_read_later_by_a_process_that_did_not_run(late, overlaps):
    """What the machine withheld from the holder, or from the proxies, is no belief of its; what it withheld from others is."""
    story = (
        Story()
        .attempt("a", 1000, 1010, 1)
        .note(1020, "broken", "injector", target="a")
        .note(1030, "stop", late, target=late, why="lag")
        .note(1330, "cont", late, target=late, why="lag")
        .attempt("b", 1000, 1250, 2, until=1390)
    )
    story.note(1400, "lost", "a", id="a#1", until=1_400_000_000, reason="session")
    _, clock = views(History(story.events), 0.1)
    assert len(checker.exclusion(clock, grace=0)) == overlaps
    # Longer than that it was able to read it.
    story.attempt("a", 2000, 2010, 3).note(2020, "broken", "injector", target="a").attempt(
        "b", 2000, 2200, 4, until=2300
    )
    story.note(2300, "lost", "a", id="a#3", until=2_300_000_000, reason="session")
    _, clock = views(History(story.events), 0.1)
    assert len(checker.exclusion(clock, grace=0)) == overlaps + 1


def test_time_in_which_holder_and_proxies_are_late_together_counts_once():
    story = Story().attempt("a", 1000, 1010, 1).note(1020, "broken", "injector", target="a")
    for late in ("a", "injector"):
        story.note(1030, "stop", late, target=late, why="lag").note(
            1330, "cont", late, target=late, why="lag"
        )
    story.attempt("b", 1000, 1430, 2, until=1690)
    story.note(1700, "lost", "a", id="a#1", until=1_700_000_000, reason="session")
    _, clock = views(History(story.events), 0.1)
    assert len(checker.exclusion(clock, grace=0)) == 1


def late(story: Story, process: str, start: int, end: int) -> Story:
    """What a process writes whose event loop did not get to run, in ms."""
    return story.note(start, "stop", process, target=process, why="lag").note(
        end, "cont", process, target=process, why="lag"
    )


def slow(story: Story, *processes: str, start: float = 0, end: float = 1000) -> float:
    return Slowness(History(story.events))((start * 1e6, end * 1e6), processes or ("a",))


def lives(*processes: str) -> Story:
    story = Story()
    for process in processes:
        story.note(0, "open", process).note(1000, "end", process)
    return story


def test_slowness_is_the_share_of_time_in_which_a_process_ran():
    assert slow(lives("a")) == 1.0
    busy = late(lives("a"), "a", 100, 600)
    assert slow(busy) == pytest.approx(2.0)
    # Of a part of the time.
    assert slow(busy, start=600) == 1.0
    assert slow(busy, start=300, end=700) == pytest.approx(4.0)
    assert slow(late(lives("a"), "a", 0, 1000)) == 10.0


def test_slowness_is_that_of_the_processes_that_wait_and_of_the_proxies_before_them():
    other = late(lives("a", "b"), "b", 100, 600)
    assert slow(other) == 1.0
    assert slow(other, "a", "b") == pytest.approx(2000 / 1500)
    proxies = late(lives("a"), "injector", 100, 600)
    assert slow(proxies) == pytest.approx(2.0)
    # Together for 300 ms, which count once.
    assert slow(late(proxies, "a", 300, 800)) == pytest.approx(1000 / 300)


def test_a_stop_by_the_injector_is_no_slowness():
    story = lives("a").note(100, "stop", target="a").note(600, "cont", target="a")
    assert slow(late(story, "a", 105, 605)) == pytest.approx(500 / 495)


@pytest.mark.parametrize(("slow", "violations"), [(0, 0), (5_000, 1)])
def test_a_lock_may_be_free_for_longer_while_the_machine_is_slow(slow, violations):
    """Not because the machine is slow at another time."""
    story = Story().attempt("a", 0, 1, until=10).attempt("b", 5, 500, until=510).note(10_000, "end", "b")
    for t in range(slow, slow + 1_000, 100):
        late(story, "b", t, t + 80)
    assert len(_progress(History(story.events), 0.4)) == violations


@pytest.mark.parametrize(("who", "violations"), [("b", 0), ("injector", 0), ("c", 1)])
def test_what_does_not_run_excuses_those_that_need_it(who, violations):
    """A waiter and the proxies; not a process that another fault stops meanwhile, whose loop is late as well."""
    story = Story().attempt("a", 0, 1, until=10).attempt("b", 5, 500, until=510)
    late(story, who, 20, 480)
    assert len(_progress(History(story.events), 0.4)) == violations


def test_a_lock_that_stays_free_while_the_machine_is_slow_is_found_if_that_takes_longer_than_it_explains():
    story = Story().attempt("a", 0, 1, until=10).attempt("b", 5, 900, until=910)
    for t in range(10, 900, 100):
        late(story, "b", t, t + 50)
    assert len(_progress(History(story.events), 0.4)) == 1


# The figures of the scoreboard


def test_being_told_after_a_stop_is_measured_by_the_time_in_which_the_process_ran():
    story = Story().attempt("a", 0, 1).note(50, "stop", target="a").note(1050, "cont", target="a")
    # Stopped again, 2 ms later, before it could tell.
    story.note(1052, "stop", target="a").note(2800, "cont", target="a")
    story.note(2803, "lost", "a", id="a#1", until=500 * 1_000_000)
    assert after_stops(story.told(), ttl=0.9) == [pytest.approx(0.005)]
    assert after_stops(story.told(), ttl=1.1) == []


def test_a_process_that_is_told_late_although_it_ran_is_found():
    story = Story().attempt("a", 0, 1).note(50, "stop", target="a").note(1050, "cont", target="a")
    story.note(1900, "stop", target="a").note(2800, "cont", target="a")
    story.note(2803, "lost", "a", id="a#1", until=500 * 1_000_000)
    assert after_stops(story.told(), ttl=0.9) == [pytest.approx(0.853)]


def test_the_next_holder_after_a_kill_is_the_first_of_those_in_line():
    story = (
        Story().attempt("a", 0, 1).attempt("b", 5, 1060).attempt("c", 6, 1100).note(100, "kill", target="a")
    )
    assert after_kills(story.told()) == [pytest.approx(0.96)]
    assert after_kills(story.told(), alone=False) == []


def test_kills_where_a_waiter_of_the_same_lock_died_as_well_are_counted_apart():
    story = (
        Story().attempt("a", 0, 1).attempt("b", 4, None).attempt("c", 5, 2060).note(100, "kill", target="a")
    )
    story.attempt("d", 5, None, name="y")
    story.note(200, "kill", target="d")
    assert after_kills(story.told()) == [pytest.approx(1.96)]
    story.note(300, "kill", target="b")
    assert after_kills(story.told()) == []
    assert after_kills(story.told(), alone=False) == [pytest.approx(1.96)]
