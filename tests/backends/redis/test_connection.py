"""One connection for everybody: replies stay in step, and every call is answered or failed in time, whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import select
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from aiolock.backends import transport
from aiolock.backends.redis import connection as connection_module
from aiolock.backends.redis.commands import Script, as_eval, encode
from aiolock.backends.redis.connection import Connection
from aiolock.backends.redis.errors import was_sent
from aiolock.backends.redis.url import Endpoint
from aiolock.backends.transport import ConnectionState
from aiolock.clock import system_clock
from aiolock.errors import BackendRefused, BackendUnavailable
from tests.faults.proxy import Proxy, resp_frames
from tests.servers import Redis

ECHO = "return {KEYS[1], ARGV[1], ARGV[2]}"


@pytest.fixture(scope="module")
def server():
    with Redis() as running:
        yield running


@contextlib.asynccontextmanager
async def connected(server, *, port=None, timeout=30.0, **options):
    connection = Connection(
        Endpoint(f"redis://127.0.0.1:{port or server.port}"),
        clock=system_clock,
        command_timeout=timeout,
        **options,
    )
    await connection.open()
    try:
        yield connection
    finally:
        await connection.aclose()


def in_flight(connection: Connection) -> int:
    """How many commands are under way or wait to be sent."""
    return len(connection._pending) + len(connection._waiting) + len(connection._parked)


async def until(condition: Callable[[], bool]) -> None:
    loop = asyncio.get_running_loop()
    give_up = loop.time() + 20
    while not condition():
        assert loop.time() < give_up
        await asyncio.sleep(0.002)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Spy:
    """Stands before the transport of a connection and keeps what is written."""

    def __init__(self, connection: Connection) -> None:
        self.transport = connection._transport
        self.writes: list[bytes] = []
        connection._transport = self

    def write(self, data: bytes) -> None:
        self.writes.append(data)
        self.transport.write(data)

    def __getattr__(self, name):
        return getattr(self.transport, name)


# --- writing


async def test_a_lone_command_is_written_at_once(server):
    async with connected(server) as connection:
        await connection.call("PING")
        spy = Spy(connection)
        reply = connection.call("ECHO", "x")
        assert spy.writes == [b"*2\r\n$4\r\nECHO\r\n$1\r\nx\r\n"]
        assert await reply == b"x"


async def test_commands_of_one_pass_of_the_loop_are_one_write(server):
    async with connected(server) as connection:

        async def turn(n: int) -> None:
            for _ in range(5):
                assert await connection.call("ECHO", n) == b"%d" % n

        spy = Spy(connection)
        await asyncio.gather(*(turn(n) for n in range(100)))
    # The very first goes alone. The rest of each round leaves together, unless the kernel cut the replies in two.
    assert spy.writes[0].count(b"ECHO") == 1
    assert len(spy.writes) < 100
    assert b"".join(spy.writes).count(b"ECHO") == 500


async def test_a_command_is_written_before_whoever_is_woken_after_it_runs(server):
    async with connected(server) as connection:
        first = connection.call("PING")
        spy = Spy(connection)
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        connection.call("ECHO", "behind the first")
        asyncio.get_running_loop().call_soon(woken.set_result, None)
        await woken
        assert b"behind the first" in b"".join(spy.writes)
        await first


async def test_the_time_of_arrival_is_read_from_the_given_clock(server):
    now = 100.0
    connection = Connection(Endpoint(server.url), clock=lambda: now, command_timeout=5)
    await connection.open()
    now = 200.0
    await connection.call("PING")
    assert connection.received == 200.0
    await connection.aclose()


def test_words_on_the_wire_are_bytes_text_or_whole_numbers():
    assert encode("SET", b"\x00\r\n", "é", -1) == (
        b"*4\r\n$3\r\nSET\r\n$3\r\n\x00\r\n\r\n$2\r\n\xc3\xa9\r\n$2\r\n-1\r\n"
    )
    with pytest.raises(TypeError):
        encode("SET", None)


@pytest.mark.parametrize(
    ("keys", "args"), [((), ()), (("k",), ("a", 1)), (("k",) * 12, ()), (("k",), ("\r\n",) * 250)]
)
def test_a_script_call_is_an_ordinary_command_and_so_is_its_longer_form(keys, args):
    script = Script(f"return {len(keys)}")
    call = script.encode(keys, args)
    assert call == encode("EVALSHA", script.sha, len(keys), *keys, *args)
    assert call == script.encode(keys, args)
    assert as_eval(call) == encode("EVAL", script.source, len(keys), *keys, *args)


def test_only_calls_of_known_scripts_have_a_longer_form():
    assert as_eval(encode("PING")) is None
    assert as_eval(encode("EVALSHA", "0" * 40, 0)) is None


# --- in step


async def test_cancelled_callers_leave_everybody_else_in_step(server):
    chance = random.Random(7)
    async with connected(server) as connection:
        seen = 0

        async def caller(n: int) -> None:
            nonlocal seen
            for turn in range(30):
                word = f"{n}:{turn}".encode()
                assert await connection.call("ECHO", word) == word
                seen += 1

        async def canceller(tasks: list[asyncio.Task[None]]) -> None:
            while any(not task.done() for task in tasks[::2]):
                chance.choice(tasks[::2]).cancel()
                for _ in range(chance.randrange(3)):
                    await asyncio.sleep(0)

        tasks = [asyncio.ensure_future(caller(n)) for n in range(60)]
        await canceller(tasks)
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) or end is None for end in ended)
        assert all(end is None for end in ended[1::2])
        assert any(isinstance(end, asyncio.CancelledError) for end in ended[::2])
        assert seen >= 30 * 30
        assert await connection.call("ECHO", "last") == b"last"
        assert connection.generation == 1
        await until(lambda: in_flight(connection) == 0)


async def test_replies_that_arrive_byte_by_byte_are_put_together(server):
    async with Proxy("127.0.0.1", server.port) as proxy:
        proxy.up.slices = proxy.down.slices = 1
        async with connected(server, port=proxy.port) as connection:
            words = [os.urandom(n) for n in range(40)]
            assert await asyncio.gather(*(connection.call("ECHO", word) for word in words)) == words


async def test_an_error_reply_fails_its_own_call_only(server):
    async with connected(server) as connection:
        replies = [connection.call("ECHO", n) for n in range(5)]
        replies[2:2] = [connection.call("NO-SUCH-COMMAND", "an argument")]
        ended = await asyncio.gather(*replies, return_exceptions=True)
        assert ended[:2] + ended[3:] == [b"0", b"1", b"2", b"3", b"4"]
        assert isinstance(ended[2], BackendRefused)
        assert "an argument" not in f"{ended[2]} {ended[2].__cause__}"


async def test_an_answer_that_nobody_asked_for_breaks_the_connection():
    async def respond(reader, writer):
        await reader.readuntil(b"PING\r\n")
        writer.write(b"+PONG\r\n")
        if b"ECHO" in await reader.read(100):
            writer.write(b"$4\r\nmine\r\n$5\r\nstray\r\n")
            await reader.read()
        writer.close()

    async with (
        await asyncio.start_server(respond, "127.0.0.1", 0) as other,
        connected(None, port=other.sockets[0].getsockname()[1]) as connection,
    ):
        assert await connection.call("ECHO", "mine") == b"mine"
        await until(lambda: connection.generation == 2)


# --- scripts


async def test_scripts_are_known_before_they_are_called(server):
    script = Script("return 'known ' .. ARGV[1]")
    async with connected(server, scripts=[script]) as connection:
        assert await connection.call("SCRIPT", "EXISTS", script.sha) == [1]
        assert await connection.issue(script.encode((), ("x",))) == b"known x"


async def test_a_forgotten_script_is_sent_in_full_for_each_call_that_needs_it(server):
    script = Script(ECHO)
    async with connected(server) as connection:
        await connection.call("SCRIPT", "FLUSH")
        words = [os.urandom(20) + b"\r\n" for _ in range(20)]
        calls = [connection.issue(script.encode((word,), (n, "é"))) for n, word in enumerate(words)]
        for n, (word, call) in enumerate(zip(words, calls, strict=True)):
            assert await call == [word, b"%d" % n, "é".encode()]
        assert in_flight(connection) == 0


async def test_a_forgotten_script_has_no_more_time_for_being_sent_again():
    flushed, sent_again = asyncio.Event(), asyncio.Event()

    async def respond(reader, writer):
        await reader.readuntil(b"PING\r\n")
        writer.write(b"+PONG\r\n")
        await reader.readuntil(b"EVALSHA\r\n")
        await flushed.wait()
        writer.write(b"-NOSCRIPT No matching script.\r\n")
        await reader.readuntil(b"EVAL\r\n")
        sent_again.set()
        await reader.read()
        writer.close()

    now = 100.0
    async with await asyncio.start_server(respond, "127.0.0.1", 0) as other:
        endpoint = Endpoint(f"redis://127.0.0.1:{other.sockets[0].getsockname()[1]}")
        connection = Connection(endpoint, clock=lambda: now, command_timeout=1.0)
        await connection.open()
        early = connection.issue(Script(ECHO).encode(("key",), ("a", "b")))
        now = 100.4
        late = connection.call("ECHO", "late")
        now = 100.8
        flushed.set()
        async with asyncio.timeout(20):
            await sent_again.wait()
        now = 101.02
        connection._timer.cancel()
        connection._judge(connection._clock())
        assert isinstance(early.exception(), BackendUnavailable)
        assert not late.done()
        now = 101.42
        connection._timer.cancel()
        connection._judge(connection._clock())
        assert isinstance(late.exception(), BackendUnavailable)
        await connection.aclose()


async def test_a_forgotten_script_of_a_caller_who_left_is_not_sent_again(server):
    script = Script("return redis.call('INCR', KEYS[1])")
    async with connected(server) as connection:
        await connection.call("SCRIPT", "FLUSH")
        await connection.call("DEL", "counter")
        connection.issue(script.encode(("counter",))).cancel()
        assert await connection.call("PING") == b"PONG"
        assert await connection.call("GET", "counter") is None


# --- broken


async def test_a_killed_connection_comes_back(server):
    story = []
    async with (
        connected(server) as admin,
        connected(
            server, on_up=lambda: story.append("up"), on_down=lambda: story.append("down")
        ) as connection,
    ):
        for number in range(1, 4):
            name = await connection.call("CLIENT", "ID")
            assert await admin.call("CLIENT", "KILL", "ID", name) == 1
            await until(lambda number=number: story.count("down") == number)
            assert await connection.call("ECHO", "again") == b"again"
        assert story == ["up", "down"] * 3 + ["up"]
        assert connection.generation == 4


async def test_loss_of_the_connection_fails_what_was_sent_at_once_and_in_doubt(server):
    async with Proxy("127.0.0.1", server.port) as proxy, connected(server, port=proxy.port) as connection:
        proxy.blackhole()
        calls = [connection.call("ECHO", n) for n in range(10)]
        await asyncio.sleep(0)
        proxy.reset_all()
        for call in calls:
            with pytest.raises(BackendUnavailable, match="is not known") as caught:
                await call
            assert was_sent(caught.value)
        proxy.heal()


async def test_calls_while_it_is_down_wait_for_the_next_connection(server):
    async with Proxy("127.0.0.1", server.port) as proxy, connected(server, port=proxy.port) as connection:
        proxy.stop_listening()
        proxy.reset_all()
        await until(lambda: connection.state is not ConnectionState.READY)
        calls = [connection.call("ECHO", n) for n in range(5)]
        left = connection.call("INCR", "left")
        left.cancel()
        await until(lambda: connection.failure is not None and "nothing listens" in str(connection.failure))
        assert not any(call.done() for call in calls)
        await proxy.start_listening()
        assert await asyncio.gather(*calls) == [b"%d" % n for n in range(5)]
        assert await connection.call("EXISTS", "left") == 0


async def test_what_was_issued_but_not_written_when_it_broke_is_sent_by_the_next(server):
    async with connected(server) as connection:
        first = connection.call("PING")
        behind = connection.call("ECHO", "behind")  # waits for the end of this pass of the loop
        connection._lost(BackendUnavailable("staged"))
        assert await behind == b"behind"
        with pytest.raises(BackendUnavailable, match="not known"):
            await first


async def test_what_was_sent_on_to_who_is_not_connected_yet_is_put_in_order_once(server, monkeypatch):
    """It may be thousands of commands, as when a node of a cluster takes over: nobody else may stand still for them."""
    sortings = 0

    def counted(*args, **options):
        nonlocal sortings
        sortings += 1
        return sorted(*args, **options)

    monkeypatch.setattr(connection_module, "sorted", counted, raising=False)
    connection = Connection(
        Endpoint(f"redis://127.0.0.1:{server.port}"), clock=system_clock, command_timeout=30.0
    )
    loop, now = asyncio.get_running_loop(), system_clock()
    first = connection.begin()
    try:
        ages = [number * 7919 % 10_007 for number in range(10_000)]
        answers = [loop.create_future() for _ in ages]
        for age, answer in zip(ages, answers, strict=True):
            connection.reissue(answer, encode("RPUSH", "in order", age), now + age / 10_007)
        assert ages != sorted(ages)
        await first
        await asyncio.gather(*answers)
        found = await connection.call("LRANGE", "in order", 0, -1)
        assert list(map(int, found)) == sorted(ages)
        assert sortings <= 3
    finally:
        await connection.aclose()


async def test_a_call_does_not_wait_for_a_connection_for_ever(server):
    async with (
        Proxy("127.0.0.1", server.port) as proxy,
        connected(server, port=proxy.port, timeout=0.4) as connection,
    ):
        proxy.stop_listening()
        proxy.reset_all()
        await until(lambda: connection.state is not ConnectionState.READY)
        with pytest.raises(BackendUnavailable, match="nothing listens") as caught:
            await connection.call("PING")
        assert not was_sent(caught.value)
        assert caught.value.retryable
        assert in_flight(connection) == 0


async def test_a_frozen_server_fails_calls_in_time_and_late_replies_are_discarded(server):
    async with connected(server, timeout=0.4) as connection:
        begun = asyncio.get_running_loop().time()
        server.freeze()
        try:
            calls = [connection.call("ECHO", n) for n in range(100)]
            for call in calls:
                with pytest.raises(BackendUnavailable, match="did not answer within"):
                    await call
            took = asyncio.get_running_loop().time() - begun
            assert in_flight(connection) == 100
        finally:
            server.thaw()
        assert 0.35 < took < 20, "one after the other they would take 40 s"
        assert await connection.call("ECHO", "in step") == b"in step"
        assert connection.generation == 1


async def test_each_call_has_its_own_deadline(server):
    now = 100.0
    connection = Connection(Endpoint(server.url), clock=lambda: now, command_timeout=1.0)
    await connection.open()

    def look_at(moment: float) -> None:
        nonlocal now
        now = moment
        connection._timer.cancel()
        connection._judge(connection._clock())

    server.freeze()
    try:
        early = connection.call("ECHO", "early")
        now = 100.5
        late = connection.call("ECHO", "late")
        await asyncio.sleep(0)
        look_at(100.98)
        assert not early.done()
        look_at(101.02)
        assert isinstance(early.exception(), BackendUnavailable)
        assert not late.done()
        look_at(101.52)
        assert isinstance(late.exception(), BackendUnavailable)
    finally:
        server.thaw()
    assert await connection.call("ECHO", "in step") == b"in step"
    await connection.aclose()


async def test_a_half_open_connection_is_found_by_silence(server, monkeypatch):
    monkeypatch.setattr(transport, "PING_EVERY", 0.1)
    monkeypatch.setattr(transport, "PING_WITHIN", 0.1)
    down = asyncio.Event()
    async with (
        Proxy("127.0.0.1", server.port) as proxy,
        connected(server, port=proxy.port, on_down=down.set) as connection,
    ):
        proxy.blackhole()
        async with asyncio.timeout(20):
            await down.wait()
        assert "PING" in str(connection.failure)
        proxy.heal(release=False)
        assert await connection.call("ECHO", "back") == b"back"


async def test_an_idle_connection_is_pinged_and_stays(server, monkeypatch):
    monkeypatch.setattr(transport, "PING_EVERY", 0.03)
    monkeypatch.setattr(transport, "PING_WITHIN", 5)
    async with (
        Proxy("127.0.0.1", server.port, framing=resp_frames) as proxy,
        connected(server, port=proxy.port) as connection,
    ):
        await proxy.up.arrived(proxy.up.frames + 3)
        assert await connection.call("ECHO", "in step") == b"in step"
        assert connection.generation == 1


async def test_replies_that_arrived_while_the_loop_stood_still_are_read_before_anybody_is_judged(server):
    async with connected(server, timeout=0.3) as connection:
        reply = connection.call("ECHO", "patience")
        # The whole loop stands still, as by SIGSTOP, past the deadline of the call, and until the reply is there.
        time.sleep(0.5)  # noqa: ASYNC251
        select.select([connection._transport.get_extra_info("socket")], [], [], 60)
        assert await reply == b"patience"


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_thousands_of_answers_behind_a_stall_are_read_before_one_of_their_calls_has_failed(
    server, loop, monkeypatch
):
    """One pass of the loop reads a small part of them, and the program takes its time with each."""
    # The server has no room for all of them before the first is read. When it goes on then is up to the machine.
    monkeypatch.setattr(transport, "GRACE", 20.0)

    async def main() -> None:
        async with connected(server, timeout=0.3) as connection:
            await connection.call("SET", "large", "x" * 32_000)
            replies = [connection.call("GET", "large") for _ in range(500)]
            for reply in replies:
                reply.add_done_callback(lambda _: time.sleep(0.001))
            await asyncio.sleep(0)
            time.sleep(0.5)  # noqa: ASYNC251 - as above
            found = await asyncio.gather(*replies, return_exceptions=True)
            assert [answer for answer in found if isinstance(answer, Exception)] == []

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


async def test_after_a_stall_a_server_may_go_on_for_as_long_as_it_sends_and_for_one_more_timeout(
    server, monkeypatch
):
    """The server, and not only this process, may be slow to go on: it had no room for the rest of its answers."""
    monkeypatch.setattr(transport, "GRACE", 0.0)
    now = 100.0
    connection = Connection(Endpoint(server.url), clock=lambda: now, command_timeout=1.0)
    await connection.open()
    connection._timer.cancel()
    server.freeze()
    try:
        calls = [connection.call("ECHO", n) for n in range(100)]
        await asyncio.sleep(0)
        now = 103.0
        connection._on_timer()
        for n in range(60):
            # Each pass of the loop reads one answer, and finds the socket empty behind it.
            now += 0.01
            connection.data_received(b":%d\r\n" % n)
            await asyncio.sleep(0)
        assert [call.result() for call in calls[:60]] == list(range(60))
        assert not any(call.done() for call in calls[60:])
        now = 104.0
        for n in range(60, 70):
            connection.data_received(b":%d\r\n" % n)
            await asyncio.sleep(0)
        assert all(isinstance(call.exception(), BackendUnavailable) for call in calls[70:])
    finally:
        server.thaw()
    await connection.aclose()


async def test_after_a_stall_a_server_that_sends_nothing_has_a_moment_and_no_more(server, monkeypatch):
    monkeypatch.setattr(transport, "GRACE", 0.0)
    now = 100.0
    connection = Connection(Endpoint(server.url), clock=lambda: now, command_timeout=1.0)
    await connection.open()
    connection._timer.cancel()
    server.freeze()
    try:
        call = connection.call("ECHO", "patience")
        await asyncio.sleep(0)
        now = 103.0
        connection._on_timer()
        for _ in range(20):
            await asyncio.sleep(0)
        assert isinstance(call.exception(), BackendUnavailable)
    finally:
        server.thaw()
    await connection.aclose()


async def test_a_ping_whose_answer_waits_behind_others_in_a_stall_ends_no_connection(server, monkeypatch):
    monkeypatch.setattr(transport, "PING_EVERY", 0.05)
    monkeypatch.setattr(transport, "PING_WITHIN", 0.05)
    async with connected(server) as connection:
        await connection.call("SET", "large", "x" * 32_000)
        for _ in range(5):
            await asyncio.sleep(0.06)
            replies = [connection.call("GET", "large") for _ in range(100)]
            await asyncio.sleep(0)
            time.sleep(0.2)  # noqa: ASYNC251 - as above
            await asyncio.gather(*replies)
        assert connection.generation == 1


async def test_more_than_the_limit_is_refused_without_being_sent(server):
    async with connected(server, limit=10) as connection:
        server.freeze()
        try:
            calls = [connection.call("ECHO", n) for n in range(10)]
            with pytest.raises(BackendUnavailable, match="overloaded") as caught:
                await connection.call("ECHO", "one too many")
            assert not was_sent(caught.value)
        finally:
            server.thaw()
        assert await asyncio.gather(*calls) == [b"%d" % n for n in range(10)]
        assert await connection.call("ECHO", "room again") == b"room again"


async def test_a_primary_that_became_a_replica_is_left(server, monkeypatch):
    monkeypatch.setattr(connection_module, "STABLE", 0.0)
    with Redis() as moving:
        down = asyncio.Event()
        async with connected(moving, on_down=down.set) as connection:
            await connection.call("REPLICAOF", "127.0.0.1", server.port)
            with pytest.raises(BackendUnavailable, match="primary") as caught:
                await connection.call("SET", "key", "value")
            assert caught.value.retryable
            assert down.is_set()
            await connection.call("REPLICAOF", "NO", "ONE")
            assert await connection.call("SET", "key", "value") == b"OK"


# --- closed


async def test_closing_fails_what_is_under_way_and_what_comes_after(server):
    async with connected(server) as connection:
        server.freeze()
        try:
            pending = connection.call("PING")
            await asyncio.gather(connection.aclose(), connection.aclose())
        finally:
            server.thaw()
        with pytest.raises(BackendUnavailable, match="closed"):
            await pending
        with pytest.raises(RuntimeError, match="not open"):
            connection.call("PING")
        await connection.aclose()
        assert connection.state is ConnectionState.CLOSED


async def test_what_was_issued_before_closing_is_sent(server):
    async with connected(server) as reader:
        await reader.call("DEL", "farewell")
        async with connected(server) as connection:
            for _ in range(3):
                connection.call("INCR", "farewell")
        async with asyncio.timeout(20):
            while await reader.call("GET", "farewell") != b"3":
                pass


async def test_closing_ends_an_opening_that_waits():
    connection = Connection(Endpoint("redis://127.0.0.1:1"), clock=system_clock, command_timeout=3600)
    opening = asyncio.ensure_future(connection.open())
    await until(lambda: connection.failure is not None)
    await connection.aclose()
    with pytest.raises(BackendUnavailable, match="closed"):
        await opening


async def test_errors_that_nobody_looks_at_are_silent(server):
    # That nothing is complained about is checked around every test; here is something to complain about.
    async with connected(server, timeout=0.2) as connection:
        connection.call("NO-SUCH-COMMAND")
        await connection.call("PING")
        server.freeze()
        try:
            connection.call("PING")
            await until(lambda: connection._pending and connection._pending[0][0].done())
            connection.call("PING")
            connection._lost(BackendUnavailable("staged"))
            connection.call("PING")
            await connection.aclose()
        finally:
            server.thaw()


async def test_opening_and_closing_leaves_no_descriptor(server):
    async def once() -> None:
        async with connected(server) as connection:
            await connection.call("PING")

    await once()
    before = descriptors()
    for _ in range(20):
        await once()
        # Closed means closed: not in a later pass of the loop.
        assert descriptors() == before


async def test_closing_in_the_middle_of_reconnecting_leaves_nothing(server):
    tasks = asyncio.all_tasks()
    async with Proxy("127.0.0.1", server.port) as proxy:
        for steps in range(12):
            async with connected(server, port=proxy.port) as connection:
                proxy.reset_all()
                await until(lambda c=connection: c.state is not ConnectionState.READY)
                await asyncio.sleep(0.003 * steps)
            assert connection.state is ConnectionState.CLOSED
            assert not [task for task in asyncio.all_tasks() - tasks if "connect" in task.get_name()]


async def test_a_forked_child_may_not_use_it_and_does_not_disturb_it(server):
    async with connected(server) as connection:
        await connection.call("PING")
        child = os.fork()
        if not child:
            status = 1
            with contextlib.suppress(BaseException):
                try:
                    connection.call("SET", "from", "child")
                except RuntimeError as error:
                    status = 0 if "fork" in str(error) else 2
                closing = connection.aclose()
                with contextlib.suppress(StopIteration):
                    closing.send(None)
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0  # noqa: ASYNC222
        assert await connection.call("ECHO", "undisturbed") == b"undisturbed"
        assert await connection.call("EXISTS", "from") == 0
        assert connection.generation == 1


# --- another loop


def test_uvloop_is_as_good(server):
    async def work(url: str, **options) -> None:
        connection = Connection(Endpoint(url, **options), clock=system_clock, command_timeout=20)
        await connection.open()
        words = await asyncio.gather(*(connection.call("ECHO", n) for n in range(300)))
        assert words == [b"%d" % n for n in range(300)]
        await connection.call("CLIENT", "KILL", "ID", await connection.call("CLIENT", "ID"), "SKIPME", "no")
        await until(lambda: connection.generation == 2)
        assert await connection.call("ECHO", "x" * 1_000_000) == b"x" * 1_000_000
        await connection.aclose()

    uvloop.run(work(f"redis://127.0.0.1:{server.port}"))
    with Redis(tls=True) as tls:
        uvloop.run(work(tls.url, ssl_ca_certs=tls.certificates.ca))
