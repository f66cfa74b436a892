"""Fixtures for tests of code that uses aiolock; nothing of aiolock is imported before one of them is used.

This module is not part of the package ``aiolock`` because pytest imports every plugin that is installed, also in test
runs that have nothing to do with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiolock import Client
    from aiolock.testing import World

__all__ = ["aiolock_client", "aiolock_world"]


@pytest.fixture
def aiolock_world() -> World:
    """A lock server in memory for this test alone, whose time goes when it is told to: ``aiolock.testing.World``."""
    from aiolock.testing import World  # noqa: PLC0415 - see above

    return World()


@pytest.fixture
def aiolock_client(aiolock_world: World) -> Iterator[Client]:
    """An open client of ``aiolock_world``: it opens on the event loop that uses it first, and is closed after the test."""
    from aiolock.testing.world import OpenedClient  # noqa: PLC0415 - see above

    client = aiolock_world.connect_as(OpenedClient)
    yield client
    client.end()
