"""Read-write locks and permits on a server that is far, full, or used by others: what is lost, and what is not.

At the height of the contract: backends and claims, as the part above drives them.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

import aiolock
from aiolock.backends.redis import RedisBackend, admin
from aiolock.backends.redis.commands import SCRIPTS
from aiolock.clock import system_clock
from aiolock.core.backend import Claim, Event, EventKind, Grant, Renewal, Request, Settings
from aiolock.errors import BackendRefused, BackendUnavailable, ConfigError, LockLost
from aiolock.types import MUTEX, READ, WRITE, Family, Kind, permits
from tests.contract.deployments import least_rights
from tests.faults.proxy import Proxy, resp_frames
from tests.faults.redis_keys import is_grant, nothing_is_left, traces
from tests.faults.staging import PATIENCE, until
from tests.servers import Redis

ENTERS, RELEASES, DOWNGRADES, LEAVES = (
    SCRIPTS[f"many_{name}"].sha.encode() for name in ("enter", "release", "downgrade", "leave")
)
"""What frames with these scripts contain."""

Open = Callable[..., AbstractAsyncContextManager[RedisBackend]]


@pytest.fixture
def opened(namespace, server) -> Open:
    """An open backend in the namespace of the test."""

    @contextlib.asynccontextmanager
    async def make(port: int = server.port, *, login: str = "", timeout: float = 10.0) -> AsyncIterator[Any]:
        backend = RedisBackend(f"redis://{login}127.0.0.1:{port}")
        backend.bind(Settings(namespace, "me", 300.0, timeout, system_clock))
        await backend.open()
        # That it came up is news, and not what the tests are about.
        assert (await backend.events.get()).kind is EventKind.DOUBT
        try:
            yield backend
        finally:
            await backend.aclose()

    return make


@pytest.fixture
async def proxy(server) -> AsyncIterator[Proxy]:
    """A way to the server on which accidents happen."""
    async with Proxy("127.0.0.1", server.port, framing=resp_frames) as way:
        yield way


def request(kind: Kind = READ, *, ttl: float = 300.0, name: str = "x") -> Request:
    return Request(name, kind, ttl, "me")


async def enters(backend: RedisBackend, kind: Kind = READ, **options: Any) -> tuple[Claim, Grant]:
    """A claim that gets in at once."""
    claim = backend.claim(request(kind, **options))
    grant = await claim.acquire(wait=True)
    assert grant is not None
    return claim, grant


async def waits(backend: RedisBackend, kind: Kind = READ, **options: Any) -> Claim:
    """A claim that has to take a place."""
    claim = backend.claim(request(kind, **options))
    assert await claim.acquire(wait=True) is None
    return claim


async def granted(claim: Claim) -> Grant:
    """The grant that it waits for."""
    async with asyncio.timeout(PATIENCE):
        while True:
            await claim.inbox.wait()
            if (grant := await claim.acquire(wait=True)) is not None:
                return grant


async def next_event(backend: RedisBackend, kind: EventKind) -> Event:
    """The next event of that kind."""
    async with asyncio.timeout(PATIENCE):
        while (event := await backend.events.get()).kind is not kind:
            pass
        return event


async def used(admin: Any, namespace: str, family: str = "rw", name: str = "x") -> int:
    """What is in use by the server's books."""
    return int(await admin.hget(f"{namespace}:1:{family}:{{{name}}}", "used") or 0)


# --- what is lost on the way


@pytest.mark.parametrize("lane", ["up", "down"])
async def test_a_lost_question_or_answer_is_asked_again_and_counts_once(
    proxy, opened, admin, namespace, lane
):
    async with opened(proxy.port) as backend:
        match = (lambda frame: ENTERS in frame) if lane == "up" else (lambda frame: b"*5\r\n:1\r\n" in frame)
        dropped = getattr(proxy, lane).drop_next(1, match, reset=True)
        claim = backend.claim(request(permits(2, 5)))
        with pytest.raises(BackendUnavailable):
            await claim.acquire(wait=True)
        assert dropped.is_set()
        first = await claim.acquire(wait=True)
        assert first is not None
        assert await used(admin, namespace, "sem") == 2
        await claim.release()
        assert await used(admin, namespace, "sem") == 0
        await nothing_is_left(admin, namespace)


