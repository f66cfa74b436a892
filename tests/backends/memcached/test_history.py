"""Processes lock while others are killed, links break and the server forgets; a checker looks for promises that are broken."""

from __future__ import annotations

import pytest

from tests.faults.program import keeps_its_promises

WORDS = ("tests.faults.memcached_system", "memcached", "--processes", "5", "--names", "10")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_promise_is_broken_while_processes_links_and_the_server_fail(tmp_path):
    verdict = keeps_its_promises(*WORDS, "--kinds", "all", keep=tmp_path)
    assert len(verdict["grants_by_mode"]) == 5
