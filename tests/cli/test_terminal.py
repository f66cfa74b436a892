"""In a terminal: Ctrl-C, job control, progress while waiting, the live table."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

from tests.cli.conftest import waits_for_a_signal

AIOLOCK = f"{sys.executable} -m aiolock"
BASH = ["bash", "--norc", "--noediting", "-i"]


@pytest.fixture
def bash(shell):
    shell.environment["PS1"] = "ready> "
    shell.environment["A"] = AIOLOCK
    shell.environment["BASH_SILENCE_DEPRECATION_WARNING"] = "1"
    screen = shell.screen(command=BASH)
    screen.until("ready> ")
    screen.shell = shell
    return screen


def test_the_command_has_the_terminal(bash):
    bash.type(
        """$A run x -- sh -c 'test -t 0 && echo is $((1+1)); read a; echo "got:$a"'; echo status $?\n"""
    )
    bash.until("is 2")
    bash.type("hello\n")
    bash.until("got:hello")
    bash.until("status 0")
    # And the shell has it back.
    bash.type("echo $((20+3))\n")
    bash.until("23")


def test_ctrl_c_reaches_the_command(bash):
    bash.type("$A run x -- sh -c 'echo is $((1+1)); exec sleep 100'\n")
    bash.until("is 2")
    bash.type("\x03")
    bash.until("ready> ")
    bash.type("echo status $?\n")
    bash.until("status 130")
    assert bash.shell.unused("x")


@pytest.mark.parametrize("program", ["bash", "dash"])
def test_ctrl_c_ends_the_script_around_it(shell, program, tmp_path):
    script = tmp_path / "script"
    script.write_text(
        f"for i in 1 2 3; do {AIOLOCK} run x -- sh -c 'echo in $((i+40)); exec sleep 100'; done; echo went on\n"
    )
    screen = shell.screen(command=[program, str(script)])
    screen.until("in 4")
    screen.type("\x03")
    status, rest = screen.end()
    assert "went on" not in rest
    assert "in 4" not in rest
    assert status in (-signal.SIGINT, 130)
    assert shell.unused("x")


def test_a_script_goes_on_if_the_command_has_a_use_for_ctrl_c(shell, tmp_path):
    script = tmp_path / "script"
    command = shlex.join(waits_for_a_signal("INT", status=3))
    script.write_text(f"{AIOLOCK} run x -- {command}; echo went on $?\n")
    screen = shell.screen(command=["bash", str(script)])
    screen.until("ready")
    screen.type("\x03")
    screen.until("got SIGINT.*went on 3")
    assert screen.end()[0] == 0


def test_ctrl_c_while_waiting_ends_the_script_around_it(shell, tmp_path):
    holder = shell.start("run", "x", "sh", "-c", "echo in; read line", stdin=subprocess.PIPE)
    assert holder.line() == "in"
    script = tmp_path / "script"
    script.write_text(f"{AIOLOCK} run x -- echo never; echo went on\n")
    screen = shell.screen(command=["bash", str(script)])
    screen.until("waiting")
    screen.type("\x03")
    status, rest = screen.end()
    assert (status, "went on" in rest) == (-signal.SIGINT, False)
    holder.end("\n")


def test_ctrl_z_stops_the_job_and_fg_goes_on(bash):
    bash.type("""$A run x -- sh -c 'echo is $((1+1)); read a; echo "got:$a"'\n""")
    bash.until("is 2")
    bash.type("\x1a")
    bash.until("Stopped")
    bash.until("ready> ")
    bash.type("fg\n")
    bash.until("run x")
    bash.type("hello\n")
    bash.until("got:hello")
    bash.until("ready> ")


def test_two_locks_around_one_command_stop_and_end_with_it(bash):
    script = """echo is $((1+1)); read a; echo "got:$a"; exec sleep 100"""
    bash.type(f"$A run x -- $A run y -- sh -c '{script}'\n")
    bash.until("is 2")
    bash.type("\x1a")
    bash.until("Stopped")
    bash.until("ready> ")
    bash.type("fg\n")
    bash.until("run x")
    bash.type("hello\n")
    bash.until("got:hello")
    bash.type("\x03")
    bash.until("ready> ")
    bash.type("echo status $?\n")
    bash.until("status 130")
    assert bash.shell.unused("x")
    assert bash.shell.unused("y")


def test_a_job_in_the_background_waits_for_the_terminal(bash):
    bash.type("""$A run x -- sh -c 'read a; echo "got:$a"' &\n""")
    bash.until("ready> ")
    # The shell tells of it before its next prompt.
    while True:
        bash.type("jobs\n")
        if "Stopped" in bash.until("(Stopped|Running).*ready> "):
            break
    bash.type("fg\n")
    bash.until("run x")
    bash.type("hello\n")
    bash.until("got:hello")


def test_in_a_pipeline_the_command_gets_the_terminal_when_it_wants_it(bash):
    bash.type("""$A run x -- sh -c 'read a; echo "got:$a"' | cat; echo status $?\n""")
    bash.until("cat; echo")
    bash.type("hello\n")
    bash.until("got:hello")
    bash.until("status 0")


def test_a_job_that_was_stopped_for_too_long_does_not_go_on(bash):
    # By reading it waits itself: a shell that is stopped while it starts a program does not say so to anybody.
    bash.type("$A run --ttl 2 --kill-after 0.2 x -- sh -c 'echo is $((1+1)); read a; echo never $((2+2))'\n")
    bash.until("is 2")
    bash.type("\x1a")
    bash.until("Stopped")
    bash.shell.run("run", "x", "true")
    bash.type("fg; echo status $?\n")
    assert "never 4" not in bash.until("status 75")


def test_a_killed_command_leaves_a_usable_terminal(bash):
    bash.type(
        "$A run x -- sh -c 'stty -echo raw; echo is $((1+1)); kill -9 $$'; stty -a | tr ';' '\\n' | grep -w echo\n"
    )
    bash.until("is 2")
    assert "-echo " not in bash.until(r"echok.*\n")


def test_waiting_shows_the_place_the_holder_and_for_how_long(shell):
    holder = shell.start(
        "run", "--label", "night job", "x", "sh", "-c", "echo in; read line", stdin=subprocess.PIPE
    )
    assert holder.line() == "in"
    screen = shell.screen("run", "x", "--", "echo", "mine")
    screen.until(r"waiting for 'x' for \d+\.\d s, position 1 of 1; held by night job at \S+ for \d+")
    holder.end("\n")
    screen.until("mine")
    assert screen.end()[0] == 0


def test_ctrl_c_while_waiting(shell):
    holder = shell.start("run", "x", "sh", "-c", "echo in; read line", stdin=subprocess.PIPE)
    assert holder.line() == "in"
    screen = shell.screen("run", "x", "--", "echo", "never")
    screen.until("waiting")
    screen.type("\x03")
    status, rest = screen.end()
    assert status == -signal.SIGINT
    assert "Traceback" not in rest
    holder.end("\n")


def test_on_a_terminal_it_is_said_that_the_lock_was_not_free(shell):
    holder = shell.start("run", "x", "sh", "-c", "echo in; read line", stdin=subprocess.PIPE)
    assert holder.line() == "in"
    screen = shell.screen("run", "-n", "x", "true")
    screen.until("lock 'x' was not free")
    assert screen.end()[0] == 1
    holder.end("\n")


# --- watch


def test_the_live_table(shell):
    screen = shell.screen("watch", "--interval", "0.2", columns=70, rows=8)
    screen.until(re.escape("\x1b[?1049h"))
    screen.until("0 held, 0 waiting")
    holder = shell.start(
        "run", "--label", "night job", "x", "sh", "-c", "echo in; read line", stdin=subprocess.PIPE
    )
    screen.until("1 held")
    screen.until("night job")
    screen.resize(60, 4)
    os.kill(screen.pid, signal.SIGWINCH)
    # Too narrow for all of it: what people look for stays.
    screen.until(r"NAME  KIND  HOLDER +HELD  WAITING.*x +lock  night job at \S+ +")
    assert holder.line() == "in"
    holder.end("\n")
    screen.until("0 held")
    screen.type("\x03")
    status, rest = screen.end()
    assert status == 0
    # The cursor and what was there before are back.
    assert rest.endswith("\x1b[?25h\x1b[?1049l")


def test_the_table_is_restored_when_watch_is_killed_politely(shell):
    screen = shell.screen("watch")
    screen.until("0 held")
    os.kill(screen.pid, signal.SIGTERM)
    status, rest = screen.end()
    assert status == 143
    assert rest.endswith("\x1b[?25h\x1b[?1049l")


def test_ctrl_z_gives_the_terminal_back_and_fg_paints_again(bash):
    bash.type("$A watch --interval 0.2\n")
    bash.until(re.escape("\x1b[?1049h") + ".*0 held")
    bash.type("\x1a")
    # First the cursor and the page, then the stop.
    bash.until(re.escape("\x1b[?25h\x1b[?1049l") + ".*Stopped")
    bash.until("ready> ")
    bash.type("fg\n")
    bash.until(re.escape("\x1b[?1049h") + ".*0 held")
    bash.type("\x03")
    bash.until("ready> ")


def test_watch_hears_ctrl_c_while_the_server_does_not_answer(alone):
    screen = alone.screen("watch", "--interval", "0.1")
    screen.until("0 held.*0 held")
    alone.redis.freeze()
    # An answer is awaited for five seconds, and what is asked after that as well.
    time.sleep(0.5)
    start = time.monotonic()
    screen.type("\x03")
    assert screen.end()[0] == 0
    assert time.monotonic() - start < 4.5


def test_the_table_follows_the_terminal_and_not_its_past(shell):
    command = ["env", "COLUMNS=100", "LINES=24", *AIOLOCK.split(), "watch", "--interval", "0.2"]
    screen = shell.screen(command=command, columns=20, rows=6)
    screen.until("0 held")
    assert "…" in screen.until("Ctrl|…")


def test_ctrl_c_at_the_question_is_the_end_at_once(shell):
    holder = shell.start("run", "x", "sh", "-c", "echo in; read line", stdin=subprocess.PIPE)
    assert holder.line() == "in"
    screen = shell.screen("force-release", "x")
    screen.until(r"\[y/N\] ")
    screen.type("\x03")
    # Nobody types a line.
    status, rest = screen.end()
    assert (status, "Traceback" in rest) == (-signal.SIGINT, False)
    assert holder.end("\n")[0] == 0


# --- colours


def test_colours_are_for_terminals_that_want_them(shell):
    holder = shell.start("run", "x", "sh", "-c", "echo in; read line", stdin=subprocess.PIPE)
    assert holder.line() == "in"
    assert "\x1b" not in shell.run("ls")[1]
    assert "\x1b[1m" in shell.screen("ls").end()[1]
    shell.environment["NO_COLOR"] = "1"
    assert "\x1b[" not in shell.screen("ls").end()[1]
    holder.end("\n")


def test_a_demonstration_shows_what_went_wrong_in_colour(shell):
    status, text = shell.screen("demo", "--url", "memory://").end()
    assert status == 0
    assert "\x1b[1m1. Three workers" in text
    assert re.search(r"\x1b\[31mwrites with token \d+: REFUSED", text)
