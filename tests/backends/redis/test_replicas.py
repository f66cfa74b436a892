"""Grants that count once replicas have them: real primaries and replicas, which stop, and take over."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import redis
import redis.asyncio

import aiolock
from aiolock import BackendRefused, BackendUnavailable, ConfigError, LockLost, UnsafeBackend
from aiolock.backends.redis.replicas import Barriers, patience
from aiolock.backends.redis.run_id import RunId
from aiolock.backends.redis.url import Endpoint
from aiolock.backends.transport import ConnectionState
from aiolock.core.capabilities import diagnose
from aiolock.types import Finding, Level
from tests.backends.redis.test_same_server import Balanced
from tests.backends.redis.test_sentinel import Watched
from tests.contract.deployments import least_rights
from tests.faults.staging import PATIENCE, passes, queued, until
from tests.servers import Redis

AT_ONCE = "--repl-diskless-sync-delay", "0"
"""A replica is there at once."""
USERS = [
    "user default on nopass ~* &* +@all",
    f"{least_rights('least', 'f*')} +wait",
    least_rights("without", "f*"),
    f"{least_rights('blind', 'f*', without='+info')} +wait",
]
FEW = "of replicas=1 have confirmed"


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Redis, Redis]]:
    """A primary and its replica, which goes on at the end of each test."""
    with Redis(users=USERS, extra=AT_ONCE) as primary, Redis(users=USERS, extra=AT_ONCE) as replica:
        replica.follow(primary)
        yield primary, replica


@contextlib.contextmanager
def silent(replica: Redis) -> Iterator[None]:
    """A replica that stands still."""
    replica.freeze()
    try:
        yield
    finally:
        replica.thaw()


Connect = Callable[..., contextlib.AbstractAsyncContextManager[aiolock.Client]]


@pytest.fixture
def join(pair, namespace) -> Connect:
    """A client of the primary for which a replica has to confirm."""
    return functools.partial(
        aiolock.connect, f"{pair[0].url}?replicas=1", namespace=namespace, ttl=30, command_timeout=20.0
    )


@pytest.fixture
async def plain(pair, namespace) -> AsyncIterator[aiolock.Client]:
    """A client of the primary for which its answer counts."""
    async with aiolock.connect(pair[0].url, namespace=namespace, ttl=30, command_timeout=20.0) as client:
        yield client


async def held(lock: Any) -> bool:
    return bool((await lock.inspect()).holders)


# --- what waits for a barrier

KINDS: dict[str, Callable[[aiolock.Client], Any]] = {
    "mutex": lambda client: client.lock("mutex"),
    "fair": lambda client: client.lock("fair", fair=True),
    "not renewed": lambda client: client.lock("not renewed", renew=False),
    "reentrant": lambda client: client.reentrant_lock("reentrant"),
    "read": lambda client: client.rwlock("read").read(),
    "write": lambda client: client.rwlock("write").write(),
    "semaphore": lambda client: client.semaphore("semaphore", 2),
    "election": lambda client: client.election("election").campaign(value=b"me"),
    "several": lambda client: aiolock.lock_all(client.lock("several"), client.lock("others")),
}


async def test_no_grant_of_any_kind_is_entered_before_a_replica_has_it(pair, join, plain):
    async def enter(lock: Any) -> None:
        async with lock:
            pass

    async with join() as client:
        with silent(pair[1]):
            entering = {name: asyncio.create_task(enter(lock(client))) for name, lock in KINDS.items()}
            entering["tried"] = asyncio.create_task(client.lock("tried").try_acquire())
            for name in ("mutex", "fair", "tried", "not renewed", "reentrant", "several"):
                await until(lambda name=name: held(plain.lock(name)))
            for lock in (
                plain.rwlock("read").read(),
                plain.rwlock("write").write(),
                plain.semaphore("semaphore", 2),
                plain.election("election").campaign(),
            ):
                await until(lambda lock=lock: held(lock))
            await asyncio.sleep(0.2)
            assert [name for name, task in entering.items() if task.done()] == []
        async with asyncio.timeout(PATIENCE):
            await asyncio.gather(*entering.values())
        await entering["tried"].result().release()


async def test_a_pushed_grant_is_entered_after_its_confirmation_and_a_barrier(pair, join, plain):
    async with join() as client:
        before = await plain.lock("x").acquire()
        entering = asyncio.create_task(client.lock("x").acquire())
        await queued(plain.lock("x"), 1)
        with silent(pair[1]):
            await before.release()

            async def confirmed() -> bool:
                [holder] = (await plain.lock("x").inspect()).holders
                return holder.remaining > 20

            # The window of a pushed grant is a tenth of the ttl.
            await until(confirmed)
            await asyncio.sleep(0.1)
            assert not entering.done()
        async with asyncio.timeout(PATIENCE):
            lease = await entering
        assert lease.token > before.token
        await lease.release()


async def test_hand_overs_inside_ask_nothing(pair, join):
    async with join() as client:
        # The first grant of a name has one token.
        async with client.lock("x"):
            pass
        first = await client.lock("x").acquire()
        second = asyncio.create_task(client.lock("x").acquire())
        await until(lambda: client.stats()["waiting"] == 1)
        with silent(pair[1]):
            await first.release()
            lease = await second
            assert lease.held
            assert client.stats()["passed"] == 1
        await lease.release()


async def test_another_life_and_a_kept_lock_wait_for_a_barrier(pair, join, plain):
    async with join(command_timeout=1.0) as client:
        lease = await client.lock("x", renew=False).acquire()
        kept = await client.lock("kept").acquire()
        with silent(pair[1]):
            with pytest.raises(BackendUnavailable, match=FEW):
                await lease.extend(60)
            assert lease.remaining() < 31
            begun = time.monotonic()
            # It goes on in the background.
            await kept.release(keep=30)
            assert time.monotonic() - begun > 0.4
            assert (await plain.lock("kept").inspect()).kept
        await lease.extend(60)
        assert lease.remaining() > 50
        await lease.release()


async def test_a_downgrade_prolongs_nothing_before_its_renewal(pair, join, plain):
    async with join() as client:
        lease = await client.rwlock("x").write().acquire()
        await asyncio.sleep(0.2)
        end = time.monotonic() + lease.remaining()
        with silent(pair[1]):
            await lease.downgrade()
            assert time.monotonic() + lease.remaining() < end + 0.1
            reader = await plain.rwlock("x").read().acquire()
        await reader.release()
        await lease.release()


# --- too few


async def test_a_grant_that_too_few_confirm_is_given_back_and_the_next_waiter_is_served(pair, join, plain):
    async with join(command_timeout=0.8) as client, join(command_timeout=20.0) as slow:
        with silent(pair[1]):
            entering = asyncio.create_task(client.lock("x").acquire())
            await until(lambda: held(plain.lock("x")))
            [holder] = (await plain.lock("x").inspect()).holders
            waiting = asyncio.create_task(plain.lock("x").acquire())
            begun = time.monotonic()
            with pytest.raises(BackendUnavailable, match=rf"0 {FEW}") as caught:
                await entering
            assert caught.value.retryable
            async with asyncio.timeout(PATIENCE):
                lease = await waiting
            # Not after the ttl.
            assert time.monotonic() - begun < 20
            assert lease.token > holder.token
            await lease.release()
            later = asyncio.create_task(slow.lock("x").acquire())
            await until(lambda: held(plain.lock("x")))
        async with asyncio.timeout(PATIENCE):
            third = await later
        assert third.token > lease.token
        await third.release()
        async with client.lock("x", timeout=PATIENCE):
            pass


async def test_who_waits_goes_on_waiting_until_replicas_answer(pair, join, plain):
    async with join(command_timeout=0.5) as client:
        before = await plain.lock("x").acquire()
        entering = asyncio.create_task(client.lock("x").acquire())
        await queued(plain.lock("x"), 1)
        with silent(pair[1]):
            await before.release()
            tokens: set[int] = set()

            async def again() -> bool:
                tokens.update(holder.token for holder in (await plain.lock("x").inspect()).holders)
                return len(tokens) > 1

            # It was granted the lock, gave it back, and was granted it again.
            await until(again)
            assert not entering.done()
        async with asyncio.timeout(PATIENCE):
            lease = await entering
        assert lease.token >= max(tokens)
        await lease.release()


async def test_a_hold_whose_renewals_nobody_confirms_is_lost_in_time(pair, join, plain):
    async with join(ttl=1.5, command_timeout=0.5) as client:
        ended: list[float] = []

        async def hold() -> None:
            try:
                async with client.lock("x"):
                    inside.set()
                    await asyncio.sleep(PATIENCE)
            finally:
                ended.append(time.monotonic())

        inside = asyncio.Event()
        holding = asyncio.create_task(hold())
        await inside.wait()
        with silent(pair[1]):
            # The server keeps the lock for as long as it gets renewals, and is told of the loss.
            async with plain.lock("x", timeout=PATIENCE):
                entered = time.monotonic()
            with pytest.raises(LockLost, match="expired"):
                await holding
        assert ended[0] < entered


# --- failovers


@contextlib.contextmanager
def following() -> Iterator[tuple[Redis, Redis]]:
    with Redis(extra=AT_ONCE) as primary, Redis(extra=AT_ONCE) as replica:
        replica.follow(primary)
        yield primary, replica


def cut(replica: Redis, primary: Redis) -> None:
    """What is written from now on is not copied."""
    with redis.Redis(port=primary.port) as admin:
        assert admin.wait(1, 5000) == 1
        replica.freeze()
        admin.client_kill_filter(_type="replica")


def promote(replica: Redis, primary: Redis) -> None:
    """The primary is lost with all that the replica has not."""
    primary.kill()
    replica.thaw()
    with redis.Redis(port=replica.port) as client:
        client.replicaof("NO", "ONE")


@pytest.mark.parametrize("replicas", [0, 1])
async def test_a_failover_that_loses_writes_makes_two_holders_only_without_replicas(replicas, namespace):
    with following() as (primary, replica):
        async with aiolock.connect(
            primary.url, replicas=replicas, namespace=namespace, ttl=30, command_timeout=1.0
        ) as client:
            known = await client.lock("known").acquire()
            cut(replica, primary)
            if replicas:
                with pytest.raises(BackendUnavailable, match=FEW):
                    await client.lock("x").acquire()
            else:
                first = await client.lock("x").acquire()
            promote(replica, primary)
            async with aiolock.connect(replica.url, namespace=namespace) as other:
                assert await other.lock("known").try_acquire() is None
                second = await other.lock("x").try_acquire()
                assert second is not None
                assert second.held
                assert known.held
                if not replicas:
                    assert first.held, "the overlap that replicas= is for"


async def test_a_renewal_that_was_not_copied_is_not_believed_beside_the_next_holder(namespace):
    with following() as (primary, replica):
        async with aiolock.connect(
            primary.url, replicas=1, namespace=namespace, ttl=2, command_timeout=2.0
        ) as client:
            lease = await client.lock("x").acquire()
            cut(replica, primary)
            await until(lambda: client.stats()["renewals"] >= 1)
            promote(replica, primary)
            async with (
                aiolock.connect(replica.url, namespace=namespace) as other,
                other.lock("x", timeout=PATIENCE),
            ):
                assert not lease.held


class TwoReplicas(Watched):
    replicas = 2


async def test_what_a_replica_has_confirmed_outlives_a_primary_that_sentinels_replace(namespace):
    with contextlib.ExitStack() as stack:
        first, second, third = (stack.enter_context(Redis(extra=AT_ONCE)) for _ in range(3))
        third.follow(first)
        sentinels = [stack.enter_context(Redis(sentinel=True)) for _ in range(3)]
        watched = TwoReplicas(first, second, sentinels)
        async with aiolock.connect(
            f"{watched.url}?replicas=1", namespace=namespace, ttl=60, command_timeout=5.0
        ) as client:
            lease = await client.lock("x").acquire()
            first.kill()
            async with asyncio.timeout(PATIENCE):
                # Renewed where it was copied to, and confirmed by the other replica, which follows there.
                while True:
                    with contextlib.suppress(BackendUnavailable):
                        await lease.renew()
                        break
            assert lease.held
            async with client.lock("y", timeout=PATIENCE) as other:
                assert other.held
            await lease.release()
            assert client.stats()["lost"] == 0


# --- one server


async def test_a_barrier_at_another_server_than_the_commands_confirms_nothing(namespace):
    """The name has moved, and the connection of the barriers has followed it: there is a replica there, and none here."""
    with Redis(extra=AT_ONCE) as earlier, following() as (primary, _):
        async with (
            Balanced(earlier.port, earlier.port, primary.port) as name,
            aiolock.connect(
                f"{name.url()}?replicas=1", namespace=namespace, ttl=30, command_timeout=1.0
            ) as client,
        ):
            # Commands and messages are at the earlier primary.
            assert (name.at(earlier), name.at(primary)) == (2, 1)
            name.lead(primary.port)
            with pytest.raises(BackendUnavailable, match=r"another server|made anew"):
                await client.lock("x").acquire()
            name.lead(earlier.port)
            # Back together, where there is no replica.
            await until(lambda: name.at(earlier) == 3)
            with pytest.raises(BackendUnavailable, match=rf"0 {FEW}|another server"):
                await client.lock("x").acquire()


async def test_barriers_follow_the_commands_to_another_server(namespace):
    with following() as (earlier, _), following() as (primary, _):
        async with (
            Balanced(earlier.port) as name,
            aiolock.connect(
                f"{name.url()}?replicas=1", namespace=namespace, ttl=30, command_timeout=5.0
            ) as client,
        ):
            async with client.lock("x"):
                pass
            name.lead(primary.port)
            earlier.kill()
            async with asyncio.timeout(PATIENCE):
                while True:
                    with contextlib.suppress(BackendUnavailable):
                        await (await client.lock("x").acquire(timeout=5)).release()
                        break
            assert name.at(primary) == 3


# --- rights, options, diagnosis


async def test_the_least_rights_and_wait_are_enough(pair, namespace):
    url = f"redis://least:password@127.0.0.1:{pair[0].port}/0?replicas=1"
    async with aiolock.connect(url, namespace=namespace) as client, client.lock("x") as lease:
        assert lease.held


@pytest.mark.parametrize(("user", "right"), [("without", r"\+wait"), ("blind", r"\+info")])
async def test_an_account_that_cannot_have_grants_confirmed_is_refused(pair, namespace, user, right):
    url = f"redis://{user}:password@127.0.0.1:{pair[0].port}/0?replicas=1"
    with pytest.raises(UnsafeBackend, match=rf"replicas=1 needs .*{right}"):
        await aiolock.connect(url, namespace=namespace).open()


def test_what_is_no_number_of_replicas_is_refused():
    for value in ("-1", "many", True, 1.5, 1000):
        with pytest.raises(ConfigError, match="replicas must be a number from 0 to 100"):
            aiolock.connect("redis://h", replicas=value)
    with pytest.raises(ConfigError, match="given twice"):
        aiolock.connect("redis://h?replicas=1", replicas=2)
    for scheme in ("redis+sentinel://h:26379/service", "redis+cluster://h", "rediss://h", "unix:///s"):
        client = aiolock.connect(scheme, replicas=2)
        assert client._runtime.backend._server.endpoint.replicas == 2


async def test_an_own_client_and_each_server_of_a_quorum_have_replicas_too(pair, namespace):
    async with redis.asyncio.Redis(port=pair[0].port) as own:
        async with (
            aiolock.connect(own, replicas=1, namespace=namespace) as client,
            client.lock("x") as lease,
        ):
            assert lease.held
        with pytest.raises(ConfigError, match="replicas must be"):
            aiolock.connect(own, replicas="x")
    with Redis() as second, Redis() as third:
        urls = [f"{pair[0].url}?replicas=1", f"{second.url}?replicas=1", third.url]
        async with aiolock.connect(urls, namespace=namespace, command_timeout=1.0) as client:
            # One server grants it, and one with its replica: the third has none, and no vote.
            async with client.lock("x", timeout=PATIENCE) as lease:
                assert lease.held
            with silent(pair[1]), pytest.raises(BackendUnavailable):
                await client.lock("x").acquire()


async def test_the_doctor_says_how_many_replicas_answer(pair, namespace, caplog):
    async def found(replicas: int) -> Finding:
        client = aiolock.connect(pair[0].url, replicas=replicas, namespace=namespace, command_timeout=2.0)
        [finding] = [each for each in await diagnose(client._runtime.backend) if each.subject == "replicas"]
        return finding

    few = await found(2)
    assert few.level is Level.ERROR
    assert "replicas=2 have to confirm each grant, and 1 answer" in few.text
    just = await found(1)
    assert just.level is Level.WARNING
    assert "while one of them is away" in just.text
    assert just.advice == "have 2 replicas"
    assert "a failover can lose the last writes" in (await found(0)).text
    async with aiolock.connect(pair[0].url, replicas=2, namespace=namespace, command_timeout=1.0):
        assert "replicas=2, and 1 answer: until 2 do, no lock is granted" in caplog.text
    with redis.Redis(port=pair[0].port) as admin:
        assert admin.keys(f"{namespace}:1:*") == []


# --- one barrier after the other, with stand-ins for the connections


class Line:
    """A connection whose answers are the test's."""

    def __init__(self) -> None:
        self.address, self.state, self.generation, self.failure = "here", ConnectionState.READY, 1, None
        self.sent: list[tuple[Any, ...]] = []
        self.replies: list[asyncio.Future[Any]] = []
        self.left = 0

    def call(self, *words: Any) -> asyncio.Future[Any]:
        self.sent.append(words)
        self.replies.append(asyncio.get_running_loop().create_future())
        return self.replies[-1]

    def give_up(self, pause: float) -> None:
        self.left += 1

    async def answer(self, count: int, written: Any = None) -> None:
        """To the barrier that is under way."""
        if isinstance(written, Exception):
            self.replies[-2].set_exception(written)
        else:
            self.replies[-2].set_result(written)
        self.replies[-1].set_result(count)
        await passes(3)


