"""The lock is lost while the command runs: it is dead before another can hold the lock, also if aiolock cannot see to it."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import aiolock
from aiolock.cli.output import Output
from aiolock.cli.run.guard import Reach
from aiolock.cli.run.signals import SignalQueue, Terminal
from aiolock.cli.run.supervisor import Child, Supervisor, Switch
from aiolock.clock import system_clock
from tests.cli.conftest import until, waits_for_a_signal
from tests.faults.staging import passes, verdict

TTL = 3.0

STUBBORN = """\
trap '' TERM
echo $$
i=0
while [ $i -lt 100000 ]; do
  cut -d' ' -f1 /proc/uptime > "$1.new" && mv "$1.new" "$1"
  sleep 0.02
done
"""
"""Does not listen, and keeps a file that says until when it lived, on the clock that holders go by."""


def uptime() -> float:
    return float(Path("/proc/uptime").read_text().split()[0])


def stubborn(shell, path: Path, *options: str):
    program = shell.start(
        "run", "--ttl", str(TTL), *options, "x", "--", "sh", "-c", STUBBORN, "sh", str(path)
    )
    pid = int(program.line())
    while not path.exists():
        assert program.process.poll() is None
        time.sleep(0.01)
    return program, pid


def test_the_command_is_asked_to_stop_while_the_lock_is_still_held(alone):
    command = waits_for_a_signal("TERM", status=0)
    program = alone.start("run", "--ttl", str(TTL), "--kill-after", "1", "x", "--", *command)
    assert program.line() == "ready"
    alone.redis.freeze()
    frozen = uptime()
    assert program.line() == "got SIGTERM"
    # The server counts from the last renewal that it got, which was before it stood still.
    assert uptime() < frozen + TTL
    status, _, err = program.end()
    assert status == 75
    assert re.search(
        r"aiolock: stopping the command, which has [01]\.\d s left: lock 'x' could not be renewed", err
    )


@pytest.mark.parametrize("policy", ["term", "kill"])
def test_a_command_that_does_not_listen_is_dead_before_another_can_hold_the_lock(alone, tmp_path, policy):
    program, pid = stubborn(alone, tmp_path / "alive", "--on-loss", policy)
    alone.redis.freeze()
    frozen = uptime()
    status, _, err = program.end()
    assert status == 75
    assert not Path(f"/proc/{pid}").exists()
    assert float((tmp_path / "alive").read_text()) < frozen + TTL
    assert ("stopping" in err) is (policy == "term")
    assert "killing the command" in err


def test_a_lock_that_can_be_renewed_again_is_not_lost(alone):
    program = alone.start(
        "run", "--ttl", "6", "--kill-after", "0.5", "x", "--", "sh", "-c", "echo ready; read line",
        stdin=subprocess.PIPE,
    )  # fmt: skip
    assert program.line() == "ready"
    alone.redis.freeze()
    # Renewals come every two seconds: one of them has no answer in time.
    time.sleep(2.2)
    alone.redis.thaw()
    until(lambda: alone.look("x").holders[0].remaining > 5, "it is not renewed")
    assert program.end("\n") == (0, "", "")


def test_warn_lets_the_command_go_on(alone):
    program = alone.start(
        "run", "--json", "--ttl", "2", "--on-loss", "warn", "x", "--", "sh", "-c", "echo ready; read line; exit 4",
        stdin=subprocess.PIPE,
    )  # fmt: skip
    assert program.line() == "ready"
    alone.redis.freeze()
    told = ""
    while '"lost"' not in told:
        told = program.complaint()
    assert json.loads(told)["reason"] == "expired"
    assert "goes on without the lock" in told
    alone.redis.thaw()
    assert program.end("\n")[:2] == (4, "")


def test_a_lock_that_is_taken_away_by_force_stops_the_command(shell):
    program = shell.start("run", "x", "--", *waits_for_a_signal("TERM", status=3))
    assert program.line() == "ready"
    status, out, err = shell.run("force-release", "x")
    assert (status, err) == (0, "")
    assert "was taken from" in out
    assert program.line() == "got SIGTERM"
    status, _, err = program.end()
    assert status == 75
    assert "lock 'x' was lost (force-released)" in err
    assert shell.unused("x")


@pytest.mark.parametrize("policy", ["term", "kill"])
def test_after_force_a_command_that_does_not_listen_is_killed_as_well(shell, tmp_path, policy):
    program, _ = stubborn(shell, tmp_path / "alive", "--kill-after", "0.2", "--on-loss", policy)
    assert shell.run("force-release", "x")[0] == 0
    status, _, err = program.end()
    assert status == 75
    assert ("stopping the command" in err) is (policy == "term")
    assert "killing the command, lock 'x' was lost (force-released)" in err


def test_a_hold_that_is_gone_without_warning_is_the_end_at_once(alone):
    program = alone.start("run", "--ttl", "4", "x", "--", "sh", "-c", "trap '' TERM; echo ready; sleep 1000")
    assert program.line() == "ready"
    # A server without persistence has forgotten everything.
    alone.redis.restart()
    status, _, err = program.end()
    assert status == 75
    assert "killing the command, lock 'x' was lost (revoked)" in err


def test_a_stopped_aiolock_does_not_keep_the_command_alive(shell, tmp_path):
    program, pid = stubborn(shell, tmp_path / "alive")
    os.kill(program.pid, signal.SIGSTOP)
    stopped = uptime()
    # Its children are not reaped while it is stopped.
    stat = Path(f"/proc/{pid}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert uptime() < stopped + 30
        time.sleep(0.01)
    assert float((tmp_path / "alive").read_text()) < stopped + TTL
    os.kill(program.pid, signal.SIGCONT)
    assert program.end()[0] == 75


async def test_the_guard_knows_the_command_from_its_first_moment():
    switch = await Switch.start("")
    child = await Child.start(["sleep", "1000"], os.environ, foreground=False, switch=switch)
    # As if we had been killed before the next step.
    os.close(switch.pipe)
    try:
        assert await switch._process.wait() == 0
        assert await child.wait() == -signal.SIGKILL
    finally:
        child.send(signal.SIGKILL)


async def test_a_command_that_begins_after_the_end_of_the_lock_is_killed():
    """As if we had stood still in between."""
    switch = await Switch.start("")
    switch.until(system_clock())
    child = await Child.start(["sleep", "1000"], os.environ, foreground=False, switch=switch)
    try:
        async with asyncio.timeout(30):
            assert await child.wait() == -signal.SIGKILL
    finally:
        child.send(signal.SIGKILL)
        await switch.stop()


class Ending:
    """A command that the guard kills, and its lease, which ends in the same moment."""

    pid = 0
    ttl = 3.0
    name = "x"
    token = 17
    left = 2.0

    def remaining(self) -> float:
        return self.left

    def check(self) -> None:
        pass

    async def wait(self) -> int:
        self.left = 0.0
        return -signal.SIGKILL

    async def wait_lost(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def kill(self) -> Reach:
        return Reach.GONE


@pytest.mark.parametrize(("guarded", "status"), [(True, 75), (False, 137)])
async def test_a_command_that_the_guard_has_killed_was_stopped_for_the_lock(guarded, status):
    """Also if its end is heard before that of the lease."""
    switch = await Switch.start("") if guarded else None
    told = io.StringIO()
    ending = Ending()
    supervisor = Supervisor(
        ending, ending, SignalQueue(), Terminal(), switch, Output(err=told), kill_after=0.5,
        policy="term" if guarded else "warn",
    )  # fmt: skip
    try:
        assert await supervisor.run() == status
    finally:
        if switch is not None:
            await switch.stop()
    assert ("the command was killed, because lock 'x' had ended" in told.getvalue()) is guarded


@pytest.mark.parametrize(("left", "kill_after"), [(30.0, 5.0), (6.0, 3.0)])
def test_a_server_with_shorter_terms_shortens_the_time_to_die(left, kill_after):
    ending = Ending()
    ending.left = left
    supervisor = Supervisor(
        ending, ending, SignalQueue(), Terminal(), None, Output(), kill_after=5.0, policy="term"
    )
    assert supervisor._kill_after == kill_after


class Obeying:
    """A command that ends when it is told to."""

    pid = 0

    def __init__(self) -> None:
        self.told: list[int] = []
        self._ended = asyncio.Event()

    async def wait(self) -> int:
        await self._ended.wait()
        return 0

    def send(self, number: int) -> Reach:
        self.told.append(number)
        self._ended.set()
        return Reach.GONE

    async def kill(self) -> Reach:
        return Reach.GONE


@pytest.mark.parametrize("later", range(6))
async def test_a_command_may_end_in_good_order_whatever_else_happens_in_the_moment_of_force(later):
    """As when it is time to look at the lock, and the loss has not been told to everybody yet."""
    queue, child = SignalQueue(), Obeying()
    async with aiolock.connect("memory://") as client:
        lease = await client.lock("x").acquire()
        supervisor = Supervisor(
            child, lease, queue, Terminal(), None, Output(err=io.StringIO()), kill_after=10, policy="term"
        )
        running = asyncio.create_task(supervisor.run())
        await passes(10)
        queue.wake.set()
        await passes(later)
        verdict(lease, "force-released")
        assert await running == 75
    assert child.told[0] == signal.SIGTERM


def test_children_of_the_command_do_not_outlive_the_lock(alone):
    script = "(trap '' TERM; sleep 1000; :) & echo ready; wait"
    program = alone.start("run", "--ttl", "2", "x", "--", "sh", "-c", script)
    assert program.line() == "ready"
    alone.redis.freeze()
    assert program.process.wait(30) == 75
    alone.all_end()


def test_a_lock_that_was_won_by_waiting_is_kept(shell):
    """A grant that is pushed is short; the command must not be stopped for that."""
    holder = shell.start("run", "x", "sh", "-c", "echo in; read line", stdin=subprocess.PIPE)
    assert holder.line() == "in"
    waiter = shell.start("run", "--ttl", "9", "--kill-after", "3", "x", "sh", "-c", "sleep 0.6; echo mine")
    shell.waiting("x", 1)
    holder.end("\n")
    assert waiter.end() == (0, "mine\n", "")


def test_too_long_for_the_ttl_is_refused(offline):
    status, _, err = offline.run(
        "run", "--url", "redis://127.0.0.1:1", "--ttl", "6", "--kill-after", "3", "x", "true"
    )
    assert status == 64
    assert "--kill-after 3 needs a --ttl of at least 9" in err


# --- a command that is not ours to kill

WITHOUT_RIGHTS = ["setpriv", "--bounding-set", "-kill", "--inh-caps", "-kill"]
AS_ANOTHER = ["setpriv", "--reuid", "65534", "--clear-groups"]

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a program of another user")


def beyond_us(shell, path: Path, *options: str):
    """A run that may not kill its command, which goes on until `path` is there."""
    script = f"echo in; while [ -d {path.parent} -a ! -e {path} ]; do sleep 0.05; done"
    words = ["run", "--ttl", str(TTL), *options, "x", "--", *AS_ANOTHER, "sh", "-c", script]
    process = shell.start(*words, before=WITHOUT_RIGHTS)
    assert process.line() == "in"
    return process


@pytest.fixture
def stopper():
    """A file that a program of another user can see."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = Path(folder) / "stop"
        yield path
        # Whatever happened, it ends.
        path.touch()


