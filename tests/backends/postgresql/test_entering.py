"""The statement that enters a free lock: as the rules say, at one moment, and never after its heartbeat has been replaced."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import asynccontextmanager

import asyncpg
import pytest

import aiolock
from aiolock.backends.postgresql.schema import Statements
from aiolock.backends.rows.lockrow import Enter as EnterStep
from aiolock.backends.rows.lockrow import (
    Liveness,
    LockRow,
    RowHold,
    RowRequest,
    TokenSource,
    apply,
    decode,
    encode,
    template,
)
from aiolock.backends.rows.pipeline import Pipeline
from aiolock.backends.rows.store import Entry
from aiolock.backends.rows.writer import ALONE
from tests.backends.postgresql.tools import edit, key, opened, put
from tests.simulation.rowstore import entered

WAITS = 0.3
"""Seconds after which a statement that has not ended is taken to wait for another transaction."""


def request(**fields):
    return RowRequest(secrets.token_hex(8), "write", 30.0, "läbel", session="client-1", **fields)


async def entry(store, one, name="x", *, asked=None, floor=0, block=1, session=None):
    """An entry for a session row that is there."""
    session = session or key("s/")
    [row] = await store.get([session])
    heartbeat = row.version or await put(store, session)
    head, hold = template(name, asked or request(), 1.5)
    return Entry(one, secrets.token_urlsafe(12), head, hold, block, floor, session, heartbeat)


def held(name="x", token=7):
    return LockRow(name, {"a": RowHold(request(), token, 1.0)}, token=token)


async def inside(store, one):
    """The holds of a row."""
    [row] = await store.get([one])
    return decode(row.value).holds


@asynccontextmanager
async def another(url):
    """A connection with the settings of a client's."""
    driver = await asyncpg.connect(url)
    try:
        await driver.execute(Statements("public.aiolock")("settings").replace("{lock_timeout}", "10000"))
        yield driver
    finally:
        await driver.close()


async def waits(task):
    """Whether a statement waits for another transaction."""
    done, _ = await asyncio.wait({task}, timeout=WAITS)
    return not done


# --- the rules


NAMES = ["x", "a b", 'quote"\\back', "ünïcode 🔒", "line\nbreak", "%_'$1", "\u2028", "x" * 300]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
async def test_the_value_is_that_of_the_rules(url, name):
    asked = request(block=1024)
    async with opened(url) as store:
        for before in (
            None,
            LockRow(name),
            LockRow(name, token=9),
            LockRow(name, token=5, forced=("ab", "c kept")),
        ):
            for floor in (0, 10**17):
                one = key()
                if before is not None:
                    await put(store, one, encode(before))
                sent = await entry(store, one, name, asked=asked, floor=floor, block=1024)
                row, _ = await store.enter(sent)
                assert row.version == sent.version
                found = decode(row.value)
                # By the time that the server has taken: with a floor, it does not matter.
                tick = found.token
                known = Liveness()
                expected = apply(
                    before or LockRow(name),
                    [EnterStep(asked.id, asked)],
                    known,
                    TokenSource(floor, tick, 1.5),
                ).row
                assert found == expected == decode(entered(encode(before) if before else b"", sent, tick))
                assert row.tick >= found.token or floor


OTHERS = {
    "held": encode(held()),
    "waited for": encode(LockRow("x", queue={"q": request()}, token=7)),
    "held and waited for": encode(LockRow("x", held().holds, {"q": request()}, 7)),
    "of another name": encode(LockRow("y", token=7)),
    "with a limit": encode(LockRow("x", token=7, declared=2, current=2)),
    "with an unknown field": encode(LockRow("x", token=7, extra={"z": 1})),
    "with an unknown field behind": encode(LockRow("x", token=7))[:-1] + b',"z":1}',
    "with a token that is no number": b'3{"v":"x","t":null}',
    "with a token that is too large": b'3{"v":"x","t":9223372036854775808}',
    "of another format": b'2{"v":"x","t":7}',
    "bytes": b"\x00\xff\\",
    "empty": b"",
}


@pytest.mark.parametrize("what", OTHERS)
async def test_a_row_that_is_not_free_stays_as_it_is(url, what):
    async with opened(url) as store:
        one, value = key(), OTHERS[what]
        version = await put(store, one, value)
        row, before = await store.enter(await entry(store, one))
        assert (row.value, row.version, before) == (value, version, version)
        [row] = await store.get([one])
        assert (row.value, row.version) == (value, version)


