"""The suite notices bugs that are planted for it, and nothing where there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import CONTROL, MUTANTS, PARTS

ROOT = Path(__file__).parent.parent.parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.mutants", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("part", range(PARTS))
def test_every_planted_bug_is_caught(part):
    done = run("--part", str(part))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["caught"] * len(MUTANTS[part::PARTS])
    assert len(MUTANTS) >= 25


def test_a_harmless_change_is_not_caught():
    done = run("--plant", CONTROL.name)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() == "nothing was noticed"


@pytest.mark.parametrize("text", ["CHECK_EVERY = 1\n", "CHECK_EVERY = 0.25\nCHECK_EVERY = 0.25\n"])
def test_a_bug_that_does_not_fit_the_text_is_not_planted(text):
    with pytest.raises(RuntimeError, match=r"does not fit aiolock\.core\.renewal any more"):
        CONTROL.applied(text)
