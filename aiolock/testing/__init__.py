"""For tests of code that uses locks: a server in memory, time that is moved by hand, accidents, and interruptions.

Nothing here is imported by the rest of the library. With pytest, the fixtures ``aiolock_world`` and ``aiolock_client``
are there without an import; whoever uses another framework makes a :class:`World` himself.
"""

from __future__ import annotations

from aiolock.testing.interrupt import Report, Way, interrupt_everywhere
from aiolock.testing.virtual import Deadlock, run
from aiolock.testing.world import World, lose

__all__ = ["Deadlock", "Report", "Way", "World", "interrupt_everywhere", "lose", "run"]
