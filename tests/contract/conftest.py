"""The deployments of the contract as a fixture: each test runs once for each of them, in a namespace of its own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from tests.contract.deployments import WHOLE, Deployment, registry
from tests.contract.primitives import NEEDS


def pytest_collection_modifyitems(config, items):
    """Tests of what a deployment has not are not about it; that it says so is tested in `test_kinds.py`.

    A module says what it needs in `NEEDS` (or for each of its acts), an operation of the sweep where it is registered.
    """
    kept, left = [], []
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        server = params.get("server")
        if not isinstance(server, type):
            # A test of another suite that calls something else a server.
            kept.append(item)
            continue
        needs = getattr(getattr(item, "module", None), "NEEDS", None) or NEEDS.get(params.get("operation"))
        if isinstance(needs, dict):
            needs = needs.get(params.get("act"))
        words = {needs} if isinstance(needs, str) else needs or set()
        there = words <= server.kinds | server.promises
        module = getattr(item, "module", None)
        there = there and (
            WHOLE or server.part is None or getattr(module, "__name__", "").rpartition(".")[2] in server.part
        )
        there = there and ((server.shows and server.queues) or not getattr(item.module, "COMPARES", False))
        (kept if there else left).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


def pytest_generate_tests(metafunc):
    """Once for each deployment, unless a test says itself for which."""
    chosen = any("server" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "server" in metafunc.fixturenames and not chosen:
        metafunc.parametrize("server", registry(), ids=lambda cls: cls.name, indirect=True, scope="session")


EAGER = os.environ.get("AIOLOCK_EAGER_TASKS") == "1"
"""Run every test on a loop with ``asyncio.eager_task_factory`` (Python 3.12 or newer)."""


@pytest.fixture(autouse=EAGER)
async def eager_tasks() -> None:
    """Let tasks of the running loop begin at once, from the test's client on."""
    asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)


@pytest.fixture(scope="session")
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
