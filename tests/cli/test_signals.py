"""Signals: forwarded to the command, heard while waiting, and what a killed aiolock leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aiolock.cli.run.supervisor import Child
from tests.cli.conftest import PATIENCE, until, waits_for_a_signal

NAMES = ["TERM", "INT", "HUP", "QUIT", "USR1", "USR2"]


@pytest.mark.parametrize("name", [*NAMES, "WINCH"])
def test_signals_reach_the_command(shell, name):
    program = shell.start("run", "x", *waits_for_a_signal(name, status=5))
    assert program.line() == "ready"
    program.send(getattr(signal, f"SIG{name}"))
    assert program.line() == f"got SIG{name}"
    assert program.end() == (5, "", "")


def test_a_signal_that_kills_the_command_is_its_status(shell):
    program = shell.start("run", "x", "sh", "-c", "echo ready; sleep 100; echo not reached")
    assert program.line() == "ready"
    program.send(signal.SIGTERM)
    # The whole group has got it, so nobody waits for the sleep.
    assert program.end() == (143, "", "")
    assert shell.unused("x")


def test_a_signal_while_waiting_leaves_the_queue(shell):
    holder = shell.start("run", "x", "sh", "-c", "echo in; read line", stdin=subprocess.PIPE)
    assert holder.line() == "in"
    waiters = {name: shell.start("run", "x", "echo", "never") for name in NAMES}
    shell.waiting("x", len(NAMES))
    for name, waiter in waiters.items():
        waiter.send(getattr(signal, f"SIG{name}"))
    for name, waiter in waiters.items():
        number = getattr(signal, f"SIG{name}")
        # Of what a terminal sends a shell has to see that we died of it; to its user that is 128 + n as well.
        assert waiter.end() == (-number if name in ("INT", "QUIT") else 128 + number, "", "")
    info = shell.look("x")
    assert (len(info.holders), len(info.waiters)) == (1, 0)
    holder.end("\n")


def test_what_was_ignored_stays_ignored(shell):
    """As under nohup."""
    script = "echo ready; read line; kill -HUP $$; echo survived"
    program = shell.start(
        "run", "x", "sh", "-c", script, before=["env", "--ignore-signal=HUP"], stdin=subprocess.PIPE
    )
    assert program.line() == "ready"
    program.send(signal.SIGHUP)
    assert program.end("\n") == (0, "survived\n", "")


def test_the_command_has_the_usual_answers_to_signals(shell):
    status, out, _ = shell.run("run", "x", "grep", "-E", "SigBlk|SigIgn", "/proc/self/status")
    assert status == 0
    # The last bit that counts is that of signal 31: those above are the C library's own, or nobody's.
    assert {line.split()[0]: int(line.split()[1], 16) & 0x7FFFFFFF for line in out.splitlines()} == {
        "SigBlk:": 0,
        "SigIgn:": 0,
    }


def test_the_command_has_a_group_of_its_own(shell):
    program = shell.start("run", "x", "sh", "-c", "echo $$; read line", stdin=subprocess.PIPE)
    pid = int(program.line())
    assert os.getpgid(pid) == pid != os.getpgid(program.pid)
    assert os.getsid(pid) == os.getsid(program.pid)
    program.end("\n")


@pytest.mark.parametrize("script", ["echo $$; sleep 1000", "echo $$; (sleep 1000; :) & sleep 1000; :"])
def test_a_killed_aiolock_takes_the_command_and_its_children_along(shell, script):
    program = shell.start("run", "x", "sh", "-c", script)
    pid = int(program.line())
    assert Path(f"/proc/{pid}").exists()
    program.process.kill()
    program.process.communicate(timeout=30)
    shell.all_end()


def children(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(stat.parent.name))
    return found


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def test_nothing_of_ours_is_left_when_the_command_has_ended(shell):
    program = shell.start(
        "run", "x", "sh", "-c", "sleep 1000 >/dev/null 2>&1 & echo $!; read line", stdin=subprocess.PIPE
    )
    left = int(program.line())
    [guard] = [pid for pid in children(program.pid) if "guard.py" in command_line(pid)]
    assert program.end("\n") == (0, "", "")
    # What the command leaves behind on purpose lives, without the lock; our guard does not.
    assert not Path(f"/proc/{guard}").exists()
    until(lambda: command_line(left) == "sleep 1000 ", "it does not live")
    assert shell.alive() == ["sleep 1000 "]
    os.kill(left, signal.SIGKILL)
    shell.all_end()


def test_a_stopped_command_goes_on_with_the_next_signal(shell):
    program = shell.start("run", "x", "sh", "-c", "echo $$; read line; echo on", stdin=subprocess.PIPE)
    pid = int(program.line())

    def is_stopped() -> bool:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    program.send(signal.SIGTSTP)
    until(is_stopped, "it does not stop")
    program.send(signal.SIGCONT)
    until(lambda: not is_stopped(), "it does not go on")
    assert program.end("\n")[:2] == (0, "on\n")


STOPS_FIRST = """\
import os, signal, sys
report, guard, parent, terminal, blocked, *command = sys.argv[1:]
os.set_inheritable(int(report), False)
os.setpgid(0, 0)
signal.pthread_sigmask(signal.SIG_SETMASK, [])
os.kill(os.getpid(), signal.SIGSTOP)
os.execvp(command[0], command)
"""


async def test_a_stop_just_before_the_command_begins_is_heard_of(monkeypatch, tmp_path):
    path = tmp_path / "stops_first.py"
    path.write_text(STOPS_FIRST)
    monkeypatch.setattr("aiolock.cli.run.supervisor.PROGRAM", (sys.executable, "-I", "-S", str(path)))
    async with asyncio.timeout(PATIENCE):
        child = await Child.start(["sh", "-c", "exit 3"], os.environ, foreground=False, switch=None)
        while (number := child.stopped_by()) is None:  # noqa: ASYNC110 - a stop is not told
            await asyncio.sleep(0.01)
        assert number == signal.SIGSTOP
        child.send(signal.SIGCONT)
        assert await child.wait() == 3


NO_GROUP_YET = """\
import os, signal, sys, time
report, guard, parent, terminal, blocked, *command = sys.argv[1:]
os.set_inheritable(int(report), False)
while not os.path.exists(command[-1]):
    time.sleep(0.01)
