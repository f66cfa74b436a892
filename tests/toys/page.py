"""The files that docs/how-to/write-a-backend.md prints, as modules and as a distribution."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from aiolock.backends import GROUP

__all__ = ["PAGE", "File", "files", "install", "modules", "register"]

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "write-a-backend.md"

_FILE = re.compile(r"^`([\w/]+\.(?:py|toml))`:\n\n```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)
"""A name on a line of its own, and the block after it."""


class File(NamedTuple):
    """One file of the page."""

    name: str
    line: int
    """The number of its first line on the page."""
    text: str


def files() -> Iterator[File]:
    """The files of the page, in its order."""
    page = PAGE.read_text()
    for match in _FILE.finditer(page):
        yield File(match[1], page.count("\n", 0, match.start(2)) + 1, match[2])


def modules() -> dict[str, ModuleType]:
    """The modules of the page, imported, by name; tracebacks show the lines of the page."""
    made = {}
    for name, line, text in files():
        if name.endswith(".py"):
            path = name.removesuffix(".py").replace("/", ".")
            if path not in sys.modules:
                _make(path, compile("\n" * (line - 1) + text, str(PAGE), "exec"))
            made[path] = sys.modules[path]
    return made


def _make(name: str, code: object) -> None:
    if (parent := name.rpartition(".")[0]) and parent not in sys.modules:
        sys.modules[parent] = ModuleType(parent)
        sys.modules[parent].__path__ = []  # type: ignore[attr-defined]
    module = sys.modules[name] = ModuleType(name)
    exec(code, module.__dict__)  # type: ignore[arg-type]


def install(folder: Path) -> None:
    """Put the package of the page into a folder of ``sys.path``, as pip does."""
    for name, _, text in files():
        path = folder / name
        if path.parent != folder:
            path.parent.mkdir(exist_ok=True)
            (path.parent / "__init__.py").touch()
        path.write_text(text)
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    register(folder, project["name"], project["version"], project["entry-points"][GROUP])


def register(folder: Path, package: str, version: str, schemes: Mapping[str, str]) -> None:
    """Have a folder of ``sys.path`` say that a package is installed there that registers schemes."""
    info = folder / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    lines = [f"[{GROUP}]", *(f"{scheme} = {value}" for scheme, value in schemes.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines))
