"""Hooks: callbacks for acquired, released and lost leases; what they are given, and that their errors harm no lock."""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextvars import ContextVar

import pytest

import aiolock
from aiolock.backends.memory import MemoryBackend, MemoryServer
from aiolock.testing import lose
from tests.faults.staging import until
from tests.sweep import MODES, Attempt, attempt, sweep

MOMENTS = ("acquired", "released", "lost")


class Told:
    """What the callbacks of a client were told, in order."""

    def __init__(self, client: aiolock.Client) -> None:
        self.events: list[tuple[str, aiolock.LockEvent]] = []
        for moment in MOMENTS:
            register = getattr(client, f"on_{moment}")
            register(lambda event, moment=moment: self.events.append((moment, event)))

    @property
    def moments(self) -> list[str]:
        return [moment for moment, _ in self.events]

    @property
    def last(self) -> aiolock.LockEvent:
        return self.events[-1][1]


@pytest.fixture
async def client():
    async with aiolock.connect("memory://hooks", ttl=5) as opened:
        yield opened


@pytest.fixture
def told(client):
    return Told(client)


async def test_a_block_is_acquired_and_released(client, told):
    async with client.lock("order:42") as lease:
        assert told.moments == ["acquired"]
        event = told.last
        assert (event.name, event.kind, event.token) == ("order:42", lease.kind, lease.token)
        assert (event.template, event.held, event.released, event.reason) == ("", 0.0, False, None)
        await asyncio.sleep(0.01)
    assert told.moments == ["acquired", "released"]
    assert told.last.token == lease.token
    assert told.last.held >= 0.01
    assert told.last.released
    assert told.last.reason is None


async def test_the_wait_is_that_of_the_task_that_waited(client, told):
    async def second() -> None:
        async with client.lock("x"):
            assert told.moments == ["acquired", "released", "acquired"]
            assert told.last.waited >= 0.01

    async with client.lock("x"):
        waiter = asyncio.create_task(second())
        await until(lambda: client.stats()["waiting"] == 1)
        await asyncio.sleep(0.01)
    await waiter
    assert told.moments == ["acquired", "released"] * 2
    tokens = [event.token for _, event in told.events]
    assert tokens[0] == tokens[1] < tokens[2] == tokens[3]


async def test_a_wait_ends_and_a_hold_begins_with_the_grant():
    """And not when the task goes on, which a busy loop delays."""
    now = 100.0

    def later() -> None:
        nonlocal now
        now += 2

    backend = MemoryBackend(f"memory://{secrets.token_hex(4)}")
    async with aiolock.Client(backend, clock=lambda: now) as client:
        told = Told(client)
        lease = await client.lock("x").acquire()
        waiter = asyncio.create_task(client.lock("x").acquire())
        await until(lambda: client.stats()["waiting"] == 1)
        # Before the step of the task that is given the lock.
        asyncio.get_running_loop().call_soon(later)
        await lease.release()
        second = await waiter
        assert told.last.waited == 0
        await second.release()
        assert told.last.held == 2


async def test_a_loss_is_told_once_with_its_reason(client, told):
    with pytest.raises(aiolock.LockLost):
        async with client.lock("x") as lease:
            lose(lease, "revoked")
            await asyncio.sleep(10)
    assert told.moments == ["acquired", "lost"]
    assert (told.last.reason, told.last.released, told.last.token) == ("revoked", False, lease.token)


async def test_the_end_of_max_hold_is_a_loss_and_no_release(client, told):
    lease = await client.lock("x", max_hold=0.01).acquire()
    assert await lease.wait_lost() == "max_hold"
    await lease.release()
    assert told.moments == ["acquired", "lost"]
    assert told.last.held >= 0.01


async def test_a_loss_that_only_the_answer_to_the_release_tells(client, told):
    lease = await client.lock("x").acquire()
    await asyncio.sleep(0.01)
    await lease.release()
    # What the client does when the server answers "not held".
    assert lease._hold.disown()
    assert told.moments == ["acquired", "released", "lost"]
    assert (told.last.released, told.last.reason) == (True, "revoked")
    assert told.last.held == told.events[1][1].held >= 0.01


async def test_a_client_that_is_closed_loses_its_leases(client, told):
    lease = await client.lock("x").acquire()
    await client.aclose()
    assert told.moments == ["acquired", "lost"]
    assert told.last.reason == "closed"
    assert lease.lost


