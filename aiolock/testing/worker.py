"""One process of a history: tasks contend for locks, and write down each request, grant, loss and release.

``python -m aiolock.testing.worker`` reads its settings as one line of JSON on stdin, which keeps a password out of the list of
processes, and ends in good order at the time that they name, or when stdin is closed.

A hold is recorded so that a loaded machine cannot make the library look guilty: ``acquire.ret`` is stamped after the fact,
``release`` before it, and ``lost`` carries, beside the moment at which the holder was told, the moment ``until`` at which the
lease ended by its own clock. A process that did not get to run notes that as well: it was as good as stopped.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import aiolock
from aiolock.clock import system_clock
from aiolock.core.capabilities import Downgrade
from aiolock.lease import hold_of
from aiolock.testing.history import TICK, Recorder
from aiolock.testing.locks import Wish, wish

__all__ = ["Complaints", "Plan", "Resource", "Worker", "WorkerSettings", "contend", "draw", "main", "serve"]

PATIENCE = 1.5
"""Seconds after the end in which waiting tasks are given up."""
CLOSING = 10.0
"""Seconds in which a client may close; less than the worker has to be gone."""


class Resource(Protocol):
    """The resource that the locks protect: holders read and write it under their tokens, once fenced and once not."""

    async def read(self, name: str, owner: str, token: int, *, fenced: bool) -> int | None:
        """Return the value; ``None`` if a fenced read came too late."""
        ...

    async def write(self, name: str, owner: str, token: int, value: int, *, fenced: bool) -> bool:
        """Write the value that rests on the last read; return whether it was accepted."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


@dataclass(frozen=True)
class WorkerSettings:
    """The settings of a worker; ``until`` is a time of ``time.monotonic()``, ``rate`` the most turns per second (0: no limit)."""

    url: str | list[str]
    namespace: str
    history: str
    process: str
    seed: str
    names: list[str]
    ttls: list[float]
    command_timeout: float
    tasks: int
    until: float
    rate: float = 0.0


@dataclass(frozen=True)
class Plan:
    """One attempt, drawn before it begins."""

    wish: Wish
    way: str  # block, acquire or try
    on_loss: str
    checks: (
        bool  # before it writes; a holder that does not, and is not cancelled either, is left to the resource
    )
    ttl: float
    timeout: float | None
    fair: bool
    max_hold: float | None
    cancelled_after: float | None
    writes: bool
    thinks: float
    goes_on: bool  # where that is possible: to another level, or from writing to reading


class Draw(Protocol):
    """A way to draw the attempts; ``slow`` is true for the first task of each process."""

    def __call__(
        self, rng: random.Random, names: Sequence[str], ttls: Sequence[float], *, slow: bool
    ) -> Plan:
        """Return the next attempt."""
        ...


def contend(rng: random.Random, names: Sequence[str], ttls: Sequence[float], *, slow: bool) -> Plan:
    """Draw an attempt of an ordinary program; the first task of each process takes the last name, for long, and renews it."""
    return Plan(
        wish=Wish(names[-1] if slow else rng.choice(names[:-1]), "mutex"),
        way="block",
        on_loss="signal",
        checks=True,
        ttl=ttls[0],
        timeout=rng.uniform(1, 2) * ttls[0],
        fair=rng.random() < 0.5,
        max_hold=None,
        cancelled_after=None,
        writes=False,
        thinks=rng.uniform(0.1, 1) * ttls[0] if slow else rng.choice((0.001, 0.005, 0.02)),
        goes_on=False,
    )


