"""Addresses and options as all servers read them: what is taken, what is refused, and what a message may quote."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import pytest

import aiolock
from aiolock import ConfigError
from aiolock.backends.urls import Form, Host, count, file, flag, one_of, parse, seconds, text
from aiolock.errors import meant

FORM = Form(
    "Test",
    "test://user:password@h1:1,h2/path?speed=9",
    ("test", "tests"),
    99,
    {"speed": count(1, 10), "mode": one_of("slow", "fast")},
    {"provider": text},
    several=True,
)


def test_an_address_is_taken_apart():
    address = parse(
        FORM, "TESTS://me%40x:p%3Aw@H1, [::1]:7/a%2Fb?mode=slow", {"provider": "x", "speed": None}
    )
    assert (address.scheme, address.user, address.password) == ("tests", "me@x", "p:w")
    assert address.hosts == (Host("h1", 99), Host("::1", 7))
    assert [str(host) for host in address.hosts] == ["h1:99", "[::1]:7"]
    assert (address.host_list, address.path) == ("H1,[::1]:7", "/a%2Fb")
    assert address.options == {"mode": "slow", "provider": "x"}
    assert "p:w" not in repr(address)
    assert "slow" not in repr(address)


@pytest.mark.parametrize(
    ("url", "given", "says"),
    [
        (3, {}, "must be a str such as 'test://"),
        ("h1:1", {}, "scheme must be one of test, tests"),
        ("redis://h1", {}, "scheme must be one of test, tests"),
        (
            "test://h1?sped=1",
            {},
            "'sped' is no parameter of a Test URL; it has speed, mode; did you mean speed?",
        ),
        ("test://h1?provider=1", {}, "'provider' is no parameter"),
        (
            "test://h1",
            {"modes": 1},
            "'modes' is no option of Test; it has speed, mode, provider; did you mean mode?",
        ),
        ("test://h1?speed=1&speed=1", {}, "speed is given twice"),
        ("test://h1?speed=1", {"speed": 1}, "speed is given twice"),
        ("test://h1?speed=11", {}, "speed must be a number from 1 to 10, not '11'"),
        ("test://h1", {"mode": "fats"}, "mode must be one of slow, fast, not 'fats'"),
        ("test://h1,h2:0", {}, "host 2 is no host and port from 1 to 65535"),
        ("test://h1,h 2", {}, "host 2 is no host and port"),
        ("test://h1,h%41", {}, "host 2 is no host and port"),
        ("test://", {}, "names no host"),
        ("test://h1,H1:99", {}, "a host is named twice"),
        ("test://me:pw@h1,you:pw@h2", {}, "stand once"),
        ("test://me:%ff@h1", {}, "UTF-8"),
    ],
)
def test_a_mistake_is_named_with_what_is_right(url, given, says):
    with pytest.raises(ConfigError, match=re.escape(says)) as caught:
        parse(FORM, url, given)
    assert caught.value.__context__ is None


@pytest.mark.parametrize(
    "place", ["@h1?x=@", "/@h1", "]@h1", "@h1℀x", "@h1:port", "@h1?mode=@", "#@h1", "%ff@h1"]
)
def test_no_part_of_a_password_is_quoted(place):
    url = f"test://me:s3cret{place}"
    with pytest.raises(ConfigError) as caught:
        parse(FORM, url, {})
    assert "s3cret" not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    ("reader", "good", "bad"),
    [
        (count(1, 10), {1: 1, "10": 10}, [0, 11, "x", True, 1.5, "9" * 5000, "٣", None]),
        (seconds(0.5, 60), {"0.5": 0.5, 60: 60.0}, ["x", 0, "nan", True, None, 10**400, "9" * 5000]),
        (flag, {True: True, "false": False}, ["True", "yes", 1, None, []]),
        (one_of("a", "b"), {"a": "a"}, ["A", "", None, 1, []]),
        (text, {"a": "a"}, [b"a", 1, None]),
        (file, {"/a": "/a", Path("/a"): "/a"}, ["", "a\0b", b"/a", 5, None]),
    ],
)
def test_readers(reader, good, bad):
    for value, expected in good.items():
        assert reader("option", value) == expected
    for value in bad:
        with pytest.raises(ConfigError, match=r"^option must be "):
            reader("option", value)


def test_a_word_that_resembles_one_is_suggested():
    assert meant("fats", ["slow", "fast"]) == "; did you mean fast?"
    assert meant("blue", ["slow", "fast"]) == ""
    with pytest.raises(ConfigError, match=r"did you mean rediss?://\?"):
        aiolock.connect("redi://h1")
    with pytest.raises(ConfigError, match=r"did you mean namespace\?"):
        aiolock.connect("memory://", nmaespace="x")
