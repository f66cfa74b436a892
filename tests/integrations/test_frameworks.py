"""The recipes of docs/how-to/frameworks.md: two processes of each framework, one is killed; a job of many is done once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import urllib.request
from pathlib import Path

import pytest

import aiolock
from tests.faults.staging import PATIENCE, until
from tests.integrations.recipes import ARQ, PAGE, Recipe, files
from tests.processes import reserve_port
from tests.servers import Redis


@pytest.fixture
def redis():
    with Redis() as server:
        yield server


@pytest.fixture
def port():
    with contextlib.ExitStack() as stack:
        yield reserve_port(stack)


@pytest.fixture
def recipe(tmp_path, redis):
    """`recipe(*files, sync=…, changes=…)`: a folder with files of the page."""
    with contextlib.ExitStack() as stack:

        def make(*names: str, sync: bool, changes: dict[str, str] | None = None) -> Recipe:
            made = Recipe(tmp_path, redis.url, names, sync=sync, changes=changes or {})
            return stack.enter_context(made)

        yield make


@pytest.fixture
def post():
    """Send requests beside the test; what they answer is not looked at, because workers are killed."""

    def send(url: str) -> None:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=PATIENCE).read()

    return lambda url: threading.Thread(target=send, args=(url,), daemon=True).start()


def test_every_file_of_the_page_is_run():
    text = Path(__file__).read_text()
    assert len(files()) == PAGE.read_text().count("```python")
    for name in files():
        assert f'"{name}"' in text, name


async def test_celery(recipe):
    shop = recipe("tasks.py", sync=True)
    shop.start("celery", "-A", "tasks", "worker", "-c", "2", "--loglevel", "INFO")
    await shop.ready(1, " ready.")
    await shop.the_lock_passes_on(
        lambda order: shop.send(f"from tasks import pay\nfor _ in range(2): pay.delay({order})")
    )
    await shop.sent()
    assert "WorkerLostError" in shop.log()


@pytest.mark.parametrize("pool", ["threads", "gevent", "eventlet"])
async def test_celery_in_one_process(recipe, pool):
    """Threads or greenlets instead of processes: they wait for each other inside the one client."""
    shop = recipe("tasks.py", sync=True)
    worker = shop.start("celery", "-A", "tasks", "worker", "-P", pool, "-c", "4", "--loglevel", "INFO")
    await shop.ready(1, " ready.")
    shop.send("from tasks import pay, remind\nfor task in (pay, pay, pay): task.delay(1)\nremind.delay()")
    await until(lambda: shop.events("begin") and shop.events("done"), "the lock is held, and waited for")
    async with aiolock.connect(shop.url) as client:
        lock = client.lock("order:1")

        async def waiting() -> bool:
            return (await lock.inspect()).holders[0].local_waiters == 2

        await until(waiting, "the two others wait")
        assert len(shop.events("begin")) == 1
        (shop.folder / "go").touch()
        await until(lambda: len(shop.events("end")) == 3, "all are charged")
        charged = [event for event in shop.events("pid") if "done" not in event]
        assert ["begin" in event for event in charged] == [True, False] * 3
        os.kill(worker.pid, signal.SIGTERM)
        await until(lambda: not worker.running, "the worker ends")
        assert not await lock.locked()


async def test_celery_with_two_beats(recipe):
    shop = recipe("tasks.py", sync=True, changes={'"schedule": 60.0': '"schedule": 1.0'})
    shop.start("celery", "-A", "tasks", "worker", "-c", "2", "--loglevel", "INFO")
    for number in range(2):
        shop.start("celery", "-A", "tasks", "beat", "--schedule", f"schedule-{number}", "--pidfile", "")
    await shop.ready(4, "succeeded in")
    assert len(shop.events("done")) == 1


async def test_flask_under_gunicorn(recipe, port, post):
    shop = recipe("app.py", "gunicorn.conf.py", sync=True)
    shop.start("gunicorn", "--preload", "--workers", "2", "--bind", f"127.0.0.1:{port}", "app:app")
    await shop.ready(2, "Booting worker")
    await shop.the_lock_passes_on(lambda order: post(f"http://127.0.0.1:{port}/orders/{order}/pay"))


SETTINGS = """
SECRET_KEY = "x"
ALLOWED_HOSTS = ["127.0.0.1"]
ROOT_URLCONF = "shopsite.urls"
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "db.sqlite3", "ATOMIC_REQUESTS": True}}
INSTALLED_APPS = ["shopsite"]
LOCKS_URL = "%s"
"""
URLS = """
from django.urls import path
from shopsite.views import pay
urlpatterns = [path("orders/<int:order_id>/pay", pay)]
"""


async def test_django(recipe, redis, port, post):
    command = "shopsite/management/commands/remind.py"
    shop = recipe("shopsite/locks.py", "shopsite/wsgi.py", "shopsite/views.py", command, sync=True)
    (shop.folder / "shopsite/settings.py").write_text(SETTINGS % redis.url)
    (shop.folder / "shopsite/urls.py").write_text(URLS)
    shop.start("gunicorn", "--workers", "2", "--bind", f"127.0.0.1:{port}", "shopsite.wsgi")
    await shop.ready(2, "Booting worker")
    manage = ("-m", "django", "remind", "--settings", "shopsite.settings")
    await shop.the_lock_passes_on(lambda order: post(f"http://127.0.0.1:{port}/orders/{order}/pay"))
    await asyncio.gather(*(shop.run(*manage) for _ in range(2)))
    assert len(shop.events("done")) == 1


async def test_apscheduler(recipe):
    shop = recipe("scheduler.py", sync=True, changes={"seconds=60": "seconds=1"})
    (shop.folder / "logged.py").write_text(
        "import logging, runpy\nlogging.basicConfig(level=20)\nrunpy.run_module('scheduler', run_name='__main__')"
    )
    for _ in range(2):
        shop.start("logged")
    await shop.ready(4, "executed successfully")
    assert len(shop.events("done")) == 1


async def test_arq(recipe):
    shop = recipe("worker.py", sync=False)
    shop.python = ARQ
    for _ in range(2):
        shop.start("arq", "worker.WorkerSettings")
    await shop.ready(2, "Starting worker")
    enqueue = (
        "import asyncio; from arq import create_pool; from worker import WorkerSettings\n"
        "async def main():\n"
        "    pool = await create_pool(WorkerSettings.redis_settings)\n"
        "    for _ in range(4): await pool.enqueue_job('pay', {})\n"
        "    await pool.aclose()\n"
        "asyncio.run(main())"
    )
    await shop.the_lock_passes_on(lambda order: shop.send(enqueue.format(order)))
    await shop.sent()


async def test_taskiq(recipe):
    shop = recipe("broker.py", sync=False)
    shop.start("taskiq", "worker", "broker:broker", "--workers", "2")
    await shop.ready(2, "Listening started")
    enqueue = (
        "import asyncio; from broker import broker, pay, remind\n"
        "async def main():\n"
        "    await broker.startup()\n"
        "    for _ in range(4): await pay.kiq({}); await remind.kiq()\n"
        "    await broker.shutdown()\n"
        "asyncio.run(main())"
    )
    await shop.the_lock_passes_on(lambda order: shop.send(enqueue.format(order)))
    await shop.sent()
    await shop.ready(4, "Executing task broker:remind")
    assert len(shop.events("done")) == 1


async def test_uvicorn_with_two_workers(recipe, port, post):
    # Each worker starts the job every second, and one of them does it, once within `at_least`.
    shop = recipe("web.py", "periodic.py", sync=False, changes={"by_the_clock(60,": "by_the_clock(1,"})
    shop.start("uvicorn", "web:app", "--workers", "2", "--port", str(port))
    await shop.ready(2, "Application startup complete")
    await until(lambda: len(shop.events("done")) == 3, "a worker has done the job")
    assert sorted(event["done"] for event in shop.events("done")) == ["migration", "migration", "reminders"]
    await shop.the_lock_passes_on(lambda order: post(f"http://127.0.0.1:{port}/orders/{order}/pay"))
    # The worker that was killed is started again.
    await shop.ready(3, "Application startup complete")
    assert [event["done"] for event in shop.events("done")].count("reminders") == 1
