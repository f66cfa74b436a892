"""Processes lock while others are killed, links break and the server fails; a checker looks for promises that are broken."""

from __future__ import annotations

import pytest

from tests.faults.program import history
from tests.faults.run import TTLS

WORDS = ("tests.faults.mongodb_system", "mongodb", "--processes", "4", "--names", "8")


@pytest.mark.ends_server
@pytest.mark.timeout(900)
def test_no_promise_is_broken_while_processes_links_and_the_server_fail(tmp_path):
    for seconds in (20, 40, 80, 160):
        words = (*WORDS, "--seconds", f"{seconds}", "--kinds", "all")
        verdict = history(*words, ttls=[2 * ttl for ttl in TTLS], keep=tmp_path / f"{seconds}")
        assert verdict["outside"] == {name: [] for name in verdict["outside"]}
        assert verdict["tokens_duplicated"] == verdict["tokens_decreased"] == 0
        if sum(verdict["faults"].values()) >= 10 and verdict["grants"] >= 30:
            break
        # The machine has much else to do: too little happened to say anything.
    assert sum(verdict["faults"].values()) >= 10
    assert verdict["grants"] >= 30
