"""Many processes lock while sessions, links, processes and the server fail; a checker looks for broken promises."""

from __future__ import annotations

import pytest

from tests.faults.program import keeps_its_promises


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("system", ["mariadb", "mariadb-session", "mariadb-row"])
def test_no_promise_is_broken_while_sessions_links_processes_and_the_server_fail(tmp_path, system):
    kinds = "all" if system == "mariadb" else "mutex,reentrant"
    words = ("--processes", "6", "--names", "12", "--kinds", kinds)
    verdict = keeps_its_promises("tests.faults.mysql_system", system, *words, keep=tmp_path)
    assert len(verdict["grants_by_mode"]) == (5 if system == "mariadb" else 2)
