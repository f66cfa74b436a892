"""Command `demo`: workers contend for a lock, one dies, one loses its lease, and its late write is refused.

The workers are tasks of this process, whose connection to the server can be cut, or processes, which are killed and stopped
with signals. This process tells the story, and guards the resource that the workers write to.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, TypeVar

import aiolock
from aiolock.backends import redact
from aiolock.backends.memory import MemoryBackend, MemoryServer
from aiolock.cli import settings
from aiolock.cli.output import Output
from aiolock.clock import system_clock

__all__ = ["demo"]

NAME = "order:42"
TTL = 1.5
LIMIT = 60.0
"""Seconds after which the demonstration has failed; it takes about six."""

T = TypeVar("T")
Accident = Literal["dies", "freezes", "wakes"]


async def demo(options: argparse.Namespace, output: Output) -> int:
    """Run the demonstration, or one of its worker processes. With --json, each line of the story is a line of JSON.

    Cancelling it ends the workers.
    """
    url = settings.url(options, "memory://")
    if options.worker is not None:
        await _worker(url, options.worker, settings.namespace(options))
        return 0
    local = url.lower().startswith("memory://")
    # Raises for a wrong URL before anything starts.
    aiolock.connect(url)
    stage: Tasks | Processes = Tasks() if local else Processes(url)
    async with stage.observer() as observer:
        story = Story(stage, output)
        where = "a server in this process" if local else f"{redact(url)} and three worker processes"
        story.say(f"aiolock {aiolock.__version__}, with {where}.")
        try:
            async with asyncio.timeout(LIMIT):
                await story.play()
                await story.end(observer)
        except TimeoutError:
            raise aiolock.BackendUnavailable(
                f"the demonstration did not come to its end within {LIMIT:g} s"
            ) from None
        finally:
            await stage.close()
    return 0


# --- workers


class Event(NamedTuple):
    """A report of a worker: it ``asks``, ``enters``, ``writes``, ``lost``, is ``done`` or ``failed``."""

    who: str
    what: str
    token: int = 0
    detail: str = ""


class Order(NamedTuple):
    """An order to a worker: take the lock ``turns`` times, for ``seconds`` each."""

    turns: int
    seconds: float


Messages = asyncio.Queue[Order | None]
"""Messages to a worker: an order, or ``None`` after each write: the write was decided."""


async def _work(
    who: str,
    client: aiolock.Client,
    messages: Messages,
    report: Callable[[Event], None],
    online: asyncio.Event,
) -> None:
    """Carry out orders until it is cancelled; writes wait until the worker is ``online``."""

    async def write(token: int) -> None:
        await online.wait()
        report(Event(who, "writes", token))
        await messages.get()

    while (order := await messages.get()) is not None:
        for _ in range(order.turns):
            token = 0
            report(Event(who, "asks"))
            try:
                async with client.lock(NAME, timeout=LIMIT) as lease:
                    token = lease.token
                    report(Event(who, "enters", token))
                    await asyncio.sleep(order.seconds)
                    await write(token)
            except aiolock.LockLost as loss:
                report(Event(who, "lost", token, loss.reason))
                # A careless program does this; a write may also have been on its way when the lock was lost.
                await write(token)
            except aiolock.LockError as error:
                report(Event(who, "failed", token, str(error)))
        report(Event(who, "done"))


async def _worker(url: str, who: str, namespace: str) -> None:
    """Run the process of a worker, until its input ends."""

    def report(event: Event) -> None:
        sys.stdout.write(json.dumps(event) + "\n")
        sys.stdout.flush()

    online, messages, lines = asyncio.Event(), Messages(), asyncio.StreamReader()
    online.set()
    loop = asyncio.get_running_loop()
    pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with aiolock.connect(url, namespace=namespace, ttl=TTL, label=who) as client:
        working = asyncio.create_task(_work(who, client, messages, report, online))
        while line := await lines.readline():
            message = json.loads(line)
            messages.put_nowait(None if message is None else Order(*message))
        working.cancel()
        await asyncio.wait([working])
    pipe.close()


class _Task(NamedTuple):
    client: aiolock.Client
    online: asyncio.Event
    running: asyncio.Task[None]
    messages: Messages


class Tasks:
    """Workers in this process, and the accidents that befall them."""

    accidents: Mapping[Accident, str] = {
        "dies": "dies: its connection is cut for good, without a message to the server",
        "freezes": "is cut off from the server, and cannot renew its lease",
        "wakes": "is connected again",
    }

    def __init__(self) -> None:
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self._server = MemoryServer()
        self._workers: dict[str, _Task] = {}

    def observer(self) -> aiolock.Client:
        """Return a client of the same server that has no accidents."""
        return aiolock.Client(MemoryBackend(server=self._server))

    async def hire(self, who: str) -> None:
        """Start a worker. Cancelling it starts none."""
        online, messages = asyncio.Event(), Messages()
        online.set()

        async def travel(step: Callable[[], T]) -> T:
            if not online.is_set():
                raise aiolock.BackendUnavailable("the connection is cut")
            return step()

        backend = MemoryBackend(server=self._server, transport=travel)
        client = await aiolock.Client(backend, ttl=TTL, label=who).open()
        running = asyncio.create_task(_work(who, client, messages, self.events.put_nowait, online))
        self._workers[who] = _Task(client, online, running, messages)

    def send(self, who: str, message: Order | None) -> None:
        """Put a message into the queue of messages to a worker."""
        self._workers[who].messages.put_nowait(message)

    def strike(self, who: str, accident: Accident) -> None:
        """Let an accident befall a worker."""
        worker = self._workers[who]
        if accident == "wakes":
            worker.online.set()
            return
        worker.online.clear()
        if accident == "dies":
            worker.running.cancel()

    async def close(self) -> None:
        """End all workers. Cancelling it may leave their clients open."""
        for each in self._workers.values():
            each.running.cancel()
        for each in self._workers.values():
            await asyncio.wait([each.running])
            await each.client.aclose(timeout=0)


class Processes:
    """Workers in processes of their own, with the methods of :class:`Tasks`.

    Cancelling one may leave processes, which end when their input does, unless they are stopped.
    """

    accidents: Mapping[Accident, str] = {
        "dies": "is killed with SIGKILL, without a message to the server",
        "freezes": "is stopped with SIGSTOP, as a machine that hangs: it cannot renew its lease",
        "wakes": "goes on (SIGCONT), and does not know yet what it missed",
    }

    def __init__(self, url: str) -> None:
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self._url = url
        self._namespace = f"aiolock-demo-{secrets.token_hex(4)}"
        self._workers: dict[str, tuple[asyncio.subprocess.Process, asyncio.Task[None]]] = {}

    def observer(self) -> aiolock.Client:
        return aiolock.connect(self._url, namespace=self._namespace)

    async def hire(self, who: str) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "aiolock", "demo", "--worker", who, "--namespace", self._namespace),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # Every user of the machine can read arguments, and the URL may carry a password.
            env={**os.environ, "AIOLOCK_URL": self._url},
            # Ctrl-C reaches this process alone: a worker ends when its input does.
            start_new_session=True,
        )
        self._workers[who] = process, asyncio.create_task(self._listen(who, process))

    async def _listen(self, who: str, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None  # noqa: S101 - it was started with pipes
        while line := await process.stdout.readline():
            self.events.put_nowait(Event(*json.loads(line)))
        status = await process.wait()
        if status not in (0, -signal.SIGKILL):
            self.events.put_nowait(Event(who, "failed", detail=f"its process ended with status {status}"))

    def send(self, who: str, message: Order | None) -> None:
        stdin = self._workers[who][0].stdin
        assert stdin is not None  # noqa: S101 - as above
        stdin.write(json.dumps(message).encode() + b"\n")

    def strike(self, who: str, accident: Accident) -> None:
        signals = {"dies": signal.SIGKILL, "freezes": signal.SIGSTOP, "wakes": signal.SIGCONT}
        self._workers[who][0].send_signal(signals[accident])

    async def close(self) -> None:
        for process, _ in self._workers.values():
            if process.stdin is not None:
                process.stdin.close()
        listening = [task for _, task in self._workers.values()]
        if listening:
            await asyncio.wait(listening, timeout=3.0)
        for process, task in self._workers.values():
            if process.returncode is None:
                process.kill()
            await task


# --- story


class Story:
    """The narrator, and the resource that the lock protects: it accepts no token older than one it has seen."""

    def __init__(self, stage: Tasks | Processes, output: Output) -> None:
        self._stage = stage
        self._output = output
        self._start = system_clock()
        self._seen: list[Event] = []
        self._highest = self._grants = self._refused = 0

    def say(self, text: str) -> None:
        """Print a text of the narrator."""
        for line in text.split("\n"):
            if not self._output.json:
                self._output.line(self._output.style(line, "bold" if line[:1].isdigit() else ""))
            elif line:
                self._output.data({"event": "said", "message": line.strip()})

    def tell(self, who: str, text: str, colour: str = "") -> None:
        """Print a line about a worker, with the time."""
        at = round(system_clock() - self._start, 2)
        if self._output.json:
            self._output.data({"event": "step", "at": at, "who": who, "message": text})
        else:
            self._output.line(f"  {at:5.2f} s  {who}  {self._output.style(text, colour)}")

    async def see(self, who: str, what: str) -> None:
        """Wait until ``who`` did ``what`` in this scene. Cancelling it ends the waiting."""
        while not any(event.who == who and event.what == what for event in self._seen):
            event = await self._stage.events.get()
            self._seen.append(event)
            self._react(event)

    def _react(self, event: Event) -> None:
        who, what, token, detail = event
        if what == "enters":
            self._grants += 1
            self.tell(who, f"has the lock, with fencing token {token}", "green")
        elif what == "writes":
            if token < self._highest:
                self._refused += 1
                self.tell(who, f"writes with token {token}: REFUSED, {self._highest} was here already", "red")
            else:
                self._highest = token
                self.tell(who, f"writes with token {token}: accepted")
            self._stage.send(who, None)
        elif what == "lost":
            self.tell(who, f"its block is cancelled, and ends with LockLost ({detail})", "yellow")
        elif what == "failed":
            raise aiolock.BackendError(f"{who} gave up: {detail}")

    def _strike(self, who: str, accident: Accident) -> None:
        self._stage.strike(who, accident)
        self.tell(who, self._stage.accidents[accident], "" if accident == "wakes" else "red")

    async def play(self) -> None:
        """Play the three scenes. Cancelling it leaves the workers to the caller."""
        ann, bob, eve = workers = "worker-1", "worker-2", "worker-3"
        for who in workers:
            await self._stage.hire(who)

        self.say(f"\n1. Three workers request the lock {NAME!r}, twice each. One at a time is inside.")
        self.say("   Every turn has a fencing token, greater than all before it; gaps mean nothing.")
        for who in workers:
            self._stage.send(who, Order(2, 0.15))
        for who in workers:
            await self.see(who, "done")

        self.say(f"\n2. A holder dies. The server keeps its lock for at most the ttl, here {TTL:g} s.")
        await self._occupy(ann, bob)
        died = system_clock()
        self._strike(ann, "dies")
        await self.see(bob, "enters")
        self.tell(bob, f"waited {system_clock() - died:.2f} s for what was left of the dead worker's ttl")
        await self.see(bob, "done")

        self.say(
            "\n3. A holder is alive, but out of reach. It is notified that its lock is lost, and its late write fails."
        )
        await self._occupy(bob, eve)
        self._strike(bob, "freezes")
        await self.see(eve, "done")
        self._strike(bob, "wakes")
        await self.see(bob, "done")

    async def _occupy(self, holder: str, waiter: str) -> None:
        self._seen.clear()
        self._stage.send(holder, Order(1, 3600.0))
        await self.see(holder, "enters")
        self._stage.send(waiter, Order(1, 0.1))
        await self.see(waiter, "asks")

    async def end(self, observer: aiolock.Client) -> None:
        """Print the summary. Cancelling it prints nothing."""
        info = await observer.lock(NAME).inspect()
        left = "nothing is left" if not info.holders and not info.waiters else f"left behind: {info}"
        self.say(
            f"\nIn {system_clock() - self._start:.1f} s the lock was granted {self._grants} times. One worker died and one "
            "lost its lease;\nneither left anything to tidy up. "
            f"{self._refused} late write was refused by its fencing token. On the server, {left}."
        )
