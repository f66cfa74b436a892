"""Stores on real etcd clusters, and what they report."""

from __future__ import annotations

import pytest

from aiolock.backends.etcd.store import EtcdStore
from aiolock.backends.etcd.url import parameters
from tests.backends.stores import Reporting, key, opener, private  # noqa: F401 - a fixture
from tests.servers import Etcd


class Opened(Reporting, EtcdStore):
    def __init__(self, url: str) -> None:
        super().__init__(parameters(url, {}))


opened = opener(Opened)


def demand_login(server: Etcd, *, prefix: str = "tests/", right: str = "readwrite") -> str:
    """Have the cluster demand a login; return the address of a user with one right to the keys of a prefix."""
    for words in (
        "user add root:password",
        "user grant-role root root",
        "role add locks",
        f"role grant-permission locks {right} --prefix=true {prefix}",
        "user add app:pass%word",
        "user grant-role app locks",
        "auth enable",
    ):
        server.ctl(*words.split())
    return server.url.replace("etcd://", "etcd://app:pass%25word@")


server = private(Etcd, "module")
own = private(Etcd)


@pytest.fixture
async def store(server):
    async with opened(server.url) as store:
        yield store


@pytest.fixture
async def other(server):
    async with opened(server.url, address="other") as store:
        yield store
