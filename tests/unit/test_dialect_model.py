"""The model of locks that are shared with other libraries: each rule is needed, and with all of them no promise is broken."""

from __future__ import annotations

import pytest

from tests.model.dialects import DESIGN, REMOVALS, Formats
from tests.model.explore import Run


@pytest.mark.parametrize("run", REMOVALS, ids=[run.name for run in REMOVALS])
def test_no_rule_can_be_removed(run: Run):
    outcome = run.play(200_000)
    assert outcome.violation.startswith(run.breaks), outcome
    assert outcome.trace


@pytest.mark.parametrize("run", DESIGN, ids=[run.name for run in DESIGN])
def test_the_design_breaks_no_promise(run: Run):
    outcome = run.play(50_000)
    assert not outcome.violation, "\n".join([outcome.violation, *outcome.trace])
    # Runs in which little can happen would prove nothing.
    assert outcome.states >= 30_000


def test_a_bug_that_cannot_be_planted_is_an_error():
    with pytest.raises(ValueError, match="is not in leave"):
        Formats("plain", (("leave", "no such text", ""),))
