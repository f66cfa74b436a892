"""Different names are different locks, whatever they contain; what is no name is refused before any I/O."""

from __future__ import annotations

import asyncio
import unicodedata

import pytest

import aiolock
from aiolock import InvalidName
from tests.faults.staging import queued, shown_token

COMPOSED = unicodedata.normalize("NFC", "é")
DECOMPOSED = unicodedata.normalize("NFD", "é")

NAMES = [
    "a",
    "A",
    "aa",
    "a ",
    " a",
    "a\t",
    "a\n",
    "a\r\n",
    "\n",
    " ",
    "\x00",
    "a\x00",
    "a\x00b",
    "a\x00c",
    "\x1b[2J",
    "\x7f",
    "\x85",
    "\u2028",
    COMPOSED,
    DECOMPOSED,
    "ß",
    "ss",
    "\N{LATIN SMALL LETTER DOTLESS I}",
    "i",
    "\N{LOCK}",
    "\N{LOCK}\ufe0f",
    "\ufeffa",
    "\ue000",
    "\u202ea",
    "\U0010ffff",
    "{}",
    "{a}",
    "{a}b",
    "{a}c",
    "a{b}c{d}",
    "}{",
    "*",
    "?",
    "[a]",
    "a*",
    "/",
    "//",
    "a/b",
    "a//b",
    "/a/b",
    "a/b/",
    ".",
    "..",
    "../../zookeeper",
    "zookeeper",
    "%2F",
    "%2f;",
    "%",
    "%%",
    "%0a;",
    "%7b;",
    "\\",
    "\\n",
    "a:b",
    "a::b",
    ":",
    "lock:x",
    "x",
    "mutex",
    "'",
    "';--",
    '"',
    "`",
    "' OR 1=1 --",
    "$1",
    "KEYS[1]",
    "0",
    "-1",
    "None",
    "b'a'",
    "x" * 63,
    "x" * 64,
    "x" * 65,
    "x" * 191,
    "x" * 192,
    "x" * 255,
    "x" * 256,
    "x" * 1023,
    "x" * 1024,
    "x" * 1023 + "y",
    "ü" * 512,
    "\N{LOCK}" * 256,
]

INVALID = [
    "",
    "x" * 1025,
    "ü" * 513,
    "x" * 65_536,
    "x" * 1_000_000,
    "\ud800",
    "a\udfffb",
    b"a",
    bytearray(b"a"),
    1,
    1.0,
    None,
    True,
    object(),
    ("a",),
    ["a"],
]


def test_the_corpus_is_large_and_without_repetitions():
    assert len(NAMES) >= 60
    assert len(set(NAMES)) == len(NAMES)


async def test_different_names_are_different_locks(deployment, client, rival):
    """All of them are held at once; then each is taken for everybody else, also under its own name alone."""
    leases = [await client.lock(name).acquire(timeout=5) for name in NAMES]
    assert [lease.name for lease in leases] == NAMES
    assert all(lease.held for lease in leases)
    for name, lease in zip(NAMES, leases, strict=True):
        assert await rival.lock(name).try_acquire() is None
        info = await rival.lock(name).inspect()
        assert info.name == name
        assert len(info.holders) == 1
        assert not deployment.shows or info.holders[0].token == shown_token(lease)
    for name, lease in zip(NAMES, leases, strict=True):
        await lease.release()
        other = await rival.lock(name).try_acquire()
        assert other is not None
        await other.release()


async def test_every_name_can_be_waited_for(client, rival):
    async def hand_over(name: str) -> None:
        holder = await client.lock(name).acquire()
        waiter = asyncio.create_task(rival.lock(name).acquire())
        await queued(client.lock(name), 1)
        await holder.release()
        await (await waiter).release()

    async with asyncio.timeout(60):
        for start in range(0, len(NAMES), 20):
            await asyncio.gather(*(hand_over(name) for name in NAMES[start : start + 20]))


@pytest.mark.parametrize("name", INVALID, ids=lambda name: f"{name!r:.20}")
@pytest.mark.parametrize("kind", ["lock", "reentrant_lock"])
def test_what_is_no_name_is_refused_without_a_server(name, kind):
    # This client is never opened: whatever did I/O would raise RuntimeError.
    client = aiolock.connect("memory://")
    with pytest.raises(InvalidName) as caught:
        getattr(client, kind)(name)
    assert isinstance(caught.value, ValueError)
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


def test_a_subclass_of_str_names_what_its_text_names():
    class Name(str):
        __slots__ = ()

        def __str__(self) -> str:
            return "something else"

        def __hash__(self) -> int:
            return 0

    client = aiolock.connect("memory://")
    assert client.lock(Name("a")).name == "a"
