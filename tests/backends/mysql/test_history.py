"""Many processes lock while sessions, links, processes and the server fail; a checker looks for broken promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.contract.deployments import pace
from tests.faults.run import TTLS


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("system", ["mariadb", "mariadb-session", "mariadb-row"])
def test_no_promise_is_broken_while_sessions_links_processes_and_the_server_fail(tmp_path, system):
    kinds = "all" if system == "mariadb" else "mutex,reentrant"
    for seconds in (20, 40, 80, 160):
        verdict = history(tmp_path / f"{seconds}", system, "--seconds", f"{seconds}", "--kinds", kinds)
        assert verdict["outside"] == {name: [] for name in verdict["outside"]}
        assert verdict["tokens_duplicated"] == verdict["tokens_decreased"] == 0
        if sum(verdict["faults"].values()) >= 15 and verdict["grants"] >= 50:
            break
        # The machine has much else to do: too little happened to say anything.
    assert sum(verdict["faults"].values()) >= 15
    assert verdict["grants"] >= 50
    assert len(verdict["grants_by_mode"]) == (5 if system == "mariadb" else 2)


def history(keep: Path, system: str, *words: str) -> dict[str, Any]:
    """Run a history in a process of its own, because asyncio's debug mode would slow the proxies down."""
    # Where a round trip takes longer than a third of the ttl, half of the clients can be granted nothing.
    ttls = ",".join(str(ttl * pace()) for ttl in TTLS)
    words = ("--processes", "6", "--names", "12", "--ttls", ttls, "--json", *words, "--keep", str(keep))
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.mysql_system", system, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
        env={name: value for name, value in os.environ.items() if name != "PYTHONASYNCIODEBUG"},
    )
    assert done.stdout, done.stderr
    verdict: dict[str, Any] = json.loads(done.stdout)
    return verdict
