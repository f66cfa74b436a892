"""Who may enter: over random queues nobody is inside with another, and nobody waits for what never comes."""

from __future__ import annotations

from random import Random
from uuid import UUID

import pytest

from aiolock.backends.zookeeper.format import Note
from aiolock.backends.zookeeper.queue import (
    LAST,
    RULES,
    Verdict,
    after,
    decide,
    inside,
    is_next,
    positions,
    prefix,
    queue,
    reader,
)
from aiolock.errors import BackendRefused
from aiolock.types import MUTEX, READ, WRITE, Family, Kind, Mode, permits


def attempt(number: int) -> str:
    return str(UUID(int=number))


def node(number: int, sequence: int, kind: Kind = MUTEX) -> str:
    return f"{prefix(attempt(number), kind)}{sequence:010d}"


def verdict_on(queue_: list[str], name: str, number: int, kind: Kind, limit: int = 0) -> Verdict:
    verdict, _ = decide(RULES[kind.mode], queue("/x", kind.family, queue_), name, attempt(number), limit)
    assert verdict is not None
    return verdict


def test_a_queue_is_in_the_order_of_its_numbers_whatever_the_names():
    children = [node(1, 7), "ffff__lock__0000000003", node(2, 5), "_c_abc-lock-0000000010", "note"]
    assert [position.sequence for position in queue("/x", Family.LOCK, children)] == [3, 5, 7, 10]


def test_readers_and_writers_of_other_libraries_are_understood():
    children = [
        node(1, 7, READ),
        "_c_0b2c-__WRIT__0000000002",
        "__READ__0000000002",
        "ffff__rlock__0000000004",
        "ffff__lock__0000000005",
    ]
    modes = [(position.sequence, position.mode) for position in queue("/x", Family.RW, children)]
    assert modes == [(2, "read"), (2, "write"), (4, "read"), (5, "write"), (7, "read")]


def test_a_request_for_permits_says_how_many_in_its_name():
    found = queue("/x", Family.SEMAPHORE, [node(1, 3, permits(12, 20)), node(2, 1, permits(1, 20))])
    assert [(position.sequence, position.permits) for position in found] == [(1, 1), (3, 12)]


def test_a_writer_keeps_its_number_as_a_reader():
    writer = node(1, 7, WRITE)
    assert reader(writer) == node(1, 7, READ)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        (Family.LOCK, "lock-0b2c-0000000004"),
        (Family.LOCK, "0000000001"),
        (Family.LOCK, "_c_0b2c-__READ__0000000001"),
        (Family.LOCK, "_c_0b2c-lease-0000000001"),
        (Family.LOCK, "ffff__rlock__0000000001"),
        (Family.RW, node(1, 1)),
        (Family.SEMAPHORE, "_c_0b2c-lease-0000000001"),
        (Family.SEMAPHORE, node(1, 1)),
    ],
)
def test_a_contender_that_would_not_wait_for_us_is_refused_by_name(family, name):
    with pytest.raises(BackendRefused, match=name):
        queue("/x", family, [name])


@pytest.mark.parametrize("sequence", ["-2147483648", "-000000001", f"{LAST:010d}"])
@pytest.mark.parametrize("kind", [MUTEX, READ, WRITE, permits(1, 2)], ids=str)
def test_numbers_near_their_end_are_refused(sequence, kind):
    with pytest.raises(BackendRefused, match="used up"):
        queue("/x", kind.family, [f"{prefix(attempt(1), kind)}{sequence}"])


def test_names_that_are_no_contenders_are_told_apart():
    found, others = positions(Family.LOCK, [node(1, 4), "note", "-1"])
    assert [position.sequence for position in found] == [4]
    assert others == ["note", "-1"]