async def test_an_answer_that_was_lost_and_is_not_wanted_any_more_leaves_nothing(
    proxy, opened, admin, namespace
):
    async with opened(proxy.port) as backend, opened() as other:
        dropped = proxy.down.drop_next(1, lambda frame: b"*5\r\n:1\r\n" in frame, reset=True)
        claim = backend.claim(request(WRITE))
        with pytest.raises(BackendUnavailable):
            await claim.acquire(wait=True)
        assert dropped.is_set()
        waiter = await waits(other, WRITE)
        await claim.release()
        await granted(waiter)
        await waiter.release()
        await nothing_is_left(admin, namespace)


async def test_a_lost_answer_to_a_release_gives_nothing_back_twice(proxy, opened, admin, namespace):
    async with opened(proxy.port) as backend, opened() as other:
        claim, _ = await enters(backend, permits(2, 5))
        await enters(other, permits(2, 5))
        dropped = proxy.down.drop_next(1, lambda frame: frame == b":0\r\n", reset=True)
        with pytest.raises(BackendUnavailable):
            await claim.release()
        assert dropped.is_set()
        await claim.release()
        assert await used(admin, namespace, "sem") == 2


@pytest.mark.parametrize("lane", ["up", "down"])
async def test_a_downgrade_that_was_lost_is_asked_again(proxy, opened, lane):
    async with opened(proxy.port) as backend, opened() as other:
        claim, grant = await enters(backend, WRITE)
        reader, writer = await waits(other, READ), await waits(other, WRITE)
        match = (
            (lambda frame: DOWNGRADES in frame) if lane == "up" else (lambda frame: b"*6\r\n:1\r\n" in frame)
        )
        dropped = getattr(proxy, lane).drop_next(1, match, reset=True)
        with pytest.raises(BackendUnavailable):
            await claim.downgrade()
        assert dropped.is_set()
        again = await claim.downgrade()
        assert (again.token, claim.request.kind) == (grant.token, READ)
        assert (await granted(reader)).token > grant.token + grant.count - 1
        await reader.release()
        await claim.release()
        await granted(writer)
        await writer.release()


async def test_a_grant_that_was_lost_is_found_by_the_heartbeat(proxy, opened, admin, namespace):
    async with opened(proxy.port) as backend, opened() as other:
        held, _ = await enters(other, WRITE)
        readers = [await waits(backend, READ) for _ in range(3)]
        dropped = proxy.down.drop_next(3, is_grant)
        await held.release()
        tokens = {(await granted(reader)).token for reader in readers}
        assert dropped.is_set()
        assert len(tokens) == 3
        for reader in readers:
            await reader.release()
        await nothing_is_left(admin, namespace)


async def test_a_place_in_line_outlives_a_connection(proxy, opened):
    async with opened() as other, opened(proxy.port) as backend:
        held, _ = await enters(other, READ)
        first = await waits(backend, WRITE)
        last = await waits(other, READ)
        proxy.reset_all()
        await until(lambda: proxy.connections == 4)
        await until(lambda: backend._mutex.wakeups.pushed)
        await held.release()
        await granted(first)
        await first.release()
        await granted(last)
        await last.release()


# --- who is dead, or stopped


@pytest.mark.parametrize(("held", "wanted"), [(READ, WRITE), (permits(3, 4), permits(3, 4))], ids=str)
async def test_a_holder_that_died_leaves_nothing(opened, admin, namespace, held, wanted):
    async with opened() as other:
        async with opened() as doomed:
            await enters(doomed, held, ttl=1.0)
        # It is gone without a release, as a process that was killed.
        claim = await waits(other, wanted)
        await granted(claim)
        await claim.release()
        await nothing_is_left(admin, namespace)


async def test_a_dead_writer_in_line_stops_nobody_for_longer_than_its_place_lives(opened):
    async with opened() as other:
        reader, _ = await enters(other, READ)
        async with opened() as doomed:
            await waits(doomed, WRITE, ttl=1.0)
        late = await waits(other, READ)
        await granted(late)
        await late.release()
        await reader.release()


async def test_a_stopped_grantee_costs_one_claim(proxy, opened):
    # The server does not learn that it is stopped, because the proxy keeps its connections open.
    async with opened() as other, opened(proxy.port, timeout=1.0) as stopped:
        held, _ = await enters(other, WRITE)
        await waits(stopped, WRITE, ttl=10.0)
        await waits(stopped, WRITE, ttl=10.0)
        third = await waits(other, WRITE)
        proxy.blackhole()
        await held.release()
        await granted(third)
        await third.release()
        proxy.heal(release=False)