async def test_callbacks_outlive_an_opening(client, told):
    await client.aclose()
    async with client, client.lock("x"):
        pass
    assert told.moments == ["acquired", "released"]


async def test_a_lease_that_was_there_before_the_callbacks_is_none_of_theirs(client):
    async with client.lock("x"):
        told = Told(client)
    assert told.events == []


async def test_every_kind_is_told(client, told):
    async with client.rwlock("a").read(), client.lock("b"):
        pass
    async with client.rwlock("a").write() as lease:
        await lease.downgrade()
    async with client.election("c").campaign():
        pass
    lease = await client.semaphore("d", 3).acquire(permits=2)
    await lease.release()
    acquired = [event for moment, event in told.events if moment == "acquired"]
    released = [event for moment, event in told.events if moment == "released"]
    assert {event.kind.family.value for event in acquired} == {"lock", "rw", "election", "sem"}
    assert {(event.name, event.token, event.kind) for event in acquired} == {
        (event.name, event.token, event.kind) for event in released
    }
    assert acquired[-1].kind.permits == 2


async def test_levels_of_one_hold_are_one_lease(client, told):
    lock = client.reentrant_lock("x")
    async with lock, lock:
        assert told.moments == ["acquired"]
    assert told.moments == ["acquired", "released"]


async def test_several_locks_are_told_one_by_one(client, told):
    async with aiolock.lock_all(client.lock("a"), client.semaphore("b", 2)):
        assert [event.name for _, event in told.events] == ["a", "b"]
    assert sorted(told.moments) == ["acquired", "acquired", "released", "released"]


async def test_templates_come_from_decorators(client, told):
    @client.locked("order:{number}")
    async def pay(number: int) -> None: ...

    @client.once("nightly", at_most=5)
    async def report() -> None: ...

    await pay(42)
    assert (told.last.name, told.last.template) == ("order:42", "order:{number}")
    await report()
    assert (told.last.name, told.last.template) == ("nightly", "nightly")


async def test_threads_have_the_same_callbacks():
    import aiolock.portal

    def work() -> list[tuple[str, str]]:
        seen = []
        with aiolock.portal.connect("memory://hooks") as client:
            client.on_acquired(lambda event: seen.append(("acquired", event.template)))
            client.on_released(lambda event: seen.append(("released", event.template)))
            client.on_lost(lambda event: seen.append(("lost", event.reason)))

            @client.locked("order:{number}")
            def pay(number: int) -> None: ...

            pay(42)
            lease = client.lock("x").acquire()
        assert lease.lost
        return seen

    assert await asyncio.to_thread(work) == [
        ("acquired", "order:{number}"),
        ("released", "order:{number}"),
        ("acquired", ""),
        ("lost", "closed"),
    ]


async def test_the_end_is_told_in_the_context_of_the_acquire(client):
    request: ContextVar[str] = ContextVar("request", default="none")
    seen = []
    client.on_released(lambda event: seen.append(request.get()))
    client.on_lost(lambda event: seen.append(request.get()))
    request.set("first")
    lease = await client.lock("x").acquire()
    request.set("second")
    await lease.release()
    lease = await client.lock("x").acquire()
    await asyncio.create_task(client.lock("x").force_release())
    await lease.wait_lost()
    assert seen == ["first", "second"]


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError])
async def test_an_error_of_a_callback_is_logged_and_harms_nothing(client, caplog, error):
    def fail(event: aiolock.LockEvent) -> None:
        raise error

    seen = []
    for register in (client.on_acquired, client.on_released, client.on_lost):
        assert register(fail) is fail
        register(seen.append)
    with caplog.at_level(logging.ERROR, "aiolock"):
        async with client.lock("x"):
            pass
        lease = await client.lock("x").acquire()
        await client.lock("x").force_release()
        await lease.wait_lost()
    assert len(seen) == 4
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert messages == [
        f"a callback of {moment} raised {error.__name__} for lock 'x'"
        for moment in ("on_acquired", "on_released", "on_acquired", "on_lost")
    ]
    assert not await client.lock("x").locked()


async def test_a_callback_that_ends_the_program_leaves_nothing_held(client):
    class End(BaseException):
        pass

    def end(event: aiolock.LockEvent) -> None:
        raise End

    client.on_acquired(end)
    with pytest.raises(End):
        await client.lock("x").acquire()
    await until(lambda: client.stats()["held"] == 0)
    assert not await client.lock("x").locked()


