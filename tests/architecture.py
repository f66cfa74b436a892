"""Measures of the package's structure, now and at an earlier commit: `python -m tests.architecture`.

Lines, files, import circles (an import under TYPE_CHECKING counts as any other), the way of a free acquire through the
files, the size of `Lease`, and the style of docstrings and comments. They are signs of health, not tests: no measure
fails. The acquires run on private servers; `--static` leaves them out, `--trace` lists their calls.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

from tests import prose

__all__ = ["BEFORE", "arrows", "circles", "imports", "modules"]

ROOT = Path(__file__).parent.parent

BEFORE = "5e212fa"
"""The commit of the first column: the last one before the redesign."""

GOALS = {
    "lines": "<= 25,000",
    "files": "<= 125",
    "files in import circles": "0",
    "free Redis acquire: files / moves": "<= 14 / <= 28",
    "free MySQL acquire: files / moves": "<= 16 / <= 40",
    "files that test Family or Mode": "<= 10",
    "public methods of Lease": "<= 16",
    "style: pronouns per 1,000 words": "<= 0.5",
}

TRACE = """
import asyncio, dataclasses, enum, json, pathlib, sys

import aiolock

package = str(pathlib.Path(aiolock.__file__).parent) + "/"
calls = []

def profile(frame, event, argument):
    if event == "call" and frame.f_code.co_filename.startswith(package):
        calls.append(frame.f_code)

def is_value(code):
    # Methods of dataclasses and enums are attributes in another form; they lead nowhere.
    name = "aiolock." + code.co_filename.removeprefix(package).removesuffix(".py").replace("/", ".")
    module = sys.modules.get(name.removesuffix(".__init__"))
    owner = getattr(module, code.co_qualname.partition(".")[0], None)
    return isinstance(owner, type) and (dataclasses.is_dataclass(owner) or issubclass(owner, enum.Enum))

async def main(url):
    async with aiolock.connect(url) as client:
        for _ in range(3):  # connections are opened and statements prepared by the first
            async with client.lock("first"):
                pass
        sys.setprofile(profile)
        lock = client.lock("second")
        await lock.__aenter__()
        sys.setprofile(None)
        await lock.__aexit__(None, None, None)
    trace = [(code.co_filename.removeprefix(package), code.co_qualname) for code in calls if not is_value(code)]
    print(json.dumps(trace))

asyncio.run(main(sys.argv[1]))
"""
"""A program that prints the calls of one free acquire. It is run with the package of either commit."""


def modules(package: Path) -> dict[str, Path]:
    """Return the files of a package by their module names without its own: "" is the package itself."""
    return {
        ".".join(path.relative_to(package).with_suffix("").parts)
        .removesuffix(".__init__")
        .replace("__init__", ""): path
        for path in sorted(package.rglob("*.py"))
    }


def imports(path: Path, known: Iterable[str]) -> set[str]:
    """Return the modules that a file imports, anywhere in it: in functions and under TYPE_CHECKING as well.

    `known` are the modules of the package, so that `from aiolock.core import backend` is the import of a module.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports inside the package are absolute"
            assert node.module
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name for name in names if name.removeprefix("aiolock.") in known} or {node.module}
    return found


