"""Every example runs, and does what its first line says."""

from __future__ import annotations

import asyncio
import importlib
import os
import secrets
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

import aiolock
from aiolock.testing import lose
from examples import aiohttp_app, cron_once, workers
from tests.integrations import web_servers
from tests.servers import Redis

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def redis():
    with Redis() as server:
        yield server


def play(program: str, url: str, *arguments: str) -> str:
    """The output of an example that ends by itself, as a user starts it."""
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / program), *arguments],
        env={**os.environ, "AIOLOCK_URL": url, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout


# --- workers and jobs


def test_workers_do_each_job_once(redis, monkeypatch):
    monkeypatch.setenv("AIOLOCK_URL", redis.url)
    assert sum(asyncio.run(workers.main()).balances.values()) == 400


def test_workers_is_a_program(redis):
    assert "130" in play("workers.py", redis.url)


async def test_a_worker_that_loses_its_lock_does_the_job_again(capsys):
    class Unlucky(workers.Ledger):
        async def add(self, account: str, amount: int, token: int) -> None:
            if not self.balances:
                self.balances[account] = 0
                await asyncio.Event().wait()
            await super().add(account, amount, token)

    ledger, jobs = Unlucky(), asyncio.Queue()
    jobs.put_nowait(workers.Job("1", 10))
    async with aiolock.connect(f"memory://{secrets.token_hex(4)}") as client:
        working = asyncio.create_task(workers.worker(client, jobs, ledger))
        await web_servers.until(lambda: ledger.balances, "the job began")
        await client.lock("account:1").force_release()
        await jobs.join()
        working.cancel()
        await asyncio.wait([working])
    assert ledger.balances == {"1": 10}
    assert "again" in capsys.readouterr().out


def test_the_cron_job_is_done_by_one_of_many(redis):
    started = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "examples/cron_once.py")],
            env={**os.environ, "AIOLOCK_URL": redis.url, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    output = [program.communicate(timeout=60)[0] for program in started]
    assert sum("done by" in text for text in output) == 1
    assert sum("somebody else" in text for text in output) == 2


async def test_the_cron_job_on_memory_runs(monkeypatch):
    monkeypatch.delenv("AIOLOCK_URL", raising=False)
    name = secrets.token_hex(4)
    assert "done by" in (await cron_once.main(name) or "")
    assert await cron_once.main(name) is None


# --- applications


async def buyers(address: str) -> list[int]:
    """Ten requests to pay one order, at the same time: their statuses."""
    async with aiohttp.ClientSession() as session:

        async def pay() -> int:
            async with session.post(f"{address}/orders/7/pay") as response:
                return response.status

        statuses = await asyncio.gather(*(pay() for _ in range(10)))
        async with session.get(f"{address}/orders/7") as response:
            assert await response.json() == {"paid": True, "at work": []}
    return sorted(statuses)


async def test_the_fastapi_application_takes_one_payment(redis, monkeypatch):
    monkeypatch.setenv("AIOLOCK_URL", redis.url)
    fastapi_app = importlib.reload(importlib.import_module("examples.fastapi_app"))
    assert redis.url == fastapi_app.URL
    async with web_servers.asgi(fastapi_app.app) as address:
        assert await buyers(address) == [200] + [410] * 9


async def test_the_aiohttp_application_takes_one_payment(redis):
    async with web_servers.aiohttp(aiohttp_app.make_app(redis.url)) as address:
        assert await buyers(address) == [200] + [410] * 9


class Dies(dict):
    """A record of payments whose process dies once, after the bank and before it is written."""

    died = False

    def __setitem__(self, order: int, token: int) -> None:
        if not self.died:
            self.died = True
            raise ZeroDivisionError
        super().__setitem__(order, token)


async def retried(address: str) -> list[int]:
    # A server closes the connection after an error of the application.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        statuses = []
        for _ in range(3):
            async with session.post(f"{address}/orders/7/pay") as response:
                statuses.append(response.status)
    return statuses


async def test_a_payment_that_is_retried_is_charged_once_by_fastapi(redis, monkeypatch):
    monkeypatch.setenv("AIOLOCK_URL", redis.url)
    fastapi_app = importlib.reload(importlib.import_module("examples.fastapi_app"))
    monkeypatch.setattr(fastapi_app, "paid", Dies())
    async with web_servers.asgi(fastapi_app.app) as address:
        assert await retried(address) == [500, 200, 410]
    assert fastapi_app.bank.charged == {"order:7"}


async def test_a_payment_that_is_retried_is_charged_once_by_aiohttp(redis, monkeypatch):
    monkeypatch.setattr(aiohttp_app, "bank", aiohttp_app.Bank())
    app = aiohttp_app.make_app(redis.url)
    app[aiohttp_app.PAID] = Dies()
    async with web_servers.aiohttp(app) as address:
        assert await retried(address) == [500, 200, 410]
    assert aiohttp_app.bank.charged == {"order:7"}


# --- metrics


async def something_happens(client: aiolock.Client) -> None:
    """Five leases, of which one was waited for and one is lost."""

    async def turn() -> None:
        async with client.lock("a"):
            await asyncio.sleep(0.01)

    await asyncio.gather(turn(), turn(), turn())
    lease = await client.lock("b").acquire()
    await lease.renew()
    lose(lease, "revoked")
    async with client.lock("c"):
        pass


def test_the_readme_names_every_example():
    text = (ROOT / "examples/README.md").read_text()
    for path in ROOT.glob("examples/*"):
        if path.suffix == ".py" or (path.is_dir() and not path.name.startswith("_")):
            assert f"({path.name})" in text, path.name
