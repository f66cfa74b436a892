"""The engine over rows, staged in virtual time over a store that loses, delays and forgets: one test or more for each rule."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, Self

import pytest

from aiolock.backends.rows import engine, observer, session
from aiolock.backends.rows.context import row_key
from aiolock.backends.rows.liveness import DEAD, MOST_ENDED, decode_session, encode_session
from aiolock.backends.rows.lockrow import MOST_SHARED, RowHold, RowRequest, decode, encode
from aiolock.backends.rows.session import MOST_UNUSED, session_key
from aiolock.backends.rows.store import Edit
from aiolock.backends.rows.writer import ALONE, MemberState
from aiolock.client import Client
from aiolock.core.backend import Claim, EventKind, Grant, Release, Request, Settings, expires_at
from aiolock.errors import BackendError, BackendUnavailable, ConfigError, UnsafeBackend
from aiolock.types import MUTEX, READ, WRITE, Family, Kind, Level, permits
from tests.faults.staging import until
from tests.simulation.rowstore import RowServer, RowTestBackend, StoredRow
from tests.simulation.virtual import VirtualClock, run

TTL = 3.0
KEY = row_key("n", "l", Family.LOCK, "x")


class Wire:
    """One client's way to the server."""

    def __init__(self) -> None:
        self.lost = 0
        """How many answers are lost from now on."""
        self.delayed: list[Callable[[], Any]] = []
        """Requests that were given up and are still under way."""
        self.delay = 0
        """How many requests are given up from now on."""
        self.cut = False
        self.slow: Callable[[], Any] | None = None
        """Called before each answer; awaited."""

    async def __call__(self, step: Callable[[], Any]) -> Any:
        await asyncio.sleep(0.001)
        if self.cut:
            raise BackendUnavailable("no way to the server")
        if self.delay:
            self.delay -= 1
            self.delayed.append(step)
            raise BackendUnavailable("the connection broke")
        answer = step()
        await asyncio.sleep(0.001)
        if self.slow is not None:
            await self.slow()
        if self.lost:
            self.lost -= 1
            raise BackendUnavailable("the connection broke")
        return answer


class Side:
    """One client of the engine, without the layers above it."""

    def __init__(self, server: RowServer, **options: Any) -> None:
        self.wire = Wire()
        self.server = server
        self.backend = RowTestBackend(server, self.wire, **options)
        self.backend.bind(
            Settings(namespace="n", label="side", ttl=TTL, command_timeout=1.0, clock=VirtualClock())
        )

    async def __aenter__(self) -> Self:
        await self.backend.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.wire.cut = False
        await self.backend.aclose()

    def claim(self, kind: Kind = MUTEX, name: str = "x", ttl: float = TTL, life: float = math.inf) -> Claim:
        return self.backend.claim(Request(name, kind, ttl, "side", life=life))

    async def acquire(
        self, kind: Kind = MUTEX, name: str = "x", ttl: float = TTL, life: float = math.inf
    ) -> tuple[Claim, Grant]:
        claim = self.claim(kind, name, ttl, life)
        grant = await claim.acquire(wait=True)
        while grant is None:
            await claim.inbox.wait()
            grant = await claim.acquire(wait=True)
        return claim, grant

    async def tries(self, kind: Kind = MUTEX) -> bool:
        claim = self.claim(kind)
        if await claim.acquire(wait=False) is None:
            return False
        await claim.release()
        return True

    def freeze(self) -> None:
        """What SIGSTOP does, as seen by the others: nothing of this client runs any more."""
        for timer in self.backend._engine._timers.values():
            timer.cancel()
        for task in list(self.backend.context.tasks):
            task.cancel()
        self.server.stores.pop(self.backend.context.address, None)

    @property
    def session(self) -> Any:
        [session] = self.backend._engine.sessions.open.values()
        return session


def staged(test: Callable[..., Any]) -> Callable[[], None]:
    """A test that is run in virtual time."""

    def staged_test() -> None:
        run(test())

    staged_test.__name__, staged_test.__doc__ = test.__name__, test.__doc__
    return staged_test


def serve(**options: Any) -> RowServer:
    return RowServer(VirtualClock(), **options)


def now() -> float:
    return asyncio.get_running_loop().time()


# --- waiting without notifications


def test_a_waiter_polls_more_often_than_it_observes_and_less_often_the_longer_nothing_changes():
    async def main() -> None:
        server = serve(push=False)
        async with Side(server) as one, Side(server, poll=0.005) as two:
            held, _ = await one.acquire()
            store, asked = two.backend.context.store, {"versions": [], "get": []}
            for name, times in asked.items():
                ask = getattr(store, name)
                setattr(store, name, lambda keys, ask=ask, times=times: times.append(now()) or ask(keys))
            waiting = asyncio.create_task(two.acquire())
            await asyncio.sleep(2 * TTL)
            pauses = [after - before for before, after in pairwise(asked["versions"])]
            # The session rows of those ahead, ten times in a ttl, and the row itself at first.
            assert 20 <= len(asked["get"]) <= 25
            assert len(asked["versions"]) > 25
            assert min(pauses[:3]) < 0.02
            assert max(pauses) > 0.5
            released = now()
            await held.release()
            await waiting
            assert now() - released < 2.1

    run(main())


# --- (1) verification reads


@pytest.mark.parametrize("how", ["deleted", "taken"])
def test_a_renewal_reads_the_rows_and_finds_a_hold_that_is_gone(how):
    async def main() -> None:
        server = serve(push=False)
        async with Side(server) as one, Side(server) as two:
            claim, _ = await one.acquire()
            if how == "deleted":
                del server.rows[KEY]
            else:
                assert await two.backend.force_release("x", Family.LOCK)
            [renewal] = await one.backend.renew([claim])
            assert renewal == ("revoked" if how == "deleted" else "force-released")
            assert (await one.backend.events.get()).kind is EventKind.LOST

    run(main())


@staged
async def test_a_renewal_is_one_write_and_one_read_however_many_holds_there_are():
    server = serve()
    async with Side(server) as one:
        claims = [(await one.acquire(name=f"x{number}"))[0] for number in range(20)]
        await asyncio.sleep(0.1)
        writes, reads = server.writes, server.reads
        renewals = await one.backend.renew(claims)
        assert all(isinstance(renewal, Grant) for renewal in renewals)
        assert (server.writes - writes, server.reads - reads) == (1, 1)


@staged
async def test_heartbeats_go_on_after_a_defect_of_the_store_and_end_with_the_client():
    server = serve()
    async with Side(server) as one:
        await one.acquire()
        session, steps, failed = one.session, one.wire, asyncio.Event()

        async def broken(step: Any) -> Any:
            failed.set()
            raise ZeroDivisionError

        one.backend.store.transport = broken
        await failed.wait()
        one.backend.store.transport = steps
        before = session.heartbeat_sent
        await asyncio.sleep(TTL / 2)
        assert session.heartbeat_sent > before
        engine = one.backend._engine
    assert all(timer.cancelled() for timer in engine._timers.values())


@staged
async def test_a_claim_that_goes_on_after_its_client_was_closed_begins_nothing():
    server = serve()
    async with Side(server) as one, Side(server) as two:
        blocker, _ = await two.acquire(name="y")
        held, _ = await one.acquire()
        waiting = one.claim(name="y")
        assert await waiting.acquire(wait=True) is None
        await one.backend.aclose()
        rows, context = dict(server.rows), one.backend.context
        with pytest.raises(RuntimeError, match="closed"):
            await one.claim().acquire(wait=True)
        for late in (held, waiting):
            with pytest.raises(BackendUnavailable, match="closed"):
                await late.release()
        one.backend._engine.observer.wake()
        assert not context.tasks
        await asyncio.sleep(0.1)
        assert server.rows == rows
        await blocker.release()


@staged
async def test_a_client_whose_first_attempts_to_open_failed_is_a_client_like_any_other():
    server = serve(push=False, shared_clock=False)
    one, two = Side(server, poll=0.1), Side(server, poll=0.1)
    await one.backend.open()
    await one.backend.aclose()
    async with one, two:
        held, _ = await two.acquire()
        waiting, store = asyncio.create_task(one.acquire()), one.backend.context.store
        # A place in the queue lives longer than the ttl.
        await asyncio.sleep(4 * TTL)
        [session] = one.backend._engine.sessions.open
        await held.release()
        claim, _ = await waiting
        assert claim.member.session.id == session
        # The loss of a connection has its holds verified.
        store.interrupt()
        assert (await one.backend.events.get()).kind is EventKind.DOUBT


# --- (2) ended claims


def refuse(server: RowServer, wire: Wire) -> Callable[[Any], Any]:
    """A way to the server on which the row cannot be written."""

    async def refusing(step: Any) -> Any:
        before = server.rows[KEY]
        answer = await wire(step)
        if server.rows[KEY] != before:
            server.rows[KEY] = before
            raise BackendUnavailable("the row cannot be written")
        return answer

    return refusing


@staged
async def test_a_release_that_does_not_arrive_ends_the_hold_with_the_next_heartbeat():
    server = serve(push=False, shared_clock=False)
    async with Side(server, poll=0.1) as one, Side(server, poll=0.1) as two:
        claim, _ = await one.acquire()
        one.backend.store.transport = refuse(server, one.wire)
        with pytest.raises(BackendError):
            await claim.release()
        began = now()
        async with asyncio.timeout(TTL):
            await two.acquire()
        assert now() - began < 0.7 * TTL
        one.backend.store.transport = one.wire


@staged
async def test_a_release_that_keeps_the_lock_goes_on_after_any_outage():
    server = serve()
    async with Side(server) as one, Side(server) as two:
        claim, _ = await one.acquire()
        one.wire.cut = True
        with pytest.raises(BackendError):
            await claim.release(keep=100.0)
        await asyncio.sleep(0.5 * TTL)
        one.wire.cut = False
        await asyncio.sleep(TTL)
        [hold] = decode(server.rows[KEY].value).holds.values()
        assert hold.kept
        assert not await two.tries()


