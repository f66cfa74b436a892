"""The history run: many processes lock, everything goes wrong, and then the checker says whether anybody was ever wrong.

    python -m tests.faults.run redis --seconds 60 --processes 8 --names 16 --seed 1 [--kinds all]

The controller has the server, the fenced store and one fault proxy per worker; worker.py is what the others do and
injector.py what is done to them. The table is verdict.py's. Exit status 1 if there were violations outside of the
exceptions that the backend's page lists, or if nothing was granted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from aiolock.testing.history import Recorder, load
from aiolock.testing.locks import KINDS, capacity, name_locks
from tests.faults.fenced_store import Counter, FencedStore
from tests.faults.injector import FaultInjector, Trap, send
from tests.faults.proxy import Proxy
from tests.faults.redis_system import RedisSystem
from tests.faults.verdict import Verdict, judge
from tests.mutants import MUTANTS
from tests.pace import pace
from tests.processes import program

SYSTEMS: dict[str, Callable[[], Any]] = {"redis": RedisSystem}
TTLS = [0.5, 0.8, 1.0]
"""Seconds; of holds on a quiet machine, unless the plan says otherwise.

On a busy one they are longer: where a round trip takes longer than a third of the ttl, half of the clients can be granted nothing, and
cannot say in time that they give up.
"""
END_WITHIN = 30.0
"""Seconds after the end in which a worker has to be gone."""


@dataclass(frozen=True)
class Plan:
    """The words of the command line."""

    server: str = "redis"
    seconds: float = 60.0
    processes: int = 8
    names: int = 16
    tasks: int = 6
    arms: int = 4
    seed: int = 1
    kinds: tuple[str, ...] = ("mutex",)
    """Of the locks, in turn."""
    only: tuple[str, ...] = ()
    plant: str | None = None
    keep: Path | None = None
    ttls: tuple[float, ...] | None = None
    """Of holds on a quiet machine, in seconds, if not those of the system."""


class Member:
    """A place in the workers: one worker at a time, behind proxies that outlive it, one for each server that it knows."""

    def __init__(self, run: Run, number: int) -> None:
        self.run, self.number, self.generation = run, number, -1
        self.busy = asyncio.Lock()
        self.trap: Trap | None = None
        self.proxies = [
            Proxy(
                "127.0.0.1",
                part.server.port,
                framing=part.framing,
                on_frame=partial(self._frame, part),
                on_break=lambda: run.recorder.broken(self.name),
                seed=run.plan.seed * 1_000 + number * 2 + place * 100,
            )
            for place, part in enumerate(run.parts)
        ]
        for place, proxy in enumerate(self.proxies, start=1):
            # Where several servers are one, clients bring their addresses into an order: the same for everybody.
            proxy.host = f"127.0.0.{place}"
        self._process: asyncio.subprocess.Process

    @property
    def name(self) -> str:
        return f"worker{self.number}.{self.generation}"

    def _frame(self, part: RedisSystem, direction: str, frame: bytes) -> None:
        part.overhear(direction, frame)
        if self.trap is not None:
            self.trap.frame(direction, frame)

    def links(self, rng: random.Random) -> list[Proxy]:
        """What a fault of the network hurts: most often one of them."""
        if len(self.proxies) == 1:
            return self.proxies
        return rng.sample(self.proxies, rng.choice((1, 1, 2, len(self.proxies))))

    def signal(self, number: int) -> None:
        send(self._process.pid, number)

    async def start(self) -> None:
        run = self.run
        self.generation += 1
        urls = [
            part.url(proxy.host, proxy.port, self.number, run.plan.seed)
            for part, proxy in zip(run.parts, self.proxies, strict=True)
        ]
        settings = {
            "url": urls if len(urls) > 1 else urls[0],
            "namespace": run.system.namespace,
            "store": str(run.store.path),
            "history": str(run.folder / f"{self.name}.jsonl"),
            "process": self.name,
            "seed": f"{run.plan.seed}/{self.name}",
            "names": run.names,
            "ttls": run.ttls,
            "command_timeout": run.command_timeouts[self.number % 2],
            "tasks": run.plan.tasks,
            "until": run.until,
        }
        worker = ("tests.faults.planted_worker", run.plan.plant) if run.plan.plant else (run.worker,)
        setpriv = program("setpriv", package="util-linux", server=run.plan.server)
        with (run.folder / f"{self.name}.log").open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(setpriv, "--pdeathsig", "KILL", "--"),
                *(sys.executable, "-X", "faulthandler", "-m", *worker, json.dumps(settings)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    async def replace(self) -> None:
        await self._process.wait()
        await self.start()

    async def end(self) -> list[str]:
        """Wait for the orderly end; what the worker has to say if that is not what happens."""
        try:
            async with asyncio.timeout(max(0, self.run.until - time.monotonic()) + END_WITHIN):
                status = await self._process.wait()
        except TimeoutError:
            self.signal(signal.SIGABRT)  # faulthandler writes where it hangs
            status = await self._process.wait()
        if status == 0:
            return []
        log = (self.run.folder / f"{self.name}.log").read_text(errors="replace")
        return [f"hygiene: {self.name} ended with status {status}:\n{log[-3_000:]}"]


class WatchedStore(FencedStore):
    """Springs the traps for holders: whoever reads is inside of its critical section."""

    workers: Sequence[Member] = ()

    def read(self, name: str, owner: str, token: int, *, fenced: bool) -> Counter | None:
        for member in self.workers:
            if member.trap is not None and owner.startswith(f"{member.name}#"):
                member.trap.frame("store", name.encode())
        return super().read(name, owner, token, fenced=fenced)


class Run:
    """One run, from the server's start to the verdict."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        self.system = SYSTEMS[plan.server]()
        self.worker = getattr(self.system, "worker", "tests.faults.worker")
        self.parts = getattr(self.system, "parts", [self.system])
        """The systems of the servers that are one here."""
        self.names = name_locks(plan.names, plan.kinds)
        slower = pace()
        self.ttls = [ttl * slower for ttl in plan.ttls or TTLS]
        self.command_timeouts = [max(self.ttls) / 3, max(self.ttls)]
        """Of every other worker; with the second, a late answer arrives after its hold is over."""
        self.calm = 2 * max(self.ttls) + 2.5
        """Seconds without faults at the end: the holds and queue entries of killed workers expire within them."""
        self.recorder = Recorder(folder / "injector.jsonl", "injector")
        self.store = WatchedStore(folder / "store.sock", Recorder(folder / "store.jsonl", "store"))
        self.until = 0.0

    async def __call__(self) -> Verdict:
        plan, system = self.plan, self.system
        async with AsyncExitStack() as stack:
            stack.enter_context(system.server)
            await stack.enter_async_context(self.store)
            await stack.enter_async_context(self._lags_noted())
            if hasattr(system, "prepare"):
                await system.prepare()
            self.until = time.monotonic() + plan.seconds
            workers = [Member(self, number) for number in range(plan.processes)]
            for member in workers:
                for proxy in member.proxies:
                    await stack.enter_async_context(proxy)
                await member.start()
            await self._all_open(workers)
            self.store.workers = workers
            injector = getattr(system, "injector", FaultInjector)(
                system,
                workers,
                self.recorder,
                seed=plan.seed,
                ttls=self.ttls,
                names=self.names,
                only=plan.only,
            )
            await injector.run(self.until - self.calm - getattr(system, "place", 0.0), plan.arms)
            others = [each for member in workers for each in await member.end()]
            others += await system.hygiene(self.names, max(self.ttls))
        history = load(self.folder.glob("*.jsonl"))
        ends = {event["process"] for event in history.events if event["kind"] == "end"}
        others += [f"hygiene: {member.name} wrote no end" for member in workers if member.name not in ends]
        others += system.foreign
        return judge(
            history,
            self.store,
            seed=plan.seed,
            ttl=max(self.ttls),
            verified=system.verified_within(max(self.ttls)),
            breaking=getattr(system, "breaking", 0.0),
            command_timeout=max(self.command_timeouts),
            others=others,
            replayed=system.replayed,
            capacity=capacity(self.names),
            fenced=getattr(system, "fenced", True),
            place=getattr(system, "place", 0.0),
        )

    @asynccontextmanager
    async def _lags_noted(self) -> AsyncIterator[None]:
        """Note when the proxies did not get to run."""
        ticking = asyncio.create_task(self.recorder.note_lags())
        try:
            yield
        finally:
            ticking.cancel()
            await asyncio.wait([ticking])

    async def _all_open(self, workers: Sequence[Member]) -> None:
        """A busy machine takes seconds to start them all."""
        waiting = [self.folder / f"{member.name}.jsonl" for member in workers]
        while waiting and time.monotonic() < self.until:
            await asyncio.sleep(0.05)
            waiting = [path for path in waiting if not path.exists() or b'"open"' not in path.read_bytes()]


