"""Logs: silence when all goes well, and fields for machines when it does not."""

from __future__ import annotations

import asyncio
import logging
import secrets
from pathlib import Path

import pytest

import aiolock
from aiolock.backends.memory import MemoryBackend
from aiolock.core.logs import Log, Outages
from tests.faults.staging import until
from tests.pace import pace
from tests.servers import Redis


@pytest.fixture(scope="module")
def redis():
    with Redis() as server:
        yield server


@pytest.mark.parametrize("where", ["memory", "redis"])
async def test_nothing_is_logged_above_debug_when_all_goes_well(where, request, caplog):
    caplog.set_level(logging.DEBUG, logger="aiolock")
    url = f"memory://{secrets.token_hex(4)}" if where == "memory" else request.getfixturevalue("redis").url
    namespace, ttl = secrets.token_hex(4), 0.5 * pace()

    async def turn(client: aiolock.Client, name: str) -> None:
        async with client.lock(name, timeout=20) as lease:
            await lease.renew()

    async with (
        aiolock.connect(url, namespace=namespace, ttl=ttl) as one,
        aiolock.connect(url, namespace=namespace, ttl=ttl) as two,
    ):
        await asyncio.gather(*(turn(client, str(n % 3)) for client in (one, two) for n in range(30)))
        with pytest.raises(aiolock.AcquireTimeout):
            async with one.lock("taken"):
                await two.lock("taken").acquire(timeout=0.01)
        async with one.lock("taken"):
            waiter = asyncio.create_task(two.lock("taken").acquire())
            await until(lambda: two.stats()["waiting"] == 1)
            waiter.cancel()
            await asyncio.wait([waiter])
        async with one.lock("long"):
            renewals = one.stats()["renewals"]
            await until(lambda: one.stats()["renewals"] >= renewals + 2)
    loud = [
        record.getMessage()
        for record in caplog.records
        if record.name.partition(".")[0] == "aiolock" and record.levelno > logging.DEBUG
    ]
    assert loud == []


async def test_fields_do_not_collide_with_those_of_the_application(caplog):
    plain = logging.getLogRecordFactory()

    def factory(*rest, **options):
        record = plain(*rest, **options)
        record.lock = record.kind = record.reason = record.token = "the application's"
        return record

    logging.setLogRecordFactory(factory)
    try:
        async with aiolock.connect("memory://logs", ttl=0.5) as client:
            lease = await client.lock("a", max_hold=0.1).acquire()
            other = await client.lock("b").acquire()
            await lease.wait_lost()
            renewals = client.stats()["renewals"]
            await until(lambda: client.stats()["renewals"] >= renewals + 2)
            assert other.held
    finally:
        logging.setLogRecordFactory(plain)
    record = next(record for record in caplog.records if record.name == "aiolock.lost")
    assert (record.token, record.aiolock_token) == ("the application's", lease.token)


async def test_a_filter_that_raises_is_reported_as_logging_does(capsys, monkeypatch):
    def refuse(record: logging.LogRecord) -> bool:
        raise KeyError("no request id in this context")

    logger = logging.getLogger("aiolock.lost")
    logger.addFilter(refuse)
    try:
        for raising in (True, False):
            monkeypatch.setattr(logging, "raiseExceptions", raising)
            async with aiolock.connect("memory://logs") as client:
                lease = await client.lock("a").acquire()
                await client.lock("a").force_release()
                await lease.wait_lost()
            assert ("no request id in this context" in capsys.readouterr().err) == raising
    finally:
        logger.removeFilter(refuse)


def test_a_logger_class_that_raises_does_not_stop_the_caller(monkeypatch):
    class Raising(logging.Logger):
        def isEnabledFor(self, level: int) -> bool:  # noqa: N802 - logging's name
            raise RuntimeError(f"nothing is known about level {level}")

    monkeypatch.setattr(logging, "raiseExceptions", False)
    log = Log(Raising("aiolock"), None)
    log.warning("lost %s", "x", extra={"lock": "x"})


async def test_a_record_names_the_place_that_logs(caplog):
    async with aiolock.connect("memory://logs") as client:
        lease = await client.lock("a").acquire()
        await client.lock("a").force_release()
        await lease.wait_lost()
    [record] = [record for record in caplog.records if record.name == "aiolock.lost"]
    assert record.filename == "hold.py"


def test_every_logger_of_the_library_is_one_that_does_not_raise():
    """Programs (the command line and what belongs to it) may use ``logging`` as it is."""
    package = Path(aiolock.__file__).parent
    plain = [
        path.relative_to(package).as_posix()
        for path in sorted(package.rglob("*.py"))
        if "logging.getLogger" in path.read_text() and path.relative_to(package).parts[0] != "cli"
    ]
    # The worker of `aiolock verify` is a program.
    assert plain == ["core/logs.py", "testing/worker.py"]


async def test_a_loss_is_one_warning_with_fields(caplog):
    async with aiolock.connect("memory://logs") as client:
        lease = await client.lock("order:42").acquire()
        await client.lock("order:42").force_release()
        await lease.wait_lost()
    [record] = [record for record in caplog.records if record.name == "aiolock.lost"]
    assert record.levelno == logging.WARNING
    assert (record.aiolock_lock, record.aiolock_reason, record.aiolock_token) == (
        "order:42",
        "force-released",
        lease.token,
    )
    assert record.aiolock_kind == "mutex"


async def test_a_renewal_that_failed_is_a_warning_with_fields(caplog):
    cut = asyncio.Event()

    async def travel(step):
        if cut.is_set():
            raise aiolock.BackendUnavailable("the connection is cut")
        return step()

    async with aiolock.Client(MemoryBackend("memory://logs", transport=travel), ttl=0.3) as client:
        lease = await client.lock("order:42").acquire()
        cut.set()
        await lease.wait_lost()
        cut.clear()
    records = [record for record in caplog.records if record.name == "aiolock.renew"]
    assert records
    assert {(record.levelno, record.aiolock_lock, record.aiolock_ttl) for record in records} == {
        (logging.WARNING, "order:42", 0.3)
    }
    assert all(record.aiolock_left <= 0.3 for record in records)
    assert {record.aiolock_locks for record in records} == {1}


def test_a_client_is_without_servers_when_all_are_away_that_it_had_reached():
    outages, first, second = Outages(lambda: 7.0, lambda: False), object(), object()
    outages.up(first, "a")
    outages.up(second, "b")
    outages.down(first, "a", "reset")
    assert outages.describe() == ""
    outages.down(second, "b", "reset")
    assert "a was lost" in outages.describe()
    assert "b was lost" in outages.describe()
    outages.up(first, "a")
    assert outages.describe() == ""
