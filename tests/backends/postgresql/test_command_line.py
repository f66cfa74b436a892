"""The commands on the page of PostgreSQL do there what they do on every server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "backends" / "postgresql.md"
PATIENCE = 120.0


@pytest.fixture
def shell(url, tmp_path):
    """Runs lines of shell where the page's commands can be run, with a namespace of its own."""
    names = ("AIOLOCK_HELD", "PYTHONASYNCIODEBUG")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    environment |= {"AIOLOCK_URL": url, "AIOLOCK_NAMESPACE": tmp_path.name[-60:].replace("[", "")}

    def run(lines: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-ec", lines],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )

    return run


def test_the_commands_of_the_page_run(shell, url, tmp_path):
    [example] = re.findall(
        r"^```sh\n(export AIOLOCK_URL.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    report = tmp_path / "report.sh"
    report.write_text("#!/bin/sh\naiolock inspect nightly-report\n")
    report.chmod(0o755)
    done = shell(re.sub(r"postgresql://\S+", url, example))
    assert done.returncode == 0, done.stderr
    assert re.search(r"nightly-report", done.stdout)
    assert "Healthy." in done.stdout


def test_a_second_run_is_kept_out_and_a_lock_can_be_taken_away(shell):
    done = shell("aiolock run job -- aiolock run -n --namespace $AIOLOCK_NAMESPACE other -- echo inside")
    assert (done.returncode, done.stdout) == (0, "inside\n"), done.stderr
    done = shell(
        "aiolock run --on-loss warn job -- sh -c 'AIOLOCK_HELD= aiolock run -n job -- true || echo taken'"
    )
    assert done.stdout == "taken\n", done.stderr
    done = shell("aiolock run --kill-after 1 job -- sh -c 'aiolock force-release --yes job; sleep 60'")
    assert done.returncode == 75, done.stderr


def test_doctor_has_the_words_of_the_page(shell):
    words = re.search(r"\| words of `require=` \| (.*?);", PAGE.read_text())
    found = json.loads(shell("aiolock doctor --json").stdout)
    assert found["healthy"]
    assert set(re.findall(r"`([\w-]+)`", words[1])) | {"survives-restart"} == set(found["promises"])
    assert found["missing"] == ["survives-failover"]
