"""Another process with a client of its own, which can be told to acquire and release, and killed or stopped.

`Worker` is the handle in the test; run as a program, this file is the process. Orders go in and events come out as
lines of JSON. Events carry the time of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from typing import Any, Self

import aiolock
from aiolock import Lease

PATIENCE = 30.0
"""Seconds after which an event that has to come counts as never."""

Event = dict[str, Any]


class Worker:
    """The process, as the test sees it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._events: list[Event] = []
        self._news = asyncio.Event()
        self._reading = asyncio.get_running_loop().create_task(self._read())

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, url: str, **options: Any) -> AsyncIterator[Self]:
        """A process that is connected to `url` with these options of `connect`."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.faults.lock_process",
            json.dumps([url, options]),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        worker = cls(process)
        try:
            await worker.event("ready")
            yield worker
        finally:
            worker.kill()
            await process.wait()
            await worker._reading

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            self._events.append(json.loads(line))
            self._news.set()

    def tell(self, *order: Any) -> None:
        """Give an order; it is carried out beside those before it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")

    async def event(self, kind: str) -> Event:
        """The next event of a kind; those of other kinds stay."""
        async with asyncio.timeout(PATIENCE):
            while (found := self.seen(kind)) is None:
                self._news.clear()
                await self._news.wait()
        self._events.remove(found)
        return found

    def seen(self, kind: str) -> Event | None:
        """The oldest event of a kind that came already."""
        return next((event for event in self._events if event["event"] == kind), None)

    async def acquire(self, name: str, timeout: float | None = None) -> Event:
        """Get a lock there, and return the event of it."""
        self.tell("acquire", name, timeout)
        return await self.event("granted")

    async def ask(self, *order: Any) -> Event:
        """Give an order whose answer is an event of the same name."""
        self.tell(*order)
        return await self.event(order[0])

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, number)

    def stop(self) -> None:
        """Hold it; on return it stands still."""
        self.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def go_on(self) -> None:
        """Let it run again."""
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """The end of it, without a word."""
        self.signal(signal.SIGKILL)


def say(event: str, **fields: Any) -> None:
    """Tell the test."""
    sys.stdout.write(json.dumps({"event": event, "at": time.monotonic(), **fields}) + "\n")
    sys.stdout.flush()


class Servant:
    """What the process does on order."""

    def __init__(self, client: aiolock.Client) -> None:
        self._client = client
        self._leases: dict[str, Lease] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def obey(self, order: list[Any]) -> None:
        """Start to carry out an order."""
        task = asyncio.get_running_loop().create_task(getattr(self, order[0])(*order[1:]))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def acquire(self, name: str, timeout: float | None) -> None:
        """Get a lock, say so, and say when it is lost."""
        try:
            lease = self._leases[name] = await self._client.lock(name).acquire(timeout=timeout)
        except aiolock.LockError as error:
            say("failed", name=name, error=repr(error))
            return
        # Not later than it believes in it, however long it is kept from running between the two.
        until = time.monotonic() + lease.remaining()
        say("granted", name=name, token=lease.token, until=until)
        reason = await lease.wait_lost()
        if reason is not None:
            say("lost", name=name, reason=reason)

    async def release(self, name: str) -> None:
        """Give it back."""
        say("releasing", name=name)
        await self._leases.pop(name).release()
        say("release", name=name)

    async def state(self, name: str) -> None:
        """Say what the lease thinks of itself."""
        lease = self._leases[name]
        say("state", held=lease.held, lost=lease.lost, token=lease.token)

    async def block(self, name: str, seconds: float) -> None:
        """Let nothing else run for some time, and look at the lease in the very next step."""
        time.sleep(seconds)  # noqa: ASYNC251 - that is what is staged
        lease = self._leases[name]
        try:
            lease.check()
        except aiolock.LockLost as error:
            say("block", held=lease.held, reason=error.reason)
        else:
            say("block", held=lease.held, reason=None)


async def main(url: str, options: dict[str, Any]) -> None:
    """Obey until the test closes the line."""
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with aiolock.connect(url, **options) as client:
        servant = Servant(client)
        say("ready")
        while line := await lines.readline():
            servant.obey(json.loads(line))


if __name__ == "__main__":
    logging.getLogger("aiolock").addHandler(logging.NullHandler())
    asyncio.run(main(*json.loads(sys.argv[1])))
