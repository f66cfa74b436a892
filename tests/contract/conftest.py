"""The deployments of the contract as a fixture: each test runs once for each of them, in a namespace of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.deployments import REGISTRY, Deployment


@pytest.fixture(scope="session", params=REGISTRY, ids=lambda cls: cls.name)
def server(request) -> Iterator[Deployment]:
    """One deployment, running."""
    with request.param().running() as deployment:
        yield deployment


@pytest.fixture
def deployment(server: Deployment) -> Deployment:
    """One deployment with a fresh namespace: `async with deployment.connect() as client`."""
    server.begin()
    return server


@pytest.fixture
async def client(deployment: Deployment):
    """An open client."""
    async with deployment.connect(label="client") as opened:
        yield opened


@pytest.fixture
async def rival(deployment: Deployment):
    """Another client that wants the same."""
    async with deployment.connect(label="rival") as opened:
        yield opened
