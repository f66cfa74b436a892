"""Who may know whom: the one-way rule, read from the imports themselves; and what `import aiolock` brings along."""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

import aiolock
from tests.architecture import arrows, circles, imports, modules

PACKAGE = Path(aiolock.__file__).parent

ORDER = [
    {"errors", "clock", "core.forks", "core.wakeup"},
    {"types", "validation", "metrics", "signals", "core.logs", "core.suspend", "backends.foreign_parameters"},
    {"backends.urls", "core.hooks", "core.inbox", "core.limiter", "core.present", "core.tasks"},
    {"core.backend"},
    {"core.capabilities"},
    {"core.renewal", "core.register", "backends"},
    {"core.runtime"},
    {"core.cancellation"},
    {"core.hold"},
    {"core.local_queue"},
    {"lease"},
    {"lock"},
    {
        "transaction_lock",
        "kinds.reentrant",
        "kinds.semaphore",
        "kinds.election",
        "kinds.latch",
        "kinds.barrier",
        "decorators",
    },
    {"kinds.rwlock"},
    {"kinds.multi"},
    {"client"},
    {""},
    {"etcd", "zookeeper", "_sql", "_threads", "_web"},
    {"mysql", "portal", "postgresql"},
    {"starlette", "aiohttp", "prometheus", "opentelemetry"},
    {"fastapi"},
    {"testing.history", "testing.locks", "testing.world"},
    {"testing.checker", "testing.worker"},
    {"testing.views"},
    {"testing.verification"},
    {"testing"},
    {"cli.exit_status", "cli.run.guard", "cli.run.signals", "cli.settings"},
    {"cli.output", "cli.parser", "cli.run.nested"},
    {"cli.admin", "cli.demo", "cli.doctor", "cli.main", "cli.run.supervisor"},
    {"cli.run.command", "cli.verify", "cli.watch"},
    {"cli"},
    {"__main__"},
]
"""A module imports only from sets before its own; "" is the package itself, what users import. A name stands for the
modules of its folder as well."""

PACKAGES = {"core", "kinds", "cli.run", "backends.rows"}
"""Folders whose ``__init__.py`` has nothing but a docstring."""

BACKENDS_MAY_IMPORT = {
    "backends.callers",
    "backends.diagnosis",
    "backends.dial",
    "backends.foreign_parameters",
    "backends.experimental",
    "backends.rows",
    "backends.sql",
    "backends.survey",
    "backends.transport",
    "backends.urls",
    "clock",
    "core.backend",
    "core.capabilities",
    "core.forks",
    "core.inbox",
    "core.limiter",
    "core.logs",
    "core.present",
    "core.tasks",
    "core.wakeup",
    "errors",
    "types",
    "validation",
}

DRIVERS = {
    "redis": {"redis", "hiredis"},
    "zookeeper": {"aiozk"},
    "mysql": {"aiomysql", "pymysql"},
    "postgresql": {"asyncpg"},
    "etcd": {"h2"},
    "mongodb": {"pymongo"},
}
"""Third-party packages, by the folder of backends that may import them."""

EXTRAS = {
    # redis-py for type checkers alone: connect() takes a client of it.
    "client": {"redis"},
    "portal": {"anyio", "redis"},
    "_threads": {"anyio"},
    "cli.parser": {"argcomplete"},
    "aiohttp": {"aiohttp"},
    "prometheus": {"prometheus_client"},
    "opentelemetry": {"opentelemetry"},
    "starlette": {"starlette"},
    "fastapi": {"fastapi", "pydantic", "starlette"},
}
"""Third-party packages, by the other module that may import them, and only when it is used."""

IN_MEMORY = {
    "cli.demo": {"backends.memory"},
    "testing.world": {"backends.memory", "backends.rows.rules"},
}
"""Modules that are a server themselves: the one in memory, which they start, and watch by its rules."""

MODULES = modules(PACKAGE)


@functools.cache
def split(path: Path) -> tuple[set[str], set[str]]:
    """What a file imports: of this package (without its name), and of other people (only the first name)."""
    names = imports(path, MODULES)
    ours = {name.removeprefix("aiolock").lstrip(".") for name in names if name.partition(".")[0] == "aiolock"}
    return ours, {name.partition(".")[0] for name in names} - {"aiolock"} - sys.stdlib_module_names


def rank(module: str) -> int:
    """The place of a module, or of the closest of its folders, in ORDER."""
    name = module
    while True:
        for place, names in enumerate(ORDER):
            if name in names:
                return place
        assert "." in name, f"say in ORDER where aiolock.{module} stands"
        name = name.rpartition(".")[0]


def folder(module: str) -> str:
    """The folder of a server, whose modules may import each other, though not in a circle."""
    return ".".join(module.split(".")[:2])


def test_the_reader_of_imports_sees_them():
    assert "lease" in split(MODULES["lock"])[0]
    assert split(MODULES["portal"])[1] == {"anyio", "redis"}
    assert {"", "client", "backends.rows.rules"} <= set(MODULES)


