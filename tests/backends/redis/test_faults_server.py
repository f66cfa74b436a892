"""Faults of the server (R1, R2, R6, R7, R9, R11, R13, R18): frozen, restarted, full, tampered with."""

from __future__ import annotations

import asyncio
import contextlib
import operator

import pytest
import redis.asyncio

from aiolock import AcquireTimeout, BackendError, BackendRefused, BackendUnavailable
from aiolock.backends.redis import waiting as waiting_module
from tests.contract.deployments import least_rights
from tests.faults.redis_keys import Stopwatch, nothing_is_left, traces
from tests.faults.staging import gets_the_lock, in_line, queued, until, waiting
from tests.servers import Redis

SOON = 8.0
"""Seconds that a loaded machine may add to what happens at once."""


def key(namespace: str, name: str = "x") -> str:
    return f"{namespace}:1:lock:{{{name}}}"


# --- R1, R18: frozen


@contextlib.contextmanager
def frozen(server: Redis):
    server.freeze()
    try:
        yield
    finally:
        server.thaw()


async def test_r1_a_frozen_server_costs_no_call_more_than_its_timeout_and_the_holder_is_told(
    mortal, master, connect, namespace
):
    async with connect(mortal.url, ttl=2, command_timeout=1.0) as client:
        lock = client.lock("x")
        held = await client.lock("held").acquire()
        with frozen(mortal):
            for call in (
                held.renew(),
                lock.try_acquire(),
                lock.acquire(),
                lock.acquire(timeout=0.3),
                lock.locked(),
            ):
                since = Stopwatch()
                with pytest.raises((BackendUnavailable, AcquireTimeout)):
                    await call
                assert since.seconds < 1 + SOON
            assert await held.wait_lost() == "expired"
            since = Stopwatch()
            await held.release()
            assert since.seconds < 1 + SOON
        # What the server executes now, late, leaves nothing.
        await nothing_is_left(master, namespace)
        await gets_the_lock(client, "x")
        await gets_the_lock(client, "held")


async def test_r1_waiters_survive_a_frozen_server(mortal, connect):
    async with connect(mortal.url, ttl=5, command_timeout=1.0) as one, connect(mortal.url, ttl=5) as two:
        held = await one.lock("x").acquire()
        waiter = asyncio.create_task(two.lock("x").acquire())
        await queued(one.lock("x"), 1)
        await in_line(two)
        with frozen(mortal):
            await asyncio.sleep(1.2)
            assert not waiter.done()
        await held.release()
        await (await waiter).release()


async def test_r18_what_a_client_asked_of_a_frozen_server_before_it_left_leaves_nothing(
    mortal, master, connect, namespace
):
    async with connect(mortal.url, ttl=300, command_timeout=1.0) as client:
        with frozen(mortal):
            with pytest.raises(BackendUnavailable):
                await client.lock("asked").acquire()
            cancelled = asyncio.create_task(client.lock("cancelled").acquire())
            await asyncio.sleep(0.05)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            since = Stopwatch()
            await client.aclose()
            assert since.seconds < 1 + SOON
    await nothing_is_left(master, namespace)


# --- R2: restarted


async def test_r2_a_restart_that_forgets_everything_is_told_and_lived_with(
    mortal, connect, namespace, monkeypatch
):
    # Nobody waits for a heartbeat to come back into line.
    monkeypatch.setattr(waiting_module, "PERIOD", 100.0)
    async with connect(mortal.url, ttl=300) as one, connect(mortal.url, ttl=300) as two:
        held = [await one.lock(f"x{n}").acquire() for n in range(5)]
        waiters = [asyncio.create_task(two.lock(f"x{n}").acquire()) for n in range(5)]
        await waiting(two, 5)
        for n in range(5):
            await queued(one.lock(f"x{n}"), 1)
        await in_line(two, 5)
        mortal.kill()
        mortal.restart()
        # Nobody is restarted, nobody asks anew, and no ttl has to end.
        for old, waiter in zip(held, waiters, strict=True):
            assert await old.wait_lost() == "revoked"
            new = await waiter
            assert new.token > old.token
            await new.release()
        async with redis.asyncio.Redis(port=mortal.port) as master:
            await nothing_is_left(master, namespace)


async def test_r2_a_server_that_is_away_for_longer_than_the_ttl_costs_the_hold_and_no_waiter(mortal, connect):
    async with (
        connect(mortal.url, ttl=2, command_timeout=1.0) as one,
        connect(mortal.url, ttl=300, command_timeout=1.0) as two,
    ):
        held = await one.lock("x").acquire()
        waiter = asyncio.create_task(two.lock("x").acquire())
        await queued(one.lock("x"), 1)
        await in_line(two)
        mortal.kill()
        assert await held.wait_lost() == "expired"
        # Longer than any command may take.
        await asyncio.sleep(1.2)
        assert not waiter.done()
        with pytest.raises(BackendUnavailable, match="nothing listens there"):
            await one.lock("y").acquire()
        mortal.restart()
        lease = await waiter
        assert lease.token > held.token
        await lease.release()


