"""The scripts of locks with many holders: what each does in each state, and that together they do what the model does.

Time is not waited for: deadlines are written into the past.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from aiolock.backends.redis.commands import SCRIPTS, WHOLE
from aiolock.backends.rows.rules import Machine, StoredRequest
from tests.backends.redis.test_scripts import Lock

A, B, C, D = "a:1", "b:1", "c:1", "d:1"
"""Requests of four processes."""
READ, WRITE = (1, WHOLE), (WHOLE, WHOLE)
"""Weight and limit."""
TTL, CLAIM = 3_000_000, 300_000
"""Milliseconds: nothing runs out by itself, however slow the machine is."""
POSITION = "6000000 s -1"


class ManyLock(Lock):
    """One key of a read-write lock or a semaphore."""

    def __init__(self, admin: Any, namespace: str, name: str = "x", family: str = "rw") -> None:
        super().__init__(admin, namespace, name)
        self.key = f"{namespace}:1:{family}:{{{name}}}"

    async def enter(  # type: ignore[override]
        self, request: str, kind=READ, *, ttl=TTL, most=1, floor=0, label="me", position=POSITION
    ) -> Any:
        return await self.call(SCRIPTS["many_enter"], request, ttl, most, floor, label, position, *kind)

    async def attempt(self, request: str, kind=READ, **options: Any) -> Any:  # type: ignore[override]
        return await self.enter(request, kind, position="", **options)

    async def release(self, request: str, floor: int = 0) -> int:
        return await self.call(SCRIPTS["many_release"], request, floor)

    async def leave(self, request: str, *, tombstone: bool = False, keep: int = 0) -> int:
        return await self.call(SCRIPTS["many_leave"], request, 0, int(tombstone), keep)

    async def renew(self, request: str, ttl: int = TTL, present: str = "") -> Any:
        return (await self.call(SCRIPTS["many_renew"], request, ttl, present))[1]

    async def heartbeat(
        self, process: str, places: object = 1, *, pushed: str = "s", life: int = 6_000_000
    ) -> list[int]:
        return (await self.call(SCRIPTS["many_heartbeat"], process, life, pushed, 0, places))[1]

    async def force(self) -> list[int]:
        return await self.call(SCRIPTS["many_force"], 0, "")

    async def inspect(self) -> Any:
        return await self.call(SCRIPTS["many_inspect"])

    async def downgrade(self, request: str, ttl: int = TTL) -> Any:
        return await self.call(SCRIPTS["many_downgrade"], request, ttl, 0)

    async def set_limit(self, limit: int) -> int:
        return await self.call(SCRIPTS["many_limit"], limit, 0)

    async def ask(self, why: str = "maintenance, please") -> int:
        return await self.call(SCRIPTS["many_request_release"], why)

    async def inside(self) -> set[str]:
        """Whose requests have a hold."""
        return {field[2:] for field in await self.fields() if field[:2] == "h:"}

    async def line(self) -> list[str]:
        """Whose requests have a position, in order."""
        fields = await self.fields()
        places = {int(field[2:]): value for field, value in fields.items() if field[:2] == "q:"}
        return [places[ticket].split(" ")[0] for ticket in sorted(places)]

    async def lapse(self, *requests: str) -> None:
        """Their holds have run out."""
        for request in requests:
            record = (await self.fields())[f"h:{request}"]
            await self.admin.hset(self.key, f"h:{request}", f"1 {record.partition(' ')[2]}")
        await self.admin.hset(self.key, "next", 1)


@pytest.fixture
async def lock(admin, namespace):
    lock = ManyLock(admin, namespace)
    yield lock
    await lock.close()


@pytest.fixture
async def pool(admin, namespace):
    pool = ManyLock(admin, namespace, family="sem")
    yield pool
    await pool.close()


# --- who may be inside together


async def test_readers_are_inside_together_each_with_a_token_of_its_own(lock):
    tokens = [(await lock.enter(request))[1] for request in (A, "a:2", B)]
    assert tokens == sorted(set(tokens))
    assert await lock.inside() == {A, "a:2", B}


async def test_a_writer_is_alone_and_readers_come_after_it(lock):
    assert (await lock.enter(A, WRITE, most=1024))[0] == 1
    for request, kind in ((B, READ), (C, WRITE), (D, READ)):
        assert (await lock.enter(request, kind))[0] == 0
    assert await lock.inside() == {A}


async def test_a_queued_writer_stops_later_readers_and_those_behind_it_enter_together(lock):
    await lock.listen("a", "b", "c", "d")
    await lock.enter(A)
    await lock.enter(B, WRITE)
    await lock.enter(C)
    await lock.enter(D)
    assert await lock.line() == [B, C, D]
    await lock.release(A)
    assert await lock.inside() == {B}
    assert await lock.release(B) == CLAIM
    assert await lock.inside() == {C, D}
    # A line that is empty stops nobody.
    assert (await lock.enter("a:9"))[0] == 1


async def test_a_queued_writer_that_leaves_lets_the_readers_behind_it_in(lock):
    await lock.listen("a", "b", "c", "d")
    await lock.enter(A)
    await lock.enter(B, WRITE)
    await lock.enter(C)
    assert await lock.leave(B) == CLAIM
    assert await lock.inside() == {A, C}


async def test_permits_are_given_out_up_to_the_limit_and_a_large_request_waits_at_the_head(pool):
    await pool.listen("a", "b", "c", "d")
    assert (await pool.enter(A, (2, 5)))[0] == 1
    assert (await pool.enter(B, (2, 5)))[0] == 1
    assert (await pool.enter(C, (4, 5)))[0] == 0
    # There is room for one, and it is not taken from who came before.
    assert (await pool.enter(D, (1, 5)))[0] == 0
    assert (await pool.attempt("a:2", (1, 5)))[0] == 0
    await pool.release(A)
    assert await pool.inside() == {B}
    await pool.release(B)
    assert await pool.inside() == {C, D}
    assert (await pool.fields())["used"] == "5"


async def test_a_run_of_hundreds_is_let_in_in_steps(lock):
    await lock.listen("a", "b")
    await lock.enter(A, WRITE)
    for n in range(600):
        await lock.enter(f"b:{n:x}")
    assert await lock.release(A) == -1
    assert 0 < len(await lock.inside()) < 600
    # Nobody passes those who are still to be looked through.
    assert (await lock.attempt("a:2", WRITE))[0] == 0
    while (await lock.heartbeat("b", 0))[1] == -1:
        pass
    assert len(await lock.inside()) == 600


# --- tokens


async def test_the_tokens_of_readers_are_above_the_block_of_a_writer_and_the_other_way_round(lock):
    await lock.enter(A)
    await lock.release(A)
    await lock.admin.hset(lock.key, "top", int((await lock.fields())["top"]) - 5000)
    _, first, count, _, _ = await lock.enter(A, WRITE, most=1024)
    assert count == 1024
    await lock.listen("b", "c")
    await lock.enter(B)
    await lock.enter(C, WRITE, most=1024)
    await lock.release(A)
    _, message = await lock.heard()
    _, _, token, reader, *_ = message.split(" ")
    assert int(token) > first + count - 1
    assert reader == "1"
    await lock.release(B)
    writer = (await lock.heard())[1].split(" ")
    assert int(writer[2]) > int(token)


# --- the same request again


async def test_entering_again_finds_the_same_grant_with_a_full_ttl(lock, admin):
    granted = await lock.enter(A, WRITE, ttl=1000, most=1024)
    again = await lock.enter(A, WRITE, ttl=50_000, most=1024)
    assert again[:3] == granted[:3]
    assert (await lock.fields())["used"] == str(WHOLE)
    assert 100_000 < await admin.pttl(lock.key) <= 110_000


async def test_entering_again_finds_the_same_place(lock):
    await lock.enter(A, WRITE)
    assert (await lock.enter(B))[:2] == [0, 0]
    assert (await lock.enter(C))[:2] == [0, 1]
    assert (await lock.enter(B))[:2] == [0, 0]
    assert await lock.line() == [B, C]


@pytest.mark.parametrize("other", [B, "a:2", "0:1"])
async def test_nobody_releases_renews_downgrades_or_leaves_what_is_not_his(lock, other):
    await lock.enter(A, WRITE)
    before = await lock.fields()
    assert await lock.release(other) == -2
    assert await lock.renew(other) == 0
    assert (await lock.downgrade(other))[0] == 0
    assert await lock.leave(other) == -2
    assert await lock.leave(other, keep=5000) == -2
    assert await lock.fields() == before


async def test_a_request_with_a_tombstone_gets_nothing_when_it_arrives(lock, admin):
    await lock.enter(A)
    await lock.leave(B, tombstone=True)
    assert (await lock.enter(B))[:2] == [0, -1]
    assert await lock.inside() == {A}
    assert await lock.line() == []
    assert await admin.pttl(lock.key) > 110_000


async def test_releasing_twice_does_nothing_the_second_time(pool):
    await pool.enter(A, (2, 5))
    await pool.enter(B, (2, 5))
    assert await pool.release(A) == 0
    assert await pool.release(A) == -2
    assert (await pool.fields())["used"] == "2"


# --- holds that run out, claims that lapse, processes that are gone


async def test_a_dead_reader_costs_only_itself(lock):
    await lock.listen("a", "b", "c")
    await lock.enter(A)
    await lock.enter(B)
    await lock.enter(C, WRITE)
    await lock.lapse(A)
    left, claim, _ = await lock.heartbeat("c")
    assert (await lock.inside(), claim) == ({B}, 0)
    assert 0 < left <= TTL * 1000
    assert await lock.renew(A) == 0
    assert await lock.renew(B) == 2
    await lock.release(B)
    assert await lock.inside() == {C}


async def test_a_hold_that_ran_out_and_is_in_nobodys_way_is_still_its_owners(lock):
    await lock.enter(A)
    await lock.enter(B)
    await lock.lapse(A)
    # Another reader finds room without it.
    await lock.admin.hset(lock.key, "next", (await lock.admin.time())[0] * 1_000_000 - 1_000_000)
    assert (await lock.enter(C))[0] == 1
    assert await lock.renew(A) == 1
    # But not for ever: the dead are cleared away, also where nobody ever waits.
    await lock.lapse(A)
    assert (await lock.enter(D))[0] == 1
    assert await lock.inside() == {B, C, D}
    assert (await lock.fields())["used"] == "3"


async def test_permits_of_the_dead_come_back(pool):
    await pool.enter(A, (3, 5))
    await pool.enter(B, (2, 5))
    await pool.lapse(A)
    assert (await pool.attempt(C, (3, 5)))[0] == 1
    assert await pool.inside() == {B, C}


async def test_a_claim_that_lapses_parks_the_process_and_the_next_are_let_in(lock):
    await lock.listen("a", "b", "c", "d")
    await lock.enter(A, WRITE)
    for request in (B, "b:2", C):
        await lock.enter(request, WRITE)
    await lock.release(A)
    assert await lock.inside() == {B}
    await lock.lapse(B)
    assert (await lock.heartbeat("c"))[1] == CLAIM
    assert await lock.inside() == {C}
    # Its second position was passed over, although it seems to listen; it speaks, and comes back to its tickets.
    assert (await lock.heartbeat("b", 1))[2] == 2
    assert (await lock.enter("b:2", WRITE, position="6000000 s 1"))[:2] == [0, 1]
    await lock.release(C)
    assert await lock.inside() == {"b:2"}


async def test_a_confirmed_grant_that_runs_out_parks_nobody(lock):
    await lock.listen("a", "b", "c")
    await lock.enter(A, WRITE)
    for request in (B, "b:2", C):
        await lock.enter(request, WRITE)
    await lock.release(A)
    assert await lock.renew(B) == 2
    await lock.lapse(B)
    await lock.heartbeat("c")
    assert await lock.inside() == {"b:2"}


@pytest.mark.parametrize("way", ["nobody listens", "not heard of for long"])
async def test_a_writer_who_cannot_be_reached_stops_nobody(lock, way):
    await lock.enter(A)
    await lock.enter(B, WRITE)
    await lock.listen("c")
    if way != "nobody listens":
        await lock.listen("b")
        await lock.expire("p:b")
    await lock.enter(C)
    if way == "nobody listens":
        # It is not known before it is its turn: a count of 0 never means dead.
        assert await lock.line() == [B, C]
        await lock.release(A)
    assert await lock.line() == []
    assert C in await lock.inside()
    assert (await lock.heartbeat("b"))[2] == 2


async def test_who_asks_instead_of_listening_is_let_in_without_a_message(pool):
    await pool.enter(A, (1, 1))
    await pool.enter(B, (1, 1), position="6000 n -1")
    assert await pool.release(A) == CLAIM
    assert await pool.inside() == {B}
    assert (await pool.heartbeat("b", 1, pushed="n"))[2] == 2
    assert (await pool.enter(B, (1, 1)))[0] == 1


async def test_a_heartbeat_that_lets_one_of_ours_in_says_so(pool):
    await pool.enter(A, (1, 1))
    await pool.enter(B, (1, 1), position="6000000 n -1")
    await pool.lapse(A)
    # It counts what it had before: the answer alone tells of what this very step has done.
    assert await pool.heartbeat("b", 1, pushed="n") == [CLAIM * 1000, CLAIM, 2]


# --- limits


async def test_another_limit_than_the_first_users_is_refused_and_takes_nothing(pool):
    assert (await pool.enter(A, (1, 5)))[0] == 1
    before = await pool.fields()
    assert await pool.enter(B, (1, 4)) == [2, 5]
    assert await pool.attempt(B, (1, 6)) == [2, 5]
    assert await pool.fields() == before


async def test_a_limit_that_was_set_counts_and_the_first_users_is_still_right(pool, admin):
    await pool.listen("a", "b", "c")
    await pool.enter(A, (2, 2))
    await pool.enter(B, (1, 2))
    await pool.enter(C, (2, 2))
    assert await pool.set_limit(3) == CLAIM
    assert await pool.inside() == {A, B}
    assert await pool.attempt(D, (1, 4)) == [2, 3]
    assert (await pool.attempt(D, (1, 2)))[0] == (await pool.attempt(D, (1, 3)))[0] == 0
    # Shrinking takes nothing away.
    await pool.set_limit(1)
    assert await pool.inside() == {A, B}
    await pool.release(A)
    await pool.release(B)
    assert await pool.line() == [C]
    # Who waits for more than there is keeps its position; that does not make it look all the time.
    assert (await pool.heartbeat("c"))[0] == 0
    assert (await pool.enter("c:9", (1, 2)))[3] == 60_000_000
    await pool.set_limit(2)
    assert await pool.inside() == {C}
    assert await admin.pttl(pool.key) > 86_000_000


async def test_a_limit_that_was_set_is_kept_for_a_day_after_the_last_use(pool, admin):
    await pool.set_limit(3)
    assert 86_000_000 < await admin.pttl(pool.key) <= 86_400_000
    await admin.pexpire(pool.key, 90_000)
    # The next user says what is declared.
    assert (await pool.enter(A, (1, 7)))[0] == 1
    assert await pool.attempt(B, (4, 7)) != [2, 3]
    assert await pool.attempt(B, (1, 8)) == [2, 3]
    assert await admin.pttl(pool.key) > 86_400_000
    await admin.pexpire(pool.key, 90_000)
    await pool.renew(A)
    assert await admin.pttl(pool.key) > 86_400_000


# --- downgrading


async def test_a_writer_becomes_a_reader_and_the_readers_behind_it_enter(lock):
    await lock.listen("a", "b", "c", "d")
    _, token, *_ = await lock.enter(A, WRITE)
    await lock.enter(B)
    await lock.enter(C, WRITE)
    await lock.enter(D)
    answer = await lock.downgrade(A, 50_000)
    assert (answer[0], answer[1], answer[4], answer[5]) == (1, token, 1, CLAIM)
    assert await lock.inside() == {A, B}
    assert await lock.line() == [C, D]
    again = await lock.downgrade(A, 50_000)
    assert again[:2] == [1, token]
    assert (await lock.fields())["used"] == "2"
    await lock.release(A)
    await lock.release(B)
    assert await lock.inside() == {C}


async def test_what_is_gone_is_not_downgraded(lock):
    assert (await lock.downgrade(A))[0] == 0
    await lock.enter(A, WRITE)
    await lock.force()
    assert (await lock.downgrade(A))[0] == -1


# --- keeping, forcing, asking, looking


async def test_a_hold_that_is_kept_weighs_as_much_and_is_nobodys(pool):
    await pool.enter(A, (3, 5))
    assert await pool.leave(A, keep=5000) == 0
    assert await pool.leave(A, keep=90_000) == -2
    assert await pool.release(A) == -2
    assert await pool.renew(A) == 0
    # Two processes may have given their requests the same number.
    await pool.enter(B, (2, 5))
    await pool.leave(B, keep=5000)
    assert len(await pool.inside()) == 2
    assert (await pool.attempt(C, (1, 5)))[0] == 0
    await pool.lapse(*await pool.inside())
    assert (await pool.attempt(C, (5, 5)))[0] == 1


async def test_force_takes_it_from_all_tells_them_and_lets_in_the_next(lock):
    assert await lock.force() == [0, 0]
    await lock.listen("a", "b", "c")
    await lock.enter(A)
    await lock.enter(B)
    await lock.enter(C, WRITE)
    assert await lock.force() == [1, CLAIM]
    told = {await lock.heard(), await lock.heard()}
    assert told == {("a", f"f {A}"), ("b", f"f {B}")}
    assert await lock.inside() == {C}
    assert await lock.renew(A) == await lock.renew(B) == -1
    # The marks go in the end.
    await lock.admin.hset(lock.key, f"z:{A}", 1)
    await lock.lapse(C)
    await lock.attempt(D, WRITE)
    assert f"z:{A}" not in await lock.fields()


async def test_everybody_who_is_inside_is_asked_to_let_go_and_nobody_who_comes_later(lock):
    assert await lock.ask() == 0
    assert await lock.fields() == {}
    await lock.listen("a", "b", "c")
    await lock.enter(A)
    await lock.enter(B)
    await lock.enter(C, WRITE)
    assert await lock.ask("two words") == 1
    messages = dict([await lock.heard(), await lock.heard()])
    assert messages["a"].startswith(f"a {A} ")
    assert messages["b"].endswith(" two words")
    # Who did not hear it is told with its renewals.
    state, asked = await lock.renew(A)
    assert (state, f"a {asked.decode()}") == (2, messages["a"])
    await lock.release(A)
    await lock.release(B)
    assert await lock.renew(C) == 1


async def test_people_see_who_is_inside_and_who_waits_in_order(pool):
    assert (await pool.inspect())[1:] == [-1, [], [], b""]
    _, first, *_ = await pool.enter(A, (2, 5), label="the holder, 1")
    _, second, *_ = await pool.enter(B, (3, 5), label="ein größerer Name")
    await pool.enter(C, (4, 5), label="large")
    await pool.enter(D, (1, 5), label="")
    now, limit, holds, places, _ = await pool.inspect()
    assert limit == 5
    told = [hold.decode().split(" ", 5) for hold in holds]
    assert [(words[1], int(words[2]), words[5]) for words in told] == [
        ("2", first, "the holder, 1"),
        ("3", second, "ein größerer Name"),
    ]
    assert all(now < int(words[0]) <= now + TTL * 1000 for words in told)
    assert places == [b"4 large", b"1 "]
    assert not any(word in str(told) for word in (A, B))
    await pool.expire("p:c")
    await pool.lapse(A)
    assert [len(words) for words in (await pool.inspect())[2:4]] == [1, 1]


async def test_what_finds_nothing_writes_nothing(lock, admin):
    await lock.release(A)
    await lock.leave(A)
    await lock.leave(A, keep=1000)
    await lock.renew(A)
    await lock.downgrade(A)
    await lock.heartbeat("a", 0)
    await lock.heartbeat("a", 3)
    await lock.force()
    await lock.ask()
    await lock.inspect()
    assert not await admin.exists(lock.key)


# --- a clock that is set back


async def ahead(lock: ManyLock, *requests: str, seconds: int = 1000) -> None:
    """These holds were granted or renewed by a clock that was so much ahead."""
    later = seconds * 1_000_000
    fields = await lock.fields()
    for request in requests:
        until_, _, rest = fields[f"h:{request}"].partition(" ")
        await lock.admin.hset(lock.key, f"h:{request}", f"{int(until_) + later} {rest}")
    for field in ("next", "swept"):
        await lock.admin.hset(lock.key, field, int(fields[field]) + later)


@pytest.mark.parametrize("way", ["attempt", "enter", "heartbeat", "leave"])
async def test_a_hold_ends_a_ttl_after_the_first_look_when_the_clock_was_set_back(lock, way):
    await lock.enter(A, ttl=5000)
    await lock.enter(B, ttl=7000)
    for request in (C, D):
        await lock.enter(request, WRITE, position="6000 s -1")
    await ahead(lock, A, B)
    if way == "heartbeat":
        assert (await lock.heartbeat("c"))[0] <= 5_000_000
    elif way == "leave":
        await lock.leave(D)
    else:
        assert (await getattr(lock, way)("e:1", WRITE))[3] <= 5_000_000
    seconds, micros = await lock.admin.time()
    now = seconds * 1_000_000 + micros
    fields = await lock.fields()
    ends = [int(fields[f"h:{request}"].split(" ")[0]) - now for request in (A, B)]
    assert ends[0] <= 5_000_000
    assert 5_000_000 < ends[1] <= 7_000_000
    assert int(fields["next"]) - now <= 5_000_000
    assert int(fields["swept"]) <= now
    # Both live, and lose nothing.
    assert [await lock.renew(request) for request in (A, B)] == [2, 2]


async def test_a_permit_that_is_kept_ends_in_time_when_the_clock_was_set_back(pool):
    await pool.enter(A, (1, 1))
    await pool.leave(A, keep=60_000)
    [kept] = await pool.inside()
    await ahead(pool, kept)
    assert 50_000_000 < (await pool.attempt(B, (1, 1)))[3] <= 60_000_000


async def test_holes_cost_a_newcomer_nothing_when_nobody_waits(pool, admin):
    await pool.enter(A, (1, 1))
    await pool.enter(B, (1, 1))
    await admin.hset(pool.key, "tail", 4_500)
    assert await pool.leave(B) == -1
    await pool.release(A)
    assert (await pool.attempt(C, (1, 1)))[0] == 1


# --- a writer passes its hold on inside its process, and so has to know of others


async def test_the_first_in_line_is_told_to_a_writer_and_not_to_readers(lock):
    await lock.listen("a", "b")
    await lock.enter(A)
    await lock.enter(B, WRITE)
    await lock.release(A)
    assert (await lock.heard())[1].startswith(f"g {B} ")
    await lock.enter(A, WRITE)
    assert await lock.heard() == ("b", f"d {B}")
    await lock.enter("a:2", WRITE)
    await lock.force()
    assert await lock.heard() == ("b", f"f {B}")


# --- any sequence


async def test_a_line_of_another_lock_is_not_touched(admin, namespace):
    """Renewals and heartbeats of several keys, one of which somebody made something else."""
    locks = [ManyLock(admin, namespace, f"n{n}") for n in range(4)]
    for each in locks[:3]:
        await each.enter(A)
    await locks[1].force()
    await admin.set(locks[2].key, "of another type")
    keys = [each.key for each in locks]
    words = [word for _ in locks for word in (A, 10_000, "")]
    answer = await admin.eval(SCRIPTS["many_renew"].source.decode(), 4, *keys, *words)
    assert answer[1:] == [1, -1, 0, 0]
    answer = await admin.eval(
        SCRIPTS["many_heartbeat"].source.decode(), 4, *keys, "b", 6000, "s", 0, 1, 1, 1, 1
    )
    assert [state for _, _, state in answer[1:]] == [2, 2, 2, 2]
    for each in locks:
        await each.close()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("family", ["rw", "sem"])
async def test_everybody_is_let_in_as_the_model_says(admin, namespace, seed, family):
    """Whatever is asked in whatever order, with all processes listening: the same are inside and in line."""
    choose = random.Random(f"{family} {seed}")
    lock = ManyLock(admin, namespace, family=family)
    await lock.listen("a", "b", "c")
    machine, key, now = Machine(), (family, "x"), 0.0
    limit, ran = 4, Counter()
    serial = 0
    known: dict[str, tuple[StoredRequest, tuple[int, int]]] = {}

    def new() -> str:
        nonlocal serial
        serial += 1
        name = f"{choose.choice('abc')}:{serial:x}"
        if family == "rw":
            writes = choose.random() < 0.3
            request = StoredRequest(name, "write" if writes else "read", 300.0)
            known[name] = request, (WRITE if writes else READ)
        else:
            weight = choose.choice((1, 1, 1, 2, 4))
            request = StoredRequest(name, "permits", 300.0, permits=weight, limit=4)
            known[name] = request, (weight, 4)
        return name

    async def state() -> tuple[set[str], list[str]]:
        return {name for name in await lock.inside() if name[0] != "0"}, await lock.line()

    for _ in range(200):
        name = choose.choice(list(known)[-8:]) if known and choose.random() < 0.55 else new()
        request, kind = known[name]
        what = choose.choice(("enter", "enter", "try", "leave", "leave", "release", "renew", "other"))
        ran[what] += 1
        if what in ("enter", "try"):
            wait = what == "enter"
            granted = machine.enter(key, request, now, wait=wait).token > 0
            answer = await lock.enter(name, kind, position=POSITION if wait else "")
            assert (answer[0] == 1) is granted, what
        elif what == "leave":
            tombstone = choose.random() < 0.1
            machine.leave(key, request, now, tombstone=tombstone)
            await lock.leave(name, tombstone=tombstone)
        elif what == "release":
            inside = name in (await state())[0]
            assert (await lock.release(name) == -2) is not inside
            if inside:
                machine.leave(key, request, now)
        elif what == "renew":
            assert (machine.renew(key, request, now) is None) is (await lock.renew(name) == 0)
        elif family == "sem":
            limit = choose.choice((2, 4, 6))
            machine.set_limit(key, limit, now)
            await lock.set_limit(limit)
        elif kind == WRITE:
            gone = machine.downgrade(key, request, now) is None
            assert gone is ((await lock.downgrade(name))[0] == 0)
            known[name] = known[name][0], WRITE
        holds, queue = machine.inspect(key, now)
        expected = {hold.request.id for hold in holds}, [position.id for position in queue]
        assert await state() == expected, (what, name)
        fields = await lock.fields()
        if fields:
            weights = [int(value.split(" ")[2]) for field, value in fields.items() if field[:2] == "h:"]
            assert int(fields.get("used", 0)) == sum(weights)
            assert await admin.pttl(lock.key) > 0
    assert min(ran.values()) > 5
    await lock.close()


@pytest.mark.parametrize("seed", range(6))
async def test_the_books_balance_after_any_sequence_of_steps(lock, admin, seed):
    """The same with processes that come and go, holds that run out and claims that lapse."""
    choose = random.Random(seed)
    kinds = [READ, READ, READ, WRITE]
    requests = {f"{process}:{n}": kinds[n] for process in "abc" for n in range(4)}
    deaf: set[str] = set()
    await lock.listen("a", "b", "c")
    top, granted, lapsed = 0, 0, 0
    seen: dict[str, int] = {}

    async def step() -> None:
        nonlocal lapsed
        request = choose.choice(list(requests))
        process, what = request[0], choose.randrange(13)
        if what <= 2:
            ticket = choose.choice((-1, -1, 0, 1, 5))
            position = f"6000 {choose.choice('sn')} {ticket}"
            await lock.enter(request, requests[request], ttl=choose.choice((100, 5000)), position=position)
        elif what == 3:
            await lock.attempt(request, requests[request])
        elif what <= 5:
            await lock.release(request)
        elif what == 6:
            await lock.leave(
                request, tombstone=choose.random() < 0.05, keep=choose.choice((0, 0, 0, 0, 0, 50))
            )
        elif what == 7:
            await lock.renew(request)
        elif what == 8:
            await lock.heartbeat(process, choose.choice((0, 1, 2)))
        elif what == 9 and (inside := sorted(await lock.inside())):
            lapsed += 1
            await lock.lapse(choose.choice(inside))
        elif what == 10 and f"p:{process}" in await lock.fields():
            await lock.expire(f"p:{process}")
        elif what == 11:
            await choose.choice((lock.force, lock.ask, lock.inspect))()
        elif process in deaf:
            deaf.remove(process)
            await lock.listen(process)
        elif choose.random() < 0.5:
            deaf.add(process)
            await lock.go_deaf(process)

    for _ in range(250):
        await step()
        fields = await lock.fields()
        if not fields:
            continue
        places = {int(field[2:]): value.split(" ")[0] for field, value in fields.items() if field[:2] == "q:"}
        tickets = {field[2:]: int(value) for field, value in fields.items() if field[:2] == "r:"}
        assert {request: ticket for ticket, request in places.items()} == tickets
        assert all(int(fields["head"]) <= ticket < int(fields["tail"]) for ticket in places)
        counts = {field[2:]: int(value.split(" ")[2]) for field, value in fields.items() if field[:2] == "p:"}
        assert counts == Counter(request.partition(":")[0] for request in tickets)
        assert await admin.pttl(lock.key) > 0
        holds = {field[2:]: value.split(" ") for field, value in fields.items() if field[:2] == "h:"}
        assert not holds.keys() & tickets.keys()
        assert int(fields.get("used", 0)) == sum(int(words[2]) for words in holds.values())
        assert not any(int(words[2]) == WHOLE for words in holds.values()) or len(holds) == 1
        if holds:
            assert int(fields["next"]) <= min(int(words[0]) for words in holds.values())
        for request, words in holds.items():
            if not request.startswith("0:") and seen.get(request) != int(words[3]):
                assert int(words[3]) > top
                seen[request] = int(words[3])
                granted += words[1] == "1"
        top = int(fields.get("top", 0))
    # What was to be exercised was.
    assert granted > 1
    assert lapsed > 5