async def test_whose_claim_lapsed_comes_back_to_the_places_that_it_had(proxy, opened):
    async with opened() as other, opened(proxy.port) as stopped:
        held, _ = await enters(other, WRITE)
        first, second = await waits(stopped, WRITE, ttl=10.0), await waits(stopped, WRITE, ttl=10.0)
        third, last = await waits(other, WRITE), await waits(other, WRITE)
        proxy.blackhole()
        await held.release()
        await granted(third)
        proxy.heal()

        async def back() -> bool:
            return len((await other.inspect("x", Family.RW)).waiters) == 3

        # The first asks again, because its grant is too old; the second because it is not in line any more.
        asking = [asyncio.create_task(granted(claim)) for claim in (first, second)]
        await until(back)
        await third.release()
        for claim, task in zip((first, second), asking, strict=True):
            await task
            await claim.release()
        await granted(last)
        await last.release()


# --- many at once


async def renewed(backend: RedisBackend, claims: list[Claim]) -> list[Renewal]:
    """The answers to a round of renewals, in the batches in which the scheduler sends it."""
    batches = backend.batches(claims, lambda claim: claim)
    answers = await asyncio.gather(*map(backend.renew, batches))
    found = {claim: answer for some in map(zip, batches, answers) for claim, answer in some}
    return [found[claim] for claim in claims]


async def test_renewals_of_all_kinds_leave_in_few_calls(opened, admin):
    async with opened() as backend:
        mutexes = [(await enters(backend, MUTEX, name=f"m{n}"))[0] for n in range(120)]
        readers = [(await enters(backend, READ, name=f"r{n}"))[0] for n in range(60)]
        holders = [(await enters(backend, permits(1, 2), name=f"s{n}"))[0] for n in range(60)]
        mixed: list[Claim] = [claim for group in zip(readers, holders, strict=True) for claim in group]
        mixed = [*mutexes[:60], *mixed, *mutexes[60:]]
        # Each answer belongs to its claim: one that is gone is in the middle of others.
        gone = mixed[100]
        await gone.release()
        before = (await admin.info("commandstats"))["cmdstat_evalsha"]["calls"]
        answers = await renewed(backend, mixed)
        assert (await admin.info("commandstats"))["cmdstat_evalsha"]["calls"] == before + 2 + 2
        assert [claim for claim, answer in zip(mixed, answers, strict=True) if answer == "revoked"] == [gone]
        for claim in mixed:
            await claim.release()


async def test_readers_that_wait_in_one_process_are_all_told_by_one_release(opened, admin, namespace):
    async with opened() as backend, opened() as other:
        held, _ = await enters(other, WRITE)
        readers = [await waits(backend, READ) for _ in range(50)]
        await held.release()
        tokens = [(await granted(reader)).token for reader in readers]
        assert tokens == sorted(set(tokens))
        assert await used(admin, namespace) == 50
        await asyncio.gather(*(reader.release() for reader in readers))
        await nothing_is_left(admin, namespace)


async def test_a_semaphore_that_is_known_with_another_limit_is_an_error_that_leaves_nothing(
    opened, admin, namespace
):
    async with opened() as one, opened() as two:
        held, _ = await enters(one, permits(1, 5))
        stranger = two.claim(request(permits(1, 4)))
        with pytest.raises(ConfigError, match=r"'x'.* 5 permits, not 4"):
            await stranger.acquire(wait=True)
        await stranger.release()
        assert (await traces(admin, namespace)).places == 0
        await held.release()
        await nothing_is_left(admin, namespace)
        assert (await traces(admin, namespace)).graves == 0


# --- somebody else's key, a full server


async def test_a_key_of_another_type_is_refused_and_costs_no_other_lock(opened, admin, namespace):
    async with opened() as backend:
        broken, _ = await enters(backend, READ, name="broken")
        sound, _ = await enters(backend, READ, name="sound")
        await admin.set(f"{namespace}:1:rw:{{broken}}", "of another program")
        answers = await backend.renew([broken, sound])
        assert answers[0] == "revoked"
        assert isinstance(answers[1], Grant)
        with pytest.raises(BackendRefused, match="choose another namespace"):
            await enters(backend, WRITE, name="broken")
        assert await backend.names("*") == [("sound", Family.RW)]
        assert await admin.get(f"{namespace}:1:rw:{{broken}}") == b"of another program"


