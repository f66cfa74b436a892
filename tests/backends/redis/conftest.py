"""A server, a namespace of its own for each test, and an administrator who looks at what is left."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable
from typing import Any

import pytest
import redis.asyncio

import aiolock
from tests.servers import Redis, RedisCluster


@pytest.fixture(scope="module")
def server():
    """One for all tests of a module, none of which hurts it."""
    with Redis() as running:
        yield running


@pytest.fixture
def mortal():
    """One for this test alone, which may do to it what it likes."""
    with Redis() as running:
        yield running


@pytest.fixture(scope="session")
def cluster():
    """Three primaries for all tests of the run, who may move slots to and fro."""
    with RedisCluster(extra=["--cluster-require-full-coverage", "no"]) as running:
        yield running


@pytest.fixture
def namespace() -> str:
    """Keys that nobody else uses."""
    return f"f{secrets.token_hex(4)}"


@pytest.fixture
async def admin(server):
    """May do everything on the server of the module."""
    async with redis.asyncio.Redis(port=server.port) as client:
        yield client


@pytest.fixture
async def master(mortal):
    """May do everything on the server of the test."""
    async with redis.asyncio.Redis(port=mortal.port) as client:
        yield client


@pytest.fixture
def connect(namespace) -> Callable[..., aiolock.Client]:
    """`aiolock.connect` in the namespace of the test, for a machine that may be slow."""
    return functools.partial(aiolock.connect, namespace=namespace, **SLOW)


@pytest.fixture
def options(namespace) -> dict[str, Any]:
    """The same options for a worker."""
    return {"namespace": namespace, **SLOW}


SLOW: dict[str, Any] = {"command_timeout": 10.0}
"""A round trip may take long here; tests in which one never ends say how long they wait."""
