"""The memory server's machine: its rules one by one, and then against a naive specification under random requests."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aiolock.backends.rows.rules import (
    BLOCK,
    SET_LIMIT,
    TOMBSTONE,
    UNSET_LIMIT,
    Machine,
    Registers,
    StoredRequest,
)
from aiolock.core.backend import confirmation_window

KEY = ("ns:lock", "x")
TTL = 10.0


@pytest.fixture
def machine() -> Machine:
    return Machine()


def mutex(name: str, ttl: float = TTL, block: int = 1) -> StoredRequest:
    return StoredRequest(name, "mutex", ttl, block=block)


def reader(name: str) -> StoredRequest:
    return StoredRequest(name, "read", TTL)


def writer(name: str) -> StoredRequest:
    return StoredRequest(name, "write", TTL)


def taker(name: str, count: int, limit: int = 3) -> StoredRequest:
    return StoredRequest(name, "permits", TTL, permits=count, limit=limit)


def inside(machine: Machine, now: float = 0.0) -> list[str]:
    return [hold.request.id for hold in machine.inspect(KEY, now)[0]]


def waiting(machine: Machine, now: float = 0.0) -> list[str]:
    return [place.id for place in machine.inspect(KEY, now)[1]]


def messages(machine: Machine) -> list[tuple[str, str]]:
    told, machine.outbox = machine.outbox, []
    return [(message.to, message.what) for message in told]


# --- entering and leaving


def test_a_free_lock_is_entered_at_once(machine):
    answer = machine.enter(KEY, mutex("a"), 0.0, wait=False)
    assert answer.token > 0
    assert answer.count == 1
    assert answer.seconds == TTL
    assert not answer.demand
    assert inside(machine) == ["a"]
    assert not messages(machine)


def test_a_taken_lock_is_refused_without_a_trace_to_who_does_not_wait(machine):
    machine.enter(KEY, mutex("a"), 0.0, wait=False)
    answer = machine.enter(KEY, mutex("b"), 4.0, wait=False)
    assert answer.token == 0
    assert answer.seconds == pytest.approx(6.0)
    assert answer.demand
    assert not waiting(machine)
    assert not messages(machine)


def test_who_leaves_is_followed_by_who_came_first(machine):
    for name in "abcd":
        machine.enter(KEY, mutex(name), 0.0, wait=True)
    assert waiting(machine) == ["b", "c", "d"]
    served = []
    for name in "abcd":
        served += inside(machine)
        machine.leave(KEY, mutex(name), 1.0)
    assert served == ["a", "b", "c", "d"]
    assert not machine.locks


def test_nobody_enters_past_the_queue(machine):
    machine.enter(KEY, reader("a"), 0.0, wait=True)
    machine.enter(KEY, writer("b"), 0.0, wait=True)
    assert machine.enter(KEY, reader("c"), 0.0, wait=False).token == 0
    machine.enter(KEY, reader("c"), 0.0, wait=True)
    assert inside(machine) == ["a"]
    assert waiting(machine) == ["b", "c"]


def test_a_place_is_given_up_as_well(machine):
    for name in "abc":
        machine.enter(KEY, mutex(name), 0.0, wait=True)
    machine.leave(KEY, mutex("b"), 0.0)
    machine.leave(KEY, mutex("a"), 0.0)
    assert inside(machine) == ["c"]


def test_a_waiter_that_leaves_makes_way_for_those_whom_it_blocked(machine):
    machine.enter(KEY, reader("a"), 0.0, wait=True)
    machine.enter(KEY, writer("b"), 0.0, wait=True)
    machine.enter(KEY, reader("c"), 0.0, wait=True)
    machine.leave(KEY, writer("b"), 0.0)
    assert inside(machine) == ["a", "c"]


def test_leaving_is_idempotent_and_harms_nobody(machine):
    machine.enter(KEY, mutex("a"), 0.0, wait=True)
    for _ in range(3):
        machine.leave(KEY, mutex("stranger"), 0.0)
    assert inside(machine) == ["a"]


def test_families_and_names_are_locks_of_their_own(machine):
    assert machine.enter(("ns:lock", "x"), mutex("a"), 0.0, wait=False).token
    assert machine.enter(("ns:lock", "y"), mutex("b"), 0.0, wait=False).token
    assert machine.enter(("ns:rw", "x"), writer("c"), 0.0, wait=False).token


# --- other kinds


def test_a_downgrade_lets_the_readers_in_who_are_next(machine):
    machine.enter(KEY, writer("a"), 0.0, wait=False)
    for request in (reader("b"), reader("c"), writer("d"), reader("e")):
        machine.enter(KEY, request, 0.0, wait=True)
    messages(machine)
    answer = machine.downgrade(KEY, writer("a"), 5.0)
    assert answer is not None
    assert answer.seconds == TTL
    assert answer.demand
    assert inside(machine, 5.0) == ["a", "b", "c"]
    assert messages(machine) == [("b", "grant"), ("c", "grant")]
    # Said again, it is the same; and its request finds the hold whatever it was.
    assert machine.downgrade(KEY, writer("a"), 6.0) == answer
    assert machine.renew(KEY, writer("a"), 7.0) is not None
    for name in "abc":
        machine.leave(KEY, reader(name), 8.0)
    assert inside(machine, 8.0) == ["d"]
    assert machine.downgrade(KEY, writer("a"), 8.0) is None


def test_the_limit_of_the_first_user_stands_while_it_is_used(machine):
    assert machine.limit(KEY, 0.0) is None
    machine.enter(KEY, taker("a", 1), 0.0, wait=False)
    assert machine.enter(KEY, taker("b", 1, limit=4), 0.0, wait=True).limit == 3
    assert waiting(machine) == []
    assert machine.limit(KEY, 0.0) == 3
    machine.leave(KEY, taker("a", 1), 1.0)
    assert machine.enter(KEY, taker("c", 1, limit=4), 1.0 + UNSET_LIMIT, wait=True).token
    assert machine.limit(KEY, 1.0 + UNSET_LIMIT) == 4


def test_a_limit_that_was_set_lasts_for_a_day(machine):
    machine.set_limit(KEY, 2, 0.0)
    assert machine.enter(KEY, taker("a", 1), 0.0, wait=False).token
    assert machine.enter(KEY, taker("b", 1, limit=2), 0.0, wait=False).token
    assert not machine.enter(KEY, taker("c", 1), 0.0, wait=True).token
    assert machine.enter(KEY, taker("d", 1, limit=4), 0.0, wait=True).limit == 2
    messages(machine)
    machine.set_limit(KEY, 3, 1.0)
    assert messages(machine) == [("c", "grant")]
    machine.set_limit(KEY, 1, 1.0)
    assert inside(machine, 1.0) == ["a", "b", "c"]
    for name in "abc":
        machine.leave(KEY, taker(name, 1), 2.0)
    assert machine.limit(KEY, 2.0 + UNSET_LIMIT) == 1
    assert machine.limit(KEY, 2.0 + SET_LIMIT) is None


def test_limits_that_nobody_uses_do_not_pile_up(machine):
    for number in range(200):
        key = ("ns:sem", str(number))
        machine.enter(key, taker("a", 1), number * 10.0, wait=False)
        machine.leave(key, taker("a", 1), number * 10.0)
    assert len(machine.limits) < 10


def test_a_request_to_let_go_is_told_and_comes_with_every_renewal(machine):
    assert not machine.request(KEY, "please", 0.0)
    machine.enter(KEY, reader("a"), 0.0, wait=False)
    machine.enter(KEY, reader("b"), 0.0, wait=False)
    machine.enter(KEY, writer("c"), 0.0, wait=True)
    messages(machine)
    assert machine.request(KEY, "please", 0.0)
    assert messages(machine) == [("a", "requested"), ("b", "requested")]
    answer = machine.renew(KEY, reader("a"), 1.0)
    assert answer is not None
    assert answer.asked == "please"


def test_the_list_has_what_is_held_or_waited_for(machine):
    machine.enter(KEY, mutex("a"), 0.0, wait=False)
    machine.enter(("ns:sem", "y"), taker("a", 1), 0.0, wait=False)
    assert machine.busy(1.0) == [KEY, ("ns:sem", "y")]
    machine.leave(KEY, mutex("a"), 1.0)
    assert machine.busy(1.0) == [("ns:sem", "y")]
    assert machine.busy(TTL) == []
    assert not machine.locks


def test_a_register_is_replaced_by_who_knows_its_version():
    registers = Registers()
    assert registers.read(KEY, 0.0) == (b"", "")
    first, told = registers.write(KEY, b"1", "", 10.0, 0.0)
    assert first
    assert told == []
    assert registers.write(KEY, b"2", "", 10.0, 0.0) == (None, [])
    assert registers.watch(KEY, "w", first, 0.0)
    assert registers.watch(KEY, "gone", first, 0.0)
    registers.forget(KEY, "gone")
    second, told = registers.write(KEY, b"2", first, 10.0, 5.0)
    assert told == ["w"]
    assert not registers.watch(KEY, "w", first, 5.0)
    assert registers.write(KEY, b"3", first, 10.0, 5.0) == (None, [])
    assert registers.read(KEY, 14.9) == (b"2", second)
    # Forgotten, and never with a stamp that it had.
    assert registers.read(KEY, 15.0) == (b"", "")
    third, _ = registers.write(KEY, b"1", "", 10.0, 15.0)
    assert third not in (None, first, second)
    registers.forget(KEY, "nobody")
    assert registers.watchers == {}


# --- asking again


def test_asking_again_finds_the_hold_and_prolongs_it(machine):
    first = machine.enter(KEY, mutex("a"), 0.0, wait=True)
    again = machine.enter(KEY, mutex("a"), 8.0, wait=True)
    assert again.token == first.token
    assert again.seconds == TTL
    assert inside(machine, 17.0) == ["a"]
    assert not inside(machine, 18.0)


def test_asking_again_finds_the_place(machine):
    for name in ("a", "b", "c", "b"):
        machine.enter(KEY, mutex(name), 0.0, wait=True)
    assert waiting(machine) == ["b", "c"]


def test_renewal_prolongs_a_hold_and_nothing_else(machine):
    machine.enter(KEY, mutex("a"), 0.0, wait=True)
    machine.enter(KEY, mutex("b"), 0.0, wait=True)
    answer = machine.renew(KEY, mutex("a"), 9.0)
    assert answer is not None
    assert answer.seconds == TTL
    assert answer.demand
    assert machine.renew(KEY, mutex("b"), 9.0) is None
    assert machine.renew(KEY, mutex("stranger"), 9.0) is None
    assert inside(machine, 18.0) == ["a"]


# --- the end of holds


def test_a_hold_ends_with_its_ttl_and_the_next_is_served(machine):
    machine.enter(KEY, mutex("a"), 0.0, wait=True)
    machine.enter(KEY, mutex("b"), 0.0, wait=True)
    assert machine.advance(KEY, 9.99) == pytest.approx(0.01)
    assert inside(machine, 9.99) == ["a"]
    machine.advance(KEY, TTL)
    assert inside(machine, TTL) == ["b"]
    assert machine.renew(KEY, mutex("a"), TTL) is None


def test_a_pushed_grant_lapses_unless_it_is_confirmed(machine):
    for name in "abc":
        machine.enter(KEY, mutex(name), 0.0, wait=True)
    machine.outbox.clear()
    machine.leave(KEY, mutex("a"), 0.0)
    [message] = machine.outbox
    assert (message.to, message.what) == ("b", "grant")
    assert message.answer is not None
    assert message.answer.seconds == confirmation_window(TTL) < TTL
    assert inside(machine, confirmation_window(TTL)) == ["c"]


@pytest.mark.parametrize("how", ["renew", "enter"])
def test_a_pushed_grant_is_confirmed_by_renewal_or_by_asking_again(machine, how):
    for name in "abc":
        machine.enter(KEY, mutex(name), 0.0, wait=True)
    machine.leave(KEY, mutex("a"), 0.0)
    if how == "renew":
        assert machine.renew(KEY, mutex("b"), 0.5) is not None
    else:
        assert machine.enter(KEY, mutex("b"), 0.5, wait=True).token
    assert inside(machine, 0.5 + TTL - 0.01) == ["b"]


@pytest.mark.parametrize("ttl", [0.1, 0.5, 1.0, 5.0, 30.0, 3600.0])
def test_a_claim_is_never_longer_than_the_ttl(ttl):
    assert 0 < confirmation_window(ttl) <= ttl


def test_what_is_kept_is_nobodys_and_ends_in_time(machine):
    machine.enter(KEY, mutex("a"), 0.0, wait=True)
    machine.enter(KEY, mutex("b"), 0.0, wait=True)
    machine.leave(KEY, mutex("a"), 1.0, keep=3.0)
    assert machine.renew(KEY, mutex("a"), 1.0) is None
    machine.leave(KEY, mutex("a"), 2.0)
    assert "b" not in inside(machine, 3.9)
    assert machine.inspect(KEY, 3.9)[0]
    assert inside(machine, 4.0) == ["b"]


def test_force_ends_every_hold_tells_everybody_and_serves_the_next(machine):
    for request in (reader("a"), reader("b"), writer("c")):
        machine.enter(KEY, request, 0.0, wait=True)
    machine.outbox.clear()
    assert machine.force(KEY, 1.0)
    assert messages(machine) == [("a", "lost"), ("b", "lost"), ("c", "grant")]
    assert inside(machine, 1.0) == ["c"]
    assert not machine.force(("ns:lock", "free"), 1.0)


# --- requests that were given up unseen


def test_a_request_with_a_tombstone_changes_nothing_when_it_arrives(machine):
    machine.leave(KEY, mutex("ghost"), 0.0, tombstone=True)
    assert machine.enter(KEY, mutex("ghost"), 1.0, wait=True).token == 0
    assert not machine.locks
    assert machine.enter(KEY, mutex("b"), 1.0, wait=True).token


def test_a_tombstone_ends_a_hold_that_was_there_already(machine):
    machine.enter(KEY, mutex("a"), 0.0, wait=True)
    machine.leave(KEY, mutex("a"), 0.0, tombstone=True)
    assert not inside(machine)
    assert machine.enter(KEY, mutex("a"), 0.0, wait=True).token == 0


def test_tombstones_do_not_pile_up(machine):
    for number in range(1000):
        machine.leave(KEY, mutex(f"ghost {number}"), float(number), tombstone=True)
    assert len(machine.tombstones) <= TOMBSTONE + 1


# --- who may be inside together


def test_readers_share_and_a_writer_is_alone(machine):
    for request in (reader("r1"), reader("r2"), writer("w1"), reader("r3"), reader("r4"), writer("w2")):
        machine.enter(KEY, request, 0.0, wait=True)
    assert inside(machine) == ["r1", "r2"]
    machine.leave(KEY, reader("r1"), 0.0)
    assert inside(machine) == ["r2"]
    machine.leave(KEY, reader("r2"), 0.0)
    assert inside(machine) == ["w1"]
    machine.leave(KEY, writer("w1"), 0.0)
    assert inside(machine) == ["r3", "r4"]
    assert waiting(machine) == ["w2"]


def test_permits_are_given_out_up_to_the_limit_and_in_order(machine):
    for request in (taker("a", 1), taker("b", 2), taker("c", 2), taker("d", 1)):
        machine.enter(KEY, request, 0.0, wait=True)
    assert inside(machine) == ["a", "b"]
    assert waiting(machine) == ["c", "d"]
    machine.leave(KEY, taker("a", 1), 0.0)
    assert inside(machine) == ["b"], "d must not overtake c"
    machine.leave(KEY, taker("b", 2), 0.0)
    assert inside(machine) == ["c", "d"]


# --- tokens and news


def test_tokens_grow_over_all_names_and_blocks_do_not_overlap(machine):
    grants = []
    for number in range(5):
        for block in (1, BLOCK):
            request = mutex(f"{number} {block}", block=block)
            answer = machine.enter(("ns:lock", request.id), request, 0.0, wait=False)
            grants.append((answer.token, answer.count))
    for (token, count), (following, _) in pairwise(grants):
        assert following >= token + count


def test_holders_hear_of_the_first_waiter_only(machine):
    machine.enter(KEY, reader("a"), 0.0, wait=True)
    machine.enter(KEY, reader("b"), 0.0, wait=True)
    machine.enter(KEY, writer("c"), 0.0, wait=True)
    machine.enter(KEY, writer("d"), 0.0, wait=True)
    assert messages(machine) == [("a", "demand"), ("b", "demand")]


# --- against a specification


@dataclass
class Inside:
    request: StoredRequest
    deadline: float


class AgainstSpecification(RuleBasedStateMachine):
    """Two plain lists say what the machine has to do; every answer and every state is compared with them."""

    requests = st.builds(
        lambda number, kind: {
            "mutex": mutex(f"m{number}", block=3),
            "read": reader(f"r{number}"),
            "write": writer(f"w{number}"),
            "one": taker(f"p{number}", 1),
            "two": taker(f"q{number}", 2),
        }[kind],
        st.integers(0, 3),
        st.sampled_from(["mutex", "read", "read", "write", "one", "two"]),
    )

    def __init__(self) -> None:
        super().__init__()
        self.machine = Machine()
        self.now = 0.0
        self.inside: list[Inside] = []
        self.queue: list[StoredRequest] = []
        self.tombstones: set[str] = set()
        self.tokens: list[int] = []
        self.token_of: dict[str, int] = {}

    # what should happen

    def may_enter(self, request: StoredRequest) -> bool:
        others = [hold.request for hold in self.inside]
        if not others:
            return True
        if request.mode == "read":
            return {other.mode for other in others} == {"read"}
        if request.mode == "permits":
            return sum(other.permits for other in others) + request.permits <= 3
        return False

    def expire(self) -> None:
        alive = [hold for hold in self.inside if hold.deadline > self.now]
        if len(alive) < len(self.inside):
            self.inside = alive
            self.serve()

    def serve(self) -> None:
        while self.queue and self.may_enter(self.queue[0]):
            request = self.queue.pop(0)
            self.inside.append(Inside(request, self.now + confirmation_window(request.ttl)))

    def hold_of(self, request: StoredRequest) -> Inside | None:
        return next((hold for hold in self.inside if hold.request.id == request.id), None)

    def same_family(self, request: StoredRequest) -> bool:
        """A key has one family: permits do not meet readers."""
        present = {hold.request.mode for hold in self.inside} | {other.mode for other in self.queue}
        families = {"mutex": 0, "read": 1, "write": 1, "permits": 2}
        return {families[mode] for mode in present} <= {families[request.mode]}

    def learn_tokens(self) -> None:
        """Every grant, asked for or pushed, has a token beyond all earlier ones."""
        lock = self.machine.locks.get(KEY)
        held = lock.holds if lock else {}
        for name, hold in held.items():
            if self.token_of.get(name) != hold.token:
                assert hold.token > max(self.tokens, default=0)
                self.tokens.append(hold.token + hold.request.block - 1)
                self.token_of[name] = hold.token

    # what may happen

    @rule(request=requests, wait=st.booleans())
    def enter(self, request: StoredRequest, wait: bool) -> None:
        self.expire()
        if not self.same_family(request):
            return
        answer = self.machine.enter(KEY, request, self.now, wait=wait)
        hold = self.hold_of(request)
        if hold is not None:
            hold.deadline = self.now + request.ttl
            assert answer.token == self.token_of[request.id]
        elif request.id in self.tombstones:
            assert answer.token == 0
        elif not self.queue and self.may_enter(request):
            self.inside.append(Inside(request, self.now + request.ttl))
            assert answer.token > max(self.tokens, default=0)
        else:
            assert answer.token == 0
            if wait and request not in self.queue:
                self.queue.append(request)

    @rule(request=requests)
    def renew(self, request: StoredRequest) -> None:
        self.expire()
        answer = self.machine.renew(KEY, request, self.now)
        hold = self.hold_of(request)
        assert (answer is None) == (hold is None)
        if hold is not None:
            hold.deadline = self.now + request.ttl

    @rule(request=requests, tombstone=st.booleans())
    def leave(self, request: StoredRequest, tombstone: bool) -> None:
        self.expire()
        self.machine.leave(KEY, request, self.now, tombstone=tombstone)
        self.inside = [hold for hold in self.inside if hold.request.id != request.id]
        self.queue = [other for other in self.queue if other.id != request.id]
        if tombstone:
            self.tombstones.add(request.id)
        self.serve()

    @precondition(lambda self: self.inside)
    @rule(index=st.integers(0, 5))
    def leave_inside(self, index: int) -> None:
        self.leave(self.inside[index % len(self.inside)].request, tombstone=False)

    @rule()
    def force(self) -> None:
        self.expire()
        assert self.machine.force(KEY, self.now) == bool(self.inside)
        self.inside = []
        self.serve()

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 4.0, 9.0, 10.0]))
    def pass_time(self, seconds: float) -> None:
        # Tombstones are not outlived here: that they end has a test of its own.
        if self.now + seconds < TOMBSTONE:
            self.now += seconds

    # what must be true

    @invariant()
    def the_same_are_inside_and_in_line(self) -> None:
        self.expire()
        holds, queue = self.machine.inspect(KEY, self.now)
        assert [hold.request.id for hold in holds] == [hold.request.id for hold in self.inside]
        assert [hold.deadline for hold in holds] == [hold.deadline for hold in self.inside]
        assert [place.id for place in queue] == [request.id for request in self.queue]
        self.learn_tokens()

    @invariant()
    def holds_are_compatible(self) -> None:
        modes = [hold.request.mode for hold in self.machine.inspect(KEY, self.now)[0]]
        if len(modes) > 1:
            assert set(modes) in ({"read"}, {"permits"})
        assert sum(hold.request.permits for hold in self.inside if hold.request.mode == "permits") <= 3

    @invariant()
    def pushed_grants_match_the_machine(self) -> None:
        told, self.machine.outbox = self.machine.outbox, []
        for message in told:
            if message.what == "grant":
                assert message.answer is not None
                assert 0 < message.answer.seconds < math.inf
                hold = self.machine.locks[KEY].holds.get(message.to)
                # What was granted and given up within one step is told as well, and does no harm.
                assert hold is None or hold.token == message.answer.token

    @invariant()
    def nothing_is_kept_of_a_free_lock(self) -> None:
        if not self.inside and not self.queue:
            assert KEY not in self.machine.locks


TestAgainstSpecification = AgainstSpecification.TestCase
TestAgainstSpecification.settings = settings(
    max_examples=250, stateful_step_count=40, database=None, derandomize=True
)


def test_what_is_kept_for_nobody_is_not_asked_to_let_go(machine):
    for name in "ab":
        machine.enter(KEY, reader(name), 0.0, wait=False)
    machine.leave(KEY, reader("a"), 0.0, keep=5.0)
    messages(machine)
    assert machine.request(KEY, "please", 1.0)
    assert messages(machine) == [("b", "requested")]
    machine.leave(KEY, reader("b"), 1.0)
    assert not machine.request(KEY, "please", 1.0)
    assert len(machine.inspect(KEY, 1.0)[0]) == 1
