"""Proxies that read scripts and take only those whose keys they find, as Alibaba Cloud's do: no script there may send messages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator

import hiredis
import pytest

import aiolock
from aiolock.backends.redis import RedisBackend
from aiolock.backends.redis.cluster import server as cluster_server
from aiolock.backends.redis.commands import Script
from aiolock.clock import system_clock
from aiolock.core.backend import Settings
from aiolock.types import Level
from tests.faults.proxy import Frames, Proxy, resp_frames
from tests.faults.staging import PATIENCE, queued

CALL = re.compile(rb"redis\.p?call\(\s*'(\w+)'\s*,\s*([^,)\s]+)")
NO_LITERAL = re.compile(rb"redis\.p?call\(\s*[^'\"\s)]")
KEYLESS = {b"TIME", b"CLUSTER"}
WORDS = b"bad lua script for redis cluster, all the keys that the script uses should be passed using the KEYS array"
REFUSAL = hiredis.pack_command((b"EVAL", b"return redis.error_reply('ERR " + WORDS + b"')", b"0"))  # type: ignore[arg-type]

RULES = {"PUBSUB": KEYLESS | {b"PUBLISH"}, "PUBSUB and PUBLISH": KEYLESS}
"""What is taken for a key that is not written as such."""


class Checked(Frames):
    """Replaces a script that breaks the rule, or every one without ``keyless``, by one that gives the proxy's answer."""

    def __init__(self, keyless: set[bytes] | None, refused: list[bytes]) -> None:
        super().__init__(resp_frames()._measure)
        self.keyless, self.refused = keyless, refused

    def feed(self, data: bytes) -> list[bytes]:
        return [self._checked(frame) for frame in super().feed(data)]

    def _checked(self, frame: bytes) -> bytes:
        if not frame.startswith(b"*"):
            return frame
        reader = hiredis.Reader()
        reader.feed(frame)
        command = reader.gets()
        if command[:1] == [b"EVAL"]:
            script, no_key = command[1], command[2] == b"0"
        elif command[:2] == [b"SCRIPT", b"LOAD"]:
            script, no_key = command[2], False
        else:
            return frame
        names = [name for name, key in CALL.findall(script) if not key.startswith(b"KEYS[")]
        if self.keyless is None or set(names) - self.keyless or no_key or NO_LITERAL.search(script):
            self.refused.append(script)
            return REFUSAL
        return frame


@pytest.fixture(params=RULES)
async def checked(request, server) -> AsyncIterator[Proxy]:
    refused: list[bytes] = []
    async with Proxy(
        "127.0.0.1", server.port, framing=lambda: Checked(RULES[request.param], refused)
    ) as proxy:
        proxy.refused = refused
        yield proxy


def url(proxy: Proxy) -> str:
    return f"redis://{proxy.host}:{proxy.port}"


KINDS = {
    "lock": lambda client: client.lock("x"),
    "fair": lambda client: client.lock("x", fair=True),
    "semaphore": lambda client: client.semaphore("x", 1),
    "write": lambda client: client.rwlock("x").write(),
    "read": lambda client: client.rwlock("x").read(),
}


async def test_locks_are_acquired_waited_for_and_handed_over(checked, connect, caplog):
    caplog.set_level(logging.WARNING, "aiolock")
    async with connect(url(checked)) as one, connect(url(checked)) as two:
        # Only to find out what is taken.
        assert len(checked.refused) >= 2
        del checked.refused[:]
        said = [record.getMessage() for record in caplog.records if "messages" in record.getMessage()]
        assert len(said) == 2, "one for each client"
        assert "push" not in one._runtime.backend.capabilities
        for make in KINDS.values():
            holder = make(one) if make is not KINDS["read"] else one.rwlock("x").write()
            first = await holder.acquire()
            waiter = asyncio.create_task(make(two).acquire())
            await queued(holder, 1)
            await first.release()
            async with asyncio.timeout(PATIENCE):
                second = await waiter
            assert second.token > first.token
            await second.release()
        assert checked.refused == []


