"""The rules over one lock row: against a naive specification under random steps, and at the edges that it does not reach."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aiolock.backends.rows.lockrow import (
    FEW,
    Ask,
    Batch,
    Downgrade,
    Enter,
    Entered,
    Force,
    Leave,
    Liveness,
    LockRow,
    RowRequest,
    Serve,
    SetLimit,
    Step,
    TokenSource,
    UnknownFormat,
    apply,
    decode,
    encode,
    keep_row,
    new_tokens,
)
from aiolock.backends.rows.store import MOST_VALUE

CLIENTS = ("a-1", "b-1", "c-1")
NOW = 1_763_851_234_567_890


def request(number: int, mode: str = "mutex", session: str = "a-1", **fields) -> RowRequest:
    return RowRequest(id=f"{mode}{number}{session}", mode=mode, ttl=30.0, session=session, **fields)


def enter(row: LockRow, asked: RowRequest, *, wait: bool = True, tick: int = NOW, **options) -> Batch:
    return apply(row, [Enter(asked.id, asked, wait)], Liveness(), TokenSource(0, tick), **options)


# --- against a specification


class AgainstSpecification(RuleBasedStateMachine):
    """Two plain lists say who holds and who waits; after every step the row says the same.

    Each step is sent by one of three clients, stored and read again; it may be repeated, and the row may be purged or lost.
    """

    modes = st.sampled_from(["mutex", "read", "read", "write", "permits", "permits"])
    numbers = st.integers(0, 3)
    sessions = st.sampled_from(CLIENTS)

    def __init__(self) -> None:
        super().__init__()
        self.row = LockRow()
        self.tick = NOW
        self.holds: list[list] = []
        """Id, mode, permits and session of each."""
        self.queue: list[RowRequest] = []
        self.limit: int | None = None
        self.floors = dict.fromkeys(CLIENTS, 0)
        self.top = 0
        """The highest token that was given."""
        self.seen: dict[str, int] = {}
        self.dead: set[str] = set()
        self.number = 0

    # what should happen

    def admitted(self, asked: RowRequest) -> bool:
        modes = [hold[1] for hold in self.holds]
        if asked.mode == "read":
            return set(modes) <= {"read"}
        if asked.mode == "permits":
            return sum(hold[2] for hold in self.holds) + asked.permits <= (
                3 if self.limit is None else self.limit
            )
        return not modes

    def hold(self, asked: RowRequest) -> None:
        self.holds.append([asked.id, asked.mode, asked.permits, asked.session])

    def serve(self) -> None:
        self.holds = [hold for hold in self.holds if hold[3] not in self.dead]
        self.queue = [asked for asked in self.queue if asked.session not in self.dead]
        while self.queue and self.admitted(self.queue[0]):
            self.hold(self.queue.pop(0))

    # what is done

    def step(self, step: Step, client: str = "a-1", **options) -> object:
        self.tick += 50
        own = client if client not in self.dead else ""
        live = (
            {asked.id: None for asked in self.queue}
            | {hold[0]: None for hold in self.holds}
            | {step.id: None}
        )
        before = encode(self.row)
        known = Liveness(self.dead, own={own: live} if own else {})
        batch = apply(self.row, [step], known, TokenSource(self.floors[client], self.tick), **options)
        assert encode(self.row) == before, "the row that was read stays as it is"
        if batch.changed:
            self.row = decode(encode(batch.row))
        self.floors[client] = max(self.floors[client], self.row.token)
        self.learn_tokens()
        return batch.results[0]

    def learn_tokens(self) -> None:
        """Check that every new hold has tokens above all that were given before."""
        new = [hold for name, hold in self.row.holds.items() if name not in self.seen and not hold.kept]
        for hold in sorted(new, key=lambda hold: hold.token):
            assert hold.token > self.top
            self.top = hold.token + hold.request.block - 1
            self.seen[hold.request.id] = hold.token

    def usable(self, asked: RowRequest) -> bool:
        """A name has locks of one family, a client asks once with an id, and the dead ask for nothing."""
        families = {"mutex": 0, "read": 1, "write": 1, "permits": 2}
        present = {hold[1] for hold in self.holds} | {other.mode for other in self.queue}
        return {families[mode] for mode in present} <= {
            families[asked.mode]
        } and asked.session not in self.dead

    @rule(mode=modes, session=sessions, wait=st.booleans(), permits=st.integers(1, 2), again=st.booleans())
    def enter(self, mode: str, session: str, wait: bool, permits: int, again: bool) -> None:
        self.number += 1
        block = 5 if mode == "mutex" else 1
        asked = request(
            self.number, mode, session, block=block, permits=permits if mode == "permits" else 1, limit=3
        )
        self.serve()
        if not self.usable(asked):
            return
        if mode == "permits" and self.limit is None:
            self.limit = 3
        named_another = mode == "permits" and self.limit != 3 and self.row.declared not in (0, 3)
        result = self.step(Enter(asked.id, asked, wait), session)
        assert isinstance(result, Entered)
        if named_another:
            assert result.limit == self.limit
            return
        if not self.queue and self.admitted(asked):
            self.hold(asked)
            assert result.token == self.seen[asked.id]
        else:
            assert not result.token
            assert [ahead.id for ahead in self.row.ahead([asked.id])] == [
                *(hold[0] for hold in self.holds),
                *(other.id for other in self.queue),
            ]
            if wait:
                self.queue.append(asked)
        if again and (wait or result.token):
            repeated = self.step(Enter(asked.id, asked, wait), session)
            assert isinstance(repeated, Entered)
            assert (repeated.token, repeated.tokens) == (result.token, result.tokens)

    @precondition(lambda self: self.holds or self.queue)
    @rule(index=st.integers(0, 9), keep=st.booleans(), again=st.booleans())
    def leave(self, index: int, keep: bool, again: bool) -> None:
        self.serve()
        entries = [(hold[0], hold[3]) for hold in self.holds if not hold[0].endswith("kept")]
        entries += [(asked.id, asked.session) for asked in self.queue]
        if not entries:
            return
        name, session = entries[index % len(entries)]
        held = next((hold for hold in self.holds if hold[0] == name), None)
        mode, permits = (held[1], held[2]) if held is not None else ("", 1)
        kept = RowRequest(f"{name} kept", mode, 5.0, permits=permits, session=f"{session} {name}")
        result = self.step(Leave(name, kept if keep else None), session)
        assert result == (held is not None)
        if held is not None and keep:
            self.holds = [hold for hold in self.holds if hold[0] != name]
            self.holds.append([kept.id, mode, permits, kept.session])
        else:
            self.holds = [hold for hold in self.holds if hold[0] != name]
        self.queue = [one for one in self.queue if one.id != name]
        self.serve()
        if again:
            assert self.step(Leave(name, kept if keep else None), session) is False

    @precondition(lambda self: any(hold[1] == "write" for hold in self.holds))
    @rule(again=st.booleans())
    def downgrade(self, again: bool) -> None:
        self.serve()
        for hold in [hold for hold in self.holds if hold[1] == "write"]:
            hold[1] = "read"
            for _ in range(1 + again):
                result = self.step(Downgrade(hold[0]), hold[3])
                assert isinstance(result, Entered)
                assert result.token == self.seen[hold[0]]
            self.serve()

    @precondition(lambda self: {hold[1] for hold in self.holds} <= {"permits"})
    @rule(limit=st.integers(0, 4))
    def set_limit(self, limit: int) -> None:
        self.serve()
        if any(one.mode != "permits" for one in self.queue):
            return
        self.limit = limit
        self.step(SetLimit("", limit))
        self.step(Serve())
        self.serve()

    @rule()
    def force(self) -> None:
        self.serve()
        assert self.step(Force()) == bool(self.holds)
        self.holds = []
        self.serve()

    @rule()
    def ask(self) -> None:
        self.serve()
        asked = [hold for hold in self.holds if not hold[0].endswith("kept")]
        assert self.step(Ask("", "please")) == bool(asked)
        assert all((hold.asked == "please") != hold.kept for hold in self.row.holds.values())

    @rule(session=sessions)
    def a_session_dies(self, session: str) -> None:
        # A client goes on with another session, so that the test goes on.
        self.dead = {session}
        self.serve()
        self.step(Serve())
        self.dead = set()

    @rule()
    def a_kept_hold_ends(self) -> None:
        self.dead = {hold[3] for hold in self.holds if hold[0].endswith("kept")}
        self.serve()
        self.step(Serve())
        self.dead = set()

    @rule(lost=st.booleans())
    def the_row_is_purged_or_lost(self, lost: bool) -> None:
        if lost or self.row.free:
            # Faster than the fastest purge, and than two grants can follow each other.
            self.tick += 1
            self.row = LockRow()
            self.holds, self.queue, self.limit = [], [], None

    # what must be true

    @invariant()
    def the_same_hold_and_wait(self) -> None:
        assert sorted(self.row.holds) == sorted(hold[0] for hold in self.holds)
        assert list(self.row.queue) == [asked.id for asked in self.queue]

    @invariant()
    def holds_are_compatible(self) -> None:
        modes = {hold.request.mode for hold in self.row.holds.values()}
        assert len(self.row.holds) < 2 or modes == {"read"} or modes == {"permits"}

    @invariant()
    def a_row_in_use_does_not_expire(self) -> None:
        assert (keep_row(self.row) is None) == bool(self.holds or self.queue)


TestAgainstSpecification = AgainstSpecification.TestCase
TestAgainstSpecification.settings = settings(
    max_examples=150, stateful_step_count=40, database=None, derandomize=True
)


# --- tokens


def test_a_block_after_a_purge_contains_no_token_that_was_given_before():
    first, count, last = new_tokens(NOW, 1024, TokenSource(0, NOW + 100))
    assert (first, count, last) == (NOW + 1, 100, NOW + 100)
    # The row is lost, and its next grant comes within 1,024 µs.
    again, count, _ = new_tokens(0, 1024, TokenSource(0, NOW + 200))
    assert again > last
    assert count == 1


@pytest.mark.parametrize("last", [0, 10])
def test_a_block_lies_above_all_tokens_that_this_client_has_seen(last):
    first, count, top = new_tokens(last, 1024, TokenSource(5_000, 0))
    assert first == 5_001
    assert top == first + count - 1


# --- (18) a leave that finds nothing


def test_a_leave_after_an_unanswered_write_changes_the_version_and_is_flushed():
    row = LockRow("x", token=7)
    leave = [Leave("gone")]
    assert not apply(row, leave, Liveness(), TokenSource(0, NOW)).changed
    batch = apply(row, leave, Liveness(), TokenSource(0, NOW), doubt=True)
    assert batch.changed
    assert batch.flush


def test_a_release_without_waiters_need_not_be_flushed_but_one_that_keeps_or_grants_is():
    asked, other = request(1), request(2)
    held = enter(LockRow("x"), asked).row
    assert not apply(held, [Leave(asked.id)], Liveness(), TokenSource(0, NOW)).flush
    kept = request(1, session="a-1 k")
    assert apply(held, [Leave(asked.id, kept)], Liveness(), TokenSource(0, NOW)).flush
    assert apply(enter(held, other).row, [Leave(asked.id)], Liveness(), TokenSource(0, NOW)).flush


# --- (19) a full row


def full_row(mode: str = "read") -> LockRow:
    """A row behind whose writer as many wait as there is room for."""
    row = enter(LockRow("x"), request(0, "write")).row
    for number in range(2_000):
        batch = enter(row, request(number, mode, f"{number:016}-1", label="worker of a host"))
        if batch.results == [None]:
            return row
        row = batch.row
    raise AssertionError("the row is never full")


def test_all_requests_of_a_full_row_can_be_granted_by_one_write():
    row = full_row()
    assert len(row.queue) > 200
    batch = apply(row, [Leave(request(0, "write").id)], Liveness(), TokenSource(0, NOW))
    assert batch.results == [True]
    assert not batch.row.queue
    assert len(encode(batch.row)) <= MOST_VALUE


def test_a_request_to_release_that_does_not_fit_is_refused_by_itself():
    row = apply(full_row(), [Leave(request(0, "write").id)], Liveness(), TokenSource(0, NOW)).row
    some = next(iter(row.holds))
    batch = apply(row, [Ask("", "r" * 500), Leave(some)], Liveness(), TokenSource(0, NOW))
    assert batch.results == [None, True]
    assert len(encode(batch.row)) <= MOST_VALUE


def test_the_holder_of_a_full_row_can_be_asked_to_release():
    """Of all rows, it is the one in which that is wanted."""
    row = full_row()
    longest = "é" * 128
    batch = apply(row, [Ask("", "first"), Ask("", longest), Leave("nobody")], Liveness(), TokenSource(0, NOW))
    assert batch.results == [True, True, False]
    assert next(iter(batch.row.holds.values())).asked == longest
    assert len(encode(batch.row)) <= MOST_VALUE
    assert enter(batch.row, request(9_999, "read", "new-1")).results == [None]
    # With and without a hold that stays.
    holder = request(0, "write")
    for kept in (None, replace(holder, id=f"{holder.id} kept", session="kept-1")):
        left = apply(decode(encode(batch.row)), [Leave(holder.id, kept)], Liveness(), TokenSource(0, NOW))
        assert left.results == [True]
        assert len(encode(left.row)) <= MOST_VALUE


def test_a_request_that_does_not_fit_is_refused_beside_a_release_that_does():
    row = full_row()
    batch = apply(
        row,
        [Enter("new", request(9_999, "read", label="x" * 100)), Leave("write0a-1")],
        Liveness(),
        TokenSource(0, NOW),
    )
    assert batch.results[1] is True
    assert len(encode(batch.row)) <= MOST_VALUE


def crowd(number: int, session: str) -> list[Enter]:
    """So many requests of one client."""
    asked = [request(each, "read", session, label="worker of a host") for each in range(number)]
    return [Enter(one.id, one, wait=True) for one in asked]


def test_one_client_leaves_room_to_the_others():
    row = enter(LockRow("x"), request(0, "write", "h-1")).row
    steps = crowd(1_000, "a-1")
    batch = apply(row, steps, Liveness(own={"a-1": {step.id: 1 for step in steps}}), TokenSource(0, NOW))
    admitted = [step.id for step, result in zip(steps, batch.results, strict=True) if result is not None]
    assert list(batch.row.queue) == admitted == [step.id for step in steps[: len(admitted)]]
    assert 200 < len(admitted) < 500
    for client in ("b-1", "c-1", "d-1"):
        steps = crowd(20, client)
        batch = apply(
            batch.row, steps, Liveness(own={client: {step.id: 1 for step in steps}}), TokenSource(0, NOW)
        )
        assert sum(result is not None for result in batch.results) == FEW


def test_the_room_that_leaves_is_that_of_those_who_come_in_the_same_write():
    row = full_row()
    first = next(iter(row.queue.values()))
    steps = [*crowd(3, "new-1"), Leave(first.id)]
    batch = apply(row, steps, Liveness(), TokenSource(0, NOW))
    assert [result is not None for result in batch.results] == [True, False, False, True]
    assert list(batch.row.queue)[-1] == steps[0].id


def test_no_request_overtakes_one_for_which_there_is_no_room():
    row = full_row()
    row.queue.popitem()
    long, short = request(1, "read", "long-1", label="x" * 250), request(2, "read", "short-1")
    batch = apply(
        row, [Enter(one.id, one, wait=True) for one in (long, short)], Liveness(), TokenSource(0, NOW)
    )
    assert batch.results == [None, None]
    assert not batch.changed
    assert enter(row, short).results == [Entered()]


# --- (20) the format


@pytest.mark.parametrize(
    "value", [b"1{}", b"2", b"3", b"3[]", b"3{}", b'3{"v":"x"}', b"\xff", b'3{"v":"x","t":1,"h":[1]}']
)
def test_an_unknown_format_is_told(value):
    with pytest.raises(UnknownFormat):
        decode(value)


HOLD = {"i": "a", "s": "s-1", "m": "permits", "d": 3.0, "t": 1, "w": 1.5, "a": "ü", "n": 2, "l": 3, "b": 1}
ROW = {"v": "x", "t": 5, "c": [1, 2, 3], "f": ["b"], "h": [HOLD]}


def written(row: object) -> bytes:
    return b"3" + json.dumps(row).encode()


def test_what_this_library_writes_can_be_read():
    assert decode(written(ROW)).holds["a"].request.permits == 2


@pytest.mark.parametrize(
    "row",
    [
        *({**ROW, "v": value} for value in (5, None, "\ud800")),
        *({**ROW, "t": value} for value in ("5", None, True, -1, 1.5, 1e400, 2**62)),
        *({**ROW, "c": value} for value in ([1, 2], [1, 2, "3"], 5)),
        *({**ROW, "f": value} for value in ([1], 5)),
        *({**ROW, part: value} for part in "hq" for value in ([1], [None], "h", 5)),
        *(
            {**ROW, "h": [{**HOLD, key: value}]}
            for key, values in {
                "i": [5, [], None, "\ud800", ""],
                "s": [5, None, "a\0-1", "a\ud800", "ü-1"],
                "m": [5, None],
                "d": ["x", None, -1, math.nan, math.inf, True],
                "t": ["1", 1.0, -1],
                "w": ["x", None, 1e300, -1, math.nan],
                "r": [5, ["x"]],
                "a": [5],
                "n": ["2", 1.5, -1],
                "l": ["x"],
                "b": ["x", None],
            }.items()
            for value in values
        ),
    ],
    ids=lambda row: json.dumps(row)[:60],
)
def test_a_row_with_values_of_a_wrong_type_or_range_is_an_unknown_format(row):
    with pytest.raises(UnknownFormat):
        decode(written(row))


@pytest.mark.parametrize("field", ["t", "w", "r", "k"])
def test_an_entry_with_a_field_of_holds_becomes_a_hold_that_can_be_read(field):
    entry = {"i": "b", "s": "s", "m": "mutex", "d": 3.0, field: -1, "also": 2}
    row = apply(
        decode(written({**ROW, "h": [], "q": [entry]})), [Serve()], Liveness(), TokenSource(0, NOW)
    ).row
    [hold] = decode(encode(row)).holds.values()
    assert (hold.token, hold.asked, hold.kept, dict(hold.request.extra)) == (NOW, None, False, {"also": 2})


def test_unknown_fields_survive_a_change():
    value = (
        b'3{"new":[1],"v":"x","t":5,"h":[{"i":"a","s":"s","m":"mutex","d":3.0,"t":5,"w":1.0,"later":true}],'
        b'"q":[{"i":"b","s":"s","m":"mutex","d":3.0,"also":2}]}'
    )
    row = apply(decode(value), [Leave("a")], Liveness(), TokenSource(0, NOW)).row
    assert row.extra == {"new": [1]}
    assert dict(row.holds["b"].request.extra) == {"also": 2}
    assert b'"also":2' in encode(row)


# --- what counts


def test_an_entry_of_a_dead_session_or_an_ended_claim_counts_for_no_client():
    first, second, third = request(1), request(2, session="b-1"), request(3, session="c-1")
    row = enter(enter(enter(LockRow("x"), first).row, second).row, third).row
    known = Liveness({"a-1"}, {"b-1": frozenset({second.id})})
    batch = apply(row, [Serve()], known, TokenSource(0, NOW))
    assert list(batch.row.holds) == [third.id]
    assert not batch.row.queue
    assert batch.flush
    assert batch.notify == {"c"}


def test_an_entry_of_this_client_that_it_has_forgotten_is_removed_by_any_write():
    row = enter(LockRow("x"), request(1)).row
    batch = apply(row, [Serve()], Liveness(own={"a-1": {}}), TokenSource(0, NOW))
    assert batch.changed
    assert batch.row.free
