"""`run --max-hold` ends a job that hangs, `run --at-least` keeps its lock after one that was short, and a refused run says who has it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from datetime import UTC, datetime

import pytest

from aiolock import BackendUnavailable
from aiolock.cli.run import command
from tests.cli.conftest import waits_for_a_signal

AIOLOCK = f"{sys.executable} -m aiolock"


def test_a_job_that_hangs_is_ended_and_its_lock_is_free(shell):
    """It gets TERM, and the lock is held until it is gone."""
    job = shell.start("run", "--max-hold", "0.3", "x", "--", *waits_for_a_signal("TERM", status=0))
    assert job.line() == "ready"
    assert job.line() == "got SIGTERM"
    status, out, err = job.end()
    assert (status, out) == (124, "")
    assert re.fullmatch(
        r"aiolock: stopping the command, which has \S+ s left: it has had lock 'x' for longer than --max-hold 0.3\n",
        err,
    )
    info = shell.look("x")
    assert not info.locked


@pytest.mark.parametrize("options", [("--kill-after", "0.2"), ("--on-loss", "kill")])
def test_a_job_that_does_not_listen_is_killed_at_the_end_of_its_time(shell, options):
    words = ["--at-least", "0.3", "--max-hold", "0.3", *options, "x", "--"]
    status, out, err = shell.run("run", "--json", *words, "sh", "-c", "trap '' TERM; sleep 600 & wait; wait")
    assert (status, out) == (124, "")
    said = [json.loads(line) for line in err.splitlines()]
    assert {each["event"] for each in said} == {"acquired", "overdue", "exited"}
    assert said[-1]["status"] == 124
    # A run that was stopped does not count, however short.
    assert not shell.look("x").locked
    shell.all_end()


@pytest.mark.parametrize("job", ["true", "exit 3"])
def test_a_run_that_was_short_keeps_its_lock(shell, job):
    begin = datetime.now(UTC)
    status = shell.run("run", "--at-least", "55", "--max-hold", "60", "x", "sh", "-c", job)[0]
    assert status == (3 if "exit" in job else 0)
    info = shell.look("x")
    [kept] = info.kept
    assert not info.holders
    assert 0 < (kept.until - begin).total_seconds() < 70
    if job == "true":
        status, _, err = shell.run("run", "-n", "x", "true")
        assert (status, len(err.splitlines())) == (1, 1)
        assert re.match(
            rf"aiolock: lock 'x' was not free: it is kept after \S+:{kept.pid}, for \d+ s more; wait", err
        )


def test_a_run_that_was_long_or_was_ended_keeps_nothing(shell):
    assert shell.run("run", "--at-least", "0.1", "x", "sleep", "0.2")[0] == 0
    assert not shell.look("x").locked
    job = shell.start("run", "--at-least", "60", "x", "--", *waits_for_a_signal("TERM", status=0))
    assert job.line() == "ready"
    job.send(15)
    assert job.end()[0] == 0
    assert not shell.look("x").locked


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--at-least", "5", "--max-hold", "2"], "--at-least must be at most --max-hold, which is 2, not 5"),
        (["--max-hold", "2", "--on-loss", "warn"], "with --on-loss warn it goes on"),
    ],
)
def test_limits_that_make_no_sense_are_refused_before_anything(shell, words, why):
    status, out, err = shell.run("run", "--url", "redis://127.0.0.1:1", *words, "x", "echo", "in")
    assert (status, out) == (64, "")
    assert why in err


def test_a_run_inside_a_run_is_refused_under_limits_as_well(shell):
    inner = f"{AIOLOCK} run --max-hold 5 --at-least 1 -n x echo inside; echo $?"
    status, out, err = shell.run("run", "--max-hold", "60", "--at-least", "1", "x", "sh", "-c", inner)
    assert (status, out) == (0, "64\n")
    assert "is held by the run around this one" in err


def test_a_refused_run_names_the_holder_and_since_when(shell):
    holder = shell.start(
        "run", "--label", "import", "x", "sh", "-c", "echo in; read line", stdin=subprocess.PIPE
    )
    assert holder.line() == "in"
    status, _, err = shell.run("run", "-n", "x", "true")
    assert (status, len(err.splitlines())) == (1, 1)
    who = rf"import at \S+:{holder.pid} \(token \d+\) for \S+ s, since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.match(rf"aiolock: lock 'x' was not free: it is held by {who}; wait longer with -w", err)
    # Cron stays silent.
    assert shell.run("run", "-n", "-E", "0", "x", "true") == (0, "", "")
    assert holder.end("\n")[0] == 0


async def test_a_server_that_cannot_say_who_holds_changes_no_status():
    class Silent:
        async def inspect(self):
            raise BackendUnavailable("gone")

    looking = command._Run.__new__(command._Run)
    looking._lock, looking._limit, looking._seen = Silent(), 1.0, ""
    await looking._ask_holder()
    assert looking._seen == ""