async def test_on_a_full_server_holds_are_given_back_kept_and_handed_on(mortal, master, opened, namespace):
    async with opened(mortal.port) as backend, opened(mortal.port) as other:
        writer, _ = await enters(backend, WRITE)
        reader, doomed = await waits(other, READ), await waits(other, WRITE)
        mutex, _ = await enters(backend, MUTEX)
        pool, _ = await enters(backend, permits(2, 2))
        waiter = await waits(other, permits(1, 2))
        register = backend.register("d", Family.LATCH)
        stamp = await register.write(b"a", "", 60)
        await master.config_set("maxmemory", "1")
        with pytest.raises(BackendRefused, match="maxmemory"):
            await enters(backend, READ, name="new")
        with pytest.raises(BackendRefused, match="maxmemory"):
            await backend.register("new", Family.LATCH).write(b"a", "", 60)
        with pytest.raises(BackendRefused, match="maxmemory"):
            await backend.set_limit("x", 3)
        assert await register.write(b"b", stamp, 60) is not None
        assert (await traces(master, namespace)).keys == 4
        for answer in await renewed(backend, [mutex, writer, pool]):
            assert isinstance(answer, Grant)
        assert await backend.request_release("x", Family.RW, "please")
        assert await backend.request_release("x", Family.LOCK, "please")
        await writer.downgrade()
        await granted(reader)
        await doomed.release()
        await writer.release()
        await reader.release(keep=0.1)
        assert await backend.force_release("x", Family.SEMAPHORE)
        await granted(waiter)
        await waiter.release()
        await mutex.release()
        await master.config_set("maxmemory", "0")


# --- asking to let go, taking away


@pytest.mark.parametrize("kind", [MUTEX, READ, WRITE, permits(2, 2)], ids=str)
async def test_a_holder_is_asked_to_let_go_at_once(opened, kind):
    async with opened() as backend, opened() as other:
        assert not await other.request_release("x", kind.family, "too early")
        claim, _ = await enters(backend, kind)
        assert await other.request_release("x", kind.family, "a reason with spaces,\nlines and ü")
        event = await next_event(backend, EventKind.REQUESTED)
        assert (event.claim, event.text) == (claim, "a reason with spaces,\nlines and ü")
        # Once is enough, also where the renewal says it as well.
        assert await other.request_release("x", kind.family, "again")
        assert (await next_event(backend, EventKind.REQUESTED)).text == "again"
        [answer] = await backend.renew([claim])
        assert isinstance(answer, Grant)
        await claim.release()
        assert not await other.request_release("x", kind.family, "too late")
        # Who comes next was not meant.
        claim, _ = await enters(backend, kind)
        [answer] = await backend.renew([claim])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await next_event(backend, EventKind.REQUESTED)
        await claim.release()


@pytest.mark.parametrize("kind", [MUTEX, READ, WRITE, permits(2, 2)], ids=str)
async def test_a_request_to_let_go_that_was_lost_comes_with_the_next_renewal(proxy, opened, kind):
    async with opened(proxy.port) as backend, opened() as other:
        claim, _ = await enters(backend, kind)
        lost = proxy.down.drop_next(1, lambda frame: b"\r\na " in frame)
        assert await other.request_release("x", kind.family, "please go")
        await lost.wait()
        [answer] = await backend.renew([claim])
        assert isinstance(answer, Grant)
        event = await next_event(backend, EventKind.REQUESTED)
        assert (event.claim, event.text) == (claim, "please go")
        await claim.release()


async def test_what_was_taken_away_is_not_downgraded(opened):
    async with opened() as backend:
        claim, _ = await enters(backend, WRITE)
        await backend.force_release("x", Family.RW)
        with pytest.raises(LockLost) as lost:
            await claim.downgrade()
        assert lost.value.reason == "force-released"
        assert claim.request.kind == WRITE
        await claim.release()


# --- without pub/sub


