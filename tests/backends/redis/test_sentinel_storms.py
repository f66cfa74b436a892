"""Sentinels that are late, that contradict each other, that hang; and failover after failover under load."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from hiredis import Reader

import aiolock
from aiolock import BackendError, BackendUnavailable
from aiolock.backends.redis.claim import MOST, Released
from aiolock.backends.urls import Host
from tests.backends.redis.test_sentinel import QUICKLY, SERVICE, Watched, answers, ask, staged, until_now
from tests.faults.staging import PATIENCE, until
from tests.servers import Redis


class Oracle:
    """A Sentinel that says what it is told to say, when it is told to."""

    def __init__(self, primary: Host) -> None:
        self.primary = primary
        self.speaks = asyncio.Event()
        self.speaks.set()
        self.asked = 0
        """How many wait for an answer."""
        self.connections = 0
        """How many there were."""
        self._listeners: set[asyncio.StreamWriter] = set()
        self.open: set[asyncio.StreamWriter] = set()

    @property
    def deaf(self) -> bool:
        """Whether nobody listens to it."""
        return not self._listeners

    @contextlib.asynccontextmanager
    async def running(self, port: int = 0) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()
            for writer in list(self.open):
                writer.transport.abort()
            await until(lambda: not self.open)

    def say(self, old: Host, new: Host) -> None:
        """That another server has become the primary."""
        text = f"{SERVICE} {old[0]} {old[1]} {new[0]} {new[1]}"
        for writer in self._listeners:
            writer.write(_list("message", "+switch-master", text))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open.add(writer)
        self.connections += 1
        words = Reader()
        try:
            while data := await reader.read(4096):
                words.feed(data)
                while command := words.gets():
                    await self._answer(command, writer)
        except ConnectionError:
            pass
        finally:
            self._listeners.discard(writer)
            self.open.discard(writer)
            writer.transport.abort()

    async def _answer(self, command: list[bytes], writer: asyncio.StreamWriter) -> None:
        if command[0] == b"SENTINEL":
            self.asked += 1
            primary = self.primary
            await self.speaks.wait()
            self.asked -= 1
            writer.write(_list(*map(str, primary)))
        elif command[0] == b"SUBSCRIBE":
            self._listeners.add(writer)
            writer.write(b"*3\r\n$9\r\nsubscribe\r\n$14\r\n+switch-master\r\n:1\r\n")
        else:
            writer.write(_list("pong", "") if writer in self._listeners else b"+PONG\r\n")


def _list(*words: str) -> bytes:
    return b"".join(
        [b"*%d\r\n" % len(words), *(b"$%d\r\n%s\r\n" % (len(word), word.encode()) for word in words)]
    )


def _url(*oracles: Oracle) -> str:
    return f"redis+sentinel://{','.join(f'127.0.0.1:{one.port}' for one in oracles)}/the%20locks"


def _count(server: Redis) -> int:
    """How many are connected, beside who asks."""
    return int(ask(server, "INFO", "clients")["connected_clients"]) - 1


@pytest.fixture
def two() -> Iterator[tuple[Redis, Redis]]:
    """Servers that both say that they are the primary."""
    with Redis() as first, Redis() as second:
        yield first, second


def host_of(server: Redis) -> Host:
    return Host("127.0.0.1", server.port)


def at(client: aiolock.Client, server: Redis) -> bool:
    """Whether both connections of a client are there, and in use."""
    backend = client._backend
    links = backend._server.connection, backend._server.subscriber
    return all(
        link.state.value == "ready" and backend._server.endpoint.primaries[link] == host_of(server)
        for link in links
    )


def drop_everybody(server: Redis) -> None:
    for kind in ("normal", "pubsub"):
        ask(server, "CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")


async def test_whoever_is_on_the_way_to_the_old_primary_turns_round(two, connect):
    old, new = two
    oracle = Oracle(host_of(old))
    async with oracle.running(), connect(_url(oracle)) as client:
        await until(lambda: not oracle.deaf and not oracle.asked)
        oracle.speaks.clear()
        drop_everybody(old)
        await until(lambda: oracle.asked == 2)
        # What it was asked before this is answered as it was then.
        oracle.primary = host_of(new)
        oracle.say(host_of(old), host_of(new))
        await asyncio.sleep(0.05)
        oracle.speaks.set()
        await answers(client)
        await until(lambda: at(client, new))
        assert _count(old) == 0


async def test_one_sentinel_that_has_heard_of_it_is_right_and_two_are_late(two, connect):
    old, new = two
    oracles = [Oracle(host_of(old)) for _ in range(3)]
    async with contextlib.AsyncExitStack() as stack:
        for oracle in oracles:
            await stack.enter_async_context(oracle.running())
        client = await stack.enter_async_context(connect(_url(*oracles)))
        await until(lambda: not any(oracle.deaf for oracle in oracles))
        oracles[0].primary = host_of(new)
        oracles[0].say(host_of(old), host_of(new))
        await until(lambda: at(client, new))
        assert client._backend._server.connection.generation == 2
        assert _count(old) == 0
        # Back again: who was replaced may take over from its replacement.
        for oracle in oracles:
            oracle.primary = host_of(old)
        oracles[1].say(host_of(new), host_of(old))
        await until(lambda: at(client, old))


async def test_a_sentinel_that_was_away_and_names_the_old_primary_disturbs_nobody(two, connect):
    old, new = two
    oracles = [Oracle(host_of(new)) for _ in range(3)]
    async with contextlib.AsyncExitStack() as stack:
        for oracle in oracles[:2]:
            await stack.enter_async_context(oracle.running())
        with Redis(sentinel=True) as gone:
            port = gone.port
        oracles[2].port, oracles[2].primary = port, host_of(old)
        client = await stack.enter_async_context(connect(_url(*oracles)))
        await until(lambda: not any(oracle.deaf for oracle in oracles[:2]))
        await stack.enter_async_context(oracles[2].running(port))
        # It is asked when it is listened to; so are the others then, because it contradicts them.
        before = oracles[0].connections
        await until(lambda: not oracles[2].deaf and oracles[0].connections > before)
        await answers(client)
        assert client._backend._server.connection.generation == 1
        assert _count(old) == 0


async def test_of_two_that_contradict_each_other_the_second_is_tried_as_well(two, connect):
    _, alive = two
    with Redis() as dead:
        nobody = host_of(dead)
    lost, right = Oracle(nobody), Oracle(host_of(alive))
    async with lost.running(), right.running(), connect(_url(lost, right)) as client, client.lock("x"):
        pass


async def test_sentinels_that_hang_hold_up_nobody_for_longer_than_the_command_timeout(two, connect):
    server, _ = two
    oracle = Oracle(host_of(server))
    async with oracle.running():
        client = await connect(_url(oracle), command_timeout=1).open()
        await until(lambda: not oracle.deaf and not oracle.asked)
        oracle.speaks.clear()
        drop_everybody(server)
        for ask_ in (client.lock("x").try_acquire, client.lock("x").inspect, client.lock("x").acquire):
            began = time.monotonic()
            with pytest.raises(BackendUnavailable):
                await ask_()
            assert time.monotonic() - began < 5
        began = time.monotonic()
        await client.aclose()
        assert time.monotonic() - began < 5
        with pytest.raises(BackendUnavailable, match="did not answer"):
            await connect(_url(oracle), command_timeout=1).open()
        oracle.speaks.set()


async def test_who_is_cancelled_while_sentinels_hang_leaves_no_connection(two, connect):
    server, _ = two
    oracles = [Oracle(host_of(server)) for _ in range(2)]
    async with oracles[0].running(), oracles[1].running():
        client = connect(_url(*oracles))
        oracles[1].speaks.clear()
        for work in (client.open, client._backend.diagnose):
            # Of two, one that answers is not enough at once.
            task = asyncio.create_task(work())
            await until(lambda: oracles[1].asked)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            oracles[1].speaks.set()
            await until(lambda: not any(oracle.open for oracle in oracles) and not _count(server))
            oracles[1].speaks.clear()


async def test_while_there_is_no_primary_sentinels_are_asked_now_and_then(two, connect):
    server, _ = two
    oracle = Oracle(host_of(server))
    async with oracle.running(), connect(_url(oracle)) as client:
        await until(lambda: not oracle.deaf and not oracle.asked)
        server.kill()
        await until(lambda: client._backend._server.connection.state.value == "broken")
        before, began, worked = oracle.connections, time.monotonic(), time.process_time()
        await asyncio.sleep(2)
        took = time.monotonic() - began
        # Two connections, each at most every 0.2 to 0.4 s after the first few attempts.
        assert 0 < oracle.connections - before < 20 * took
        assert time.process_time() - worked < took / 2


async def test_what_was_given_back_is_given_back_again_as_it_was(connect):
    with staged() as watched:
        async with connect(watched.url, ttl=300) as client, connect(watched.url, ttl=300) as rival:
            again = await client.lock("again").acquire()
            await again.release()
            again = await client.lock("again").acquire()
            copied = await client.lock("kept and copied").acquire()
            await copied.release(keep=1000)
            kept, soon = (
                await client.lock("kept").acquire(),
                await client.lock("kept, not for long").acquire(),
            )
            reader, permit = (
                await client.rwlock("r").read().acquire(),
                await client.semaphore("s", 2).acquire(),
            )
            await asyncio.to_thread(watched.copied)
            await asyncio.to_thread(watched.cut)
            await kept.release(keep=1000)
            await soon.release(keep=0.5)
            await reader.release()
            await permit.release()
            watched.first.kill()
            watched.second.thaw()
            await answers(client)
            await answers(rival)
            async with asyncio.timeout(PATIENCE):
                async with rival.rwlock("r").write(), rival.lock("kept, not for long"):
                    both = await rival.semaphore("s", 2).acquire(permits=2)
                    await both.release()
            for name in ("kept", "kept and copied"):
                [kept] = (await rival.lock(name).inspect()).kept
                assert 500 < (kept.until - datetime.now(UTC)).total_seconds() < 1000
            await again.renew()
            assert again.held
            await again.release()


class Claim:
    """A claim, as far as it counts here."""

    request = SimpleNamespace(stays=10.0)


def test_what_was_released_is_remembered_for_a_ttl_and_not_without_bounds():
    now = 0.0
    recent = Released(lambda: now)
    claims: list[Any] = [Claim() for _ in range(MOST + 10)]
    for claim in claims:
        recent.add(claim)
    assert [claim for claim, _ in recent.again()] == claims[10:]
    now = 5.0
    recent.add(claims[-1], keep=100.0)
    now = 9.0
    assert recent.again()[-1] == (claims[-1], 96.0)
    now = 10.5
    # To say it again makes it no younger.
    assert recent.again() == []
    recent.add(claims[0])
    assert len(recent._released) == 1


async def test_the_least_rights_at_a_sentinel_suffice(connect, caplog):
    with Redis() as server, Redis(sentinel=True) as sentinel:
        ask(sentinel, "SENTINEL", "MONITOR", SERVICE, *host_of(server), 1)
        rights = ("+ping", "+sentinel|get-master-addr-by-name", "+subscribe", "&+switch-master")
        for user, granted in (("enough", rights), ("deaf", rights[:2]), ("nobody", rights[:1])):
            ask(sentinel, "ACL", "SETUSER", user, "on", ">pw", "resetchannels", "nocommands", *granted)
        url = f"redis+sentinel://127.0.0.1:{sentinel.port}/the%20locks?sentinel_password=pw"
        for user, told in (("enough", True), ("deaf", False)):
            caplog.clear()
            async with connect(url, sentinel_username=user) as client, client.lock("x"):
                [listener] = client._backend._server.switching._subscribers
                await until(lambda listener=listener: listener.subscribed or listener.denied)
                assert listener.subscribed is told
                await until(lambda told=told: told or "may not subscribe to failovers" in caplog.text)
                assert ("may not subscribe to failovers" in caplog.text) is not told
                [finding] = [one for one in await client._backend.diagnose() if one.subject == "sentinels"]
                assert ("may not subscribe" in finding.text) is not told
        with pytest.raises(aiolock.BackendRefused, match="may not ask it"):
            await connect(url, sentinel_username="nobody").open()


async def test_a_server_that_has_become_a_replica_is_left_at_its_first_refusal(connect, caplog):
    with Redis(extra=QUICKLY) as server, Redis(extra=QUICKLY) as other:
        oracle = Oracle(host_of(server))
        async with oracle.running(), connect(_url(oracle)) as client:
            # By hand, so that nobody ends its connections.
            ask(server, "REPLICAOF", *host_of(other))
            with pytest.raises(BackendError, match="READONLY"):
                await client.lock("x").try_acquire()
            assert not at(client, server)
            oracle.primary = host_of(other)
            async with client.lock("x"):
                backend = client._backend
                assert backend._server.endpoint.primaries[backend._server.connection] == host_of(other)
            # Nobody announces it to the subscription, which is found to be at another server.
            await until(lambda: backend._server.same.known)
            assert backend._server.endpoint.primaries[backend._server.subscriber] == host_of(other)


async def test_what_is_no_sentinel_and_whose_password_is_wrong_is_said(connect):
    with Redis() as server, Redis(sentinel=True, password="hunter2") as closed:
        with pytest.raises(aiolock.BackendRefused, match="is no Sentinel"):
            await connect(f"redis+sentinel://127.0.0.1:{server.port}/s").open()
        for query in ("", "?sentinel_password=hunter3"):
            with pytest.raises(aiolock.BackendRefused, match="sentinel_password=") as caught:
                await connect(f"redis+sentinel://127.0.0.1:{closed.port}/s{query}").open()
            assert "hunter" not in str(caught.value)


@pytest.mark.parametrize(
    ("place_", "says"),
    [
        ("u:secret@h1,u:secret@h2/service", "stand once, before the first"),
        (":sec@ret@h1/service", "%40"),
        (":sec?ret@h1/service", "%3F"),
        ("h1,h2,h1:26379/service", "named twice"),
        ("h1/service#1", "%23"),
    ],
)
def test_addresses_that_would_be_understood_wrongly(place_, says):
    with pytest.raises(aiolock.ConfigError, match=says) as caught:
        aiolock.connect(f"redis+sentinel://{place_}")
    assert "secret" not in str(caught.value)


def test_spaces_behind_commas_are_no_part_of_a_host():
    shown = repr(aiolock.connect("redis+sentinel://h1, h2 ,h3/service")._backend)
    assert "redis+sentinel://h1,h2,h3/service/0" in shown


async def test_host_names_that_sentinels_announce_and_ipv6(connect):
    six = ["--bind", "127.0.0.1 ::1"]
    with Redis(extra=six) as server, Redis(sentinel=True, extra=six) as sentinel:
        for setting in ("resolve-hostnames", "announce-hostnames"):
            ask(sentinel, "SENTINEL", "CONFIG", "SET", setting, "yes")
        for service, host in (("name", "localhost"), ("six", "::1")):
            ask(sentinel, "SENTINEL", "MONITOR", service, host, server.port, 1)
            async with (
                connect(f"redis+sentinel://[::1]:{sentinel.port}/{service}") as client,
                client.lock("x"),
            ):
                assert set(client._backend._server.endpoint.primaries.values()) == {(host, server.port)}


async def test_tls_to_sentinels_and_servers(connect):
    with Redis(tls=True) as server, Redis(tls=server.certificates, sentinel=True) as sentinel:
        with redis.Redis(port=sentinel.port, ssl=True, ssl_ca_certs=str(server.certificates.ca)) as admin:
            admin.execute_command("SENTINEL", "MONITOR", "s", *host_of(server), 1)
        url = f"rediss+sentinel://127.0.0.1:{sentinel.port}/s"
        async with connect(url, ssl_ca_certs=server.certificates.ca) as client, client.lock("x"):
            pass
        with pytest.raises(aiolock.BackendRefused, match="not trusted"):
            await connect(url).open()
        with pytest.raises(BackendUnavailable, match="rediss://"):
            await connect(f"redis+sentinel://127.0.0.1:{sentinel.port}/s", command_timeout=1).open()


class Load:
    """Tasks that hold locks, wait for them, and take down when they did."""

    def __init__(self, clients: list[aiolock.Client]) -> None:
        self.over = False
        self.holds: list[tuple[str, float, float]] = []
        """What was held, from when to when as its holder knew."""
        self.waits: list[float] = []
        self._random = random.Random(7)
        self._tasks = [asyncio.create_task(self._work(client)) for client in clients for _ in range(8)]

    async def _work(self, client: aiolock.Client) -> None:
        while not self.over:
            number = self._random.randrange(4)
            lock: Any = self._random.choice(
                [
                    client.lock(f"l{number}"),
                    client.lock(f"f{number}", fair=True),
                    client.rwlock(f"r{number}").write(),
                    client.semaphore(f"s{number}", 1),
                ]
            )
            began = time.monotonic()
            try:
                lease = await lock.acquire()
            except BackendError:
                await asyncio.sleep(0.02)
                continue
            start = time.monotonic()
            lost = asyncio.create_task(lease.wait_lost())
            await asyncio.wait([lost], timeout=self._random.expovariate(10))
            self.waits.append(start - began)
            self.holds.append((f"{lock.kind} {lock.name}", start, time.monotonic()))
            lost.cancel()
            with contextlib.suppress(BackendError, aiolock.LockLost):
                await lease.release()

    async def works(self) -> None:
        """Until all are served at the present primary, however long that takes on this machine."""
        enough = len(self.holds) + 2 * len(self._tasks)
        await until(lambda: len(self.holds) >= enough)

    async def end(self) -> None:
        """Everybody is served, and stops."""
        self.over = True
        async with asyncio.timeout(2 * PATIENCE):
            await asyncio.gather(*self._tasks)

    def twice(self, promotions: list[float], slack: float) -> list[tuple[str, float, float]]:
        """Holds that somebody else got while they were held, although they were copied to whoever took over."""
        found = []
        latest: dict[str, tuple[str, float, float]] = {}
        for hold in sorted(self.holds, key=lambda hold: hold[1]):
            before = latest.get(hold[0])
            if before is not None and before[2] > hold[1]:
                forgotten = any(
                    before[1] > promotion - slack and promotion <= hold[1] for promotion in promotions
                )
                if not forgotten:
                    found.append(before)
            if before is None or hold[2] > before[2]:
                latest[hold[0]] = hold
        return found


def descriptors() -> int:
    """How many files and sockets this process has open."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - they need no paths


