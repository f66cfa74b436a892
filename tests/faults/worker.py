"""One process of a history run: tasks that take locks in every way there is, and write down what they see.

Started by run.py with one argument, its settings as JSON; stopped, killed and cut off by injector.py. A hold is recorded
so that a loaded machine cannot make the library look guilty: `acquire.ret` is stamped after the fact, `release` before
it, and `lost` carries, beside the moment in which we were told, the moment `until` in which the lease's own clock said
so. A process that did not get to run says that as well: it was as good as stopped.

SIGUSR1 makes the next critical section block the event loop beyond the ttl, between its reading and its writing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import aiolock
from aiolock.clock import system_clock
from aiolock.core.capabilities import Downgrade
from tests.faults.fenced_store import StoreClient
from tests.faults.history import TICK, Recorder
from tests.faults.locks import Wish, wish

PATIENCE = 1.5
"""Seconds after the end in which waiting tasks are given up."""
CLOSING = 10.0
"""Seconds in which a client may close; less than the worker has to be gone."""


@dataclass(frozen=True)
class Settings:
    url: str | list[str]
    namespace: str
    store: str
    history: str
    process: str
    seed: str
    names: list[str]
    ttls: list[float]
    command_timeout: float
    tasks: int
    until: float  # of time.monotonic()


@dataclass(frozen=True)
class Plan:
    """One attempt, drawn before it begins."""

    wish: Wish
    way: str  # block, acquire or try
    on_loss: str
    looks: bool  # before it writes; who does not, and is not cancelled either, is the store's business
    ttl: float
    timeout: float | None
    fair: bool
    max_hold: float | None
    cancelled_after: float | None
    writes: bool
    thinks: float
    goes_on: bool  # where that is possible: to another level, or from writing to reading


def draw(rng: random.Random, names: list[str], ttls: list[float], *, slow: bool) -> Plan:
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
        looks=rng.random() < 0.5,
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
    """The client, its tasks and the recorder."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.recorder = Recorder(settings.history, settings.process)
        self.client: aiolock.Client
        self.blocks = False

    async def run(self) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._block_next)
        sockets, tasks = _sockets(), len(asyncio.all_tasks())
        ticking = asyncio.create_task(self.recorder.note_lags())
        if await self._connect():
            self.recorder.note("open")
            await asyncio.gather(*(self._slot(number) for number in range(self.settings.tasks)))
            # Until the server has answered: what is found there afterwards is not what a timeout left.
            await self.client.aclose(timeout=CLOSING)
        ticking.cancel()
        await asyncio.wait([ticking])
        await asyncio.sleep(TICK)  # sockets are closed one pass after their transports
        left = [task.get_name() for task in asyncio.all_tasks()]
        self.recorder.note("end", tasks=left if len(left) > tasks else [], sockets=_sockets() - sockets)

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
        store = StoreClient(settings.store)
        while (left := settings.until - time.monotonic()) > 0:
            plan = draw(rng, settings.names, settings.ttls, slow=number == 0)
            task = asyncio.create_task(self._attempt(plan, f"{number}", store))
            after = left + PATIENCE
            if plan.cancelled_after is not None:
                after = min(after, plan.cancelled_after)
            cancelling = loop.call_later(after, task.cancel)
            await asyncio.wait([task])
            cancelling.cancel()
            await asyncio.sleep(rng.expovariate(500))
        store.close()

    async def _attempt(self, plan: Plan, slot: str, store: StoreClient) -> None:
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
                    await self._inside(plan, hold, lease, store)
                hold.must_have_raised()
            else:
                lease = await wanted.ask(lock, once=plan.way == "try")
                if lease is None:
                    hold.refused = True
                else:
                    try:
                        await self._inside(plan, hold, lease, store)
                    finally:
                        await lease.release()
        except (aiolock.AcquireTimeout, aiolock.BackendError, aiolock.LockLost):
            pass
        except asyncio.CancelledError:
            cancelled = True
        except Exception:
            self.recorder.note("error", what=traceback.format_exc())
        hold.over()
        task = asyncio.current_task()
        if task is not None and task.cancelling() and not cancelled:
            self.recorder.note("error", what=f"a cancellation was swallowed: {plan}")

    async def _inside(self, plan: Plan, hold: _Hold, lease: aiolock.Lease, store: StoreClient) -> None:
        hold.begin(lease)
        try:
            await self._work(plan, hold, lease, store)
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

    async def _work(self, plan: Plan, hold: _Hold, lease: aiolock.Lease, store: StoreClient) -> None:
        name, token, values = plan.wish.name, lease.token, {}
        for fenced in (False, True) if plan.writes else ():
            if plan.wish.alone:
                values[fenced] = await store.read(name, hold.id, token, fenced=fenced)
            elif not fenced:
                # Others are inside as well, with higher tokens: it only looks.
                await store.read(name, hold.id, token, fenced=False)
        if self.blocks and values:
            self.blocks = False
            self.recorder.stop(self.settings.process)
            time.sleep(1.5 * max(self.settings.ttls))  # noqa: ASYNC251 - that is the fault
            self.recorder.cont(self.settings.process)
        elif plan.thinks:
            await asyncio.sleep(plan.thinks)
        warned = plan.way == "block" and plan.on_loss == "cancel"
        for fenced, value in values.items():
            if value is None or (plan.looks and not lease.held):
                return
            if warned or plan.looks:
                self.recorder.wrote(hold.id)
            await store.write(name, hold.id, token, value + 1, fenced=fenced)


def _becomes_reader(lease: aiolock.Lease) -> bool:
    """Whether the server can make a write hold one for reading."""
    return isinstance(lease._hold.validity.claim, Downgrade)


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
            until = now + int((lease._hold.validity.until - system_clock()) * 1e9)
            self.recorder.note("lost", id=self.id, t=now, until=min(now, until), reason=reason)

    def leaving(self) -> None:
        """The last look before the release: what is held after `now` was held at `now`."""
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
    """What asyncio and the library complain about."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith("aiolock") or record.levelno >= logging.ERROR:
            trace = "".join(traceback.format_exception(*record.exc_info)) if record.exc_info else ""
            self.recorder.note("error", what=f"{record.name}: {record.getMessage()}\n{trace}"[:3_000])


def _sockets() -> int:
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(str(entry.readlink()))
        except OSError:
            continue  # the one that lists the folder
    return sum(link.startswith("socket:") for link in links)


def main() -> None:
    worker = Worker(Settings(**json.loads(sys.argv[1])))
    logging.captureWarnings(capture=True)
    handler = Complaints(worker.recorder)
    for name in ("asyncio", "py.warnings", "aiolock"):
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).propagate = False
    asyncio.run(worker.run())


if __name__ == "__main__":
    main()
