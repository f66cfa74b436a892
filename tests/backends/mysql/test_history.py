"""Many processes lock while everything goes wrong, and a checker says whether anybody was ever wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("site", ["mariadb", "mariadb-session", "mariadb-row"])
def test_nobody_is_wrong_while_sessions_links_processes_and_the_server_fail(tmp_path, site):
    """In a process of its own: asyncio's debug mode would slow the proxies down."""
    kinds = "all" if site == "mariadb" else "mutex,reentrant"
    words = ["--seconds", "20", "--processes", "6", "--names", "12", "--kinds", kinds, "--json"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.backends.mysql.site",
            site,
            *words,
            "--keep",
            str(tmp_path / "histories"),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        env={name: value for name, value in os.environ.items() if name != "PYTHONASYNCIODEBUG"},
    )
    verdict = json.loads(done.stdout)
    assert verdict["outside"] == {name: [] for name in verdict["outside"]}, done.stderr
    assert sum(verdict["faults"].values()) >= 15
    assert verdict["grants"] >= 50
    assert len(verdict["grants_by_mode"]) == (5 if site == "mariadb" else 2)
    assert verdict["tokens_duplicated"] == verdict["tokens_decreased"] == 0
