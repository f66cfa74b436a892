"""Addresses of PostgreSQL: what they mean, and that what is wrong is said before any I/O and without the password."""

from __future__ import annotations

import ssl

import pytest

from aiolock.backends.postgresql.url import parameters
from aiolock.errors import ConfigError


def test_every_part_of_an_address_reaches_the_driver():
    address, options = parameters(
        "postgresql://us%40er:p%2Fw@db.example:5433/my%20base?schema=check&table=locks.rows", {}
    )
    assert (
        address.arguments
        | {
            "host": "db.example",
            "port": 5433,
            "user": "us@er",
            "password": "p/w",
            "database": "my base",
            "ssl": False,
        }
        == address.arguments
    )
    assert options == {"schema": "check", "table": "locks.rows"}
    assert not address.local


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+asyncpg"])
def test_every_scheme_means_the_same(scheme):
    address, _ = parameters(f"{scheme}://app@db/base", {})
    assert (address.arguments["host"], address.arguments["port"]) == ("db", 5432)


def test_a_table_without_a_schema_is_in_public():
    _, options = parameters("postgresql://app@db/base", {"table": "locks"})
    assert options["table"] == "public.locks"


def test_nothing_of_the_environment_has_a_say(monkeypatch):
    for name in ("PGPASSWORD", "PGHOST", "PGSSLMODE", "PGTARGETSESSIONATTRS"):
        monkeypatch.setenv(name, "verify-full")
    address, _ = parameters("postgresql://app@db/base", {})
    assert address.arguments["password"] == ""
    assert address.arguments["ssl"] is False
    assert address.arguments["target_session_attrs"] == "any"


def test_tls_verifies_or_only_encrypts():
    verify, _ = parameters("postgresql://app@db/base?tls=verify", {})
    assert verify.arguments["ssl"].verify_mode == ssl.CERT_REQUIRED
    assert verify.arguments["ssl"].check_hostname
    encrypt, _ = parameters("postgresql://app@db/base?tls=encrypt", {})
    assert encrypt.arguments["ssl"].verify_mode == ssl.CERT_NONE
    own = ssl.create_default_context()
    given, _ = parameters("postgresql://app@db/base", {"tls": own})
    assert given.arguments["ssl"] is own


def test_a_socket_is_the_folder_that_it_is_in():
    address, _ = parameters("postgresql://app@/base?unix_socket=/run/postgresql", {})
    assert address.arguments["host"] == "/run/postgresql"
    assert address.local


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql://app:secret@db", "name a database"),
        ("postgresql://app:secret@db/a/b", "name a database"),
        ("postgresql://db/base", "name a user"),
        ("postgresql://app:secret@db/base?ssl_mod=require", "is no parameter"),
        ("postgresql://app:secret@db/base?tls=yes", "must be one of"),
        ("postgresql://app:secret@db/base?schema=manual", "must be one of"),
        ("postgresql://app:secret@db/base?table=a.b.c", "must be a table"),
        ('postgresql://app:secret@db/base?table=a"b', "must be a table"),
        ("postgresql://app:secret@db/base?table=1a", "must be a table"),
        ("postgresql://app:secret@db/base?tls_ca=/ca", "tls_ca is for tls=verify"),
        ("postgresql://app:secret@/base?unix_socket=/s&tls=verify", "needs no TLS"),
        ("postgresql://app:secret@/base?unix_socket=s", "must be the folder"),
        ("postgresql://app:sec/ret@db/base", "stand once"),
    ],
)
def test_what_is_wrong_is_said_without_the_password(url, words):
    with pytest.raises(ConfigError, match=words) as caught:
        parameters(url, {})
    assert "secret" not in str(caught.value)
    assert "ret@" not in str(caught.value)


def test_an_address_does_not_show_its_password():
    address, _ = parameters("postgresql://app:secret@db/base", {})
    assert "secret" not in repr(address) + address.text
