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
    assert "unconditional skip" in output


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


def test_files_that_have_no_slow_tests_are_green_and_nothing_at_all_is_not(tmp_path):
    done, output = run(tmp_path, "def test_quick(): pass\n")
    assert done.returncode == 0, output + done.stderr
    assert "1 passed" in output
    done, _ = run(tmp_path, "def test_quick(): pass\n", "-k", "another")
    assert done.returncode == 1


def follow(*lines: str) -> tuple[bool, str, str, str]:
    """Read the lines of a run; return whether it was counted, what is shown, the names, and the log."""
    log, names, out = io.StringIO(), io.StringIO(), io.StringIO()
    counted = quiet.follow([f"{line}\n" for line in lines], log, names, out)
    return counted, out.getvalue(), names.getvalue(), log.getvalue()


def test_errors_of_modules_are_shown_and_named():
    counted, shown, names, _ = follow(
        "=================== ERRORS ===================",
        "E   ModuleNotFoundError: No module named 'nothing'",
        "=========== short test summary info ==========",
        "SKIPPED [1] tests/test_a.py:3: no server",
        "ERROR tests/test_them.py",
        "2 skipped, 1 error in 0.50s",
    )
    assert counted
    assert "ModuleNotFoundError" in shown
    assert "no server" in shown
    assert names == "ERROR tests/test_them.py\n"


def test_a_run_that_could_not_start_says_why():
    counted, shown, _, _ = follow(
        "ERROR: usage: pytest [options]", "error: unrecognized arguments: --no-such-option"
    )
    assert not counted
    assert "--no-such-option" in shown


def test_progress_is_a_line_for_each_tenth():
    lines = [f"....  [{percent:3}%]" for percent in range(101)]
    counted, shown, names, log = follow(*lines, "505 passed in 9.99s")
    assert counted
    assert len(shown.splitlines()) == 11
    assert len(log.splitlines()) == 102
    assert not names


def test_what_agreed_with_a_stand_in_is_not_counted_as_passed():
    text = io.StringIO(), io.StringIO(), io.StringIO()
    assert quiet.follow(["12 passed, 1 failed in 0.50s\n"], *text, "agreed with it")
    log, _, out = (each.getvalue() for each in text)
    assert log == out == "12 agreed with it, 1 failed in 0.50s\n"


def test_a_run_in_which_all_agreed_with_a_stand_in_ends_well():
    text = io.StringIO(), io.StringIO(), io.StringIO()
    assert quiet.follow(["12 passed in 0.50s\n"], *text, "agreed with a stand-in, which is no server")
    assert text[2].getvalue() == "12 agreed with a stand-in, which is no server in 0.50s\n"