@staged
async def test_a_released_hold_that_a_crash_brings_back_is_removed_again():
    server = serve(push=False, shared_clock=False)
    async with Side(server, poll=0.1) as one, Side(server, poll=0.1) as two:
        claim, _ = await one.acquire()
        assert await claim.release() is Release.RELEASED
        assert decode(server.rows[KEY].value).free
        server.crash()
        assert not decode(server.rows[KEY].value).free
        await asyncio.sleep(0.6 * TTL)
        assert decode(server.rows[KEY].value).free
        assert await two.tries()
        await asyncio.sleep(TTL)
        assert not one.session.busy


@staged
async def test_a_row_that_is_checked_after_a_reconnect_has_the_name_of_its_lock():
    server = serve(push=False)
    async with Side(server) as one:
        engine = one.backend._engine
        claim, _ = await one.acquire(name="a name")
        await claim.release()
        # The client has used a thousand other locks since.
        [key] = engine._writers
        engine._writers.clear()
        server.rows.pop(key)
        engine.interrupted()
        assert engine._writers[key].name == "a name"
        assert any("a name" in task.get_name() for task in one.backend.context.tasks)


@staged
async def test_new_claims_get_another_session_when_one_has_many_ended_claims():
    server = serve()
    async with Side(server) as one:
        claims = [(await one.acquire(name=f"x{number}", ttl=60.0))[0] for number in range(MOST_ENDED)]
        first = one.session
        await asyncio.gather(*(claim.release() for claim in claims[1:]))
        claim, _ = await one.acquire(ttl=60.0)
        assert claim.member.session is first
        await claim.release()
        # No flushed write came after these.
        again = [(await one.acquire(name=f"x{number}", ttl=60.0))[0] for number in range(1, MOST_ENDED)]
        await asyncio.gather(*(claim.release() for claim in [claims[0], *again]))
        assert len(first.ended) == MOST_ENDED
        claim, _ = await one.acquire(ttl=60.0)
        assert claim.member.session is not first
        await asyncio.sleep(100.0)
        assert len(first.ended) == 0


def sessions_of(server: RowServer) -> list[str]:
    return [key for key in server.rows if key.startswith("n/s/")]


def test_a_session_that_was_full_ends_with_its_last_claim(monkeypatch):
    monkeypatch.setattr(session, "MOST_ENDED", 10)

    async def main() -> None:
        server = serve()
        async with Side(server) as one:
            for _ in range(3):
                claims = [(await one.acquire(name=f"x{number}"))[0] for number in range(20)]
                releasing = [asyncio.create_task(claim.release()) for claim in claims]
                await asyncio.sleep(0)
                claim, _ = await one.acquire(name="next")
                assert claim.member.session is not claims[0].member.session
                await asyncio.gather(claim.release(), *releasing)
            await asyncio.sleep(1.0)
            assert sessions_of(server) == [one.session.key]

    run(main())


@staged
async def test_a_client_has_some_sessions_for_ttls_that_it_uses_no_more_and_not_one_for_each():
    server = serve()
    async with Side(server) as one:
        engine = one.backend._engine
        held, _ = await one.acquire(name="held", ttl=10.0)
        for number in range(3 * MOST_UNUSED):
            claim, _ = await one.acquire(ttl=20.0 + number)
            await claim.release()
        await asyncio.sleep(0.1)
        assert len(sessions_of(server)) == len(engine.sessions.open) == MOST_UNUSED + 1
        assert set(engine._timers) <= set(engine.sessions.open)
        assert set(one.backend.context.liveness.own) == set(engine.sessions.open)
        assert not engine.sessions._opening
        assert held.member.session.id in engine.sessions.open
        # The last ones are used again.
        session = engine.sessions._current[20.0 + 3 * MOST_UNUSED - 1]
        claim, _ = await one.acquire(ttl=session.ttl)
        assert claim.member.session is session
        assert isinstance((await one.backend.renew([held, claim]))[0], Grant)


@staged
async def test_a_claim_enters_under_another_session_if_the_one_that_it_got_has_ended_meanwhile():
    server = serve()
    async with Side(server) as one, Side(server) as two:
        sessions = one.backend._engine.sessions
        session = await sessions.get(TTL, one.backend.context.deadline())
        getting, sessions.get = sessions.get, None

        async def stale(ttl: float, deadline: Any) -> Any:
            sessions.get = getting
            sessions._end(session)
            return session

        sessions.get = stale
        claim, grant = await one.acquire()
        assert grant.until > now() + TTL / 2
        assert claim.member.session is not session
        await asyncio.sleep(2 * TTL)
        assert isinstance((await one.backend.renew([claim]))[0], Grant)
        assert not await two.tries()
        assert decode_session(server.rows[session.key].value).dead


class Counted(OrderedDict):
    """A dictionary that counts how many of its entries were looked at by going through them."""

    looked_at = 0

    def __iter__(self):
        for key in super().__iter__():
            self.looked_at += 1
            yield key

    def values(self):
        self.looked_at += len(self)
        return super().values()


def test_what_a_claim_costs_does_not_depend_on_how_many_are_held(monkeypatch):
    monkeypatch.setattr(engine, "REMEMBERED_ROWS", 50)

    async def main() -> None:
        server = serve()
        async with Side(server) as one, Side(server) as two:
            rows = one.backend._engine
            held = [
                (await one.acquire(name=f"x{number}", ttl=600.0))[0]
                for number in range(engine.REMEMBERED_ROWS + 300)
            ]
            rows._writers = writers = Counted(rows._writers)
            for number in range(20):
                await (await one.acquire(name=f"y{number}", ttl=600.0))[0].release()
                alone, _ = await one.acquire(name=f"z{number}", ttl=600.0, life=600.0)
                assert isinstance((await one.backend.renew([alone]))[0], Grant)
                await alone.release()
            assert writers.looked_at <= 4 * 40
            # Nor does waiting, which is looked after many times.
            taken, _ = await two.acquire(name="taken")
            waiting = asyncio.create_task(one.acquire(name="taken"))
            await asyncio.sleep(10 * TTL)
            await taken.release()
            await (await waiting)[0].release()
            assert writers.looked_at <= 4 * 41
            # All of a session that is dead are lost, and others are not looked at.
            alone, _ = await one.acquire(name="z", ttl=600.0, life=600.0)
            rows._mark_dead(alone.member.session)
            assert await one.backend.renew([alone]) == ["revoked"]
            rows._mark_dead(held[0].member.session)
            assert await one.backend.renew(held) == ["revoked"] * len(held)
            assert writers.looked_at <= 4 * 43

    run(main())


def test_many_holds_are_verified_in_one_flight_by_several_requests(monkeypatch):
    monkeypatch.setattr(engine, "TOGETHER", 20)

    async def main() -> None:
        server = serve()
        async with Side(server) as one, Side(server) as two:
            claims = [
                (await one.acquire(name=f"x{number}", ttl=600.0))[0]
                for number in range(2 * engine.TOGETHER + 1)
            ]
            assert await two.backend.force_release("x0", Family.LOCK)
            await asyncio.sleep(0.1)
            before, begun = server.reads, now()
            renewals = await one.backend.renew(claims)
            assert renewals[0] == "force-released"
            assert all(isinstance(renewal, Grant) for renewal in renewals[1:])
            assert server.reads - before == 3
            assert now() - begun < 0.01

    run(main())


@pytest.mark.parametrize("how", ["tries once", "waits"])
def test_a_client_forgets_what_it_knew_of_dead_sessions(how, monkeypatch):
    async def main() -> None:
        monkeypatch.setattr(observer, "KNOWN", 5)
        server = serve()
        async with Side(server) as one, Side(server) as two:
            waiting, never = None, None
            if how == "waits":
                never, _ = await two.acquire(name="never")
                waiting = asyncio.create_task(one.acquire(name="never"))
            for _ in range(20):
                async with Side(server) as three:
                    await three.acquire()
                    await asyncio.sleep(0.5)
                    three.freeze()
                    await asyncio.sleep(1.1 * TTL)
                    assert await one.tries()
                    three.wire.cut = True
            known = one.backend.context.liveness
            assert len(known.dead) + len(known.ended) <= 7
            if waiting is not None:
                waiting.cancel()
                await never.release()

    run(main())


@pytest.mark.parametrize("how", ["held", "brought back by a crash"])
def test_a_client_that_closes_with_a_hold_in_a_row_declares_its_session_dead(how):
    async def main() -> None:
        server = serve(push=False, shared_clock=False)
        async with Side(server, poll=0.1) as one, Side(server, poll=0.1) as two:
            claim, _ = await one.acquire()
            session = one.session
            # The client has this time for its end.
            await one.backend.settle(100.0)
            if how != "held":
                assert await claim.release() is Release.RELEASED
                one.backend.store.transport = refuse(server, one.wire)
                server.crash()
                while session.version is None:  # noqa: ASYNC110 - the next heartbeat, no event
                    await asyncio.sleep(0.01)
                assert not session.claims
            assert not decode(server.rows[KEY].value).free
            await one.backend.aclose()
            assert not decode(server.rows[KEY].value).free
            assert decode_session(server.rows[session.key].value).dead
            assert await two.tries()

    run(main())


# --- (3) until is the session's


@pytest.mark.parametrize("tenths", range(10))
def test_a_grant_ends_with_its_session(tenths):
    async def main() -> None:
        server = serve()
        async with Side(server) as one, Side(server) as two:
            claim, _ = await one.acquire()
            await claim.release()
            session = one.session
            # Nothing is sent but by the acquire.
            session.last_sent = now() + 100
            await asyncio.sleep(session.heartbeat_sent + tenths * TTL / 10 + 0.05 - now())
            claim, grant = await one.acquire()
            assert grant.until > now()
            one.freeze()
            waiting = asyncio.create_task(two.acquire())
            await asyncio.wait([waiting])
            assert now() > grant.until
            assert now() < session.heartbeat_sent + TTL + 1.0

    run(main())