async def test_the_version_before_is_told(url):
    async with opened(url) as store:
        one = key()
        sent = await entry(store, one)
        row, before = await store.enter(sent)
        assert (row.version, before) == (sent.version, "")
        assert row.clock.seconds == pytest.approx(row.tick / 1e6)
        version = await put(store, one, encode(LockRow("x", token=decode(row.value).token)))
        row, before = await store.enter(again := await entry(store, one))
        assert (row.version, before) == (again.version, version)


async def test_a_row_with_a_hold_is_not_purged(url):
    async with opened(url) as store:
        one = key()
        await put(store, one, encode(LockRow("x", token=7)), ttl=0.001)
        await store.enter(await entry(store, one))
        await asyncio.sleep(0.05)
        await store.purge("", 0)
        assert await inside(store, one)


@pytest.mark.parametrize("there", [True, False], ids=["row", "no row"])
async def test_one_of_many_enters(url, there):
    async with opened(url) as first, opened(url) as second, opened(url) as third:
        one = key()
        if there:
            await put(first, one, encode(LockRow("x", token=7)))
        sent = [await entry(store, one) for store in (first, second, third)]
        rows = await asyncio.gather(
            *(store.enter(each) for store, each in zip((first, second, third), sent, strict=True))
        )
        winners = [each for (row, _), each in zip(rows, sent, strict=True) if row.version == each.version]
        assert len(winners) <= 1
        [row] = await first.get([one])
        assert row.version == winners[0].version
        assert len(decode(row.value).holds) == 1


# --- (18) late copies


@pytest.mark.parametrize("there", [True, False], ids=["row", "no row"])
@pytest.mark.parametrize("session", ["renewed", "deleted"])
async def test_a_statement_that_arrives_after_the_next_heartbeat_does_not_enter(url, there, session):
    async with opened(url) as store:
        one = key()
        if there:
            await put(store, one, encode(LockRow("x", token=7)))
        late = await entry(store, one)
        gone = [
            edit(
                late.session,
                late.heartbeat,
                **({} if session == "renewed" else {"version": "", "value": None}),
            )
        ]
        assert await store.compare_and_set(gone) != [None]
        row, before = await store.enter(late)
        assert row.version == before != late.version
        assert (row.version == "") is not there


async def test_a_heartbeat_does_not_overtake_a_statement_that_has_entered_and_is_not_committed(url):
    """Else it could be answered, the claim leave a row that shows no hold, and the hold be committed after that."""
    async with opened(url) as store, another(url) as driver:
        one = key()
        late = await entry(store, one)
        transaction = driver.transaction()
        await transaction.start()
        [[_, version, *_]] = await driver.fetch(store._statements("enter"), *late)
        assert version == late.version
        heartbeat = edit(late.session, late.heartbeat)
        assert await store.compare_and_set([heartbeat]) == [None]
        await transaction.commit()
        assert await store.compare_and_set([heartbeat]) != [None]
        assert await inside(store, one)


async def test_a_statement_declines_while_its_session_is_written(url):
    async with opened(url) as store, another(url) as driver:
        one = key()
        sent = await entry(store, one)
        async with driver.transaction():
            await driver.execute("UPDATE public.aiolock SET version = 'next' WHERE key = $1", sent.session)
            row, _ = await store.enter(sent)
            assert row.version == ""
        assert not (await store.versions([one]))[0].version


# --- (8) the snapshot


NAIVE = """
UPDATE public.aiolock AS r SET value = $2, version = 'B'
WHERE r.key = $1 AND NOT EXISTS (SELECT FROM public.aiolock AS s WHERE s.key = $3 AND s.expires > clock_timestamp())
RETURNING r.version
"""
"""A statement that ends the hold of a session that has expired, as its snapshot shows that session."""