@only_root
@pytest.mark.parametrize("options", [[], ["--json"], ["--on-loss", "kill"]], ids=" ".join)
def test_a_command_that_cannot_be_killed_is_said_loudly(alone, stopper, options):
    process = beyond_us(alone, stopper, *options)
    alone.redis.freeze()
    while "CANNOT BE KILLED" not in (output := process.complaint()):
        pass
    if options == ["--json"]:
        told = json.loads(output)
        assert (told["event"], told["unstoppable"], told["name"]) == ("lost", True, "x")
    # It is waited for all the same.
    assert process.process.poll() is None
    stopper.touch()
    status, _, err = process.end()
    assert (status, "CANNOT" in err) == (75, False)


@only_root
def test_a_part_of_the_command_that_cannot_be_killed_is_said_as_well(alone, stopper):
    script = f"{' '.join(AS_ANOTHER)} sh -c 'echo in; while [ -d {stopper.parent} -a ! -e {stopper} ]; do sleep 0.05; done' & wait"
    process = alone.start("run", "--ttl", "2", "x", "--", "sh", "-c", script, before=WITHOUT_RIGHTS)
    assert process.line() == "in"
    alone.redis.freeze()
    while "CANNOT BE KILLED" not in process.complaint():
        pass
    assert process.process.wait(30) == 75
    stopper.touch()
    process.end()


