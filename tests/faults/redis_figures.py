"""What the Redis backend shows under faults, measured: `python -m tests.faults.redis_figures` prints the table.

Each figure runs against a server of its own, and ends by looking at what is left. Names of figures as arguments run
these alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import redis.asyncio

import aiolock
from aiolock import AcquireTimeout, Client, LockError
from tests.faults.lock_process import Worker
from tests.faults.proxy import Proxy, resp_frames
from tests.faults.redis_keys import Traces, descriptors, is_grant, subscriptions, traces
from tests.faults.staging import queued, until, waiting
from tests.servers import Redis

LINK = 0.01
"""Seconds of latency in each direction of the slow link."""


@dataclass
class Row:
    """One line of the table: what was measured, how often, what it has to be."""

    what: str
    target: str
    measured: str
    good: bool


@dataclass
class Stage:
    """A server, a namespace, and the lines that a figure has written."""

    server: Redis
    admin: redis.asyncio.Redis
    rows: list[Row] = field(default_factory=list)
    namespace: str = field(default_factory=lambda: f"f{secrets.token_hex(4)}")

    def connect(self, port: int | None = None, **options: Any) -> Client:
        """A client, directly or through a proxy."""
        settings = {"namespace": self.namespace, "command_timeout": 5.0, **options}
        return aiolock.connect(f"redis://127.0.0.1:{port or self.server.port}", **settings)

    def worker(
        self, port: int | None = None, **options: Any
    ) -> contextlib.AbstractAsyncContextManager[Worker]:
        """A process with a client."""
        url = f"redis://127.0.0.1:{port or self.server.port}"
        return Worker.running(url, namespace=self.namespace, command_timeout=5.0, **options)

    def proxy(self) -> Proxy:
        """A way to the server on which accidents happen."""
        return Proxy("127.0.0.1", self.server.port, framing=resp_frames)

    def row(self, what: str, target: str, measured: str, good: bool) -> None:
        """Write a line."""
        self.rows.append(Row(what, target, measured, good))

    def worst(self, what: str, seconds: list[float], bound: float) -> None:
        """Write the worst of some times, beside the median."""
        ordered = sorted(seconds)
        measured = f"worst {ordered[-1] * 1000:.1f} ms, median {ordered[len(ordered) // 2] * 1000:.1f} ms of {len(ordered)}"
        self.row(what, f"≤ {bound * 1000:.0f} ms", measured, ordered[-1] <= bound)

    def none(self, what: str, count: int, of: int) -> None:
        """Write how often something happened that must not."""
        self.row(what, "0", f"{count} of {of}", count == 0)

    async def left(self) -> Traces:
        """What is on the server, given a moment for what is on its way."""
        for _ in range(100):
            found = await traces(self.admin, self.namespace)
            if found.clean and not await subscriptions(self.admin, self.namespace):
                break
            await asyncio.sleep(0.02)
        return found


def elapsed(since: float) -> float:
    return time.monotonic() - since


# --- cancelled and timed out


async def cancelled(stage: Stage, count: int = 1000) -> None:
    """Acquires and blocks behind a slow link, ended at random moments."""
    choose = random.Random(7)
    names = [f"x{n}" for n in range(20)]
    ended = {"cancelled": 0, "timed out": 0, "through": 0}

    async def block(client: Client, name: str) -> None:
        async with client.lock(name, timeout=choose.choice((None, 0.03, 0.1))):
            await asyncio.sleep(choose.uniform(0, 0.02))

    async def one(client: Client) -> None:
        name = choose.choice(names)
        work = asyncio.create_task(
            block(client, name)
            if choose.random() < 0.5
            else _held_for_a_moment(client, name, choose.uniform(0, 0.1))
        )
        await asyncio.wait([work], timeout=choose.uniform(0, 0.12))
        work.cancel()
        try:
            await work
        except asyncio.CancelledError:
            ended["cancelled"] += 1
        except AcquireTimeout:
            ended["timed out"] += 1
        else:
            ended["through"] += 1

    left = Traces()
    tasks, closing = 0, 0.0
    async with stage.proxy() as proxy:
        proxy.up.delay = proxy.down.delay = LINK
        for _ in range(count // 50):
            clients = [await stage.connect(proxy.port, ttl=30.0).open() for _ in range(4)]
            await asyncio.gather(*(one(choose.choice(clients)) for _ in range(50)))
            since = time.monotonic()
            await asyncio.gather(*(client.aclose() for client in clients))
            closing = max(closing, elapsed(since))
            # At once, before anything could run out.
            left = left.plus(await traces(stage.admin, stage.namespace))
            tasks += sum(task.get_name().startswith("aiolock") for task in asyncio.all_tasks())
    story = ", ".join(f"{number} {how}" for how, number in ended.items())
    what = f"{count} acquires and blocks ended at random behind 10 + 10 ms"
    stage.row(what, "all end", f"{story}; closed in at most {closing:.2f} s", sum(ended.values()) == count)
    stage.none("  holders left when aclose returns", left.holders, count)
    stage.none("  places left when aclose returns", left.places, count)
    stage.none("  tasks left", tasks, count)
    async with stage.connect(ttl=30.0) as client:
        seconds = []
        for name in names:
            since = time.monotonic()
            lease = await client.lock(name).acquire(timeout=40)
            seconds.append(elapsed(since))
            await lease.release()
    stage.worst("  next client gets each lock within", seconds, 0.05)


async def _held_for_a_moment(client: Client, name: str, timeout: float) -> None:
    lease = await client.lock(name).acquire(timeout=timeout)
    await lease.release()


# --- told in time


async def black_holed(stage: Stage, count: int = 50, at_once: int = 10) -> None:
    """Holders whose link falls silent: told before the next grant?"""
    margins: list[float] = []
    late: list[float] = []
    for batch in range(count // at_once):
        measured = await asyncio.gather(*(_black_hole(stage, f"x{batch}.{n}") for n in range(at_once)))
        margins += [margin for margin, _ in measured]
        late += [grant for _, grant in measured]
    stage.row(
        f"black-holed holder at ttl 1 s, {count} times: told before the next grant",
        "every time",
        f"{sum(margin > 0 for margin in margins)} of {count}, worst margin {min(margins) * 1000:.1f} ms",
        min(margins) > 0,
    )
    stage.worst("  next grant after the last sign of the holder", late, 1.1)


async def _black_hole(stage: Stage, name: str) -> tuple[float, float]:
    """How long before the next grant the holder was told, and how long after its last renewal the grant came."""
    async with (
        stage.proxy() as proxy,
        stage.connect() as rival,
        stage.connect(proxy.port, ttl=1.0, command_timeout=0.5) as client,
    ):
        lease = await client.lock(name).acquire()
        waiter = asyncio.create_task(rival.lock(name, ttl=30.0).acquire())
        await queued(rival.lock(name), 1)
        told_at: list[float] = []

        async def tell() -> None:
            await lease.wait_lost()
            told_at.append(time.monotonic())

        telling = asyncio.create_task(tell())
        server, micros = await stage.admin.time()
        until_ = int(await stage.admin.hget(f"{stage.namespace}:1:lock:{{{name}}}", "until"))
        last_sign = time.monotonic() - (server + micros / 1e6 - (until_ / 1e6 - 1.0))
        proxy.blackhole()
        other = await waiter
        granted_at = time.monotonic()
        await telling
        await other.release()
        return granted_at - told_at[0], granted_at - last_sign


# --- killed


async def killed(stage: Stage, count: int = 10) -> None:
    """kill -9 of a holder, of a waiter, of a grantee at the moment of the grant."""
    ttl = 1.0
    stage.worst(
        f"kill -9 of a holder (ttl {ttl:g} s), {count} times: next holder",
        [await _kill_holder(stage, n, ttl) for n in range(count)],
        ttl + 0.1,
    )
    stage.worst(
        f"kill -9 of the first waiter (ttl 30 s), {count} times: next holder after the release",
        [await _kill_waiter(stage, n) for n in range(count)],
        0.1,
    )
    heard, silent = [], []
    for n in range(count):
        heard.append(await _kill_grantee(stage, n, "heard"))
        silent.append(await _kill_grantee(stage, n, "silent"))
    stage.worst(
        f"kill -9 of a grantee at the grant (ttl 10 s, claim 1 s), {count} times: next holder", heard, 1.1
    )
    stage.worst("  the same, and the server does not hear of the death", silent, 1.1)


async def _kill_holder(stage: Stage, n: int, ttl: float) -> float:
    name = f"holder{n}"
    async with stage.worker(ttl=ttl) as holder, stage.connect() as client:
        await holder.acquire(name)
        waiter = asyncio.create_task(client.lock(name, ttl=30.0).acquire())
        await queued(client.lock(name), 1)
        # At a moment of its own between two renewals.
        await asyncio.sleep(0.07 * n)
        holder.kill()
        since = time.monotonic()
        lease = await waiter
        seconds = elapsed(since)
        await lease.release()
        return seconds


async def _kill_waiter(stage: Stage, n: int) -> float:
    name = f"waiter{n}"
    async with (
        stage.worker(ttl=30.0) as doomed,
        stage.connect(ttl=30.0) as first,
        stage.connect(ttl=30.0) as last,
    ):
        held = await first.lock(name).acquire()
        doomed.tell("acquire", name, None)
        await queued(first.lock(name), 1)
        waiter = asyncio.create_task(last.lock(name).acquire())
        await queued(first.lock(name), 2)
        doomed.kill()
        await until(lambda: _channels(stage, 2))
        since = time.monotonic()
        await held.release()
        lease = await waiter
        seconds = elapsed(since)
        await lease.release()
        return seconds


async def _channels(stage: Stage, count: int) -> bool:
    return await subscriptions(stage.admin, stage.namespace) == count


async def _kill_grantee(stage: Stage, n: int, how: str) -> float:
    name = f"grantee{n}{how}"
    async with (
        stage.proxy() as proxy,
        stage.connect(ttl=30.0) as first,
        stage.connect(ttl=30.0) as last,
        stage.worker(proxy.port, ttl=10.0) as doomed,
    ):
        since: list[float] = []

        def on_frame(direction: str, frame: bytes) -> None:
            if direction == "down" and is_grant(frame):
                doomed.kill()
                since.append(time.monotonic())
                if how == "silent":
                    proxy.blackhole()

        proxy.on_frame = on_frame
        held = await first.lock(name).acquire()
        doomed.tell("acquire", name, None)
        await queued(first.lock(name), 1)
        waiter = asyncio.create_task(last.lock(name).acquire())
        await queued(first.lock(name), 2)
        await held.release()
        lease = await waiter
        seconds = elapsed(since[0])
        await lease.release()
        return seconds


# --- restarted


async def restarted(stage: Stage, count: int = 5) -> None:
    """The server is killed and restarted while 100 tasks wait and hold."""
    first_grants: list[float] = []
    told = holders = served = tasks = 0
    for n in range(count):
        outcome = await _restart(stage, n)
        first_grants.append(outcome[0])
        told, holders, served, tasks = (
            a + b for a, b in zip((told, holders, served, tasks), outcome[1:], strict=True)
        )
    stage.row(
        f"server killed and restarted under 100 tasks, {count} times: holders told",
        "all",
        f"{told} of {holders}",
        told == holders,
    )
    stage.row("  waiters that got their turn", "all", f"{served} of {tasks}", served == tasks)
    stage.worst("  first grant after the port answers", first_grants, 0.5)


async def _restart(stage: Stage, n: int) -> tuple[float, int, int, int, int]:
    names = [f"restart{n}.{k}" for k in range(10)]
    grants: list[float] = []
    clients = [stage.connect(ttl=30.0) for _ in range(5)]
    for client in clients:
        await client.open()
    leases = [await clients[0].lock(name).acquire() for name in names]

    async def turn(client: Client, name: str) -> int:
        async with client.lock(name, fair=True):
            grants.append(time.monotonic())
            await asyncio.sleep(0.001)
        return 1

    turns = [
        asyncio.create_task(turn(client, name)) for name in names for client in clients[1:] for _ in range(2)
    ]
    turns += [asyncio.create_task(turn(clients[1], name)) for name in names]
    for name in names:
        await queued(clients[0].lock(name), 9)
    stage.server.kill()
    await asyncio.sleep(0.3)
    # Not `restart`, which returns when the server answers and would hold up this loop until then.
    stage.server.children[0].start()
    answered = await _answers(stage)
    reasons = [await lease.wait_lost() for lease in leases]
    served = sum(await asyncio.gather(*turns))
    for client in clients:
        await client.aclose()
    return (
        grants[0] - answered,
        sum(reason == "revoked" for reason in reasons),
        len(leases),
        served,
        len(turns),
    )


async def _answers(stage: Stage) -> float:
    """When the port answered first."""
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", stage.server.port)
            writer.write(b"PING\r\n")
            answer = await reader.readline()
            writer.close()
            if answer == b"+PONG\r\n":
                return time.monotonic()
        await asyncio.sleep(0.001)


# --- subscriptions killed


async def unsubscribed(stage: Stage, count: int = 1000, lanes: int = 4) -> None:
    """CLIENT KILL TYPE pubsub at every hand-over."""
    waits: list[float] = []
    lost = 0

    async def lane(number: int) -> None:
        nonlocal lost
        name = f"x{number}"
        async with stage.connect(ttl=30.0) as one, stage.connect(ttl=30.0) as two:
            lease = await one.lock(name).acquire()
            for turn in range(count // lanes):
                client = (two, one)[turn % 2]
                waiter = asyncio.create_task(client.lock(name).acquire(timeout=20))
                await waiting(client, 1)
                await queued(client.lock(name), 1)
                await stage.admin.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
                since = time.monotonic()
                await lease.release()
                try:
                    lease = await waiter
                except AcquireTimeout:
                    lost += 1
                    lease = await client.lock(name).acquire()
                waits.append(elapsed(since))
            await lease.release()

    await asyncio.gather(*(lane(number) for number in range(lanes)))
    stage.none(f"CLIENT KILL TYPE pubsub at every hand-over, {count} times: lost", lost, len(waits))
    stage.worst("  wait for the hand-over", waits, 1.0)


# --- hygiene and the table

Figure = Callable[[Stage], Coroutine[Any, Any, None]]

FIGURES: dict[str, Figure] = {
    "cancelled": cancelled,
    "black-holed": black_holed,
    "killed": killed,
    "restarted": restarted,
    "unsubscribed": unsubscribed,
}


@contextlib.asynccontextmanager
async def staged() -> AsyncIterator[Stage]:
    """A server for one figure."""
    with Redis() as server:
        async with redis.asyncio.Redis(port=server.port, single_connection_client=True) as admin:
            await admin.ping()
            # A pipeline has a second connection, which stays open.
            await admin.pipeline(transaction=False).ping().execute()
            yield Stage(server, admin)


async def measure(figure: Figure) -> list[Row]:
    """One figure on a server of its own, and what it leaves."""
    async with staged() as stage:
        before = descriptors()
        await figure(stage)
        found = await stage.left()
        heard = await subscriptions(stage.admin, stage.namespace)
        for _ in range(100):
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            opened = max(0, descriptors() - before)
            if not tasks and not opened:
                break
            await asyncio.sleep(0.02)
        parts = {
            "holders": found.holders,
            "places": found.places,
            "keys without expiry": found.lasting,
            "subscriptions": heard,
            "descriptors": opened,
            "tasks": len(tasks),
        }
        measured = ", ".join(f"{number} {what}" for what, number in parts.items())
        stage.row("  left at the end", "nothing", measured, not any(parts.values()))
        return stage.rows


def table(rows: list[Row]) -> str:
    """The lines below each other."""
    what, target = (max(len(getattr(row, column)) for row in rows) for column in ("what", "target"))
    return "\n".join(
        f"{'ok ' if row.good else 'BAD'}  {row.what:{what}}  {row.target:{target}}  {row.measured}"
        for row in rows
    )


async def main(names: list[str]) -> bool:
    """Measure these figures and print them."""
    rows: list[Row] = []
    for name in names or FIGURES:
        since = time.monotonic()
        try:
            rows += await measure(FIGURES[name])
        except LockError as error:
            rows.append(Row(name, "to end", repr(error), good=False))
        print(f"{name}: {elapsed(since):.1f} s", file=sys.stderr)
    print(table(rows))
    return all(row.good for row in rows)


if __name__ == "__main__":
    logging.getLogger("aiolock").addHandler(logging.NullHandler())
    sys.exit(not asyncio.run(main(sys.argv[1:])))
