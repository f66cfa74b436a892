"""The pure rules about session rows: when a client relies on its session, and when others may declare it dead."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiolock.backends.rows.liveness import (
    MOST_ANNOUNCED,
    ClockCheck,
    EndedClaims,
    SessionRow,
    Verdict,
    continued,
    decode_session,
    encode_session,
    expiry,
    judge,
    needs_heartbeat,
    next_observation,
    observe,
    relied_until,
    remaining,
)
from aiolock.backends.rows.lockrow import (
    LockRow,
    RowHold,
    RowRequest,
    UnknownFormat,
    decode,
    encode,
    keep_row,
    new_tokens,
)
from aiolock.backends.rows.lockrow import TokenSource as Source
from aiolock.backends.rows.session import MOST_LEASES
from aiolock.backends.rows.store import MOST_VALUE, StoreClock


def test_a_hold_is_certain_until_the_earlier_of_heartbeat_and_showing():
    assert relied_until(10.0, 11.0, 3.0) == relied_until(10.0, 10.0, 3.0) == relied_until(12.0, 10.0, 3.0)
    assert 12.5 < relied_until(10.0, 10.0, 3.0) < 13.0


def test_an_acquire_sends_a_heartbeat_when_less_than_half_a_ttl_is_left():
    assert not needs_heartbeat(11.0, 10.0, 3.0)
    assert needs_heartbeat(11.5, 10.0, 3.0)


@pytest.mark.parametrize("seconds", [0.1, 30.0])
def test_the_ttl_that_counts_is_the_one_in_the_session_row(seconds):
    series = observe(None, "v", SessionRow(3.0), 10.0)
    assert judge(series, seconds, 12.9) is Verdict.ALIVE
    assert judge(series, seconds, 13.0) is Verdict.OVER


def test_a_series_is_counted_from_the_first_answer_that_showed_the_version():
    series = observe(None, "v", SessionRow(3.0), 10.0)
    series = observe(series, "v", SessionRow(3.0), 12.0)
    assert judge(series, 3.0, 13.0) is Verdict.OVER
    series = observe(series, "w", SessionRow(3.0), 12.5)
    assert judge(series, 3.0, 13.0) is Verdict.ALIVE


def test_absence_is_a_version_like_any_other_unless_the_store_deletes_what_has_expired():
    series = observe(None, "", None, 10.0)
    assert judge(series, 3.0, 12.9) is Verdict.ALIVE
    assert judge(series, 3.0, 13.0) is Verdict.OVER
    assert judge(series, 3.0, 10.0, expires=True) is Verdict.DEAD


def test_an_unknown_format_is_never_declared_dead():
    assert judge(observe(None, "v", None, 0.0), 3.0, 1e9) is Verdict.ALIVE


def test_the_shared_clock_proves_an_end_only_past_a_margin_and_while_it_is_trusted():
    series = observe(None, "v", SessionRow(3.0, expires=StoreClock(103.0)), 10.0)
    assert judge(series, 3.0, 10.1, StoreClock(103.01)) is Verdict.ALIVE
    assert judge(series, 3.0, 10.1, StoreClock(103.2)) is Verdict.OVER
    assert judge(series, 3.0, 10.1, StoreClock(103.2), trusted=False) is Verdict.ALIVE
    assert judge(series, 3.0, 10.1) is Verdict.ALIVE


@pytest.mark.parametrize(
    ("clock", "verdict"),
    [
        (StoreClock(5.0, "other", "zone"), Verdict.OVER),
        (StoreClock(1e6, "boot", "other"), Verdict.ALIVE),
        (StoreClock(1e6, "boot", "zone"), Verdict.OVER),
        (StoreClock(1e6, "", "zone"), Verdict.ALIVE),
    ],
)
def test_another_boot_is_dead_and_another_time_namespace_is_observed(clock, verdict):
    series = observe(None, "v", SessionRow(3.0, expires=StoreClock(100.0, "boot", "zone")), 10.0)
    assert judge(series, 3.0, 10.1, clock) is verdict


@pytest.mark.parametrize(
    ("wall", "clock", "verdict"),
    [
        (1_000.0, StoreClock(5.0, "other", "zone"), Verdict.KEPT),
        (999_999.0, StoreClock(5.0, "other", "another"), Verdict.KEPT),
        (1_000_000.0, StoreClock(5.0, "other", "zone"), Verdict.OVER),
        # In the same run of the machine the wall clock counts for nothing.
        (2_000_000.0, StoreClock(99.0, "boot", "zone"), Verdict.ALIVE),
        (0.0, StoreClock(200.0, "boot", "zone"), Verdict.OVER),
        (2_000_000.0, StoreClock(200.0, "boot", "another"), Verdict.ALIVE),
        (2_000_000.0, StoreClock(5.0), Verdict.ALIVE),
    ],
)
def test_a_kept_session_of_an_earlier_run_of_the_machine_ends_by_the_wall_clock(wall, clock, verdict):
    row = SessionRow(60.0, expires=StoreClock(100.0, "boot", "zone"), kept=1_000_000.0)
    assert judge(observe(None, "v", row, 10.0), 60.0, 10.1, clock, wall=wall) is verdict


@pytest.mark.parametrize(("wall", "left"), [(999_970.0, 30.0), (900_000.0, 60.0), (1_000_001.0, 0.0)])
def test_a_kept_session_is_continued_with_what_is_left_and_never_with_more_than_its_ttl(wall, left):
    row = SessionRow(60.0, 1, expires=StoreClock(100.0, "boot", "zone"), kept=1_000_000.0, extra={"new": 1})
    clock = StoreClock(7.0, "other", "zone")
    assert remaining(row, clock, wall) == left
    after = continued(row, clock, 10.0, 10.0, wall)
    assert after == SessionRow(
        left, 1, expires=StoreClock(7.0 + left, "other", "zone"), kept=wall + left, extra={"new": 1}
    )
    assert remaining(after, clock, 0.0) == left
    series = observe(None, "w", after, 10.0)
    for seconds, verdict in ((7.0 + left - 1, Verdict.ALIVE), (7.0 + left + 1.3, Verdict.OVER)):
        assert judge(series, 60.0, 9.0, clock._replace(seconds=seconds), wall=1e9) is verdict


def test_what_a_session_has_left_is_known_by_the_shared_clock_or_is_its_ttl():
    row = SessionRow(60.0, expires=StoreClock(100.0, "boot"))
    assert remaining(row, None, 0.0) == remaining(SessionRow(60.0), StoreClock(1.0), 0.0) == 60.0
    assert remaining(row, StoreClock(90.0, "boot"), 0.0) == 10.0
    assert remaining(row, StoreClock(10.0, "boot"), 0.0) == 60.0
    assert remaining(row, StoreClock(190.0, "boot"), 0.0) == remaining(row, StoreClock(1.0, "x"), 0.0) == 0.0


def test_an_expiry_is_never_before_what_the_holder_relies_on():
    end = expiry(StoreClock(100.0), 10.0, 12.0, 3.0)
    assert end.seconds >= 105.0


@given(
    st.lists(st.tuples(st.floats(0, 2), st.floats(0, 0.5), st.booleans()), min_size=1, max_size=8),
    st.sampled_from((0.99, 1.0, 1.01)),
)
def test_no_heartbeat_ends_what_an_earlier_one_has_promised(beats, rate):
    """Each end is counted from a reading of its own, newer or older, and takes the place of the one before."""
    ttl, now, promised = 3.0, 0.0, -math.inf
    reading = StoreClock(100.0), 0.0
    for passed, way, heard in beats:
        now += passed
        row = SessionRow(ttl, expires=expiry(*reading, now, ttl))
        promised = max(promised, relied_until(now, now, ttl))
        for ahead in (0.0, 0.01, promised - now):
            moment = now + ahead
            series, clock = observe(None, "v", row, moment), StoreClock(100.0 + moment * rate)
            assert moment > promised or judge(series, ttl, moment, clock) is Verdict.ALIVE
        if heard:
            # The clock was read on the way back, after ``way`` seconds; the reading is dated by the sending.
            reading = StoreClock(100.0 + (now + way) * rate), now
            now += way


def test_a_clock_that_was_stepped_is_not_trusted_for_a_ttl():
    check = ClockCheck()
    for moment in (0.0, 1.0, 2.0):
        check.read(StoreClock(100 + moment), moment, moment + 0.01)
    assert check.trusted(3.0, 2.0)
    check.read(StoreClock(3703.0), 3.0, 3.01)
    assert not check.trusted(3.0, 3.1)
    check.read(StoreClock(3706.1), 6.1, 6.11)
    assert check.trusted(3.0, 6.2)


def test_observations_are_frequent_enough():
    assert next_observation([3.0, 30.0]) == pytest.approx(0.3)
    assert next_observation([300.0]) == 2.0
    assert next_observation([]) == 2.0


def test_an_ended_claim_is_mentioned_until_its_removal_is_durable():
    ended = EndedClaims()
    ended.begin("a", "row", "x")
    ended.begin("b", "row", "x")
    ended.flushed(9, 1)
    assert ended.announce() == ("a", "b")
    ended.removed("a", flushed=True, connection=1, order=10)
    ended.removed("b", flushed=False, connection=1, order=11)
    assert ended.announce() == ("b",)
    # Sent before the answer to the removal, or on another connection.
    ended.flushed(10, 1)
    ended.flushed(12, 2)
    assert ended.announce() == ("b",)
    ended.flushed(12, 1)
    assert ended.announce() == ()


def test_ended_claims_are_announced_in_their_order_as_far_as_the_longest_row_has_room():
    ended = EndedClaims()
    names = [f"{number:016x}" for number in range(MOST_ANNOUNCED + 10)]
    for name in names:
        ended.begin(name, "row", "x")
    first = ended.announce()
    assert first == tuple(names[:MOST_ANNOUNCED])
    assert [ended.announced(name) for name in (names[0], names[-1])] == [True, False]
    leases = {names[0]: (2**62, 1e9, "x" * MOST_LEASES, 1)}
    row = SessionRow(
        31_536_000.0, 10**9, first, False, StoreClock(1e9, "b" * 36, "z" * 20), 1e9, leases, more=True
    )
    assert len(encode_session(row)) < MOST_VALUE
    for name in names[:20]:
        ended.removed(name, flushed=True, connection=1, order=1)
    assert ended.announce() == tuple(names[20:])


def test_after_a_reconnect_an_ended_claim_is_checked_before_a_heartbeat_can_let_it_go():
    ended = EndedClaims()
    ended.begin("a", "row", "x")
    ended.removed("a", flushed=False, connection=1, order=10)
    assert ended.interrupted() == [("a", "row", "x")]
    ended.flushed(20, 1)
    ended.flushed(20, 2)
    assert ended.announce() == ("a",)
    ended.removed("a", flushed=False, connection=2, order=21)
    ended.flushed(22, 2)
    assert ended.announce() == ()


def test_a_session_row_survives_its_encoding_with_fields_that_are_not_known():
    leases = {"a": (7, 1.5, "läbel", 3)}
    row = SessionRow(
        3.0,
        7,
        ("a",),
        expires=StoreClock(5.0, "b", "z"),
        kept=9.5,
        leases=leases,
        more=True,
        extra={"new": 1},
    )
    assert decode_session(encode_session(row)) == row
    wrong = (b'3{"d":"x","n":1}', b'3{"d":3,"n":"1"}', b'3{"d":3,"n":1,"e":[1]}', b'3{"d":3,"n":1,"c":["x"]}')
    wrong += (b'3{"d":3,"n":1,"k":"x"}', b'3{"d":3,"n":1,"k":-1}')
    wrong += tuple(
        b'3{"d":3,"n":1,"p":%b}' % value
        for value in (b"[1]", b'{"a":[1,2,"x"]}', b'{"a":["1",2,"x",3]}', b'{"a":[1,2,"x",-3]}', b'{"a":5}')
    )
    for value in (b"", b"1{}", b"3{}", b"3nonsense", *wrong):
        with pytest.raises(UnknownFormat):
            decode_session(value)


def test_tokens_rise_above_the_row_the_client_and_the_store():
    assert new_tokens(10, 1, Source(0, 0)) == (11, 1, 11)
    assert new_tokens(10, 1, Source(20, 0)) == (21, 1, 21)
    assert new_tokens(10, 1, Source(20, 30)) == (30, 1, 30)
    first, count, last = new_tokens(10, 8, Source(20, 30))
    assert (first, count, last) == (23, 8, 30)
    assert new_tokens(28, 8, Source(20, 30)) == (29, 2, 30)
    assert new_tokens(40, 8, Source(20, 30)) == (41, 1, 41)
    # A row that was lost: another client may have been given the tokens below.
    assert new_tokens(0, 8, Source(20, 30)) == (30, 1, 30)


def test_only_a_free_row_may_be_deleted():
    assert keep_row(LockRow()) == 60.0
    assert keep_row(LockRow(declared=2, current=2)) == 60.0
    for paused in (LockRow(declared=2, current=0), LockRow(current=0)):
        assert keep_row(paused) == 86_400.0
        assert decode(encode(paused)) == paused
    assert keep_row(LockRow(declared=1, current=2)) == 86_400.0
    request = RowRequest("a", "mutex", 3.0)
    assert keep_row(LockRow(holds={"a": RowHold(request, 1, 0.0, kept=True)})) is None
    assert keep_row(LockRow(queue={"a": request})) is None
