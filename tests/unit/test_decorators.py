"""Functions under a lock and jobs for one worker: signatures, names, losses, skips; before and after opening."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator

import pytest

import aiolock
from aiolock import ConfigError, InvalidName, LockLost, UnsupportedKind
from aiolock.backends.memory import MemoryBackend, MemoryServer
from aiolock.decorators import run_counts
from tests.faults.staging import passes, until, waiting


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer()


@pytest.fixture
async def client(server):
    async with aiolock.Client(MemoryBackend(server=server), label="client") as opened:
        yield opened


@pytest.fixture
async def rival(server):
    async with aiolock.Client(MemoryBackend(server=server), label="rival") as opened:
        yield opened


# --- locked


async def test_the_function_has_the_lock_while_it_runs(client, rival):
    @client.locked("order:{order_id}", ttl=5)
    async def pay(order_id: int, amount: float = 1.5, *, note: str = "") -> str:
        """Pays."""
        assert await rival.lock(f"order:{order_id}").locked()
        assert not await rival.lock("order:other").locked()
        return f"{order_id} {amount} {note}"

    assert await pay(7, note="x") == "7 1.5 x"
    assert await pay(order_id=8, amount=2) == "8 2 "
    assert not await rival.lock("order:7").locked()
    assert pay.__name__ == "pay"
    assert pay.__doc__ == "Pays."
    assert inspect.iscoroutinefunction(pay)
    assert list(inspect.signature(pay).parameters) == ["order_id", "amount", "note"]
    with pytest.raises(TypeError, match="order_id"):
        await pay()


async def test_calls_with_one_name_take_turns(client):
    inside = 0

    @client.locked("{name}")
    async def work(name: str) -> None:
        nonlocal inside
        inside += 1
        assert inside == 1
        await passes(2)
        inside -= 1

    await asyncio.gather(*(work("a") for _ in range(5)))


async def test_methods_defaults_and_names_without_braces(client, rival):
    class Shop:
        @client.locked("shop:{item}:{kind}")
        async def sell(self, item: str, kind: str = "new") -> bool:
            return await rival.lock(f"shop:{item}:{kind}").locked()

        @client.locked("shop")
        async def close(self) -> bool:
            return await rival.lock("shop").locked()

    assert await Shop().sell("hat")
    assert await Shop().sell("hat", kind="old")
    assert await Shop().close()


async def test_a_loss_cancels_the_function(client, rival):
    @client.locked("a")
    async def work() -> None:
        await rival.lock("a").force_release()
        await asyncio.sleep(60)

    with pytest.raises(LockLost, match="force-released"):
        await work()


async def test_options_are_those_of_a_lock(client, rival):
    @client.locked("a", timeout=0)
    async def impatient() -> None: ...

    async with rival.lock("a"):
        with pytest.raises(aiolock.AcquireTimeout):
            await impatient()
    with pytest.raises(ConfigError, match=r"^ttl must be "):
        client.locked("a", ttl=0)
    with pytest.raises(TypeError, match="blocking"):
        client.locked("a", blocking=True)


async def test_a_generator_has_the_lock_until_it_ends(client, rival):
    @client.locked("{name}")
    async def numbers(name: str, count: int) -> AsyncIterator[int]:
        for number in range(count):
            assert await rival.lock(name).locked()
            yield number

    assert inspect.isasyncgenfunction(numbers)
    assert [number async for number in numbers("a", 3)] == [0, 1, 2]
    assert not await rival.lock("a").locked()
    generator = numbers("b", 3)
    assert await anext(generator) == 0
    assert await rival.lock("b").locked()
    await generator.aclose()
    assert not await rival.lock("b").locked()


async def test_a_generator_is_sent_to_and_thrown_into_as_ever(client):
    seen: list[object] = []

    @client.locked("a")
    async def echo():
        sent = None
        while True:
            try:
                sent = yield sent
            except KeyError as error:
                seen.append(error)
                sent = "caught"

    generator = echo()
    assert await anext(generator) is None
    assert await generator.asend(1) == 1
    assert await generator.athrow(KeyError("k")) == "caught"
    assert [type(each) for each in seen] == [KeyError]
    with pytest.raises(ZeroDivisionError):
        await generator.athrow(ZeroDivisionError)
    assert not await client.lock("a").locked()


async def test_a_generator_hears_of_the_loss_at_its_next_resume(client, rival):
    told: list[str] = []

    @client.locked("a")
    async def numbers():
        try:
            for number in range(3):
                yield number
        except LockLost as loss:
            told.append(loss.reason)
            raise

    generator = numbers()
    assert await anext(generator) == 0
    await rival.lock("a").force_release()
    await passes(5)
    # The consumer is not cancelled, and the generator not before it runs again.
    assert told == []
    with pytest.raises(LockLost):
        await anext(generator)
    assert told == ["force-released"]


async def test_what_cannot_be_decorated_is_refused_at_once(client):
    def plain(order_id: int) -> None: ...

    async def fine(order_id: int) -> None: ...

    for wrong in (plain, lambda: None, 3, None):
        with pytest.raises(ConfigError, match=r"^locked must decorate "):
            client.locked("a")(wrong)
        with pytest.raises(ConfigError, match=r"^once must decorate "):
            client.once("a", at_most=1)(wrong)
    with pytest.raises(ConfigError, match=r"must name parameters of .*fine\(order_id.*not order, user"):
        client.locked("{order}:{user}:{order_id}")(fine)
    with pytest.raises(ConfigError, match=r"must name parameters of functools.partial\(.*not nope"):
        client.locked("p:{nope}")(functools.partial(fine, 1))
    for template in (
        "{order_id",
        "{}",
        "{0}",
        "{order_id.real}",
        "{order_id!r}",
        "{order_id:>9}",
        "",
        None,
        3,
    ):
        with pytest.raises(ConfigError):
            client.locked(template)(fine)
    with pytest.raises(InvalidName):
        await client.locked("{order_id}")(fine)("")


# --- once


async def test_one_worker_does_it_and_the_others_skip(client, rival):
    begun = asyncio.Event()
    done = asyncio.Event()

    def job(who: aiolock.Client):
        @who.once("nightly", at_most=60)
        async def run(value: int) -> int:
            begun.set()
            await done.wait()
            return value

        return run

    working = asyncio.create_task(job(client)(1))
    await begun.wait()
    assert await job(rival)(2) is None
    assert await job(client)(3) is None
    done.set()
    assert await working == 1
    assert await job(rival)(4) == 4


async def test_others_skip_it_for_at_least_so_long(client, rival):
    runs: list[str] = []

    def job(who: aiolock.Client, label: str):
        @who.once("a", at_most=5, at_least=0.3)
        async def run() -> str:
            runs.append(label)
            return label

        return run

    assert await job(client, "first")() == "first"
    assert await job(rival, "second")() is None
    await until(lambda: _free(rival))
    assert await job(rival, "third")() == "third"
    assert runs == ["first", "third"]


async def _free(client: aiolock.Client) -> bool:
    return not await client.lock("a").locked()


async def test_a_job_that_fails_counts_as_done(client, rival):
    @client.once("a", at_most=5, at_least=5)
    async def run() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await run()
    assert await rival.lock("a").locked()
    assert await run() is None


async def test_a_job_that_takes_too_long_is_cancelled(client, rival):
    # Of less, a grant that a busy machine delivers late is not nearly all, and is asked for once more.
    @client.once("a", at_most=1)
    async def run() -> None:
        await asyncio.sleep(60)

    working = asyncio.create_task(run())
    await waiting(client, 0)
    with pytest.raises(LockLost):
        await working
    async with rival.lock("a", timeout=5):
        pass
    assert client.stats()["renewals"] == 0


@pytest.mark.parametrize("limits", [{"at_most": 50}, {}])
async def test_a_cancelled_run_never_counts(client, rival, limits):
    begun = asyncio.Event()

    @client.once("a", at_least=50, **limits)
    async def run() -> None:
        begun.set()
        await asyncio.sleep(60)

    working = asyncio.create_task(run())
    await begun.wait()
    working.cancel()
    await asyncio.wait([working])
    assert working.cancelled()
    async with rival.lock("a", timeout=0):
        pass
    assert client.stats()["held"] == 0


async def test_a_job_without_a_limit_is_renewed_and_free_one_ttl_after_the_death_of_its_worker(client, rival):
    begun = asyncio.Event()
    ends = asyncio.Event()

    @client.once("a", ttl=0.5, at_least=60)
    async def run() -> str:
        begun.set()
        await ends.wait()
        return "done"

    working = asyncio.create_task(run())
    await begun.wait()
    # Longer than its ttl: it is renewed.
    await until(lambda: client.stats()["renewals"] >= 5)
    assert await rival.lock("a").try_acquire() is None
    # The worker dies: its client renews nothing any more, and says nothing to the server.
    client._runtime.scheduler._backend = _Silent()
    lease = await rival.lock("a").acquire(timeout=10)
    assert (await rival.lock("a").inspect()).holders[0].label == "rival"
    await lease.release()
    with pytest.raises(LockLost):
        await working


class _Silent:
    """A server that is never reached again."""

    async def renew(self, claims: object) -> list[object]:
        await asyncio.Event().wait()
        return []


async def test_a_run_that_failed_counts_only_under_keep(client, rival):
    tries: list[str] = []

    def job(who: aiolock.Client, label: str, on_error: str):
        @who.once("a", at_least=60, on_error=on_error)
        async def run() -> None:
            tries.append(label)
            raise ZeroDivisionError

        return run

    # Each worker tries a job that fails, one after the other.
    for who, label in ((client, "first"), (rival, "second")):
        with pytest.raises(ZeroDivisionError):
            await job(who, label, "release")()
    assert not await rival.lock("a").locked()
    with pytest.raises(ZeroDivisionError):
        await job(client, "third", "keep")()
    assert await job(rival, "fourth", "keep")() is None
    assert tries == ["first", "second", "third"]


async def test_max_hold_ends_a_run_that_hangs_and_keeps_nothing(client, rival):
    @client.once("a", at_least=0.5, max_hold=0.5)
    async def run() -> None:
        await asyncio.sleep(60)

    with pytest.raises(LockLost) as caught:
        await run()
    assert caught.value.reason == "max_hold"
    async with rival.lock("a", timeout=10):
        pass


async def test_a_run_that_lost_its_lock_keeps_nothing_although_the_server_still_has_the_hold(client, rival):
    @client.once("a", at_least=60)
    async def run() -> None:
        # As at the end of a stop: nothing has noticed yet that the time is over.
        [validity] = client._runtime.scheduler._validities()
        validity.until = client._runtime.clock() - 1
        assert await rival.lock("a").locked()

    with pytest.raises(LockLost):
        await run()
    async with rival.lock("a", timeout=10):
        pass


async def test_the_name_is_filled_in_from_the_arguments_of_each_call(client, rival):
    @client.once("report:{tenant}", at_least=60)
    async def report(tenant: str, *, day: int = 1) -> str:
        return f"{tenant} {day}"

    assert await report("a") == "a 1"
    assert await report(tenant="b", day=2) == "b 2"
    assert await report("a", day=3) is None
    assert sorted(info.name for info in await rival.locks()) == ["report:a", "report:b"]
    with pytest.raises(ConfigError, match="must name parameters of"):
        client.once("report:{customer}")(report)


def test_which_runs_count():
    assert run_counts(None, "keep")
    assert run_counts(None, "release")
    assert run_counts(ZeroDivisionError(), "keep")
    assert not run_counts(ZeroDivisionError(), "release")
    for ended in (asyncio.CancelledError(), KeyboardInterrupt(), SystemExit()):
        assert not run_counts(ended, "keep")
        assert not run_counts(ended, "release")


async def test_a_server_that_cannot_keep_says_so():
    backend = MemoryBackend(server=MemoryServer())
    backend.capabilities = frozenset({"exclusion"})

    async with aiolock.Client(backend) as client:

        @client.once("a", at_most=5, at_least=1)
        async def run() -> None: ...

        with pytest.raises(UnsupportedKind, match="at_least"):
            await run()
        assert not await client.lock("a").locked()


@pytest.mark.parametrize(
    "options",
    [
        {"at_most": 0},
        {"at_most": "1"},
        {"at_most": 5, "ttl": 5},
        {"at_most": 5, "max_hold": 5},
        {"max_hold": 5, "at_least": 6},
        {"max_hold": 0},
        {"ttl": 0},
        {"on_error": "raise"},
        {"on_error": None},
        {"at_most": 5, "at_least": 6},
        {"at_most": 5, "at_least": -1},
        {"at_most": 5, "label": ""},
    ],
)
async def test_wrong_limits_are_refused(client, options):
    with pytest.raises(ConfigError):
        client.once("a", **options)
    with pytest.raises(InvalidName):
        client.once("", at_most=5)


# --- before the client is opened


async def test_both_may_be_used_before_the_client_is_opened(server):
    client = aiolock.Client(MemoryBackend(server=server))

    @client.locked("order:{n}")
    async def pay(n: int) -> int:
        return n

    @client.locked("numbers")
    async def numbers() -> AsyncIterator[int]:
        yield 1

    @client.once("job", at_most=5)
    async def job() -> int:
        return 2

    for call in (pay(1), anext(numbers()), job()):
        with pytest.raises(RuntimeError, match="this client is not open: enter it with `async with` first"):
            await call
    async with client:
        assert await pay(1) == 1
        assert [number async for number in numbers()] == [1]
        assert await job() == 2
    with pytest.raises(RuntimeError, match="closed"):
        await pay(1)


@pytest.mark.parametrize(
    ("method", "ask"),
    [
        ("Client.semaphore", lambda client, options: client.semaphore("x", 3, **options)),
        ("Client.locked", lambda client, options: client.locked("x", **options)),
        ("RWLock.read", lambda client, options: client.rwlock("x").read(**options)),
        ("RWLock.write", lambda client, options: client.rwlock("x").write(**options)),
    ],
)
async def test_an_option_that_there_is_not_is_told_with_those_that_there_are(client, method, ask):
    for wrong in ("tll", "cls", "kind"):
        with pytest.raises(TypeError) as caught:
            ask(client, {"ttl": 3, wrong: 3})
        assert str(caught.value) == (
            f"{method}() got an unexpected keyword argument '{wrong}': it takes ttl, timeout, renew, grace, max_hold, label, "
            "fair, on_loss"
        )
    ask(client, {"ttl": 3, "timeout": 0, "on_loss": "signal", "fair": True, "max_hold": 9, "label": "x"})
