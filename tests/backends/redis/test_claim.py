"""What a claim knows of itself, and how it is given up from each state: too little would leak, too much cost others."""

from __future__ import annotations

import asyncio
import logging
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from aiolock.backends.redis.claim import ASKED, HELD, NEW, OVER, QUEUED, RELEASING, Context, RedisClaim
from aiolock.backends.redis.commands import Tokens
from aiolock.backends.redis.connection import Pairing
from aiolock.backends.redis.errors import not_sent
from aiolock.core.backend import Request
from aiolock.core.inbox import WakeReason
from aiolock.errors import BackendRefused, BackendUnavailable
from aiolock.types import MUTEX, Family

REQUEST = Request("x", MUTEX, 10.0, "me")
GRANT = [1, 100, 5, 7_000_000, 0]
POSITION = [0, 3, 7_000_000, 2_000_000, 1]
NO = [0, -1, 7_000_000, 2_000_000, 0]
UNKNOWN = BackendUnavailable("nobody knows")
REFUSED = BackendRefused("out of memory")


class Server:
    """The context of one claim: answers from a list, and keeps what was sent."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.story: list[Any] = []
        self.claims: dict[int, RedisClaim] = {}
        self.now = 50.0
        self.tokens = Tokens()
        self.pairing = Pairing()
        self.process = "p"
        self.wakeups = SimpleNamespace(
            pushed=True,
            terms="6000 s",
            add=lambda waiter: self.story.append("watched"),
            remove=lambda waiter: self.story.append("unwatched"),
            ends=lambda key, left, first: self.story.append(("ends", left, first)),
            served=lambda key, claim: None,
        )
        context = Context(
            clock=lambda: self.now,
            command_timeout=1.0,
            commands=self,  # type: ignore[arg-type]
            wakeups=self.wakeups,  # type: ignore[arg-type]
            claims=self.claims,
            released=None,
            pairing=self.pairing,
        )
        self.claim = RedisClaim(context, REQUEST, 1)

    def _answered(self) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.answers:
            known = self.answers.pop(0)
            if isinstance(known, Exception):
                answer.set_exception(known)
            else:
                answer.set_result(known)
        return answer

    def enter(
        self, request: Request, number: int, wait: bool, ticket: int, terms: str
    ) -> asyncio.Future[Any]:
        assert (request, number, terms) == (REQUEST, 1, "6000 s")
        assert self.claims.get(1) is self.claim, "a grant may overtake the answer"
        self.story.append(("enter", wait, ticket))
        return self._answered()

    def release(self, request: Request, number: int) -> asyncio.Future[Any]:
        self.story.append("release")
        return self._answered()

    def leave(self, request: Request, number: int, *, tombstone: bool, keep: float) -> asyncio.Future[Any]:
        self.story.append(("leave", tombstone, keep))
        return self._answered()

    def key(self, name: str, family: Family) -> str:
        return "key"

    def request_id(self, number: int) -> str:
        return "p:1"

    @property
    def given_up(self) -> list[Any]:
        """How the claim was given up."""
        return [entry for entry in self.story if entry in ("release", "unwatched") or entry[0] == "leave"]


async def acquire(server: Server, *, wait: bool = True) -> Any:
    """One acquire: what it returned, or the error."""
    try:
        return await server.claim.acquire(wait)
    except (BackendUnavailable, BackendRefused) as error:
        return error


# --- acquires


async def test_a_grant_counts_from_when_it_was_asked_for():
    server = Server(GRANT)
    grant = await server.claim.acquire(wait=True)
    assert (grant.token, grant.count, grant.demand) == (100, 5, False)
    assert grant.until == pytest.approx(50.0 + 9.9 - 0.2)
    assert server.tokens.highest == 104
    assert server.pairing.latest == (7_000_000, 50.0, 0.0)


async def test_without_pushes_demand_is_not_known_and_so_assumed():
    server = Server(GRANT)
    server.wakeups.pushed = False
    assert (await server.claim.acquire(wait=True)).demand


async def test_a_place_is_watched_and_its_ticket_shown_again():
    server = Server(POSITION, GRANT)
    assert await server.claim.acquire(wait=True) is None
    assert server.story == [("enter", True, -1), "watched", ("ends", 2.0, True)]
    assert await server.claim.acquire(wait=True) is not None
    assert server.story[-2:] == [("enter", True, 3), "unwatched"]


async def test_the_log_tells_each_transition(caplog):
    server = Server(POSITION, GRANT, 0)
    with caplog.at_level(logging.DEBUG, "aiolock.claim"):
        await server.claim.acquire(wait=True)
        await server.claim.acquire(wait=True)
        await server.claim.release()
    told = [(each.aiolock_before, each.aiolock_after) for each in caplog.records]
    states = [state.value for state in (NEW, ASKED, QUEUED, HELD, RELEASING, OVER)]
    assert told == list(pairwise(states))
    assert {(each.aiolock_lock, each.aiolock_claim) for each in caplog.records} == {("x", 1)}


# --- giving up


@pytest.mark.parametrize(
    ("answers", "given_up"),
    [
        ([], []),
        ([GRANT], ["release"]),
        ([POSITION], ["unwatched", ("leave", False, 0)]),
        ([POSITION, GRANT], ["unwatched", "release"]),
        # Refused is heard: what it may have written is taken back, but it cannot arrive again.
        ([REFUSED], [("leave", False, 0)]),
        ([POSITION, REFUSED], ["unwatched", ("leave", False, 0)]),
        # Not sent is not asked.
        ([not_sent("no connection")], []),
        ([not_sent("no connection"), not_sent("no connection")], []),
        ([not_sent("no connection"), GRANT], ["release"]),
        ([POSITION, not_sent("no connection")], ["unwatched", ("leave", False, 0)]),
        # Not known may arrive at any time, whatever comes after it.
        ([UNKNOWN], [("leave", True, 0)]),
        ([UNKNOWN, not_sent("no connection")], [("leave", True, 0)]),
        ([UNKNOWN, REFUSED], [("leave", True, 0)]),
        ([UNKNOWN, GRANT], [("leave", True, 0)]),
        ([UNKNOWN, POSITION], ["unwatched", ("leave", True, 0)]),
        ([POSITION, UNKNOWN], ["unwatched", ("leave", True, 0)]),
    ],
    ids=str,
)
async def test_a_claim_is_given_up_according_to_what_may_be_there(answers, given_up):
    server = Server(*answers)
    for _ in answers:
        await acquire(server)
    server.answers = [0]
    await server.claim.release()
    assert server.given_up == given_up
    assert server.claims == {}
    # Once is enough.
    await server.claim.release()
    assert server.given_up == given_up


async def test_a_no_to_who_does_not_wait_leaves_nothing_to_give_up():
    server = Server(NO)
    assert await server.claim.acquire(wait=False) is None
    assert server.claims == {}
    await server.claim.release()
    assert server.given_up == []


async def test_a_no_after_an_unknown_answer_is_still_given_up():
    server = Server(UNKNOWN, NO, 0)
    await acquire(server, wait=False)
    assert await acquire(server, wait=False) is None
    await server.claim.release()
    assert server.given_up == [("leave", True, 0)]


async def test_a_cancelled_acquire_leaves_a_tombstone():
    server = Server()
    asking = asyncio.create_task(server.claim.acquire(wait=True))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    server.answers = [0]
    await server.claim.release()
    assert server.given_up == [("leave", True, 0)]


LEFT, TOMBSTONE = ("leave", False, 0), ("leave", True, 0)


async def test_keeping_a_hold_is_leaving_it():
    server = Server(GRANT, 0)
    await server.claim.acquire(wait=True)
    await server.claim.release(keep=5.0)
    assert server.given_up == [("leave", False, 5.0)]


@pytest.mark.parametrize(
    ("answers", "first", "then"),
    [([GRANT], "release", LEFT), ([POSITION], LEFT, LEFT), ([UNKNOWN], TOMBSTONE, TOMBSTONE)],
    ids=["held", "in line", "unknown"],
)
async def test_giving_up_goes_on_until_it_was_heard(answers, first, then):
    server = Server(*answers, UNKNOWN, REFUSED, 0)
    await acquire(server)
    for error in (BackendUnavailable, BackendRefused):
        with pytest.raises(error):
            await server.claim.release()
        assert server.claims
    await server.claim.release()
    assert server.claims == {}
    ways = [entry for entry in server.given_up if entry != "unwatched"]
    # Only the first request to release may learn that there was no hold: what follows it leaves, whatever it finds.
    assert ways == [first, then, then]


async def test_a_hold_that_is_gone_is_left_within_the_time_of_one_step():
    server = Server(GRANT)
    await server.claim.acquire(wait=True)
    reply: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def release(request: Request, number: int) -> asyncio.Future[int]:
        server.story.append("release")
        return reply

    server.release = release  # type: ignore[method-assign]
    releasing = asyncio.create_task(server.claim.release())
    await asyncio.sleep(0)
    # It has used up its time, and the server is silent from now on.
    server.now += 1.0
    reply.set_result(-2)
    async with asyncio.timeout(20):
        with pytest.raises(BackendUnavailable, match="within 1 s"):
            await releasing
    server.answers = [0]
    await server.claim.release()
    assert server.claims == {}
    assert server.given_up == ["release", ("leave", False, 0), ("leave", False, 0)]


async def test_a_hold_that_is_gone_is_left_at_once_if_there_is_time():
    server = Server(GRANT, -2, 0)
    await server.claim.acquire(wait=True)
    await server.claim.release()
    assert server.claims == {}
    assert server.given_up == ["release", ("leave", False, 0)]


# --- being granted


def push(server: Server) -> None:
    server.claim.push(200, 1, 60.0, demand=True)


async def test_a_push_ends_the_waiting_and_answers_without_asking():
    server = Server(POSITION)
    await server.claim.acquire(wait=True)
    waiting = asyncio.create_task(server.claim.inbox.wait())
    await asyncio.sleep(0)
    assert server.claim.waiting
    push(server)
    await waiting
    grant = await server.claim.acquire(wait=True)
    assert (grant.token, grant.until, grant.demand) == (200, 60.0, True)
    assert [entry for entry in server.story if entry[0] == "enter"] == [("enter", True, -1)]
    server.answers = [0]
    await server.claim.release()
    assert server.given_up == ["unwatched", "release"]


async def test_a_push_that_overtakes_the_answer_is_the_answer():
    server = Server()
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    server.enter = lambda *_: answer  # type: ignore[method-assign]
    asking = asyncio.create_task(server.claim.acquire(wait=True))
    await asyncio.sleep(0)
    assert server.claim.waiting
    push(server)
    answer.set_result(POSITION)
    assert (await asking).token == 200
    assert "watched" not in server.story


async def test_a_push_before_anybody_waits_for_it_is_not_missed():
    server = Server(POSITION)
    await server.claim.acquire(wait=True)
    push(server)
    async with asyncio.timeout(5):
        await server.claim.inbox.wait()
    assert (await server.claim.acquire(wait=True)).token == 200


async def test_a_push_that_was_heard_too_late_is_asked_for_again():
    server = Server(POSITION, GRANT)
    await server.claim.acquire(wait=True)
    server.claim.push(200, 1, 49.9, demand=True)
    assert (await server.claim.acquire(wait=True)).token == 100
    assert server.story[-1] == ("enter", True, 3)


@pytest.mark.parametrize(
    ("answers", "waiting"),
    [
        ([], False),
        ([POSITION], True),
        ([GRANT], False),
        ([UNKNOWN], True),
        ([not_sent("no")], False),
        ([REFUSED], False),
    ],
    ids=str,
)
async def test_a_grant_is_wanted_by_who_is_in_line_or_may_be(answers, waiting):
    server = Server(*answers)
    for _ in answers:
        await acquire(server)
    assert server.claim.waiting is waiting


async def test_who_is_leaving_wants_no_grant():
    server = Server(POSITION)
    await server.claim.acquire(wait=True)
    leaving = asyncio.create_task(server.claim.release())
    await asyncio.sleep(0)
    assert not server.claim.waiting
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving


async def test_waking_is_remembered_once_and_cancelling_the_wait_changes_nothing():
    server = Server(POSITION)
    await server.claim.acquire(wait=True)
    waiting = asyncio.create_task(server.claim.inbox.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    server.claim.inbox.wake(WakeReason.POLL)
    async with asyncio.timeout(5):
        await server.claim.inbox.wait()
    waiting = asyncio.create_task(server.claim.inbox.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    server.claim.inbox.wake(WakeReason.NOTIFIED)
    server.claim.inbox.wake(WakeReason.POLL)
    await waiting
