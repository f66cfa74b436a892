"""Child processes that play servers: on free loopback ports, in a folder of their own, and gone when we are gone.

Linux only: ports are reserved and children are tied to their parent by means that other systems lack.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

STRICT_PYTHON = [
    *(sys.executable, "-W", "error"),
    # redis-py, on Python 3.14; pyproject.toml has the same for the tests themselves
    *("-W", "ignore:'asyncio.iscoroutinefunction' is deprecated:DeprecationWarning"),
]
"""A Python in which a warning is an error."""
READY_WITHIN = 60.0  # seconds; generous, because only a broken server or a very busy machine comes near it
STOP_WITHIN = 10.0  # seconds between the polite signal and the other one


class ServerMissing(RuntimeError):
    """A program that the server needs is not installed; the sentence says which package brings it."""


class ServerFailed(RuntimeError):
    """A server ended, or stayed silent, instead of becoming ready; the sentence ends with its log."""


def program(*names: str, package: str, server: str) -> str:
    """The path of the first of these programs that is installed."""
    # Debian keeps daemons where an ordinary user's PATH does not look.
    path = os.environ.get("PATH", os.defpath) + ":/usr/local/sbin:/usr/sbin:/sbin"
    for name in names:
        if found := shutil.which(name, path=path):
            return found
    raise missing(names[0], package, server)


def missing(what: str, package: str, server: str) -> ServerMissing:
    return ServerMissing(
        f"{what} is not installed: run `make servers SERVERS={server}`, "
        f"or install the Debian package {package} yourself"
    )


def ask(address: str | tuple[str, int], question: bytes = b"", *, enough: int = 1 << 16) -> bytes:
    """Connect, send, and read until the server closes or `enough` bytes are here."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    answer = b""
    with socket.socket(family) as connection:
        connection.settimeout(1)
        connection.connect(address)
        connection.sendall(question)
        while len(answer) < enough and (chunk := connection.recv(4096)):
            answer += chunk
    return answer


def reserve_port(until: contextlib.ExitStack, above: int = 0) -> int:
    """A free loopback port that nobody who asks here is given again before `until` is closed.

    With `above`, so is the one so far above it.

    A server that is down for a while must find its port free when it comes back. So ports are taken from below the
    range out of which the kernel serves outgoing connections (a client that retries a dead loopback port inside that
    range can even connect to itself), and each is marked by an abstract socket, a name that ends with its process.
    """
    lowest_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    highest = lowest_outgoing if lowest_outgoing > 12_000 + above else 32_768
    for _ in range(1_000):
        port = random.SystemRandom().randrange(10_000, highest - above)
        with contextlib.ExitStack() as marks:
            try:
                for each in {port, port + above}:
                    marks.enter_context(_marked(each))
            except OSError:
                continue
            until.push(marks.pop_all())
        return port
    raise ServerFailed(f"no free loopback port was found between 10000 and {highest}")


def _marked(port: int) -> socket.socket:
    """The mark of a port that is free; raises :class:`OSError` if it is not."""
    mark = socket.socket(socket.AF_UNIX)
    try:
        mark.bind(f"\0aiolock-test-port-{port}")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
    except OSError:
        mark.close()
        raise
    return mark


