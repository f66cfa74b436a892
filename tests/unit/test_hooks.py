"""Hooks: callbacks for the moments of leases and for skipped jobs; what they are given, and that their errors harm no lock."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta

import pytest

import aiolock
from aiolock.backends.memory import MemoryBackend, MemoryServer
from aiolock.metrics import TEMPLATES, TemplateCounter
from aiolock.testing import lose
from tests.faults.staging import until
from tests.servers import Redis
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
@pytest.mark.parametrize(
    "moment", ["on_acquired", "on_released", "on_lost", "on_renewal_failing", "on_skipped"]
)
def test_what_is_no_plain_function_is_refused(moment, wrong):
    client = aiolock.connect("memory://")
    with pytest.raises(aiolock.ConfigError, match=f"^{moment} must be given a plain function, not "):
        getattr(client, moment)(wrong)


# --- skipped jobs


@pytest.fixture(scope="module")
def redis() -> Iterator[Redis]:
    with Redis() as server:
        yield server


@pytest.fixture(params=["memory", "redis"])
def connect(request):
    """Make a client of one of two servers, in a namespace of the test."""
    namespace = secrets.token_hex(4)
    memory = request.param == "memory"
    url = f"memory://{namespace}" if memory else request.getfixturevalue("redis").url
    return lambda **options: aiolock.connect(url, namespace=namespace, **options)


def job_of(client: aiolock.Client, **options: object):
    """A job for each tenant, which lasts until its event is set."""

    @client.once("report:{tenant}", **options)
    async def report(tenant: str, done: asyncio.Event) -> str:
        await done.wait()
        return "done"

    return report


async def test_a_skip_tells_the_holder_and_its_end(connect):
    async with connect(ttl=5, label="first") as one, connect() as other:
        seen: list[aiolock.SkipEvent] = []
        assert other.on_skipped(seen.append) == seen.append
        done, now = asyncio.Event(), datetime.now(UTC)
        run = asyncio.create_task(job_of(one)("a", done))
        await until(lambda: one.stats()["held"] == 1)
        assert await job_of(other)("a", done) is None
        done.set()
        assert await run == "done"
        assert await job_of(other)("a", done) == "done"
        [event] = seen
        assert (event.name, event.template, event.kept) == ("report:a", "report:{tenant}", None)
        assert event.holder.label == "first"
        assert now < event.until < now + timedelta(seconds=60)
        figures = other.stats()
        assert (figures["skipped"], figures["skipped_by_template"]) == (1, {"report:{tenant}": 1})
        assert figures["timeouts"] == 0
        # A job that runs has a counter as well.
        assert one.stats()["skipped_by_template"] == {"report:{tenant}": 0}


async def test_a_skip_tells_the_run_that_counts_and_its_end(connect):
    async with connect(label="first") as one, connect() as other:
        seen: list[aiolock.SkipEvent] = []
        other.on_skipped(seen.append)
        done, now = asyncio.Event(), datetime.now(UTC)
        done.set()
        assert await job_of(one, at_least=600)("a", done) == "done"
        assert await job_of(other, at_least=600)("a", done) is None
        [event] = seen
        assert event.holder is None
        assert event.kept.last_holder == "first"
        assert event.until == event.kept.until
        assert now + timedelta(seconds=500) < event.until < now + timedelta(seconds=700)


async def test_without_a_callback_the_server_is_not_asked_who_has_a_skipped_job(client, caplog, monkeypatch):
    async def never(*_: object) -> None:
        pytest.fail("the server was asked")

    monkeypatch.setattr(client._backend, "inspect", never)
    async with aiolock.connect("memory://hooks") as rival, rival.lock("report:a"):
        with caplog.at_level(logging.DEBUG, "aiolock.once"):
            assert await job_of(client)("a", asyncio.Event()) is None
    [record] = caplog.records
    assert record.getMessage() == "skipped 'report:a'"
    assert (record.aiolock_lock, record.aiolock_template) == ("report:a", "report:{tenant}")


async def test_a_skip_is_logged_with_what_is_known(client, caplog):
    client.on_skipped(lambda event: None)
    async with aiolock.connect("memory://hooks", label="first") as rival, rival.lock("report:a"):
        with caplog.at_level(logging.DEBUG, "aiolock.once"):
            assert await job_of(client)("a", asyncio.Event()) is None
    [record] = caplog.records
    assert record.levelno == logging.DEBUG
    assert re.fullmatch(rf"first at \S+:{os.getpid()}", record.aiolock_holder)
    assert (
        record.getMessage()
        == f"skipped 'report:a', held by {record.aiolock_holder!r} until {record.aiolock_until}"
    )


async def test_a_holder_that_cannot_be_found_out_is_no_error(client, monkeypatch):
    async def fail(*_: object) -> None:
        raise aiolock.BackendUnavailable("the server is away")

    seen = []
    client.on_skipped(seen.append)
    monkeypatch.setattr(client._backend, "inspect", fail)
    async with aiolock.connect("memory://hooks") as rival, rival.lock("report:a"):
        assert await job_of(client)("a", asyncio.Event()) is None
    assert seen == [aiolock.SkipEvent("report:a", "report:{tenant}")]


async def test_other_answers_than_a_skipped_job_are_no_skips(client):
    seen = []
    client.on_skipped(seen.append)
    async with aiolock.connect("memory://hooks") as rival, rival.lock("x"):
        assert await client.lock("x").try_acquire() is None
        with pytest.raises(aiolock.AcquireTimeout):
            await client.lock("x").acquire(timeout=0)
    assert (seen, client.stats()["skipped"]) == ([], 0)
    # Nobody is told of the acquire of a client that has this callback alone.
    assert not client._generations.hooks.active


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError])
async def test_an_error_of_a_callback_of_a_skip_is_logged(client, caplog, error):
    def fail(event: aiolock.SkipEvent) -> None:
        raise error

    seen = []
    client.on_skipped(fail)
    client.on_skipped(seen.append)
    async with aiolock.connect("memory://hooks") as rival, rival.lock("report:a"):
        assert await job_of(client)("a", asyncio.Event()) is None
    assert len(seen) == 1
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR] == [
        f"a callback of on_skipped raised {error.__name__} for lock 'report:a'"
    ]


@pytest.mark.parametrize("end", [SystemExit, KeyboardInterrupt])
def test_a_callback_of_a_skip_that_ends_the_program_costs_no_hold(end):
    server = MemoryServer()

    async def program() -> None:
        async with aiolock.Client(MemoryBackend(server=server)) as client:

            def leave(event: aiolock.SkipEvent) -> None:
                raise end

            client.on_skipped(leave)
            rival = aiolock.Client(MemoryBackend(server=server))
            async with rival, client.lock("x"), rival.lock("report:a"):
                await job_of(client)("a", asyncio.Event())

    with pytest.raises(end):
        asyncio.run(program())

    async def afterwards() -> None:
        async with aiolock.Client(MemoryBackend(server=server), ttl=60) as other:
            assert await other.locks() == []

    asyncio.run(afterwards())


async def test_a_skipped_call_that_is_cancelled_while_the_server_is_asked_leaves_nothing(client, monkeypatch):
    asked = asyncio.Event()

    async def wait(*_: object) -> None:
        asked.set()
        await asyncio.sleep(60)

    client.on_skipped(lambda event: None)
    monkeypatch.setattr(client._backend, "inspect", wait)
    async with aiolock.connect("memory://hooks") as rival, rival.lock("report:a"):
        call = asyncio.create_task(job_of(client)("a", asyncio.Event()))
        await asked.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert (client.stats()["skipped"], client.stats()["held"], client.stats()["waiting"]) == (1, 0, 0)


async def test_threads_are_told_of_skips_as_well(connect):
    import aiolock.portal

    def work() -> tuple[list[aiolock.SkipEvent], str | None, dict[str, int]]:
        seen = []
        with aiolock.portal.SyncClient(connect()) as client:
            client.on_skipped(seen.append)

            @client.once("report:{tenant}")
            def report(tenant: str) -> str:
                return "done"

            return seen, report("a"), client.stats()["skipped_by_template"]

    async with connect(label="first") as one, one.lock("report:a"):
        [event], result, counts = await asyncio.to_thread(work)
    assert (event.name, event.template, event.holder.label) == ("report:a", "report:{tenant}", "first")
    assert (result, counts) == (None, {"report:{tenant}": 1})


def test_templates_beyond_the_first_thousand_are_counted_together():
    """A program may make a job for each name, so that a counter for each would grow for ever."""
    counter = TemplateCounter()
    for number in range(TEMPLATES + 100):
        counter.count(f"report:{number}")
    counter.count("report:7")
    assert (len(counter), counter[""], counter["report:7"]) == (TEMPLATES + 1, 100, 2)


# --- renewals that fail


class Failing:
    """Has the renewals of one client fail, or get through."""

    def __init__(self, client: aiolock.Client, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failing = False
        self.failed = 0
        renew = client._backend.renew

        async def fail(claims):
            if self.failing:
                self.failed += 1
                raise aiolock.BackendUnavailable("the server is away")
            return await renew(claims)

        monkeypatch.setattr(client._backend, "renew", fail)


async def test_a_renewal_that_fails_is_told_once_until_one_succeeds(monkeypatch):
    async with aiolock.connect("memory://failing", ttl=1.5) as client:
        server, told = Failing(client, monkeypatch), []
        client.on_renewal_failing(told.append)
        async with client.lock("x") as lease:
            for streak in (1, 2):
                server.failing, before = True, server.failed
                await until(lambda before=before: server.failed >= before + 3)
                assert len(told) == streak
                server.failing = False
                renewals = client.stats()["slack"].count
                await until(lambda renewals=renewals: client.stats()["slack"].count > renewals)
            lease.check()
        first = told[0]
        assert (first.name, first.token, first.template) == ("x", lease.token, "")
        assert first.error == "the server is away"
        assert 0 < first.remaining < 1.5
        assert first.held > 0
        assert (first.reason, first.released) == (None, False)
        assert first.remaining + first.held <= 1.6
        assert client.stats()["renewal_failures"] == server.failed


async def test_an_outage_of_the_server_is_told_while_the_lease_holds(monkeypatch):
    with Redis() as server:
        async with aiolock.connect(server.url, ttl=6, command_timeout=0.5) as client:
            told, lost = asyncio.Queue(), []
            client.on_renewal_failing(told.put_nowait)
            client.on_lost(lost.append)
            async with client.lock("x") as lease:
                server.freeze()
                try:
                    async with asyncio.timeout(20):
                        event = await told.get()
                    lease.check()
                    assert 0 < event.remaining < 6
                    assert event.error
                finally:
                    server.thaw()
                renewals = client.stats()["slack"].count
                await until(lambda: client.stats()["slack"].count > renewals)
                lease.check()
            assert lost == []


async def test_the_next_holder_of_this_client_is_told_as_well(monkeypatch):
    async with aiolock.connect("memory://failing", ttl=10) as client:
        server, told = Failing(client, monkeypatch), []
        client.on_renewal_failing(told.append)
        # The first grant of a name that the server does not know has a single token.
        async with client.lock("x"):
            pass
        server.failing = True
        first = await client.lock("x").acquire()
        second = asyncio.create_task(client.lock("x").acquire())
        await until(lambda: client.stats()["waiting"] == 1)
        validity = first._hold.validity
        for lease in (first, second):
            lease = await lease if lease is second else lease
            failures = client.stats()["renewal_failures"]
            client._runtime.scheduler._ask([validity], client._runtime.clock())
            await until(lambda failures=failures: client.stats()["renewal_failures"] > failures)
            assert told[-1].token == lease.token
            await lease.release()
        assert client.stats()["passed"] == 1
        assert len(told) == 2


async def test_a_hold_that_is_not_renewed_has_no_failing_renewals(monkeypatch):
    async with aiolock.connect("memory://failing", ttl=1.5) as client:
        server, told = Failing(client, monkeypatch), []
        client.on_renewal_failing(told.append)
        server.failing = True
        async with client.lock("x", renew=False):
            await until(lambda: server.failed)
            await until(lambda: client.stats()["renewal_failures"])
        assert told == []


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError])
async def test_an_error_of_a_callback_of_a_failing_renewal_costs_no_hold(monkeypatch, caplog, error):
    async with aiolock.connect("memory://failing", ttl=1.5) as client:
        server = Failing(client, monkeypatch)

        def fail(event: aiolock.LockEvent) -> None:
            server.failing = False
            raise error

        client.on_renewal_failing(fail)
        server.failing = True
        async with client.lock("x") as lease, client.lock("y") as other:
            await until(lambda: client.stats()["slack"].count >= 2)
            lease.check()
            other.check()
    messages = {record.getMessage() for record in caplog.records if record.levelno == logging.ERROR}
    assert messages == {
        f"a callback of on_renewal_failing raised {error.__name__} for lock {name!r}" for name in "xy"
    }


@pytest.mark.parametrize("end", [SystemExit, KeyboardInterrupt])
def test_a_callback_of_a_failing_renewal_that_ends_the_program_goes_on_after_the_holds_are_due_again(
    monkeypatch, end
):
    loop = asyncio.new_event_loop()

    async def program(client: aiolock.Client) -> tuple[aiolock.Lease, ...]:
        await client.open()
        return await client.lock("x").acquire(), await client.lock("y").acquire()

    def leave(event: aiolock.LockEvent) -> None:
        raise end

    client = aiolock.connect("memory://failing", ttl=1.5)
    client.on_renewal_failing(leave)
    server = Failing(client, monkeypatch)
    leases = loop.run_until_complete(program(client))
    server.failing = True
    with pytest.raises(end):
        loop.run_until_complete(asyncio.sleep(60))
    server.failing = False

    async def rest() -> None:
        await until(lambda: client.stats()["slack"].count >= 2)
        for lease in leases:
            lease.check()
            await lease.release()
        await client.aclose()

    loop.run_until_complete(rest())
    loop.close()


def test_threads_are_told_of_failing_renewals_as_well(monkeypatch):
    import aiolock.portal

    inner = aiolock.connect("memory://failing", ttl=1.5)
    told = []
    with aiolock.portal.SyncClient(inner) as client:
        server = Failing(inner, monkeypatch)
        server.failing = True

        @client.on_renewal_failing
        def tell(event: aiolock.LockEvent) -> None:
            told.append(event.template)
            server.failing = False

        @client.locked("order:{number}")
        def pay(number: int) -> None:
            while not client.stats()["slack"].count:
                time.sleep(0.01)

        pay(42)
    assert told == ["order:{number}"]


@pytest.mark.parametrize("moment", ["on_acquired", "on_skipped", "on_released"])
def test_a_callback_of_a_job_that_ends_the_program_ends_the_thread_that_called(moment):
    """And not the loop of the portal, by which other threads would lose their locks."""
    import aiolock.portal

    def leave(event: object) -> None:
        raise SystemExit(3)

    with (
        aiolock.portal.connect("memory://hooks") as rival,
        aiolock.portal.connect("memory://hooks") as client,
        client.lock("y") as lease,
    ):
        getattr(client, moment)(leave)
        taken = rival.lock("x").acquire() if moment == "on_skipped" else None
        with pytest.raises(SystemExit, match="3"):
            client.once("x")(lambda: None)()
        lease.check()
        assert rival.lock("x").locked() == (taken is not None)


def test_a_callback_that_no_thread_waits_for_costs_no_hold_of_a_portal(caplog, monkeypatch):
    import aiolock.portal

    def leave(event: aiolock.LockEvent) -> None:
        server.failing = False
        raise SystemExit(3)

    inner = aiolock.connect("memory://failing", ttl=1.5)
    with aiolock.portal.SyncClient(inner) as client:
        server = Failing(inner, monkeypatch)
        client.on_renewal_failing(leave)
        client.on_lost(leave)
        with client.lock("x") as lease:
            lost = client.lock("y").acquire()
            client.lock("y").force_release()
            assert lost.wait_lost(10) == "force-released"
            server.failing = True
            failures = client.stats()["renewal_failures"]
            while client.stats()["renewal_failures"] == failures:
                time.sleep(0.01)
            lease.renew()
            lease.check()
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert messages == [
        "a callback of on_lost raised RuntimeError for lock 'y'",
        "a callback of on_renewal_failing raised RuntimeError for lock 'x'",
    ]
