"""Three servers, as good as new for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack

import pytest

from tests.faults.redis_quorum import SERVERS, Three, server
from tests.servers import Redis


@pytest.fixture(scope="session")
def servers() -> Iterator[list[Redis]]:
    """Started once; whoever hurts one lets it be healed."""
    with ExitStack() as stack:
        yield sorted((stack.enter_context(server()) for _ in range(SERVERS)), key=lambda one: str(one.port))


@pytest.fixture
async def three(servers) -> AsyncIterator[Three]:
    """Them, in a namespace of the test."""
    async with Three(servers) as site:
        yield site