async def test_r2_a_restart_that_remembers_is_no_loss(connect, namespace):
    with Redis(appendonly=True, extra=("--appendfsync", "always")) as lasting:
        async with connect(lasting.url, ttl=300) as one, connect(lasting.url, ttl=300) as two:
            assert "survives-restart" in one.capabilities
            held = await one.lock("x").acquire()
            waiter = asyncio.create_task(two.lock("x").acquire())
            await queued(one.lock("x"), 1)
            await in_line(two)
            lasting.kill()
            lasting.restart()
            await until(lambda: one.stats()["renewals"] >= 1 and held.remaining() > 280)
            await until(lambda: two._backend._server.subscriber.subscribed)
            assert not held.lost
            assert not waiter.done()
            await held.release()
            lease = await waiter
            assert lease.token > held.token
            await lease.release()


# --- R6, R7


async def test_r6_forgotten_scripts_cost_nothing(server, admin, connect, namespace):
    async with connect(server.url, ttl=4) as one, connect(server.url, ttl=4) as two:
        held = await one.lock("x").acquire()
        waiter = asyncio.create_task(two.lock("x").acquire())
        await queued(one.lock("x"), 1)
        renewals = one.stats()["renewals"]
        for _ in range(20):
            await admin.script_flush()
            await asyncio.sleep(0.1)
        assert one.stats()["renewals"] > renewals
        assert one.stats()["lost"] == one.stats()["renewal_failures"] == 0
        assert held.held
        await admin.script_flush()
        await held.release()
        await (await waiter).release()
        await admin.script_flush()
        assert not await one.lock("x").locked()
        await nothing_is_left(admin, namespace)


@pytest.mark.parametrize("kind", ["normal", "pubsub"])
async def test_r7_killed_connections_cost_neither_hold_nor_place(server, admin, connect, namespace, kind):
    async with connect(server.url, ttl=300) as one, connect(server.url, ttl=300) as two:
        held = await one.lock("x").acquire()
        waiter = asyncio.create_task(two.lock("x").acquire())
        await queued(one.lock("x"), 1)
        await in_line(two)
        which = "connection" if kind == "normal" else "subscriber"
        lines = [getattr(each._backend._server, which) for each in (one, two)]
        for _ in range(3):
            before = [line.generation for line in lines]
            await admin.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
            # Both know of it, and have another one.
            await until(
                lambda before=before: all(map(operator.gt, (line.generation for line in lines), before))
            )
            await until(lambda: all(each._backend._mutex.wakeups.pushed for each in (one, two)))
        await held.renew()
        assert held.held
        await queued(one.lock("x"), 1)
        await held.release()
        since = Stopwatch()
        await (await waiter).release()
        assert since.seconds < 2 + SOON
        await nothing_is_left(admin, namespace)


async def test_r7_a_pause_shorter_than_the_ttl_costs_nothing(mortal, master, connect):
    async with connect(mortal.url, ttl=6) as one, connect(mortal.url, ttl=6) as two:
        held = await one.lock("x").acquire()
        waiter = asyncio.create_task(two.lock("x").acquire())
        await queued(one.lock("x"), 1)
        await master.execute_command("CLIENT", "PAUSE", "1500", "ALL")
        await held.release()
        await (await waiter).release()
        assert one.stats()["lost"] == two.stats()["lost"] == 0


# --- R9: full


async def test_r9_a_full_server_refuses_newcomers_and_lets_everybody_else_go_on(
    mortal, master, connect, namespace
):
    async with connect(mortal.url, ttl=4) as one, connect(mortal.url, ttl=300) as two:
        held, other = await one.lock("x").acquire(), await one.lock("y").acquire()
        waiter = asyncio.create_task(two.lock("x").acquire())
        leaver = asyncio.create_task(two.lock("y").acquire())
        await queued(one.lock("x"), 1)
        await queued(one.lock("y"), 1)
        await master.config_set("maxmemory", "1")
        for lock in (one.lock("new"), two.lock("new")):
            with pytest.raises(BackendRefused, match="maxmemory") as refused:
                await lock.acquire()
            assert refused.value.retryable
        # Renewed by itself, for longer than its ttl.
        renewals = one.stats()["renewals"]
        await until(lambda: one.stats()["renewals"] > renewals + 4)
        assert held.held
        assert one.stats()["lost"] == 0
        # A place is left, a hold given back, and handed on.
        leaver.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaver
        await other.release()
        await held.release()
        await (await waiter).release()
        # Somebody who opens a client now is told the same, when there is something to tell.
        async with connect(mortal.url) as late:
            with pytest.raises(BackendRefused, match="maxmemory"):
                await late.lock("x").try_acquire()
        await nothing_is_left(master, namespace)
        # Nothing is kept for later, either: not even of the requests that were refused.
        assert not one._backend.claims
        assert not two._backend.claims
        await master.config_set("maxmemory", "0")
        await gets_the_lock(one, "new")


