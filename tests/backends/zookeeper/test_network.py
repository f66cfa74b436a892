"""The network's faults, each by its number: N1 to N15, on locks and not on the session alone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import subprocess
import sys
import threading

import pytest

import aiolock
from aiolock import AcquireTimeout, BackendUnavailable
from aiolock.backends.zookeeper import connection, protocol

CREATE2 = 15
DELETE = 2
MULTI = 14


@pytest.fixture
async def cut(proxy, tools):
    """A client behind the proxy."""
    async with tools.connect(proxy.port, label="cut") as opened:
        yield opened


def request(opcode: int):
    return lambda frame: frame[8:12] == struct.pack("!i", opcode)


async def test_n1_a_connection_that_is_refused_for_a_while_is_tried_again(proxy, tools):
    proxy.refuse = True
    client = tools.connect(proxy.port, command_timeout=10)
    opening = asyncio.create_task(client.open())
    await tools.until(lambda: proxy.connections >= 3)
    proxy.refuse = False
    await opening
    async with client.lock("x", timeout=5):
        pass
    await client.aclose()


async def test_n2_a_reset_while_idle_is_noticed_at_once_and_keeps_the_lock(cut, rival, proxy, tools):
    session = tools.session_of(cut)
    async with cut.lock("x") as lease:
        owner, conn = session.session_id, session.conn
        proxy.reset_all()
        await tools.until(lambda: session.conn is not conn or not session.connected)
        lease.check()
        assert await session.ready() == owner
        lease.check()
        assert await rival.lock("x").try_acquire() is None


async def test_n3_calls_into_a_black_hole_end_in_time(proxy, tools):
    async with tools.connect(proxy.port, query="session_timeout=30", command_timeout=0.5) as cut:
        lease = await cut.lock("held").acquire()
        proxy.blackhole()
        loop = asyncio.get_running_loop()
        for call in (
            cut.lock("x").try_acquire,
            cut.lock("x").inspect,
            cut.lock("x").force_release,
            cut.lock("x", timeout=0).acquire,
            cut.rwlock("x").read().try_acquire,
            cut.semaphore("x", 2).try_acquire,
            cut.semaphore("x", 2).available,
        ):
            begin = loop.time()
            with pytest.raises(BackendUnavailable):
                await call()
            assert loop.time() - begin < 10, call
        with pytest.raises(AcquireTimeout):
            await cut.lock("x").acquire(timeout=0.1)
        await lease.release()
        proxy.heal()


@pytest.mark.parametrize("opcode", [CREATE2, DELETE])
async def test_n4_a_lost_request_leaves_nothing_and_the_lock_is_had(cut, rival, proxy, tools, opcode):
    async with rival.lock("x"):
        pass
    lost = proxy.up.drop_next(1, request(opcode), reset=True)
    async with cut.lock("x", timeout=tools.PATIENCE) as lease:
        lease.check()
        assert len(await tools.nodes(rival, "x")) == 1
    await lost.wait()
    await tools.empty(rival, "x")


@pytest.mark.parametrize("opcode", [CREATE2, DELETE])
async def test_n5_a_lost_reply_leaves_nothing_and_the_lock_is_had(cut, rival, proxy, tools, opcode):
    async with rival.lock("x"):
        pass
    lost = proxy.down.drop_next(1, tools.replies(proxy).to(opcode), reset=True)
    async with cut.lock("x", timeout=tools.PATIENCE) as lease:
        lease.check()
        assert len(await tools.nodes(rival, "x")) == 1
    await lost.wait()
    await tools.empty(rival, "x")


async def test_n6_a_reply_cut_anywhere_costs_its_connection_and_no_other_reply(cut, rival, proxy, tools):
    replies = tools.replies(proxy)
    for size in (0, 1, 3, 4, 7, 16, 19, 20, 21, 40):
        cut_off = proxy.down.cut_after(size, replies.to(CREATE2))
        async with cut.lock("x", timeout=tools.PATIENCE) as lease:
            assert cut_off.is_set()
            assert len(await tools.nodes(rival, "x")) == 1
            lease.check()
    await tools.empty(rival, "x")


async def test_n7_one_byte_at_a_time_makes_no_difference(proxy, rival, tools):
    proxy.up.slices = proxy.down.slices = 1
    async with tools.connect(proxy.port, query="session_timeout=20") as slow:
        for _ in range(3):
            holder = await rival.lock("x").acquire()
            waiter = await tools.waiting(rival, slow.lock("x"))
            await holder.release()
            async with asyncio.timeout(tools.PATIENCE):
                await (await waiter).release()
        async with slow.semaphore("y", 2), slow.rwlock("z").write():
            pass


async def test_n8_a_round_trip_of_a_seventh_of_the_session_loses_nothing(proxy, rival, tools):
    query = "session_timeout=4&tick_time=0.5"
    async with tools.connect(proxy.port, query=query, command_timeout=20) as slow:
        proxy.up.delay = proxy.down.delay = 0.28
        async with slow.lock("x", timeout=tools.PATIENCE) as lease:
            for _ in range(6):
                lease.check()
                assert await rival.lock("x").try_acquire() is None
                await asyncio.sleep(0.5)
        proxy.up.delay = proxy.down.delay = 0.0


async def test_n8_a_grant_is_not_believed_while_the_session_is_not_certain(cut, rival, proxy, tools):
    """The answer comes after the deadline: the node is there, and nobody is told that the lock is theirs."""
    session = tools.session_of(cut)
    await tools.until(lambda: session._heartbeats is not None)
    timeout = session._heartbeats.timeout
    session._heartbeats.timeout = 0.0
    session._heartbeats.deadline = 0.0
    acquiring = asyncio.create_task(cut.lock("x").acquire())

    async def there() -> bool:
        return len(await tools.nodes(rival, "x")) == 1

    await tools.until(there)
    await asyncio.sleep(0.1)
    assert not acquiring.done()
    session._heartbeats.timeout = timeout
    async with asyncio.timeout(tools.PATIENCE):
        lease = await acquiring
    lease.check()
    await lease.release()


@pytest.mark.parametrize("opcode", [CREATE2, DELETE])
async def test_n9_what_arrives_late_changes_nobodys_hold(cut, rival, proxy, tools, opcode):
    """The request is held on its way, the session ends, somebody else has the lock; then it arrives."""
    async with rival.lock("x"):
        pass
    if opcode == DELETE:
        lease = await cut.lock("x").acquire()
        proxy.up.blackhole()
        task = asyncio.create_task(lease.release())
    else:
        proxy.up.blackhole()
        task = asyncio.create_task(cut.lock("x").acquire(timeout=1.0))
    async with asyncio.timeout(tools.PATIENCE):
        following = await rival.lock("x").acquire()
    await asyncio.wait([task])
    if opcode == CREATE2:
        assert isinstance(task.exception(), AcquireTimeout)
    proxy.up.heal()
    await asyncio.sleep(0.5)
    following.check()
    assert len(await tools.nodes(rival, "x")) >= 1
    await following.release()
    await tools.empty(rival, "x")


async def test_n10_whoever_can_speak_but_not_hear_knows_in_time(cut, rival, proxy, tools):
    lease = await cut.lock("x").acquire()
    waiter = await tools.waiting(rival, rival.lock("x"))
    owner = tools.session_of(cut).session_id
    proxy.down.blackhole()
    lost = asyncio.create_task(lease.wait_lost())
    # What it says keeps its session alive; it has to stop saying it.
    async with asyncio.timeout(tools.PATIENCE):
        following = await waiter
    assert not lease.held
    assert tools.session_of(cut).session_id != owner
    await lost
    proxy.down.heal(release=False)
    await following.release()
    async with cut.lock("x", timeout=tools.PATIENCE):
        pass


async def test_n11_a_flapping_link_is_not_stormed_and_costs_nobody_a_lock(rival, proxy, tools):
    async with tools.connect(proxy.port, query="session_timeout=10") as cut:
        holder = await rival.lock("y").acquire()
        waiter = await tools.waiting(rival, cut.lock("y"))
        lease = await cut.lock("x").acquire()
        before, loop = proxy.connections, asyncio.get_running_loop()
        begin = loop.time()
        for _ in range(40):
            proxy.reset_all()
            await asyncio.sleep(0.05)
            lease.check()
        per_second = (proxy.connections - before) / (loop.time() - begin)
        print(f"{per_second:.0f} connections per second")
        assert per_second < 60
        await holder.release()
        async with asyncio.timeout(tools.PATIENCE):
            await (await waiter).release()
        await lease.release()
        await tools.empty(rival, "x")


async def test_n12_no_hand_over_is_lost_when_the_waiters_connection_breaks_each_time(
    cut, rival, proxy, tools
):
    """A watch is the only thing that wakes, and it dies with the connection."""
    for turn in range(40):
        holder = await rival.lock("x").acquire()
        waiter = await tools.waiting(rival, cut.lock("x"))
        if turn % 2:
            proxy.reset_all()
            await holder.release()
        else:
            await holder.release()
            proxy.reset_all()
        async with asyncio.timeout(tools.PATIENCE):
            await (await waiter).release()
    await tools.empty(rival, "x")


# --- N13: names


class Names:
    """A resolver that says what it is told to."""

    def __init__(self, monkeypatch) -> None:
        self.answers: dict[str, list[str]] = {}
        self.asked = 0
        self.hangs = threading.Event()
        self.hangs.set()
        self._real = socket.getaddrinfo
        monkeypatch.setattr(connection.socket, "getaddrinfo", self._answer)

    def _answer(self, host, port, *rest, **options):
        if host not in self.answers:
            return self._real(host, port, *rest, **options)
        self.asked += 1
        self.hangs.wait(30)
        if not self.answers[host]:
            raise socket.gaierror(socket.EAI_AGAIN, "try again")
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in self.answers[host]
        ]


@pytest.fixture
def names(monkeypatch) -> Names:
    return Names(monkeypatch)


async def test_n13_a_name_is_resolved_again_for_each_attempt(server, proxy, tools, names):
    """The server has moved to another address, as in a cluster that starts its machines anew."""
    names.answers["moves.test"] = ["127.0.0.1"]
    url = f"zookeeper://moves.test:{proxy.port}?session_timeout=20"
    elsewhere = await asyncio.start_server(
        lambda reader, writer: relay(reader, writer, server.port), "127.0.0.9", proxy.port
    )
    try:
        async with aiolock.connect(url, namespace=tools.namespace) as client, client.lock("x") as lease:
            # There is nobody any more where it was.
            proxy.stop_listening()
            names.answers["moves.test"] = ["127.0.0.9"]
            session = tools.session_of(client)
            asked, conn = names.asked, session.conn
            proxy.reset_all()
            await tools.until(lambda: session.conn is not conn and session.connected)
            assert names.asked > asked
            lease.check()
    finally:
        elsewhere.close()


async def relay(reader, writer, port: int) -> None:
    there, back = await asyncio.open_connection("127.0.0.1", port)

    async def pump(source, sink) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(4096):
                sink.write(data)
        sink.close()

    await asyncio.gather(pump(reader, back), pump(there, writer))


async def test_n13_every_address_of_a_name_is_tried(server, tools, names):
    names.answers["several.test"] = ["127.0.0.7", "127.0.0.8", "127.0.0.1"]
    for _ in range(3):
        async with aiolock.connect(f"zookeeper://several.test:{server.port}", namespace=tools.namespace):
            pass


async def test_n13_a_name_that_does_not_resolve_for_a_while_costs_nobody_the_session(proxy, tools, names):
    names.answers["flaky.test"] = ["127.0.0.1"]
    url = f"zookeeper://flaky.test:{proxy.port}?session_timeout=20"
    async with aiolock.connect(url, namespace=tools.namespace) as client:
        lease = await client.lock("x").acquire()
        names.answers["flaky.test"] = []
        asked = names.asked
        proxy.reset_all()
        await tools.until(lambda: names.asked >= asked + 2)
        names.answers["flaky.test"] = ["127.0.0.1"]
        await tools.session_of(client).ready()
        lease.check()
        await lease.release()


async def test_n13_a_resolver_that_hangs_costs_a_bounded_time(server, tools, names):
    names.answers["hangs.test"] = ["127.0.0.1"]
    names.hangs.clear()
    url = f"zookeeper://hangs.test:{server.port},127.0.0.1:{server.port}?session_timeout=6"
    try:
        for _ in range(3):
            async with asyncio.timeout(10):
                async with aiolock.connect(url, namespace=tools.namespace) as client, client.lock("x"):
                    pass
        client = aiolock.connect("zookeeper://hangs.test", command_timeout=0.3)
        with pytest.raises(BackendUnavailable):
            await client.open()
    finally:
        names.hangs.set()


def test_n13_a_resolver_that_hangs_does_not_keep_the_process_from_ending():
    program = (
        "import asyncio, socket, time, aiolock\n"
        "socket.getaddrinfo = lambda *a, **o: time.sleep(60)\n"
        "async def main():\n"
        "    try: await aiolock.connect('zookeeper://hangs.test', command_timeout=0.2).open()\n"
        "    except aiolock.BackendUnavailable: print('in time')\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout == "in time\n"


# --- N14


@pytest.mark.parametrize(
    "error", [AttributeError("no _add_writer"), RuntimeError("closed"), OSError(9, "bad")]
)
async def test_n14_whatever_a_transport_raises_is_an_error_of_ours(proxy, rival, tools, monkeypatch, error):
    async with tools.connect(proxy.port, query="session_timeout=20", command_timeout=1) as cut:
        lease = await cut.lock("held").acquire()
        session = tools.session_of(cut)
        conn = session.conn

        def fail(_data) -> None:
            raise error

        monkeypatch.setattr(conn.transport, "write", fail)
        with contextlib.suppress(BackendUnavailable):
            # It may go well on the next connection.
            if (other := await cut.lock("x").try_acquire()) is not None:
                await other.release()
        await tools.until(lambda: session.conn is not conn and session.connected)
        lease.check()
        async with cut.lock("y", timeout=5):
            pass
        await lease.release()


async def test_n15_a_server_without_tls_is_not_spoken_to_in_the_clear(server, tools):
    seen: list[bytes] = []

    async def listen(reader, writer) -> None:
        seen.append(await reader.read(100))
        writer.close()

    stranger = await asyncio.start_server(listen, "127.0.0.1", 0)
    port = stranger.sockets[0].getsockname()[1]
    url = f"zookeeper://me:secret@127.0.0.1:{port}?tls=true"
    with pytest.raises(BackendUnavailable) as caught:
        await aiolock.connect(url, command_timeout=1).open()
    stranger.close()
    await stranger.wait_closed()
    # An attempt whose time was over may have ended before it said anything.
    sent = [data for data in seen if data]
    assert sent
    assert all(data[:1] == b"\x16" for data in sent), "a handshake, and nothing else"
    assert "secret" not in f"{caught.value!r} {caught.value.__cause__!r}"
    with pytest.raises(BackendUnavailable):
        await aiolock.connect(f"zookeeper://127.0.0.1:{server.port}?tls=true", command_timeout=1).open()


async def test_z13_a_list_of_more_than_a_megabyte_is_read(server, tools):
    """Of those who wait, all but the first and the last are only names, and long ones."""
    query = "session_timeout=30"
    async with (
        tools.connect(server.port, query=query) as client,
        tools.connect(server.port, query=query) as rival,
    ):
        session, count, path = tools.session_of(client), 5_500, tools.path("x")
        holder = await client.lock("x").acquire()
        for begin in range(0, count, 500):
            requests = [
                protocol.create(f"{path}/_c_{number:0190d}-lock-", b"", protocol.OPEN, sequential=True)
                for number in range(begin, begin + 500)
            ]
            await asyncio.gather(*map(session.ask, requests))
        nodes = (await tools.nodes(client, "x"))[1:]
        assert sum(map(len, nodes)) > 1_048_576
        last = asyncio.create_task(rival.lock("x").acquire())

        async def arrived() -> bool:
            return len(await tools.nodes(client, "x")) == count + 2

        await tools.until(arrived)
        await holder.release()
        for begin in range(0, count, 500):
            assert not last.done()
            deletes = [protocol.delete(f"{path}/{node}") for node in nodes[begin : begin + 500]]
            await asyncio.gather(*map(session.ask, deletes))
        async with asyncio.timeout(tools.PATIENCE):
            await (await last).release()
