"""A process that is stopped (SIGSTOP) beyond the end of its lease: the work under it does not go on.

``tests/pythons.sh`` runs this on other Pythons as well; ``python -m tests.stops`` does it many times.
"""

from __future__ import annotations

import sys

import pytest

from tests.stops import CASES, LOOPS, stop

STOPS = 5


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the state of a process from /proc")
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("case", CASES)
def test_work_does_not_go_on_after_a_stop(loop, case):
    if loop == "uvloop":
        pytest.importorskip("uvloop")
    stops = stop(sys.executable, loop, case, STOPS)
    assert max(stop.steps for stop in stops) <= CASES[case], stops
    assert all(stop.told for stop in stops), stops
    assert any(stop.lost for stop in stops), stops