def draw(rng: random.Random, names: Sequence[str], ttls: Sequence[float], *, slow: bool) -> Plan:
    """The last quarter of the names is held for long, and renewed; of the others some are wanted much more than others."""
    ttl, busy = rng.choice(ttls), len(names) * 3 // 4
    passing = rng.random() < 0.02
    name = rng.randrange(busy, len(names)) if slow or passing else int(busy * rng.random() ** 1.4)
    timeout = rng.uniform(0.02, 0.2 if passing else 3)
    wanted, way = wish(rng, names[name]), rng.choices(("block", "acquire", "try"), (6, 3, 1))[0]
    return Plan(
        wish=wanted,
        # A block takes one permit.
        way="acquire" if way == "block" and wanted.permits > 1 else way,
        on_loss=rng.choices(("cancel", "signal"), (3, 1))[0],
        checks=rng.random() < 0.5,
        ttl=ttl,
        timeout=rng.choices((None, 0.0, timeout), (0 if passing else 3, 1, 8))[0],
        fair=rng.random() < 0.3,
        max_hold=rng.uniform(0.02, 0.5) if rng.random() < 0.05 else None,
        cancelled_after=rng.expovariate(10) if rng.random() < 0.2 else None,
        writes=slow or rng.random() < 0.5,
        thinks=rng.uniform(0.3, 2) * ttl if slow else rng.choice((0, 0.001, 0.005)),
        goes_on=rng.random() < 0.4,
    )


