"""The line of those who wait in one process: first come, first served, and who gives up leaves nothing."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from aiolock.lease import Terms
from aiolock.line import FEW, Line, Waiter

TERMS = Terms(None, "cancel")


@pytest.fixture
def loop():
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def test_they_come_out_in_the_order_in_which_they_came_in(loop):
    line = Line()
    assert not line
    waiters: list[Waiter] = [loop.create_future() for _ in range(5)]
    mine = [Terms(float(number), "signal") for number in range(5)]
    for waiter, terms in zip(waiters[1:], mine[1:], strict=True):
        line.join(waiter, terms)
    line.lead(waiters[0], mine[0])
    assert list(line) == waiters
    assert [line.next() for _ in range(6)] == [*zip(waiters, mine, strict=True), None]
    assert not line


def test_who_gave_up_is_passed_over_and_counts_no_more(loop):
    line = Line()
    waiters: list[Waiter] = [loop.create_future() for _ in range(4)]
    for waiter in waiters:
        line.join(waiter, TERMS)
    line.give_up(waiters[0])
    waiters[1].set_result(None)
    line.give_up(waiters[1])
    line.give_up(waiters[3])
    assert line
    assert list(line) == [waiters[2]]
    assert line.next() == (waiters[2], TERMS)
    assert not line
    assert line.next() is None


def test_giving_up_after_being_served_changes_nothing(loop):
    line = Line()
    first, second = loop.create_future(), loop.create_future()
    line.join(first, TERMS)
    line.join(second, TERMS)
    assert line.next() == (first, TERMS)
    first.set_result(None)
    line.give_up(first)
    assert list(line) == [second]


def test_those_who_gave_up_do_not_pile_up_behind_one_who_stays(loop):
    line = Line()
    stays: Waiter = loop.create_future()
    line.join(stays, TERMS)
    for _ in range(100 * FEW):
        waiter: Waiter = loop.create_future()
        line.join(waiter, TERMS)
        line.give_up(waiter)
    assert line._rest is not None
    assert len(line._rest) <= 4 * FEW
    assert list(line) == [stays]


@pytest.mark.parametrize("seed", range(20))
def test_it_is_a_list_in_which_nobody_is_looked_for(loop, seed):
    random, line, model = Random(seed), Line(), []
    for _ in range(500):
        what = random.random()
        if what < 0.5:
            waiter: Waiter = loop.create_future()
            if random.random() < 0.1:
                line.lead(waiter, TERMS)
                model.insert(0, waiter)
            else:
                line.join(waiter, TERMS)
                model.append(waiter)
        elif what < 0.8 and model:
            waiter = model.pop(random.randrange(len(model)))
            line.give_up(waiter)
        else:
            expected = (model.pop(0), TERMS) if model else None
            assert line.next() == expected
        assert list(line) == model
        assert bool(line) == bool(model)