@pytest.fixture
async def line() -> tuple[Barriers, Line, Line, list[float]]:
    now, commands, barriers = [100.0], Line(), Line()
    server = RunId()
    made = Barriers(
        Endpoint("redis://here"),
        2,
        commands,  # type: ignore[arg-type]
        server,
        lambda: f"key {len(barriers.sent)}",
        clock=lambda: now[0],
        command_timeout=10.0,
    )
    made.connection = barriers  # type: ignore[assignment]
    server.value = made._mine.value = "one"
    return made, commands, barriers, now


async def test_a_barrier_is_sent_after_the_answers_that_it_covers_and_one_at_a_time(line):
    barriers, _, connection, now = line
    first = barriers.confirm(102.0, 100.0)
    assert [words[0] for words in connection.sent] == ["EVAL", "WAIT"]
    # Half of what is left.
    assert connection.sent[1] == ("WAIT", 2, 1000)
    second, third = barriers.confirm(130.0, 100.0), barriers.confirm(104.0, 100.0)
    assert len(connection.sent) == 2
    await connection.answer(2)
    assert first.done()
    assert not second.done()
    # The shortest term, whose half is 2 s; and no WAIT is longer than that.
    assert connection.sent[3] == ("WAIT", 2, 2000)
    now[0] += 1
    await connection.answer(3)
    assert second.done()
    assert third.done()
    assert len(connection.sent) == 4
    await asyncio.gather(first, second, third)


