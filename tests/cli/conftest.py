"""The real program, started as people start it, on private servers."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import re
import secrets
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import aiolock
from tests.processes import STRICT_PYTHON
from tests.servers import Redis

PATIENCE = 90.0
"""Seconds after which something is broken; nothing waits for that long unless it is."""

PROGRAM = [*STRICT_PYTHON, "-m", "aiolock"]

ANSWERS_SIGNALS = ["env", "--default-signal"]
"""Whoever started the tests may ignore some, as nohup does and shells do for what they start in the background."""

WAITS_FOR_A_SIGNAL = """\
import signal, sys
status, *names = sys.argv[1:]
numbers = {getattr(signal, f"SIG{name}") for name in names}
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
print("ready", flush=True)
print("got", signal.Signals(signal.sigwait(numbers)).name, flush=True)
sys.exit(int(status))
"""


def waits_for_a_signal(*names: str, status: int) -> list[str]:
    """A command that says `ready`, waits for one of these signals, says `got SIGTERM`, and ends with a status.

    Not by a shell, whose traps depend on the moment: dash forgets a signal, with a trap or SIGINT, that comes while it
    starts a program (in the child of vfork its handler does nothing). So what gets one of those in a test must not be
    a shell that starts something: `exec sleep`, `read` and `wait` are certain.
    """
    return [sys.executable, "-I", "-S", "-c", WAITS_FOR_A_SIGNAL, str(status), *names]


def until(what: Callable[[], object], otherwise: str) -> None:
    """Until it is so."""
    give_up = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < give_up, otherwise
        time.sleep(0.01)


class Program:
    """One `aiolock` under way, with pipes for its streams."""

    def __init__(self, words: tuple[str, ...], environment: dict[str, str], before=(), **more) -> None:
        self.process = subprocess.Popen(
            [*ANSWERS_SIGNALS, *before, *PROGRAM, *words],
            env=environment,
            text=True,
            start_new_session=True,
            **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more},
        )
        self.pid = self.process.pid
        self._heard = {}
        """What was read from a pipe and not yet asked for."""

    def line(self) -> str:
        """The next line on stdout."""
        return self._line(self.process.stdout)

    def complaint(self) -> str:
        """The next line on stderr."""
        return self._line(self.process.stderr)

    def _line(self, pipe) -> str:
        # Without the buffer of the pipe's own: what is in there, select cannot see.
        heard = self._heard.get(pipe, b"")
        while b"\n" not in heard:
            ready, _, _ = select.select([pipe], [], [], PATIENCE)
            assert ready, f"{self.process.args} says nothing"
            chunk = os.read(pipe.fileno(), 4096)
            assert chunk, f"{self.process.args} ended: {self._last_words(pipe)!r}"
            heard += chunk
        line, _, self._heard[pipe] = heard.partition(b"\n")
        return line.decode()

    def _last_words(self, pipe) -> str:
        """What it has said beside the pipe that ended."""
        return "".join(
            os.read(other.fileno(), 65_536).decode()
            for other in (self.process.stdout, self.process.stderr)
            if other not in (None, pipe) and select.select([other], [], [], 1.0)[0]
        )

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def end(self, words: str | None = None) -> tuple[int, str, str]:
        """Say the last words to it; status and the rest of stdout and stderr, when it has ended."""
        pipes = (self.process.stdout, self.process.stderr)
        rest = self.process.communicate(words, timeout=PATIENCE)
        out, err = (
            self._heard.get(pipe, b"").decode() + (text or "") for pipe, text in zip(pipes, rest, strict=True)
        )
        return self.process.returncode, out, err


class Screen:
    """A terminal with a program in it."""

    def __init__(
        self, command: list[str], environment: dict[str, str], columns: int = 100, rows: int = 24
    ) -> None:
        self.fd, terminal = os.openpty()
        self.resize(columns, rows)
        # It makes a session with this terminal and becomes the command; forking here could deadlock with other threads.
        self.process = subprocess.Popen(
            [*ANSWERS_SIGNALS, "setsid", "--ctty", *command],
            env=environment,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
        )
        os.close(terminal)
        self.pid = self.process.pid
        self.seen = ""

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def until(self, pattern: str) -> str:
        """Read on until what was not asked for before matches; what was read up to there."""
        give_up = time.monotonic() + PATIENCE
        while (match := re.search(pattern, self.seen, re.DOTALL)) is None:
            assert time.monotonic() < give_up, f"{pattern!r} does not come: {self.seen[-600:]!r}"
            if not self._more():
                raise AssertionError(f"it ended without {pattern!r}: {self.seen[-600:]!r}")
        taken, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return taken

    def _more(self) -> bool:
        ready, _, _ = select.select([self.fd], [], [], 0.5)
        if ready:
            try:
                chunk = os.read(self.fd, 65_536)
            except OSError:
                # The other side is closed.
                return False
            self.seen += chunk.decode("utf-8", "replace")
            return bool(chunk)
        return True

    def end(self) -> tuple[int, str]:
        """The status and the rest of what it said."""
        give_up = time.monotonic() + PATIENCE
        while self._more():
            assert time.monotonic() < give_up, f"it does not end: {self.seen[-600:]!r}"
        return self.process.wait(PATIENCE), self.seen

    def close(self) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self.fd)


class Shell:
    """Starts programs with one server and namespace, and ends what a test leaves behind."""

    def __init__(self, url: str | None) -> None:
        self.mark = secrets.token_hex(8)
        self.namespace = f"t{secrets.token_hex(6)}"
        skipped = {"AIOLOCK_URL", "AIOLOCK_HELD", "PYTHONASYNCIODEBUG", "NO_COLOR"}
        self.environment = {
            **{key: value for key, value in os.environ.items() if key not in skipped},
            "AIOLOCK_NAMESPACE": self.namespace,
            "AIOLOCK_TEST_MARK": self.mark,
            "TERM": "xterm",
            "COLUMNS": "100",
        }
        if url is not None:
            self.environment["AIOLOCK_URL"] = url
        self._open: list[Program | Screen] = []

    def start(self, *words: str, environment: dict[str, str] | None = None, **more) -> Program:
        program = Program(words, {**self.environment, **(environment or {})}, **more)
        self._open.append(program)
        return program

    def run(self, *words: str, **more) -> tuple[int, str, str]:
        """Start it and wait for its end."""
        return self.start(*words, **more).end()

    def json(self, *words: str):
        status, out, err = self.run(*words, "--json")
        assert (status, err) == (0, "")
        return json.loads(out)

    def screen(self, *words: str, command: list[str] | None = None, **more) -> Screen:
        environment = {key: value for key, value in self.environment.items() if key != "COLUMNS"}
        screen = Screen(command or [*PROGRAM, *words], environment, **more)
        self._open.append(screen)
        return screen

    def look(self, name: str) -> aiolock.LockInfo:
        """The mutex of that name, asked for without a program, which would take half a second to start."""

        async def look() -> aiolock.LockInfo:
            first, *others = self.environment["AIOLOCK_URL"].split()
            where = [first, *others] if others else first
            async with aiolock.connect(where, namespace=self.namespace) as client:
                return await client.lock(name).inspect()

        return asyncio.run(look())

    def waiting(self, name: str, count: int) -> None:
        """Until so many stand in line."""
        until(lambda: len(self.look(name).waiters) == count, f"there are never {count} in line for {name}")

    def unused(self, name: str) -> bool:
        """Whether nobody holds it and nobody waits."""
        info = self.look(name)
        return not info.holders and not info.waiters

    def alive(self) -> list[str]:
        """The command lines of everything that was started here, by whatever process of it, and lives."""
        found = []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self.mark.encode() in environ.read_bytes():
                    state = (environ.parent / "stat").read_text().rpartition(")")[2].split()[0]
                    if state not in "ZX":
                        found.append((environ.parent / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
        return found

    def all_end(self) -> None:
        """Until nothing of it lives."""
        give_up = time.monotonic() + PATIENCE
        while left := self.alive():
            assert time.monotonic() < give_up, f"still there: {left}"
            time.sleep(0.02)

    def close(self) -> None:
        for each in self._open:
            if isinstance(each, Screen):
                each.close()
            else:
                each.close()
        self.all_end()


@pytest.fixture(scope="session")
def redis():
    with Redis(password="hunter2") as server:
        yield server


@pytest.fixture
def shell(redis):
    shell = Shell(redis.url)
    yield shell
    shell.close()


@pytest.fixture
def alone():
    """A shell with a server of its own, as `shell.redis`: for tests that stop it."""
    with Redis() as server:
        shell = Shell(server.url)
        shell.redis = server
        try:
            yield shell
        finally:
            server.thaw()
            shell.close()


@pytest.fixture
def offline():
    """A shell without a server."""
    shell = Shell(None)
    yield shell
    shell.close()
