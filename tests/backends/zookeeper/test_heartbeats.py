"""Until when a session certainly lives: against a model of a leader that hears late, and forgets what it has not heard."""

from __future__ import annotations

from random import Random

import pytest

from aiolock.backends.zookeeper.session import Heartbeats, interval


def test_a_new_session_counts_from_before_it_was_asked_for():
    assert Heartbeats(10, opened=100).deadline == pytest.approx(110 - 0.3)


def test_one_acknowledgement_alone_proves_nothing():
    beats = Heartbeats(12, opened=0)
    before = beats.deadline
    assert not beats.acknowledge(2.0, 2.1)
    assert beats.deadline == before


def test_an_acknowledgement_proves_an_earlier_one_that_was_answered_long_enough_before():
    beats = Heartbeats(12, opened=0)
    beats.acknowledge(2.0, 2.1)
    assert not beats.acknowledge(4.0, 4.1), "only 1.9 s after the first was answered"
    assert beats.acknowledge(6.0, 6.1)
    assert beats.deadline == pytest.approx(2.0 + 12 - 0.32)
    assert beats.acknowledge(8.0, 8.1)
    assert beats.deadline == pytest.approx(4.0 + 12 - 0.32)


def test_a_known_tick_counts_instead_of_a_quarter_of_the_timeout():
    beats = Heartbeats(12, opened=0, tick_time=0.5)
    beats.acknowledge(2.0, 2.1)
    assert beats.acknowledge(2.6, 2.7)
    slow = Heartbeats(4, opened=0, tick_time=2)
    slow.acknowledge(1.0, 1.1)
    assert not slow.acknowledge(2.2, 2.3)


def test_the_deadline_never_goes_back():
    beats = Heartbeats(4, opened=100)
    beats.acknowledge(50, 51)
    assert not beats.acknowledge(60, 61)
    assert beats.deadline == pytest.approx(104 - 0.24)


@pytest.mark.parametrize("timeout", [1.0, 4.0, 12.0, 40.0])
def test_a_holder_on_a_good_link_is_certain_for_half_of_the_timeout(timeout):
    beats = Heartbeats(timeout, opened=0)
    now = 0.0
    for _ in range(50):
        now += 0.002
        beats.acknowledge(now - 0.002, now)
        now += interval(timeout)
        if timeout >= 4:
            assert beats.deadline - now >= timeout / 2 - beats.margin - 0.02


@pytest.mark.parametrize("seed", range(300))
def test_no_belief_outlives_the_session_at_the_leader(seed):
    """The follower reports what it has heard every half tick, and dies with what it has not reported."""
    random = Random(seed)
    tick = random.choice([0.2, 0.5, 2.0])
    timeout = random.choice([2, 3, 5, 10, 20]) * tick
    phase = random.uniform(0, tick / 2)
    died = random.uniform(0, 4 * timeout)
    beats = Heartbeats(timeout, opened=0.0)
    heard = 0.0
    arrived: list[float] = []
    now = random.uniform(0, 0.1)
    while True:
        sent = now
        up = sent + random.uniform(0, 0.05)
        down = up + random.uniform(0, 0.05)
        if up > died:
            break
        # The sync is answered through the leader, which by then has heard every report sent before.
        reports = phase + tick / 2 * ((up - phase) // (tick / 2))
        heard = max([heard, *(when for when in arrived if when <= reports)])
        arrived.append(up)
        beats.acknowledge(sent, down)
        # A session ends no earlier than the timeout after the leader has last heard of it.
        assert beats.deadline <= heard + timeout
        now = down + random.uniform(0, 1.5) * interval(timeout)