os.setpgid(0, 0)
signal.pthread_sigmask(signal.SIG_SETMASK, [])
os.execvp(command[0], command)
"""


async def test_a_signal_just_before_the_command_begins_is_not_lost(monkeypatch, tmp_path):
    path = tmp_path / "no_group_yet.py"
    path.write_text(NO_GROUP_YET)
    monkeypatch.setattr("aiolock.cli.run.supervisor.PROGRAM", (sys.executable, "-I", "-S", str(path)))
    command = ["sh", "-c", "sleep 1000", "sh", str(tmp_path / "go")]
    async with asyncio.timeout(PATIENCE):
        child = await Child.start(command, os.environ, foreground=False, switch=None)
        child.send(signal.SIGTERM)
        (tmp_path / "go").touch()
        assert await child.wait() == -signal.SIGTERM


def test_a_forwarded_ctrl_c_that_ended_the_command_ends_us_in_the_same_way(shell):
    program = shell.start("run", "--json", "x", "sh", "-c", "echo ready; exec sleep 100")
    assert program.line() == "ready"
    program.send(signal.SIGINT)
    status, out, err = program.end()
    assert (status, out) == (-signal.SIGINT, "")
    # First it is said, and given back.
    assert json.loads(err.splitlines()[-1])["status"] == 130
    assert shell.unused("x")


def test_a_command_that_ends_itself_so_is_only_a_status(shell):
    assert shell.run("run", "x", "sh", "-c", "kill -INT $$; sleep 100") == (130, "", "")


# --- a server that stands still; without the bounds these take five seconds and more


def test_a_waiter_leaves_a_frozen_server_soon(alone):
    holder = alone.start("run", "x", "sh", "-c", "echo in; read line", stdin=subprocess.PIPE)
    assert holder.line() == "in"
    waiter = alone.start("run", "x", "echo", "never")
    alone.waiting("x", 1)
    alone.redis.freeze()
    start = time.monotonic()
    waiter.send(signal.SIGTERM)
    assert waiter.end() == (143, "", "")
    assert time.monotonic() - start < 4.5


def test_what_is_given_back_to_a_frozen_server_has_one_bound(alone):
    program = alone.start("run", "x", "sh", "-c", "echo in; read line; exit 3", stdin=subprocess.PIPE)
    assert program.line() == "in"
    alone.redis.freeze()
    start = time.monotonic()
    assert program.end("\n") == (3, "", "")
    # Release and closing have five seconds each by themselves.
    assert time.monotonic() - start < 9.5


def test_a_signal_ends_the_giving_back(alone):
    program = alone.start("run", "--json", "x", "sh", "-c", "echo in; read line", stdin=subprocess.PIPE)
    assert program.line() == "in"
    alone.redis.freeze()
    program.process.stdin.write("\n")
    program.process.stdin.flush()
    while '"exited"' not in program.complaint():
        pass
    start = time.monotonic()
    program.send(signal.SIGTERM)
    assert program.end()[0] == 143
    assert time.monotonic() - start < 4.5


# --- the first moments


def caught(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return False
    found = next((line for line in lines if line.startswith("SigCgt:")), "SigCgt: 0")
    return bool(int(found.split()[1], 16) >> (number - 1) & 1)


def test_an_interrupt_while_the_command_is_imported_ends_it_without_a_traceback(shell):
    """The interpreter handles SIGINT by an exception, which is a traceback of imports until the command handles it."""
    environment = {**shell.environment, "AIOLOCK_URL": "redis://127.0.0.1:1"}
    for _ in range(20):
        words = [sys.executable, "-m", "aiolock_command", "run", "x", "true"]
        with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE) as process:
            until(lambda: process.poll() is not None or caught(process.pid, signal.SIGINT), "no interpreter")
            give_up = time.monotonic() + 2
            while importing := process.poll() is None and time.monotonic() < give_up:
                if not caught(process.pid, signal.SIGINT):
                    break
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        if importing:
            assert (process.returncode, err) == (-signal.SIGINT, b"")
            return
    pytest.fail("the moment was missed in each of many starts")


def test_signals_that_are_ignored_at_the_start_stay_ignored(shell):
    script = f"trap '' INT TERM; {sys.executable} -m aiolock_command run x -- grep SigIgn /proc/self/status"
    done = subprocess.run(
        ["sh", "-c", script], env=shell.environment, capture_output=True, text=True, check=True
    )
    ignored = int(done.stdout.split()[1], 16)
    assert all(ignored >> (number - 1) & 1 for number in (signal.SIGINT, signal.SIGTERM))
