"""The channel of this process: messages arrive, loss of the subscription is told, denial is lived with."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from aiolock.backends import transport
from aiolock.backends.redis import pubsub
from aiolock.backends.redis.connection import Connection
from aiolock.backends.redis.pubsub import Subscriber
from aiolock.backends.redis.url import Endpoint
from aiolock.backends.transport import ConnectionState
from aiolock.clock import system_clock
from aiolock.errors import BackendRefused, BackendUnavailable
from tests.faults.proxy import Proxy, resp_frames
from tests.servers import Redis


@pytest.fixture(scope="module")
def server():
    with Redis(
        users=["user default on nopass ~* &* +@all", "user mute on nopass ~* resetchannels +@all"]
    ) as running:
        yield running


class Listener:
    """A subscriber and what it told."""

    def __init__(self, url: str, channel: str = "ours") -> None:
        self.story: asyncio.Queue[object] = asyncio.Queue()
        self.subscriber = Subscriber(
            Endpoint(url),
            lambda: [channel],
            clock=system_clock,
            command_timeout=20,
            on_message=self.story.put_nowait,
            on_up=lambda: self.story.put_nowait("up"),
            on_down=lambda: self.story.put_nowait("down"),
        )

    async def next(self) -> object:
        async with asyncio.timeout(20):
            return await self.story.get()


@contextlib.asynccontextmanager
async def listening(url: str):
    listener = Listener(url)
    await listener.subscriber.open()
    try:
        yield listener
    finally:
        await listener.subscriber.aclose()


@pytest.fixture
async def admin(server):
    connection = Connection(
        Endpoint(f"redis://127.0.0.1:{server.port}"), clock=system_clock, command_timeout=20
    )
    await connection.open()
    yield connection
    await connection.aclose()


def address(server, port=None) -> str:
    return f"redis://127.0.0.1:{port or server.port}"


async def test_messages_of_the_channel_arrive_in_order(server, admin):
    async with listening(address(server)) as listener:
        assert listener.subscriber.subscribed
        assert await listener.next() == "up"
        for n in range(100):
            assert await admin.call("PUBLISH", "ours", f"\r\n{n}") == 1
        await admin.call("PUBLISH", "others", "not for us")
        assert [await listener.next() for _ in range(100)] == [b"\r\n%d" % n for n in range(100)]
        assert listener.story.empty()
        assert listener.subscriber.received <= system_clock()


async def test_a_killed_subscription_comes_back_and_says_so(server, admin):
    async with listening(address(server)) as listener:
        assert await listener.next() == "up"
        for generation in (2, 3):
            await admin.call("CLIENT", "KILL", "TYPE", "pubsub")
            assert await listener.next() == "down"
            assert await listener.next() == "up"
            assert listener.subscriber.generation == generation
            assert await admin.call("PUBLISH", "ours", "hello") == 1
            assert await listener.next() == b"hello"


async def test_an_idle_subscription_is_pinged_and_stays(server, admin, monkeypatch):
    monkeypatch.setattr(transport, "PING_EVERY", 0.03)
    monkeypatch.setattr(transport, "PING_WITHIN", 5)
    async with (
        Proxy("127.0.0.1", server.port, framing=resp_frames) as proxy,
        listening(address(server, proxy.port)) as listener,
    ):
        await proxy.up.arrived(proxy.up.frames + 3)
        await proxy.down.arrived(proxy.down.frames + 1)
        await admin.call("PUBLISH", "ours", "still there")
        assert [await listener.next(), await listener.next()] == ["up", b"still there"]


async def test_a_half_open_subscription_is_found_by_silence(server, monkeypatch):
    monkeypatch.setattr(transport, "PING_EVERY", 0.1)
    monkeypatch.setattr(transport, "PING_WITHIN", 0.1)
    async with Proxy("127.0.0.1", server.port) as proxy, listening(address(server, proxy.port)) as listener:
        assert await listener.next() == "up"
        proxy.blackhole()
        assert await listener.next() == "down"
        assert not listener.subscriber.subscribed
        proxy.heal(release=False)
        assert await listener.next() == "up"


async def test_a_denied_subscription_is_no_failure_and_is_asked_for_again_slowly(server, admin, monkeypatch):
    url = f"redis://mute:any@127.0.0.1:{server.port}"
    async with listening(url) as listener:
        subscriber = listener.subscriber
        assert subscriber.state is ConnectionState.DENIED
        assert not subscriber.subscribed
        assert isinstance(subscriber.denied, BackendRefused)
        assert "channel" in str(subscriber.denied)
        assert await listener.next() == "down"
        assert subscriber._pause == pubsub.DENIED_PAUSE
    monkeypatch.setattr(pubsub, "DENIED_PAUSE", 0.05)
    async with listening(url) as listener:
        assert await listener.next() == "down"
        await admin.call("ACL", "SETUSER", "mute", "&ours")
        # Told once, however often it was denied since.
        assert await listener.next() == "up"
        assert listener.subscriber.denied is None


async def test_a_server_that_is_not_there_is_unavailable():
    subscriber = Subscriber(
        Endpoint("redis://127.0.0.1:1"),
        lambda: ["ours"],
        clock=system_clock,
        command_timeout=0.2,
        on_message=print,
    )
    with pytest.raises(BackendUnavailable, match="nothing listens"):
        await subscriber.open()
    assert subscriber.state is ConnectionState.CLOSED
