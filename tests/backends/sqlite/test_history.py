"""Processes lock while others are killed and stopped, the disk is full and the file is deleted; a checker looks for broken promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_promise_is_broken_while_processes_and_the_file_fail(tmp_path):
    for seconds in (20, 40, 80, 160):
        verdict = history(tmp_path / f"{seconds}", "--seconds", f"{seconds}", "--kinds", "all")
        assert verdict["outside"] == {name: [] for name in verdict["outside"]}
        assert verdict["tokens_duplicated"] == verdict["tokens_decreased"] == 0
        if sum(verdict["faults"].values()) >= 15 and verdict["grants"] >= 50:
            break
        # The machine has much else to do: too little happened to say anything.
    assert sum(verdict["faults"].values()) >= 15
    assert verdict["grants"] >= 50
    assert len(verdict["grants_by_mode"]) == 5


def history(keep: Path, *words: str) -> dict[str, Any]:
    """Run a history in a process of its own, because asyncio's debug mode would slow it down."""
    words = ("--processes", "5", "--names", "10", "--json", *words, "--keep", str(keep))
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.sqlite_system", "sqlite", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
        env={name: value for name, value in os.environ.items() if name != "PYTHONASYNCIODEBUG"},
    )
    assert done.stdout, done.stderr
    verdict: dict[str, Any] = json.loads(done.stdout)
    return verdict