@staged
async def test_an_acquire_late_in_the_session_believes_nothing_before_its_heartbeat_is_answered():
    server = serve()
    async with Side(server) as one:
        claim, _ = await one.acquire()
        await claim.release()
        session = one.session
        session.last_sent = now() + 100
        await asyncio.sleep(0.6 * TTL)
        before = session.heartbeat_sent
        _, grant = await one.acquire()
        assert session.heartbeat_sent > before
        assert grant.until > before + TTL


@staged
async def test_a_client_that_is_idle_for_a_ttl_sends_no_more_heartbeats():
    server = serve()
    async with Side(server) as one:
        claim, _ = await one.acquire()
        await asyncio.sleep(3 * TTL)
        await claim.release()
        await asyncio.sleep(2 * TTL)
        writes = server.writes
        await asyncio.sleep(10 * TTL)
        assert server.writes == writes
        # And sends them again when they are needed.
        claim, _ = await one.acquire()
        await asyncio.sleep(3 * TTL)
        assert server.writes > writes + 5
        async with Side(server) as two:
            assert not await two.tries()


# --- (4) takeover by observation


@pytest.mark.parametrize("own", [0.5, 30.0])
def test_the_ttl_of_a_takeover_is_the_one_in_the_session_row(own):
    async def main() -> None:
        server = serve(push=False, shared_clock=False)
        async with Side(server, poll=0.1) as one, Side(server, poll=0.1) as two:
            await one.acquire()
            await asyncio.sleep(0.5)
            one.freeze()
            began = now()
            await two.acquire(ttl=own)
            assert TTL - 0.6 < now() - began < TTL + 0.7

    run(main())


@staged
async def test_a_takeover_is_counted_from_the_arrival_of_the_first_answer():
    server = serve(push=False, shared_clock=False)
    async with Side(server) as one, Side(server) as two:
        await one.acquire()

        async def slow() -> None:
            two.wire.slow = None
            await asyncio.sleep(0.9)

        two.wire.slow, sent = slow, now()
        requests = [hold.request for hold in decode(server.rows[KEY].value).holds.values()]
        await two.backend._engine.observer.observe_once(requests)
        [series] = two.backend._engine.observer._series.values()
        assert series.since > sent + 0.8


@staged
async def test_a_takeover_is_counted_anew_after_a_reconnect():
    server = serve(push=False, shared_clock=False)
    async with Side(server, poll=0.1) as one, Side(server, poll=0.1) as two:
        await one.acquire()
        one.freeze()
        waiting = asyncio.create_task(two.acquire())
        await asyncio.sleep(0.8 * TTL)
        two.backend.store.interrupt()
        began = now()
        await waiting
        assert TTL <= now() - began < TTL + 0.7


@staged
async def test_sessions_of_all_who_are_ahead_are_observed_at_once():
    server = serve(push=False, shared_clock=False)
    sides = [Side(server, poll=0.1) for _ in range(5)]
    for side in sides:
        await side.backend.open()
    await sides[0].acquire()
    waiters = [asyncio.create_task(side.acquire()) for side in sides[1:]]
    await asyncio.sleep(0.5)
    for side, waiter in zip(sides[:4], [None, *waiters[:3]], strict=True):
        side.freeze()
        if waiter is not None:
            waiter.cancel()
    began = now()
    await waiters[3]
    assert now() - began < TTL + 1.5
    for side in sides:
        await side.backend.aclose()


# --- (5) versions


@staged
async def test_a_version_is_never_used_twice():
    server, seen = serve(), []
    async with Side(server) as one:
        for _ in range(5):
            claim, _ = await one.acquire()
            seen.append(server.rows[KEY].version)
            await claim.release()
            seen.append(server.rows[KEY].version)
            seen.append(server.rows[one.session.key].version)
            await one.session.heartbeat()
    assert len(set(seen)) == 15


@staged
async def test_nothing_that_was_read_before_a_reconnect_is_written_against():
    server = serve()
    async with Side(server) as one:
        claim, _ = await one.acquire()
        await claim.release()
        writer = one.backend._engine.writer("x", Family.LOCK)
        assert writer.version
        one.backend.store.interrupt()
        assert writer.version is None
        assert one.session._version is None


@staged
async def test_a_stale_row_loses_against_what_a_crash_brought_back():
    server = serve()
    async with Side(server) as one, Side(server) as two:
        claim, _ = await one.acquire()
        await claim.release()
        server.crash()
        await two.acquire()
        assert not await one.tries()


# --- (6) expiry and purge


@staged
async def test_a_row_that_is_held_waited_for_or_kept_is_never_purged():
    server = serve()
    async with Side(server) as one, Side(server) as two:
        claim, _ = await one.acquire()
        await asyncio.sleep(30 * TTL)
        assert isinstance((await one.backend.renew([claim]))[0], Grant)
        server.purge("", 0)
        assert isinstance((await one.backend.renew([claim]))[0], Grant)
        await claim.release(keep=100.0)
        await asyncio.sleep(90)
        server.purge("", 0)
        assert not await two.tries()
        await asyncio.sleep(20)
        assert await two.tries()
        await asyncio.sleep(100)
        assert server.purge("", 0)
        assert KEY not in server.rows


@pytest.mark.parametrize("how", ["died", "kept"])
@pytest.mark.parametrize("prefix", ["n/", ""])
def test_a_purge_leaves_the_sessions_of_dead_holders_and_kept_times_that_have_ended(how, prefix):
    """Without them, clients that try once and leave, as a weekly job does, would find the lock taken for ever."""

    async def main() -> None:
        server = serve()
        async with Side(server) as one, Side(server) as two:
            claim, _ = await one.acquire()
            waiting = two.claim()
            if how == "kept":
                await claim.release(keep=100.0)
            else:
                assert await waiting.acquire(wait=True) is None
            for side in (one, two):
                side.freeze()
            await asyncio.sleep(7 * 86_400)
            async with Side(server) as three:
                assert await three.backend._purge(prefix, 86_400.0) == (1 if how == "kept" else 0)
            async with Side(server) as three:
                assert await three.tries()
            await asyncio.sleep(7 * 86_400)
            async with Side(server) as three:
                await three.backend._purge(prefix, 86_400.0)
                assert sessions_of(server) == []
                assert KEY not in server.rows
            for side in (one, two):
                side.wire.cut = True

    run(main())


# --- (7) session rows


@staged
async def test_a_missing_session_row_is_observed_for_a_whole_ttl():
    server = serve(push=False)
    async with Side(server, poll=0.1) as one, Side(server, poll=0.1) as two:
        await one.acquire()
        await asyncio.sleep(0.5)
        del server.rows[one.session.key]
        one.freeze()
        began = now()
        await two.acquire()
        assert now() - began >= TTL


@staged
async def test_a_heartbeat_whose_answer_was_lost_counts_by_its_number():
    server = serve()
    async with Side(server) as one:
        claim, grant = await one.acquire()
        await asyncio.sleep(0.5)
        one.wire.lost = 1
        await one.session.heartbeat()
        assert not one.session.dead
        assert claim.member.session.heartbeat_sent > grant.until - TTL
        assert isinstance((await one.backend.renew([claim]))[0], Grant)


@staged
async def test_a_client_that_was_declared_dead_loses_its_holds_and_enters_anew():
    server = serve(push=False)
    async with Side(server) as one, Side(server) as two:
        claim, _ = await one.acquire()
        waiting = one.claim(name="y")
        other, _ = await two.acquire(name="y")
        assert await waiting.acquire(wait=True) is None
        old, session = waiting.member.id, one.session
        await two.backend._engine.observer._declare_dead(
            {session.id: two.backend._engine.observer._edit(session.id, session._version, DEAD, 60.0)}
        )
        assert await one.backend.renew([claim]) == ["revoked"]
        assert await waiting.acquire(wait=True) is None
        assert waiting.member.id != old
        assert waiting.member.session.id != session.id
        await other.release()
        await waiting.release()


def believed(server: RowServer, claim: Any) -> bool:
    """Whether the hold of a claim is in the row, under a session whose row is there."""
    hold = decode(server.rows[KEY].value).holds.get(claim.member.id)
    return hold is not None and session_key("n", hold.request.session) in server.rows


@pytest.mark.parametrize("first", ["the end of the session", "the grant", "the grant and its end"])
def test_a_grant_that_no_longer_stands_when_it_is_taken_is_not_believed(first):
    async def main() -> None:
        server = serve(push=False)
        async with Side(server) as one, Side(server) as two:
            held, _ = await one.acquire()
            waiting = two.claim()
            assert await waiting.acquire(wait=True) is None
            session, writer = two.session, two.backend._engine.writer("x", Family.LOCK)
            if first == "the end of the session":
                del server.rows[session.key]
                await two.backend._engine.begin_renewal(session)
                await held.release()
                writer.serve()
            elif first == "the grant":
                del server.rows[session.key]
                await held.release()
                # The row is read before the session.
                await two.backend._engine.begin_renewal(session)
            else:
                await held.release()
                writer.serve()
                await asyncio.sleep(0.1)
                assert await one.backend.force_release("x", Family.LOCK)
                writer.serve()
            await asyncio.sleep(0.1)
            assert isinstance(await waiting.acquire(wait=True), Grant)
            assert believed(server, waiting)
            assert not await one.tries()
            await waiting.release()
            assert await one.tries()

    run(main())


@staged
async def test_a_hold_that_ends_between_the_look_and_its_release_by_force_costs_the_next_nothing():
    server = serve()
    async with Side(server) as one, Side(server) as two:
        held, grant = await one.acquire()
        waiting = one.claim()
        assert await waiting.acquire(wait=True) is None
        read = two.backend._read

        async def read_and_end(name: str, family: Family) -> Any:
            found = await read(name, family)
            await held.release()
            return found

        two.backend._read = read_and_end
        assert await two.backend.force_release("x", Family.LOCK, grant.token) is False
        two.backend._read = read
        await waiting.inbox.wait()
        successor = await waiting.acquire(wait=True)
        assert isinstance(successor, Grant)
        [renewal] = await one.backend.renew([waiting])
        assert isinstance(renewal, Grant)
        assert await two.backend.force_release("x", Family.LOCK, successor.token)


