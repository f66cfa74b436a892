"""What a claim knows of itself, and how it is given up from each state: too little would leak, too much cost others."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from aiolock.backends.redis.claim import RedisClaim
from aiolock.backends.redis.replies import NotSent
from aiolock.contract import MUTEX, Bid
from aiolock.errors import BackendRefused, BackendUnavailable

BID = Bid("x", MUTEX, 10.0, "me")
GRANT = [1, 100, 5, 7_000_000, 0]
PLACE = [0, 3, 7_000_000, 2_000_000, 1]
NO = [0, -1, 7_000_000, 2_000_000, 0]
UNKNOWN = BackendUnavailable("nobody knows")
REFUSED = BackendRefused("out of memory")


class Server:
    """The backend that a claim talks to: answers from a list, and keeps what it was asked."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.story: list[Any] = []
        self.claims: dict[int, RedisClaim] = {}
        self.now = 50.0
        self.clock = lambda: self.now
        self.settings = SimpleNamespace(command_timeout=1.0)
        self.wakeups = SimpleNamespace(
            pushed=True,
            add=lambda place: self.story.append("watched"),
            remove=lambda place: self.story.append("unwatched"),
            ends=lambda key, left, first: self.story.append(("ends", left, first)),
        )
        self.claim = RedisClaim(self, BID, 1)  # type: ignore[arg-type]

    def _answered(self) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.answers:
            known = self.answers.pop(0)
            if isinstance(known, Exception):
                answer.set_exception(known)
            else:
                answer.set_result(known)
        return answer

    def enter(self, claim: RedisClaim, wait: bool, ticket: int) -> asyncio.Future[Any]:
        assert self.claims.get(1) is claim, "a grant may overtake the answer"
        self.story.append(("enter", wait, ticket))
        return self._answered()

    def release(self, claim: RedisClaim) -> asyncio.Future[Any]:
        self.story.append("release")
        return self._answered()

    def leave(self, claim: RedisClaim, *, bury: bool, keep: float) -> asyncio.Future[Any]:
        self.story.append(("leave", bury, keep))
        return self._answered()

    def key(self, claim: RedisClaim) -> str:
        return "key"

    def request(self, claim: RedisClaim) -> str:
        return "p:1"

    def served(self, key: str, claim: int) -> None:
        assert key == "key"

    def learn(self, server: int, sent: float) -> None:
        assert (server, sent) == (7_000_000, 50.0)

    def saw(self, token: int) -> None:
        self.highest = token

    def never_sent(self, error: Exception) -> bool:
        return isinstance(error, NotSent)

    @property
    def given_up(self) -> list[Any]:
        """How the claim was given up."""
        return [entry for entry in self.story if entry in ("release", "unwatched") or entry[0] == "leave"]


async def attempt(server: Server, *, wait: bool = True) -> Any:
    """One attempt: what it returned, or the error."""
    try:
        return await server.claim.attempt(wait)
    except (BackendUnavailable, BackendRefused) as error:
        return error


# --- attempts


async def test_a_grant_counts_from_when_it_was_asked_for():
    server = Server(GRANT)
    grant = await server.claim.attempt(wait=True)
    assert (grant.token, grant.count, grant.demand) == (100, 5, False)
    assert grant.until == pytest.approx(50.0 + 9.9 - 0.2)
    assert server.highest == 104


async def test_without_pushes_demand_is_not_known_and_so_assumed():
    server = Server(GRANT)
    server.wakeups.pushed = False
    assert (await server.claim.attempt(wait=True)).demand


async def test_a_place_is_watched_and_its_ticket_shown_again():
    server = Server(PLACE, GRANT)
    assert await server.claim.attempt(wait=True) is None
    assert server.story == [("enter", True, -1), "watched", ("ends", 2.0, True)]
    assert await server.claim.attempt(wait=True) is not None
    assert server.story[-2:] == [("enter", True, 3), "unwatched"]


# --- giving up


@pytest.mark.parametrize(
    ("answers", "given_up"),
    [
        ([], []),
        ([GRANT], ["release"]),
        ([PLACE], ["unwatched", ("leave", False, 0)]),
        ([PLACE, GRANT], ["unwatched", "release"]),
        # Refused is heard: what it may have written is taken back, but it cannot arrive again.
        ([REFUSED], [("leave", False, 0)]),
        ([PLACE, REFUSED], ["unwatched", ("leave", False, 0)]),
        # Not sent is not asked.
        ([NotSent("no connection")], []),
        ([NotSent("no connection"), NotSent("no connection")], []),
        ([NotSent("no connection"), GRANT], ["release"]),
        ([PLACE, NotSent("no connection")], ["unwatched", ("leave", False, 0)]),
        # Not known may arrive at any time, whatever comes after it.
        ([UNKNOWN], [("leave", True, 0)]),
        ([UNKNOWN, NotSent("no connection")], [("leave", True, 0)]),
        ([UNKNOWN, REFUSED], [("leave", True, 0)]),
        ([UNKNOWN, GRANT], [("leave", True, 0)]),
        ([UNKNOWN, PLACE], ["unwatched", ("leave", True, 0)]),
        ([PLACE, UNKNOWN], ["unwatched", ("leave", True, 0)]),
    ],
    ids=str,
)
async def test_a_claim_is_given_up_according_to_what_may_be_there(answers, given_up):
    server = Server(*answers)
    for _ in answers:
        await attempt(server)
    server.answers = [0]
    await server.claim.release()
    assert server.given_up == given_up
    assert server.claims == {}
    # Once is enough.
    await server.claim.release()
    assert server.given_up == given_up


