"""`aiolock run` inside `aiolock run` of the same lock: one at a time, and none that outlives the hold of the outer run."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

import aiolock
from aiolock.cli.run.nested import Entry, InnerRuns, borrow
from aiolock.cli.run.signals import SignalQueue
from aiolock.types import MUTEX
from tests.cli.conftest import until

AIOLOCK = f"{sys.executable} -m aiolock"


@pytest.fixture
def site(shell, tmp_path):
    return Site(shell, tmp_path)


class Site:
    """Scripts that write down when they work, and end when they may."""

    def __init__(self, shell, path) -> None:
        self.shell = shell
        self.path = path
        self.log = path / "log"

    def work(self, name: str) -> str:
        """A command that begins, waits until it may end, and ends."""
        path = self.path / name
        path.write_text(
            f"#!/bin/sh\necho begin {name} $$ >>{self.log}\nwhile [ ! -e {self.path}/go ]; do sleep 0.02; done\n"
            f"echo end {name} >>{self.log}\n"
        )
        path.chmod(0o755)
        return str(path)

    def go(self) -> None:
        (self.path / "go").touch()

    def lines(self) -> list[str]:
        return [line.split()[0] + " " + line.split()[1] for line in self._lines()]

    def _lines(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def began(self, name: str) -> int:
        """Wait until a command works; its process id."""
        until(lambda: f"begin {name}" in self.lines(), f"{name} does not begin")
        return next(int(line.split()[2]) for line in self._lines() if line.startswith(f"begin {name} "))

    @property
    def begun(self) -> str:
        """Shell that waits until some command works: a run that connects after the outer command has ended asks the server."""
        return f"while [ ! -e {self.log} ]; do sleep 0.02; done"

    def outer(self, script: str, *words: str):
        return self.shell.start("run", *words, "x", "--", "sh", "-c", script)


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_inner_runs_take_turns(site):
    outer = site.outer(" ".join(f"{AIOLOCK} run x {site.work(name)} &" for name in "abc") + " wait")
    until(site.lines, "nobody begins")
    assert len(site.lines()) == 1
    site.go()
    assert outer.end()[0] == 0
    lines = site.lines()
    assert sorted(lines) == sorted(f"{what} {name}" for name in "abc" for what in ("begin", "end"))
    for begin, end in zip(lines[::2], lines[1::2], strict=True):
        assert begin.removeprefix("begin") == end.removeprefix("end")


@pytest.mark.parametrize("patience", ["-n", "-w 0.2"])
def test_an_inner_run_that_does_not_wait_is_refused_while_another_works(site, patience):
    site.work("a")
    outer = site.outer(
        f"{AIOLOCK} run x {site.path}/a & {site.begun}; "
        f"{AIOLOCK} run {patience} -E 9 x echo in; echo $?; touch {site.path}/go; wait; {AIOLOCK} run -n x echo after"
    )
    status, out, err = outer.end()
    assert (status, out) == (0, "9\nafter\n")
    assert [line.startswith("aiolock: lock 'x' was not free") for line in err.splitlines()] == [True]


@pytest.mark.parametrize("leaves", ["", "setsid "])
def test_the_lock_is_given_back_after_the_last_inner_run(site, leaves):
    outer = site.outer(f"{leaves}{AIOLOCK} run x {site.work('a')} & {site.begun}; echo over")
    site.began("a")
    assert outer.line() == "over"
    second = site.shell.start("run", "x", site.work("b"))
    site.shell.waiting("x", 1)
    assert site.shell.run("run", "-n", "x", "true")[0] == 1
    assert site.lines() == ["begin a"]
    assert outer.process.poll() is None
    site.go()
    assert (outer.end()[0], second.end()[0]) == (0, 0)
    assert site.lines() == ["begin a", "end a", "begin b", "end b"]
    assert site.shell.unused("x")


def test_readers_inside_work_together_and_a_writer_waits_for_them(site):
    outer = site.outer(
        f"{AIOLOCK} run -s x {site.work('a')} & {AIOLOCK} run -s x {site.work('b')} & wait", "-x"
    )
    site.began("a")
    site.began("b")
    site.go()
    assert outer.end()[0] == 0


def test_runs_nest_to_any_depth(site):
    script = f"{AIOLOCK} run -n x -- {AIOLOCK} run -n x -- {AIOLOCK} run -n x -- sh -c 'echo $AIOLOCK_TOKEN; exit 5'"
    status, out, err = site.outer(f"echo $AIOLOCK_TOKEN; {script}").end()
    assert (status, err) == (5, "")
    assert len(set(out.split())) == 1


@pytest.mark.parametrize("leaves", ["", "setsid "])
def test_whoever_kills_the_outer_run_ends_the_inner_ones(site, leaves):
    outer = site.outer(f"{leaves}{AIOLOCK} run x {site.work('a')} & sleep 100", "--ttl", "3")
    pid = site.began("a")
    # Its own process, behind `env`, which has become it.
    os.kill(outer.pid, signal.SIGKILL)
    second = site.shell.start("run", "x", site.work("b"))
    site.began("b")
    assert gone(pid)
    site.go()
    assert second.end()[0] == 0
    assert "end a" not in site.lines()


@pytest.mark.parametrize("leaves", ["", "setsid "])
def test_an_inner_run_that_is_killed_leaves_no_command_and_no_hold(site, leaves):
    outer = site.outer(
        f"{leaves}{AIOLOCK} run x {site.work('a')} & {site.begun}; {AIOLOCK} run x {site.work('b')}; wait"
    )
    pid = site.began("a")
    supervisor = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(supervisor, signal.SIGKILL)
    site.began("b")
    assert gone(pid)
    site.go()
    assert outer.end()[0] == 0
    assert site.lines() == ["begin a", "begin b", "end b"]


@pytest.mark.parametrize("leaves", ["", "setsid "])
def test_a_loss_stops_the_inner_runs_before_the_next_holder(site, leaves):
    outer = site.outer(
        f"{leaves}{AIOLOCK} run --on-loss kill x {site.work('a')} & {site.begun}", "--ttl", "3"
    )
    pid = site.began("a")
    os.kill(outer.pid, signal.SIGSTOP)
    second = site.shell.start("run", "x", site.work("b"))
    site.began("b")
    assert gone(pid)
    os.kill(outer.pid, signal.SIGCONT)
    assert outer.end()[0] == 75
    site.go()
    assert second.end()[0] == 0


@pytest.mark.parametrize("expires", [True, False])
async def test_an_inner_run_that_ends_after_the_hold_is_told_from_one_that_ended_before(expires):
    """The outer run may have stood still meanwhile, and sees the end of its command, the loss and this end at once."""
    async with aiolock.connect("memory://") as client:
        lease = await client.lock("x", max_hold=0.5 if expires else None).acquire()
        runs = InnerRuns(lease, SignalQueue())
        async with runs as address:
            entry = Entry("", lease.token, MUTEX.mode.value, 1, address)
            inner = await borrow(entry, MUTEX, "x", 10)
            assert inner is not None
            if expires:
                await lease.wait_lost()
            await inner.release()
            async with asyncio.timeout(20):
                while len(runs):
                    await runs._queue.wait(20)
        assert runs.outlived == expires


def test_a_forced_release_reaches_the_inner_runs(site):
    outer = site.outer(f"setsid {AIOLOCK} run --json x {site.work('a')} & {site.begun}")
    pid = site.began("a")
    assert site.shell.run("force-release", "--yes", "x")[0] == 0
    until(lambda: gone(pid), "the inner command goes on")
    status, _, err = outer.end()
    assert status == 75
    told = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
    assert [event["reason"] for event in told if event["event"] == "lost"] == ["force-released"]


def test_a_signal_ends_inner_runs_that_are_left(site):
    outer = site.outer(f"{AIOLOCK} run x {site.work('a')} & {site.begun}; echo over")
    pid = site.began("a")
    assert outer.line() == "over"

    def ended() -> bool:
        outer.send(signal.SIGTERM)
        return gone(pid)

    until(ended, "the inner command goes on")
    outer.end()
    assert site.shell.unused("x")


def test_the_word_of_an_outer_run_that_has_ended_counts_for_nothing(site):
    held = site.outer("echo $AIOLOCK_HELD").end()[1].strip()
    holder = site.shell.start("run", "x", site.work("a"))
    site.began("a")
    for old in (
        held,
        held.replace("/s", "/none"),
        f"{held}\u00b2",
        held.rpartition(":")[0],
        held + " : :::: ::::",
    ):
        assert site.shell.run("run", "-n", "x", "true", environment={"AIOLOCK_HELD": old})[0] == 1
    site.go()
    assert holder.end()[0] == 0
