"""Names: what is refused, what is kept apart, and the encodings that servers see."""

from __future__ import annotations

import unicodedata
from enum import Enum, StrEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiolock
from aiolock.backends.memory import MemoryBackend, MemoryServer
from aiolock.validation import check_label, check_name, check_namespace, digest, escape, unescape

# ruff: noqa: SIM905 - as lists, these would take a hundred lines
HOSTILE = [
    *r"/ // . .. ../.. ./a a/ /a a/b a//b a/./b ~ \ a\b C:\con nul \x00 \n %0a".split(),
    *"\x00|a\x00|\x00a|a\x00b|\t|\n|\r|\r\n|\x1b[31m|\x7f|\x85|\xa0|\u2028|\u2029| |  |a | a|a b|a  b|\n\n".split(
        "|"
    ),
    *"{ } {} {a} a{b}c }{ % %% %7b; %7B; %257b; %00; %; %s %d {0} {a.b} {{a}} %{ %7b".split(),
    *"a A Σ \u03c3 ς ß ss \u0131 I i İ é e\u0301 ﬁ fi".split(),
    *"""* ? [a] a:b : :: a: :a ' " ` $(id) ;DROP a_b a%b 'OR'1'='1' --""".split(),
    *"😀 👨\u200d👩\u200d👧 \u200b \ufeff \u202e 日本語 \U0010ffff \ue000 0 00 -1 None null lock rw sem".split(),
    *("x" * 1024, "é" * 512, "😀" * 256, "x" * 192, "x" * 193, "X" * 64, "x" * 64, "x" * 65),
]
ALL_TEXT = st.text(min_size=1)


def test_there_are_enough_of_them():
    assert len(set(HOSTILE)) == len(HOSTILE) >= 60


@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: ascii(name)[:24])
def test_hostile_names_are_valid_and_stay_what_they_are(name):
    assert check_name(name) == name
    assert unescape(escape(name)) == name


def test_hostile_names_are_different_locks_in_every_encoding():
    assert len({escape(name) for name in HOSTILE}) == len(HOSTILE)
    assert len({digest(name) for name in HOSTILE}) == len(HOSTILE)


async def test_hostile_names_are_different_locks():
    async with aiolock.Client(MemoryBackend(server=MemoryServer())) as client:
        leases = [await client.lock(name).try_acquire() for name in HOSTILE]
        assert None not in leases
        for name in HOSTILE:
            assert [holder.token for holder in (await client.lock(name).inspect()).holders] == [
                lease.token for lease in leases if lease is not None and lease.name == name
            ]
        for lease in leases:
            assert lease is not None
            await lease.release()


@given(ALL_TEXT)
def test_escape_is_undone_by_unescape(name):
    assert unescape(escape(name)) == name


@given(ALL_TEXT, ALL_TEXT)
def test_encodings_keep_names_apart(one, other):
    assert (escape(one) == escape(other)) == (one == other)
    assert (digest(one) == digest(other)) == (one == other)


@given(st.text(alphabet="%{}7bd0;\x00\n", min_size=1), st.text(alphabet="%{}7bd0;\x00\n", min_size=1))
def test_names_that_look_escaped_are_kept_apart(one, other):
    assert unescape(escape(one)) == one
    assert (escape(one) == escape(other)) == (one == other)


@given(ALL_TEXT)
def test_an_escaped_name_prints_on_one_line_and_has_no_braces(name):
    escaped = escape(name)
    assert not set("{}") & set(escaped)
    assert not any(unicodedata.category(character) in {"Cc", "Zl", "Zp"} for character in escaped)
    assert len(escaped.splitlines()) == 1


@given(ALL_TEXT)
def test_a_digest_is_short_and_blind_to_case(name):
    assert len(digest(name)) == 40
    assert set(digest(name)) <= set("0123456789abcdef")


def test_ordinary_names_stay_readable():
    for name in ("order:42", "reports/2026-11-21", "Größe", "日本語", "a b"):
        assert escape(name) == name


def test_size_is_counted_in_bytes():
    assert check_name("é" * 512)
    with pytest.raises(aiolock.InvalidName, match="at most 1024 UTF-8 bytes, this one has 1026"):
        check_name("é" * 513)


def test_a_long_bad_name_makes_a_short_message():
    with pytest.raises(aiolock.InvalidName) as caught:
        check_name("x\n" * 100_000)
    assert len(str(caught.value)) < 300
    assert "\n" not in str(caught.value)


class Old(str, Enum):  # noqa: UP042 - the point is a str whose str() is something else
    JOB = "job"


class New(StrEnum):
    JOB = "job"


class Liar(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "x" * 5000

    def __format__(self, spec: str) -> str:
        return "lie"


@pytest.mark.parametrize("value", [Old.JOB, New.JOB, Liar("job")], ids=["Enum", "StrEnum", "liar"])
@pytest.mark.parametrize("check", [check_name, check_namespace, check_label])
def test_a_subclass_of_str_counts_as_its_text(check, value):
    assert check(value) == "job"
    assert type(check(value)) is str
    assert f"{check(value)}" == "job"
