"""The model of the Redis hand-off: each guard is needed, and with all of them no promise is broken.

``python -m tests.model redis`` explores far more states of the design than these tests, which take less than a minute."""

from __future__ import annotations

import pytest

from tests.model.explore import Run
from tests.model.redis_runs import DESIGN, REMOVALS
from tests.model.redis_server import Scripts

SHORT = [run for run in REMOVALS if not run.deep]
LEFT_OUT = {"changes", "removed", "replicas"}
"""The options by which a run leaves a guard out."""
STATES = 3_000
"""States of the design that each run visits here."""


@pytest.mark.parametrize("run", SHORT, ids=[run.name for run in SHORT])
def test_no_guard_can_be_removed(run: Run):
    outcome = run.play(175_000)
    assert outcome.violation.startswith(run.breaks), outcome
    assert outcome.trace


@pytest.mark.parametrize("run", SHORT, ids=[run.name for run in SHORT])
def test_with_the_guard_the_same_run_breaks_nothing(run: Run):
    options = {name: value for name, value in run.options.items() if name not in LEFT_OUT}
    outcome = Run(run.name, run.rule, "", run.claims, run.model, run.fair, options=options).play(STATES)
    assert not outcome.violation, "\n".join([outcome.violation, *outcome.trace])


@pytest.mark.parametrize("run", DESIGN, ids=[run.name for run in DESIGN])
def test_the_design_breaks_no_promise(run: Run):
    outcome = run.play(STATES)
    assert not outcome.violation, "\n".join([outcome.violation, *outcome.trace])
    # Runs in which little can happen would prove nothing.
    assert outcome.states >= STATES or outcome.complete


def test_a_bug_that_cannot_be_planted_is_an_error():
    with pytest.raises(ValueError, match="is not in release"):
        Scripts((("release", "no such text", ""),))
