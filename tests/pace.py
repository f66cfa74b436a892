"""How fast the machine is at the moment. Imports nothing of aiolock: planted bugs need it before."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def pace() -> float:
    """How much longer short ttls have to be than on a quiet machine, where 1: a share of a core is a share of a second."""
    running = os.getloadavg()[0]
    with contextlib.suppress(OSError):
        # The average follows after a minute only; this is the number of tasks that run or want to at this moment.
        running = max(running, int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]))
    return max(1.0, min(6.0, round(running / (2 * (os.cpu_count() or 1))) / 2))
