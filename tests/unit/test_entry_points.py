"""Packages of other authors add schemes, and replace none; what is wrong with one is said at `connect`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import aiolock
from aiolock import ConfigError, connect
from tests.contract import deployments
from tests.toys import page
from tests.toys.server import ToyServer

Register = Callable[..., None]


@pytest.fixture
def register(tmp_path, monkeypatch) -> Register:
    """Installs a package with these lines of code and schemes; its module is named like it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(package: str, code: str, **schemes: str) -> None:
        (tmp_path / f"{package}.py").write_text(code)
        page.register(tmp_path, package, "1.5", schemes)

    return install


@pytest.fixture(scope="module")
def toys(tmp_path_factory) -> Path:
    """The folder in which the package of the page is installed."""
    folder = tmp_path_factory.mktemp("site-packages")
    page.install(folder)
    return folder


@pytest.fixture(scope="module")
def server():
    with ToyServer() as running:
        yield running


def python(toys: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """What Python says where that package is installed."""
    environment = {**os.environ, "PYTHONPATH": str(toys)}
    return subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, check=False
    )


PROGRAM = """\
import asyncio, sys, aiolock

async def main():
    async with aiolock.connect(sys.argv[1]) as client, client.lock("x") as lease:
        print(type(client._runtime.backend).__module__, lease.held)

asyncio.run(main())
"""


@pytest.mark.parametrize(("scheme", "module"), [("toyrows", "rows"), ("TOYLOCKS", "locks")])
def test_connect_finds_the_scheme_of_an_installed_package(toys, server, scheme, module):
    done = python(toys, "-c", PROGRAM, server.url(scheme))
    assert done.stdout.split() == [f"aiolock_toy.{module}", "True"], done.stderr


def test_the_command_line_finds_it_as_well(toys, server):
    url = server.url("toyrows")
    done = python(toys, "-m", "aiolock", "run", "--url", url, "job", "--", "echo", "done")
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    done = python(toys, "-m", "aiolock", "doctor", "--url", url)
    assert done.returncode == 0, done.stderr
    assert "fencing: every grant has a token" in done.stdout
    assert "Healthy." in done.stdout


def test_an_unknown_scheme_is_answered_with_the_registered_ones(toys):
    done = python(toys, "-c", "import aiolock; aiolock.connect('toyrow://h:1')")
    assert "toylocks://, toyrows://" in done.stderr
    assert "did you mean toyrows://?" in done.stderr


def test_its_options_are_those_of_the_class(toys):
    done = python(toys, "-c", "import aiolock; aiolock.connect('toyrows://h:1', colour='red')")
    assert "ConfigError: connect() has no option colour; it has namespace" in done.stderr
    assert "and for toyrows:// none more" in done.stderr


def test_a_scheme_that_is_built_in_cannot_be_replaced(register):
    register("grabby", "raise SystemExit('loaded')", memory="grabby:Memory", redis="grabby:Redis")
    assert "memory" in repr(connect("memory://"))
    with pytest.raises(ConfigError, match="Redis"):
        connect("redis://host:port")


WRONG = {
    "no module": ("", "elsewhere:Backend", "cannot be loaded: ModuleNotFoundError.*elsewhere"),
    "no class": ("", "broken:Backend", "cannot be loaded: AttributeError"),
    "no driver": ("import its_driver", "broken:Backend", "cannot be loaded: ModuleNotFoundError.*its_driver"),
    "an error": ("1 / 0", "broken:Backend", "cannot be loaded: ZeroDivisionError"),
    "a function": ("def make(url): ...", "broken:make", "is <function make.*, not a subclass"),
    "another class": (
        "class Backend: ...",
        "broken:Backend",
        "not a subclass of aiolock.core.backend.Backend",
    ),
    "verbs missing": (
        "import aiolock.core.backend as b\nclass Backend(b.Backend): name = 'x'",
        "broken:Backend",
        "lacks aclose, claim, open, renew",
    ),
}


@pytest.mark.parametrize(("code", "value", "message"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said_with_the_package_and_its_version(register, monkeypatch, code, value, message):
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    register("broken", code, broken=value)
    with pytest.raises(
        ConfigError, match=f"broken:// is registered by broken 1.5 as {value}, which .*{message}"
    ):
        connect("broken://host:1")
    # Other schemes do not suffer.
    connect("memory://")


def test_two_packages_with_one_scheme_are_refused(register):
    register("first", "", twice="first:Backend")
    register("second", "", twice="second:Backend")
    with pytest.raises(
        ConfigError,
        match=r"twice:// is registered by several packages, first 1\.5 and second 1\.5: uninstall",
    ):
        connect("twice://host:1")


# --- the contract on a deployment of one's own


def test_a_deployment_that_is_not_listed_is_named_by_its_module(monkeypatch):
    chosen = {"memory", "tests.contract.deployments:RowsObserved"}
    monkeypatch.setattr(deployments, "CHOSEN", frozenset(chosen))
    assert [cls.name for cls in deployments.registry()] == ["rows-observed", "memory"]
    monkeypatch.setattr(deployments, "CHOSEN", frozenset({"toy"}))
    with pytest.raises(pytest.UsageError, match=r"no toy among memory, .*, toy-rows, toy-locks"):
        deployments.registry()


# --- the code on the page


@pytest.mark.parametrize(
    "command",
    [
        ("ruff", "check", "--config", "{root}/pyproject.toml"),
        ("ruff", "format", "--check", "--config", "{root}/pyproject.toml"),
        ("mypy", "--strict", "--cache-dir", "{root}/.mypy_cache"),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_the_code_on_the_page_passes_the_checks_of_this_project(toys, command):
    pytest.importorskip(command[0])
    root = str(Path(aiolock.__file__).parents[1])
    words = [word.format(root=root) for word in command]
    done = subprocess.run(
        [sys.executable, "-m", *words, "aiolock_toy"], cwd=toys, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
