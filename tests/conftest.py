"""What every test of this repository is held to: no complaint of asyncio's, no task left behind.

Debug mode of asyncio is on, so that coroutines that nobody awaited and calls from foreign threads are noticed.
Warnings are errors (pyproject.toml), which covers what Python could not raise.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import itertools
import logging
import os
import shutil
import signal
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import hypothesis
import pytest

from tests.servers import (
    EXTERNAL,
    MYSQLD,
    POSTGRES,
    REDIS,
    SERVERS,
    ServerMissing,
    mysqld,
    postgres,
    redis_server,
)

# Loops read this when they are made.
os.environ["PYTHONASYNCIODEBUG"] = "1"
# A complaint names the line that made its task, and not ten frames of each callback: they are a tenth of the processor time of the contract in memory.
asyncio.constants.DEBUG_STACK_DEPTH = 1

# How long an example takes is about the machine.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

PREVIEWS = {
    "etcd": "backends/etcd",
    "mariadb": "backends/mysql",
    "memcached": "backends/memcached",
    "mongodb": "backends/mongodb",
    "postgresql": "backends/postgresql",
    "zookeeper": "backends/zookeeper",
}
"""Servers whose backends are in preview: their tests run when the run is about them, and the header says so."""


def not_about() -> list[str]:
    """The servers that this run is not about; what stands in for one counts for it."""
    return [server for server in PREVIEWS if not {server, f"{server}-standin"} & SERVERS]


collect_ignore = [PREVIEWS[server] for server in not_about()]

GRACE = 5.0
"""Seconds for tasks to end that were told to end; they are counted, not raced."""


GIVEN_UP = "exception=ConnectionDoesNotExistError('connection was closed in the middle of operation')>"


def leaves_futures() -> bool:
    """Whether this asyncpg keeps a future, whose error cannot be asked for, of a connection that is given up while it opens."""
    try:
        return tuple(map(int, version("asyncpg").split(".")[:2])) < (0, 32)
    except PackageNotFoundError:
        return False


class Complaints(logging.Handler):
    """Keeps what asyncio says, except that a step took long, which is about the machine, and what only old drivers cause."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if line.startswith("Executing ") and " took " in line:
            return
        if GIVEN_UP in line and leaves_futures():
            return
        if record.exc_info and record.exc_info[1] is not None:
            line = f"{line}\n{record.exc_info[1]!r}"
        self.lines.append(line)


URLS = {
    "redis": "redis",
    "zookeeper": "zookeeper",
    "mysql": "mariadb",
    "postgresql": "postgresql",
    "mongodb": "mongodb",
}
"""Options that name a server that is there already, and which server of `SERVERS` it stands for."""


def pytest_addoption(parser):
    for option, server in URLS.items():
        parser.addoption(
            f"--{option}-url",
            metavar="URL",
            help=f"use this {server} for the contract (and for tests/backends/mysql) instead of starting one; "
            "an account that may do everything",
        )