async def test_a_hold_that_ends_by_itself_is_followed_and_who_gives_up_leaves_nothing(
    checked, connect, admin, namespace
):
    async with connect(url(checked)) as one, connect(url(checked)) as two:
        lease = await two.lock("x", ttl=1, renew=False, on_loss="signal").acquire()
        assert await one.lock("x").try_acquire(timeout=0.2) is None
        async with one.lock("x").acquire(timeout=PATIENCE) as next_lease:
            assert next_lease.token > lease.token
        await queued(one.lock("x"), 0)
        fields = await admin.hkeys(f"{namespace}:1:lock:{{x}}")
        assert [field for field in fields if field[:2] in (b"q:", b"r:", b"p:")] == []
        assert b"owner" not in fields


async def test_force_and_requests_to_release_arrive_with_the_next_renewal(checked, connect):
    async with connect(url(checked), ttl=1.5) as one, connect(url(checked)) as two:
        for kind in ("lock", "write"):
            lease = await KINDS[kind](one).acquire()
            assert await KINDS[kind](two).request_release("maintenance")
            async with asyncio.timeout(PATIENCE):
                assert await lease.release_requested == "maintenance"
            assert await KINDS[kind](two).force_release()
            async with asyncio.timeout(PATIENCE):
                assert await lease.wait_lost() == "force-released"


async def test_registers_are_watched_by_asking(checked, connect):
    async with connect(url(checked)) as one, connect(url(checked)) as two:
        latch = two.latch("x", 1)
        waiter = asyncio.create_task(one.latch("x", 1).wait())
        await asyncio.sleep(0)
        await latch.count_down()
        async with asyncio.timeout(PATIENCE):
            await waiter


async def test_the_doctor_names_it(checked):
    backend = RedisBackend(url(checked))
    backend.bind(Settings("f-doctor", "me", 30.0, 10.0, system_clock))
    found = {finding.subject: finding for finding in await backend.diagnose()}
    assert found["rights"].level is Level.OK
    assert found["pub/sub"].level is Level.WARNING
    assert "takes no script that sends messages" in found["pub/sub"].text


async def test_a_client_that_is_told_waits_beside_one_that_is_not(checked, server, connect):
    """A grant that the mute scripts cannot tell of is found by the heartbeat of the waiter."""
    async with connect(url(checked)) as mute, connect(server.url) as told:
        held = await mute.lock("x").acquire()
        waiter = asyncio.create_task(told.lock("x").acquire())
        await queued(mute.lock("x"), 1)
        await held.release()
        async with asyncio.timeout(PATIENCE):
            lease = await waiter
        back = asyncio.create_task(mute.lock("x").acquire())
        await queued(told.lock("x"), 1)
        await lease.release()
        async with asyncio.timeout(PATIENCE):
            await (await back).release()


@pytest.mark.parametrize("kind", ["lock", "fair", "semaphore", "write"])
async def test_a_client_that_is_told_gets_its_turn_among_many_that_cannot_tell(
    checked, server, connect, kind
):
    """They take the lock from each other without a pause; without the mark that they leave, it would wait for ever."""
    make = KINDS[kind]
    async with contextlib.AsyncExitStack() as stack:
        mutes = [await stack.enter_async_context(connect(url(checked))) for _ in range(3)]
        told = await stack.enter_async_context(connect(server.url))

        async def work(client: aiolock.Client) -> None:
            while True:
                async with make(client):
                    await asyncio.sleep(0.005)

        working = [asyncio.create_task(work(client)) for client in mutes]
        try:
            async with asyncio.timeout(PATIENCE):
                for _ in range(3):
                    async with make(told):
                        pass
        finally:
            for task in working:
                task.cancel()
            await asyncio.wait(working)


async def test_a_server_that_takes_no_script_at_all_is_refused_with_its_words(server, connect):
    async with Proxy("127.0.0.1", server.port, framing=lambda: Checked(None, [])) as proxy:
        with pytest.raises(aiolock.BackendRefused, match="bad lua script"):
            async with connect(url(proxy)):
                pass


async def test_a_cluster_whose_nodes_take_no_script_that_publishes_locks_all_the_same(
    cluster, connect, monkeypatch
):
    monkeypatch.setattr(cluster_server, "PUBLISH", Script("no script"))
    async with connect(cluster.url) as one, connect(cluster.url) as two:
        assert not any(b"PUBLISH" in script.source for script in one._runtime.backend._scripts.values())
        for make in KINDS.values():
            first = await make(one).acquire()
            if make is KINDS["read"]:
                make = KINDS["write"]
            waiter = asyncio.create_task(make(two).acquire())
            await queued(make(one), 1)
            await first.release()
            async with asyncio.timeout(PATIENCE):
                await (await waiter).release()
