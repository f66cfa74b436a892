"""Measures of the package's structure, now and at an earlier commit: `python -m tests.architecture`.

What a newcomer meets: in how many places it is decided who may enter, names that stand for two things, state machines
without a table, files that one feature touches, the way of a free acquire through the files, import circles (an import
under TYPE_CHECKING counts as any other), and the style of docstrings and comments. They are signs of health, not tests:
no measure fails. The acquires run on private servers; `--static` leaves them out, `--trace` lists their calls, and
`--names` the names that stand more than once.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

from tests import prose

__all__ = ["BEFORE", "arrows", "circles", "imports", "modules"]

ROOT = Path(__file__).parent.parent

BEFORE = "9e7ea79"
"""The commit of the first column: the last one before MySQL moved to rows."""

GOALS = {
    "classes of servers that answer acquire, families of Lua": "<= 6",
    "class names that stand more than once": "0",
    "methods named by a verb of several meanings": "-",
    "state machines with a table above them": "all",
    "files of backends/ that a feature touched, mean": "<= 9",
    "comment lines per 100 lines": "-",
    "free Redis acquire: files / moves": "<= 15 / <= 29",
    "free MySQL acquire: files / moves": "<= 15 / <= 29",
    "files in import circles": "0",
    "style: pronouns per 1,000 words": "<= 0.5",
    "public methods of Lease": "-",
    "lines": "-",
    "files": "-",
}
"""The measures in the order of the table; those without a goal are for the reader to judge."""

VAGUE = ("_ask", "_leave", "_take", "begin")
"""Names of methods that mean something else in each class that has one."""

MACHINES = ("ClaimState", "ConnectionState", "MemberState", "QueueState", "SessionState")
"""States of the machines that decide or wait; a table of states and events stands in the docstring of each."""

FEATURES = {BEFORE: ("b6373ed", "390f023", "1df3911", "755a808", "238206d")}
"""Commits of the latest features that touched several servers, for each column that had one to show."""

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


def classes(package: Path) -> dict[str, list[tuple[Path, ast.ClassDef]]]:
    """Return the classes of a package by their names, with the file of each."""
    found: dict[str, list[tuple[Path, ast.ClassDef]]] = {}
    for path in modules(package).values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append((path, node))
    return found


def ways_to_enter(package: Path) -> int:
    """Count the classes of servers that answer `acquire` themselves; Redis' one stands for each of its families of scripts."""
    answering = sum(
        (package / "backends") in path.parents
        and any(isinstance(item, ast.AsyncFunctionDef) and item.name == "acquire" for item in node.body)
        for named in classes(package).values()
        for path, node in named
    )
    return answering - 1 + len(list((package / "backends/redis/lua").rglob("*enter.lua")))


def doubled(package: Path) -> dict[str, list[Path]]:
    """Return the names of classes that stand more than once, with their files."""
    return {name: [path for path, _ in named] for name, named in classes(package).items() if len(named) > 1}


def has_table(node: ast.ClassDef) -> bool:
    """Tell whether the docstring of an enum of states has a table in which each of them stands."""
    rows = re.findall(r"``(\w+)``", ast.get_docstring(node) or "")
    states = [
        item.targets[0].id
        for item in node.body
        if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name)
    ]
    return bool(states) and set(states) <= set(rows)


def tables(package: Path) -> str:
    """Return how many of the state machines have a table, and how many there are."""
    found = [node for name, named in classes(package).items() if name in MACHINES for _, node in named]
    return f"{sum(map(has_table, found))} of {len(found)}"


def vague(package: Path) -> int:
    """Count the methods and functions that have one of the names that mean several things."""
    return sum(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in VAGUE
        for path in modules(package).values()
        for node in ast.walk(ast.parse(path.read_text()))
    )


def comments(package: Path) -> float:
    """Return the lines that are a comment and nothing else, per 100 lines."""
    found = lines = 0
    for path in modules(package).values():
        text = path.read_text()
        lines += len(text.splitlines())
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            found += token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip()
    return 100 * found / lines


def touched(commits: Iterable[str]) -> str:
    """Return the mean number of files of `backends/` that commits changed; "-" where there is none or the history ends before."""
    counts = []
    for commit in commits:
        shown = subprocess.run(
            ["git", "show", "--format=", "--name-only", commit, "--", "aiolock/backends"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        if shown.returncode:
            return "-"
        counts.append(len(shown.stdout.split()))
    return f"{sum(counts) / len(counts):.0f}" if counts else "-"


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


def measure(name: str, package: Path) -> dict[str, str]:
    """Measure what is read from the files and the history alone; `name` is that of the column."""
    files = list(modules(package).values())
    written = [text for text in prose.texts(package) if text.kind != "command line"]
    found = sum(len(prose.pronouns(text)) for text in written)
    words = sum(prose.words(text) for text in written)
    return {
        "classes of servers that answer acquire, families of Lua": f"{ways_to_enter(package)}",
        "class names that stand more than once": f"{len(doubled(package))}",
        "methods named by a verb of several meanings": f"{vague(package)}",
        "state machines with a table above them": tables(package),
        "files of backends/ that a feature touched, mean": touched(FEATURES.get(name, ())),
        "comment lines per 100 lines": f"{comments(package):.1f}",
        "lines": f"{sum(len(path.read_text().splitlines()) for path in files):,}",
        "files": f"{len(files):,}",
        "files in import circles": f"{sum(map(len, circles(arrows(package))))}",
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
    parser.add_argument("--names", action="store_true", help="list the class names that stand more than once")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        versions = {"now": ROOT / "aiolock"}
        if before := extract(BEFORE, folder):
            versions = {BEFORE: before, **versions}
        table = {name: measure(name, package) for name, package in versions.items()}
        traces = {}
        if not options.static:
            from tests.servers import MariaDB, Redis  # noqa: PLC0415 - `--static` needs none of it

            for title, server in {"Redis": Redis, "MySQL": MariaDB}.items():
                for name, package in versions.items():
                    # A server for each version: the formats of their data differ, and one refuses the other's.
                    with server() as started:
                        traces[title, name] = trace(package, started.url)
                    table[name][f"free {title} acquire: files / moves"] = moves(traces[title, name])
    print(f"{'':56}" + "".join(f"{name:>12}" for name in table) + f"{'goal':>16}")
    for what, goal in GOALS.items():
        print(
            f"{what:56}" + "".join(f"{found.get(what, '-'):>12}" for found in table.values()) + f"{goal:>16}"
        )
    for group in circles(arrows(ROOT / "aiolock")):
        print(f"\ncircle of {len(group)}: {', '.join(group)}")
    if options.names:
        for name, paths in sorted(doubled(ROOT / "aiolock").items()):
            print(f"{name:24} {', '.join(str(path.relative_to(ROOT)) for path in paths)}")
    if options.trace:
        for (title, name), calls in traces.items():
            show_trace(f"free {title} acquire, {name}, {len(calls)} calls:", calls)
    return 0


if __name__ == "__main__":
    sys.exit(main())