@staged
async def test_a_position_under_a_session_that_is_gone_brings_no_grant():
    server = serve(push=False)
    async with Side(server) as one, Side(server) as two, Side(server) as three:
        held, _ = await one.acquire()
        waiting, next_one = two.claim(), three.claim()
        assert await waiting.acquire(wait=True) is None
        assert await next_one.acquire(wait=True) is None
        old, session = waiting.member.id, two.session
        del server.rows[session.key]
        await two.backend._engine.begin_renewal(session)
        # The lock is handed to it before it has entered anew.
        await held.release()
        assert old in decode(server.rows[KEY].value).holds
        assert await waiting.acquire(wait=True) is None
        row = decode(server.rows[KEY].value)
        assert list(row.holds) == [next_one.member.id]
        assert list(row.queue) == [waiting.member.id]
        assert waiting.inbox.take() is None


@pytest.mark.parametrize("when", ["before it is asked", "while it answers"])
def test_a_server_that_forgets_and_takes_a_missing_session_for_dead_lets_one_in(when):
    async def main() -> None:
        server = serve(push=False, expires=True)
        async with Side(server) as one, Side(server) as two:
            for side in (one, two):
                claim, _ = await side.acquire()
                await claim.release()
            old = one.session

            async def forget() -> None:
                one.wire.slow = None
                server.forget()

            if when == "before it is asked":
                server.forget()
            else:
                one.backend._engine.changed(KEY)
                one.wire.slow = forget
            claim, _ = await one.acquire()
            assert one.wire.slow is None
            assert old.dead
            assert believed(server, claim)
            assert not await two.tries()
            await claim.release()
            assert await two.tries()

    run(main())


@staged
async def test_a_hold_that_is_found_in_the_row_after_a_reconnect_brings_no_grant_before_its_session_is_seen():
    server = serve(push=False, expires=True)
    async with Side(server) as one, Side(server) as two:
        held, _ = await one.acquire()
        waiting = two.claim()
        assert await waiting.acquire(wait=True) is None
        session = two.session
        await held.release()
        del server.rows[session.key]
        two.backend.store.interrupt()
        await waiting.inbox.wait()
        assert waiting.inbox.take() is None
        assert isinstance(await waiting.acquire(wait=True), Grant)
        assert session.dead
        assert believed(server, waiting)
        assert not await one.tries()


@staged
async def test_a_grant_that_is_taken_away_while_a_heartbeat_is_waited_for_is_not_believed():
    server = serve()
    async with Side(server) as one, Side(server) as two:
        claim, _ = await one.acquire()
        await claim.release()
        await asyncio.sleep(2 * TTL)
        claim = one.claim()
        answers = 0

        async def slow() -> None:
            nonlocal answers
            answers += 1
            if answers == 2:
                # The answer to the heartbeat; the request was answered before.
                await asyncio.sleep(0.1)
                assert claim.member.id in decode(server.rows[KEY].value).holds
                assert await two.backend.force_release("x", Family.LOCK)
                one.backend._engine.changed(KEY)
                await asyncio.sleep(0.1)

        one.wire.slow = slow
        assert isinstance(await claim.acquire(wait=True), Grant)
        assert believed(server, claim)


# --- (9) clocks: see test_rows_liveness.py


@staged
async def test_one_who_comes_after_a_death_needs_one_try_where_there_is_a_clock():
    server = serve(push=False)
    async with Side(server) as one, Side(server) as two:
        await one.acquire()
        await asyncio.sleep(0.5)
        one.freeze()
        assert not await two.tries()
        await asyncio.sleep(1.05 * TTL)
        assert await two.tries()


@staged
async def test_a_clock_that_steps_back_does_not_keep_the_dead_alive():
    server = serve(push=False)
    async with Side(server, poll=0.1) as one, Side(server, poll=0.1) as two:
        await one.acquire()
        await asyncio.sleep(0.5)
        one.freeze()
        server.stepped = -3600.0
        began = now()
        await two.acquire()
        assert now() - began < TTL + 0.7


@pytest.mark.parametrize("how", ["a hold", "a hold with a life of its own", "kept"])
def test_a_client_that_dies_after_hours_without_a_request_is_followed_after_its_ttl(how):
    async def main() -> None:
        server = serve()
        async with Side(server) as one, Side(server) as two:
            assert await one.tries()
            await asyncio.sleep(36_000)
            claim, _ = await one.acquire(life=TTL if how == "a hold with a life of its own" else math.inf)
            if how == "kept":
                await claim.release(keep=TTL)
            one.freeze()
            assert not await two.tries()
            info = await two.backend.inspect("x", Family.LOCK)
            lefts = [holder.remaining for holder in info.holders]
            lefts += [(kept.until - datetime.now(UTC)).total_seconds() for kept in info.kept]
            assert len(lefts) == 1
            assert lefts[0] <= TTL
            await asyncio.sleep(TTL + 0.5)
            # Of tries, each of which is the only one of its client, since none observes.
            async with Side(server) as three:
                assert await three.tries()

    run(main())


# --- (12) holds with a life of their own


@staged
async def test_a_hold_that_is_not_prolonged_has_a_session_of_its_own_that_ends_with_it():
    server = serve(push=False)
    async with Side(server) as one, Side(server) as two:
        kept, _ = await one.acquire(name="kept")
        claim, grant = await one.acquire(life=TTL)
        claim.fixed = True
        began = now()
        [renewal] = await one.backend.renew([claim])
        assert isinstance(renewal, Grant)
        assert renewal.until < 0
        [hold], [other] = (
            decode(server.rows[f"n/l/lock/{name}"].value).holds.values() for name in ("x", "kept")
        )
        assert hold.request.session != other.request.session
        await two.acquire()
        assert grant.until < now() < began + TTL + 0.7
        # The other one has been renewed meanwhile.
        assert decode(server.rows["n/l/lock/kept"].value).holds
        assert await one.backend.renew([claim]) == ["revoked"]
        await claim.release()
        claim, _ = await one.acquire(name="y", life=TTL)
        sessions = [key for key in server.rows if key.startswith("n/s/")]
        await claim.release()
        await asyncio.sleep(0.1)
        assert len([key for key in server.rows if key.startswith("n/s/")]) == len(sessions) - 1
        assert len(one.backend._engine.sessions.open) == 1
        await kept.release()


@staged
async def test_a_request_with_a_life_of_its_own_is_kept_alive_while_it_waits_and_not_after_that():
    server = serve(push=False)
    async with Side(server) as one, Side(server) as two, Side(server) as three:
        held, _ = await one.acquire()
        waiting = asyncio.create_task(two.acquire(life=TTL))
        await asyncio.sleep(3 * TTL)
        assert len(decode(server.rows[KEY].value).queue) == 1
        await held.release()
        claim, grant = await waiting
        [renewal] = await two.backend.renew([claim])
        assert renewal.until > grant.until
        claim.fixed = True
        began, row = now(), server.rows[two.session.key]
        await asyncio.sleep(TTL / 2)
        await two.backend.renew([claim])
        assert server.rows[two.session.key] is row, "a heartbeat has prolonged it"
        await three.acquire()
        assert now() < began + TTL + 0.7


@staged
async def test_holds_that_are_not_prolonged_are_verified_by_one_read_with_their_sessions():
    server = serve()
    async with Side(server) as one:
        claims = [(await one.acquire(name=f"x{number}", life=TTL))[0] for number in range(20)]
        for claim in claims:
            claim.fixed = True
        await asyncio.sleep(0.1)
        writes, reads = server.writes, server.reads
        renewals = await one.backend.renew(claims)
        assert all(isinstance(renewal, Grant) for renewal in renewals)
        assert (server.writes - writes, server.reads - reads) == (0, 1)
        # Without its row, others would end the session a ttl after they have looked for it.
        [hold] = decode(server.rows["n/l/lock/x3"].value).holds.values()
        del server.rows[f"n/s/{hold.request.session}"]
        renewals = await one.backend.renew(claims)
        assert [number for number, renewal in enumerate(renewals) if renewal == "revoked"] == [3]


@staged
async def test_a_claim_that_is_cancelled_while_its_session_is_opened_leaves_none():
    server = serve()
    async with Side(server) as one:
        claim = one.claim(life=TTL)
        asking = asyncio.create_task(claim.acquire(wait=True))
        await asyncio.sleep(0.0005)
        asking.cancel()
        await asyncio.wait([asking])
        await claim.release()
        await asyncio.sleep(0.1)
        assert not [key for key in server.rows if key.startswith("n/s/")]
        assert not one.backend._engine.sessions.open


@staged
async def test_an_older_request_to_extend_a_hold_that_arrives_late_changes_nothing():
    server = serve(push=False)
    async with Side(server) as one, Side(server) as two:
        claim, _ = await one.acquire(life=TTL)
        claim.fixed = True
        # The heartbeat, and the read of the row in the same flight.
        one.wire.delay = 2
        with suppress(BackendUnavailable):
            await claim.extend(0.2, 1)
        began = now()
        grant = await claim.extend(4 * TTL, 2)
        assert grant.until == pytest.approx(expires_at(began, 4 * TTL), abs=0.05)
        late = [step() for step in one.wire.delayed]
        assert [None] in late, "a write against another version than the present one"
        waiting = asyncio.create_task(two.acquire())
        await asyncio.sleep(3 * TTL)
        assert not waiting.done()
        await waiting
        assert grant.until < now() < began + 4 * TTL + 0.7


@staged
async def test_after_a_lost_answer_a_hold_is_known_to_last_for_the_shorter_of_two_lives():
    server = serve(push=False)
    async with Side(server) as one:
        claim, grant = await one.acquire(life=TTL)
        claim.fixed = True
        one.wire.cut = True
        with pytest.raises(BackendUnavailable):
            await claim.extend(10 * TTL, 1)
        assert claim.member.until <= grant.until
        one.wire.cut = False
        began = now()
        grant = await claim.extend(TTL / 2, 2)
        assert grant.until <= expires_at(began, TTL / 2) + 0.01


