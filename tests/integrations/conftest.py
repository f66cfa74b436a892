"""Two servers for every test of an integration: memory and Redis, in a namespace of its own."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from typing import NamedTuple

import pytest

import aiolock
from aiolock.backends.memory.backend import shared
from tests.contract.deployments import delete
from tests.faults.links import drop
from tests.servers import Redis


class Deployment(NamedTuple):
    """Where the locks are."""

    url: str
    namespace: str

    def connect(self, **options: object) -> aiolock.Client:
        return aiolock.connect(self.url, namespace=self.namespace, **options)

    async def forget(self, lease: aiolock.Lease) -> None:
        """Have the server drop the hold of `lease`, and tell nobody."""
        if self.url.startswith("memory:"):
            drop(shared(self.namespace), lease._hold.validity.claim)
        else:
            await delete(self.url, lease._hold.validity.claim.key)


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with Redis() as server:
        yield server.url


@pytest.fixture(params=["memory", "redis"])
def deployment(request) -> Deployment:
    namespace = f"web-{secrets.token_hex(4)}"
    if request.param == "memory":
        return Deployment(f"memory://{namespace}", namespace)
    return Deployment(request.getfixturevalue("redis_url"), namespace)


@pytest.fixture
async def rival(deployment: Deployment) -> AsyncIterator[aiolock.Client]:
    """Another client of the same server."""
    async with deployment.connect(label="rival") as client:
        yield client
