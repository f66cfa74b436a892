"""The file with which docs/how-to/fastapi.md begins: two workers of uvicorn, Redis, PostgreSQL; one worker is killed."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import asyncpg
import pytest

from tests.faults.staging import PATIENCE, until
from tests.integrations.recipes import Recipe, files
from tests.integrations.test_prometheus_processes import Samples, samples
from tests.processes import reserve_port
from tests.servers import PostgreSQL
from tests.unit.test_docs import ROOT

PAGE = ROOT / "docs/how-to/fastapi.md"
EVERY = 1
"""Seconds between the runs of the job, instead of a minute."""


GONE = (OSError, http.client.HTTPException)
"""What a client gets whose worker is killed."""


class Application:
    """The application, as a browser and Prometheus see it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.counters: Samples = {}
        self.fallen: list[str] = []
        self.statuses: list[int] = []
        self._scraping = threading.Lock()

    def pay(self, order: int) -> None:
        """Send a request beside the test; a worker may be killed while it works on it."""

        def send() -> None:
            request = urllib.request.Request(f"{self.url}/orders/{order}/pay", method="POST")
            try:
                with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                    self.statuses.append(answer.status)
            except urllib.error.HTTPError as error:
                self.statuses.append(error.code)
            except GONE:
                pass

        threading.Thread(target=send, daemon=True).start()

    def scrape(self) -> Samples:
        """The metrics, of whichever worker answers; note the counters that are less than before."""
        with self._scraping:
            return self._scrape()

    def _scrape(self) -> Samples:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=PATIENCE) as answer:
            found = samples(answer.read().decode())
        gauges = ("aiolock_held", "aiolock_waiting")
        counters = {key: value for key, value in found.items() if not key.startswith(gauges)}
        self.fallen += [key for key, value in self.counters.items() if counters.get(key, 0) < value]
        self.counters = counters
        return found

    async def watch(self) -> None:
        """Scrape until cancelled. The worker that answers may be killed meanwhile."""
        while True:
            with contextlib.suppress(*GONE):
                await asyncio.to_thread(self.scrape)
            await asyncio.sleep(0.2)


@pytest.fixture
def database() -> Iterator[str]:
    with PostgreSQL() as server:
        yield server.url


@pytest.fixture
def port() -> Iterator[int]:
    with contextlib.ExitStack() as stack:
        yield reserve_port(stack)


async def test_one_of_two_workers_is_killed(tmp_path, redis_url, database, port, monkeypatch):
    [name] = files(PAGE)
    changes = {
        "postgresql://postgres@127.0.0.1:5432/postgres": database,
        "EVERY = 60 ": f"EVERY = {EVERY} ",
        "await asyncio.sleep(0.1)  # the payment provider": "from shop import charge; await charge(order_id)",
    }
    shared = tmp_path / "metrics"
    shared.mkdir()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(shared))
    recipe = Recipe(tmp_path, redis_url, [name], sync=False, changes=changes, page=PAGE)
    web, begun = Application(f"http://127.0.0.1:{port}"), time.monotonic()
    with recipe as shop:
        shop.start("uvicorn", "web:app", "--workers", "2", "--port", str(port))
        await shop.ready(2, "Application startup complete")
        watching = asyncio.create_task(web.watch())
        tables = await asyncpg.connect(database)
        try:
            # Each worker starts the job every second, and one of them does it.
            skipped = 'aiolock_skipped_total{"template": "report"}'
            await until(lambda: web.counters.get(skipped), "a worker has skipped the job")
            await shop.the_lock_passes_on(web.pay)
            await shop.ready(3, "Application startup complete")
            await until(lambda: 200 in web.statuses, "a request was answered")

            async def settled() -> bool:
                found = await asyncio.to_thread(web.scrape)
                return found["aiolock_held{}"] == found["aiolock_waiting{}"] == 0

            await until(settled, "neither the living nor the dead hold or wait")
            # What was charged was written, once, under a lock that passed from worker to worker.
            payments = await tables.fetchval("SELECT payments FROM orders WHERE id = 1")
            await until(lambda: web.statuses.count(200) == payments, "all requests were answered")
            assert len(shop.events("end")) == payments
            # The job goes on without the worker that was killed.
            runs = "SELECT count(*), max(at) FROM reports"
            before = await tables.fetchval(runs)

            async def another() -> bool:
                return await tables.fetchval(runs) > before

            await until(another, "the job was done again")
            most = (time.monotonic() - begun) / (0.8 * EVERY) + 1
            assert 2 <= await tables.fetchval(runs) <= most
            assert web.fallen == []
            assert (
                web.counters['aiolock_hold_seconds_count{"family": "lock", "template": "order:{order_id}"}']
                >= 1
            )
            assert not [key for key in web.counters if "order:1" in key]
        finally:
            watching.cancel()
            await asyncio.wait([watching])
            await tables.close()
