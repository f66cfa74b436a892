"""The work on a register: steps count once whatever gets lost, races end, and nothing is left when nobody waits."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from random import Random

import pytest

import aiolock
from aiolock.backends.memory import MemoryBackend, MemoryServer
from aiolock.core import register as registers
from aiolock.core.register import LATE
from aiolock.errors import BackendRefused, BackendUnavailable, WaitTimeout
from aiolock.kinds import barrier
from aiolock.types import Family
from tests.faults.staging import passes, until, waiting
from tests.simulation import virtual


class Lossy:
    """A way to a server on which requests and answers get lost, and copies of lost requests arrive late."""

    def __init__(self, seed: int, trouble: float) -> None:
        self.random = Random(seed)
        self.trouble = trouble
        self.lost = 0

    async def __call__(self, step):
        await asyncio.sleep(0)
        fate = self.random.random() / self.trouble if self.trouble else 9
        if fate > 1:
            answer = step()
            await asyncio.sleep(0)
            return answer
        self.lost += 1
        if fate < 0.4:
            step()
        elif fate < 0.7:
            asyncio.get_running_loop().call_later(self.random.random() * 0.02, step)
        raise BackendUnavailable("the connection is lossy")


def connect(server: MemoryServer, transport=None, **options) -> aiolock.Client:
    return aiolock.Client(MemoryBackend(server=server, transport=transport), command_timeout=8, **options)


@pytest.mark.parametrize("seed", range(12))
async def test_every_count_counts_once_whatever_gets_lost(seed):
    server = MemoryServer()
    ways = [Lossy(seed, 0.4), Lossy(seed + 100, 0.4), None]
    clients = [connect(server, way) for way in ways]
    for client in clients:
        await client.open()
    left = []

    async def count(client: aiolock.Client) -> None:
        for _ in range(8):
            rest = await client.latch("x", 200).count_down(2)
            left.append(rest)

    await asyncio.gather(*(count(client) for client in clients for _ in range(3)))
    assert await clients[2].latch("x", 200).count() == 200 - 2 * 3 * 3 * 8
    assert sum(way.lost for way in ways if way) > 10
    assert min(left) == 200 - 2 * 3 * 3 * 8
    for way in ways[:2]:
        way.trouble = 0
    for client in clients:
        assert client._runtime.registers == {}
        await client.aclose()


@pytest.mark.parametrize("seed", range(8))
async def test_a_count_with_a_name_counts_once_also_if_its_first_try_failed(seed):
    """Clients whose time is over before they know whether they have counted, and others that count again for them."""
    server, random = MemoryServer(), Random(seed)
    ways = [Lossy(seed, 0.6), Lossy(seed + 100, 0.6)]
    clients = [
        aiolock.Client(MemoryBackend(server=server, transport=way), command_timeout=0.1) for way in ways
    ]
    for client in clients:
        await client.open()
    failures = 0

    async def count(number: int) -> None:
        nonlocal failures
        while True:
            try:
                await random.choice(clients).latch("x", 60).count_down(request_id=f"job {number}")
            except BackendUnavailable:
                failures += 1
            else:
                return

    for way in ways:
        way.trouble = 0.97
    async with asyncio.timeout(20):
        await asyncio.gather(*(count(number % 40) for number in range(55)), _calm(ways))
    await until(lambda: not any(client._runtime.registers for client in clients))
    assert await clients[0].latch("x", 60).count() == 20
    assert failures > 0
    for client in clients:
        await client.aclose()


async def _calm(ways: list[Lossy]) -> None:
    await asyncio.sleep(0.25)
    for way in ways:
        way.trouble = 0.0


async def test_the_names_of_a_thousand_counts_fit_and_are_forgotten_when_the_latch_is_open():
    server = MemoryServer()
    async with connect(server) as client:
        latch = client.latch("x", 1000)
        names = [f"{number} " + "é" * 500 for number in range(999)]
        await asyncio.gather(*(latch.count_down(request_id=name) for name in names))
        assert await latch.count() == 1
        register = client._backend.register("x", Family.LATCH)
        assert len((await register.read()).value) < 30_000
        await asyncio.gather(*(latch.count_down(request_id=name) for name in names))
        assert await latch.count_down() == 0
        assert len((await register.read()).value) < 300
        await register.aclose()


@pytest.mark.parametrize("seed", range(6))
async def test_a_barrier_is_passed_by_all_of_a_round_whatever_gets_lost(seed):
    server = MemoryServer()
    ways = [Lossy(seed, 0.3), Lossy(seed + 100, 0.3)]
    clients = [connect(server, way) for way in ways]
    for client in clients:
        await client.open()
    for _ in range(4):
        places = await asyncio.gather(
            *(client.barrier("x", 4, ttl=30).wait() for client in clients for _ in range(2))
        )
        assert sorted(places) == [0, 1, 2, 3]
    for way in ways:
        way.trouble = 0
    for client in clients:
        await client.aclose()


async def test_counts_of_one_moment_travel_together():
    server = MemoryServer()
    steps = 0

    async def counted(step):
        nonlocal steps
        steps += 1
        await asyncio.sleep(0)
        return step()

    async with connect(server, counted) as client:
        await asyncio.gather(*(client.latch("x", 500).count_down() for _ in range(300)))
        assert steps <= 6
        assert await client.latch("x", 500).count() == 200


async def test_a_server_that_is_gone_is_told_within_the_command_timeout():
    way = Lossy(1, 0.0)
    async with aiolock.Client(
        MemoryBackend(server=MemoryServer(), transport=way), command_timeout=0.2
    ) as client:
        way.trouble = 1e9
        for ask in (client.latch("x", 2).count_down, client.latch("x", 2).wait, client.barrier("x", 2).wait):
            with pytest.raises(
                BackendUnavailable, match=r"within the command timeout of 0.2 s: the connection is lossy"
            ):
                await ask()
        await until(lambda: not client._runtime.registers)
        way.trouble = 0


async def test_who_waits_survives_an_outage():
    server = MemoryServer()
    way = Lossy(1, 0.0)
    async with (
        aiolock.Client(MemoryBackend(server=server, transport=way), command_timeout=0.2) as client,
        connect(server) as other,
    ):
        waiter = asyncio.create_task(client.latch("x", 1).wait())
        await waiting(client, 1)
        await until(
            lambda: any(wait.evaluated for each in client._runtime.registers.values() for wait in each._waits)
        )
        way.trouble = 1e9
        await asyncio.sleep(0.5)
        assert not waiter.done()
        with pytest.raises(WaitTimeout):
            await client.latch("x", 1).wait(timeout=0.05)
        await other.latch("x", 1).count_down()
        way.trouble = 0
        async with asyncio.timeout(20):
            await waiter


async def test_what_a_step_or_a_look_raises_reaches_its_own_task_only():
    async with connect(MemoryServer()) as client:
        work = client._runtime.register("x", Family.LATCH, 60)

        def wrong(body):
            raise ZeroDivisionError

        bad, good = work.change(wrong), work.change(lambda body: ({"n": 1}, "done"))
        with pytest.raises(ZeroDivisionError):
            await bad
        assert await good == "done"

        async def follow() -> int:
            work = client._runtime.register("x", Family.LATCH, 60)
            return await work.wait(lambda body: body["n"] if body["n"] == 2 else None, None)

        calm = asyncio.create_task(follow())
        await waiting(client, 1)
        work = client._runtime.register("x", Family.LATCH, 60)
        with pytest.raises(ZeroDivisionError):
            await work.wait(wrong, None)
        assert await work.wait(lambda body: None, 0.01) is LATE
        assert not calm.done()
        await work.change(lambda body: ({"n": 2}, None))
        assert await calm == 2


async def test_the_log_says_why_a_wait_ended(caplog):
    async with connect(MemoryServer()) as client:
        with caplog.at_level(logging.DEBUG, logger="aiolock.wait"):
            waiter = asyncio.create_task(client.latch("x", 1).wait())
            await waiting(client, 1)
            await client.latch("x", 1).count_down()
            await waiter
            with pytest.raises(WaitTimeout):
                await client.latch("y", 1).wait(timeout=0.01)
            waiter = asyncio.create_task(client.latch("z", 1).wait(), name="z-1")
            await waiting(client, 1)
            waiter.cancel()
            await asyncio.wait([waiter])
    assert "task z-1 for 'z' (latch) wakes: the waiter was cancelled" in caplog.messages
    assert "waiter for 'x' (latch) wakes: the server announced a change" in caplog.messages
    assert "waiter for 'y' (latch) wakes: the timeout passed" in caplog.messages


async def test_a_register_that_grows_too_long_is_refused():
    async with connect(MemoryServer()) as client:
        work = client._runtime.register("x", Family.LATCH, 60)
        with pytest.raises(BackendRefused, match="too many users"):
            await work.change(lambda body: ({"long": "x" * 70_000}, None))
        assert await client._runtime.register("x", Family.LATCH, 60).change(lambda body: (None, body)) == {}


@pytest.mark.parametrize(
    "value",
    [
        b"[" * 60_000,
        b"9" * 5000,
        b"{}",
        b"null",
        b"\xff",
        b'{"v":2,"n":0,"writes":{},"body":{}}',
        b'{"v":2,"n":0,"writes":[],"body":[]}',
        b'{"v":1,"seen":{},"body":{}}',
    ],
)
async def test_a_register_that_another_program_wrote_is_refused(value):
    async with connect(MemoryServer()) as client:
        register = client._backend.register("x", Family.LATCH)
        assert await register.write(value, "", 60) is not None
        with pytest.raises(aiolock.UnsafeBackend, match="not written by this version"):
            await client.latch("x", 3).count_down()
        await register.aclose()


async def test_a_writer_that_has_ended_takes_no_updates():
    async with connect(MemoryServer()) as client:
        work = client._runtime.register("x", Family.LATCH, 60)
        await work.change(lambda body: (None, 1))
        await passes(3)
        assert work.ended
        for ask in (work.change(lambda body: (None, 1)), work.wait(lambda body: 1, None)):
            with pytest.raises(BackendUnavailable, match="has ended"):
                await ask
        assert client._runtime.register("x", Family.LATCH, 60) is not work


async def test_clients_that_were_seen_long_ago_are_forgotten():
    server = MemoryServer()
    async with connect(server) as client:
        for _ in range(300):
            await client.latch("x", 1000).count_down()
            await until(lambda: not client._runtime.registers)
        register = client._backend.register("x", Family.LATCH)
        entry = await register.read()
        assert len(entry.value) < 8000
        assert await client.latch("x", 1000).count() == 700


class Gate:
    """A way to a server that lets so many requests through, and holds the others until it is opened."""

    def __init__(self) -> None:
        self.left = 10**9
        self.opened = asyncio.Event()
        self.held = 0

    async def __call__(self, step):
        if self.left <= 0:
            self.held += 1
            await self.opened.wait()
        self.left -= 1
        return step()

    def close(self, left: int = 0) -> None:
        self.left = left
        self.opened.clear()

    def open(self) -> None:
        self.left = 10**9
        self.opened.set()


async def test_a_silent_server_is_not_taken_for_a_busy_one():
    gate = Gate()
    async with aiolock.Client(
        MemoryBackend(server=MemoryServer(), transport=gate), command_timeout=0.2
    ) as client:
        gate.close()
        for ask in (client.latch("x", 2).count_down, client.latch("x", 2).wait, client.barrier("x", 2).wait):
            with pytest.raises(
                BackendUnavailable, match=r"within the command timeout of 0.2 s: the server did not"
            ):
                await ask()
        for late in (client.latch("y", 2).wait, client.barrier("y", 2).wait):
            with pytest.raises(WaitTimeout, match="the server did not answer"):
                await late(timeout=0.02)
        gate.open()
        await until(lambda: not client._runtime.registers)


async def test_closing_takes_the_command_timeout_when_the_server_is_silent_and_somebody_waits():
    """In virtual time: nothing more is said to the server after that, neither by who waited nor by who was told late."""

    async def main() -> list[float]:
        took, loop = [], asyncio.get_running_loop()
        for name in ("latch", "barrier"):
            gate = Gate()
            client = aiolock.Client(MemoryBackend(server=MemoryServer(), transport=gate), command_timeout=3)
            await client.open()
            waiter = asyncio.create_task(getattr(client, name)("x", 2).wait())
            await waiting(client, 1)
            await asyncio.sleep(0.1)
            gate.close()
            begin = loop.time()
            await client.aclose()
            took.append(loop.time() - begin)
            with pytest.raises(RuntimeError, match="closed"):
                await waiter
        return took

    # In a thread of its own, as a loop runs here.
    assert max(await asyncio.to_thread(virtual.run, main())) <= 3.01


async def test_who_does_not_know_whether_it_has_passed_is_not_told_that_it_has_not():
    """A barrier of one is passed by arriving; the answer to that gets lost."""
    server, requests = MemoryServer(), 0

    async def deaf(step):
        nonlocal requests
        requests += 1
        answer = step()
        if requests == 2:
            await asyncio.get_running_loop().create_future()
        return answer

    async with aiolock.Client(MemoryBackend(server=server, transport=deaf), command_timeout=0.1) as client:
        with pytest.raises(BackendUnavailable, match=r"within the command timeout of 0.1 s"):
            await client.barrier("x", 1).wait(timeout=0)


class Party:
    """A client with one other at a barrier of two; its way to the server is shut when it has arrived."""

    def __init__(self, client: aiolock.Client, gate: Gate, timeout: float) -> None:
        self.client = client
        # Its read and its write; what comes after that is held.
        gate.close(left=2)
        self.task = asyncio.create_task(client.barrier("x", 2).wait(timeout=timeout))

    async def leaves(self) -> None:
        """Wait until its time is over."""
        await until(lambda: any(each._changes for each in self.client._runtime.registers.values()))


async def two_at_a_barrier(server: MemoryServer, gate: Gate, timeout: float, act) -> None:
    """The first party passes, and the last one does not see it before its time is over."""
    async with connect(server, gate) as client, connect(server) as other:
        first = asyncio.create_task(other.barrier("x", 2, ttl=60).wait())
        await until(
            lambda: any(wait.evaluated for each in other._runtime.registers.values() for wait in each._waits)
        )
        last = Party(client, gate, timeout)
        async with asyncio.timeout(20):
            assert await first == 0
        await last.leaves()
        await act(last)
        gate.open()
        # Nothing is left that would break the next round.
        again = [asyncio.create_task(each.barrier("x", 2).wait(timeout=20)) for each in (client, other)]
        assert sorted(await asyncio.gather(*again)) == [0, 1]


async def test_a_party_whose_time_ends_as_all_pass_passes_with_them(monkeypatch):
    monkeypatch.setattr(barrier, "GRACE", 20.0)
    gate = Gate()

    async def act(last: Party) -> None:
        gate.open()
        assert await last.task == 1

    await two_at_a_barrier(MemoryServer(), gate, 0.3, act)


async def test_a_party_whose_arrival_was_not_answered_finds_out_that_it_has_passed(monkeypatch):
    """A barrier of one is passed by its arrival, whose answer is lost; the time ends before the next reading."""
    monkeypatch.setattr(barrier, "GRACE", 20.0)
    server, gate, requests = MemoryServer(), Gate(), 0

    async def way(step):
        nonlocal requests
        requests += 1
        if requests == 2:
            step()
            gate.close()
            raise BackendUnavailable("the connection was lost")
        return await gate(step)

    async with connect(server, way) as client:
        party = asyncio.create_task(client.barrier("x", 1).wait(timeout=0.1))
        await until(
            lambda: any(
                len(each._changes) == 1 and requests > 2 for each in client._runtime.registers.values()
            )
        )
        await asyncio.sleep(0.2)
        gate.open()
        async with asyncio.timeout(20):
            assert await party == 0


async def test_a_party_that_cannot_find_out_says_so():
    gate = Gate()

    async def act(last: Party) -> None:
        with pytest.raises(WaitTimeout, match="it is not known whether the others have passed"):
            await last.task

    await two_at_a_barrier(MemoryServer(), gate, 0.3, act)


async def test_a_cancellation_while_it_finds_out_is_a_cancellation(monkeypatch):
    monkeypatch.setattr(barrier, "GRACE", 20.0)
    gate = Gate()

    async def act(last: Party) -> None:
        last.task.cancel()
        await asyncio.wait([last.task])
        assert last.task.cancelled()

    await two_at_a_barrier(MemoryServer(), gate, 0.3, act)


async def test_a_party_that_was_not_counted_breaks_nothing():
    server, gate = MemoryServer(), Gate()
    async with connect(server, gate) as client, connect(server) as other:
        first = asyncio.create_task(other.barrier("x", 2).wait())
        await until(
            lambda: any(wait.evaluated for each in other._runtime.registers.values() for wait in each._waits)
        )
        gate.close()
        with pytest.raises(WaitTimeout):
            await client.barrier("x", 2).wait(timeout=0.02)
        cancelled = asyncio.create_task(client.barrier("x", 2).wait())
        await until(lambda: gate.held)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        gate.open()
        await until(lambda: not client._runtime.registers)
        assert not first.done()
        assert await client.barrier("x", 2).wait(timeout=20) == 1
        assert await first == 0


@pytest.mark.parametrize("somebody", [False, True])
async def test_an_arrival_that_is_late_does_not_count_for_a_party_that_is_gone(somebody):
    server, gate = MemoryServer(), Gate()
    late = []

    class Delayed:
        """The second request gets lost, and arrives when it is told to."""

        calls = 0

        async def __call__(self, step):
            Delayed.calls += 1
            if Delayed.calls == 2:
                late.append(step)
                gate.close()
                raise BackendUnavailable("the connection was lost")
            return await gate(step)

    async with connect(server) as other:
        if somebody:
            first = asyncio.create_task(other.barrier("x", 3, ttl=60).wait())
            await until(
                lambda: any(
                    wait.evaluated for each in other._runtime.registers.values() for wait in each._waits
                )
            )
        async with connect(server, Delayed()) as client:
            party = asyncio.create_task(client.barrier("x", 3, ttl=60).wait())
            await until(lambda: gate.held)
            party.cancel()
            await asyncio.wait([party])
            assert party.cancelled()
            gate.open()
            await until(lambda: not client._runtime.registers)
            [arrive] = late
            arrive()
            assert await other.barrier("x", 3).waiting() == int(somebody)
        if somebody:
            assert not first.done()
            first.cancel()
            await asyncio.wait([first])


@pytest.mark.parametrize(
    ("others", "known"), [(registers.REMEMBERED - 1, True), (registers.REMEMBERED, False)]
)
async def test_a_change_that_the_register_may_have_forgotten_is_not_made_again(others, known):
    """Its answer is lost, and other clients write before it can read."""
    server, gate, requests = MemoryServer(), Gate(), 0

    async def deaf(step):
        nonlocal requests
        requests += 1
        if requests == 2:
            step()
            gate.close()
            raise BackendUnavailable("the connection was lost")
        return await gate(step)

    async with connect(server, deaf) as client, connect(server) as other:
        counting = asyncio.create_task(client.latch("x", 1000).count_down(500))
        await until(lambda: gate.held)
        for _ in range(others):
            await other.latch("x", 1000).count_down()
        gate.open()
        if known:
            assert await counting == 500
        else:
            with pytest.raises(BackendUnavailable, match="whether this change counted is not known"):
                await counting
        assert await other.latch("x", 1000).count() == 500 - others


class Slow:
    """A way on which the server is asked at once, and its answers wait until they are let through."""

    def __init__(self) -> None:
        self.through = asyncio.Event()
        self.through.set()
        self.asked = 0

    async def __call__(self, step):
        answer = step()
        self.asked += 1
        await self.through.wait()
        return answer


async def test_a_question_is_not_answered_by_what_was_read_before_it():
    server, way = MemoryServer(), Slow()
    async with connect(server, way) as client, connect(server) as rival:
        assert await client.latch("x", 3).count_down() == 2
        way.through.clear()
        before = way.asked
        first = asyncio.create_task(client.latch("x", 3).count())
        await until(lambda: way.asked > before)
        assert await rival.latch("x", 3).count_down() == 1
        # It was asked after that, while an answer from before it is still on its way.
        second = asyncio.create_task(client.latch("x", 3).count())
        await passes(3)
        way.through.set()
        assert await first == 2
        assert await second == 1


class Overtaken:
    """A way to a server on which another client has always written the register just before a request arrives, while there is one."""

    def __init__(self, server: MemoryServer) -> None:
        self._server = server
        self.register = None
        self.races = 0

    async def __call__(self, step):
        await asyncio.sleep(0)
        if self.register is not None:
            self._server.ask(self._write)
        return step()

    def _write(self, machine, now: float) -> None:
        value, stamp = machine.registers.read(self.register._key, now)
        machine.registers.write(
            self.register._key, value or b'{"v":2,"n":1,"writes":[],"body":{}}', stamp, 60, now
        )
        self.races += 1


async def test_who_waits_at_a_barrier_loses_races_for_longer_than_the_command_timeout():
    server = MemoryServer()
    way = Overtaken(server)
    async with aiolock.Client(MemoryBackend(server=server, transport=way), command_timeout=0.1) as client:
        way.register = client._backend.register("x", Family.BARRIER)
        waiter = asyncio.create_task(client.barrier("x", 1).wait())
        await asyncio.sleep(0.5)
        await until(lambda: way.races > 10)
        assert not waiter.done()
        with pytest.raises(WaitTimeout, match="0 of 1 were there"):
            await client.barrier("x", 1).wait(timeout=0.05)
        way.register = None
        async with asyncio.timeout(20):
            assert await waiter == 0


async def test_what_has_no_timeout_of_its_own_loses_races_for_the_command_timeout():
    server = MemoryServer()
    way = Overtaken(server)
    async with aiolock.Client(MemoryBackend(server=server, transport=way), command_timeout=0.1) as client:
        way.register = client._backend.register("x", Family.LATCH)
        with pytest.raises(BackendUnavailable, match="too many change it at the same time"):
            await client.latch("x", 2).count_down()
        way.register = None


@pytest.mark.parametrize("parties", [10, 60])
def test_a_crowd_asks_little_more_for_each_client_than_a_few_do(parties):
    """In virtual time. If each looked at each change of the others, it would be three times as many for six times as many."""

    async def main() -> float:
        server, loop, asked = MemoryServer(), asyncio.get_running_loop(), 0

        async def way(step):
            nonlocal asked
            asked += 1
            await asyncio.sleep(0.001)
            return step()

        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(connect(server, way, clock=loop.time, random=Random(number)))
                for number in range(parties)
            ]
            places = await asyncio.gather(*(client.barrier("x", parties).wait() for client in clients))
        assert sorted(places) == list(range(parties))
        return asked / parties

    assert virtual.run(main()) < 60
