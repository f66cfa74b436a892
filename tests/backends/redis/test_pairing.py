"""How old a pushed grant is: the estimate is never below the truth by more than it says, whatever the clocks do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiolock.backends.redis.connection import DRIFT, FRESH, Age, Pairing
from aiolock.errors import BackendUnavailable

seconds = st.floats(0, 5, allow_nan=False)


def learn(pairing: Pairing, server: float, sent: float, received: float) -> None:
    pairing.latest = round(server * 1_000_000), sent, received


def test_without_a_pair_the_age_is_not_known():
    assert Pairing().age(1000.0, 5.0) is None


def test_a_pair_is_used_while_it_is_fresh_and_not_after_it():
    pairing = Pairing()
    learn(pairing, 1000.0, 9.0, 10.0)
    assert pairing.age(1000.0, 10.0 + FRESH) is not None
    assert pairing.age(1000.0, 10.1 + FRESH) is None


def test_what_was_learnt_is_forgotten_when_the_server_may_be_another():
    pairing = Pairing()
    learn(pairing, 1000.0, 9.0, 10.0)
    pairing.latest = None
    assert pairing.age(1000.0, 10.0) is None


async def test_what_a_server_said_is_not_applied_to_the_one_behind_the_next_connection(server, connect):
    async with connect(server.url) as client, client.lock("x"):
        backend = client._backend
        now = backend.settings.clock()
        assert backend._server.connection.pairing.age(0.0, now) is not None
        backend._server.connection._lost(BackendUnavailable("staged"))
        assert backend._server.connection.pairing.age(0.0, now) is None


def test_the_latest_pair_counts():
    pairing = Pairing()
    learn(pairing, 1000.0, 0.0, 10.0)
    learn(pairing, 1010.0, 10.0, 10.0)
    age = pairing.age(1010.0, 10.0)
    assert age is not None
    assert age == Age(0.0, 0.0)


@given(
    offset=st.floats(-1e6, 1e9),
    rate=st.floats(1 - DRIFT / 2, 1 + DRIFT / 2),
    there=seconds,
    back=seconds,
    pause=st.floats(0, FRESH - 10),
    travelled=seconds,
)
def test_the_true_age_is_within_what_is_said(offset, rate, there, back, pause, travelled):
    """The server's clock has any offset and a rate of its own; a request takes `there`, its answer `back`."""

    def server(local: float) -> float:
        return offset + local * rate

    pairing = Pairing()
    sent = 100.0
    learn(pairing, server(sent + there), sent, sent + there + back)
    stamped = sent + there + back + pause
    age = pairing.age(server(stamped), stamped + travelled)
    assert age is not None
    slack = 1e-6 * (1 + abs(offset) / 1e6)
    assert age.most >= travelled - slack
    assert age.seconds - age.error <= travelled + slack


@given(there=seconds, back=seconds, travelled=seconds, step=st.floats(0.1, 1e6))
def test_a_server_clock_stepped_back_makes_a_grant_look_older_and_never_younger(there, back, travelled, step):
    pairing = Pairing()
    learn(pairing, 1e6 + there, 0.0, there + back)
    now = there + back + travelled
    age = pairing.age(1e6 + there + back - step, now)
    assert age is not None
    assert age.most >= travelled


@given(there=seconds, back=seconds, travelled=seconds, step=st.floats(0.1, 1e6))
def test_a_server_clock_stepped_forward_is_noticed_or_costs_no_more_than_the_step(
    there, back, travelled, step
):
    pairing = Pairing()
    learn(pairing, 1e6 + there, 0.0, there + back)
    now = there + back + travelled
    age = pairing.age(1e6 + there + back + step, now)
    assert age is not None
    if step > travelled + there + back + 0.02 * now:
        # Stamped in what is the future for us: not entered before it is confirmed.
        assert not age.credible(1e9)


@pytest.mark.parametrize(
    ("age", "claim", "credible"),
    [
        (Age(0.0, 0.0), 1.0, True),
        (Age(0.3, 0.1), 1.0, True),
        (Age(0.3, 0.2), 1.0, True),
        (Age(0.4, 0.2), 1.0, False),
        (Age(-0.1, 0.2), 1.0, True),
        (Age(-0.3, 0.2), 1.0, False),
        (Age(2.0, 0.0), 3.0, False),
    ],
)
def test_a_grant_is_entered_at_once_only_if_more_than_half_of_its_claim_is_certainly_left(
    age, claim, credible
):
    assert age.credible(claim) is credible
