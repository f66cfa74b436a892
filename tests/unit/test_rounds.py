"""The rounds of a barrier: pure functions over its document, one by one and under random orders of events."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiolock import rounds
from aiolock.document import MOST_BYTES
from aiolock.errors import ConfigError
from aiolock.pen import CLIENTS as REMEMBERED
from aiolock.pen import Pen


def arrive(body, me: str, party: int, parties: int = 2):
    after, answer = rounds.arrive(body, "x", parties, me, party, 10.0, me.upper())
    return body if after is None else after, answer


def step(body, after):
    return body if after[0] is None else after[0]


def test_a_client_that_has_all_parties_passes_at_once():
    body, answer = arrive({}, "a", 1)
    assert answer == (1, 0)
    assert rounds.inside(body) == 1
    body, answer = arrive(body, "a", 2)
    assert answer == (1, 1)
    assert rounds.outcome(body, 1) == ""
    assert rounds.inside(body) == 0


def test_the_roll_is_called_before_a_round_is_passed():
    body, _ = arrive({}, "a", 1)
    body, answer = arrive(body, "b", 1)
    assert answer == (1, 1)
    assert rounds.full(body)
    assert rounds.outcome(body, 1) is None
    # Who comes meanwhile belongs to the next round, and has to come again.
    assert arrive(body, "c", 1) == (body, (0, 0))
    # The last one to come has answered already.
    assert rounds.outcome(step(body, rounds.beat(body, "b")), 1) is None
    body = step(body, rounds.beat(body, "a"))
    assert rounds.outcome(body, 1) == ""
    body, answer = arrive(body, "c", 1)
    assert answer == (2, 0)


def test_a_party_is_inside_once_however_often_it_says_so():
    body, _ = arrive({}, "a", 1, 3)
    assert arrive(body, "a", 1, 3)[0] is body
    assert rounds.inside(body) == 1


def test_whoever_leaves_breaks_the_round():
    body, _ = arrive({}, "a", 1, 3)
    body, _ = arrive(body, "b", 1, 3)
    assert rounds.leave(body, "b", {2}, "why")[0] is None
    assert rounds.leave(body, "c", {1}, "why")[0] is None
    assert rounds.leave({}, "c", {1}, "why")[0] is None
    body = step(body, rounds.leave(body, "b", {1, 2}, "why"))
    assert rounds.outcome(body, 1) == "why"
    assert rounds.inside(body) == 0
    # What is said twice changes nothing.
    assert rounds.leave(body, "b", {1}, "why")[0] is None


def test_who_is_dead_is_seen_by_ones_own_clock():
    body, _ = arrive({}, "a", 1, 3)
    body, _ = arrive(body, "b", 1, 3)
    sightings: rounds.Sightings = {}
    assert rounds.dead(body, "a", sightings, 100.0) == {}
    assert rounds.dead(body, "a", sightings, 109.9) == {}
    gone = rounds.dead(body, "a", sightings, 110.0)
    assert gone == {"b": 1}
    alive = step(body, rounds.beat(body, "b"))
    # It was heard of in the meantime: then the verdict changes nothing.
    assert rounds.broken(alive, gone) == (None, None)
    assert rounds.dead(alive, "a", sightings, 111.0) == {}
    assert rounds.outcome(step(body, rounds.broken(body, gone)), 1) == "nothing was heard of B"
    assert rounds.dead({}, "a", sightings, 112.0) == {}
    assert sightings == {}
    assert rounds.broken({}, gone) == (None, None)


def test_the_end_of_a_round_is_remembered_for_a_while():
    body, _ = arrive({}, "a", 1)
    assert rounds.outcome({}, 1) == "the server has forgotten it"
    for number in range(1, rounds.ENDS + 3):
        body = step(body, rounds.leave(body, "a", {1}, f"end of {number}"))
        body, _ = arrive(body, "a", 1)
    assert rounds.outcome(body, rounds.ENDS + 2) == f"end of {rounds.ENDS + 2}"
    assert rounds.outcome(body, rounds.ENDS + 3) is None
    assert "nobody remembers" in rounds.outcome(body, 1)


def test_another_number_of_parties_is_refused():
    body, _ = arrive({}, "a", 1, 2)
    with pytest.raises(ConfigError, match="has 2 parties, not 3"):
        arrive(body, "b", 1, 3)


CLIENTS = ("a", "b", "c")
EVENTS = st.lists(
    st.tuples(st.sampled_from(["arrive", "beat", "leave"]), st.sampled_from(CLIENTS)), max_size=60
)


@settings(max_examples=300, deadline=None)
@given(parties=st.integers(1, 4), events=EVENTS)
def test_a_round_is_passed_by_as_many_as_there_are_parties_and_broken_for_all_or_none(parties, events):
    body: dict = {}
    mine: dict[tuple[str, int], int] = {}
    """The round of every party that came, by client and number."""
    numbers = iter(range(1000))
    for event, client in events:
        before = copy.deepcopy(body)
        if event == "arrive":
            party = next(numbers)
            body, (number, place) = arrive(body, client, party, parties)
            if number:
                mine[client, party] = number
                together = [other for other, theirs in mine.items() if theirs == number]
                assert place == len(together) - 1
        elif event == "beat":
            body = step(body, rounds.beat(body, client))
        else:
            here = [party for who, party in mine if who == client]
            body = step(body, rounds.leave(body, client, set(here[-1:]), f"{client} left"))
        # Steps return something new and leave what was there as it was.
        assert before == {} or before["round"] <= body["round"]
    by_round: dict[int, list[str | None]] = {}
    for number in mine.values():
        by_round.setdefault(number, []).append(rounds.outcome(body, number))
    for number, ends in by_round.items():
        assert len(set(ends)) == 1
        assert ends[0] != "" or len(ends) == parties
        assert ends[0] is not None or number == body["round"]


def test_a_party_that_comes_only_as_the_last_changes_nothing_before():
    def complete(body, me: str, party: int, parties: int):
        return rounds.complete(body, "x", parties, me, party, 10.0, me.upper())

    assert complete({}, "a", 1, 2) == (None, (rounds.MISSED, 0))
    assert complete({}, "a", 1, 1)[1] == (1, 0)
    body, _ = arrive({}, "a", 1)
    after, answer = complete(body, "b", 1, 2)
    assert answer == (1, 1)
    # Said twice, it is the same; and while the roll is called nobody else is the last.
    assert complete(after, "b", 1, 2) == (None, (1, 1))
    assert complete(after, "c", 1, 2) == (None, (rounds.MISSED, 2))
    with pytest.raises(ConfigError, match="has 2 parties, not 3"):
        complete(body, "b", 1, 3)


def test_five_hundred_clients_fit_whatever_their_labels_are():
    body: dict[str, object] = {}
    for number in range(rounds.ENDS):
        body, _ = rounds.arrive(body, "x", 1000, "first", number, 30.5, "x")
        body, _ = rounds.leave(body, "first", {number}, "\u0436" * 500)
    label = rounds.short("\u0436\udc80\n" * 20)
    assert label
    for number in range(500):
        body, _ = rounds.arrive(body, "x", 1000, f"{number:016x}", 10_000 + number, 30.5, label)
    pen = Pen()
    pen._seen = {f"{number:016x}": 10_000 for number in range(REMEMBERED)}
    assert len(body["inside"]) == 500
    assert len(pen.write(body, {})) <= MOST_BYTES
