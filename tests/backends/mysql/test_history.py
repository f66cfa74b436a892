"""Many processes lock while sessions, links, processes and the server fail; a checker looks for broken promises."""

from __future__ import annotations

import pytest

from tests.faults.program import history
from tests.faults.run import TTLS


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("system", ["mariadb", "mariadb-session", "mariadb-row"])
def test_no_promise_is_broken_while_sessions_links_processes_and_the_server_fail(tmp_path, system):
    kinds = "all" if system == "mariadb" else "mutex,reentrant"
    for seconds in (20, 40, 80, 160):
        words = ("--processes", "6", "--names", "12", "--seconds", f"{seconds}", "--kinds", kinds)
        keep = tmp_path / f"{seconds}"
        verdict = history("tests.faults.mysql_system", system, *words, ttls=TTLS, keep=keep)
        assert verdict["outside"] == {name: [] for name in verdict["outside"]}
        assert verdict["tokens_duplicated"] == verdict["tokens_decreased"] == 0
        if sum(verdict["faults"].values()) >= 15 and verdict["grants"] >= 50:
            break
        # The machine has much else to do: too little happened to say anything.
    assert sum(verdict["faults"].values()) >= 15
    assert verdict["grants"] >= 50
    assert len(verdict["grants_by_mode"]) == (5 if system == "mariadb" else 2)
