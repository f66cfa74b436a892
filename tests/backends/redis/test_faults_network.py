"""Faults of the network (N1 to N9, N12, N14), staged exactly at the frame that they hurt most."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

import aiolock
from aiolock import AcquireTimeout, BackendError, BackendUnavailable, lock_all
from aiolock.backends import transport
from tests.faults.proxy import Proxy, resp_frames
from tests.faults.redis_keys import (
    ENTERED,
    ENTERS,
    RELEASES,
    RENEWS,
    Stopwatch,
    is_grant,
    nothing_is_left,
    traces,
)
from tests.faults.staging import PATIENCE, gets_the_lock, in_line, queued, until, waiting

SOON = 8.0
"""Seconds that a loaded machine may add to what happens at once."""


@pytest.fixture
async def proxy(server) -> AsyncIterator[Proxy]:
    """A way to the server on which accidents happen."""
    async with Proxy("127.0.0.1", server.port, framing=resp_frames) as opened:
        yield opened


@pytest.fixture
def far(proxy, connect):
    """A client behind the proxy, with these options."""

    def make(**options) -> aiolock.Client:
        return connect(f"redis://127.0.0.1:{proxy.port}", **options)

    return make


def enters(frame: bytes) -> bool:
    return ENTERS in frame


def granted(frame: bytes) -> bool:
    return frame.startswith(ENTERED)


async def commands(admin, word: str) -> int:
    """How often the server has executed a command."""
    stats = await admin.info("commandstats")
    return stats.get(f"cmdstat_{word}", {}).get("calls", 0)


# --- N1, N2


async def test_n1_a_refused_connection_is_an_error_in_time(proxy, far):
    proxy.refuse = True
    since = Stopwatch()
    with pytest.raises(BackendUnavailable, match="closed the connection"):
        async with far(command_timeout=0.5):
            pass
    assert since.seconds < 0.5 + SOON


async def test_n1_a_connection_that_is_refused_for_a_while_is_tried_again(proxy, far):
    proxy.refuse = True
    opening = asyncio.create_task(far(command_timeout=20).open())
    await until(lambda: proxy.connections >= 2)
    proxy.refuse = False
    client = await opening
    async with client.lock("x"):
        pass
    await client.aclose()


async def test_n1_opening_takes_no_longer_than_it_may_although_no_step_of_it_does(proxy, far):
    # Enough for each of connecting, asking and subscribing, and too little for all of them.
    proxy.up.delay = proxy.down.delay = 0.5
    with pytest.raises(BackendUnavailable, match="did not answer everything"):
        await far(command_timeout=3).open()


async def test_n1_what_could_not_be_opened_can_be_opened_later(proxy, far):
    proxy.refuse = True
    client = far(command_timeout=1.5)
    with pytest.raises(BackendUnavailable):
        await client.open()
    proxy.refuse = False
    async with client, far() as rival:
        held = await rival.lock("x").acquire()
        waiter = asyncio.create_task(client.lock("x").acquire())
        await queued(rival.lock("x"), 1)
        await held.release()
        await (await waiter).release()


async def test_n2_a_reset_while_idle_leads_to_verification_at_once_and_keeps_the_lock(proxy, far):
    # With a ttl whose next renewal is far away.
    async with far(ttl=300) as client, client.lock("x") as lease:
        assert proxy.reset_all() == 4
        await until(lambda: client.stats()["renewals"] == 1)
        await until(lambda: lease.remaining() > 280)
        assert lease.held
        assert client.stats()["lost"] == 0


async def test_n2_a_hold_that_went_away_during_a_reset_is_lost_at_once(proxy, far, admin, namespace):
    async with far(ttl=300) as client:
        lease = await client.lock("x").acquire()
        await admin.delete(f"{namespace}:1:lock:{{x}}")
        proxy.reset_all()
        assert await lease.wait_lost() == "revoked"


async def test_n2_a_reset_while_waiting_keeps_the_place_in_line(
    proxy, far, connect, server, admin, namespace
):
    async with connect(server.url, ttl=300) as holder, far(ttl=300) as client, connect(server.url) as last:
        held = await holder.lock("x").acquire()
        waiter = asyncio.create_task(client.lock("x").acquire())
        await queued(holder.lock("x"), 1)
        newcomer = asyncio.create_task(last.lock("x").acquire())
        await queued(holder.lock("x"), 2)
        await in_line(client)
        proxy.reset_all()
        await until(lambda: proxy.connections == 4)
        await until(lambda: client._backend._mutex.wakeups.pushed)

        async def known() -> bool:
            # Until a heartbeat names the new subscription, the server takes the client for one that is not subscribed.
            fields = await admin.hgetall(f"{namespace}:1:lock:{{x}}")
            return any(b" s:2 " in value for name, value in fields.items() if name.startswith(b"p:"))

        await until(known)
        await held.release()
        lease = await waiter
        assert not newcomer.done()
        await lease.release()
        await (await newcomer).release()


# --- N3


@pytest.fixture
def unnoticed(monkeypatch):
    """No PING finds the black hole: what ends in time ends by its own time."""
    monkeypatch.setattr(transport, "PING_EVERY", 600.0)
    monkeypatch.setattr(transport, "PING_WITHIN", 600.0)


@pytest.mark.usefixtures("unnoticed")
async def test_n3_calls_into_a_black_hole_end_in_time(proxy, far):
    async with far(ttl=300, command_timeout=60) as patient, far(ttl=300, command_timeout=1.0) as client:
        held = await client.lock("held").acquire()
        proxy.blackhole()
        lock = client.lock("x")
        for call in (
            lock.try_acquire(),
            lock.acquire(),
            patient.lock("x").acquire(timeout=0.2),
            lock.inspect(),
            lock.force_release(),
            held.renew(),
            held.release(),
        ):
            since = Stopwatch()
            with contextlib.suppress(BackendUnavailable, AcquireTimeout):
                await call
            assert since.seconds < PATIENCE / 4
        proxy.heal()


@pytest.mark.usefixtures("unnoticed")
async def test_n3_a_time_that_is_over_at_once_is_a_time_for_several_locks_as_well(proxy, far):
    async with far(ttl=300, command_timeout=60) as client:
        proxy.blackhole()
        for locks in ((client.lock("a"), client.lock("b")), (client.lock("a"),)):
            since = Stopwatch()
            with pytest.raises((AcquireTimeout, BackendUnavailable)):
                await lock_all(*locks).acquire(timeout=1e-9)
            assert since.seconds < PATIENCE / 4
        proxy.heal()


# --- N4, N5


async def test_n4_a_lost_request_leaves_nothing_and_the_next_one_succeeds(proxy, far, admin, namespace):
    async with far(ttl=300) as client:
        dropped = proxy.up.drop_next(1, enters, reset=True)
        with pytest.raises(BackendUnavailable):
            await client.lock("x").acquire()
        assert dropped.is_set()
        assert (await traces(admin, namespace)).holders == 0
        await gets_the_lock(client, "x")
        await nothing_is_left(admin, namespace)


async def test_n4_a_lost_request_without_a_reset_is_given_up_in_time(proxy, far, admin, namespace):
    async with far(ttl=300, command_timeout=1.5) as client:
        proxy.up.drop_next(1, enters)
        with pytest.raises(BackendUnavailable, match="did not answer"):
            await client.lock("x").acquire()
        await nothing_is_left(admin, namespace)


@pytest.mark.parametrize("script", [RENEWS, RELEASES], ids=["renewal", "release"])
async def test_n4_lost_requests_of_a_holder_are_repeated(
    proxy, far, server, connect, admin, namespace, script
):
    async with far(ttl=3) as client, connect(server.url) as rival:
        dropped = proxy.up.drop_next(1, lambda frame: script in frame, reset=True)
        lease = await client.lock("x").acquire()
        if script is RENEWS:
            await dropped.wait()
            await until(lambda: client.stats()["renewals"] >= 2)
            await until(lambda: lease.remaining() > 2)
            assert not lease.lost
        await lease.release()
        await gets_the_lock(rival, "x")
        assert dropped.is_set()
        await nothing_is_left(admin, namespace)


async def test_n5_a_lost_grant_is_cleaned_up_at_once(proxy, far, server, connect, admin, namespace):
    # With a ttl that nobody could wait for here.
    async with far(ttl=300) as client, connect(server.url, ttl=300) as rival:
        dropped = proxy.down.drop_next(1, granted, reset=True)
        with pytest.raises(BackendUnavailable, match="not known"):
            await client.lock("x").acquire()
        assert dropped.is_set()
        await gets_the_lock(rival, "x")
        await nothing_is_left(admin, namespace)


async def test_n5_who_asks_again_after_a_lost_grant_finds_the_same_grant(
    proxy, far, server, connect, admin, namespace
):
    async with far(ttl=300) as client, connect(server.url, ttl=300) as holder:
        held = await holder.lock("x").acquire()
        waiter = asyncio.create_task(client.lock("x").acquire())
        await queued(holder.lock("x"), 1)
        # The push does not arrive, nor does the answer to the question that replaces it.
        unheard = proxy.down.drop_next(1, is_grant)
        unanswered = proxy.down.drop_next(1, granted, reset=True)
        await held.release()
        lease = await waiter
        assert unheard.is_set()
        assert unanswered.is_set()
        token, top = await admin.hmget(f"{namespace}:1:lock:{{x}}", "token", "top")
        assert int(token) == lease.token
        assert held.token < lease.token <= int(top)
        await lease.release()
        await nothing_is_left(admin, namespace)


async def test_n5_a_lost_answer_to_a_release_is_no_news_to_the_caller(proxy, far, server, connect):
    async with far(ttl=300) as client, connect(server.url, ttl=300) as rival:
        lease = await client.lock("x").acquire()
        proxy.down.drop_next(1, lambda frame: frame.startswith(b":"), reset=True)
        await lease.release()
        await gets_the_lock(rival, "x")


# --- N6, N7, N8


async def test_n6_an_answer_cut_anywhere_costs_its_connection_and_no_other_answer(
    proxy, far, admin, namespace, monkeypatch
):
    monkeypatch.setattr(transport, "LONGEST_PAUSE", 0.02)
    length = len(b"*5\r\n:1\r\n:1795258612480848\r\n:1\r\n:1795258612480848\r\n:0\r\n")
    async with far(ttl=300) as client:
        for size in range(0, length, 3):
            name = f"x{size}"
            cut = proxy.down.cut_after(size, granted)
            with pytest.raises(BackendUnavailable):
                await client.lock(name).acquire()
            assert cut.is_set()
            info = await client.lock("another").inspect()
            assert (info.name, info.holders, info.waiters) == ("another", (), ())
            await gets_the_lock(client, name)
        await nothing_is_left(admin, namespace)


async def test_n7_one_byte_at_a_time_makes_no_difference(proxy, far, admin, namespace):
    proxy.up.slices = proxy.down.slices = 1
    inside = 0

    async def worker(client: aiolock.Client) -> None:
        nonlocal inside
        for _ in range(5):
            async with client.lock("x") as lease:
                inside += 1
                assert inside == 1
                await lease.renew()
                inside -= 1

    async with far(ttl=10) as one, far(ttl=10) as two:
        await asyncio.gather(*(worker(client) for client in (one, two, one, two)))
    await nothing_is_left(admin, namespace)


async def test_n8_a_latency_of_a_third_of_the_ttl_loses_nothing(proxy, far):
    async with far(ttl=3) as client:
        proxy.up.delay = proxy.down.delay = 0.45
        async with client.lock("x") as lease:
            # Longer than the hold would have lasted without a renewal.
            await asyncio.sleep(4)
            assert lease.held
            assert client.stats()["lost"] == 0
            assert client.stats()["renewals"] >= 2
        proxy.up.delay = proxy.down.delay = 0


async def test_n8_an_answer_that_is_older_than_the_ttl_is_no_success(proxy, far, admin, namespace):
    async with far() as client:
        proxy.up.delay = proxy.down.delay = 0.3
        lock = client.lock("x", ttl=0.5)
        with pytest.raises(BackendUnavailable, match="choose a longer ttl"):
            await lock.try_acquire()
        with pytest.raises(AcquireTimeout):
            await lock.acquire(timeout=1.5)
        proxy.up.delay = proxy.down.delay = 0
        await nothing_is_left(admin, namespace)


# --- N9


async def test_n9_late_renewals_and_releases_of_a_lost_hold_change_nothing(
    proxy, far, server, connect, admin, namespace
):
    async with connect(server.url, ttl=300) as rival, far(ttl=1) as client:
        lease = await client.lock("x").acquire()
        proxy.up.blackhole()
        assert await lease.wait_lost() == "expired"
        other = await rival.lock("x").acquire()
        late = proxy.up.frames
        # A renewal at least, and the release of what was lost.
        assert late - proxy.up.delivered >= 2
        before = await admin.hgetall(f"{namespace}:1:lock:{{x}}")
        proxy.up.heal()
        await until(lambda: proxy.up.delivered >= late)
        await client.lock("another").inspect()
        assert await admin.hgetall(f"{namespace}:1:lock:{{x}}") == before
        assert other.held
        await other.release()


async def test_n9_a_request_that_arrives_after_it_was_given_up_gets_nothing(
    proxy, far, admin, namespace, server, connect
):
    held_back, go_on = asyncio.Event(), asyncio.Event()

    async def hold_back(direction: str, frame: bytes) -> None:
        if ENTERS in frame and not held_back.is_set():
            held_back.set()
            await go_on.wait()

    async with far(ttl=300) as client, connect(server.url) as rival:
        proxy.on_frame = hold_back
        asking = asyncio.create_task(client.lock("x").acquire())
        await held_back.wait()
        # Our side of the connection breaks, the packet is still on its way; who asked gives up by another connection.
        proxy.reset_all(proxy.up)
        with pytest.raises(BackendUnavailable):
            await asking

        async def has_tombstone() -> bool:
            return (await traces(admin, namespace)).graves == 1

        await until(has_tombstone)
        arrived = await commands(admin, "evalsha")
        go_on.set()

        async def late() -> bool:
            return await commands(admin, "evalsha") > arrived

        await until(late)
        found = await traces(admin, namespace)
        assert found.clean
        assert found.graves == 1
        await gets_the_lock(rival, "x")


# --- N12, N14


async def test_n12_no_hand_over_is_lost_when_the_subscription_is_killed_each_time(
    server, admin, connect, namespace
):
    async with connect(server.url, ttl=300) as one, connect(server.url, ttl=300) as two:
        lease = await one.lock("x").acquire()
        worst = 0.0
        for turn in range(20):
            client = (two, one)[turn % 2]
            waiter = asyncio.create_task(client.lock("x").acquire())
            await waiting(client, 1)
            await queued(client.lock("x"), 1)
            await admin.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
            since = Stopwatch()
            await lease.release()
            lease = await waiter
            worst = max(worst, since.seconds)
        await lease.release()
        assert worst < 1 + SOON
        await nothing_is_left(admin, namespace)


@pytest.mark.parametrize(
    "error",
    [
        AttributeError("'NoneType' object has no attribute '_add_writer'"),
        RuntimeError("the handler is closed"),
    ],
    ids=repr,
)
async def test_n14_whatever_a_transport_raises_is_an_error_of_the_backend(server, connect, error):
    class Broken:
        def __init__(self, transport) -> None:
            self._transport = transport

        def write(self, data: bytes) -> None:
            raise error

        def __getattr__(self, name: str):
            return getattr(self._transport, name)

    async with connect(server.url, ttl=2) as client, client.lock("held") as lease:
        connection, subscriber = client._backend._server.connection, client._backend._server.subscriber
        connection._transport = Broken(connection._transport)
        with pytest.raises(BackendError) as caught:
            await client.lock("x").acquire()
        assert caught.value.__cause__ is error
        # The renewal scheduler survives it as well.
        await until(lambda: connection.state is subscriber.state is transport.ConnectionState.READY)
        connection._transport = Broken(connection._transport)
        subscriber._transport = Broken(subscriber._transport)
        subscriber._ping(subscriber._transport)
        renewals = client.stats()["renewals"]
        await until(lambda: client.stats()["renewals"] > renewals + 1)
        await until(lambda: lease.remaining() > 1)
        assert lease.held
        await gets_the_lock(client, "x")
