"""What `make test` shows of a run of pytest: little if it is green, and the names of failures last."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

from tests import quiet

ROOT = Path(__file__).parents[2]


def run(tmp_path: Path, text: str, *arguments: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run tests/all.sh over one file of tests; return the process and what it wrote."""
    (tmp_path / "test_them.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: long\naddopts = -ra\n")
    done = subprocess.run(
        [
            "bash",
            ROOT / "tests/all.sh",
            "-c",
            tmp_path / "pytest.ini",
            "--rootdir",
            tmp_path,
            "-n0",
            tmp_path,
            *arguments,
        ],
        env=os.environ | {"PYTHON": sys.executable, "TMPDIR": str(tmp_path), "LOGS": str(tmp_path / "logs")},
        capture_output=True,
        text=True,
        timeout=170,
    )
    return done, done.stdout


MARKED = (
    "import pytest\n@pytest.mark.slow\ndef test_slow(): assert {slow}\ndef test_quick(): assert {quick}\n"
)


def test_a_green_run_is_short(tmp_path):
    done, output = run(
        tmp_path, MARKED.format(slow=True, quick=True) + "@pytest.mark.skip\ndef test_no(): pass\n"
    )
    assert done.returncode == 0, output + done.stderr
    assert len(output.splitlines()) < 15, output
    assert "1 passed, 1 skipped" in output
    assert "test_them.py" not in output


def test_failures_of_both_parts_are_named_last(tmp_path):
    done, output = run(tmp_path, MARKED.format(slow=False, quick=False))
    assert done.returncode == 1
    assert "def test_quick(): assert False" in output
    *_, quick, slow = output.splitlines()
    assert quick.startswith("FAILED ")
    assert "::test_quick" in quick
    assert slow.startswith("FAILED ")
    assert "::test_slow" in slow
    assert "test_quick" in (tmp_path / "logs/test.log").read_text()


def test_errors_of_fixtures_and_modules_are_named(tmp_path):
    done, output = run(tmp_path, "import nothing_of_that_name\n")
    assert done.returncode == 1
    assert output.splitlines()[-1].startswith("ERROR "), output


def test_a_run_that_could_not_start_says_why(tmp_path):
    done, output = run(tmp_path, "def test_it(): pass\n", "--no-such-option")
    assert done.returncode == 1
    assert "--no-such-option" in output


def test_progress_is_a_line_for_each_tenth():
    out, log, names = io.StringIO(), io.StringIO(), io.StringIO()
    lines = [f"....  [{percent:3}%]\n" for percent in range(101)]
    assert quiet.follow([*lines, "505 passed in 9.99s\n"], log, names, out)
    assert len(out.getvalue().splitlines()) == 11
    assert len(log.getvalue().splitlines()) == 102
    assert not names.getvalue()
