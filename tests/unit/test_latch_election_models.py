"""Random uses of a latch and of an election by several clients of one memory server, beside the simplest model of each."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import aiolock
from aiolock.backends.memory import MemoryBackend, MemoryServer

CLIENTS = 3
COUNT = 7
CLIENT = st.integers(0, CLIENTS - 1)


class Uses(RuleBasedStateMachine):
    """Clients of a server of their own, on a loop of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        server = MemoryServer()
        self.clients = [
            aiolock.Client(MemoryBackend(server=server), label=str(number)) for number in range(CLIENTS)
        ]
        for client in self.clients:
            self.run(client.open())

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def teardown(self) -> None:
        for client in self.clients:
            self.run(client.aclose())
        self.loop.close()


class LatchUses(Uses):
    """A number that goes down to zero, and stays."""

    def __init__(self) -> None:
        super().__init__()
        self.left = COUNT

    @rule(number=CLIENT, n=st.integers(1, 3))
    def counts_down(self, number: int, n: int) -> None:
        self.left = max(0, self.left - n)
        assert self.run(self.clients[number].latch("x", COUNT).count_down(n)) == self.left

    @rule(numbers=st.lists(CLIENT, min_size=1, max_size=4))
    def count_down_together(self, numbers: list[int]) -> None:
        async def all_of_them() -> list[int]:
            return await asyncio.gather(
                *(self.clients[number].latch("x", COUNT).count_down() for number in numbers)
            )

        before, self.left = self.left, max(0, self.left - len(numbers))
        told = self.run(all_of_them())
        assert min(told) == self.left
        assert all(self.left <= rest < max(before, 1) for rest in told)

    @rule(number=CLIENT)
    def another_count_is_refused(self, number: int) -> None:
        latch = self.clients[number].latch("x", COUNT + 1)
        if self.left == COUNT:
            # Nobody has counted yet, so nobody's number stands.
            assert self.run(latch.count()) == COUNT + 1
        else:
            with pytest.raises(aiolock.ConfigError):
                self.run(latch.count())

    @rule(number=CLIENT)
    def waits(self, number: int) -> None:
        latch = self.clients[number].latch("x", COUNT)
        if self.left:
            with pytest.raises(aiolock.WaitTimeout):
                self.run(latch.wait(timeout=0))
        else:
            self.run(latch.wait())

    @invariant()
    def everybody_reads_the_same(self) -> None:
        assert {self.run(client.latch("x", COUNT).count()) for client in self.clients} == {self.left}


class ElectionUses(Uses):
    """At most one leader, whose term is greater than every earlier one's."""

    def __init__(self) -> None:
        super().__init__()
        self.leader: tuple[int, aiolock.Lease] | None = None
        self.terms: list[int] = []

    @rule(number=CLIENT)
    def campaigns(self, number: int) -> None:
        campaign = self.clients[number].election("x").campaign()
        term = self.run(campaign.try_acquire())
        assert (term is None) == (self.leader is not None)
        if term is not None:
            assert not self.terms or term.token > self.terms[-1]
            self.terms.append(term.token)
            self.leader = number, term

    @precondition(lambda self: self.leader is not None)
    @rule()
    def resigns(self) -> None:
        assert self.leader is not None
        self.run(self.leader[1].release())
        self.leader = None

    @precondition(lambda self: self.leader is not None)
    @rule(number=CLIENT)
    def is_deposed(self, number: int) -> None:
        assert self.leader is not None
        assert self.run(self.clients[number].election("x").campaign().force_release())
        assert self.leader[1].lost or self.run(self.leader[1].wait_lost()) == "force-released"
        self.leader = None

    @invariant()
    def everybody_sees_the_same_leader(self) -> None:
        for client in self.clients:
            seen = self.run(client.election("x").leader())
            if self.leader is None:
                assert seen is None
            else:
                assert seen.holder.label == str(self.leader[0])
                assert seen.token == self.leader[1].token


LIMITS = settings(max_examples=15, stateful_step_count=15)
TestLatch = LatchUses.TestCase
TestElection = ElectionUses.TestCase
TestLatch.settings = TestElection.settings = LIMITS
