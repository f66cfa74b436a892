"""Metrics: what is counted, how it is distributed, and that the figures of a client say what happened."""

from __future__ import annotations

import asyncio
import math
from random import Random

import pytest

import aiolock
from aiolock.client import report_figures
from aiolock.metrics import SECONDS, SHARES, Distribution, Histogram
from tests.faults.staging import until


def seen(*values: float, bounds: tuple[float, ...] = (1.0, 2.0, 4.0)) -> Distribution:
    histogram = Histogram(bounds)
    for value in values:
        histogram.record(value)
    return histogram.snapshot()


# --- distributions


def test_a_value_that_equals_a_bound_is_in_its_bucket():
    shown = seen(0.5, 1.0, 1.5, 4.0, 4.1)
    assert shown.counts == (2, 1, 1, 1)
    assert shown.count == 5
    assert shown.total == pytest.approx(11.1)
    assert (shown.least, shown.most) == (0.5, 4.1)


def test_cumulative_buckets_end_with_everything():
    assert seen(0.5, 1.5, 9.0).cumulative == ((1.0, 1), (2.0, 2), (4.0, 2), (math.inf, 3))


def test_without_values_there_is_nothing_to_say():
    empty = seen()
    assert (empty.count, empty.total, empty.least, empty.most, empty.quantile(0.5)) == (
        0,
        0.0,
        None,
        None,
        None,
    )
    assert empty.cumulative[-1] == (math.inf, 0)


def test_quantiles_are_right_to_the_width_of_a_bucket():
    random = Random(1)
    values = sorted(random.uniform(0.0, 5.0) for _ in range(2000))
    shown = seen(*values, bounds=tuple(n / 10 for n in range(1, 50)))
    for share in (0.0, 0.01, 0.25, 0.5, 0.9, 0.99, 1.0):
        assert shown.quantile(share) == pytest.approx(values[min(1999, int(share * 2000))], abs=0.11)
    assert shown.quantile(1.0) == values[-1]
    assert seen(3.0).quantile(0.5) == 3.0


def test_a_look_is_not_changed_by_what_comes_later():
    histogram = Histogram()
    histogram.record(1.0)
    before = histogram.snapshot()
    histogram.record(2.0)
    assert before.count == 1
    assert before.bounds == SECONDS


@pytest.mark.parametrize("bounds", [SECONDS, SHARES])
def test_bounds_rise(bounds):
    assert list(bounds) == sorted(set(bounds))


# --- a client's


@pytest.fixture
async def client():
    async with aiolock.connect("memory://figures", ttl=5) as opened:
        yield opened


async def test_only_tasks_that_waited_count_as_waits(client):
    async with client.lock("free"):
        pass
    assert (client.stats()["waited"], client.stats()["waits"].count) == (0, 0)

    async def wait() -> None:
        async with client.lock("taken"):
            pass

    async with client.lock("taken"):
        waiter = asyncio.create_task(wait())
        await until(lambda: client.stats()["waiting"] == 1)
        await asyncio.sleep(0.01)
    await waiter
    stats = client.stats()
    assert (stats["waited"], stats["waits"].count, stats["holds"].count) == (1, 1, 3)
    assert stats["waits"].least >= 0.01
    assert stats["holds"].most >= 0.01


async def test_waits_in_vain_count_as_well(client):
    async with await client.lock("taken").acquire():
        with pytest.raises(aiolock.AcquireTimeout):
            await asyncio.create_task(client.lock("taken", fair=True).acquire(timeout=0.01))
        waiter = asyncio.create_task(client.lock("taken", fair=True).acquire())
        await until(lambda: client.stats()["waiting"] == 1)
        waiter.cancel()
        await asyncio.wait([waiter])
    stats = client.stats()
    assert (stats["timeouts"], stats["waited"], stats["waits"].count) == (1, 2, 2)


async def test_every_wait_and_every_hold_is_recorded(client):
    async def turn() -> None:
        async with client.lock("hot"):
            await asyncio.sleep(0)

    for _ in range(10):
        await asyncio.gather(*(turn() for _ in range(400)))
    stats = client.stats()
    assert stats["released"] == stats["holds"].count == 4000
    assert stats["waits"].count == stats["waited"] > 3600


async def test_losses_are_counted_by_reason(client):
    assert set(client.stats()["losses"].values()) == {0}
    for _ in range(2):
        lease = await client.lock("x").acquire()
        await client.lock("x").force_release()
        await lease.wait_lost()
    lease = await client.lock("y", max_hold=0.01).acquire()
    await lease.wait_lost()
    stats = client.stats()
    assert {reason: count for reason, count in stats["losses"].items() if count} == {
        "force-released": 2,
        "max_hold": 1,
    }
    assert stats["lost"] == 3
    await lease.release()


async def test_renewals_say_how_much_of_the_term_was_left(client):
    async with client.lock("x", ttl=3) as lease:
        await lease.renew()
        await until(lambda: client.stats()["renewals"] >= 2)
    slack = client.stats()["slack"]
    assert slack.count >= 2
    assert slack.most <= 1.0


async def test_synchronous_clients_have_the_same_figures():
    import aiolock.portal

    def look() -> dict:
        with aiolock.portal.connect("memory://figures") as client, client.lock("x"):
            return client.stats()

    assert set(await asyncio.to_thread(look)) == set(aiolock.metrics.Figures.__annotations__)


# --- reports of figures


async def test_figures_are_reported_while_a_client_is_open_and_when_it_closes(monkeypatch):
    monkeypatch.setattr("aiolock.core.runtime.REPORT_EVERY", 0.01)
    client = aiolock.connect("memory://reports")
    reports: list[tuple[bool, int]] = []
    report_figures(client, lambda opening: reports.append((opening.over, opening.figures()["held"])))
    for _ in range(2):
        async with client:
            await until(lambda: reports)
            async with client.lock("x"):
                await until(lambda: (False, 1) in reports)
        assert reports[-1] == (True, 0)
        assert reports.count((True, 0)) == 1
        reports.clear()


async def test_a_report_that_fails_is_logged_and_costs_no_lock(client, monkeypatch, caplog):
    monkeypatch.setattr("aiolock.core.runtime.REPORT_EVERY", 0.01)
    reports: list[object] = []

    def fail(opening: object) -> None:
        reports.append(opening)
        raise OSError("no space left on device")

    async with client.lock("x") as lease:
        # Of an open client, and from another thread, as that of a portal.
        await asyncio.to_thread(report_figures, client, fail)
        await until(lambda: len(reports) > 2)
        lease.check()
    messages = {record.getMessage() for record in caplog.records}
    assert "the figures of a client could not be reported: OSError('no space left on device')" in messages
