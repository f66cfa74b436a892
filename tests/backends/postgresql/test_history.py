"""Processes lock while sessions, links, processes and the server fail, and rows are deleted; a checker looks for broken promises."""

from __future__ import annotations

import pytest

from tests.faults.program import history, keeps_its_promises
from tests.faults.verdict import DELETED

WORDS = ("tests.faults.postgresql_system", "postgresql", "--processes", "6", "--names", "12")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_promise_is_broken_while_sessions_links_processes_and_the_server_fail(tmp_path):
    verdict = keeps_its_promises(*WORDS, "--kinds", "all", keep=tmp_path)
    assert len(verdict["grants_by_mode"]) == 5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_holders_that_do_not_look_for_their_rows_are_found_out(tmp_path):
    """The same with a planted bug, so that the run above proves something."""
    for seconds in (40, 80, 160):
        # One arm, so that there is time between two deletions in which two inside are no exception, also on a busy machine;
        # and holds that are still there when the exception is over: about one deletion of five shows two inside.
        bug = ("--plant", "(1) a renewal of a row store reads no rows", "--only", DELETED, "--arms", "1")
        words = (*WORDS, "--seconds", f"{seconds}", *bug)
        verdict = history(*words, ttls=[3.0], keep=tmp_path / f"{seconds}")
        if verdict["outside"]["exclusion (by own clock)"]:
            return
    pytest.fail(f"the planted bug is not noticed: {verdict}")
