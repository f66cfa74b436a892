"""Testing code that uses locks: a server in memory, time that is moved by hand, and accidents.

The rest of the library imports nothing from here, but for ``aiolock verify``, whose workers, histories and judge are modules of
this package beside the names below. With pytest, the fixtures ``aiolock_world`` and ``aiolock_client`` need
no import; with another framework, make a :class:`World`.
"""

from __future__ import annotations

from aiolock.testing.world import Deadlock, World, lose, run

__all__ = ["Deadlock", "World", "lose", "run"]