@staged
async def test_another_life_is_granted_in_full_although_the_connection_is_lost_again_and_again():
    server = serve(push=False)
    async with Side(server) as one:
        claim, _ = await one.acquire(life=TTL)
        claim.fixed = True
        losses = 20

        async def lose() -> None:
            nonlocal losses
            if losses:
                losses -= 1
                one.backend.store.interrupt()

        one.wire.slow = lose
        one.backend.store.interrupt()
        began = now()
        grant = await claim.extend(4 * TTL, 1)
        assert losses == 0
        assert expires_at(began, 4 * TTL) <= grant.until <= expires_at(now(), 4 * TTL)


@staged
async def test_a_heartbeat_that_is_under_way_counts_for_a_renewal_that_begins_later():
    """Two of them, one after the other, may take longer than the command timeout."""
    server = serve(push=False)
    async with Side(server) as one:
        claim, grant = await one.acquire()
        await asyncio.sleep(0.1)

        async def slow() -> None:
            await asyncio.sleep(0.6)

        one.wire.slow = slow
        began = now()
        first = asyncio.create_task(one.backend.renew([claim]))
        await asyncio.sleep(0.3)
        [renewal] = await one.backend.renew([claim])
        assert isinstance(renewal, Grant)
        assert renewal.until > grant.until
        assert claim.member.until - TTL < began + 0.3
        assert isinstance((await first)[0], Grant)
        assert now() < began + 1.0


# --- (15) tokens, absence


@staged
async def test_tokens_rise_over_purge_deletion_and_reopening():
    server, tokens = serve(), []
    async with Side(server) as one:
        for _ in range(3):
            claim, grant = await one.acquire()
            tokens += [grant.token, grant.token + grant.count - 1]
            await claim.release()
            del server.rows[KEY]
    # The clock of the store was set back, and its row is lost.
    server.stepped, server._tick = -1e9, 0
    again = one.backend.again()
    again.bind(one.backend.settings)
    await again.open()
    claim = again.claim(Request("x", MUTEX, TTL, "side"))
    grant = await claim.acquire(wait=False)
    tokens.append(grant.token)
    await again.aclose()
    assert tokens == sorted(tokens)
    assert tokens[-1] > tokens[-2]


@staged
async def test_a_hold_is_written_only_against_a_row_that_is_there():
    """Else a late copy of the insert brings back, after a purge, a hold that its client has forgotten."""
    server = serve()
    async with Side(server) as one, Side(server) as two:
        await one.backend._engine.sessions.get(TTL, one.backend.context.deadline())
        claim = one.claim()

        async def after_the_read() -> None:
            one.wire.slow, one.wire.delay = None, 1

        one.wire.slow = after_the_read
        with pytest.raises(BackendError):
            await claim.acquire(wait=True)
        assert len(one.wire.delayed) == 1
        await claim.release()
        server.rows.pop(KEY, None)
        for step in one.wire.delayed:
            step()
        assert KEY not in server.rows or decode(server.rows[KEY].value).free
        assert await two.tries()


# --- (18) late copies


@staged
async def test_a_late_copy_of_a_request_that_was_given_up_changes_nothing():
    server = serve()
    async with Side(server) as one, Side(server) as two:
        first, _ = await one.acquire()
        await first.release()
        claim = one.claim()
        one.backend._engine.sessions  # noqa: B018 - its session is open
        one.wire.delay = 1
        with pytest.raises(BackendError):
            await claim.acquire(wait=True)
        await claim.release()
        [late] = one.wire.delayed
        late()
        assert decode(server.rows[KEY].value).free
        assert await two.tries()


@staged
async def test_a_leave_after_an_unanswered_request_is_flushed():
    server = serve()
    async with Side(server) as one, Side(server) as two:
        await (await one.acquire())[0].release()
        await (await two.acquire())[0].release()
        await (await one.acquire())[0].release()
        claim = one.claim()
        one.wire.delay = 1
        with pytest.raises(BackendError):
            await claim.acquire(wait=True)
        await claim.release()
        # It survives a crash, so that the late copy meets another version.
        version = server.rows[KEY].version
        server.crash()
        assert server.rows[KEY].version == version
        one.wire.delayed[0]()
        assert decode(server.rows[KEY].value).free


@staged
async def test_a_request_that_was_withdrawn_while_its_write_lost_a_race_is_not_sent_again():
    server = serve()
    async with Side(server) as one, Side(server) as two:
        await (await one.acquire())[0].release()
        held, _ = await two.acquire()
        claim = one.claim()
        acquiring = asyncio.create_task(claim.acquire(wait=True))
        # Its client believes that the row is free, and its write is under way.
        await asyncio.sleep(0.0015)
        acquiring.cancel()
        await claim.release()
        assert not decode(server.rows[KEY].value).queue
        await held.release()


@staged
async def test_a_write_that_the_network_repeats_counts_once_and_reports_no_loss():
    server = serve()
    async with Side(server) as one:
        claim, _ = await one.acquire()

        async def repeated(step: Callable[[], Any]) -> Any:
            # The answer of the first copy is lost, the second copy finds the version of the first.
            step()
            return step()

        one.backend.store.transport = repeated
        assert await claim.release() is Release.RELEASED
        again = one.claim()
        assert await again.acquire(wait=False) is not None


@staged
async def test_an_unflushed_release_that_was_answered_before_a_reconnect_is_checked_again():
    server = serve()
    async with Side(server) as one, Side(server) as two:
        claim, _ = await one.acquire()

        async def crash() -> None:
            # The client learns of the crash before it takes in the answer, like a process that was stopped meanwhile.
            one.wire.slow = None
            server.crash()
            one.backend._engine.interrupted()

        one.wire.slow = crash
        await claim.release()
        await asyncio.sleep(2 * TTL)
        assert decode(server.rows[KEY].value).free
        assert await two.tries()


@staged
async def test_a_release_that_was_answered_while_none_waited_is_answered_beside_another_one_of_its_claim():
    """The other one is sent after a reconnect, to find out whether the removal is durable."""
    server = serve()
    async with Side(server) as one:
        claim, _ = await one.acquire()
        one.wire.lost = 1
        with pytest.raises(BackendUnavailable):
            await claim.release()
        [writer] = one.backend._engine._writers.values()
        await until(lambda: not writer.leaving)
        one.backend._engine.interrupted()
        assert writer.leaving
        assert await claim.release() is Release.UNKNOWN
        assert decode(server.rows[KEY].value).free


# --- (8), (18) statements that the server evaluates


async def used(*sides: Side) -> None:
    """Each of them uses the lock once, so that its session is open."""
    for side in sides:
        await (await side.acquire())[0].release()


@staged
async def test_a_free_lock_is_one_request_whoever_used_it_last():
    server = serve(enters=True)
    async with Side(server) as one, Side(server) as two:
        await used(one, two)
        for side, name in ((one, "x"), (two, "x"), (one, "x"), (one, "x"), (one, "x"), (two, "new")):
            server.reads = server.writes = 0
            claim, grant = await side.acquire(name=name)
            assert (server.reads, server.writes) == (0, 1)
            assert grant.until > side.backend.settings.clock()
            assert await claim.release() is Release.RELEASED
            assert (server.reads, server.writes) == (0, 2)


@staged
async def test_a_client_that_is_alone_with_a_lock_writes_against_the_version_that_it_knows():
    server = serve(enters=True)
    async with Side(server) as one:
        await used(*[one] * (ALONE + 1))
        server.enter = None
        await used(one)


@staged
async def test_a_statement_neither_enters_nor_changes_a_lock_that_is_held_or_waited_for():
    server = serve(enters=True)
    async with Side(server) as one, Side(server) as two, Side(server) as three:
        await used(one, two, three)
        held, grant = await one.acquire()
        version = server.rows[KEY].version
        assert not await two.tries()
        assert server.rows[KEY].version == version
        waiting = asyncio.create_task(two.acquire())
        await asyncio.sleep(0.1)
        server.stores.pop(two.backend.context.address)
        await held.release()
        # It is two's by now.
        assert not await three.tries()
        claim, following = await waiting
        assert following.token > grant.token
        await claim.release()


@staged
async def test_a_late_copy_of_a_statement_that_was_given_up_changes_nothing():
    server = serve(enters=True)
    async with Side(server) as one, Side(server) as two:
        await used(one, two)
        claim = one.claim()
        one.wire.delay = 1
        with pytest.raises(BackendError):
            await claim.acquire(wait=True)
        await claim.release()
        [late] = one.wire.delayed
        late()
        assert decode(server.rows[KEY].value).free
        del server.rows[KEY]
        late()
        assert KEY not in server.rows
        assert await two.tries()


@staged
async def test_a_late_copy_of_a_statement_whose_repetition_was_answered_changes_nothing():
    server = serve(enters=True)
    async with Side(server) as one, Side(server) as two:
        await used(one, two)
        claim = one.claim()
        one.wire.delay = 1
        with pytest.raises(BackendError):
            await claim.acquire(wait=True)
        # A heartbeat has failed, and the version that it read is known again.
        one.session._version = server.rows[one.session.key].version
        assert await claim.acquire(wait=True) is not None
        await claim.release()
        [late] = one.wire.delayed
        late()
        assert decode(server.rows[KEY].value).free
        assert await two.tries()


@staged
async def test_a_late_copy_of_a_statement_whose_repetition_was_refused_changes_nothing():
    server = serve(enters=True)
    async with Side(server) as one, Side(server) as two:
        await used(one, two)
        claim = one.claim()
        one.wire.delay = 1
        with pytest.raises(BackendError):
            await claim.acquire(wait=False)
        held, _ = await two.acquire()
        assert await claim.acquire(wait=False) is None
        await held.release()
        await asyncio.sleep(0.1)
        [late] = one.wire.delayed
        late()
        assert decode(server.rows[KEY].value).free
        assert await two.tries()


