"""A primary that Sentinels name: found, lost, found again elsewhere; what it forgot, its holders and waiters learn."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

import aiolock
from aiolock import BackendRefused, BackendUnavailable, ConfigError
from tests.faults.staging import PATIENCE, in_line, queued, until
from tests.servers import Redis

SERVICE = "the locks"
QUOTED = "the%20locks"
DOWN = 500
"""Milliseconds of silence after which Sentinels take a server for dead."""
QUICKLY = ["--repl-diskless-sync-delay", "0", "--repl-timeout", "5"]


def ask(server: Redis, *words: object, password: str | None = None) -> Any:
    """The answer to one command."""
    with redis.Redis(port=server.port, password=password, decode_responses=True) as client:
        return client.execute_command(*words)


class Watched:
    """A primary, a replica of it, and three Sentinels."""

    replicas = 1

    def __init__(
        self, first: Redis, second: Redis, sentinels: list[Redis], password: str | None = None
    ) -> None:
        self.first, self.second, self.sentinels = first, second, sentinels
        self._password = password
        ask(second, "REPLICAOF", "127.0.0.1", first.port, password=password)
        until_now(lambda: self.info(first)["slave0"]["state"] == "online")
        for sentinel in sentinels:
            ask(sentinel, "SENTINEL", "MONITOR", SERVICE, "127.0.0.1", first.port, 2)
            settings = ["down-after-milliseconds", DOWN, "failover-timeout", 3000]
            if password is not None:
                settings += ["auth-pass", password]
            ask(sentinel, "SENTINEL", "SET", SERVICE, *settings)
        for sentinel in sentinels:
            until_now(lambda sentinel=sentinel: self.knows_all(sentinel))

    def info(self, server: Redis) -> dict[str, Any]:
        with redis.Redis(port=server.port, password=self._password) as client:
            return client.info("replication")

    def knows_all(self, sentinel: Redis) -> bool:
        [words] = ask(sentinel, "SENTINEL", "MASTERS")
        known = words if isinstance(words, dict) else dict(zip(words[::2], words[1::2], strict=True))
        return (int(known["num-other-sentinels"]), int(known["num-slaves"])) == (
            len(self.sentinels) - 1,
            self.replicas,
        )

    @property
    def hosts(self) -> str:
        return ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)

    @property
    def url(self) -> str:
        return f"redis+sentinel://{self.hosts}/{QUOTED}/0"

    def copied(self) -> None:
        """Until the replica has all that the primary had when this was called."""
        assert ask(self.first, "WAIT", 1, 5000, password=self._password) >= 0
        mark = self.info(self.first)["master_repl_offset"]
        until_now(lambda: self.info(self.second)["slave_repl_offset"] >= mark)

    def cut(self) -> None:
        """What is written from now on is not copied; `second` has to be thawed."""
        self.second.freeze()
        ask(self.first, "CLIENT", "KILL", "TYPE", "replica", password=self._password)

    def clients(self, server: Redis) -> list[str]:
        """Who is connected, except for replicas, Sentinels and whoever asks."""
        with redis.Redis(port=server.port, password=self._password) as admin:
            found = admin.client_list()
        return [
            str(one)
            for one in found
            if one["cmd"] != "client|list" and "S" not in one["flags"] and "sentinel" not in one["name"]
        ]


def until_now(enough) -> None:
    end = time.monotonic() + PATIENCE
    while True:
        with contextlib.suppress(KeyError, redis.RedisError):
            if enough():
                return
        assert time.monotonic() < end, "it never comes to that"
        time.sleep(0.02)


@contextlib.contextmanager
def staged(**options: Any) -> Iterator[Watched]:
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(Redis(extra=QUICKLY, **options)) for _ in range(2))
        sentinels = [stack.enter_context(Redis(sentinel=True)) for _ in range(3)]
        yield Watched(first, second, sentinels, options.get("password"))


@pytest.fixture
def watched() -> Iterator[Watched]:
    with staged() as servers:
        yield servers


async def answers(client: aiolock.Client) -> None:
    """Until the client has found a primary."""

    async def asked() -> bool:
        try:
            await client.lock("is anybody there").inspect()
        except aiolock.BackendError:
            return False
        return True

    await until(asked)


async def test_what_the_primary_has_copied_outlives_it(watched, connect):
    async with connect(watched.url, ttl=30) as client, connect(watched.url, ttl=30) as rival:
        async with client.lock("x") as lease:
            waiter = asyncio.create_task(rival.lock("x").acquire())
            await queued(client.lock("x"), 1)
            await in_line(rival)
            watched.copied()
            watched.first.kill()
            await answers(client)
            await answers(rival)
            assert lease.held
            [holder] = (await rival.lock("x").inspect()).holders
            assert holder.token == lease.token
            assert not waiter.done()
        async with asyncio.timeout(PATIENCE):
            following = await waiter
        assert following.token > lease.token
        await following.release()
        assert not (await client.lock("x").inspect()).locked
        assert client.stats()["lost"] == rival.stats()["lost"] == 0


async def test_a_failover_that_is_ordered_is_survived_by_those_who_hold_and_those_who_wait(watched, connect):
    async with connect(watched.url, ttl=30) as client, connect(watched.url, ttl=30) as rival:
        async with client.lock("x") as lease:
            waiter = asyncio.create_task(rival.lock("x").acquire())
            await queued(client.lock("x"), 1)
            await in_line(rival)
            watched.copied()
            ask(watched.sentinels[0], "SENTINEL", "FAILOVER", SERVICE)
            until_now(lambda: watched.info(watched.second)["role"] == "master")
            # The old primary goes on taking writes for up to ten seconds. Nobody of ours talks to it any more.
            await until(lambda: not watched.clients(watched.first))
            await answers(client)
            await lease.renew()
            [holder] = (await rival.lock("x").inspect()).holders
            assert holder.token == lease.token
        async with asyncio.timeout(PATIENCE):
            await (await waiter).release()
        assert rival.stats()["lost"] == 0


async def test_a_grant_that_was_not_copied_is_lost_and_its_holder_told(watched, connect):
    async with connect(watched.url, ttl=60) as client, connect(watched.url, ttl=60) as rival:
        watched.cut()
        lease = await client.lock("x").acquire()
        watched.first.kill()
        watched.second.thaw()
        async with asyncio.timeout(PATIENCE):
            assert await lease.wait_lost() == "revoked"
            async with rival.lock("x") as other:
                assert other.token > lease.token


async def test_a_release_that_was_not_copied_is_said_again(watched, connect):
    async with connect(watched.url, ttl=300) as client, connect(watched.url, ttl=300) as rival:
        lease = await client.lock("x").acquire()
        permit = await client.semaphore("s", 1).acquire()
        watched.copied()
        watched.cut()
        await lease.release()
        await permit.release()
        watched.first.kill()
        watched.second.thaw()
        await answers(rival)
        async with asyncio.timeout(PATIENCE):
            # Far less than the ttl that the new primary would keep it for.
            async with rival.lock("x"), rival.semaphore("s", 1):
                pass


async def test_one_sentinel_that_is_away_is_not_missed(watched, connect):
    watched.sentinels[0].kill()
    watched.sentinels[1].freeze()
    try:
        async with connect(watched.url) as client, client.lock("x"):
            findings = await client._backend.diagnose()
    finally:
        watched.sentinels[1].thaw()
    [finding] = [finding for finding in findings if finding.subject == "sentinels"]
    assert (finding.level.value, finding.text.partition(":")[0]) == ("warning", "2 of 3 cannot be asked")


async def test_doctor_is_content_when_all_of_them_agree(watched, connect):
    async with connect(watched.url) as client:
        found = {finding.subject: finding for finding in await client._backend.diagnose()}
    assert found["sentinels"].text == "all 3 answer, and name the same primary"


async def test_without_any_sentinel_there_is_no_primary(connect):
    with Redis(sentinel=True) as gone:
        url = f"redis+sentinel://127.0.0.1:{gone.port}/{QUOTED}"
    with pytest.raises(BackendUnavailable, match="no Sentinel names the primary"):
        await connect(url, command_timeout=1).open()


async def test_a_service_that_nobody_watches_is_refused(watched, connect):
    with pytest.raises(BackendRefused, match="watches no service that is called 'other'"):
        await connect(f"redis+sentinel://{watched.hosts}/other").open()


async def test_whoever_is_named_must_say_that_it_is_the_primary(connect):
    with Redis(extra=QUICKLY) as first, Redis(extra=QUICKLY) as second, Redis(sentinel=True) as sentinel:
        ask(second, "REPLICAOF", "127.0.0.1", first.port)
        ask(sentinel, "SENTINEL", "MONITOR", SERVICE, "127.0.0.1", second.port, 1)
        with pytest.raises(BackendUnavailable, match="READONLY"):
            await connect(f"redis+sentinel://127.0.0.1:{sentinel.port}/{QUOTED}", command_timeout=1).open()


async def test_passwords_of_servers_and_of_sentinels_are_told_apart_and_not_shown(connect):
    with Redis(password="hunter2") as server, Redis(sentinel=True, password="hunter3") as sentinel:
        ask(sentinel, "SENTINEL", "MONITOR", SERVICE, "127.0.0.1", server.port, 1, password="hunter3")
        place = f"127.0.0.1:{sentinel.port}/{QUOTED}/3"
        async with connect(f"redis+sentinel://:hunter2@{place}?sentinel_password=hunter3") as client:
            async with client.lock("x"):
                assert "hunter" not in repr(client._backend)
            async with connect(f"redis+sentinel://:hunter2@{place}", sentinel_password="hunter3") as same:
                assert not (await same.lock("x").inspect()).locked
        for url in (
            f"redis+sentinel://:hunter4@{place}?sentinel_password=hunter3",
            f"redis+sentinel://:hunter2@{place}?sentinel_password=hunter4",
            f"redis+sentinel://:hunter2@{place}",
        ):
            with pytest.raises(BackendRefused) as caught:
                await connect(url).open()
            assert "hunter" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis+sentinel://h1,h2", "names hosts but no service"),
        ("redis+sentinel:///service", "names no host, as in"),
        ("redis+sentinel://h1:secret/service", "is no host and port"),
        ("redis+sentinel://h1,/service", "names no host"),
        ("redis+sentinel://h1/service/secret", "database must be a number"),
        ("redis+sentinel://h1/service?sentinel_password=secret&sentinel_password=b", "given twice"),
        ("redis+sentinel://h1/service?secret=1", "no parameter of a Redis URL"),
    ],
)
def test_addresses_that_cannot_be_meant(url, says):
    with pytest.raises(ConfigError, match=says) as caught:
        aiolock.connect(url)
    assert says.startswith("no parameter") or "secret" not in str(caught.value)


def test_an_address_is_shown_without_its_passwords():
    url = "redis+sentinel://me:secret@h1,[::1]:7/the%20locks/2?sentinel_username=you&sentinel_password=hidden"
    shown = repr(aiolock.connect(url)._backend)
    assert "redis+sentinel://me@h1,[::1]:7/the%20locks/2" in shown
    assert not {"secret", "hidden"} & set(shown.replace("@", " ").replace(":", " ").split())
