"""What the backend has to show under faults, with moderate counts; `python -m tests.faults.redis_figures` has all.

What is a matter of the machine's speed is not asserted here; what is lost, left or told too late is.
"""

from __future__ import annotations

from functools import partial

import pytest

from tests.faults import redis_figures as figures


@pytest.mark.slow
@pytest.mark.parametrize(
    "figure",
    [
        partial(figures.cancelled, count=200),
        partial(figures.black_holed, count=10),
        partial(figures.killed, count=1),
        partial(figures.restarted, count=1),
        partial(figures.unsubscribed, count=100),
    ],
    ids=list(figures.FIGURES),
)
async def test_nothing_is_lost_or_left_or_told_too_late(figure):
    rows = await figures.measure(figure)
    print(figures.table(rows))
    assert not [row for row in rows if not row.good and not row.target.startswith("≤")]
