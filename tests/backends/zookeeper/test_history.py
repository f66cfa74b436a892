"""Processes lock while others are killed and stopped, links break and servers of the ensemble fail; a checker looks for broken promises."""

from __future__ import annotations

import pytest

from tests.faults.program import keeps_its_promises
from tests.faults.zookeeper_system import SESSION

WORDS = ("tests.faults.zookeeper_system", "zookeeper", "--processes", "8", "--names", "12", "--kinds", "all")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_promise_is_broken_while_links_processes_and_servers_fail(tmp_path):
    verdict = keeps_its_promises(*WORDS, keep=tmp_path, ttls=[SESSION], faults=5, grants=30)
    assert verdict["inside"] == dict.fromkeys(verdict["inside"], 0), "there are no exceptions here"
    assert verdict["fenced"]["stale"] == 0
    assert len(verdict["grants_by_mode"]) == 5