async def test_r9_a_request_given_up_on_a_full_server_is_cleaned_up_at_once(
    mortal, master, connect, namespace
):
    async with connect(mortal.url, ttl=300) as client:
        await master.config_set("maxmemory", "1")
        asking = asyncio.create_task(client.lock("x").acquire())
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: client._backend.claims == {})
        assert (await traces(master, namespace)).clean


# --- R11: rights


COMMANDS = (
    "evalsha",
    "eval",
    "hmget",
    "hget",
    "hgetall",
    "hset",
    "hdel",
    "hexists",
    "pexpire",
    "pttl",
    "time",
)
CHANNELS = ("&aiolock:*", "+publish", "+subscribe")


@pytest.fixture(scope="module")
def guarded():
    """A server whose users lack one of the documented rights each."""
    lacking = [
        "",
        "~aiolock:*",
        "+info",
        "+scan",
        "+pubsub|numsub",
        *CHANNELS,
        *(f"+{command}" for command in COMMANDS),
    ]
    users = ["user default on nopass ~* &* +@all"]
    users += [least_rights(f"without{n}", "f*", without=right) for n, right in enumerate(lacking)]
    with Redis(users=users) as running:
        running.lacking = {
            right: f"redis://without{n}:password@127.0.0.1:{running.port}" for n, right in enumerate(lacking)
        }
        yield running


def test_r11_every_documented_right_is_in_this_table(guarded):
    rights = [word for word in least_rights("u", "f*").split() if word[0] in "+~&"]
    documented = {{"~f*": "~aiolock:*", "&f*": "&aiolock:*"}.get(right, right) for right in rights}
    assert documented == guarded.lacking.keys() - {""}


@pytest.mark.parametrize("right", ["~aiolock:*", *(f"+{command}" for command in COMMANDS)])
async def test_r11_a_right_that_locks_need_is_missed_at_open(guarded, connect, namespace, right):
    with pytest.raises(BackendRefused) as refused:
        async with connect(guarded.lacking[right]):
            pass
    message = str(refused.value)
    assert right[1:] in message.lower() or (right[0] == "~" and "keys" in message)
    assert not refused.value.retryable
    async with redis.asyncio.Redis(port=guarded.port) as overseer:
        assert (await traces(overseer, namespace)).keys == 0


@pytest.mark.parametrize("right", CHANNELS)
async def test_r11_without_channels_waiting_is_by_asking(guarded, connect, namespace, caplog, right):
    async with (
        connect(guarded.lacking[right], ttl=300) as one,
        connect(guarded.lacking[right], ttl=300) as two,
    ):
        assert "push" not in one.capabilities
        assert "every 100 ms" in caplog.text
        held = await one.lock("x").acquire()
        waiter = asyncio.create_task(two.lock("x").acquire())
        await queued(one.lock("x"), 1)
        await held.release()
        since = Stopwatch()
        lease = await waiter
        assert since.seconds < SOON
        assert lease.token > held.token
        await lease.release()


async def test_r11_without_info_nothing_is_promised_that_is_not_known(guarded, connect, caplog):
    async with connect(guarded.lacking["+info"]) as client:
        assert not client.capabilities & {"no-eviction", "survives-restart"}
        assert "not known" in caplog.text
        async with client.lock("x"):
            pass


async def test_r11_rights_taken_away_later_are_an_error_with_a_sentence(connect, namespace):
    users = ("user default on nopass ~* &* +@all", least_rights("app", "f*"))
    with Redis(users=users) as guarded:
        async with (
            redis.asyncio.Redis(port=guarded.port) as overseer,
            connect(f"redis://app:password@127.0.0.1:{guarded.port}", ttl=300) as client,
        ):
            held = await client.lock("held").acquire()
            await overseer.acl_setuser("app", enabled=True, commands=["-hset"])
            with pytest.raises(BackendRefused, match="account may not"):
                await client.lock("x").acquire()
            await overseer.acl_setuser("app", enabled=True, commands=["-evalsha"])
            with pytest.raises(BackendRefused, match="grant it what locks need"):
                await client.lock("x").acquire()
            assert held.held
            await overseer.acl_setuser("app", enabled=True, commands=["+hset", "+evalsha"])
            await held.renew()
            await held.release()
            await nothing_is_left(overseer, namespace)


