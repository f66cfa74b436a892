"""`aiolock run` inside `aiolock run` of the same lock is refused where it would wait for itself, and is any other run elsewhere."""

from __future__ import annotations

import subprocess
import sys

import pytest

AIOLOCK = f"{sys.executable} -m aiolock"


@pytest.mark.parametrize("patience", ["", "-n", "-w 5", "-n -E 9"])
def test_a_run_that_would_wait_for_itself_is_refused_at_once(shell, patience):
    script = f"{AIOLOCK} run {patience} x echo inside; echo $?"
    status, out, err = shell.run("run", "--label", "night job", "x", "sh", "-c", script)
    assert (status, out) == (0, "64\n")
    [line] = err.splitlines()
    assert line.startswith("aiolock: 'x' is held by the run around this one (night job at ")
    assert "wait for itself: call the command without aiolock here" in line
    assert shell.unused("x")


@pytest.mark.parametrize(
    ("outer", "inner", "remedy"),
    [
        ("-x", "-x", "call the command without aiolock here"),
        ("-x", "-s", "call the command without aiolock here"),
        ("-s", "-x", "use -x for the outer run"),
        ("-s", "-s", ""),
        ("--permits=1/3", "--permits=3/3", "ask for fewer permits"),
        ("--permits=1/3", "--permits=2/3", ""),
        ("-x", "--permits=1/1", ""),
        ("-x", "", ""),
        ("", "-x", ""),
    ],
)
def test_modes_that_exclude_each_other_are_refused_and_others_are_ordinary_runs(shell, outer, inner, remedy):
    script = f"{AIOLOCK} run {inner} x echo inside; echo $?"
    status, out, err = shell.run("run", *outer.split(), "x", "--", "sh", "-c", script)
    assert (status, out) == (0, "64\n" if remedy else "inside\n0\n")
    assert remedy in err
    assert bool(err) == bool(remedy)


def test_every_hold_around_it_counts(shell):
    """The lock of the outermost run, and the permits of two runs together."""
    between = f"{AIOLOCK} run between -- {AIOLOCK} run x true"
    assert shell.run("run", "x", "--", *between.split())[0] == 64
    between = f"{AIOLOCK} run --permits 1/3 s -- {AIOLOCK} run --permits 2/3 s -- echo inside"
    assert shell.run("run", "--permits", "1/3", "s", "--", *between.split())[0] == 64


def test_other_locks_are_ordinary_runs(shell):
    script = f"{AIOLOCK} run -n x --namespace other echo one && {AIOLOCK} run -n y echo two"
    assert shell.run("run", "x", "sh", "-c", script) == (0, "one\ntwo\n", "")


def test_json_names_the_error(shell):
    status, out, err = shell.run("run", "x", "--", *AIOLOCK.split(), "run", "--json", "x", "true")
    assert (status, out) == (64, "")
    assert '"error": "ConfigError"' in err


def test_what_outlived_its_run_is_not_inside(shell):
    """A daemon has the environment of a run that is long over: it waits as any other, for whatever holder there is."""
    held = shell.run("run", "x", "sh", "-c", "echo $AIOLOCK_HELD")[1].strip()
    assert len(held.split()) == 1
    daemon = {"AIOLOCK_HELD": held}
    assert shell.run("run", "-n", "x", "echo", "free", environment=daemon) == (0, "free\n", "")
    holder = shell.start("run", "x", "sh", "-c", "echo in; read line", stdin=subprocess.PIPE)
    assert holder.line() == "in"
    assert shell.run("run", "-n", "x", "true", environment=daemon)[0] == 1
    waiter = shell.start("run", "x", "echo", "later", environment=daemon)
    shell.waiting("x", 1)
    holder.end("\n")
    assert waiter.end() == (0, "later\n", "")


@pytest.mark.parametrize(
    "word", ["", "x y:z : :1:2:3", "0e:1", "{}:²", "{}:", "{}:-1", "{}:1:mutex:1:/tmp/s"]
)
def test_what_no_run_wrote_counts_for_nothing(shell, word):
    held = shell.run("run", "x", "sh", "-c", "echo $AIOLOCK_HELD")[1].strip()
    script = f'AIOLOCK_HELD="{word.format(held)}" {AIOLOCK} run -n x true; echo $?'
    assert shell.run("run", "x", "sh", "-c", script)[1] == "1\n"


def test_nothing_is_written_to_the_file_system(shell, tmp_path):
    """No directory for temporary files is needed: a container may be read-only, and a disk full."""
    nowhere = {"TMPDIR": str(tmp_path / "none")}
    program = (
        "import os, runpy, sys, tempfile\n"
        "def refuse(*_, **__): raise OSError(30, 'Read-only file system')\n"
        "def audit(event, given):\n"
        "    if event in ('os.mkdir', 'socket.bind'): refuse()\n"
        "    if event == 'open' and isinstance(given[2], int) and given[2] & os.O_CREAT: refuse()\n"
        "sys.dont_write_bytecode = True\n"
        "sys.addaudithook(audit)\n"
        "sys.argv = ['aiolock', 'run', 'x', 'echo', 'ran']\n"
        "runpy.run_module('aiolock', run_name='__main__')\n"
    )
    environment = {**shell.environment, **nowhere}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ran\n", "")
