"""The model of the rows engine: each rule is needed, and with all of them no promise is broken.

``python -m tests.model rows`` explores far more states of the design than these tests, which take less than a minute."""

from __future__ import annotations

import pytest

from tests.model.explore import Run
from tests.model.runs import DESIGN, REMOVALS

SHORT = [run for run in REMOVALS if not run.deep]
STATES = 2_000
"""States of the design that each run visits here."""


@pytest.mark.parametrize("run", SHORT, ids=[run.rule for run in SHORT])
def test_no_rule_can_be_removed(run: Run):
    outcome = run.play(60_000)
    assert outcome.violation.startswith(run.breaks), outcome
    assert outcome.trace


def test_every_bracketed_rule_that_a_model_can_express_is_removed_once():
    numbers = {run.rule[: run.rule.index(")") + 1] for run in SHORT}
    # The format (20) and the length (19) of a row are checked on the rules themselves: test_rows_lockrow.py.
    assert numbers == {f"({number})" for number in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 18, 21, 22, 23, 24)}


@pytest.mark.parametrize("run", DESIGN, ids=[run.name for run in DESIGN])
def test_the_design_breaks_no_promise(run: Run):
    outcome = run.play(STATES)
    assert not outcome.violation, "\n".join([outcome.violation, *outcome.trace])
    # Runs in which little can happen would prove nothing.
    assert outcome.states >= STATES or outcome.complete
