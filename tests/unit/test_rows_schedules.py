"""Hundreds of small worlds with a row store in virtual time, none of which may break a promise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_schedule_of_a_row_store_breaks_a_promise():
    # In a process of its own: asyncio's debug mode takes longer than the steps.
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation", "--rows", "--seeds", "200"],
        cwd=ROOT,
        env={},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 violations" in done.stdout