@pytest.fixture(scope="module")
def quiet():
    """A server with a user who may not use channels, and one with the least rights."""
    users = (
        "user default on nopass ~* &* +@all",
        "user quiet on >secret ~* resetchannels +@all",
        least_rights("least", "f*"),
        least_rights("blind", "f*", without="+scan"),
    )
    with Redis(users=users) as running:
        yield running


async def test_without_channels_all_of_it_works_by_asking(quiet, opened):
    async with (
        opened(quiet.port, login="quiet:secret@") as one,
        opened(quiet.port, login="quiet:secret@") as two,
    ):
        writer, _ = await enters(one, WRITE)
        readers = [await waits(two, READ) for _ in range(3)]
        assert await two.request_release("x", Family.RW, "please")
        await one.renew([writer])
        assert (await next_event(one, EventKind.REQUESTED)).text == "please"
        await writer.downgrade()
        tokens = {(await granted(reader)).token for reader in readers}
        assert len(tokens) == 3
        for claim in (writer, *readers):
            await claim.release()
        register, seen = one.register("d", Family.LATCH), two.register("d", Family.LATCH)
        watching = asyncio.create_task(seen.changed(""))
        assert await register.write(b"1", "", 60) is not None
        await watching
        await register.aclose()
        await seen.aclose()


async def test_without_scan_locks_work_and_are_not_listed(quiet, opened):
    async with opened(quiet.port, login="blind:password@") as backend:
        claim, _ = await enters(backend, READ)
        with pytest.raises(BackendRefused, match="NOPERM"):
            await backend.names("*")
        await claim.release()


# --- which locks there are

NAMES = [
    "order:42",
    "order:4",
    "a*b",
    "a?b",
    "[x]",
    "back\\slash",
    "with {braces} and %",
    "ünïcode",
    " ",
    "*",
]


async def test_locks_are_listed_with_their_real_names(opened, admin, namespace):
    """Not those that became free, whose keys are there for another minute."""
    async with opened() as backend, opened() as other:
        held = [(await enters(backend, MUTEX, name=name))[0] for name in NAMES]
        writer, _ = await enters(backend, WRITE, name="order:42")
        waiting = await waits(other, READ, name="order:42")
        kept, _ = await enters(other, permits(1, 1), name="kept")
        await kept.release(keep=300)
        free, _ = await enters(other, permits(1, 1), name="free")
        await free.release()
        register = backend.register("order:43", Family.LATCH)
        await register.write(b"1", "", 60)
        everything = [
            *((name, Family.LOCK) for name in NAMES),
            ("order:42", Family.RW),
            ("kept", Family.SEMAPHORE),
        ]
        assert await backend.names("*") == sorted(everything)
        assert await backend.names("order:4*") == [
            ("order:4", Family.LOCK),
            ("order:42", Family.LOCK),
            ("order:42", Family.RW),
        ]
        for pattern, names in {
            "a[*]b": ["a*b"],
            "[[]x]": ["[x]"],
            "back\\s*": ["back\\slash"],
            "with {*": ["with {braces} and %"],
            "*ï*": ["ünïcode"],
            "nothing": [],
        }.items():
            assert [name for name, _ in await backend.names(pattern)] == names, pattern
        for claim in (*held, writer, waiting):
            await claim.release()


async def test_locks_that_became_free_are_not_listed_however_many_there_are(server, monkeypatch):
    """Their keys live for another minute. No more time is needed for the list than for one command, at a time."""
    monkeypatch.setattr(admin, "MOST", 100)
    async with aiolock.connect(server.url, namespace=secrets.token_hex(4), ttl=3) as client:

        async def use(number: int) -> None:
            async with client.lock(f"order:{number}"), client.rwlock(f"order:{number}").read():
                pass

        for first in range(0, 1500, 100):
            await asyncio.gather(*(use(number) for number in range(first, first + 100)))
        async with client.lock("nightly"), client.rwlock("weekly").write():
            assert [info.name for info in await client.locks()] == ["nightly", "weekly"]


async def test_a_list_that_nobody_can_read_is_refused(opened, monkeypatch):
    monkeypatch.setattr(admin, "MOST", 3)
    async with opened() as backend:
        claims = [(await enters(backend, READ, name=f"n{n}"))[0] for n in range(4)]
        with pytest.raises(BackendRefused, match="narrow the pattern"):
            await backend.names("*")
        assert len(await backend.names("n[12]")) == 2
        for claim in claims:
            await claim.release()
