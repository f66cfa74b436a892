"""Processes lock while others are killed, links break and the server fails; a checker looks for promises that are broken."""

from __future__ import annotations

import pytest

from tests.faults.program import keeps_its_promises
from tests.faults.run import TTLS

WORDS = ("tests.faults.mongodb_system", "mongodb", "--processes", "4", "--names", "8")


@pytest.mark.ends_server
@pytest.mark.timeout(900)
def test_no_promise_is_broken_while_processes_links_and_the_server_fail(tmp_path):
    ttls = [2 * ttl for ttl in TTLS]
    keeps_its_promises(*WORDS, "--kinds", "all", keep=tmp_path, ttls=ttls, faults=8, grants=30)