@staged
async def test_a_copy_of_a_statement_that_counts_just_before_the_heartbeat_is_removed():
    server = serve(enters=True)
    async with Side(server) as one, Side(server) as two:
        await used(one, two)
        claim = one.claim()
        one.wire.delay = 1
        with pytest.raises(BackendError):
            await claim.acquire(wait=True)
        session, renew = one.session, one.session.heartbeat

        async def heartbeat() -> None:
            [late] = one.wire.delayed
            late()
            assert not decode(server.rows[KEY].value).free
            await renew()

        session.heartbeat = heartbeat
        await claim.release()
        assert decode(server.rows[KEY].value).free
        assert await two.tries()


@staged
async def test_a_statement_whose_answer_was_lost_is_found_with_its_token():
    server = serve(enters=True)
    async with Side(server) as one, Side(server) as two:
        await used(one, two)
        claim = one.claim()
        one.wire.lost = 1
        with pytest.raises(BackendError):
            await claim.acquire(wait=True)
        token = decode(server.rows[KEY].value).token
        grant = await claim.acquire(wait=True)
        assert grant is not None
        assert grant.token + grant.count - 1 == token
        assert not await two.tries()
        assert await claim.release() is Release.RELEASED


@staged
async def test_a_statement_that_is_given_up_while_it_is_under_way_leaves_nothing():
    server = serve(enters=True)
    async with Side(server) as one, Side(server) as two:
        await used(one, two)
        claim = one.claim()
        acquiring = asyncio.create_task(claim.acquire(wait=True))
        await asyncio.sleep(0.0015)
        acquiring.cancel()
        await claim.release()
        assert decode(server.rows[KEY].value).free
        assert await two.tries()


@staged
async def test_tokens_of_statements_rise_over_deletion_and_above_all_that_the_client_has_seen():
    server, tokens = serve(enters=True), []
    async with Side(server) as one, Side(server) as two:
        for side in (one, two, one, one, two, one):
            claim, grant = await side.acquire()
            tokens += [grant.token, grant.token + grant.count - 1]
            await claim.release()
            if len(tokens) > 6:
                del server.rows[KEY]
        one.backend.context.floor = server._tick + 10**9
        claim, grant = await one.acquire()
        assert grant.token > one.backend.context.floor - 10**9
        tokens += [grant.token]
        await claim.release()
    assert tokens == sorted(tokens)


@pytest.mark.parametrize("enters", [True, False])
def test_a_client_that_loses_race_after_race_pauses_for_longer(enters):
    async def main() -> None:
        server = serve(enters=enters)
        async with Side(server) as one, Side(server) as two:
            await used(one, two)
            held, _ = await one.acquire()
            edit, server.edit = server.edit, lambda asked: None if asked.key == KEY else edit(asked)
            server.reads = server.writes = 0
            waiting = asyncio.create_task(two.acquire())
            await asyncio.sleep(0.5)
            assert server.reads + server.writes < 100
            server.edit = edit
            await held.release()
            await (await waiting)[0].release()

    run(main())


def refuse_locks(server: RowServer) -> Callable[[], None]:
    """Have every write of a lock lose its race, until what is returned is called."""
    edit = server.edit
    server.edit = lambda asked: None if "/l/" in asked.key else edit(asked)

    def again() -> None:
        server.edit = edit

    return again


@staged
async def test_a_lost_race_is_no_silence():
    """Who waits goes on after the command timeout; all others are told why theirs ended."""
    server = serve()
    async with Side(server) as one, Side(server) as two:
        held, _ = await one.acquire(name="y")
        again = refuse_locks(server)
        claim, begun = two.claim(), now()
        assert await claim.acquire(wait=True) is None
        assert now() - begun < 1.01
        for act in (two.claim(name="z").acquire(wait=False), held.release()):
            begun = now()
            with pytest.raises(BackendUnavailable, match=r"other clients changed the row of '[yz]' first"):
                await act
            assert now() - begun < 1.01
        await asyncio.sleep(5)
        assert not claim.inbox.woken
        again()
        async with asyncio.timeout(2):
            await claim.inbox.wait()
        assert await claim.acquire(wait=True)
        await claim.release()
        assert await held.release() is Release.RELEASED


def test_a_release_that_other_clients_hold_up_is_not_reported_as_given_up(caplog):
    """It is tried until it is answered, however many ttl that takes: the client's heartbeats keep the hold."""

    async def main() -> None:
        server, clock = serve(), VirtualClock()
        async with Client(
            RowTestBackend(server), namespace="n", ttl=TTL, command_timeout=1.0, clock=clock
        ) as client:
            lease = await client.lock("y").acquire()
            again = refuse_locks(server)
            await lease.release()
            await asyncio.sleep(10 * TTL)
            again()
            await until(lambda: decode(server.rows[row_key("n", "l", Family.LOCK, "y")].value).free)
            await until(lambda: not client._runtime.cleanups)

    with caplog.at_level(logging.INFO, logger="aiolock"):
        run(main())
    assert "release of 'y' will be tried again" in caplog.text
    assert "gave up" not in caplog.text


@staged
async def test_a_request_that_loses_races_can_be_given_up_at_any_time():
    server = serve()
    async with Side(server) as one, Side(server) as two:
        await used(one, two)
        held, _ = await one.acquire()
        again = refuse_locks(server)
        claim = two.claim()
        assert await claim.acquire(wait=True) is None
        leaving = asyncio.create_task(claim.release())
        await asyncio.sleep(0.5)
        again()
        await leaving
        await held.release()
        await asyncio.sleep(5)
        assert decode(server.rows[KEY].value).free


@staged
async def test_a_release_does_not_wait_behind_requests_that_lost_races():
    server, pair = serve(), permits(1, 2)
    async with Side(server) as one, Side(server) as two:
        await one.acquire(pair, "y")
        held, _ = await two.acquire(pair, "y")
        again = refuse_locks(server)
        two.wire.slow = lambda: asyncio.sleep(0.1)
        claim = two.claim(pair, "y")
        entering = asyncio.create_task(claim.acquire(wait=True))
        await asyncio.sleep(0.95)
        [writer] = two.backend._engine._writers.values()
        # A pause that has just begun, and not one that is over in a moment.
        before = writer._end_pause
        await until(lambda: writer._end_pause not in (None, before))
        again()
        two.wire.slow, begun = None, now()
        await held.release()
        assert now() - begun < 0.01
        await entering


@staged
async def test_a_crowd_that_asks_at_once_gets_in_by_few_attempts_each():
    """The server carries out one request after the other, so that each takes the longer the more there are."""
    server, turn = serve(), asyncio.Lock()

    async def served() -> None:
        async with turn:
            await asyncio.sleep(0.001)

    async with AsyncExitStack() as stack:
        sides = [await stack.enter_async_context(Side(server)) for _ in range(60)]
        holder, _ = await sides[0].acquire()
        for side in sides:
            await side.acquire(name=f"own {id(side)}")
            side.wire.slow = served
        server.writes, begun = 0, now()
        claims = [side.claim() for side in sides[1:]]
        await asyncio.gather(*(claim.acquire(wait=True) for claim in claims))
        await until(lambda: len(decode(server.rows[KEY].value).queue) == len(claims))
        assert server.writes < 10 * len(claims), server.writes
        assert now() - begun < 1.5, now() - begun
        for side in sides:
            side.wire.slow = None
        await holder.release()


@staged
async def test_a_release_reads_first_where_others_have_written_meanwhile():
    """A write that is refused costs as much as one that counts; a client that is alone reads nothing."""
    server, refused = serve(), 0
    edit = server.edit

    def counted(asked):
        nonlocal refused
        row = edit(asked)
        refused += row is None
        return row

    async with Side(server) as one, Side(server) as two, Side(server) as three:
        held, _ = await one.acquire()
        waiting = [asyncio.create_task(side.acquire()) for side in (two, three)]
        await asyncio.sleep(0.1)
        server.edit = counted
        for side in [one, two, three] * 4:
            await held.release()
            held, _ = await waiting.pop(0)
            waiting.append(asyncio.create_task(side.acquire()))
            await asyncio.sleep(0.1)
        # Each of them once.
        assert refused == 3
        for _ in range(2):
            await held.release()
            held, _ = await waiting.pop(0)
        await held.release()
        for _ in range(2):
            held, _ = await one.acquire()
            await asyncio.sleep(0.1)
            server.reads = 0
            await held.release()
        assert server.reads == 0


@staged
async def test_the_limit_of_a_semaphore_is_written_with_its_first_permit():
    server = serve(enters=True)
    async with Side(server) as one, Side(server) as two:
        await one.acquire(permits(1, 2))
        with pytest.raises(ConfigError, match="has 2 permits, not 3"):
            await two.claim(permits(1, 3)).acquire(wait=False)


@pytest.mark.parametrize("end", ["dead", "deleted"])
def test_a_late_statement_does_not_enter_for_a_session_that_is_over(end):
    async def main() -> None:
        server = serve(enters=True)
        async with Side(server) as one, Side(server) as two:
            await used(one, two)
            one.wire.delay = 1
            with pytest.raises(BackendError):
                await one.claim().acquire(wait=True)
            key, [late] = one.session.key, one.wire.delayed
            if end == "dead":
                [row] = await two.backend.store.get([key])
                dead = Edit(key, row.version, "d", encode_session(DEAD))
                assert await two.backend.store.compare_and_set([dead]) != [None]
            else:
                del server.rows[key]
            late()
            assert decode(server.rows[KEY].value).free
            assert await two.tries()

    run(main())


# --- (19) the longest row


def fill(server: RowServer, name: str = "x") -> list[str]:
    """Fill the row of a read-write lock with requests of other clients; return their ids."""
    key = row_key("n", "l", Family.RW, name)
    row = decode(server.rows[key].value)
    [hold] = row.holds.values()
    while len(encode(row)) < MOST_SHARED:
        session = f"other{len(row.queue)}-1"
        request = RowRequest(f"{len(row.queue):016}", "write", TTL, "l" * 200, session=session)
        row.queue[request.id] = request
        server.rows[session_key("n", session)] = server.rows[session_key("n", hold.request.session)]
    server.rows[key] = server.rows[key]._replace(value=encode(row), version="full")
    return list(row.queue)