class Child:
    """One process and its log.

    It dies with the *thread* that started it, because that is what the kernel's parent-death signal watches: start
    servers from the main thread or from one that lives as long. The signal is set by setpriv between fork and exec
    and not by a Python `preexec_fn`, which can deadlock, and warns, when the parent has other threads.
    """

    def __init__(self, argv: Sequence[str], log: Path) -> None:
        setpriv = program("setpriv", package="util-linux", server="redis")
        self._argv = [setpriv, "--pdeathsig", "KILL", "--", *argv]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self.frozen = False

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("this server has not been started")
        return self._process.pid

    @property
    def status(self) -> int | None:
        """The exit status; None while the process runs."""
        return -1 if self._process is None else self._process.poll()

    @property
    def running(self) -> bool:
        return self.status is None

    def start(self) -> None:
        if self.running:
            raise RuntimeError("this server is running already")
        with self._log.open("ab") as log:
            # A session of its own keeps Ctrl-C for Python, which then stops the servers in order.
            self._process = subprocess.Popen(
                self._argv,
                cwd=self._log.parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def stop(self) -> None:
        if self._process is None:
            return
        self.thaw()  # a frozen process would hear the polite signal only after its thaw
        self._process.terminate()
        try:
            self._process.wait(STOP_WITHIN)
        except subprocess.TimeoutExpired:
            self.kill()

    def wait(self, seconds: float) -> None:
        """Wait for its end; raises :class:`subprocess.TimeoutExpired`."""
        if self._process is not None:
            self._process.wait(seconds)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self.frozen = False

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        # Returns once every thread has stopped; WNOWAIT leaves the exit status to Popen, should the process have died.
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        self.frozen = True

    def thaw(self) -> None:
        if self.running:
            os.kill(self.pid, signal.SIGCONT)
        self.frozen = False

    def log_tail(self, lines: int) -> str:
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])


class Server:
    """One server made of one or several processes; every verb takes the number of one of them, or means all.

    A subclass fills `children` and says in `_answers` when one of them serves. Ports and data outlive `stop`, so that
    `restart` comes back to them; leaving the `with` block, or `close`, gives them up.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.children: list[Child] = []
        self.ports: list[int] = []
        self._resources = contextlib.ExitStack()
        self._give_up = weakref.finalize(self, self._resources.close)
        self.folder = Path(tempfile.mkdtemp(prefix=f"aiolock-{name}-"))
        self._resources.callback(shutil.rmtree, self.folder, ignore_errors=True)

    @property
    def port(self) -> int:
        return self.ports[0]

    @property
    def pid(self) -> int:
        return self.children[0].pid

    def start(self, index: int | None = None) -> Self:
        started: list[tuple[int, Child]] = []
        try:
            for number, child in self._chosen(index):
                child.start()
                started.append((number, child))
            for number, child in started:
                self._wait_until_ready(number, child)
        except BaseException:
            for _, child in started:
                child.kill()
            raise
        return self

    def stop(self, index: int | None = None) -> None:
        for _, child in self._chosen(index):
            child.stop()

    def kill(self, index: int | None = None) -> None:
        for _, child in self._chosen(index):
            child.kill()

    def restart(self, index: int | None = None) -> Self:
        """Start again on the same port and data, after stopping what still runs."""
        self.stop(index)
        return self.start(index)

    def freeze(self, index: int | None = None) -> None:
        """Hold every thread of the process; on return it stands still."""
        for _, child in self._chosen(index):
            child.freeze()

    def thaw(self, index: int | None = None) -> None:
        for _, child in self._chosen(index):
            child.thaw()

    def log_tail(self, index: int = 0, *, lines: int = 20) -> str:
        return self.children[index].log_tail(lines)

    def close(self) -> None:
        self.stop()
        self._give_up()

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answers(self, index: int) -> bool:
        raise NotImplementedError

    def _reserve(self, port: int | None = None) -> int:
        return reserve_port(self._resources) if port is None else port

    def _chosen(self, index: int | None) -> Iterator[tuple[int, Child]]:
        numbered = list(enumerate(self.children))
        return iter(numbered if index is None else [numbered[index]])

    def _wait_until_ready(self, index: int, child: Child) -> None:
        deadline = time.monotonic() + READY_WITHIN
        while child.running:
            with contextlib.suppress(OSError):
                if self._answers(index):
                    return
            if time.monotonic() > deadline:
                reason = f"did not become ready within {READY_WITHIN:g} s"
                break
            time.sleep(0.01)
        else:
            reason = f"ended with status {child.status} while starting"
        raise ServerFailed(f"{self.name} {reason}; its log ends:\n{child.log_tail(20)}")
