"""Addresses of files: each names exactly one, or is refused before any I/O."""

from __future__ import annotations

import pytest

from aiolock.backends.sqlite.url import path_of
from aiolock.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///var/lib/locks/locks.db", "/var/lib/locks/locks.db"),
        ("sqlite:////var/lib/locks.db", "/var/lib/locks.db"),
        ("SQLite:///locks", "/locks"),
        ("sqlite:///a%20b/c%3Fd%23e%25.db", "/a b/c?d#e%.db"),
        ("sqlite:///home/me@work/locks.db", "/home/me@work/locks.db"),
        ("sqlite:///%C3%A4.db", "/ä.db"),
        ("sqlite:///%FF.db", "/\udcff.db"),
    ],
)
def test_an_address_names_an_absolute_path(url, path):
    assert path_of(url) == path


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("sqlite://", "absolute path"),
        ("sqlite:///", "absolute path"),
        ("sqlite:///var/lib/", "absolute path"),
        ("sqlite:///:memory:", "memory:// is for locks inside one process"),
        ("sqlite:///a%00b", "absolute path"),
        ("sqlite://locks.db", "three slashes"),
        ("sqlite://localhost/var/locks.db", "three slashes"),
        ("sqlite://me:secret@/var/locks.db", "three slashes"),
        ("sqlite:///locks.db?mode=ro", "mode.*no parameter of a SQLite URL; it has none"),
        ("sqlite:///locks.db#1", "#"),
        ("/var/locks.db", "scheme"),
        (7, "must be a str"),
    ],
)
def test_what_names_no_file_is_refused(url, why):
    with pytest.raises(ConfigError, match=why) as refusal:
        path_of(url)
    assert "secret" not in str(refusal.value)