@pytest.mark.parametrize("digits", ["\u00b2" * 10, "\u0663" * 10, "\uff11" * 10, "000000000\u00b2"])
def test_only_ascii_digits_are_numbers_of_the_server(digits):
    """Any client may create such a child. It is no contender, whatever `str.isdigit` and `int` take for a digit."""
    for head in (node(1, 4)[:-10], "_c_0b2c-__READ__", "_c_0b2c-permits-1-", "note"):
        for family in (Family.LOCK, Family.RW, Family.SEMAPHORE, Family.ELECTION):
            assert queue("/x", family, [head + digits]) == []
    assert positions(Family.SEMAPHORE, ["_c_0b2c-permits-\u0663-0000000001"])[0] == []


@pytest.mark.parametrize(
    "line",
    [
        "token=" + "9" * 5000,
        "token=\u00b2",
        "asked=" + "[" * 60_000,
        "asked=" + "9" * 5000,
        "asked={",
        'asked="\\ud800"',
        "=",
    ],
)
def test_the_data_of_a_node_is_read_without_trust(line):
    note = Note.decode(b"label\n" + line.encode())
    assert note.label == "label"
    assert note.token == 0
    (note.asked or "").encode()


def test_nobody_waits_for_oneself():
    queued = queue("/x", Family.LOCK, [node(1, 4), node(1, 6), node(2, 5)])
    verdict, surplus = decide(RULES[Mode.MUTEX], queued, node(1, 6), attempt(1))
    assert verdict is not None
    assert [position.name for position in verdict.watch] == [node(2, 5)]
    assert surplus == [node(1, 4)]


def test_whoever_is_not_in_the_list_is_told_so():
    queued = queue("/x", Family.LOCK, [node(2, 5)])
    assert decide(RULES[Mode.MUTEX], queued, node(1, 4), attempt(1)) == (None, [])


def test_those_who_may_have_to_be_waited_for_next_are_remembered_nearest_first():
    children = [node(number, number) for number in range(10)]
    verdict = verdict_on(children, node(9, 9), 9, MUTEX)
    assert [position.sequence for position in verdict.watch] == [8]
    assert [position.sequence for position in verdict.reserve] == [7, 6, 5]


def test_a_reader_waits_for_the_nearest_writer_and_a_writer_for_whoever_is_before():
    children = [node(1, 1, WRITE), node(2, 2, READ), node(3, 3, WRITE), node(4, 4, READ), node(5, 5, READ)]
    assert verdict_on(children, node(5, 5, READ), 5, READ).watch[0].sequence == 3
    assert verdict_on(children, node(2, 2, READ), 2, READ).watch[0].sequence == 1
    assert verdict_on(children, node(3, 3, WRITE), 3, WRITE).watch[0].sequence == 2
    assert verdict_on(children[1:2] + children[4:], node(5, 5, READ), 5, READ).enter


def test_a_large_request_at_the_head_is_not_overtaken():
    children = [node(1, 1, permits(1, 3)), node(2, 2, permits(3, 3)), node(3, 3, permits(1, 3))]
    assert verdict_on(children, node(1, 1, permits(1, 3)), 1, permits(1, 3), 3).enter
    large = verdict_on(children, node(2, 2, permits(3, 3)), 2, permits(3, 3), 3)
    assert (large.enter, [position.sequence for position in large.watch]) == (False, [1])
    small = verdict_on(children, node(3, 3, permits(1, 3)), 3, permits(1, 3), 3)
    assert (small.enter, [position.sequence for position in small.watch]) == (False, [2])


def test_a_request_for_more_than_there_are_waits_for_nobody_but_more():
    only = [node(1, 1, permits(3, 3))]
    assert verdict_on(only, only[0], 1, permits(3, 3), 2) == Verdict(enter=False)
    assert verdict_on(only, only[0], 1, permits(3, 3), 3).enter


def test_who_was_inside_when_permits_became_fewer_stays_inside():
    queued = queue("/x", Family.SEMAPHORE, [node(number, number, permits(1, 3)) for number in range(1, 5)])
    assert inside(queued, 3) == 3
    assert inside(queued, 1) == 1
    assert inside(queued, 1, upto=3) == 3


