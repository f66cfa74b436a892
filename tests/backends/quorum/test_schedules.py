"""Hundreds of small worlds with three servers in virtual time, none of which may break a promise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def command(*arguments: str, **environment: str) -> str:
    """In a process of its own: measuring coverage of so many steps takes longer than the steps."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation", "--quorum", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("start", [0, 200])
def test_no_schedule_breaks_a_promise(start):
    assert " 0 violations" in command("--start", str(start), "--seeds", "200")


def test_a_seed_is_the_same_world_in_every_process():
    logs = [command("--seed", "7", PYTHONHASHSEED=seed) for seed in ("1", "2")]
    assert logs[0] == logs[1]
    assert len(logs[0].splitlines()) > 20
