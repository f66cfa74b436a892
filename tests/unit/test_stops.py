"""A process that is stopped (SIGSTOP) beyond the end of its lease: no step of the work under it runs on waking.

``tests/pythons.sh`` runs this on other Pythons as well.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

STOPS = 5
TTL = 0.3

WORK = f"""
import asyncio, sys, time
import aiolock

async def spin():
    while True:
        await asyncio.sleep(0.0005)
        end = time.perf_counter() + 0.0003
        while time.perf_counter() < end:
            pass

async def block(client):
    late = 0
    try:
        async with client.lock("x", ttl={TTL}) as lease:
            while True:
                print("step", flush=True)
                await asyncio.sleep(0.1)
                late += not lease.held
    except aiolock.LockLost:
        pass
    print(late, flush=True)

async def main(how):
    others = [asyncio.ensure_future(spin()) for _ in range(20 if how == "busy" else 0)]
    async with aiolock.connect("memory://") as client:
        for _ in range({STOPS}):
            await block(client)
    for other in others:
        other.cancel()

loop, how = sys.argv[1:]
if loop == "uvloop":
    import uvloop
    uvloop.run(main(how))
else:
    asyncio.run(main(how))
"""


@contextmanager
def working(loop: str, how: str) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-c", WORK, loop, how]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_until_it_sleeps(process: subprocess.Popen[str]) -> None:
    """Until the process waits in the kernel for its next event."""
    stat = Path(f"/proc/{process.pid}/stat")
    while stat.read_text().rpartition(")")[2].split()[0] != "S":
        time.sleep(0.0005)


def late_steps(loop: str, how: str) -> list[int]:
    """How many steps ran after the end of the lease, for each stop."""
    late = []
    with working(loop, how) as process:
        assert process.stdout is not None
        while len(late) < STOPS:
            line = process.stdout.readline()
            assert line, "the process ended"
            if line != "step\n":
                late.append(int(line))
                continue
            if how == "busy":
                # Anywhere in its loop.
                time.sleep(0.001 * (len(late) + 1))
            else:
                wait_until_it_sleeps(process)
            process.send_signal(signal.SIGSTOP)
            time.sleep(1.5 * TTL)
            process.send_signal(signal.SIGCONT)
    return late


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the state of a process from /proc")
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize(("how", "most"), [("idle", 0), ("busy", 1)])
def test_work_does_not_go_on_after_a_stop(loop, how, most):
    if loop == "uvloop":
        pytest.importorskip("uvloop")
    late = late_steps(loop, how)
    assert max(late) <= most, late
