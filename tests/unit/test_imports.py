"""Who may know whom: the one-way rule, read from the imports themselves; and what `import aiolock` brings along."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import aiolock

PACKAGE = Path(aiolock.__file__).parent

ORDER = [
    {"errors", "clock", "delivery", "logs", "tasks", "frames"},
    {"names", "options", "kinds", "figures", "templates"},
    {"info", "document", "outages", "signals"},
    {"contract"},
    {"notices", "gate"},
    {"backends"},
    {"suspend"},
    {"watchdog"},
    {"runtime"},
    {"arms", "requests"},
    {"lease", "borrowed"},
    {"line"},
    {"queue"},
    {"lock", "pen"},
    {"scribe"},
    {"reentrant", "semaphore", "election", "board", "rounds", "decorators", "joint"},
    {"rwlock", "latch", "barrier", "merging"},
    {"combine"},
    {"client"},
    {""},
    {"portal", "mysql", "zookeeper", "answers"},
    {"handling"},
    {"starlette", "aiohttp", "parameters"},
    {"fastapi", "testing"},
    {"stage"},
    {"demo"},
    {"cli"},
    {"__main__"},
]
"""A module imports only from sets before its own; "" is the package itself, what users import."""

BACKENDS_MAY_IMPORT = {
    "contract",
    "errors",
    "clock",
    "names",
    "notices",
    "kinds",
    "info",
    "document",
    "delivery",
    "logs",
    "outages",
    "tasks",
}

DRIVERS = {"redis": {"redis", "hiredis"}, "zookeeper": {"aiozk"}, "mysql": {"aiomysql", "pymysql"}}
"""Third-party packages, by the folder of backends that may import them."""

EXTRAS = {
    "portal": {"anyio"},
    "cli.child": {"anyio"},
    "cli.inbox": {"anyio"},
    "aiohttp": {"aiohttp"},
    "starlette": {"starlette"},
    "fastapi": {"fastapi", "starlette"},
    "parameters": {"fastapi", "pydantic", "starlette"},
}
"""Third-party packages, by the other module that may import them, and only when it is used."""

MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    .removesuffix(".__init__")
    .replace("__init__", ""): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def imports(path: Path) -> set[str]:
    """The modules that a file imports, anywhere in it: in functions and under TYPE_CHECKING as well."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports inside the package are absolute"
            assert node.module
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name for name in names if name.removeprefix("aiolock.") in MODULES} or {node.module}
    return found


def split(path: Path) -> tuple[set[str], set[str]]:
    """What a file imports: of this package (without its name), and of other people (only the first name)."""
    ours = {
        name.removeprefix("aiolock").lstrip(".")
        for name in imports(path)
        if name.partition(".")[0] == "aiolock"
    }
    theirs = {name.partition(".")[0] for name in imports(path)} - {"aiolock"} - sys.stdlib_module_names
    return ours, theirs


def rank(module: str) -> int:
    for place, names in enumerate(ORDER):
        if module.partition(".")[0] in names:
            return place
    raise AssertionError(f"say in ORDER where aiolock.{module} stands")


def test_the_reader_of_imports_sees_them():
    assert "lease" in split(MODULES["lock"])[0]
    assert split(MODULES["portal"])[1] == {"anyio"}
    assert {"", "client", "backends.memory.machine"} <= set(MODULES)


@pytest.mark.parametrize("module", [name for name in MODULES if not name.startswith("backends.")])
def test_a_module_imports_only_from_below(module):
    ours, theirs = split(MODULES[module])
    package = module.partition(".")[0]
    above = [name for name in ours if rank(name) >= rank(module)]
    # The modules of one folder may know each other.
    assert [name for name in above if name.partition(".")[0] != package] == []
    assert theirs <= EXTRAS.get(module, set())


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("backends.")])
def test_a_backend_imports_the_contract_and_its_own_folder(module):
    folder = module.split(".")[1]
    ours, theirs = split(MODULES[module])
    assert [
        name
        for name in ours
        if name not in BACKENDS_MAY_IMPORT and name.split(".")[:2] != ["backends", folder]
    ] == []
    assert theirs <= DRIVERS.get(folder, set())


def test_nobody_above_imports_a_backend():
    for module, path in MODULES.items():
        if not module.startswith("backends.") and module not in {"stage", "testing.world"}:
            assert [name for name in split(path)[0] if name.startswith("backends.")] == [], module


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


def test_import_brings_no_driver_and_nobody_else_along(capsys):
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
        name for name in modules if name.startswith(("aiolock.backends.", "aiolock.portal", "aiolock.demo"))
    ]
    with capsys.disabled():
        print(f"\nimport aiolock: {took * 1000:.0f} ms beyond asyncio, {len(modules)} modules")


@pytest.mark.parametrize(
    "module", ["aiolock.portal", "aiolock.demo", "aiolock.__main__", "aiolock.backends.memory"]
)
def test_these_are_imported_without_drivers_as_well(module):
    modules = json.loads(fresh(f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"))
    assert {name.partition(".")[0] for name in modules} & {
        "anyio",
        "redis",
        "hiredis",
        "aiozk",
        "aiomysql",
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
        "Latch",
        "Lease",
        "Lock",
        "LockAll",
        "LockError",
        "LockInfo",
        "LockLost",
        "MissingDriver",
        "RWLock",
        "ReadLock",
        "ReentrantLock",
        "ReleaseRequest",
        "Semaphore",
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


@pytest.mark.parametrize("module", MODULES)
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
        ("zookeeper", "aiozk"),
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
