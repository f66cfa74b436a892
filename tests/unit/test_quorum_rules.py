"""What follows from the votes of several servers."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiolock.backends.memory import MemoryBackend, MemoryServer
from aiolock.backends.quorum import QuorumBackend, members
from aiolock.backends.quorum.rules import combined, lacking, majority, majority_until, promised, rotation
from aiolock.client import Client
from aiolock.errors import BackendUnavailable
from aiolock.types import Holder, Kept, LockInfo, Waiting
from tests.faults.staging import until

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("servers", range(1, 10))
def test_any_two_majorities_have_a_server_in_common_and_fewer_need_not(servers):
    everybody = range(servers)
    most = majority(servers)
    assert all(set(a) & set(b) for a in combinations(everybody, most) for b in combinations(everybody, most))
    fewer = most - 1
    assert any(
        not set(a) & set(b) for a in combinations(everybody, fewer) for b in combinations(everybody, fewer)
    )


@given(st.lists(st.floats(0, 100), max_size=9), st.integers(1, 5), st.floats(0, 100))
def test_until_then_so_many_votes_are_certain_and_no_longer(untils, needed, moment):
    assert (majority_until(untils, needed) >= moment) == (sum(until >= moment for until in untils) >= needed)


def test_without_enough_votes_nothing_is_certain():
    assert majority_until([], 1) == majority_until([5.0, 6.0], 3) == -math.inf


def test_lines_are_spread_over_the_servers_and_the_same_for_everybody():
    counts = [0, 0, 0]
    for number in range(3_000):
        counts[rotation(f"order:{number}", 3)] += 1
        assert rotation(f"order:{number}", 3) == rotation(f"order:{number}", 3)
    assert min(counts) > 800


def holder(label="a", token=1, remaining=10.0, age=0.0, mode="mutex"):
    return Holder(label, token, NOW - timedelta(seconds=age), remaining, mode=mode)


def info(*holders, waiters=()):
    return LockInfo("x", tuple(holders), tuple(Waiting(label) for label in waiters))


def test_what_all_promise_is_promised_but_for_what_none_can_promise_for_the_others():
    one = frozenset({"exclusion", "fencing", "fifo", "keep", "push"})
    assert promised([one] * 3) == {"exclusion", "keep", "push"}
    assert promised([one, one - {"push"}, one]) == {"exclusion", "keep"}


def test_a_server_may_fail_over_to_the_others_if_it_remembers_its_votes_when_it_is_back():
    writes = frozenset({"exclusion", "survives-restart"})
    assert promised([writes] * 3) == {"exclusion", "survives-restart", "survives-failover"}
    assert promised([writes, writes, writes - {"survives-restart"}]) == {"exclusion"}


def test_who_comes_later_has_to_promise_what_is_required():
    one = frozenset({"exclusion", "survives-restart"})
    assert lacking(frozenset({"exclusion", "survives-failover"}), one) == frozenset()
    assert lacking(frozenset({"survives-failover"}), frozenset({"exclusion"})) == {"survives-restart"}
    assert lacking(frozenset({"no-eviction"}), one) == {"no-eviction"}


async def test_who_comes_later_and_does_not_promise_it_takes_no_part(monkeypatch, caplog):
    class Late(MemoryBackend):
        tries = 0
        capabilities = MemoryBackend.capabilities - {"no-eviction"}

        async def open(self):
            self.tries += 1
            if self.tries == 1:
                raise BackendUnavailable("not yet")
            await super().open()

    monkeypatch.setattr(members, "RETRY", (0.01, 0.01))
    late = Late(server=MemoryServer())
    others = [MemoryBackend(server=MemoryServer()) for _ in range(2)]
    async with Client(QuorumBackend([*others, late]), require={"no-eviction"}) as client:
        await until(lambda: late.tries > 2)
        assert not client._backend.members.all[2].open
        async with client.lock("x"):
            pass
    assert "does not promise no-eviction" in caplog.text


def test_a_holder_is_inside_at_most_servers():
    seen = combined([info(holder()), info(holder()), info()], 2)
    assert [one.label for one in seen.holders] == ["a"]
    # On its way in, or out, or told by a server that has lost its data.
    assert combined([info(holder()), info(), info()], 2).holders == ()
    assert combined([info(holder("a")), info(holder("b")), info()], 2).holders == ()
    assert [
        one.label for one in combined([info(holder("b")), info(holder()), info(holder())], 2).holders
    ] == ["a"]


def test_what_is_shown_of_a_holder():
    seen = combined(
        [info(holder(token=5, remaining=3)), info(holder(token=9, remaining=7, age=4)), info()], 2
    )
    assert seen.holders == (replace(holder(token=5, remaining=3), since=NOW - timedelta(seconds=4)),)
    # Two of three are certain for as long as the second best.
    [best] = combined([info(holder(remaining=value)) for value in (1, 8, 5)], 2).holders
    assert best.remaining == 5


def test_readers_are_counted_at_each_server():
    two = info(holder("r", 1, mode="read"), holder("r", 2, mode="read"), holder("s", 3, mode="read"))
    one = info(holder("r", 7, mode="read"), holder("s", 8, mode="read"))
    assert [one.label for one in combined([two, one, info()], 2).holders] == ["r", "s"]
    assert [one.label for one in combined([two, two, one], 2).holders] == ["r", "r", "s"]


def test_the_line_is_that_of_the_server_that_decides():
    seen = combined([info(holder(), waiters=["b", "c"]), info(holder(), waiters=["c"]), info(holder())], 2)
    assert [waiting.label for waiting in seen.waiters] == ["b", "c"]


def kept(*seconds: float, who: str = "a") -> LockInfo:
    return LockInfo("x", (), (), kept=tuple(Kept(NOW + timedelta(seconds=each), 1, who) for each in seconds))


@pytest.mark.parametrize(
    ("infos", "left"),
    [
        ([kept(9), kept(5), kept(1)], [5]),
        ([kept(9), kept(), kept()], []),
        # Two of one server are not two servers.
        ([kept(9, 8), kept(), kept()], []),
        ([kept(3, 9), kept(8, 2), kept()], [8, 2]),
        ([kept(9), kept(9, who="b"), kept()], []),
    ],
)
def test_what_is_kept_is_kept_at_a_majority(infos, left):
    assert [(one.until - NOW).total_seconds() for one in combined(infos, 2).kept] == left


async def test_a_renewal_that_one_of_three_servers_has_answered_prolongs_nothing():
    """The other two fall silent: without a majority the holder has to be told when its time is over."""
    silent = asyncio.Event()

    async def falls_silent(step):
        if silent.is_set():
            await asyncio.get_running_loop().create_future()
        return step()

    backends = [
        MemoryBackend(server=MemoryServer(), transport=way) for way in (None, falls_silent, falls_silent)
    ]
    async with Client(QuorumBackend(backends), ttl=0.6) as client:
        lease = await client.lock("x").acquire()
        # A renewal of all three has succeeded, so that only those that follow decide.
        await until(lambda: client.stats()["renewals"] > 0)
        silent.set()
        async with asyncio.timeout(10):
            assert await lease.wait_lost() == "expired"