def circles(arrows: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, by Tarjan's algorithm; `arrows` are the imports of each."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = lowest[module] = len(index)
        stack.append(module)
        for name in arrows[module]:
            if name not in index:
                visit(name)
                lowest[module] = min(lowest[module], lowest[name])
            elif name in stack:
                lowest[module] = min(lowest[module], index[name])
        if lowest[module] == index[module]:
            cut = stack.index(module)
            if len(stack) - cut > 1:
                found.append(sorted(stack[cut:]))
            del stack[cut:]

    for module in arrows:
        if module not in index:
            visit(module)
    return found


def arrows(package: Path) -> dict[str, list[str]]:
    """Return for every module the modules of the package that it imports."""
    files = modules(package)
    return {
        module: [
            name.removeprefix("aiolock").lstrip(".")
            for name in sorted(imports(path, files))
            if name.partition(".")[0] == "aiolock" and name.removeprefix("aiolock").lstrip(".") in files
        ]
        for module, path in files.items()
    }


def tests_kinds(path: Path) -> bool:
    """Tell whether a file uses a member of Family or Mode; the file that defines them does not count."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    defines = any(isinstance(node, ast.ClassDef) and node.name in {"Family", "Mode"} for node in nodes)
    return not defines and any(
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in {"Family", "Mode"}
        for node in nodes
    )


def public_methods(path: Path, name: str) -> int:
    """Count the methods of a class in a file, without properties and names that begin with an underscore."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef) and node.name == name:
            for method in node.body:
                if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and method.name[0] != "_":
                    decorators = {ast.unparse(decorator) for decorator in method.decorator_list}
                    if not any("property" in text or text.endswith(".setter") for text in decorators):
                        found.add(method.name)
    return len(found)


def trace(package: Path, url: str) -> list[tuple[str, str]]:
    """Return file and function of each call of a free acquire at the server of `url`, with this version of the package."""
    done = subprocess.run(
        [sys.executable, "-c", TRACE, url],
        env={**os.environ, "PYTHONPATH": str(package.parent)},
        cwd=package.parent,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return [(file, function) for file, function in json.loads(done.stdout)]


def moves(calls: list[tuple[str, str]]) -> str:
    """Return the number of files that calls touch, and how often a call is in another file than the call before it."""
    files = [file for file, _ in calls]
    changes = sum(before != after for before, after in pairwise(files))
    return f"{len(set(files))} / {changes}"


def measure(package: Path) -> dict[str, str]:
    """Measure what is read from the files alone."""
    files = list(modules(package).values())
    written = [text for text in prose.texts(package) if text.kind != "command line"]
    found = sum(len(prose.pronouns(text)) for text in written)
    words = sum(prose.words(text) for text in written)
    return {
        "lines": f"{sum(len(path.read_text().splitlines()) for path in files):,}",
        "files": f"{len(files):,}",
        "files in import circles": f"{sum(map(len, circles(arrows(package))))}",
        "files that test Family or Mode": f"{sum(map(tests_kinds, files))}",
        "public methods of Lease": f"{public_methods(package / 'lease.py', 'Lease')}",
        "style: pronouns per 1,000 words": f"{1000 * found / words:.1f}",
    }


def extract(commit: str, folder: Path) -> Path | None:
    """Write the package as of a commit into a folder; None where the history does not reach so far."""
    archive = subprocess.run(
        ["git", "archive", commit, "aiolock"], cwd=ROOT, capture_output=True, check=False
    )
    if archive.returncode:
        return None
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")
    return folder / "aiolock"


def show_trace(title: str, calls: list[tuple[str, str]]) -> None:
    print(f"\n{title}")
    last = ""
    for file, function in calls:
        print(f"  {'' if file == last else file:40} {function}")
        last = file


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.architecture", description=__doc__)
    parser.add_argument("--static", action="store_true", help="start no servers")
    parser.add_argument("--trace", action="store_true", help="list the calls of the acquires as well")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        versions = {"now": ROOT / "aiolock"}
        if before := extract(BEFORE, folder):
            versions = {BEFORE: before, **versions}
        table = {name: measure(package) for name, package in versions.items()}
        traces = {}
        if not options.static:
            from tests.servers import MariaDB, Redis  # noqa: PLC0415 - `--static` needs none of it

            for title, server in {"Redis": Redis, "MySQL": MariaDB}.items():
                for name, package in versions.items():
                    # A server for each version: the formats of their data differ, and one refuses the other's.
                    with server() as started:
                        traces[title, name] = trace(package, started.url)
                    table[name][f"free {title} acquire: files / moves"] = moves(traces[title, name])
    print(f"{'':36}" + "".join(f"{name:>12}" for name in table) + f"{'goal':>16}")
    for what, goal in GOALS.items():
        print(
            f"{what:36}" + "".join(f"{found.get(what, '-'):>12}" for found in table.values()) + f"{goal:>16}"
        )
    for group in circles(arrows(ROOT / "aiolock")):
        print(f"\ncircle of {len(group)}: {', '.join(group)}")
    if options.trace:
        for (title, name), calls in traces.items():
            show_trace(f"free {title} acquire, {name}, {len(calls)} calls:", calls)
    return 0


if __name__ == "__main__":
    sys.exit(main())