class Worker:
    """The client, its tasks and the recorder.

    :param draw: draws the attempts.
    :param resource: makes the connection of one task to the resource; without it holders only let time pass.

    SIGUSR1 makes the next holder that uses the resource block the event loop beyond the ttl, between its read and its write.
    """

    def __init__(
        self, settings: WorkerSettings, draw: Draw = contend, resource: Callable[[], Resource] | None = None
    ) -> None:
        self.settings = settings
        self.recorder: Recorder = Recorder(settings.history, settings.process)
        self.client: aiolock.Client
        self.blocks: bool = False
        self._draw, self._resource = draw, resource
        self._next_turn = 0.0

    async def run(self) -> None:
        """Work until the time is over. Cancelling it ends the tasks and closes the client, which releases what is held."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._block_next)
        sockets, tasks = _sockets(), len(asyncio.all_tasks())
        ticking = asyncio.create_task(self.recorder.note_lags())
        try:
            await self._work_until_the_end()
        finally:
            ticking.cancel()
            await asyncio.wait([ticking])
        await asyncio.sleep(TICK)  # sockets are closed one pass after their transports
        left = [task.get_name() for task in asyncio.all_tasks()]
        self.recorder.note("end", tasks=left if len(left) > tasks else [], sockets=_sockets() - sockets)

    async def _work_until_the_end(self) -> None:
        if not await self._connect():
            return
        self.recorder.note("open", capabilities=sorted(self.client.capabilities))
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(self.settings.tasks):
                    group.create_task(self._slot(number))
        finally:
            # Until the server has answered: what is found there afterwards is not what a timeout left.
            await self.client.aclose(timeout=CLOSING)

    async def _connect(self) -> bool:
        while time.monotonic() < self.settings.until:
            settings = self.settings
            self.client = aiolock.connect(
                settings.url,
                namespace=settings.namespace,
                ttl=max(settings.ttls),
                command_timeout=settings.command_timeout,
                label=settings.process,
            )
            try:
                await self.client.open()
            except aiolock.BackendError as error:
                if not error.retryable:
                    raise
                await asyncio.sleep(0.05)
            else:
                return True
        return False

    def _block_next(self) -> None:
        self.blocks = True

    # --- attempts

    async def _slot(self, number: int) -> None:
        settings, loop = self.settings, asyncio.get_running_loop()
        rng = random.Random(f"{settings.seed}/{number}")
        resource = None if self._resource is None else self._resource()
        while await self._turn() and (left := settings.until - time.monotonic()) > 0:
            plan = self._draw(rng, settings.names, settings.ttls, slow=number == 0)
            task = asyncio.create_task(self._attempt(plan, f"{number}", resource))
            after = left + PATIENCE
            if plan.cancelled_after is not None:
                after = min(after, plan.cancelled_after)
            cancelling = loop.call_later(after, task.cancel)
            try:
                await asyncio.wait([task])
            finally:
                cancelling.cancel()
                if task.cancel():
                    await asyncio.wait([task])
            await asyncio.sleep(rng.expovariate(500))
        if resource is not None:
            resource.close()

    async def _turn(self) -> bool:
        """Wait for the next turn of this process; return whether it comes before the end."""
        if not self.settings.rate:
            return True
        now = time.monotonic()
        self._next_turn = max(self._next_turn, now) + 1 / self.settings.rate
        await asyncio.sleep(min(self._next_turn, self.settings.until) - now)
        return self._next_turn < self.settings.until

    async def _attempt(self, plan: Plan, slot: str, resource: Resource | None) -> None:
        wanted = plan.wish
        lock = wanted.lock(
            self.client,
            ttl=plan.ttl,
            timeout=plan.timeout,
            on_loss=plan.on_loss,
            fair=plan.fair,
            max_hold=plan.max_hold,
        )
        once = plan.way == "try" or plan.timeout == 0
        hold = _Hold(
            self.recorder,
            self.recorder.acquiring(
                wanted.name,
                slot,
                mode=wanted.mode,
                permits=wanted.permits,
                timeout=self.settings.command_timeout if once else plan.timeout,
            ),
            slot,
        )
        cancelled = False
        try:
            if plan.way == "block":
                async with lock as lease:
                    await self._inside(plan, hold, lease, resource)
                hold.must_have_raised()
            else:
                asked = await wanted.ask(lock, once=plan.way == "try")
                if asked is None:
                    hold.refused = True
                else:
                    try:
                        await self._inside(plan, hold, asked, resource)
                    finally:
                        await asked.release()
        except aiolock.BackendError as error:
            self.recorder.note("trouble", error=type(error).__name__, what=str(error))
        except (aiolock.AcquireTimeout, aiolock.LockLost):
            pass
        except asyncio.CancelledError:
            cancelled = True
        except Exception:  # noqa: BLE001 - the history says what the library must not raise
            self.recorder.note("error", what=traceback.format_exc())
        hold.over()
        task = asyncio.current_task()
        if task is not None and task.cancelling() and not cancelled:
            self.recorder.note("error", what=f"a cancellation was swallowed: {plan}")

    async def _inside(self, plan: Plan, hold: _Hold, lease: aiolock.Lease, resource: Resource | None) -> None:
        hold.begin(lease)
        try:
            await self._work(plan, hold, lease, resource)
            if plan.goes_on and plan.wish.mode == "reentrant":
                await self._again(plan, hold.slot)
            elif plan.goes_on and plan.wish.mode == "write" and lease.held and _becomes_reader(lease):
                self.recorder.downgrading(hold.id)
                await lease.downgrade()
                self.recorder.downgraded(hold.id)
                await asyncio.sleep(plan.thinks)
        finally:
            hold.leaving()

    async def _again(self, plan: Plan, slot: str) -> None:
        """Another level of the hold, through another object; a new hold if that one was lost."""
        lock = plan.wish.lock(self.client, ttl=plan.ttl, on_loss="signal")
        hold = _Hold(
            self.recorder,
            self.recorder.acquiring(plan.wish.name, slot, mode="reentrant", timeout=PATIENCE),
            slot,
        )
        try:
            lease = await lock.acquire(timeout=PATIENCE)
            hold.begin(lease)
            try:
                await asyncio.sleep(plan.thinks)
            finally:
                hold.leaving()
                await lease.release()
        finally:
            hold.over()

    async def _work(self, plan: Plan, hold: _Hold, lease: aiolock.Lease, resource: Resource | None) -> None:
        if resource is None or not plan.writes:
            await asyncio.sleep(plan.thinks)
            return
        name, token = plan.wish.name, lease.token
        values: dict[bool, int | None] = {}
        for fenced in (False, True):
            if plan.wish.alone:
                values[fenced] = await resource.read(name, hold.id, token, fenced=fenced)
            elif not fenced:
                # Others are inside as well, with higher tokens: it only reads.
                await resource.read(name, hold.id, token, fenced=False)
        if self.blocks and values:
            self.blocks = False
            self.recorder.stop(self.settings.process)
            time.sleep(1.5 * max(self.settings.ttls))  # noqa: ASYNC251 - that is the fault
            self.recorder.cont(self.settings.process)
        elif plan.thinks:
            await asyncio.sleep(plan.thinks)
        warned = plan.way == "block" and plan.on_loss == "cancel"
        for fenced, value in values.items():
            if value is None or (plan.checks and not lease.held):
                return
            if warned or plan.checks:
                self.recorder.wrote(hold.id)
            await resource.write(name, hold.id, token, value + 1, fenced=fenced)


def _becomes_reader(lease: aiolock.Lease) -> bool:
    """Return whether the server can make a write hold one for reading."""
    return isinstance(hold_of(lease).validity.claim, Downgrade)


class _Hold:
    """One attempt in the words of the history."""

    def __init__(self, recorder: Recorder, number: str, slot: str) -> None:
        self.recorder, self.id, self.slot = recorder, number, slot
        self.refused = False
        self._lease: aiolock.Lease | None = None
        self._told = False
        self._left = False

    def begin(self, lease: aiolock.Lease) -> None:
        self.recorder.acquired(self.id, lease.token)
        self._lease = lease
        self._watch = asyncio.create_task(self._watching(lease))

    async def _watching(self, lease: aiolock.Lease) -> None:
        reason = await lease.wait_lost()
        if reason is not None:
            self._tell(lease, reason, time.monotonic_ns())

    def _tell(self, lease: aiolock.Lease, reason: str, now: int) -> None:
        if not self._told and not self._left:
            self._told = True
            until = now + int((hold_of(lease).validity.until - system_clock()) * 1e9)
            self.recorder.note("lost", id=self.id, t=now, until=min(now, until), reason=reason)

    def leaving(self) -> None:
        """Check for the last time before the release: a lease that is held after ``now`` was held at ``now``."""
        now = time.monotonic_ns()
        if self._lease is not None and self._lease.lost:
            self._tell(self._lease, "seen", now)
        self._left = True
        self.recorder.note("release", id=self.id, t=now + 1)

    def must_have_raised(self) -> None:
        if self._told:
            self.recorder.note("error", what=f"{self.id} was lost, and its block ended without LockLost")

    def over(self) -> None:
        if self._left:
            self.recorder.released(self.id, "fail" if self._told else "ok")
        elif self.refused:
            self.recorder.refused(self.id)
        else:
            self.recorder.unknown(self.id)


class Complaints(logging.Handler):
    """Writes down outages of connections, and the complaints of asyncio and of the library."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def emit(self, record: logging.LogRecord) -> None:
        """Note a record, if it belongs into the history."""
        if record.name == "aiolock.connection":
            what = "lost" if record.levelno >= logging.WARNING else "back"
            address = getattr(record, "aiolock_address", "")
            self.recorder.note(
                "connection", what=what, address=address, seconds=getattr(record, "aiolock_seconds", None)
            )
        elif not record.name.startswith("aiolock") or record.levelno >= logging.ERROR:
            trace = "".join(traceback.format_exception(*record.exc_info)) if record.exc_info else ""
            self.recorder.note("error", what=f"{record.name}: {record.getMessage()}\n{trace}"[:3_000])