WAYS = {
    "block": lambda client: client.lock("x"),
    "levels": lambda client: client.reentrant_lock("x"),
    "several": lambda client: aiolock.lock_all(client.lock("y"), client.lock("x"), client.lock("z")),
    "shared": lambda client: client.rwlock("x").read(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("end", [SystemExit, KeyboardInterrupt])
def test_a_callback_of_the_end_that_ends_the_program_leaves_nothing_held(way, end):
    """The program ends inside the block of the client, which closes it."""
    server = MemoryServer()

    async def program() -> None:
        async with aiolock.Client(MemoryBackend(server=server), ttl=60) as client:

            def leave(event: aiolock.LockEvent) -> None:
                raise end

            client.on_released(leave)
            async with WAYS[way](client):
                pass

    with pytest.raises(end):
        asyncio.run(program())

    async def afterwards() -> None:
        async with aiolock.Client(MemoryBackend(server=server), ttl=60) as other:
            assert await other.locks() == []

    asyncio.run(afterwards())


async def test_a_callback_that_ends_the_program_is_raised_by_the_release_and_the_next_holder_enters(client):
    def leave(event: aiolock.LockEvent) -> None:
        raise SystemExit

    client.on_released(leave)
    async with aiolock.connect("memory://hooks") as rival:
        for kept in (0.0, 0.1):
            lease = await client.lock("x").acquire()
            with pytest.raises(SystemExit):
                await lease.release(keep=kept)
            with pytest.raises(RuntimeError, match="was released"):
                lease.check()
            async with asyncio.timeout(3), rival.lock("x"):
                pass
    assert client.stats()["held"] == 0


def test_a_callback_of_the_loss_that_ends_the_program_gives_the_claim_back():
    server = MemoryServer()

    async def program() -> None:
        client = aiolock.Client(MemoryBackend(server=server), ttl=60)
        await client.open()

        def leave(event: aiolock.LockEvent) -> None:
            raise SystemExit

        client.on_lost(leave)
        leases = [await client.lock("x").acquire(), await client.lock("y").acquire()]
        try:
            client._runtime.scheduler.lose(leases[0]._hold.validity, "session")
        except SystemExit:
            assert leases[1].held
        else:
            pytest.fail("the program goes on")
        async with aiolock.Client(MemoryBackend(server=server), ttl=60) as other, asyncio.timeout(10):
            await (await other.lock("x").acquire()).release()
        await leases[1].release()
        await client.aclose()

    asyncio.run(program())


@pytest.mark.parametrize("mode", MODES)
async def test_a_wait_interrupted_anywhere_reports_an_end_for_each_acquire(client, told, mode):
    async with aiolock.connect("memory://hooks", ttl=5) as rival:

        async def operation() -> None:
            async with client.lock("x"):
                await asyncio.sleep(0)

        async def run(at: int, shift: int) -> tuple[Attempt, list[tuple[str, str]]]:
            taken = await rival.lock("x").acquire()
            asyncio.get_running_loop().call_later(0.01, lambda: asyncio.ensure_future(taken.release()))
            result = await attempt(operation(), mode, at, shift)
            await taken.release()
            # Nothing is held: another client gets it.
            async with asyncio.timeout(10), rival.lock("x"):
                pass
            tokens = {
                moment: [event.token for each, event in told.events if each == moment] for moment in MOMENTS
            }
            pairs = sorted(tokens["released"] + tokens["lost"]) == sorted(tokens["acquired"])
            left = client.stats()["held"] + client.stats()["waiting"]
            return result, [] if pairs and not left else [("left", f"{tokens}, {left} in the client")]

        account = await sweep(mode, run, 2)
    assert account.points > 1
    assert account.faults == []


async def async_callback(event: aiolock.LockEvent) -> None: ...


@pytest.mark.parametrize(
    "wrong", [None, "print", 3, async_callback], ids=["nothing", "a text", "a number", "async"]
)
@pytest.mark.parametrize("moment", ["on_acquired", "on_released", "on_lost"])
def test_what_is_no_plain_function_is_refused(moment, wrong):
    client = aiolock.connect("memory://")
    with pytest.raises(aiolock.ConfigError, match=f"^{moment} must be given a plain function, not "):
        getattr(client, moment)(wrong)