async def test_failovers_under_load_serve_everybody_and_grant_nothing_twice_that_was_copied(
    connect, no_error_is_logged
):
    before = descriptors()
    promotions: list[float] = []

    def fail_over(watched: Watched, old: Redis, new: Redis, way: str) -> None:
        until_now(lambda: watched.info(old)["slave0"]["state"] == "online")
        sleeper, awake = watched.sentinels[:2]
        if way == "order":
            until_now(lambda: ask(awake, "SENTINEL", "FAILOVER", SERVICE))
        else:
            sleeper.freeze()
            old.freeze()
        until_now(lambda: watched.info(new)["role"] == "master")
        promotions.append(time.monotonic())
        until_now(lambda: ask(awake, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)[1] == str(new.port))
        old.thaw()
        sleeper.thaw()
        # Sentinels take ten seconds for that.
        ask(old, "REPLICAOF", *host_of(new))

    with staged() as watched:
        async with connect(watched.url, ttl=10) as one, connect(watched.url, ttl=10) as other:
            load = Load([one, other])
            try:
                await load.works()
                await asyncio.to_thread(fail_over, watched, watched.first, watched.second, "order")
                await load.works()
                await asyncio.to_thread(fail_over, watched, watched.second, watched.first, "freeze")
                await load.works()
            finally:
                await load.end()
        gc.collect()
    assert load.twice(promotions, slack=1.0) == []
    assert descriptors() <= before