class World:
    """A model of server and clients: each looks only when it is woken, and only what it waits for wakes it."""

    def __init__(self, random: Random, family: Family, limit: int) -> None:
        self.random, self.family, self.limit = random, family, limit
        self.present: dict[str, tuple[int, Kind]] = {}
        self.waits_for: dict[str, set[str] | None] = {}
        self.arrived = 0
        self.looks = 0

    def look(self, name: str) -> None:
        number, kind = self.present[name]
        self.looks += 1
        verdict = verdict_on(list(self.present), name, number, kind, self.limit)
        assert verdict.demand == any(int(other[-10:]) > int(name[-10:]) for other in self.present)
        names = {position.name for position in verdict.watch}
        assert names <= set(self.present) - {name}
        self.waits_for[name] = None if verdict.enter else names

    def arrive(self, kind: Kind) -> None:
        self.arrived += 1
        name = node(self.arrived, self.arrived, kind)
        self.present[name] = self.arrived, kind
        self.look(name)

    def leave(self, name: str) -> int:
        """How many were woken."""
        self.waits_for.pop(name)
        del self.present[name]
        woken = [other for other, awaited in self.waits_for.items() if awaited and name in awaited]
        for other in woken:
            self.look(other)
        return len(woken)

    def downgrade(self, name: str) -> None:
        number, _ = self.present[name]
        self.leave_as(name, reader(name), number)

    def leave_as(self, old: str, new: str, number: int) -> None:
        del self.present[old]
        self.waits_for[new] = self.waits_for.pop(old)
        self.present[new] = number, READ
        for other in [other for other, awaited in self.waits_for.items() if awaited and old in awaited]:
            self.look(other)

    def set_limit(self, limit: int) -> None:
        self.limit = limit
        for name, awaited in list(self.waits_for.items()):
            if awaited is not None:
                self.look(name)

    @property
    def inside(self) -> list[str]:
        return [name for name in self.present if self.waits_for[name] is None]

    def live(self) -> None:
        """Nobody waits who would be let in if it looked now."""
        for name, awaited in self.waits_for.items():
            if awaited is not None:
                number, kind = self.present[name]
                assert not verdict_on(list(self.present), name, number, kind, self.limit).enter, "sleeps on"


@pytest.mark.parametrize("seed", range(100))
def test_random_readers_and_writers_are_safe_and_live(seed):
    random = Random(seed)
    world = World(random, Family.RW, 0)
    while world.arrived < 60 or world.present:
        writers = [name for name in world.inside if world.present[name][1] is WRITE]
        if world.arrived < 60 and (not world.present or random.random() < 0.5):
            world.arrive(random.choice([READ, READ, WRITE]))
        elif writers and random.random() < 0.3:
            world.downgrade(writers[0])
        else:
            world.leave(random.choice(list(world.present)))
        modes = [world.present[name][1] for name in world.inside]
        assert modes in ([], [WRITE]) or set(modes) == {READ}
        assert not world.present or modes, "somebody is inside while anybody is there"
        queued = queue("/x", Family.RW, list(world.present))
        assert {position.name for position in queued[: inside(queued)]} == set(world.inside)
        world.live()


@pytest.mark.parametrize("seed", range(100))
def test_random_permits_are_safe_live_and_in_order(seed):
    random = Random(seed)
    world = World(random, Family.SEMAPHORE, random.choice([1, 2, 5]))
    most = world.limit
    while world.arrived < 60 or world.present:
        if world.arrived < 60 and (not world.present or random.random() < 0.5):
            world.arrive(permits(random.randint(1, most), most))
        elif random.random() < 0.05:
            world.set_limit(world.limit + 1)
        else:
            world.leave(random.choice(list(world.present)))
        taken = sum(world.present[name][1].permits for name in world.inside)
        assert taken <= world.limit
        entered = [name in world.inside for name in sorted(world.present, key=lambda name: name[-10:])]
        assert entered == sorted(entered, reverse=True), "somebody was overtaken"
        world.live()


