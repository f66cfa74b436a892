"""The scripts one by one: what each does in each state, and what holds after any sequence of them.

Time is not waited for: deadlines are written into the past.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import redis.asyncio

from aiolock.backends.redis.commands import PROBE, SCRIPTS, Script

A, B, C = "a:1", "b:1", "c:1"
"""Requests of three processes."""
TTL, LIFE = 300_000, 600_000
"""Milliseconds of a hold and of a place: nothing runs out by itself, however slow the machine is."""


class Lock:
    """One key, and the scripts that may be called on it."""

    def __init__(self, admin: redis.asyncio.Redis, namespace: str, name: str = "x") -> None:
        self.admin = admin
        self.key = f"{namespace}:1:lock:{{{name}}}"
        self._channels = f"{namespace}:1:to:"
        self._subscriber = admin.pubsub()

    async def call(self, script: Script, *arguments: object) -> Any:
        return await self.admin.eval(script.source.decode(), 1, self.key, *arguments)

    async def enter(self, request: str, *, ttl=TTL, most=1, floor=0, label="me", place=f"{LIFE} s -1") -> Any:
        return await self.call(SCRIPTS["enter"], request, ttl, most, floor, label, place)

    async def attempt(self, request: str, **options: Any) -> Any:
        return await self.enter(request, place="", **options)

    async def release(self, request: str, floor: int = 0) -> int:
        return await self.call(SCRIPTS["release"], request, floor)

    async def leave(self, request: str, *, tombstone: bool = False, keep: int = 0) -> int:
        return await self.call(SCRIPTS["leave"], request, 0, int(tombstone), keep)

    async def renew(self, request: str, ttl: int = TTL, present: str = "") -> int:
        return (await self.call(SCRIPTS["renew"], request, ttl, present))[1]

    async def heartbeat(
        self, process: str, places: object = 1, *, pushed: str = "s", life: int = LIFE
    ) -> list[int]:
        return (await self.call(SCRIPTS["heartbeat"], process, life, pushed, 0, places))[1]

    async def force(self) -> list[int]:
        return await self.call(SCRIPTS["force"], 0, "")

    async def inspect(self) -> Any:
        return await self.call(SCRIPTS["inspect"])

    async def fields(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in (await self.admin.hgetall(self.key)).items()}

    async def owner(self) -> str | None:
        return (await self.fields()).get("owner")

    async def expire(self, field: str = "until") -> None:
        """The deadline of the hold, or of the places of a process, is over."""
        if field == "until":
            await self.admin.hset(self.key, "until", 1)
        else:
            life = (await self.fields())[field]
            await self.admin.hset(self.key, field, re.sub(r"^\d+", "1", life))

    async def listen(self, *processes: str) -> None:
        """From now on these processes can be reached."""
        for process in processes:
            await self._subscriber.subscribe(self._channels + process)
            await self._subscriber.get_message(timeout=10)

    async def go_deaf(self, process: str) -> None:
        await self._subscriber.unsubscribe(self._channels + process)
        await self._subscriber.get_message(timeout=10)

    async def heard(self) -> tuple[str, str]:
        """The next message, and to whom."""
        async with asyncio.timeout(20):
            while True:
                message = await self._subscriber.get_message(ignore_subscribe_messages=True, timeout=10)
                if message is not None:
                    return message["channel"].decode().removeprefix(self._channels), message["data"].decode()

    async def close(self) -> None:
        await self._subscriber.aclose()


@pytest.fixture
async def lock(admin, namespace):
    lock = Lock(admin, namespace)
    yield lock
    await lock.close()


# --- tokens


async def test_the_first_token_is_the_servers_time_and_it_rises_with_every_grant(lock, admin):
    seconds, micros = await admin.time()
    granted, token, count, server, waiting = await lock.enter(A)
    assert (granted, count, waiting) == (1, 1, 0)
    assert token == server >= seconds * 1_000_000 + micros
    last = token
    for _ in range(20):
        await lock.release(A)
        _, token, count, server, _ = await lock.enter(A)
        assert count == 1
        assert last < token <= server
        last = token


async def test_a_block_lies_between_the_last_token_and_the_servers_time(lock):
    _, first, _, _, _ = await lock.enter(A)
    await lock.release(A)
    await lock.admin.hset(lock.key, "top", first - 5000)
    _, token, count, server, _ = await lock.enter(B, most=1024)
    assert count == 1024
    assert first - 5000 < token
    assert token + count - 1 == server
    await lock.release(B)
    # What was handed out in a block is not handed out again.
    _, after, _, _, _ = await lock.enter(A, most=1024)
    assert after > server


@pytest.mark.parametrize("forget", [False, True])
async def test_tokens_rise_beyond_what_a_client_has_seen_also_when_the_key_is_lost(lock, forget):
    _, token, _, _, _ = await lock.enter(A)
    await lock.release(A)
    if forget:
        await lock.admin.delete(lock.key)
    # A clock that stands back: what was seen is far ahead of it.
    ahead = token + 10**9
    _, token, count, _, _ = await lock.enter(B, floor=ahead, most=1024)
    assert (token, count) == (ahead + 1, 1)
    await lock.release(B)
    _, token, _, _, _ = await lock.enter(C)
    assert token == ahead + 2


async def test_what_any_waiter_has_seen_counts_for_the_grant_that_is_handed_to_it(lock):
    _, token, _, _, _ = await lock.enter(A)
    await lock.listen("b")
    await lock.enter(B, floor=token + 10**9)
    await lock.release(A, floor=token + 10**6)
    assert int((await lock.fields())["token"]) == token + 10**9 + 1


# --- entering


async def test_entering_again_finds_the_same_grant_with_a_full_ttl(lock, admin):
    _, token, _, server, _ = await lock.enter(A, ttl=1000)
    again = await lock.enter(A, ttl=TTL)
    assert again[:3] == [1, token, 1]
    assert int((await lock.fields())["until"]) >= server + TTL * 1000
    assert TTL + 50_000 < await admin.pttl(lock.key) <= TTL + 60_000


async def test_entering_again_finds_the_same_place(lock):
    await lock.enter(A)
    assert (await lock.enter(B))[:2] == [0, 0]
    assert (await lock.enter(C))[:2] == [0, 1]
    assert (await lock.enter(B))[:2] == [0, 0]
    fields = await lock.fields()
    assert (fields["head"], fields["tail"]) == ("0", "2")
    assert fields["p:b"].endswith(" s 1")


async def test_a_place_is_told_when_the_hold_ends_and_who_is_first(lock):
    await lock.enter(A, ttl=5000)
    _, _, server, left, first = await lock.enter(B)
    assert 0 < left <= 5_000_000
    assert first == 1
    assert (await lock.enter(C))[4] == 0
    assert int((await lock.fields())["until"]) >= server


async def test_an_attempt_takes_no_place(lock):
    await lock.enter(A)
    granted, ticket, _, left, _ = await lock.attempt(B)
    assert (granted, ticket) == (0, -1)
    assert left > 0
    assert not [field for field in await lock.fields() if field[:2] in {"q:", "r:", "p:"}]


async def test_nobody_enters_past_those_who_can_be_reached(lock):
    await lock.enter(A)
    await lock.listen("b")
    await lock.enter(B)
    await lock.expire()
    assert (await lock.attempt(C))[0] == 0
    assert await lock.owner() == B


async def test_who_asks_is_served_when_nobody_in_line_can_be_reached(lock):
    await lock.enter(A)
    await lock.enter(B)
    await lock.expire()
    assert (await lock.attempt(C))[0] == 1
    # The one who could not be reached comes back to its place, before everybody who came later.
    await lock.enter(A)
    granted, ticket, _, _, first = await lock.enter(B, place=f"{LIFE} s 0")
    assert (granted, ticket, first) == (0, 0, 1)


async def test_a_ticket_that_somebody_else_has_now_is_exchanged_for_a_new_one(lock):
    await lock.enter(A)
    await lock.enter(B)
    assert (await lock.enter(C, place=f"{LIFE} s 0"))[1] == 1
    assert (await lock.enter("d:1", place=f"{LIFE} s 77"))[1] == 2


async def test_the_first_in_line_is_told_to_the_holder_and_the_second_is_not(lock):
    await lock.listen("a")
    await lock.enter(A)
    await lock.enter(B)
    assert await lock.heard() == ("a", f"d {A}")
    await lock.enter(C)
    await lock.force()
    # Nothing came in between.
    assert await lock.heard() == ("a", f"f {A}")


# --- releasing and handing on


async def test_a_release_hands_on_in_order_with_a_short_claim(lock, admin):
    await lock.enter(A)
    await lock.listen("b", "c")
    await lock.enter(B, ttl=30_000, label="the next one", most=1024)
    await lock.enter(C, ttl=500)
    assert await lock.release(A) == 3000
    process, message = await lock.heard()
    kind, request, token, count, server, claim, waiting = message.split(" ")
    assert (process, kind, request, claim, waiting) == ("b", "g", B, "3000", "1")
    fields = await lock.fields()
    assert (fields["owner"], fields["provisional"], fields["label"], fields["token"]) == (
        B,
        "1",
        "the next one",
        token,
    )
    assert int(fields["until"]) == int(server) + 3_000_000
    assert int(fields["top"]) == int(token) + int(count) - 1
    assert 60_000 < await admin.pttl(lock.key) <= 63_000
    # A claim is at least a second, but never longer than the ttl.
    assert await lock.release(B) == 500
    assert (await lock.heard())[1].endswith(" 500 0")
    assert await lock.release(C) == 0


@pytest.mark.parametrize("other", [B, "a:2", "0:1"])
async def test_nobody_releases_renews_or_leaves_what_is_not_his(lock, other):
    await lock.enter(A)
    before = await lock.fields()
    assert await lock.release(other) == -2
    assert await lock.renew(other) == 0
    assert await lock.leave(other) == -2
    assert await lock.leave(other, keep=5000) == -2
    assert await lock.fields() == before


async def test_releasing_twice_does_nothing_the_second_time(lock):
    await lock.enter(A)
    await lock.listen("b")
    await lock.enter(B)
    await lock.release(A)
    assert await lock.release(A) == -2
    assert await lock.owner() == B


async def test_who_asks_instead_of_listening_is_made_the_holder_without_a_message(lock):
    await lock.enter(A)
    await lock.enter(B, place="6000 n -1")
    assert await lock.release(A) > 0
    assert await lock.owner() == B
    assert (await lock.heartbeat("b", 0, pushed="n"))[2] == 2
    assert (await lock.enter(B))[0] == 1


@pytest.mark.parametrize("way", ["nobody listens", "not heard of for long"])
async def test_who_cannot_be_reached_is_passed_over(lock, way):
    await lock.enter(A)
    await lock.enter(B)
    await lock.enter(C)
    await lock.listen("c")
    if way != "nobody listens":
        await lock.listen("b")
        await lock.expire("p:b")
    await lock.release(A)
    assert await lock.owner() == C
    # And learns of it, because its places are counted.
    assert (await lock.heartbeat("b"))[2] == 2


async def test_a_claim_that_lapses_is_handed_on_and_parks_the_whole_process(lock):
    await lock.enter(A)
    await lock.listen("b", "c")
    for request in (B, "b:2", C):
        await lock.enter(request)
    await lock.release(A)
    assert await lock.owner() == B
    await lock.expire()
    # Its second place is not served either, although it seems to listen.
    assert (await lock.heartbeat("c"))[1] > 0
    assert await lock.owner() == C
    # It speaks, and comes back to its places.
    assert (await lock.heartbeat("b", 1))[2] == 2
    assert (await lock.enter("b:2", place=f"{LIFE} s 1"))[:2] == [0, 1]
    assert (await lock.enter(B, place=f"{LIFE} s 0"))[:2] == [0, 0]
    await lock.release(C)
    assert await lock.owner() == B


async def test_a_confirmed_grant_that_runs_out_parks_nobody(lock):
    await lock.enter(A)
    await lock.listen("b", "c")
    for request in (B, "b:2", C):
        await lock.enter(request)
    await lock.release(A)
    assert await lock.renew(B) == 2
    await lock.expire()
    await lock.heartbeat("c")
    assert await lock.owner() == "b:2"


async def test_many_who_cannot_be_reached_are_gone_through_in_steps(lock):
    await lock.enter(A)
    for n in range(1200):
        await lock.enter(f"b:{n:x}")
    await lock.listen("c")
    await lock.enter(C)
    assert await lock.release(A) == -1
    assert await lock.owner() is None
    assert (await lock.heartbeat("c"))[1] == -1
    assert await lock.owner() is None
    assert (await lock.heartbeat("c"))[1] > 0
    assert await lock.owner() == C


@pytest.mark.parametrize("way", ["attempt", "enter"])
async def test_nobody_enters_past_a_live_waiter_behind_many_who_cannot_be_reached(lock, way):
    await lock.enter(A)
    for n in range(1700):
        await lock.enter(f"b:{n:x}")
    await lock.listen("c")
    await lock.enter(C)
    assert await lock.release(A) == -1
    # The lock is free, and two steps are not enough to look through all who are before the live one.
    for n in range(2):
        granted, ticket, _, left, _ = await getattr(lock, way)(f"d:{n}")
        assert (granted, left) == (0, 0)
        assert (ticket < 0) == (way == "attempt")
        assert await lock.owner() is None
    assert (await lock.attempt("e:1"))[0] == 0
    assert await lock.owner() == C


async def test_a_newcomer_enters_when_the_last_who_cannot_be_reached_was_looked_at(lock):
    await lock.enter(A)
    for n in range(700):
        await lock.enter(f"b:{n:x}")
    assert await lock.release(A) == -1
    assert (await lock.attempt(C))[0] == 1


async def test_holes_are_passed_over_by_whoever_leaves_and_by_heartbeats(lock, admin):
    await lock.enter(A)
    await lock.listen("c", "d")
    await lock.enter(B)
    # As many as no step looks at; nobody can fill them in a test, one by one.
    await admin.hset(lock.key, "tail", 6_000)
    await lock.enter(C)
    assert await lock.leave(B) == -1
    heads = [int((await lock.fields())["head"])]
    while heads[-1] < 6_000:
        # Whoever has no place goes on as well, because it was told to.
        _, claim, state = await lock.heartbeat("b" if len(heads) == 1 else "c", 0)
        heads.append(int((await lock.fields())["head"]))
        assert (claim, state) == ((0, 1) if heads[-1] == 6_000 else (-1, 0))
    assert [after - before for before, after in pairwise([0, *heads])] == [2_500, 2_500, 1_000]
    assert await lock.leave(C) == -2
    assert (await lock.enter("d:1"))[4] == 1
    await lock.release(A)
    assert await lock.owner() == "d:1"


async def test_holes_cost_a_newcomer_nothing_when_nobody_waits(lock, admin):
    await lock.enter(A)
    await lock.enter(B)
    await admin.hset(lock.key, "tail", 4_500)
    assert await lock.leave(B) == -1
    await lock.release(A)
    assert (await lock.attempt(C))[0] == 1


# --- leaving


async def test_leaving_the_line_closes_the_gap(lock):
    await lock.enter(A)
    await lock.listen("b", "c")
    await lock.enter(B)
    await lock.enter("b:2")
    await lock.enter(C)
    await lock.leave("b:2")
    assert (await lock.fields())["p:b"].endswith(" s 1")
    await lock.leave(B)
    fields = await lock.fields()
    assert "p:b" not in fields
    assert (fields["head"], fields["tail"]) == ("2", "3")
    await lock.leave(C)
    assert not [field for field in await lock.fields() if field[:2] in {"q:", "r:", "p:"}]
    await lock.release(A)
    assert (await lock.enter(A))[4] == 0


async def test_leaving_as_the_holder_hands_on(lock):
    await lock.enter(A)
    await lock.listen("b")
    await lock.enter(B)
    assert await lock.leave(A) > 0
    assert await lock.owner() == B


async def test_a_hold_that_is_kept_is_nobodys_until_it_ends(lock, admin):
    await lock.enter(A)
    assert await lock.leave(A, keep=5000) == 0
    assert await lock.leave(A, keep=90_000) == -2
    assert await lock.owner() == "0:1"
    assert await lock.renew(A) == 0
    assert await lock.release(A) == -2
    assert 60_000 < await admin.pttl(lock.key) <= 65_000
    granted, _, _, left, _ = await lock.attempt(B)
    assert granted == 0
    assert left <= 5_000_000
    await lock.expire()
    assert (await lock.attempt(B))[0] == 1


@pytest.mark.parametrize("held", [False, True])
async def test_a_request_with_a_tombstone_gets_nothing_when_it_arrives(lock, admin, held):
    if held:
        await lock.enter(C, ttl=300_000)
    await lock.leave(A, tombstone=True)
    granted, ticket, _, _, _ = await lock.enter(A)
    assert (granted, ticket) == (0, -1)
    assert await lock.owner() == (C if held else None)
    # As long as a packet can be late; a hold that is longer is not made shorter.
    assert await admin.pttl(lock.key) > (300_000 if held else 110_000)
    await lock.leave(A, tombstone=True)
    assert (await lock.enter(A))[0] == 0


async def test_graves_are_cleared_when_they_are_old(lock, admin):
    for n in range(5):
        await lock.leave(f"a:{n}", tombstone=True)
    for n in range(4):
        await admin.hset(lock.key, f"y:{n}", f"a:{n} 1")
    await lock.leave(B, tombstone=True)
    graves = {field for field in await lock.fields() if field.startswith("x:")}
    assert graves == {"x:a:4", "x:b:1"}


async def test_so_many_graves_stand_at_most_and_the_oldest_go_first(lock):
    for n in range(400):
        await lock.leave(f"a:{n:x}", tombstone=True)
    graves = {field[2:] for field in await lock.fields() if field.startswith("x:")}
    assert graves == {f"a:{n:x}" for n in range(150, 400)}
    assert len(await lock.fields()) <= 2 * 250 + 2
    # Whose grave is gone is a request like any other, and holds nothing for longer than its ttl.
    assert (await lock.enter("a:0", ttl=100))[0] == 1
    assert (await lock.enter("a:399"))[0] == 0


# --- a clock that is set back


async def ahead(lock: Lock, field: str, seconds: int) -> None:
    """What is written was written by a clock that was so much ahead."""
    value = (await lock.fields())[field]
    number, _, rest = value.partition(" ")
    await lock.admin.hset(lock.key, field, " ".join([str(int(number) + seconds * 1_000_000), rest]).strip())


@pytest.mark.parametrize("way", ["attempt", "enter", "heartbeat"])
async def test_a_hold_ends_a_ttl_after_the_first_look_when_the_clock_was_set_back(lock, way):
    await lock.enter(A, ttl=5000)
    if way == "heartbeat":
        await lock.enter(B)
    await ahead(lock, "until", 1000)
    left = (await lock.heartbeat("b"))[0] if way == "heartbeat" else (await getattr(lock, way)(B))[3]
    assert 4_000_000 < left <= 5_000_000
    # A live holder loses nothing.
    assert await lock.renew(A) in {1, 2}


async def test_a_grant_that_was_pushed_stands_no_longer_than_a_ttl_when_the_clock_was_set_back(lock):
    await lock.enter(A)
    await lock.listen("b", "c")
    await lock.enter(B, ttl=5000)
    await lock.enter(C)
    await lock.release(A)
    await ahead(lock, "until", 1000)
    assert (await lock.heartbeat("c"))[0] <= 5_000_000


async def test_a_hold_that_is_kept_ends_in_time_when_the_clock_was_set_back(lock):
    await lock.enter(A)
    await lock.leave(A, keep=60_000)
    assert 50_000_000 < (await lock.attempt(B))[3] <= 60_000_000
    await ahead(lock, "until", 1000)
    assert 50_000_000 < (await lock.attempt(B))[3] <= 60_000_000


async def test_who_only_asks_and_died_before_the_clock_was_set_back_is_passed_over(lock):
    await lock.enter(A)
    await lock.enter(B, place="6000 n -1")
    await lock.enter(C, place="6000 n -1")
    await ahead(lock, "p:b", 1000)
    await lock.release(A)
    assert await lock.owner() == C
    # One that lives says so again, and comes back.
    assert (await lock.heartbeat("b", pushed="n"))[2] == 2


async def test_graves_from_before_the_clock_was_set_back_are_cleared(lock):
    for n in range(4):
        await lock.leave(f"a:{n}", tombstone=True)
        await lock.admin.hset(lock.key, f"y:{n}", f"a:{n} {10**18}")
    await lock.leave(B, tombstone=True)
    assert {field for field in await lock.fields() if field.startswith("x:")} == {"x:b:1"}


# --- renewing


async def test_a_renewal_prolongs_confirms_and_tells_of_others(lock):
    await lock.enter(A)
    assert await lock.renew(A) == 1
    await lock.listen("b")
    await lock.enter(B)
    assert await lock.renew(A) == 2
    await lock.release(A)
    assert (await lock.fields())["provisional"] == "1"
    assert await lock.renew(B, 40_000) == 1
    fields = await lock.fields()
    assert fields["provisional"] == "0"
    assert int(fields["until"]) - int(fields["since"]) > 39_000_000


async def test_a_hold_that_ran_out_and_was_given_to_nobody_is_still_its_owners(lock):
    await lock.enter(A)
    await lock.expire()
    assert await lock.renew(A) == 1
    assert (await lock.attempt(B))[0] == 0


async def test_renewals_of_many_locks_are_answered_one_by_one(lock, admin, namespace):
    locks = [Lock(admin, namespace, f"n{n}") for n in range(4)]
    for each in locks[:3]:
        await each.enter(A)
    await locks[1].force()
    await locks[2].admin.set(locks[2].key, "of another type")
    arguments = [word for _ in locks for word in (A, TTL, "")]
    answer = await admin.eval(SCRIPTS["renew"].source.decode(), 4, *(each.key for each in locks), *arguments)
    assert answer[1:] == [1, -1, 0, 0]
    counts = [1] * 4
    answer = await admin.eval(
        SCRIPTS["heartbeat"].source.decode(), 4, *(each.key for each in locks), "b", LIFE, "s", 0, *counts
    )
    assert [state for _, _, state in answer[1:]] == [2, 2, 2, 2]


# --- looking, forcing, probing


async def test_a_heartbeat_prolongs_places_and_says_when_to_look_again(lock, admin):
    await lock.enter(A, ttl=2000)
    await lock.enter(B, place="10 n -1")
    await lock.enter(C)
    before = (await lock.fields())["p:b"]
    left, claim, state = await lock.heartbeat("b", life=60_000)
    assert 0 < left <= 2_000_000
    assert (claim, state) == (0, 1)
    after = (await lock.fields())["p:b"]
    assert int(after.split(" ")[0]) > int(before.split(" ")[0]) + 50_000_000
    assert after.endswith(" s 1")
    assert await admin.pttl(lock.key) > 100_000
    assert (await lock.heartbeat("c"))[1:] == [0, 0]
    # More places than we know of are on their way; fewer are gone.
    assert [(await lock.heartbeat("b", known))[2] for known in (0, 1, 2)] == [1, 1, 2]
    # Who has no place there changes nothing by looking.
    assert (await lock.heartbeat("d", 0))[1:] == [0, 0]
    assert "p:d" not in await lock.fields()


async def test_force_takes_it_tells_and_serves_the_next(lock):
    assert await lock.force() == [0, 0]
    await lock.enter(A)
    await lock.listen("a", "b")
    await lock.enter(B)
    assert await lock.heard() == ("a", f"d {A}")
    taken, claim = await lock.force()
    assert taken == 1
    assert claim > 0
    assert await lock.heard() == ("a", f"f {A}")
    assert (await lock.heard())[0] == "b"
    assert await lock.renew(A) == -1
    assert await lock.owner() == B


async def test_people_see_holder_and_waiters_in_order(lock):
    assert (await lock.inspect())[1:] == [b"", b"", b"", b"", b"", b""]
    _, token, tokens, server, _ = await lock.enter(A, label="the holder, 1")
    for request, label in ((B, "ein größerer Name"), (C, ""), ("d:1", "last one")):
        await lock.enter(request, label=label)
    now, until_, shown, left, since, label, present, *waiting = await lock.inspect()
    assert present == b""
    assert now >= server == int(since)
    assert int(until_) == server + TTL * 1000
    assert (int(shown), int(left)) == (token, tokens)
    assert label == b"the holder, 1"
    assert [word.decode() for word in waiting] == ["ein größerer Name", "", "last one"]
    await lock.expire("p:c")
    await lock.expire()
    assert [word.decode() for word in (await lock.inspect())[1:]] == [
        "",
        "",
        "",
        "",
        "",
        "",
        "ein größerer Name",
        "last one",
    ]


async def test_a_renewal_reports_the_present_lease_until_there_is_none_to_report(lock, admin):
    _, token, *_ = await lock.enter(A, label="the first")
    assert await lock.renew(A, present=f"{token + 1} 5 3 the second, of two") == 1
    now, _, shown, *_, present = await lock.inspect()
    assert int(shown) == token
    moment, text = present.decode().split(" ", 1)
    assert now - 60_000_000 < int(moment) <= now
    assert text == f"{token + 1} 5 3 the second, of two"
    # A hold that is only verified reports nothing.
    assert await lock.renew(A, 0, present="7 0 0 x") == 1
    assert (await lock.inspect())[-1] == present
    assert await lock.renew(A) == 1
    assert (await lock.inspect())[-1] == b""
    assert not await admin.hexists(lock.key, "present")


async def test_what_finds_nothing_writes_nothing(lock, admin):
    await lock.release(A)
    await lock.leave(A)
    await lock.leave(A, keep=1000)
    await lock.renew(A)
    await lock.heartbeat("a", 0)
    await lock.heartbeat("a", 3)
    await lock.force()
    await lock.inspect()
    await lock.call(PROBE)
    assert not await admin.exists(lock.key)


# --- any sequence


@pytest.mark.parametrize("seed", range(6))
async def test_the_books_balance_after_any_sequence_of_steps(lock, admin, seed):
    """Whatever is done in whatever order: one owner, one line, every place counted, tokens rise, the key expires."""
    choose = random.Random(seed)
    requests = [f"{process}:{n}" for process in "abc" for n in range(4)]
    deaf = set("abc")
    top, owner_token, granted = 0, None, 0

    async def step() -> None:
        request = choose.choice(requests)
        process = request[0]
        what = choose.randrange(12)
        if what <= 2:
            ticket = choose.choice((-1, -1, 0, 1, 5))
            await lock.enter(
                request,
                ttl=choose.choice((100, 5000)),
                most=choose.choice((1, 1024)),
                place=f"6000 {choose.choice('sn')} {ticket}",
            )
        elif what == 3:
            await lock.attempt(request)
        elif what <= 5:
            await lock.release(request)
        elif what == 6:
            await lock.leave(request, tombstone=choose.random() < 0.1, keep=choose.choice((0, 0, 0, 5000)))
        elif what == 7:
            await lock.renew(request)
        elif what == 8:
            await lock.heartbeat(process, choose.choice((0, 1, 2)))
        elif what == 9 and await lock.owner():
            await lock.expire()
        elif what == 10 and f"p:{process}" in await lock.fields():
            await lock.expire(f"p:{process}")
        elif process in deaf:
            deaf.remove(process)
            await lock.listen(process)
        else:
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
        if "owner" in fields and (fields["owner"], fields["token"]) != owner_token:
            if not fields["owner"].startswith("0:"):
                assert int(fields["token"]) > top
            owner_token, top = (fields["owner"], fields["token"]), int(fields["top"])
        assert int(fields.get("top", 0)) >= top
        assert fields.get("owner") not in tickets
        granted += fields.get("provisional") == "1"
    # What was to be exercised was.
    assert granted > 10
