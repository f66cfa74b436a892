"""Processes lock while others are killed and stopped, the disk is full and the file is deleted; a checker looks for broken promises."""

from __future__ import annotations

import pytest

from tests.faults.program import keeps_its_promises


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_promise_is_broken_while_processes_and_the_file_fail(tmp_path):
    words = ("--processes", "5", "--names", "10", "--kinds", "all")
    verdict = keeps_its_promises("tests.faults.sqlite_system", "sqlite", *words, keep=tmp_path)
    assert len(verdict["grants_by_mode"]) == 5