async def test_what_has_more_time_than_another_joins_the_next_barrier(line):
    barriers, _, connection, now = line
    connection.state = ConnectionState.BROKEN
    short, long = barriers.confirm(101.0, 100.0), barriers.confirm(140.0, 100.0)
    assert connection.sent == []
    connection.state = ConnectionState.READY
    barriers._send()
    assert connection.sent[1] == ("WAIT", 2, 500)
    now[0] += 0.5
    await connection.answer(1)
    with pytest.raises(BackendUnavailable, match=r"1 of replicas=2 have confirmed"):
        await short
    assert not long.done()
    await connection.answer(2)
    await long


async def test_a_barrier_counts_only_on_one_connection_to_the_server_of_the_commands(line):
    barriers, commands, connection, _ = line
    # WAIT was sent on a new connection, which has written nothing.
    waiting = barriers.confirm(120.0, 100.0)
    connection.generation += 1
    await connection.answer(9)
    with pytest.raises(BackendUnavailable, match="the connection was lost"):
        await waiting
    # The answer came on an earlier connection of the commands.
    waiting = barriers.confirm(120.0, 100.0)
    commands.generation += 1
    await connection.answer(9)
    with pytest.raises(BackendUnavailable, match="made anew since"):
        await waiting
    # Barriers are elsewhere: there they count for nothing, and the connection is made anew.
    barriers._mine.value = "two"
    waiting = barriers.confirm(120.0, 100.0)
    await connection.answer(9)
    assert connection.left == 1
    assert not waiting.done()
    barriers._mine.value = "one"
    await connection.answer(2)
    await waiting
    # The write was refused, so WAIT is about none. In a cluster the next one is to another key.
    waiting = barriers.confirm(120.0, 100.0)
    await connection.answer(9, BackendRefused("no"))
    with pytest.raises(BackendUnavailable, match="no"):
        await waiting
    barriers.confirm(120.0, 100.0)
    keys = [words[3] for words in connection.sent if words[0] == "EVAL"]
    assert keys[0] != keys[-1]


async def test_a_caller_that_was_cancelled_is_covered_by_no_further_barrier(line):
    barriers, _, connection, _ = line
    first, second = barriers.confirm(120.0, 100.0), barriers.confirm(120.0, 100.0)
    second.cancel()
    await connection.answer(2)
    await first
    assert len(connection.sent) == 2


def test_replicas_have_half_of_what_is_left_and_at_most_half_the_command_timeout():
    assert patience(10.0, 100.0) == 5.0
    assert patience(10.0, 4.0) == 2.0
    assert patience(-1.0, 4.0) == 0.0
