"""A history run in a process of its own, for tests: asyncio's debug mode would slow its proxies down."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.faults.run import TTLS

ROOT = Path(__file__).parents[2]


def history(module: str, system: str, *words: str, ttls: Sequence[float], keep: Path) -> dict[str, Any]:
    """Run ``module`` with these words and return its verdict. Of two equal words the last one counts."""
    seconds = ",".join(map(str, ttls))
    done = subprocess.run(
        [sys.executable, "-m", module, system, "--ttls", seconds, "--json", *words, "--keep", str(keep)],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "PYTHONASYNCIODEBUG"},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.stdout, done.stderr
    verdict: dict[str, Any] = json.loads(done.stdout)
    assert verdict["grants"], done.stderr
    assert done.returncode == (1 if verdict["violations"] else 0), done.stderr
    assert verdict["violations"] or not done.stderr
    return verdict


def keeps_its_promises(
    module: str,
    system: str,
    *words: str,
    keep: Path,
    ttls: Sequence[float] = TTLS,
    faults: int = 15,
    grants: int = 50,
) -> dict[str, Any]:
    """Run histories, each longer than the one before, until enough happened in one, and none of them broke a promise.

    A machine that has much else to do needs more time. Returns the verdict on the last one.
    """
    for seconds in (20, 40, 80, 160):
        folder = keep / f"{seconds}"
        verdict = history(module, system, *words, "--seconds", f"{seconds}", ttls=ttls, keep=folder)
        assert not any(verdict["outside"].values()), verdict
        assert verdict["tokens_duplicated"] == verdict["tokens_decreased"] == 0, verdict
        if sum(verdict["faults"].values()) >= faults and verdict["grants"] >= grants:
            return verdict
    shut = [path.stem for path in sorted(folder.glob("worker*.jsonl")) if '"open"' not in path.read_text()]
    raise AssertionError(
        f"too little happened: {verdict['faults']}, {verdict['grants']} grants; never open: {', '.join(shut) or 'none'}"
    )
