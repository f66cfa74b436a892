"""Processes lock while others are killed, links break and members fail; a checker looks for promises that are broken."""

from __future__ import annotations

import pytest

from tests.faults.program import history
from tests.faults.run import TTLS

WORDS = ("tests.faults.etcd_system", "etcd", "--processes", "5", "--names", "10")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_promise_is_broken_while_processes_links_and_members_fail(tmp_path):
    for seconds in (20, 40, 80, 160):
        words = (*WORDS, "--seconds", f"{seconds}", "--kinds", "all")
        verdict = history(*words, ttls=TTLS, keep=tmp_path / f"{seconds}")
        assert verdict["outside"] == {name: [] for name in verdict["outside"]}
        assert verdict["tokens_duplicated"] == verdict["tokens_decreased"] == 0
        if sum(verdict["faults"].values()) >= 20 and verdict["grants"] >= 50:
            break
        # The machine has much else to do: too little happened to say anything.
    assert sum(verdict["faults"].values()) >= 20
    assert verdict["grants"] >= 50
    assert len(verdict["grants_by_mode"]) == 5