@pytest.mark.parametrize(
    "module", [name for name in MODULES if not name.startswith("backends.") and name not in PACKAGES]
)
def test_a_module_imports_only_from_below(module):
    ours, theirs = split(MODULES[module])
    assert [name for name in ours if rank(name) >= rank(module)] == []
    assert theirs <= EXTRAS.get(module, set())


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("backends.")])
def test_a_backend_imports_the_contract_and_its_own_folder(module):
    ours, theirs = split(MODULES[module])
    own = folder(module)
    assert [
        name
        for name in ours
        if name != own
        and not name.startswith(f"{own}.")
        and not any(name == other or name.startswith(f"{other}.") for other in BACKENDS_MAY_IMPORT)
    ] == []
    assert theirs <= DRIVERS.get(module.split(".")[1], set())


def test_the_order_names_modules_that_are_there():
    assert set().union(*ORDER) <= set(MODULES)


def test_there_are_no_circles():
    assert circles(arrows(PACKAGE)) == []


def test_only_the_registry_knows_backends():
    for module, path in MODULES.items():
        if not module.startswith("backends."):
            known = {name for name in split(path)[0] if name.startswith("backends.")}
            aliases = {"backends.foreign_parameters"} if module == "backends" else set()
            assert known <= {"backends.sql"} | aliases | IN_MEMORY.get(module, set()), module


@pytest.mark.parametrize("module", MODULES)
def test_a_module_says_in_its_first_line_what_it_is(module):
    text = ast.get_docstring(ast.parse(MODULES[module].read_text()))
    assert text
    assert len(text.splitlines()[0]) > 20


def fresh(program: str) -> str:
    """The output of a program in an interpreter of its own."""
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    ).stdout


def test_import_brings_no_driver_and_no_other_package_along(capsys):
    program = (
        "import json, sys, time\n"
        "import asyncio\n"
        "before = set(sys.modules); start = time.perf_counter()\n"
        "import aiolock\n"
        "took = time.perf_counter() - start\n"
        "print(json.dumps([sorted(set(sys.modules) - before), took]))\n"
    )
    modules, took = json.loads(fresh(program))
    assert "aiolock.client" in modules
    foreign = {name.partition(".")[0] for name in modules} - {"aiolock"} - sys.stdlib_module_names
    assert foreign == set()
    assert not [
        name
        for name in modules
        if name.startswith(("aiolock.backends.", "aiolock.portal", "aiolock.cli.", "aiolock.testing"))
    ]
    with capsys.disabled():
        print(f"\nimport aiolock: {took * 1000:.0f} ms beyond asyncio, {len(modules)} modules")


@pytest.mark.parametrize(
    "module", ["aiolock.portal", "aiolock.cli.demo", "aiolock.__main__", "aiolock.backends.memory"]
)
def test_these_are_imported_without_drivers_as_well(module):
    modules = json.loads(fresh(f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"))
    assert {name.partition(".")[0] for name in modules} & {
        "anyio",
        "redis",
        "hiredis",
        "aiozk",
        "aiomysql",
        "asyncpg",
        "h2",
    } == set()


def test_public_is_what_is_listed():
    assert aiolock.__all__ == sorted(aiolock.__all__)
    program = (
        "import json, types, aiolock\n"
        "print(json.dumps([n for n in dir(aiolock) if n[0] != '_' and not isinstance(getattr(aiolock, n), types.ModuleType)]))"
    )
    assert sorted(json.loads(fresh(program))) == [
        "AcquireTimeout",
        "BackendError",
        "BackendRefused",
        "BackendUnavailable",
        "Barrier",
        "BarrierBroken",
        "Client",
        "ConfigError",
        "DeadlockDetected",
        "Election",
        "Holder",
        "InvalidName",
        "JointLease",
        "Kept",
        "Latch",
        "Leader",
        "Lease",
        "Lock",
        "LockAll",
        "LockError",
        "LockEvent",
        "LockInfo",
        "LockLost",
        "MissingDriver",
        "RWLock",
        "ReadLock",
        "ReentrantLock",
        "ReleaseRequest",
        "Semaphore",
        "SkipEvent",
        "TransactionLock",
        "UnsafeBackend",
        "UnsupportedKind",
        "WaitTimeout",
        "Waiting",
        "WriteLock",
        "connect",
        "lock_all",
        "run_until_signal",
    ]
    assert sorted(aiolock.__all__) == sorted(json.loads(fresh(program)))


@pytest.mark.parametrize("module", sorted(PACKAGES))
def test_a_package_has_nothing_but_a_docstring(module):
    assert len(ast.parse(MODULES[module].read_text()).body) == 1


@pytest.mark.parametrize("module", [name for name in MODULES if name not in PACKAGES])
def test_a_module_lists_what_it_offers_and_has_it(module):
    names = [
        target.id
        for node in ast.parse(MODULES[module].read_text()).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    ]
    assert "__all__" in names


@pytest.mark.parametrize(
    ("server", "package"),
    [
        ("redis", "redis"),
        ("redis", "hiredis"),
        ("mysql", "aiomysql"),
        ("mysql", "pymysql"),
        ("postgresql", "asyncpg"),
        ("zookeeper", "aiozk"),
        ("etcd", "h2"),
        ("mongodb", "pymongo"),
    ],
)
def test_a_missing_driver_is_named_with_the_command_that_helps(server, package):
    program = (
        f"import sys; sys.modules['{package}'] = None\n"
        "import aiolock\n"
        f"try: aiolock.connect('{server}://127.0.0.1/x')\n"
        "except aiolock.MissingDriver as error: print(error)\n"
    )
    assert fresh(program) == f'{package} is not installed; run: pip install "python-aiolock[{server}]"\n'