def empty(server: RowServer, *claims: str) -> None:
    """Take requests of other clients out of the row, of which no client is notified."""
    key = row_key("n", "l", Family.RW, "x")
    row = decode(server.rows[key].value)
    for claim in claims:
        row.queue.pop(claim, None)
    server.rows[key] = server.rows[key]._replace(value=encode(row), version=f"without {claims}")


@staged
async def test_a_request_waits_outside_a_full_row_and_who_leaves_can():
    server = serve()
    async with Side(server) as one:
        claim, _ = await one.acquire(READ)
        others = fill(server)
        late = [one.claim(WRITE) for _ in range(3)]
        for each in late:
            assert await each.acquire(wait=True) is None
        assert not await one.tries(READ)
        assert await one.backend.request_release("x", Family.RW, "r" * 256)
        with pytest.raises(BackendUnavailable, match="full"):
            await one.backend.request_release("x", Family.RW, "r" * 16_000)
        row = decode(server.rows[claim.key].value)
        assert list(row.queue) == others
        assert await claim.release() is Release.RELEASED
        assert late[0].member.state is MemberState.OUTSIDE


@staged
async def test_those_outside_enter_in_their_order_once_there_is_room():
    server = serve()
    async with Side(server) as one:
        claim, _ = await one.acquire(READ)
        others = fill(server)
        late = [one.claim(WRITE) for _ in range(8)]
        for each in late:
            assert await each.acquire(wait=True) is None
        # One that gives up leaves no trace, and repeated requests change no order.
        await late.pop(1).release()
        assert await late[-1].acquire(wait=True) is None
        empty(server, *others[:2])
        await asyncio.sleep(2.1)
        _, *queue = decode(server.rows[claim.key].value).queue
        mine = [each.member.id for each in late]
        entered = queue[len(others) - 3 :]
        assert mine[:2] <= entered == mine[: len(entered)] < mine
        empty(server, *others, *entered)
        await claim.release()
        # The places of the first are gone: they ask again. The next one is granted without a request.
        await asyncio.sleep(TTL)
        assert late[len(entered)].inbox.take() is not None


@staged
async def test_what_a_write_without_an_answer_has_let_in_from_outside_is_found():
    server = serve()
    async with Side(server) as one:
        claim, _ = await one.acquire(READ)
        others = fill(server)
        late = one.claim(WRITE)
        assert await late.acquire(wait=True) is None
        empty(server, *others)
        one.wire.lost = 1
        one.backend.store.interrupt()
        await asyncio.sleep(TTL)
        await claim.release()
        await asyncio.sleep(TTL)
        assert late.inbox.take() is not None
        assert list(decode(server.rows[claim.key].value).holds) == [late.member.id]


@staged
async def test_a_claim_outside_enters_anew_when_its_session_is_dead():
    server = serve()
    async with Side(server) as one:
        claim, _ = await one.acquire(READ)
        others = fill(server)
        late = one.claim(WRITE)
        assert await late.acquire(wait=True) is None
        first = late.member.id
        server.rows[one.session.key] = server.rows[one.session.key]._replace(
            value=encode_session(DEAD), version="dead"
        )
        await asyncio.sleep(TTL)
        assert late.inbox.woken
        await late.acquire(wait=True)
        empty(server, *others)
        await asyncio.sleep(TTL)
        row = decode(server.rows[claim.key].value)
        assert [*row.holds, *row.queue] == [late.member.id] != [first]


@staged
async def test_a_claim_outside_hears_of_a_refusal_for_good():
    server = serve()
    async with Side(server) as one:
        claim, _ = await one.acquire(READ)
        fill(server)
        late = one.claim(WRITE)
        assert await late.acquire(wait=True) is None
        server.rows[claim.key] = server.rows[claim.key]._replace(value=b"9 something else", version="other")
        await asyncio.sleep(2.5)
        assert late.inbox.woken
        with pytest.raises(UnsafeBackend):
            await late.acquire(wait=True)


# --- (20) formats


@staged
async def test_a_row_of_another_format_is_refused_and_can_be_replaced_by_force():
    server = serve()
    async with Side(server) as one:
        claim, _ = await one.acquire()
        await claim.release()
        server.rows[KEY] = server.rows[KEY]._replace(value=b"9 something else", version="other")
        one.backend.store.interrupt()
        claim = one.claim()
        with pytest.raises(UnsafeBackend, match=r"of 'x'.*format '9', not '3'.*force_release"):
            await claim.acquire(wait=True)
        # There is nothing to clean up.
        assert await claim.release() is Release.RELEASED
        assert not one.session.claims
        assert server.rows[KEY].value == b"9 something else"
        assert await one.backend.force_release("x", Family.LOCK)
        assert await one.tries()
        assert not await one.backend.force_release("x", Family.LOCK)


@staged
async def test_a_hold_that_may_be_in_a_row_of_another_format_is_not_said_to_be_released():
    server = serve()
    async with Side(server) as one:
        claim = one.claim()
        await one.tries()
        one.wire.lost = 1
        with pytest.raises(BackendUnavailable):
            await claim.acquire(wait=True)
        server.rows[KEY] = server.rows[KEY]._replace(value=b"9 something else", version="other")
        with pytest.raises(UnsafeBackend, match="format '9'"):
            await claim.release()
        assert one.session.busy


@staged
async def test_a_request_under_way_may_be_in_a_row_of_another_format():
    server = serve()
    async with Side(server) as one:
        await one.acquire(READ)
        key = row_key("n", "l", Family.RW, "x")

        async def slow() -> None:
            one.wire.slow = None
            await asyncio.sleep(0.5)

        late, one.wire.slow = one.claim(READ), slow
        entering = asyncio.create_task(late.acquire(wait=True))
        await asyncio.sleep(0.1)
        server.rows[key] = server.rows[key]._replace(value=b"9 something else", version="other")
        leaving = asyncio.create_task(late.release())
        with pytest.raises(UnsafeBackend):
            await one.backend._engine.renew(one.session)
        with pytest.raises(UnsafeBackend):
            await leaving
        with pytest.raises(BackendError):
            await entering


@staged
async def test_rows_of_another_format_are_listed_and_diagnosed():
    server = serve()
    async with Side(server) as one:
        claim, _ = await one.acquire()
        assert await one.backend.diagnose() == []
        [session] = [key for key in server.rows if key.startswith("n/s/")]
        server.rows[row_key("n", "l", Family.RW, "a b")] = StoredRow(b"9{}", "v", None)
        server.rows[row_key("n", "l", Family.RW, "y")] = StoredRow(b'3{"v":', "v", None)
        server.rows["n/s/another"] = StoredRow(b"\xff", "v", None)
        assert await one.backend.names("*") == [("x", Family.LOCK), ("y", Family.RW)]
        with pytest.raises(UnsafeBackend, match=r"of 'y'.*damaged"):
            await one.backend.inspect("y", Family.RW)
        [finding] = await one.backend.diagnose()
        assert finding.level is Level.ERROR
        for word in ("rw/y", "damaged", "rw/%#", "'9'", "session another", "'\\xff'"):
            assert word in finding.text
        assert session not in finding.text
        assert "force-release" in finding.advice
        one.wire.cut = True
        [finding] = await one.backend.diagnose()
        assert finding.level is Level.ERROR
        assert "no way to the server" in finding.text
        one.wire.cut = False
        await claim.release()


@staged
async def test_a_row_with_values_of_wrong_types_concerns_its_own_lock_only():
    server = serve()
    async with Side(server) as one:
        await one.acquire()
        value = server.rows[KEY].value
        for wrong in (
            value.replace(b'"w":', b'"w":1e300,"later":'),
            value.replace(b'"t":', b'"t":1e400,"later":'),
        ):
            assert wrong != value
            server.rows[KEY] = server.rows[KEY]._replace(value=wrong, version=str(wrong))
            one.backend.store.interrupt()
            with pytest.raises(UnsafeBackend):
                await one.backend.inspect("x", Family.LOCK)
            with pytest.raises(UnsafeBackend):
                await one.claim().acquire(wait=True)
            assert await one.backend.names("*") == [("x", Family.LOCK)]
            other, _ = await one.acquire(name="y")
            await other.release()
        await one.backend.force_release("x", Family.LOCK)
        assert await one.tries()


@staged
async def test_unknown_fields_are_kept():
    server = serve()
    async with Side(server) as one:
        claim, _ = await one.acquire()
        value = server.rows[KEY].value.replace(b'{"v"', b'{"z":[1],"v"').replace(b'"i":', b'"zz":2,"i":')
        server.rows[KEY] = server.rows[KEY]._replace(value=value, version="new")
        await one.backend.request_release("x", Family.LOCK, "please")
        assert b'"z":[1]' in server.rows[KEY].value
        assert b'"zz":2' in server.rows[KEY].value
        await claim.release()


# --- (21) notifications are hints


@staged
async def test_a_waiter_whose_notification_was_lost_finds_its_grant_by_polling():
    server = serve()
    async with Side(server) as one, Side(server) as two:
        claim, _ = await one.acquire(ttl=60.0)
        waiting = asyncio.create_task(two.acquire(ttl=60.0))
        await asyncio.sleep(0.5)
        server.push = False
        await claim.release()
        began = now()
        await waiting
        assert now() - began <= 2.1


# --- answers have no order


@staged
async def test_an_answer_that_was_overtaken_proves_no_loss():
    server = serve()
    async with Side(server) as one:
        claim, _ = await one.acquire()
        await claim.release()
        writer = one.backend._engine.writer("x", Family.LOCK)
        flight = one.backend.context.flight()
        early = server.row(KEY)
        held, _ = await one.acquire()
        assert not writer.learn(early, flight)
        assert isinstance((await one.backend.renew([held]))[0], Grant)


@staged
async def test_a_client_does_not_see_what_it_has_given_up_before_it_looked():
    server = serve()
    async with Side(server) as one:
        claim, _ = await one.acquire()
        # The release reads the row first, and the look could overtake its write.
        one.backend._engine.writer("x", Family.LOCK).forget()
        claim.begin_release()
        assert not (await one.backend.inspect("x", Family.LOCK)).holders
        claim, _ = await one.acquire()
        one.backend._engine.writer("x", Family.LOCK).forget()
        claim.begin_release()
        assert await one.backend.names("*") == []


