"""A quarter of a minute in which servers, links and processes fail, and nobody is wrong about a lock; and that the run could tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults import program
from tests.faults.quorum_system import TTLS

SECONDS = 15


def history(keep: Path, *words: str) -> dict[str, Any]:
    """One run. The last of equal words counts."""
    words = ("--seconds", f"{SECONDS}", "--processes", "5", "--names", "9", *words)
    return program.history("tests.faults.quorum_system", "quorum", *words, ttls=TTLS, keep=keep)


def enough(shown: dict[str, Any]) -> bool:
    """Whether it was a test: much went wrong, servers included, and much of every kind was granted."""
    servers = sum(count for name, count in shown["faults"].items() if "a server" in name)
    kinds = {"mutex", "reentrant", "read", "write"}
    much = sum(shown["faults"].values()) >= 10 and shown["grants"] >= 100
    return much and servers >= 1 and set(shown["grants_by_mode"]) == kinds


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nobody_is_wrong_while_servers_links_and_processes_fail(tmp_path):
    """Of three servers one at a time is killed, emptied, frozen or cut off, beside all that goes wrong elsewhere."""
    shown = history(tmp_path / "histories", "--kinds", "all")
    if not enough(shown):
        # This machine has much else to do: too little has happened to say anything.
        shown = history(tmp_path / "longer", "--kinds", "all", "--seconds", "45")
    assert shown["outside"] == {name: [] for name in shown["outside"]}
    assert shown["fenced"]["stale"] == 0
    assert enough(shown), shown


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_majority_that_is_none_is_found_out(tmp_path):
    """The same with a planted bug, so that the run above proves something."""
    for seconds in (10, 20, 40, 80):
        bug = "half of the servers are enough"
        shown = history(tmp_path / f"{seconds}", "--plant", bug, "--seconds", f"{seconds}")
        if shown["outside"]["exclusion (by own clock)"]:
            return
    pytest.fail(f"the planted bug is not noticed: {shown}")
