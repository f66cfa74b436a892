"""What the tests of row stores share: stores that keep what they report, and promises that each of them keeps alike."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Self

import pytest

from aiolock.backends.rows.store import Edit, Listener
from aiolock.clock import system_clock
from aiolock.core.backend import Settings


def _replaced() -> None:
    """The report of a store whose rows another program can put others in the place of."""
    pytest.fail("nothing was replaced")


class Reporting:
    """Mixed into a store: it keeps what it reports, and changes one row at a time."""

    def __init__(self, *words: Any, **options: Any) -> None:
        super().__init__(*words, **options)
        self.interruptions = 0
        self.changed: list[str | None] = []
        self.versions_made = 0

    def _interrupted(self) -> None:
        self.interruptions += 1

    async def begin(self, timeout: float = 15.0, namespace: str = "tests", address: str = "me") -> Self:
        settings = Settings(namespace, "label", 10.0, timeout, system_clock)
        await self.open(settings, Listener(address, self.changed.append, self._interrupted, _replaced))
        return self

    async def change(self, key, expected, value=b"", **more):
        """One edit; stores whose server makes the versions ignore the one that is given."""
        self.versions_made += 1
        version = "" if value is None else f"{id(self)}-{self.versions_made}"
        [row] = await self.compare_and_set([Edit(key, expected, version, value, **more)])
        return row

    async def insert(self, key, value=b"", **more):
        return await self.change(key, "", value, **more)

    update = change

    async def read(self, key):
        [row] = await self.get([key])
        return row


def opener(make: Callable[..., Any]) -> Callable[..., AbstractAsyncContextManager[Any]]:
    """A function that opens such a store for a block; options are those of `begin`."""

    @asynccontextmanager
    async def opened(*where: Any, **options: Any) -> AsyncIterator[Any]:
        store = make(*where)
        try:
            yield await store.begin(**options)
        finally:
            await store.aclose()

    return opened


def private(make: Callable[[], Any], scope: str = "function") -> Any:
    """A fixture: a server that each test, or each module, has for itself."""

    @pytest.fixture(scope=scope)
    def running():
        with make() as server:
            yield server

    return running


@pytest.fixture
def key():
    return f"tests/l/lock/{secrets.token_hex(8)}"


async def absent(store, key):
    return not (await store.read(key)).version


# --- promises: a module that imports these tests makes them


async def test_a_row_is_written_only_against_its_version(store, key):
    assert (await store.read(key))[:2] == (b"", "")
    first = await store.insert(key, b"one")
    assert await store.insert(key, b"two") is None
    assert (await store.read(key))[:2] == (b"one", first.version)
    second = await store.update(key, first.version, b"three")
    assert second.version != first.version
    assert await store.update(key, first.version, b"four") is None
    assert (await store.read(key)).value == b"three"
    assert await store.update(key, first.version, None) is None
    gone = await store.update(key, second.version, None)
    assert gone.version == ""
    assert (await store.read(key))[:2] == (b"", "")
    assert await store.update(key, second.version, b"five") is None
    assert await store.update(key, second.version, None) is None
    again = await store.insert(key, b"one")
    assert again.version not in {first.version, second.version}


async def test_an_insertion_sees_the_rows_of_other_clients(store, other, key):
    await other.insert(key, b"theirs")
    assert await store.insert(key, b"mine") is None
    row = await store.read(key)
    assert row.value == b"theirs"
    assert await store.update(key, row.version, b"mine")
    assert (await other.read(key)).value == b"mine"


async def test_an_edit_that_fails_does_not_undo_the_others(store, other, key):
    first = await store.insert(f"{key}a")
    edits = [
        Edit(f"{key}a", f"{first.version}0", "1", b"x"),
        Edit(f"{key}b", "", "2", b"y"),
        Edit(f"{key}c", first.version, "3", b"z"),
    ]
    failed, made, missing = await store.compare_and_set(edits)
    assert (failed, missing) == (None, None)
    assert made.version
    assert [row.value for row in await other.get([f"{key}a", f"{key}b", f"{key}c"])] == [b"", b"y", b""]