async def test_a_no_to_who_does_not_wait_leaves_nothing_to_give_up():
    server = Server(NO)
    assert await server.claim.attempt(wait=False) is None
    assert server.claims == {}
    await server.claim.release()
    assert server.given_up == []


async def test_a_no_after_an_unknown_answer_is_still_given_up():
    server = Server(UNKNOWN, NO, 0)
    await attempt(server, wait=False)
    assert await attempt(server, wait=False) is None
    await server.claim.release()
    assert server.given_up == [("leave", True, 0)]


async def test_a_cancelled_attempt_is_buried():
    server = Server()
    asking = asyncio.create_task(server.claim.attempt(wait=True))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    server.answers = [0]
    await server.claim.release()
    assert server.given_up == [("leave", True, 0)]


LEFT, BURIED = ("leave", False, 0), ("leave", True, 0)


async def test_keeping_a_hold_is_leaving_it():
    server = Server(GRANT, 0)
    await server.claim.attempt(wait=True)
    await server.claim.release(keep=5.0)
    assert server.given_up == [("leave", False, 5.0)]


@pytest.mark.parametrize(
    ("answers", "first", "then"),
    [([GRANT], "release", LEFT), ([PLACE], LEFT, LEFT), ([UNKNOWN], BURIED, BURIED)],
    ids=["held", "in line", "unknown"],
)
async def test_giving_up_goes_on_until_it_was_heard(answers, first, then):
    server = Server(*answers, UNKNOWN, REFUSED, 0)
    await attempt(server)
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
    await server.claim.attempt(wait=True)
    said: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def release(claim: RedisClaim) -> asyncio.Future[int]:
        server.story.append("release")
        return said

    server.release = release  # type: ignore[method-assign]
    releasing = asyncio.create_task(server.claim.release())
    await asyncio.sleep(0)
    # It has used up its time, and the server is silent from now on.
    server.now += 1.0
    said.set_result(-2)
    async with asyncio.timeout(20):
        with pytest.raises(BackendUnavailable, match="within 1 s"):
            await releasing
    server.answers = [0]
    await server.claim.release()
    assert server.claims == {}
    assert server.given_up == ["release", ("leave", False, 0), ("leave", False, 0)]


async def test_a_hold_that_is_gone_is_left_at_once_if_there_is_time():
    server = Server(GRANT, -2, 0)
    await server.claim.attempt(wait=True)
    await server.claim.release()
    assert server.claims == {}
    assert server.given_up == ["release", ("leave", False, 0)]


# --- being granted


def push(server: Server) -> None:
    server.claim.push(200, 1, 60.0, demand=True)


async def test_a_push_ends_the_waiting_and_answers_without_asking():
    server = Server(PLACE)
    await server.claim.attempt(wait=True)
    waiting = asyncio.create_task(server.claim.changed())
    await asyncio.sleep(0)
    assert server.claim.waiting
    push(server)
    await waiting
    grant = await server.claim.attempt(wait=True)
    assert (grant.token, grant.until, grant.demand) == (200, 60.0, True)
    assert [entry for entry in server.story if entry[0] == "enter"] == [("enter", True, -1)]
    server.answers = [0]
    await server.claim.release()
    assert server.given_up == ["unwatched", "release"]


async def test_a_push_that_overtakes_the_answer_is_the_answer():
    server = Server()
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    server.enter = lambda claim, wait, ticket: answer  # type: ignore[method-assign]
    asking = asyncio.create_task(server.claim.attempt(wait=True))
    await asyncio.sleep(0)
    assert server.claim.waiting
    push(server)
    answer.set_result(PLACE)
    assert (await asking).token == 200
    assert "watched" not in server.story


async def test_a_push_before_anybody_waits_for_it_is_not_missed():
    server = Server(PLACE)
    await server.claim.attempt(wait=True)
    push(server)
    async with asyncio.timeout(5):
        await server.claim.changed()
    assert (await server.claim.attempt(wait=True)).token == 200


async def test_a_push_that_was_heard_too_late_is_asked_for_again():
    server = Server(PLACE, GRANT)
    await server.claim.attempt(wait=True)
    server.claim.push(200, 1, 49.9, demand=True)
    assert (await server.claim.attempt(wait=True)).token == 100
    assert server.story[-1] == ("enter", True, 3)


@pytest.mark.parametrize(
    ("answers", "waiting"),
    [
        ([], False),
        ([PLACE], True),
        ([GRANT], False),
        ([UNKNOWN], True),
        ([NotSent("no")], False),
        ([REFUSED], False),
    ],
    ids=str,
)
async def test_a_grant_is_wanted_by_who_is_in_line_or_may_be(answers, waiting):
    server = Server(*answers)
    for _ in answers:
        await attempt(server)
    assert server.claim.waiting is waiting


async def test_who_is_leaving_wants_no_grant():
    server = Server(PLACE)
    await server.claim.attempt(wait=True)
    leaving = asyncio.create_task(server.claim.release())
    await asyncio.sleep(0)
    assert not server.claim.waiting
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving


async def test_waking_is_remembered_once_and_cancelling_the_wait_changes_nothing():
    server = Server(PLACE)
    await server.claim.attempt(wait=True)
    waiting = asyncio.create_task(server.claim.changed())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    server.claim.wake()
    async with asyncio.timeout(5):
        await server.claim.changed()
    waiting = asyncio.create_task(server.claim.changed())
    await asyncio.sleep(0)
    assert not waiting.done()
    server.claim.wake()
    server.claim.wake()
    await waiting