@only_root
def test_a_killed_aiolock_leaves_word_of_what_cannot_be_killed(shell, stopper):
    process = beyond_us(shell, stopper)
    process.process.kill()
    while "CANNOT BE KILLED" not in process.complaint():
        pass
    stopper.touch()
    process.end()


@only_root
def test_a_signal_that_cannot_be_passed_on_is_not_silent(shell, stopper):
    process = beyond_us(shell, stopper)
    process.send(signal.SIGTERM)
    assert "cannot be sent SIGTERM" in process.complaint()
    stopper.touch()
    assert process.end()[0] == 0


FORGET = """\
import sys, redis
driver = redis.Redis.from_url(sys.argv[1])
keys = list(driver.scan_iter(match=f"*{sys.argv[2]}*"))
assert len(keys) >= 1
driver.delete(*keys)
sys.exit(int(sys.argv[3]))
"""
"""Deletes the lock under which it runs, as lost data would."""


@pytest.mark.parametrize(
    ("status", "policy", "expected"), [(0, "term", 75), (3, "term", 3), (0, "kill", 75), (0, "warn", 0)]
)
def test_a_loss_that_only_the_release_finds_is_said_and_ends_a_success_with_75(
    shell, status, policy, expected
):
    url = shell.environment["AIOLOCK_URL"]
    command = (sys.executable, "-c", FORGET, url, shell.namespace, str(status))
    found, _, err = shell.run("run", "--ttl", "30", "--on-loss", policy, "x", "--", *command)
    assert found == expected, err
    assert "lock 'x' was lost before the command had ended" in err
