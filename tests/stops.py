"""Processes that are stopped (SIGSTOP) while they work under a lease; counts the steps of that work after the lease's end.

``python -m tests.stops`` does it on every Python and event loop of this machine, in several processes at once, and prints a
line for each case; the last line sums up. The exit status is 1 if a case took more steps than it may. Linux only. Needs
nothing but aiolock, and uvloop where there is one.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import aiolock

ROOT = Path(__file__).parent.parent
TTL = 0.3
ANY = (0.2, 3.0)
"""How long a stop is, in ttls."""
LONG = (1.2, 3.0)
"""The same for stops that end after the lease."""
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
LOOPS = ("asyncio", "uvloop")
ENOUGH = 100
"""Steps after which the work gives up being cancelled."""

CASES = {"idle": 0, "reads": 0, "suspended": 0, "busy": 1, "yields": 2}
"""The work, and how many steps it may take after a stop.

``idle`` sleeps, and that is over during the stop. ``reads`` waits for a line from a socket, which arrives during the stop.
``suspended`` does the same on a loop whose timers are late, as they are after a suspend of the machine. ``busy`` sleeps
again and again on a loop on which twenty other tasks run, so that it may be ready when the stop begins. ``yields`` does so
with ``sleep(0)``, after which it is ready at once: once more before the loop looks at its timers.
"""


class Stop(NamedTuple):
    """One stop: how many steps the work took when its lease was over, and whether the lease was lost."""

    steps: int
    lost: bool
    seconds: float
    """How long the block lasted, without the release. One that ended before the stop came, on a busy machine, is not lost."""

    @property
    def told(self) -> bool:
        """Whether a block that lasted beyond its ttl was told of the loss."""
        return self.lost or self.seconds < TTL


# --- the process that is stopped


def late(loop: type[Any]) -> type[Any]:
    """Make a class of event loops whose timers come an hour late."""

    class Late(loop):  # type: ignore[misc]
        def call_at(self, when: float, *what: Any, **context: Any) -> asyncio.TimerHandle:
            timer: asyncio.TimerHandle = super().call_at(when + 3600, *what, **context)
            return timer

    return Late


def run(loop: str, main: Coroutine[Any, Any, None], *, timers_late: bool = False) -> None:
    """Run ``main`` on an event loop of that name."""
    made: type[Any] = asyncio.SelectorEventLoop
    if loop == "uvloop":
        import uvloop  # noqa: PLC0415 - not every Python has it

        made = uvloop.Loop
    with asyncio.Runner(loop_factory=late(made) if timers_late else made) as runner:
        runner.run(main)


async def spin() -> None:
    while True:
        await asyncio.sleep(0.0005)
        end = time.perf_counter() + 0.0003
        while time.perf_counter() < end:
            pass


async def work(case: str, lines: asyncio.StreamReader) -> Stop:
    """Wait under a lease, and count the steps from then on while the lease is over."""
    steps, line, lost = 0, b"", False
    began, seconds = time.monotonic(), 0.0
    try:
        async with aiolock.connect("memory://") as client, client.lock("x", ttl=TTL) as lease:
            began = time.monotonic()
            print("waits", flush=True)
            if case in ("reads", "suspended"):
                line = await lines.readline()
            elif case == "idle":
                await asyncio.sleep(0.05)
            pause = 0 if case == "yields" else 0.001
            end = time.monotonic() + (0.05 if case in ("busy", "yields") else 0)
            while (over := not lease.held) or time.monotonic() < end:
                steps += over
                if steps == ENOUGH:
                    break
                await asyncio.sleep(pause)
            seconds = time.monotonic() - began
    except aiolock.LockLost:
        lost, seconds = True, time.monotonic() - began
    if not line:
        # Sent all the same: it must not be there when the next work begins to wait.
        await lines.readline()
    return Stop(steps, lost, seconds)


async def child(case: str, stops: int, descriptor: int) -> None:
    logging.disable()  # of 200 losses
    lines, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))
    others = [asyncio.ensure_future(spin()) for _ in range(20 if case in ("busy", "yields") else 0)]
    for _ in range(stops):
        steps, lost, seconds = await work(case, lines)
        print(steps, int(lost), seconds, flush=True)
    for other in others:
        other.cancel()
    writer.close()


# --- the process that stops it


def wait_until_it_sleeps(process: subprocess.Popen[str]) -> None:
    """Wait until the process waits in the kernel for its next event."""
    stat = Path(f"/proc/{process.pid}/stat")
    while (state := stat.read_text().rpartition(")")[2].split()[0]) != "S":
        assert state != "Z", "it has ended"
        time.sleep(0.0005)


def stop(
    python: str, loop: str, case: str, stops: int, lengths: tuple[float, float] = LONG, seed: int = 1
) -> list[Stop]:
    """Stop one process so many times, for so many ttls each."""
    dice = random.Random(seed)
    near, far = socket.socketpair()
    argv = [python, "-m", "tests.stops", "--child", loop, case, str(stops), str(far.fileno())]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    # It makes loops slower, and is for those who look for other things.
    environment.pop("PYTHONASYNCIODEBUG", None)
    found: list[Stop] = []
    with (
        near,
        subprocess.Popen(
            argv, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment, pass_fds=[far.fileno()]
        ) as process,
    ):
        far.close()
        assert process.stdout is not None
        try:
            while len(found) < stops:
                line = process.stdout.readline()
                assert line == "waits\n", line
                if case in ("busy", "yields"):
                    # Anywhere in its loop.
                    time.sleep(dice.uniform(0, 0.02))
                else:
                    wait_until_it_sleeps(process)
                length = TTL * dice.uniform(*lengths)
                process.send_signal(signal.SIGSTOP)
                time.sleep(length / 2)
                near.send(b"a line\n")
                time.sleep(length / 2)
                process.send_signal(signal.SIGCONT)
                steps, lost, seconds = process.stdout.readline().split()
                found.append(Stop(int(steps), bool(int(lost)), float(seconds)))
        finally:
            process.kill()
    return found


# --- all Pythons


def pythons(versions: Sequence[str] = VERSIONS) -> Iterator[tuple[str, str | None]]:
    """Each version, and its interpreter if there is one: this one, of `make pythons`, on the PATH, or pyenv's."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for version in versions:
        names = [sys.executable, str(ROOT / f".venv-{version}/bin/python"), f"python{version}"]
        names += sorted(map(str, root.glob(f"versions/{version}.*/bin/python")))
        yield version, next((name for name in names if _says(name, version)), None)