def _sockets() -> int:
    """Return the number of open sockets, 0 where the system does not list them."""
    links = []
    for entry in Path("/proc/self/fd").glob("*"):
        try:
            links.append(str(entry.readlink()))
        except OSError:
            continue  # the one that lists the folder
    return sum(link.startswith("socket:") for link in links)


def serve(worker: Worker) -> Worker:
    """Have the history of a worker say what asyncio and the library complain about; return the worker."""
    logging.captureWarnings(capture=True)
    handler = Complaints(worker.recorder)
    for name in ("asyncio", "py.warnings", "aiolock"):
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).propagate = False
    logging.getLogger("aiolock.connection").setLevel(logging.INFO)
    return worker


async def _until_closed(worker: Worker) -> None:
    """Run a worker until stdin is closed: at the end, or when the process that started the worker has died."""
    loop, working = asyncio.get_running_loop(), asyncio.ensure_future(worker.run())
    loop.add_reader(sys.stdin.fileno(), working.cancel)
    try:
        await working
    except asyncio.CancelledError:
        if not working.cancelled():
            raise
    finally:
        loop.remove_reader(sys.stdin.fileno())


def main() -> None:
    """Run the worker whose settings are the first line of stdin."""
    settings = WorkerSettings(**json.loads(os.read(sys.stdin.fileno(), 65_536)))
    asyncio.run(_until_closed(serve(Worker(settings))))


if __name__ == "__main__":
    main()