def hear_signals():
    """What starts us in the background or survives a logout has INT, QUIT or HUP ignored, and programs inherit that."""
    for number, usual in {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGQUIT: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


ALONE = "backends/mysql"
"""Its tests change settings of the whole server and count its connections."""


GALERA = "backends/mysql/test_galera.py"
"""Its nodes are of the MariaDB for which the provider was built, which is the installed one."""


def crowded(config) -> bool:
    """Whether several processes would use somebody's MySQL at once."""
    return "mariadb" in EXTERNAL and bool(
        getattr(config.option, "numprocesses", None) or hasattr(config, "workerinput")
    )


MEMORY = Path("/dev/shm")  # noqa: S108 - a directory of our own in it
ROOM = 8 << 30
"""Bytes that have to be free there for the files of all servers."""


def files_in_memory(config) -> None:
    """Keep the files of servers in memory where there is room: no test asks what a disk keeps when the power fails.

    A slow disk makes every server slower. What a test writes for people to read (``tmp_path``) stays where it was.
    """
    if hasattr(config, "workerinput") or "TMPDIR" in os.environ or not MEMORY.is_dir():
        return
    if shutil.disk_usage(MEMORY).free < ROOM:
        return
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = Path(tempfile.mkdtemp(prefix="aiolock-", dir=MEMORY))
    # Servers that run under accounts of their own go through it.
    folder.chmod(0o755)
    os.environ["TMPDIR"], tempfile.tempdir = str(folder), None
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_configure(config):
    config.addinivalue_line("markers", "ends_server: kills, freezes or restarts the server that it is given")
    hear_signals()
    files_in_memory(config)
    for option, server in URLS.items():
        if url := config.getoption(f"--{option}-url", default=None):
            EXTERNAL[server] = url
            SERVERS.add(server)
    collect_ignore[:] = [PREVIEWS[server] for server in not_about()]
    try:
        if MYSQLD:
            mysqld()
            collect_ignore.append(GALERA)
        if REDIS:
            redis_server()
        if "postgresql" in SERVERS and "postgresql" not in EXTERNAL:
            postgres()
    except ServerMissing as error:
        raise pytest.UsageError(str(error)) from error
    if crowded(config):
        collect_ignore.append(ALONE)


def pytest_collection_modifyitems(config, items):
    """Somebody else's server is not ours to end."""
    theirs = [item for item in items if EXTERNAL and item.get_closest_marker("ends_server")]
    if theirs:
        config.hook.pytest_deselected(items=theirs)
        items[:] = [item for item in items if item not in theirs]


def pytest_report_header(config):
    others = not_about()
    note = f"; not about {', '.join(others)} (make test SERVERS=...)" if others else ""
    lines = [f"servers: this run is about memory, {', '.join(sorted(SERVERS))}{note}"]
    if MYSQLD and "mariadb" not in EXTERNAL:
        lines.append(f"servers: in place of MariaDB: {mysqld()}")
    if MYSQLD and "mariadb" in SERVERS:
        lines.append(
            f"servers: tests/{GALERA} is left out: its nodes would be the installed MariaDB, not that server"
        )
    if REDIS:
        lines.append(f"servers: in place of the installed Redis: {redis_server()}")
    if POSTGRES and "postgresql" in SERVERS:
        lines.append(f"servers: PostgreSQL {postgres()[1]}, {POSTGRES}")
    if EXTERNAL:
        lines.append(
            f"servers: {', '.join(sorted(EXTERNAL))} by URL; what kills, freezes or restarts a server, or needs one with "
            "other settings, is deselected"
        )
    if crowded(config):
        lines.append(f"servers: tests/{ALONE} is left out: run it by itself, without -n")
    return lines


WHOLE = itertools.cycle([True] + [False] * 99)
"""True for each test whose garbage is looked for among all objects."""


@pytest.fixture(autouse=True)
def asyncio_has_no_complaint():
    """Fails a test in which asyncio logged a warning, also one about an exception that nobody looked at."""
    logger = logging.getLogger("asyncio")
    complaints = Complaints()
    logger.addHandler(complaints)
    if next(WHOLE):
        gc.unfreeze()
        gc.collect()
    # The collection after the test looks at what the test made: looking at all of the process is a quarter of a short test.
    gc.freeze()
    try:
        yield complaints
        # "never retrieved" is said when the garbage is collected.
        gc.collect()
    finally:
        logger.removeHandler(complaints)
    assert not complaints.lines, "asyncio complained:\n" + "\n".join(complaints.lines)


@pytest.fixture
def no_error_is_logged(caplog):
    """What the client's own tasks could not cope with would be logged as an error."""
    with caplog.at_level(logging.ERROR, logger="aiolock"):
        yield
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.fixture(autouse=True)
def logs_as_before():
    """Gives the library's log back after tests that call a program's `main`, which keeps it for itself."""
    logger = logging.getLogger("aiolock")
    handlers, propagate = logger.handlers[:], logger.propagate
    yield
    logger.handlers[:], logger.propagate = handlers, propagate


@pytest.fixture
async def tasks_of_the_test():
    """Fails a test after which tasks still run that it, or what it used, started."""
    yield
    loop = asyncio.get_running_loop()
    give_up = loop.time() + GRACE
    while left := asyncio.all_tasks() - {asyncio.current_task()}:
        if loop.time() > give_up:
            pytest.fail("left behind: " + ", ".join(sorted(repr(task) for task in left)))
        await asyncio.sleep(0.005)


@pytest.fixture(autouse=True)
def no_task_is_left_behind(request):
    """The check above, for the tests that run on a loop; before any other fixture, so that it ends after all of them."""
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("tasks_of_the_test")
