"""The rounds of a barrier: pure functions over its register, one by one and under random orders of events."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiolock.core.capabilities import MOST_BYTES, Content, encode_register
from aiolock.core.register import REMEMBERED
from aiolock.errors import ConfigError
from aiolock.kinds import barrier


def arrive(body, party: str, parties: int = 2):
    after, answer = barrier.arrive(body, "x", parties, party, 10.0, party.upper())
    return body if after is None else after, answer


def step(body, after):
    return body if after[0] is None else after[0]


def test_a_barrier_of_one_is_passed_at_once():
    body, answer = arrive({}, "a", 1)
    assert answer == (1, 0)
    assert barrier.outcome(body, 1) == ""
    assert barrier.inside(body) == 0


def test_every_party_confirms_before_a_round_is_passed():
    body, _ = arrive({}, "a")
    assert barrier.inside(body) == 1
    body, answer = arrive(body, "b")
    assert answer == (1, 1)
    assert barrier.full(body)
    assert barrier.outcome(body, 1) is None
    # Who comes meanwhile belongs to the next round, and has to come again.
    assert arrive(body, "c") == (body, (0, 0))
    # The last one to come has confirmed already.
    assert barrier.heartbeat(body, "b") == (None, None)
    body = step(body, barrier.heartbeat(body, "a"))
    assert barrier.outcome(body, 1) == ""
    body, answer = arrive(body, "c")
    assert answer == (2, 0)


def test_whoever_leaves_breaks_the_round():
    body, _ = arrive({}, "a", 3)
    body, _ = arrive(body, "b", 3)
    assert barrier.leave(body, "c", "why")[0] is None
    assert barrier.leave({}, "c", "why")[0] is None
    body = step(body, barrier.leave(body, "b", "why"))
    assert barrier.outcome(body, 1) == "why"
    assert barrier.inside(body) == 0
    # What is said twice changes nothing.
    assert barrier.leave(body, "b", "why")[0] is None


def test_who_is_dead_is_seen_by_ones_own_clock():
    body, _ = arrive({}, "a", 3)
    body, _ = arrive(body, "b", 3)
    heartbeats: barrier.Heartbeats = {}
    assert barrier.dead(body, "a", heartbeats, 100.0) == {}
    assert barrier.dead(body, "a", heartbeats, 109.9) == {}
    gone = barrier.dead(body, "a", heartbeats, 110.0)
    assert gone == {"b": 0}
    alive = step(body, barrier.heartbeat(body, "b"))
    # It was heard of in the meantime: then the verdict changes nothing.
    assert barrier.broken(alive, gone) == (None, None)
    assert barrier.dead(alive, "a", heartbeats, 111.0) == {}
    assert barrier.outcome(step(body, barrier.broken(body, gone)), 1) == "no heartbeat of B"
    assert barrier.dead({}, "a", heartbeats, 112.0) == {}
    assert heartbeats == {}
    assert barrier.broken({}, gone) == (None, None)


def test_the_end_of_a_round_is_remembered_for_a_while():
    body, _ = arrive({}, "a")
    assert barrier.outcome({}, 1) == "the server has forgotten it"
    for number in range(1, barrier.ENDS + 3):
        body = step(body, barrier.leave(body, "a", f"end of {number}"))
        body, _ = arrive(body, "a")
    assert barrier.outcome(body, barrier.ENDS + 2) == f"end of {barrier.ENDS + 2}"
    assert barrier.outcome(body, barrier.ENDS + 3) is None
    assert "has forgotten" in barrier.outcome(body, 1)


def test_another_number_of_parties_is_refused():
    body, _ = arrive({}, "a", 2)
    with pytest.raises(ConfigError, match="has 2 parties, not 3"):
        arrive(body, "b", 3)


EVENTS = st.lists(st.tuples(st.sampled_from(["arrive", "beat", "leave"]), st.integers(0, 5)), max_size=60)


@settings(max_examples=300)
@given(parties=st.integers(1, 4), events=EVENTS)
def test_a_round_is_passed_by_as_many_as_there_are_parties_and_broken_for_all_or_none(parties, events):
    body: dict = {}
    mine: dict[str, int] = {}
    """The round of every party that came."""
    for event, which in events:
        before = copy.deepcopy(body)
        if event == "arrive":
            party = f"{len(mine)}"
            body, (number, place) = arrive(body, party, parties)
            if number:
                mine[party] = number
                assert place == list(mine.values()).count(number) - 1
        elif mine:
            party = list(mine)[-1 - which % len(mine)]
            did = (
                barrier.heartbeat(body, party)
                if event == "beat"
                else barrier.leave(body, party, f"{party} left")
            )
            body = step(body, did)
        # Steps return something new and leave what was there as it was.
        assert before == {} or before["round"] <= body["round"]
    by_round: dict[int, list[str | None]] = {}
    for number in mine.values():
        by_round.setdefault(number, []).append(barrier.outcome(body, number))
    for number, ends in by_round.items():
        assert len(set(ends)) == 1
        assert ends[0] != "" or len(ends) == parties
        assert ends[0] is not None or number == body["round"]


def test_a_party_that_comes_only_as_the_last_changes_nothing_before():
    def complete(body, party: str, parties: int):
        return barrier.arrive(body, "x", parties, party, 10.0, party.upper(), last=True)

    assert complete({}, "a", 2) == (None, (barrier.MISSED, 0))
    assert complete({}, "a", 1)[1] == (1, 0)
    body, _ = arrive({}, "a")
    after, answer = complete(body, "b", 2)
    assert answer == (1, 1)
    # While the parties confirm, no other one is the last.
    assert complete(after, "c", 2) == (None, (barrier.MISSED, 2))
    with pytest.raises(ConfigError, match="has 2 parties, not 3"):
        complete(body, "b", 3)


def test_a_thousand_parties_fit_whatever_their_labels_are():
    body: dict[str, object] = {}
    for _ in range(barrier.ENDS):
        body, _ = barrier.arrive(body, "x", 1000, "first", 30.5, "x")
        body, _ = barrier.leave(body, "first", "\u0436" * 500)
    label = barrier.short("\u0436\udc80\n" * 20)
    assert label
    for number in range(999):
        body, _ = barrier.arrive(body, "x", 1000, f"{number:08x}", 86_000.123456, label)
        body["inside"][f"{number:08x}"][0] = 10_000 + number
    assert len(body["inside"]) == 999
    assert len(encode_register(Content(body, ["0123456789ab"] * REMEMBERED, 10**9))) <= MOST_BYTES
