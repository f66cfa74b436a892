"""Where the workers of the demonstration are, and how accidents are staged there.

In this process they are tasks whose way to the server can be cut; elsewhere they are processes that are killed and
stopped with signals. Both run the same program, :func:`work`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import aiolock
from aiolock.backends.memory import MemoryBackend, MemoryServer

__all__ = ["LIMIT", "NAME", "TTL", "Event", "Here", "Order", "Processes", "Stage", "worker"]

NAME = "order:42"
TTL = 1.5
LIMIT = 60.0
"""Seconds after which something must be wrong; the story takes about six."""

T = TypeVar("T")


class Event(NamedTuple):
    """What a worker tells: that it ``asks``, ``enters``, ``writes``, ``lost``, is ``done`` or ``failed``."""

    who: str
    what: str
    token: int = 0
    detail: str = ""


class Order(NamedTuple):
    """What a worker is told to do: take the lock so many times, for so many seconds."""

    turns: int
    seconds: float


Tell = Callable[[str, int, str], None]
Write = Callable[[int], Awaitable[None]]


async def work(client: aiolock.Client, orders: asyncio.Queue[Order], tell: Tell, write: Write) -> None:
    """The program of a worker, until it is cancelled."""
    while True:
        order = await orders.get()
        for _ in range(order.turns):
            token = 0
            tell("asks", token, "")
            try:
                async with client.lock(NAME, timeout=LIMIT) as lease:
                    token = lease.token
                    tell("enters", token, "")
                    await asyncio.sleep(order.seconds)
                    await write(token)
            except aiolock.LockLost as loss:
                tell("lost", token, loss.reason)
                # What a careless program does, or what was on its way when the lock was lost.
                await write(token)
            except aiolock.LockError as error:
                tell("failed", token, str(error))
        tell("done", 0, "")


class Stage(ABC):
    """Where the workers are, and how accidents are staged there."""

    dies: str
    freezes: str
    wakes: str

    def __init__(self) -> None:
        self.events: asyncio.Queue[Event] = asyncio.Queue()

    @abstractmethod
    def observer(self) -> aiolock.Client:
        """A client of the same server that nothing happens to."""

    @abstractmethod
    async def hire(self, who: str) -> None:
        """Start a worker."""

    @abstractmethod
    def order(self, who: str, order: Order) -> None:
        """Have a worker do something."""

    @abstractmethod
    def answer(self, who: str) -> None:
        """The write of a worker was decided: let it go on."""

    @abstractmethod
    def kill(self, who: str) -> None:
        """End a worker without giving it a chance to say goodbye."""

    @abstractmethod
    def freeze(self, who: str) -> None:
        """Keep a worker from reaching the server."""

    @abstractmethod
    def wake(self, who: str) -> None:
        """Let it go on."""

    @abstractmethod
    async def close(self) -> None:
        """End all workers."""


@dataclass
class _Task:
    client: aiolock.Client
    online: asyncio.Event
    running: asyncio.Task[None]
    orders: asyncio.Queue[Order]
    answers: asyncio.Queue[None]


class Here(Stage):
    """Workers in this process."""

    dies = "dies: its connection is cut for good, and nobody says goodbye to the server"
    freezes = "is cut off from the server, and cannot renew its lease"
    wakes = "is connected again"

    def __init__(self) -> None:
        super().__init__()
        self._server = MemoryServer()
        self._workers: dict[str, _Task] = {}

    def observer(self) -> aiolock.Client:
        return aiolock.Client(MemoryBackend(server=self._server))

    async def hire(self, who: str) -> None:
        online = asyncio.Event()
        online.set()
        orders: asyncio.Queue[Order] = asyncio.Queue()
        answers: asyncio.Queue[None] = asyncio.Queue()

        async def travel(step: Callable[[], T]) -> T:
            if not online.is_set():
                raise aiolock.BackendUnavailable("the connection is cut")
            return step()

        def tell(what: str, token: int, detail: str) -> None:
            self.events.put_nowait(Event(who, what, token, detail))

        async def write(token: int) -> None:
            await online.wait()
            tell("writes", token, "")
            await answers.get()

        backend = MemoryBackend(server=self._server, transport=travel)
        client = await aiolock.Client(backend, ttl=TTL, label=who).open()
        running = asyncio.create_task(work(client, orders, tell, write))
        self._workers[who] = _Task(client, online, running, orders, answers)

    def order(self, who: str, order: Order) -> None:
        self._workers[who].orders.put_nowait(order)

    def answer(self, who: str) -> None:
        self._workers[who].answers.put_nowait(None)

    def kill(self, who: str) -> None:
        self.freeze(who)
        self._workers[who].running.cancel()

    def freeze(self, who: str) -> None:
        self._workers[who].online.clear()

    def wake(self, who: str) -> None:
        self._workers[who].online.set()

    async def close(self) -> None:
        for each in self._workers.values():
            each.running.cancel()
        for each in self._workers.values():
            await asyncio.wait([each.running])
            await each.client.aclose(timeout=0)


@dataclass
class _Process:
    process: asyncio.subprocess.Process
    listening: asyncio.Task[None]

    def say(self, message: object) -> None:
        assert self.process.stdin is not None  # noqa: S101 - it was started with a pipe
        self.process.stdin.write(json.dumps(message).encode() + b"\n")


class Processes(Stage):
    """Workers in processes of their own."""

    dies = "is killed with SIGKILL: nobody says goodbye to the server"
    freezes = "is stopped with SIGSTOP, as a machine that hangs: it cannot renew its lease"
    wakes = "goes on (SIGCONT), and does not know yet what it missed"

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._namespace = f"aiolock-demo-{secrets.token_hex(4)}"
        self._workers: dict[str, _Process] = {}

    def observer(self) -> aiolock.Client:
        return aiolock.connect(self._url, namespace=self._namespace)

    async def hire(self, who: str) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "aiolock", "demo", "--worker", who, "--namespace", self._namespace),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # The URL may carry a password, and arguments are for everybody to read.
            env={**os.environ, "AIOLOCK_URL": self._url},
            # Ctrl-C is for us alone: a worker ends when it has nobody to listen to any more.
            start_new_session=True,
        )
        self._workers[who] = _Process(process, asyncio.create_task(self._listen(who, process)))

    async def _listen(self, who: str, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None  # noqa: S101 - it was started with a pipe
        while line := await process.stdout.readline():
            self.events.put_nowait(Event(who, *json.loads(line)))
        status = await process.wait()
        if status not in (0, -signal.SIGKILL):
            self.events.put_nowait(Event(who, "failed", detail=f"its process ended with status {status}"))

    def order(self, who: str, order: Order) -> None:
        self._workers[who].say(order)

    def answer(self, who: str) -> None:
        self._workers[who].say(None)

    def kill(self, who: str) -> None:
        self._workers[who].process.kill()

    def freeze(self, who: str) -> None:
        self._workers[who].process.send_signal(signal.SIGSTOP)

    def wake(self, who: str) -> None:
        self._workers[who].process.send_signal(signal.SIGCONT)

    async def close(self) -> None:
        for each in self._workers.values():
            if each.process.stdin is not None:
                each.process.stdin.close()
        done = [asyncio.ensure_future(each.process.wait()) for each in self._workers.values()]
        if done:
            await asyncio.wait(done, timeout=3.0)
        for each in self._workers.values():
            if each.process.returncode is None:
                each.process.kill()
            await each.listening


async def worker(url: str, who: str, namespace: str) -> None:
    """What a worker's process does, until its input ends."""

    def tell(what: str, token: int, detail: str) -> None:
        sys.stdout.write(json.dumps([what, token, detail]) + "\n")
        sys.stdout.flush()

    async def write(token: int) -> None:
        tell("writes", token, "")
        await answers.get()

    logging.getLogger("aiolock").addHandler(logging.NullHandler())
    orders: asyncio.Queue[Order] = asyncio.Queue()
    answers: asyncio.Queue[None] = asyncio.Queue()
    told = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    pipe, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(told), sys.stdin)
    async with aiolock.connect(url, namespace=namespace, ttl=TTL, label=who) as client:
        working = asyncio.create_task(work(client, orders, tell, write))
        while line := await told.readline():
            message = json.loads(line)
            if message is None:
                answers.put_nowait(None)
            else:
                orders.put_nowait(Order(*message))
        working.cancel()
        await asyncio.wait([working])
    pipe.close()