def run(plan: Plan) -> Verdict:
    """Run it, and keep the histories if there is something to explain."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # as workers inherit it, until they are ready for it
    folder = plan.keep or Path(tempfile.mkdtemp(prefix="aiolock-history-"))
    folder.mkdir(exist_ok=True)
    verdict = asyncio.run(Run(plan, folder)())
    if plan.keep is None and not verdict.violations:
        shutil.rmtree(folder, ignore_errors=True)
    elif verdict.violations:
        print(f"the histories are kept in {folder}", file=sys.stderr)
    return verdict


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.run", description=__doc__.splitlines()[0])
    parser.add_argument("server", choices=sorted(SYSTEMS))
    parser.add_argument("--seconds", type=float, default=Plan.seconds)
    parser.add_argument("--processes", type=int, default=Plan.processes)
    parser.add_argument("--names", type=int, default=Plan.names)
    parser.add_argument("--tasks", type=int, default=Plan.tasks, help="per process")
    parser.add_argument("--arms", type=int, default=Plan.arms, help="faults at a time; 0 for a calm run")
    parser.add_argument("--seed", type=int, default=Plan.seed)
    parser.add_argument(
        "--kinds",
        type=lambda text: tuple(KINDS if text == "all" else text.split(",")),
        default=Plan.kinds,
        metavar="KIND,…",
        help=f"of the locks, in turn: {', '.join(KINDS)}, or all",
    )
    parser.add_argument(
        "--ttls",
        type=lambda text: tuple(map(float, text.split(","))),
        metavar="SECONDS,…",
        help=f"of the holds on a quiet machine, {','.join(map(str, TTLS))} if not named; longer on a busy one",
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="FAULT", help="nothing but these faults"
    )
    parser.add_argument(
        "--plant",
        choices=[mutant.name for mutant in MUTANTS],
        metavar="NAME",
        help="a bug for the workers: see `python -m tests.mutants --list`",
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where the histories are to stay")
    parser.add_argument("--json", action="store_true")
    words = vars(parser.parse_args())
    as_json = words.pop("json")
    if unknown := set(words["kinds"]) - set(KINDS):
        parser.error(f"--kinds: there is no {', '.join(sorted(unknown))}")
    verdict = run(Plan(**{**words, "only": tuple(words["only"])}))
    print(json.dumps(verdict.as_json(), indent=2) if as_json else verdict.table())
    if not verdict.grants:
        print("nothing was granted: this history proves nothing", file=sys.stderr)
    return 1 if verdict.violations or not verdict.grants else 0


if __name__ == "__main__":
    sys.exit(main())