def _says(python: str, version: str) -> bool:
    # A name on the PATH may be a shim that leads nowhere, so the version is asked for.
    return _runs(python, f"import sys; sys.exit('%d.%d' % sys.version_info[:2] != '{version}')")


def _runs(python: str, program: str) -> bool:
    try:
        return subprocess.run([python, "-c", program], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def measure(python: str, loop: str, stops: int, processes: int, seed: int) -> dict[str, list[Stop]]:
    """Stop ``processes`` processes of each case at once, ``stops`` times in all."""
    shares = [len(range(number, stops, processes)) for number in range(min(stops, processes))]
    with ThreadPoolExecutor(len(shares) * len(CASES)) as threads:
        futures = {
            case: [
                threads.submit(stop, python, loop, case, share, ANY, 1000 * seed + number)
                for number, share in enumerate(shares)
            ]
            for case in CASES
        }
        return {case: [one for future in those for one in future.result()] for case, those in futures.items()}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stops", description=__doc__.splitlines()[0])
    parser.add_argument("--stops", type=int, default=200, help="of each case")
    parser.add_argument("--processes", type=int, default=8, help="of each case, at once")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    figures: list[str] = []
    absent: list[str] = []
    wrong = 0
    for version, python in pythons():
        if python is None:
            absent.append(f"Python {version}")
            continue
        for loop in LOOPS:
            name = f"{version} {loop}"
            if loop == "uvloop" and not _runs(python, "import uvloop"):
                absent.append(name)
                continue
            most = []
            for case, stops in measure(python, loop, options.stops, options.processes, options.seed).items():
                allowed = CASES[case]
                steps = [one.steps for one in stops]
                too_many = sum(count > allowed for count in steps)
                wrong += too_many
                most.append(f"{max(steps)}")
                print(
                    f"{name}, {case}: {sum(steps)} steps after {len(stops)} stops, {max(steps)} at most; "
                    f"{too_many} stops with more than {allowed}; {sum(one.lost for one in stops)} leases lost",
                    flush=True,
                )
            figures.append(f"{name} {'/'.join(most)}")
    print(
        f"{wrong} with more; most steps {'/'.join(CASES)}: {', '.join(figures)}; "
        f"not on this machine: {', '.join(absent) or 'none'}"
    )
    return int(wrong > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _, _, loop_name, work_case, count, fd = sys.argv
        run(loop_name, child(work_case, int(count), int(fd)), timers_late=work_case == "suspended")
    else:
        sys.exit(main())