# --- R13: tampered with


async def test_r13_a_deleted_key_is_a_lost_lock(server, admin, connect, namespace):
    async with connect(server.url, ttl=1) as client:
        lease = await client.lock("x").acquire()
        await admin.delete(key(namespace))
        assert await lease.wait_lost() == "revoked"
        newer = await client.lock("x").acquire()
        assert newer.token > lease.token
        await newer.release()


async def test_r13_deleting_the_key_brings_waiters_back_into_line(server, admin, connect, namespace):
    async with connect(server.url, ttl=1) as one, connect(server.url, ttl=1) as two:
        held = await one.lock("x").acquire()
        waiter = asyncio.create_task(two.lock("x").acquire())
        await queued(one.lock("x"), 1)
        await admin.delete(key(namespace))
        lease = await waiter
        assert await held.wait_lost() == "revoked"
        assert lease.token > held.token
        await lease.release()


async def test_r13_a_key_of_another_type_is_an_error_for_its_lock_alone(server, admin, connect, namespace):
    async with connect(server.url, ttl=4) as one, connect(server.url, ttl=4) as two:
        locks = [one.lock(f"x{n}") for n in range(10)]
        leases = [await lock.acquire() for lock in locks]
        waiters = [asyncio.create_task(two.lock(f"x{n}").acquire()) for n in range(10)]
        for lock in locks:
            await queued(lock, 1)
        await admin.set(key(namespace, "x3"), "somebody else's")
        # Renewals and heartbeats of many locks travel together, and only one of them has lost anything.
        assert await leases[3].wait_lost() == "revoked"
        with pytest.raises(BackendRefused, match="choose another namespace"):
            await waiters[3]
        for call in (
            locks[3].acquire(),
            locks[3].try_acquire(),
            locks[3].inspect(),
            locks[3].force_release(),
        ):
            with pytest.raises(BackendRefused, match="choose another namespace"):
                await call
        others = leases[:3] + leases[4:]
        renewals = one.stats()["renewals"]
        await until(lambda: one.stats()["renewals"] >= renewals + len(others))
        assert all(lease.held for lease in others)
        assert one.stats()["lost"] == 1
        assert one.stats()["renewal_failures"] == 0
        for lease in others:
            await lease.release()
        for waiter in waiters[:3] + waiters[4:]:
            await (await waiter).release()
        assert await admin.get(key(namespace, "x3")) == b"somebody else's"
        await admin.delete(key(namespace, "x3"))
        await gets_the_lock(two, "x3")


async def test_r13_a_key_that_was_made_lasting_expires_again(server, admin, connect, namespace):
    async with connect(server.url, ttl=1) as client:
        lease = await client.lock("x").acquire()
        await admin.persist(key(namespace))
        await lease.renew()
        assert 0 < await admin.pttl(key(namespace)) <= 61_000
        # One that was made short does not cost the hold, either.
        await admin.pexpire(key(namespace), 5_000)
        await lease.renew()
        assert await admin.pttl(key(namespace)) > 50_000
        await lease.release()


async def test_r13_an_owner_written_by_somebody_else_is_a_lost_lock(server, admin, connect, namespace):
    async with connect(server.url, ttl=1) as client:
        lease = await client.lock("x").acquire()
        await admin.hset(key(namespace), "owner", "0:1")
        assert await lease.wait_lost() == "revoked"
        await lease.release()
        assert await admin.hget(key(namespace), "owner") == b"0:1"


async def test_flushing_everything_is_told_to_every_holder(server, connect, namespace):
    async with redis.asyncio.Redis(port=server.port) as overseer, connect(server.url, ttl=1) as client:
        leases = [await client.lock(f"x{n}").acquire() for n in range(20)]
        await overseer.flushall()
        for lease in leases:
            assert await lease.wait_lost() == "revoked"
        await gets_the_lock(client, "x0")


async def test_errors_of_the_server_are_errors_of_the_library(mortal, master, connect):
    async with connect(mortal.url, ttl=5) as client:
        await master.config_set("min-replicas-to-write", "3")
        with pytest.raises(BackendRefused, match="too few replicas") as refused:
            await client.lock("x").acquire()
        assert refused.value.retryable
        assert isinstance(refused.value, BackendError)
        await master.config_set("min-replicas-to-write", "0")
        await gets_the_lock(client, "x")
