"""Thousands of small worlds in virtual time, none of which may break a promise."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation import world

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def quiet():
    """What the library logs in these worlds is not kept: there is a lot, and losing locks is their subject."""
    logger = logging.getLogger("aiolock")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(level)


def command(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_no_schedule_breaks_a_promise():
    total = world.explore(range(200), patience=3)
    assert not total.violations, "\n".join(total.violations)
    # Worlds in which nothing happens would prove nothing.
    assert total.grants > 1000
    assert total.losses > 50
    assert total.faults > 1000
    assert total.seconds > 3600
    assert min(total.together.values()) > 20, total.together
    assert len(total.together) == 4


@pytest.mark.parametrize("start", [200, 800, 1400])
def test_no_schedule_of_many_breaks_a_promise(start):
    # In processes of their own: measuring coverage of so many steps takes longer than the steps.
    assert " 0 violations" in command("--start", str(start), "--seeds", "600")


def test_a_seed_is_the_same_world_in_every_process():
    logs = [command("--seed", "21", PYTHONHASHSEED=seed) for seed in ("1", "2")]
    assert logs[0] == logs[1]
    assert logs[0].count("\n") > 50


def test_different_seeds_are_different_worlds():
    assert world.play(1).log != world.play(2).log


def test_a_deadlock_of_a_world_is_a_violation(monkeypatch):
    async def wait_for_ever(self):
        await self.loop.create_future()

    monkeypatch.setattr(world.World, "live", wait_for_ever)
    [violation] = world.play(0).violations
    assert violation.startswith("deadlock")
