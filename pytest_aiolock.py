"""Fixtures for tests of code that uses aiolock; nothing of aiolock is imported before one of them is used.

This module is not part of the package ``aiolock`` because pytest imports every plugin that is installed, also in test
runs that have nothing to do with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from aiolock import Client
    from aiolock.testing import World

__all__ = ["aiolock_client", "aiolock_world"]


@pytest.fixture
def aiolock_world() -> World:
    """A lock server in memory for this test alone, whose time goes when it is told to: ``aiolock.testing.World``."""
    from aiolock.testing import World  # noqa: PLC0415 - see above

    return World()


@pytest.fixture
def aiolock_client(aiolock_world: World) -> Client:
    """A client of ``aiolock_world``, to be entered by the test: ``async with aiolock_client:``."""
    return aiolock_world.connect()
