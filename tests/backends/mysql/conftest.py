"""One MariaDB for this folder, with an account that has the least rights."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

import aiolock
from aiolock import Client
from tests import servers
from tests.backends.mysql.rows import OVER_ROWS

PASSWORD = "s3cret/pass@word"
ACCOUNT = (
    f"CREATE USER IF NOT EXISTS app@'%' IDENTIFIED BY '{PASSWORD}';",
    "GRANT SELECT, INSERT, UPDATE, DELETE, CREATE ON test.* TO app@'%';",
    f"CREATE USER IF NOT EXISTS bare@'%' IDENTIFIED BY '{PASSWORD}';",
)

MADE = (
    "work",
    "orders",
    *(
        f"{table}{part}"
        for table in ("given", "early", "absent")
        for part in ("", "_requests", "_registers", "_rows", "_notes")
    ),
    "early_bids",
    "early_documents",
)
UNDO = ("DROP DATABASE IF EXISTS elsewhere", f"DROP TABLE IF EXISTS {', '.join(MADE)}")
"""What tests make and leave behind on somebody else's server."""


@pytest.fixture(scope="module")
def mariadb() -> Iterator[servers.MariaDB | servers.ExternalMariaDB]:
    """A server whose account `app` may use tables of its database and nothing else."""
    url = servers.EXTERNAL.get("mariadb")
    with servers.ExternalMariaDB(url, ACCOUNT, UNDO) if url else servers.MariaDB(init=ACCOUNT) as server:
        yield server


class Deployment:
    """A server in a namespace of the test's own."""

    def __init__(self, server: servers.MariaDB | servers.ExternalMariaDB) -> None:
        self.server = server
        self.namespace = f"t{secrets.token_hex(6)}"

    def url(self, port: int | None = None, query: str = "") -> str:
        host = self.server.host if port is None else "127.0.0.1"
        return f"mysql://app:s3cret%2Fpass%40word@{host}:{port or self.server.port}/test{query}"

    def connect(self, mode: str = "lease", port: int | None = None, **options) -> Client:
        url, how = self.url(port), {"mode": mode}
        if mode == "rows":
            url, how = url.replace("mysql:", "mysql+rows:"), {}
        return aiolock.connect(url, **{"namespace": self.namespace, "ttl": 5, **how, **options})


@pytest.fixture
def deployment(mariadb) -> Deployment:
    return Deployment(mariadb)


# Users do not get the store of rows yet: its tests run where a deployment of it is named, as in `make matrix`.
collect_ignore = [] if OVER_ROWS else ["test_rows_store.py"]