@pytest.mark.parametrize("seed", range(50))
def test_fewer_permits_revoke_nobody_and_let_in_nobody_too_early(seed):
    random = Random(seed)
    world = World(random, Family.SEMAPHORE, 4)
    for _ in range(6):
        world.arrive(permits(random.randint(1, 2), 4))
    before = world.inside
    upto = max(int(name[-10:]) for name in before)
    world.set_limit(random.randint(1, 3))
    assert world.inside == before
    queued = queue("/x", Family.SEMAPHORE, list(world.present))
    assert inside(queued, world.limit, upto) == len(before)
    while world.present:
        entered = world.inside
        world.leave(random.choice(list(world.present)))
        taken = sum(world.present[name][1].permits for name in world.inside)
        assert taken <= world.limit or set(world.inside) <= set(entered)
        world.live()
        if not world.inside:
            # What is left needs more than there are.
            world.set_limit(4)
            world.live()


def test_a_release_wakes_few_of_many_who_wait_for_permits():
    """In order of arrival, nobody in vain; in any order, less than the number of permits for each that enters."""
    world = World(Random(1), Family.SEMAPHORE, 10)
    for _ in range(200):
        world.arrive(permits(1, 10))
    woken = [world.leave(min(world.inside, key=lambda name: name[-10:])) for _ in range(95)]
    assert max(woken) == 1
    woken = [world.leave(world.random.choice(world.inside)) for _ in range(80)]
    assert sum(woken) / len(woken) <= 10


@pytest.mark.parametrize("seed", range(200))
def test_random_queues_for_a_mutex_are_safe_and_live(seed):
    """A model of server and clients: each looks only when it is woken, and a wake-up comes only from what it waits for."""
    random = Random(seed)
    present: dict[str, int] = {}
    waits_for: dict[str, str | None] = {}
    served: list[int] = []
    arrived = 0

    def look(name: str) -> None:
        verdict = verdict_on(list(present), name, present[name], MUTEX)
        assert verdict.demand == any(int(other[-10:]) > int(name[-10:]) for other in present)
        assert all(position.name in present for position in verdict.watch)
        waits_for[name] = None if verdict.enter else verdict.watch[0].name

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


# --- without the list


def test_a_floor_says_nothing_of_who_stands_between():
    places_ = queue("/x", Family.LOCK, [node(number, number) for number in range(1, 5)])
    last = Verdict(enter=False, watch=(places_[2],), reserve=(places_[1], places_[0]))
    gone = places_[2].name
    assert after(last, gone, 3, demand=False) == Verdict(enter=True)
    assert after(last, gone, 2, demand=True) == Verdict(
        enter=False, watch=(places_[1],), reserve=(places_[0],), demand=True
    )
    assert after(last._replace(reserve=()), gone, 2, demand=True) is None
    for other in (places_[1].name, places_[0].name, ""):
        assert after(last, other, 3, demand=True) is None


