"""Who may enter: over random queues nobody is inside with another, and nobody waits for what never comes."""

from __future__ import annotations

from random import Random
from uuid import UUID

import pytest

from aiolock.backends.zookeeper.rules import LAST, RULES, SIMPLE, decide, prefix, queue
from aiolock.contract import Mode
from aiolock.errors import BackendRefused

MUTEX = RULES[Mode.MUTEX]


def attempt(number: int) -> str:
    return str(UUID(int=number))


def node(number: int, sequence: int) -> str:
    return f"{prefix(attempt(number))}{sequence:010d}"


def test_a_queue_is_in_the_order_of_its_numbers_whatever_the_names():
    children = [node(1, 7), "ffff__lock__0000000003", node(2, 5), "_c_abc-lock-0000000010", "note"]
    assert [place.sequence for place in queue("/x", children)] == [3, 5, 7, 10]


@pytest.mark.parametrize(
    "name",
    [
        "lock-0b2c-0000000004",
        "0000000001",
        "_c_0b2c-__READ__0000000001",
        "_c_0b2c-lease-0000000001",
        SIMPLE,
    ],
)
def test_a_contender_that_would_not_wait_for_us_is_refused_by_name(name):
    with pytest.raises(BackendRefused, match=name):
        queue("/x", [node(1, 1), name])


@pytest.mark.parametrize("sequence", ["-2147483648", f"{LAST:010d}"])
def test_numbers_near_their_end_are_refused(sequence):
    with pytest.raises(BackendRefused, match="used up"):
        queue("/x", [f"{prefix(attempt(1))}{sequence}"])


def test_nobody_waits_for_oneself():
    places = queue("/x", [node(1, 4), node(1, 6), node(2, 5)])
    verdict, surplus = decide(MUTEX, places, node(1, 6), attempt(1))
    assert verdict is not None
    assert verdict.wait_for == node(2, 5)
    assert surplus == [node(1, 4)]


def test_whoever_is_not_in_the_list_is_told_so():
    assert decide(MUTEX, queue("/x", [node(2, 5)]), node(1, 4), attempt(1)) == (None, [])


@pytest.mark.parametrize("seed", range(200))
def test_random_queues_are_safe_and_live(seed):
    """A model of server and clients: each looks only when it is woken, and a wake-up comes only from what it waits for."""
    random = Random(seed)
    present: dict[str, int] = {}
    waits_for: dict[str, str | None] = {}
    served: list[int] = []
    arrived = 0

    def look(name: str) -> None:
        verdict, _ = decide(MUTEX, queue("/x", list(present)), name, attempt(present[name]))
        assert verdict is not None
        assert verdict.demand == any(int(other[-10:]) > int(name[-10:]) for other in present)
        assert verdict.wait_for is None or verdict.wait_for in present
        waits_for[name] = verdict.wait_for

    def leave(name: str) -> None:
        if waits_for.pop(name) is None:
            served.append(present[name])
        del present[name]
        woken = [other for other, awaited in waits_for.items() if awaited == name]
        assert len(woken) <= 1, "a herd"
        for other in woken:
            look(other)

    while arrived < 60 or present:
        if arrived < 60 and (not present or random.random() < 0.5):
            arrived += 1
            name = node(arrived, arrived)
            present[name] = arrived
            look(name)
        else:
            # Holders leave, and so do waiters that give up or die, wherever they stand.
            leave(random.choice(list(present)))
        inside = [name for name in present if waits_for[name] is None]
        assert len(inside) == min(1, len(present)), "exactly one is inside while anybody is there"
    assert served == sorted(served)
