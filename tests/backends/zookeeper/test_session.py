"""The session: kept through every failure, never longer than it lives, and every request is answered, in doubt, or not sent."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import glob
import logging
import socket
import threading
from pathlib import Path
from random import Random

import pytest
from aiozk import exc
from aiozk import protocol as aiozk_protocol

from aiolock.backends.zookeeper import protocol
from aiolock.backends.zookeeper.connection import Resolver
from aiolock.backends.zookeeper.errors import InDoubt, NotSent, SessionChanged
from aiolock.backends.zookeeper.url import Host
from aiolock.errors import BackendRefused
from tests.certificates import Certificates
from tests.faults.proxy import Proxy, length_frames
from tests.processes import reserve_port
from tests.servers import ZooKeeper

CREATE2 = 15
SYNC = 9
GET = 4


def ephemeral(path: str):
    return protocol.create(path, b"", protocol.OPEN, sequential=False)


async def reset(proxy, session, tools) -> None:
    """Break the connection, and wait for the next one."""
    old = session.conn
    proxy.reset_all()
    await tools.until(lambda: session.conn is not old and session.connected)


# --- beginning and end


async def test_a_session_is_made_and_ended_at_the_server(server, tools):
    async with tools.session(server.url) as watcher:
        async with tools.session(server.url) as session:
            assert session.timeout == tools.TIMEOUT
            assert session.certain
            path = (await session.ask(ephemeral(f"/{tools.namespace}"))).path
        with pytest.raises(exc.NoNode):
            await watcher.ask(protocol.get(path, watch=False))


async def test_the_server_has_the_last_word_about_the_timeout(server, tools):
    async with tools.session(server.url, timeout=0.1) as session:
        assert session.timeout == 1.0
    async with tools.session(server.url, timeout=10_000) as session:
        assert session.timeout == 60.0


async def test_closing_without_a_server_is_quick_and_silent(tools):
    with ZooKeeper() as server:
        async with tools.session(server.url) as session:
            server.kill()
            await tools.until(lambda: not session.connected)
            async with asyncio.timeout(5):
                await session.close()
    with pytest.raises(NotSent):
        await session.ready()


async def test_those_who_wait_for_a_connection_are_told_when_it_is_closed(tools):
    with ZooKeeper() as server:
        async with tools.session(server.url) as session:
            server.kill()
            await tools.until(lambda: not session.connected)
            waiter = asyncio.create_task(session.ready())
            await asyncio.sleep(0)
            await session.close()
            with pytest.raises(NotSent):
                await waiter


async def test_an_opening_that_is_cancelled_leaves_nothing_open(proxy, tools):
    proxy.down.blackhole()
    before, opened = asyncio.all_tasks(), proxy.connections
    for _ in range(3):
        with pytest.raises(TimeoutError):
            # So long that the server does not end it for us.
            async with tools.session(f"zookeeper://127.0.0.1:{proxy.port}", 60.0, within=0.2):
                raise AssertionError("opened through a black hole")
    left = {task.get_name() for task in asyncio.all_tasks() - before}
    assert not {name for name in left if name.startswith("aiolock")}
    assert proxy.connections > opened, "nothing was open that could have been left"
    proxy.heal(release=False)
    await tools.until(lambda: not proxy.ends, "the end of every connection")


# --- connecting


async def test_a_frozen_server_in_the_list_costs_a_bounded_time(server, tools):
    """N13: connecting never waits without a bound, whatever order the hosts are tried in."""
    async with Proxy("127.0.0.1", server.port, framing=length_frames) as frozen:
        frozen.blackhole()
        for _ in range(6):
            url = f"zookeeper://127.0.0.1:{frozen.port},127.0.0.1:{server.port}"
            async with tools.session(url, within=10) as session:
                assert session.connected
        frozen.heal(release=False)


async def test_hosts_that_do_not_resolve_or_listen_are_passed_over(server, tools):
    url = f"zookeeper://nowhere.invalid,127.0.0.1:1,localhost:{server.port}"
    async with tools.session(url) as session:
        assert session.connected


async def test_a_resolver_that_hangs_is_asked_once_for_each_name(monkeypatch):
    answer, asked = threading.Event(), []

    def hang(name, *_args, **_options):
        asked.append(name)
        answer.wait(60)
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 1))]

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    resolver = Resolver(Random(1))
    try:
        for _ in range(5):
            for name in ("one", "two"):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await resolver.resolve(Host(name, 1))
        assert sorted(asked) == ["one", "two"]
    finally:
        answer.set()
    assert await resolver.resolve(Host("one", 1)) == ["127.0.0.1"]
    assert len(asked) == 2, "the answer to the first question is taken"
    assert await resolver.resolve(Host("one", 1)) == ["127.0.0.1"]
    assert len(asked) == 3, "and is asked anew the next time"


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x00\x00\x00\x02\x01\x02", b"\xff" * 40]
)
async def test_a_stranger_in_the_list_is_passed_over(server, tools, answer):
    async def speak(_reader, writer) -> None:
        writer.write(answer)
        await writer.drain()
        writer.close()

    stranger = await asyncio.start_server(speak, "127.0.0.1", 0)
    port = stranger.sockets[0].getsockname()[1]
    for _ in range(4):
        async with tools.session(f"zookeeper://127.0.0.1:{port},127.0.0.1:{server.port}") as session:
            assert session.connected
    stranger.close()
    await stranger.wait_closed()


async def test_no_four_letter_word_is_ever_sent(proxy, tools):
    seen: list[bytes] = []
    proxy.on_frame = lambda direction, frame: seen.append(frame) if direction == "up" else None
    async with tools.session(f"zookeeper://127.0.0.1:{proxy.port}"):
        pass
    assert seen
    assert not any(frame.startswith((b"srvr", b"ruok", b"stat")) for frame in seen)
    assert proxy.connections == 1


# --- a connection that ends


@pytest.mark.parametrize("how", ["reset", "fin", "cut inside a frame"])
async def test_a_dead_connection_is_noticed_at_once_and_the_session_goes_on(proxy, tools, caplog, how):
    """N1, N2, N4: whoever waits for an answer is in doubt now, not after a timeout; nothing is spun or blocked."""
    changes: list[str] = []
    loop = asyncio.get_running_loop()
    with caplog.at_level(logging.ERROR):
        async with tools.session(f"zookeeper://127.0.0.1:{proxy.port}", 60.0, changes) as session:
            owner = session.session_id
            path = (await session.ask(ephemeral(f"/{tools.namespace}"))).path
            proxy.down.blackhole()
            asked = session.ask(protocol.get(path, watch=False))
            begin = loop.time()
            if how == "reset":
                proxy.reset_all()
            elif how == "fin":
                for end in list(proxy.ends):
                    end.transport.close()
            else:
                proxy.down.cut_after(9)
                proxy.down.heal()
            with pytest.raises(InDoubt):
                await asked
            assert loop.time() - begin < 15, "a quarter of the session's timeout"
            assert not session.connected
            proxy.down.heal(release=False)
            assert await session.ready() == owner
            assert (await session.ask(protocol.get(path, watch=False))).stat.ephemeral_owner == owner
    assert changes[:3] == ["connected", "suspended", "connected"]
    assert caplog.records == []


async def test_without_a_connection_nothing_is_sent_and_that_is_said(tools):
    with ZooKeeper() as server:
        async with tools.session(server.url) as session:
            server.kill()
            await tools.until(lambda: not session.connected)
            with pytest.raises(NotSent):
                session.ask(protocol.sync())


async def test_a_request_is_sent_once_and_never_repeated(proxy, tools):
    """Z6: what aiozk itself would send again after a reset, and thereby do twice."""
    replies = tools.replies(proxy)
    async with tools.session(f"zookeeper://127.0.0.1:{proxy.port}") as session:
        lost = proxy.down.drop_next(1, replies.to(CREATE2), reset=True)
        with pytest.raises(InDoubt):
            await session.ask(protocol.create(f"/{tools.namespace}-", b"", protocol.OPEN, sequential=True))
        await lost.wait()
        await session.ready()
        await session.ask(protocol.sync())
        names = (await session.ask(protocol.listing("/", watch=False))).children
        assert len([name for name in names if name.startswith(tools.namespace)]) == 1


async def test_a_black_hole_is_noticed_by_the_heartbeat(proxy, server, tools):
    """N3: after a third of the session timeout the connection is dropped for another one."""
    changes: list[str] = []
    url = f"zookeeper://127.0.0.1:{proxy.port}"
    async with tools.session(url, changes=changes) as session:
        owner = session.session_id
        proxy.blackhole()
        await tools.until(lambda: "suspended" in changes)
        proxy.heal(release=False)
        assert await session.ready() == owner


async def test_a_server_that_answers_too_late_for_one_attempt_is_tried_again(proxy, tools):
    async with tools.session(f"zookeeper://127.0.0.1:{proxy.port}", 6.0) as session:
        owner = session.session_id
        proxy.down.blackhole()
        proxy.reset_all()
        await tools.until(lambda: proxy.connections >= 3)
        proxy.down.heal(release=False)
        assert await session.ready() == owner


async def test_replies_and_requests_stay_together_while_callers_are_cancelled(server, tools):
    async with tools.session(server.url) as session:
        base = f"/{tools.namespace}"
        await session.ask(protocol.container(base, protocol.OPEN))
        for number in range(20):
            request = protocol.create(
                f"{base}/{number}", str(number).encode(), protocol.OPEN, sequential=False
            )
            await session.ask(request)
        asked = {
            number: session.ask(protocol.get(f"{base}/{number % 20}", watch=False)) for number in range(1000)
        }
        for number in range(0, 1000, 3):
            asked[number].cancel()
        for number, future in asked.items():
            if number % 3:
                assert (await future).data == str(number % 20).encode()


# --- the deadline


async def test_heartbeats_keep_moving_the_deadline(server, tools):
    async with tools.session(server.url) as session:
        first = session.deadline
        await tools.until(lambda: session.deadline > first + 1)
        assert session.certain


async def test_without_the_leader_the_deadline_comes_before_the_server_ends_the_session(server, proxy, tools):
    """Z2: the holder knows it first, by its own clock, although nobody tells it anything."""
    async with (
        tools.session(f"zookeeper://127.0.0.1:{proxy.port}") as session,
        tools.session(server.url) as watcher,
    ):
        path = (await session.ask(ephemeral(f"/{tools.namespace}"))).path
        proxy.blackhole()

        async def gone() -> bool:
            try:
                await watcher.ask(protocol.get(path, watch=False))
            except exc.NoNode:
                return True
            return False

        certain_at_the_end = []

        async def ended() -> bool:
            answer = await gone()
            if answer:
                certain_at_the_end.append(session.certain)
            return answer

        await tools.until(ended)
        assert certain_at_the_end == [False]
        proxy.heal(release=False)


async def test_after_a_break_the_same_session_becomes_certain_again(proxy, tools):
    """Z3: a break shorter than the timeout costs nothing but time."""
    async with tools.session(f"zookeeper://127.0.0.1:{proxy.port}") as session:
        owner = session.session_id
        for _ in range(5):
            await reset(proxy, session, tools)
            assert session.session_id == owner
            assert session.certain
        first = session.deadline
        await tools.until(lambda: session.deadline > first)


# --- the end of a session


async def test_an_expired_session_is_replaced_and_never_passed_off_as_the_old_one(server, proxy, tools):
    """Z1: connected, lost, connected; requests for the old one are refused unsent."""
    changes: list[str] = []
    async with tools.session(f"zookeeper://127.0.0.1:{proxy.port}", changes=changes) as session:
        owner = session.session_id
        path = (await session.ask(ephemeral(f"/{tools.namespace}"))).path
        # Without a way back it cannot take the session from whoever closes it.
        proxy.refuse = True
        proxy.reset_all()
        await tools.until(lambda: not session.connected)
        await tools.expire(session, server.port)
        proxy.refuse = False
        await tools.until(lambda: session.connected and session.session_id != owner)
        assert "lost" in changes
        with pytest.raises(SessionChanged):
            session.ask(protocol.delete(path), owner)
        with pytest.raises(exc.NoNode):
            await session.ask(protocol.get(path, watch=False))
        assert session.certain


async def test_a_session_ends_with_the_data_of_the_ensemble(tools):
    """A server that knows less than we have seen refuses us, until we come as somebody new."""
    with ZooKeeper() as server:
        async with tools.session(server.url, timeout=1.0) as session:
            owner = session.session_id
            for _ in range(5):
                await session.ask(
                    protocol.create(f"/{tools.namespace}-", b"", protocol.OPEN, sequential=True)
                )
            server.kill()
            for version in server.folder.glob("*/version-2"):
                for file in version.iterdir():
                    file.unlink()
                version.rmdir()
            server.start()
            await tools.until(lambda: session.connected and session.session_id != owner)


# --- who we are


async def test_the_user_is_known_again_after_every_reconnect_before_anybody_else_speaks(server, proxy, tools):
    url = f"zookeeper://me:secret@127.0.0.1:{proxy.port}"
    async with (
        tools.session(url) as session,
        tools.session(server.url) as stranger,
    ):
        path = f"/{tools.namespace}"
        await session.ask(protocol.create(path, b"", protocol.CREATOR, sequential=False))
        with pytest.raises(exc.NoAuth):
            await stranger.ask(protocol.get(path, watch=False))
        for _ in range(5):
            await reset(proxy, session, tools)
            await session.ask(protocol.get(path, watch=False))


async def test_no_password_is_in_any_log(server, tools, caplog):
    with caplog.at_level(logging.DEBUG):
        async with tools.session(f"zookeeper://me:SECRET@127.0.0.1:{server.port}") as session:
            await session.ask(protocol.sync())
    assert "is connected" in caplog.text, "what happens was logged"
    assert "SECRET" not in caplog.text
    assert "SECRET" not in f"{protocol.login(b'me:SECRET')} {protocol.login(b'me:SECRET')!r}"


async def test_a_user_whom_the_ensemble_does_not_accept_is_refused_once(server, tools, monkeypatch):
    monkeypatch.setattr(
        protocol,
        "login",
        lambda credentials: aiozk_protocol.AuthRequest(type=0, scheme="none such", auth=credentials),
    )
    with pytest.raises(BackendRefused, match="does not accept"):
        async with tools.session(f"zookeeper://me:secret@127.0.0.1:{server.port}"):
            raise AssertionError("was let in")


async def test_tls_verifies_the_server_and_shows_a_certificate(tools, tmp_path, monkeypatch):
    # Debian's zookeeper.jar names only a part of Netty in its class path.
    netty = ":".join(glob.glob("/usr/share/java/netty-*[a-z].jar"))  # noqa: PTH207 - a loop that may block
    monkeypatch.setenv("JDK_JAVA_OPTIONS", f"-Xbootclasspath/a:{netty}")
    made = Certificates(tmp_path / "made")
    other = Certificates(tmp_path / "other")
    store, trust = tmp_path / "server.pem", tmp_path / "trust.pem"
    store.write_text(made.key.read_text() + made.cert.read_text())
    trust.write_text(made.ca.read_text())
    ports = contextlib.ExitStack()
    port = reserve_port(ports)
    lines = [
        f"secureClientPort={port}",
        "serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory",
        f"ssl.keyStore.location={store}",
        f"ssl.trustStore.location={trust}",
        "ssl.clientAuth=need",
    ]
    with ports, ZooKeeper(extra=lines):
        files = {"tls": True, "tls_ca": str(made.ca), "tls_cert": str(made.cert), "tls_key": str(made.key)}
        url = f"zookeeper://localhost:{port}"
        async with tools.session(url, **files) as session:
            await session.ask(protocol.create(f"/{tools.namespace}", b"", protocol.CREATOR, sequential=False))
        for wrong in (
            {**files, "tls_ca": str(other.ca)},
            {"tls": True, "tls_ca": str(made.ca)},
            {},
        ):
            with pytest.raises(TimeoutError):
                async with tools.session(url, within=1.0, **wrong):
                    raise AssertionError(f"connected with {wrong}")


# --- leaks


async def test_a_hundred_reconnects_leave_nothing_behind(server, proxy, tools):
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    async with tools.session(f"zookeeper://127.0.0.1:{proxy.port}") as session:
        owner = session.session_id
        await tools.until(lambda: len(proxy.ends) == 2)
        before, tasks = descriptors(), len(asyncio.all_tasks())
        for _ in range(100):
            await reset(proxy, session, tools)
        assert session.session_id == owner
        await tools.until(lambda: len(proxy.ends) == 2)
        gc.collect()
        await tools.until(lambda: descriptors() <= before and len(asyncio.all_tasks()) <= tasks)
        # Nobody but the session itself, which waits for the end of this connection.
        await tools.until(lambda: len(session._changed._waiters) == 1)
        assert session.watchers == {}


@pytest.mark.parametrize("kind", [SYNC, GET, CREATE2])
async def test_a_connection_that_dies_in_the_first_request_after_a_reconnect_is_survived(proxy, tools, kind):
    replies = tools.replies(proxy)
    async with tools.session(f"zookeeper://127.0.0.1:{proxy.port}") as session:
        owner = session.session_id
        proxy.down.drop_next(1, replies.to(kind), reset=True)
        proxy.reset_all()
        request = {
            SYNC: protocol.sync(),
            GET: protocol.get("/", watch=False),
            CREATE2: ephemeral(f"/{tools.namespace}"),
        }[kind]
        while True:
            await session.ready()
            try:
                await session.ask(request)
            except (InDoubt, NotSent):
                continue
            except exc.NodeExists:
                pass
            break
        assert session.session_id == owner