class Line:
    """Holders that write the floor, waiters that follow the reserve, and events that arrive late and in any order."""

    def __init__(self, seed: int, *, believes_writes: bool) -> None:
        self.random = Random(seed)
        self.believes_writes = believes_writes
        """A planted mistake: whoever is told of a write takes it for the end."""
        self.present: dict[str, Kind] = {}
        self.last: dict[str, Verdict] = {}
        self.watched: dict[str, str] = {}
        self.events: dict[str, tuple[str, bool]] = {}
        self.floor = -1
        self.arrived = 0
        self.shortcuts = 0

    @property
    def holders(self) -> list[str]:
        return [name for name in self.present if name in self.last and self.last[name].enter]

    def look(self, name: str, gone: str | None) -> None:
        kind = self.present[name]
        verdict = None if gone is None else self.conclude(self.last[name], gone)
        while True:
            self.shortcuts += verdict is not None
            verdict = verdict or verdict_on(list(self.present), name, int(name[-10:]), kind)
            self.last[name] = verdict
            if verdict.enter:
                return
            if verdict.watch[0].name in self.present:
                self.watched[name] = verdict.watch[0].name
                return
            verdict = None

    def conclude(self, last: Verdict, gone: str) -> Verdict | None:
        if is_next(last, gone):
            return Verdict(enter=True)
        return after(last, gone, self.floor, demand=True)

    def happens(self, name: str, *, deleted: bool) -> None:
        for other in [other for other, awaited in self.watched.items() if awaited == name]:
            del self.watched[other]
            self.events[other] = name, deleted

    def leave(self, name: str) -> None:
        """A release, a waiter that gives up, or the end of a session: a floor is written only by the first."""
        if name in self.holders and self.present[name] is not READ and self.random.random() < 0.8:
            self.floor = int(name[-10:])
        for state in (self.present, self.last, self.watched, self.events):
            state.pop(name, None)
        self.happens(name, deleted=True)

    def downgrade(self, name: str) -> None:
        del self.present[name]
        self.present[reader(name)] = READ
        self.last[reader(name)] = self.last.pop(name)
        self.happens(name, deleted=True)

    def step(self, kinds: list[Kind]) -> None:
        chance = self.random.random()
        writers = [name for name in self.holders if self.present[name] is WRITE]
        if self.events and chance < 0.4:
            name = self.random.choice(list(self.events))
            awaited, deleted = self.events.pop(name)
            self.look(name, awaited if deleted or self.believes_writes else None)
        elif self.arrived < 60 and (chance < 0.65 or not self.present):
            self.arrived += 1
            kind = self.random.choice(kinds)
            name = node(self.arrived, self.arrived, kind)
            self.present[name] = kind
            self.look(name, None)
        elif chance < 0.75:
            self.happens(self.random.choice(list(self.present)), deleted=False)
        elif writers and chance < 0.8:
            self.downgrade(writers[0])
        elif self.present:
            # Mostly whoever is inside, as in life.
            anybody = self.random.random() < 0.4 or not self.holders
            self.leave(self.random.choice(list(self.present) if anybody else self.holders))

    def run(self, kinds: list[Kind]) -> None:
        while self.arrived < 60 or self.present:
            self.step(kinds)
            inside_ = {self.present[name] for name in self.holders}
            assert len(self.holders) <= 1 or inside_ == {READ}, "two are inside"
            assert not self.present or self.holders or self.events, "nobody is inside, and nobody will look"


@pytest.mark.parametrize("kinds", [[MUTEX], [READ, WRITE], [WRITE]], ids=str)
@pytest.mark.parametrize("seed", range(150))
def test_random_hand_overs_without_the_list_are_safe_and_live(seed, kinds):
    line = Line(seed, believes_writes=False)
    line.run(kinds)
    assert line.shortcuts > 0


def test_that_model_catches_a_writer_who_takes_one_that_became_a_reader_for_gone(monkeypatch):
    monkeypatch.setitem(RULES, Mode.WRITE, RULES[Mode.MUTEX])
    caught = 0
    for seed in range(150):
        try:
            Line(seed, believes_writes=False).run([READ, WRITE])
        except AssertionError:
            caught += 1
    assert caught > 10


def test_whose_end_makes_it_our_turn_is_known_by_the_last_list():
    names = [node(number, number) for number in range(1, 4)]
    first, second, third = (verdict_on(names, name, number, MUTEX) for number, name in enumerate(names, 1))
    assert first.enter
    assert is_next(second, names[0])
    assert not is_next(second, names[2])
    assert not is_next(third, names[1]), "the first may still be there"
    # It was told that the second has given up: then it is the first that it waits for.
    following = after(third, names[1], -1, demand=True)
    assert following is not None
    assert is_next(following, names[0])
    writers = [node(number, number, WRITE) for number in range(1, 3)]
    assert not is_next(verdict_on(writers, writers[1], 2, WRITE), writers[0])
    assert is_next(verdict_on([writers[0], node(2, 2, READ)], node(2, 2, READ), 2, READ), writers[0])


@pytest.mark.parametrize("kinds", [[MUTEX], [READ, WRITE]], ids=str)
def test_that_model_catches_who_takes_a_write_for_an_end(kinds):
    caught = 0
    for seed in range(150):
        try:
            Line(seed, believes_writes=True).run(kinds)
        except AssertionError:
            caught += 1
    assert caught > 10