async def test_a_statement_that_judges_the_session_of_another_client_lets_two_in(url):
    """The counterexample: the snapshot of the session is older than the row that the statement has waited for."""
    async with opened(url) as store, another(url) as driver, another(url) as third:
        one, session = key(), key("s/")
        await put(store, one, encode(held()))
        version = await put(store, session, ttl=0.01)
        await asyncio.sleep(0.05)
        transaction = third.transaction()
        await transaction.start()
        await third.execute("SELECT FROM public.aiolock WHERE key = $1 FOR UPDATE", one)
        entering = asyncio.create_task(driver.fetch(NAIVE, one, encode(held(token=8)), session))
        assert await waits(entering)
        # The holder was late; no other client has declared it dead, so it goes on.
        assert await store.compare_and_set([edit(session, version, ttl=30.0)]) != [None]
        await transaction.commit()
        assert await entering == [("B",)]


async def test_a_statement_does_not_wait_for_a_row_and_declines(url):
    async with opened(url) as store, another(url) as driver:
        one = key()
        await put(store, one, encode(LockRow("x", token=7)))
        sent = await entry(store, one)
        async with driver.transaction():
            await driver.execute("SELECT FROM public.aiolock WHERE key = $1 FOR UPDATE", one)
            row, before = await store.enter(sent)
            assert row.version == before != sent.version
        assert not await inside(store, one)


async def test_a_statement_does_not_wait_long_for_an_insertion_and_declines(url):
    async with opened(url) as store, another(url) as driver:
        one = key()
        sent = await entry(store, one)
        async with driver.transaction():
            await driver.execute(
                "INSERT INTO public.aiolock (key, value, version) VALUES ($1, $2, 'A')", one, encode(held())
            )
            row, before = await store.enter(sent)
            assert row.version == before == ""
        assert (await store.versions([one]))[0].version == "A"


@pytest.mark.parametrize("change", ["held", "free again", "session"])
async def test_a_statement_that_waited_would_not_enter_by_an_older_snapshot(url, change):
    """Between the snapshot and the lock of a row there is time also for a statement that does not wait."""
    async with opened(url) as store, another(url) as driver, another(url) as third:
        one = key()
        await put(store, one, encode(LockRow("x", token=7)))
        sent = await entry(store, one)
        waiting = store._statements("enter").replace("SKIP LOCKED", "")
        transaction = third.transaction()
        await transaction.start()
        what = sent.session if change == "session" else one
        value = encode(held() if change == "held" else LockRow("x", token=8))
        await third.execute("UPDATE public.aiolock SET value = $2, version = 'A' WHERE key = $1", what, value)
        entering = asyncio.create_task(driver.fetch(waiting, *sent))
        assert await waits(entering)
        await transaction.commit()
        [[_, version, *_]] = await entering
        assert version != sent.version
        [row] = await store.get([one])
        assert row.version != sent.version
        assert len(decode(row.value).holds) == (change == "held")


# --- what it saves


@pytest.fixture
def sent(monkeypatch):
    """The statements that were sent, as the numbers of calls in them."""
    statements = []
    carry_out = Pipeline._carry_out

    async def count(pipeline):
        statements.append(len(pipeline._current))
        await carry_out(pipeline)

    monkeypatch.setattr(Pipeline, "_carry_out", count)
    return statements


async def test_a_free_lock_is_entered_by_one_statement_and_left_by_one(url, sent):
    options = {"namespace": secrets.token_hex(6), "ttl": 600.0}
    async with aiolock.connect(url, **options) as client, aiolock.connect(url, **options) as other:

        async def statements(one, name):
            """The statements of an acquire, and those with its release."""
            sent.clear()
            lease = await one.lock(name).acquire()
            before = len(sent)
            await lease.release()
            return before, len(sent)

        for one in (client, other):
            await statements(one, "opens the session")
        for one in (*[client] * (ALONE + 2), *[other] * (ALONE + 2)):
            assert await statements(one, "x") == (1, 2)
        for one in (client, other, client, client, other, client, other, other, other, client):
            assert await statements(one, "y") == (1, 2)
        # A write against the version that a client knows, because it alone had used the lock for some time, is refused first.
        assert await statements(client, "x") == (2, 3)
        assert await statements(other, "x") == (2, 3)
        for one in (client, other, client, other):
            assert await statements(one, "x") == (1, 2)


async def test_many_free_locks_at_once_are_entered_by_few_statements(url, sent):
    async with aiolock.connect(url, namespace=secrets.token_hex(6), ttl=600.0) as client:
        async with client.lock("opens the session"):
            pass
        sent.clear()
        await asyncio.gather(*(client.lock(f"x{number}").acquire() for number in range(100)))
        assert len(sent) < 40