@staged
async def test_permits_and_limits():
    server = serve()
    async with Side(server) as one:
        first, _ = await one.acquire(permits(2, 3))
        assert not await one.tries(permits(2, 3))
        await one.backend.set_limit("x", 4)
        assert await one.tries(permits(2, 4))
        await first.release()


@staged
async def test_hold_of_another_kind_of_row_is_a_row_hold():
    """What administrators see is what rows have."""
    server = serve()
    async with Side(server) as one:
        claim, grant = await one.acquire()
        [hold] = decode(server.rows[KEY].value).holds.values()
        assert isinstance(hold, RowHold)
        [holder] = (await one.backend.inspect("x", Family.LOCK)).holders
        assert (holder.token, holder.label) == (grant.token, "side")
        assert await one.backend.names("*") == [("x", Family.LOCK)]
        await claim.release()
        assert await one.backend.names("*") == []
        assert session_key("n", one.session.id) in server.rows
    assert not any("/s/" in key for key in server.rows)


# --- the states of claims


def test_the_log_tells_each_transition_of_a_claim_that_waits(caplog):
    async def main() -> None:
        server = serve()
        async with Side(server) as one, Side(server) as two:
            held, _ = await one.acquire()
            caplog.set_level(logging.DEBUG, "aiolock.claim")
            waiting = asyncio.create_task(two.acquire())
            await asyncio.sleep(0.1)
            await held.release()
            await waiting
            assert await one.backend.force_release("x", Family.LOCK)
            assert (await two.backend.events.get()).kind is EventKind.LOST

    run(main())
    records = [each for each in caplog.records if each.name == "aiolock.claim"]
    assert records[0].getMessage() == f"claim {records[0].aiolock_claim} of 'x': entering -> waiting"
    assert [(each.aiolock_lock, each.aiolock_before, each.aiolock_after) for each in records] == [
        ("x", "entering", "waiting"),
        ("x", "waiting", "held"),
        ("x", "held", "gone"),
    ]


# --- a standby, whose wait an administrator can end: a read proves nothing before a later write was answered


def held(server: RowServer, key: str = KEY) -> set[str]:
    return set(decode(server.rows[key].value).holds)


@staged
async def test_a_heartbeat_that_a_read_finds_counts_only_when_a_later_one_was_answered():
    server = serve(standby=True)
    async with Side(server) as one:
        claim, grant = await one.acquire()
        session, before = one.session, one.session.heartbeat_sent
        server.away = True
        writes = server.writes
        [renewal] = await one.backend.renew([claim])
        assert isinstance(renewal, BackendError)
        # It was repeated at once.
        assert server.writes == writes + 2
        await asyncio.sleep(TTL / 2)
        assert session.heartbeat_sent == before
        assert claim.member.until <= grant.until
        server.away = False
        writes = server.writes
        one.wire.lost = 1
        sent = now()
        await session.heartbeat()
        assert server.writes == writes + 2
        assert session.heartbeat_sent > sent
        server.crash()
        content = decode_session(server.rows[session.key].value)
        assert content.heartbeat == session._number


@pytest.mark.parametrize("enters", [True, False])
def test_a_grant_that_a_read_finds_is_believed_when_a_later_write_was_answered(enters):
    async def main() -> None:
        server = serve(standby=True, enters=enters)
        async with Side(server) as one:
            await found_by_a_read(server, one, enters=enters)

    run(main())


async def found_by_a_read(server: RowServer, one: Side, *, enters: bool) -> None:
    await one.acquire(name="y")
    # What was entered and answered needs no more.
    writes = server.writes
    claim, _ = await one.acquire()
    assert server.writes == writes + (1 if enters else 2)
    await claim.release()
    server.away = True
    claim = one.claim()
    for _ in range(3):
        with pytest.raises(BackendUnavailable):
            await claim.acquire(wait=True)
    assert held(server) == {claim.member.id}
    assert claim.inbox.take() is None
    server.away = False
    writes = server.writes
    assert await claim.acquire(wait=True) is not None
    assert server.writes == writes + 1
    server.crash()
    assert held(server) == {claim.member.id}


@staged
async def test_a_grant_that_another_client_has_written_is_believed_after_one_flushed_write():
    server = serve(standby=True)
    async with Side(server) as one, Side(server) as two:
        first, _ = await one.acquire()
        waiting = two.claim()
        assert await waiting.acquire(wait=True) is None
        server.away = True
        with pytest.raises(BackendUnavailable):
            await first.release()
        two.backend.context.store.interrupt()
        await asyncio.sleep(TTL / 4)
        # The grant is there to be read; the releaser was warned, and reports no success.
        assert held(server) == {waiting.member.id}
        assert waiting.inbox.take() is None
        with pytest.raises(BackendUnavailable):
            await waiting.acquire(wait=True)
        server.away = False
        assert await waiting.acquire(wait=True) is not None
        server.crash()
        assert held(server) == {waiting.member.id}


@staged
async def test_a_hand_over_to_another_client_costs_one_flushed_write_more_with_a_standby():
    costs = {}
    for standby in (False, True):
        server = serve(standby=standby)
        async with Side(server) as one, Side(server) as two:
            first, _ = await one.acquire()
            waiting = two.claim()
            assert await waiting.acquire(wait=True) is None
            writes = server.writes
            await first.release()
            await waiting.inbox.wait()
            assert await waiting.acquire(wait=True) is not None
            costs[standby] = server.writes - writes
            await waiting.release()
    assert costs[True] == costs[False] + 1


@staged
async def test_a_hand_over_costs_no_write_more_where_each_flush_has_all_writes_before_it():
    costs = {}
    for in_order in (False, True):
        server = serve(in_order=in_order)
        async with Side(server) as one, Side(server) as two:
            first, _ = await one.acquire()
            waiting = two.claim()
            assert await waiting.acquire(wait=True) is None
            writes = server.writes
            await first.release()
            await waiting.inbox.wait()
            costs[in_order] = server.writes - writes
            assert await waiting.acquire(wait=True) is not None
            await waiting.release()
    assert costs[True] == costs[False]


@staged
async def test_an_own_grant_that_a_read_finds_is_believed_after_a_later_write_where_others_see_it_before_it_is_flushed():
    server = serve(in_order=True)
    async with Side(server) as one:
        await found_by_a_read(server, one, enters=False)


@staged
async def test_a_read_is_proved_by_a_write_that_was_sent_after_its_answer_on_the_same_connection():
    async with Side(serve()) as one:
        assert one.backend.context.read(doubt=False) is None
    async with Side(serve(in_order=True)) as one:
        # In the one log of a server, what others have written proves itself; an own write that was given up does not.
        assert one.backend.context.read(doubt=False) is None
        assert one.backend.context.read(doubt=True) is not None
    async with Side(serve(standby=True)) as one:
        context = one.backend.context
        before = context.flight()
        read = context.read(doubt=False)
        context.flushed(before)
        assert not context.proves(read)
        context.flushed(context.flight())
        assert context.proves(read)
        context.connection += 1
        assert not context.proves(read)
        context.flushed(context.flight())
        assert not context.proves(read)


@staged
async def test_a_grant_that_goes_lost_with_the_server_is_never_believed():
    server = serve(standby=True)
    async with Side(server) as one, Side(server) as two:
        await one.acquire()
        waiting = two.claim()
        assert await waiting.acquire(wait=True) is None
        [holder] = held(server)
        server.away = True
        with pytest.raises(BackendUnavailable):
            await two.backend.force_release("x", Family.LOCK)
        with pytest.raises(BackendUnavailable):
            await waiting.acquire(wait=True)
        assert held(server) == {waiting.member.id}
        server.crash()
        server.away = False
        assert held(server) == {holder}
        assert await waiting.acquire(wait=True) is None
        assert waiting.inbox.take() is None
        await waiting.release()


@staged
async def test_a_release_that_was_warned_is_written_again_before_it_is_one():
    server = serve(standby=True)
    async with Side(server) as one, Side(server) as two:
        claim, _ = await one.acquire()
        # A waiter makes the release a flushed one.
        waiting = two.claim()
        assert await waiting.acquire(wait=True) is None
        server.away = True
        with pytest.raises(BackendUnavailable):
            await claim.release()
        assert claim.member.id not in held(server)
        with pytest.raises(BackendUnavailable):
            await claim.release()
        server.away = False
        assert await claim.release() is not Release.NOT_HELD
        server.crash()
        assert claim.member.id not in held(server)
        await waiting.release()


@staged
async def test_a_session_whose_death_was_undone_counts_again():
    server = serve(standby=True, shared_clock=False)
    async with Side(server) as one, Side(server) as two:
        await one.acquire()
        waiting = two.claim()
        assert await waiting.acquire(wait=True) is None
        one.wire.cut = True
        await asyncio.sleep(0.8 * TTL)
        server.away = True
        await asyncio.sleep(TTL)
        assert decode_session(server.rows[one.session.key].value).dead
        server.crash()
        server.away = one.wire.cut = False
        # Its client finds a heartbeat of its own, and goes on under the same session.
        await one.acquire(name="y")
        assert not one.session.dead
        other = two.claim(name="y")
        assert await other.acquire(wait=False) is None
        await waiting.release()


@staged
async def test_a_write_of_a_register_that_a_read_finds_is_written_again():
    server = serve(standby=True)
    async with Side(server) as one:
        register = one.backend.register("r", Family.LATCH)
        stamp = await register.write(b"1", "", 60.0)
        server.away = True
        with pytest.raises(BackendUnavailable):
            await register.write(b"2", stamp, 60.0)
        with pytest.raises(BackendUnavailable):
            await register.read()
        server.away = False
        entry = await register.read()
        assert entry.value == b"2"
        writes = server.writes
        assert await register.read() == entry
        assert server.writes == writes
        server.crash()
        assert (await register.read()).value == b"2"
        await register.aclose()
