"""The public names are those that are recorded; who changes one says so in the changelog."""

from __future__ import annotations

import asyncio
import dis
import importlib
import inspect
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import aiolock
from tests.public_api import RECORD, documented, missing_from, public

WAITS = re.compile(
    r"(AbstractAsyncContextManager|Acquisition|Async(Generator|Iterable|Iterator)|Awaitable|Coroutine)\b"
)
"""Beginnings of the return types of functions that wait, or return what does."""


def waits(function: Callable[..., Any]) -> bool:
    """Test whether calling a function waits, or returns something to be awaited or iterated."""
    inner = inspect.unwrap(function)
    if inspect.iscoroutinefunction(inner) or inspect.isasyncgenfunction(inner):
        return True
    return inspect.isfunction(inner) and bool(WAITS.match(str(inspect.signature(inner).return_annotation)))


def docstrings(cls: type, name: str) -> Iterator[str]:
    """The docstrings of a method: its own, those that it replaces, and those of the classes that define it."""
    for each in cls.__mro__:
        if name in vars(each):
            yield inspect.getdoc(vars(each)[name]) or ""
            yield vars(each).get("__doc__") or ""


def silent(value: Any) -> list[str]:
    """The functions of a public object that wait, and do not say what cancelling does."""
    if not isinstance(value, type):
        return [value.__name__] if callable(value) and waits(value) and not says(value.__doc__) else []
    functions = {name: getattr(value, name) for name in dir(value) if not name.startswith("_")}
    return [
        name
        for name, function in functions.items()
        if inspect.isroutine(function) and waits(function) and not any(map(says, docstrings(value, name)))
    ]


def says(text: str | None) -> bool:
    return re.search(r"\bcancel", text or "", re.IGNORECASE) is not None


@pytest.mark.parametrize("path", RECORD.read_text().split())
def test_what_waits_says_what_cancelling_does(path):
    """The one of a class that is the same for all its calls may stand in the docstring of the class."""
    module, _, name = path.rpartition(".")
    assert silent(getattr(importlib.import_module(module), name)) == []


PACKAGE = Path(aiolock.__file__).parent


def awaits(function: Any) -> bool:
    """Test whether a function is a coroutine function, or an asynchronous generator, that may wait."""
    inner = inspect.unwrap(function)
    if not (inspect.iscoroutinefunction(inner) or inspect.isasyncgenfunction(inner)):
        return False
    return any(each.opname in ("GET_AWAITABLE", "GET_ANEXT") for each in dis.get_instructions(inner))


def unsaid(module: Any) -> Iterator[str]:
    """The functions with a public name that a module defines, which wait and do not say what cancelling does."""
    for value in vars(module).values():
        if getattr(value, "__module__", "") != module.__name__:
            continue
        if isinstance(value, type):
            waiting = [name for name in vars(value) if name[0] != "_" and awaits(getattr(value, name, None))]
            yield from (
                f"{value.__name__}.{name}" for name in waiting if not any(map(says, docstrings(value, name)))
            )
        elif awaits(value) and value.__name__[0] != "_" and not says(value.__doc__):
            yield value.__name__


def test_what_waits_inside_the_package_says_it_as_well():
    paths = {path.relative_to(PACKAGE.parent).with_suffix("") for path in PACKAGE.rglob("*.py")}
    names = {".".join(path.parts).removesuffix(".__init__") for path in paths} - {"aiolock.__main__"}
    modules = map(importlib.import_module, sorted(names))
    assert [f"{module.__name__}: {name}" for module in modules for name in unsaid(module)] == []


class Quiet:
    """Nothing."""

    async def waits(self) -> None:
        """Wait."""
        await asyncio.sleep(0)

    def iterates(self) -> AsyncIterator[int]:
        """Iterate."""

    async def speaks(self) -> None:
        """Wait. Cancelling it changes nothing."""

    def returns(self) -> int:
        """Return."""


class Loud(Quiet):
    """Waits. Cancelling any call changes nothing."""

    async def waits(self) -> None:
        """Wait."""


class Louder(Quiet):
    """Replaces what says it."""

    async def speaks(self) -> None:
        """Wait."""


def test_a_function_that_does_not_say_it_is_found():
    assert silent(Quiet) == ["iterates", "waits"]
    assert silent(Loud) == ["iterates"]
    assert silent(Louder) == ["iterates", "waits"]
    assert silent(Quiet.waits) == ["waits"]
    assert list(unsaid(sys.modules[__name__])) == ["Quiet.waits"]
    assert silent(Quiet.speaks) == silent(Quiet.returns) == silent(3) == []


def test_public_names_are_the_recorded_ones():
    names, recorded = public(), set(RECORD.read_text().split())
    assert (sorted(names - recorded), sorted(recorded - names)) == ([], []), (
        "add a line to CHANGELOG.md, then run python -m tests.public_api --write"
    )


def test_the_paths_that_users_import_from_are_among_them():
    modules, classes = documented()
    assert {
        "aiolock",
        "aiolock.aiohttp",
        "aiolock.fastapi",
        "aiolock.mysql",
        "aiolock.portal",
        "aiolock.postgresql",
        "aiolock.starlette",
        "aiolock.testing",
        "aiolock.zookeeper",
    } <= modules
    assert "aiolock.backends.redis.RedisBackend" in classes


def test_a_name_has_to_stand_in_the_changelog_as_a_word():
    assert missing_from(
        "- `Client.lock` and `Lease`", {"aiolock.Lease", "aiolock.Lea", "aiolock.x.lock"}
    ) == ["aiolock.Lea"]
