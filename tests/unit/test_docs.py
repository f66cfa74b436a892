"""The documentation is true as far as a machine can tell: examples run, links lead somewhere, names are complete."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import inspect
import re
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aiolock
import aiolock.portal
from aiolock.backends.rows import store as rows
from aiolock.core import capabilities
from aiolock.core.backend import Backend, Claim, Settings
from tests.servers import Redis
from tests.toys.page import modules

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
REDIS = "redis://127.0.0.1:6379/0"


def blocks(page: Path) -> Iterator[tuple[int, str]]:
    """The Python examples of a page, each with the number of its first line."""
    for match in re.finditer(r"^( *)```python\n(.*?)^\1```$", page.read_text(), re.DOTALL | re.MULTILINE):
        yield page.read_text().count("\n", 0, match.start(2)) + 1, textwrap.dedent(match[2])


FILES = ROOT / "docs" / "how-to" / "frameworks.md"
"""Its examples are whole files: tests/integrations/test_frameworks.py has them run by the frameworks."""
WITH_EXAMPLES = [page for page in PAGES if page != FILES and list(blocks(page))]


@pytest.fixture(scope="module")
def redis():
    with Redis() as server:
        yield server


def play(page: Path, line: int, text: str, names: dict[str, Any]) -> None:
    """Run one example; one that awaits at its margin runs as a coroutine with an open `client`."""
    # Line numbers of tracebacks are those of the page.
    tree = ast.parse("\n" * (line - 1) + text)
    code = compile(tree, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if not code.co_flags & inspect.CO_COROUTINE:
        exec(code, names)
        return

    async def main() -> None:
        async with aiolock.connect("memory://", namespace=f"docs-{page.stem}") as client:
            names["client"] = client
            await eval(code, names)

    asyncio.run(main())


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_run(page, request, capsys):
    names: dict[str, Any] = {"__name__": "__main__", "asyncio": asyncio, "aiolock": aiolock}
    # The files that a page prints import each other.
    modules()
    for line, text in blocks(page):
        if "redis://" in text:
            text = text.replace(REDIS, request.getfixturevalue("redis").url)
        capsys.readouterr()
        play(page, line, text, names)
        if (printed := prints(page, line, text)) is not None:
            assert numberless(capsys.readouterr().out) == numberless(printed), f"{page}:{line}"


def prints(page: Path, line: int, text: str) -> str | None:
    """Return what the page says that this example prints, if it does."""
    rest = page.read_text().split("\n", line + text.count("\n"))[-1]
    match = re.match(r"\n(?:It prints|This prints):\n\n```text\n(.*?)^```$", rest, re.DOTALL | re.MULTILINE)
    return match and match[1]


def numberless(text: str) -> str:
    """Return the text without what differs between runs: times and tokens."""
    return re.sub(r"\d[\d.,]*", "N", text)


def test_an_example_that_prints_something_else_is_noticed():
    page = ROOT / "docs/tutorial.md"
    printed = [prints(page, line, text) for line, text in blocks(page)]
    assert len([text for text in printed if text]) >= 5
    assert printed[0] == "balance: 42\n"


def test_an_example_that_is_wrong_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "Text\n\n```python\nasync with client.lock('a') as lease:\n    assert not lease.held\n```\n"
    )
    [(line, text)] = blocks(page)
    with pytest.raises(AssertionError) as caught:
        play(page, line, text, {})
    assert line == 4
    assert caught.traceback[-1].lineno + 1 == 5


def test_the_examples_are_found():
    names = {str(page.relative_to(ROOT)) for page in WITH_EXAMPLES}
    assert {"README.md", "docs/tutorial.md", "docs/how-to/synchronous-code.md"} <= names
    for page in PAGES:
        assert len(list(blocks(page))) == page.read_text().count("```python"), page


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_is_in_the_index():
    index = (ROOT / "docs/index.md").read_text()
    for page in ROOT.glob("docs/**/*.md"):
        if page.name != "index.md":
            assert f"\n{page.relative_to(ROOT / 'docs').with_suffix('')}\n" in index, page


def test_comparisons_have_ours_first_and_name_what_was_read():
    """The style sheet keeps the first two columns in sight, so these are the names of the rows and aiolock."""
    page = ROOT / "docs/topics/comparison.md"
    tables = re.findall(r"(?:^\|.*\n)+", page.read_text(), re.MULTILINE)
    assert len(tables) == 3
    for table in tables:
        head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
        assert head[0] == ""
        assert head[1].startswith("**aiolock** ")
        assert all(re.search(r" \d+\.\d+(\.\d+)?$", name) for name in head[1:]), head
        assert rows[0][0] == "read in"
        assert all("`" in cell for cell in rows[0][2:]), rows[0]
        assert {len(row) for row in rows} == {len(head)}, "a cell has a bar in it"
    styles = (ROOT / "docs/_static/pages.css").read_text()
    title = re.sub(r"\W+", "-", page.read_text().partition("\n")[0].removeprefix("# ").lower())
    assert re.search(rf"#{title} .*nth-child\(2\)\) {{[^}}]*position: sticky", styles)


def members(cls: type) -> set[str]:
    return {
        name for name, value in vars(cls).items() if not name.startswith("_") and not isinstance(value, type)
    }


REFERENCE = (ROOT / "docs/reference/python.md").read_text()


def generated(name: str) -> set[str] | None:
    """Return the members that the reference takes from the code for a class: all of them if it names none."""
    match = re.search(rf"^\.\. autoclass:: aiolock\.{name}\n((?:   :.*\n)*)", REFERENCE, re.MULTILINE)
    assert match, f"docs/reference/python.md has no {name}"
    listed = re.search(r":members:(.*)", match[1])
    assert listed, name
    return set(listed[1].replace(",", " ").split()) or None


@pytest.mark.parametrize("name", aiolock.__all__)
def test_the_reference_has_everything_public_with_its_docstring(name):
    value = getattr(aiolock, name)
    if not isinstance(value, type):
        assert f".. autofunction:: aiolock.{name}\n" in REFERENCE
        assert inspect.getdoc(value)
    elif issubclass(value, BaseException):
        assert f".. autoexception:: aiolock.{name}\n" in REFERENCE
        assert re.search(rf"─ {name}\b|^{name}$", REFERENCE, re.MULTILINE), "the tree of errors lacks it"
    else:
        shown = generated(name)
        assert shown is None or shown <= set(dir(value)), shown
        for member in members(value) if shown is None else shown:
            attribute = getattr(value, member)
            if isinstance(attribute, property) or inspect.isroutine(attribute):
                assert inspect.getdoc(attribute), f"{name}.{member} has no docstring"


def test_the_reference_has_everything_for_synchronous_code_with_its_docstring():
    assert ".. automodule:: aiolock.portal\n   :members:\n" in REFERENCE
    for name in aiolock.portal.__all__:
        value = getattr(aiolock.portal, name)
        assert inspect.getdoc(value), name
        for member in members(value) if isinstance(value, type) else ():
            attribute = getattr(value, member)
            if isinstance(attribute, property) or inspect.isroutine(attribute):
                assert inspect.getdoc(attribute), f"{name}.{member} has no docstring"


def test_the_reference_has_every_public_member_of_a_lease():
    """A lease also has methods for locks and queues, so its public ones are listed in the reference."""
    internal = {name for name in dir(aiolock.Lease) if not name.startswith("_")} - (
        generated("Lease") or set()
    )
    used = "\n".join(page.read_text() for page in PAGES if page.name not in {"CHANGELOG.md", "design.md"})
    for name in internal:
        assert not re.search(rf"\b(lease|term|first|second|holder)\.{name}\b", used), name


def test_the_table_for_redis_py_has_each_of_its_names():
    from redis.asyncio import Redis as Driver
    from redis.asyncio.lock import Lock

    text = (ROOT / "docs/how-to/migrate.md").read_text()
    table = text.partition("| redis-py | here | |")[2].partition("\n\n")[0]
    theirs = "".join(row.split(" | ")[0] for row in table.splitlines())
    options = {*inspect.signature(Driver.lock).parameters, *inspect.signature(Lock.acquire).parameters}
    calls = {name for name in members(Lock) if not name.startswith(("do_", "lua_", "LUA_"))} - {
        "register_scripts"
    }
    for name in options - {"self", "name"}:
        assert f"{name}=" in theirs, name
    for name in calls - {"local"}:
        assert f"{name}(" in theirs, name
    assert {"extend", "reacquire", "owned"} <= calls


def test_the_page_on_backends_names_the_whole_contract():
    text = (ROOT / "docs/how-to/write-a-backend.md").read_text()
    names = set(rows.Row._fields).union(
        rows.Edit._fields, rows.Listener._fields, *map(members, (rows.RowStore, Backend))
    )
    names |= members(Claim) | {field.name for field in dataclasses.fields(Settings)}
    names |= {cls.__name__ for cls in (*capabilities.Capability.__subclasses__(), capabilities.Downgrade)}
    for name in names - {"validity"}:
        assert re.search(rf"\b{name}\b", text), name
    assert len(names) > 50


def test_the_readme_names_make_targets_that_exist():
    makefile = (ROOT / "Makefile").read_text()
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for targets in re.findall(r"^make ([a-z ]+?) *(?:#.*)?$", page.read_text(), re.MULTILINE):
            for target in targets.split():
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_help_of_make_explains_every_target_with_its_duration():
    makefile = (ROOT / "Makefile").read_text()
    [targets] = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    explained: dict[str, str] = {}
    for names, text in re.findall(r"^## make ((?:[a-z-]+ \| )*[a-z-]+) +(.*)$", makefile, re.MULTILINE):
        explained |= dict.fromkeys(names.split(" | "), text)
    assert explained.keys() == set(targets.split()) - {"help", "servers"}
    for name, text in explained.items():
        assert re.search(r"\((less than matrix|half as long again as test|.*\d+ (min|s)\b).*\)", text), name


def test_every_extra_that_a_page_names_exists():
    there = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {
        extra
        for page in PAGES
        for extras in re.findall(r"python-aiolock\[([a-z,]+)\]", page.read_text())
        for extra in extras.split(",")
    }
    assert {"redis", "postgresql", "portal", "completion"} <= named <= there.keys()


def test_nobody_is_told_to_install_the_other_package():
    """The short name belongs to another project, which would overwrite ours."""
    wrong = re.compile(r"pip3? install (-U |--upgrade )?[\"']?aiolo" + r"ck\b", re.IGNORECASE)
    assert wrong.search("pip install aiolo" + "ck")
    kinds = {".md", ".py", ".toml", ".txt", ".sh", ".yml", ".yaml", ".lua", ".sql", ".cfg", ""}
    skipped = {".git", "build", "dist"}
    for path in ROOT.rglob("*"):
        parts = path.relative_to(ROOT).parts
        if any(
            part in skipped or part.startswith((".venv", ".hypothesis")) or "cache" in part for part in parts
        ):
            continue
        if path.is_file() and path.suffix in kinds:
            assert not wrong.search(path.read_text(errors="replace")), path
