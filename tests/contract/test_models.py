"""Random requests on each kind of lock: who is inside and who waits, in order, is what the memory server's machine says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aiolock import Client, ConfigError, Lease
from aiolock.backends.rows.rules import Machine, StoredRequest
from tests.contract.deployments import Deployment
from tests.faults.staging import until

NEEDS = {"read-write": "read-write", "permits": "semaphore"}
COMPARES = True
"""Who is inside is what is compared: this is not about servers that do not show it."""
KEY = ("x", "x")
FOR_EVER = 1e9
LIMIT = 3

Script = list[tuple[str, int, int]]


class World:
    """The machine and a deployment, side by side; requests are known by their labels."""

    def __init__(self, act: str, clients: list[Client], *, downgrades: bool) -> None:
        self.act = act
        self.downgrades = downgrades
        self.clients = clients
        self.machine = Machine()
        self.requests: dict[str, StoredRequest] = {}
        self.leases: dict[str, Lease] = {}
        self.waits: dict[str, asyncio.Task[Lease]] = {}
        self.count = 0

    # --- what both know

    def expected(self) -> tuple[list[tuple[str, str]], list[str]]:
        holds, queue = self.machine.inspect(KEY, 0.0)
        return sorted((hold.request.label, hold.request.mode) for hold in holds), [
            place.label for place in queue
        ]

    async def same(self) -> bool:
        lock = self.lock("looks", "read", 1)[0]
        info = await lock.inspect()
        seen = (
            sorted((holder.label, holder.mode) for holder in info.holders),
            [place.label for place in info.waiters],
        )
        for label in [label for label, wait in self.waits.items() if wait.done()]:
            self.leases[label] = self.waits.pop(label).result()
        return seen == self.expected() and set(self.leases) == {label for label, _ in seen[0]}

    def lock(
        self, label: str, mode: str, limit: int
    ) -> tuple[Any, Callable[..., Coroutine[Any, Any, Lease]]]:
        client = self.clients[self.count % len(self.clients)]
        if self.act == "permits":
            lock = client.semaphore("x", limit if limit > 1 else LIMIT, label=label, fair=True)
        elif self.act == "read-write":
            lock = getattr(client.rwlock("x"), mode)(label=label, fair=True)
        else:
            lock = client.lock("x", label=label, fair=True)
        return lock, lock.acquire

    # --- what happens

    async def ask(self, what: int, how: int) -> None:
        self.count += 1
        label, wait = f"r{self.count}", how % 3 != 0
        mode = {"permits": "permits", "read-write": ("read", "read", "write")[what % 3]}.get(
            self.act, "mutex"
        )
        permits = 1 + what % LIMIT if self.act == "permits" else 1
        limit = LIMIT + 1 if self.act == "permits" and how == 7 else LIMIT
        request = StoredRequest(label, mode, FOR_EVER, label, permits, limit if self.act == "permits" else 1)
        answer = self.machine.enter(KEY, request, 0.0, wait=wait)
        lock, _ = self.lock(label, mode, limit)
        options = {"permits": permits} if self.act == "permits" else {}
        if answer.limit is not None:
            with pytest.raises(ConfigError):
                await lock.acquire(timeout=5, **options)
            return
        self.requests[label] = request
        if wait:
            self.waits[label] = asyncio.create_task(lock.acquire(**options))
            return
        lease = await lock.try_acquire(**options)
        assert (lease is not None) == bool(answer.token), label
        if lease is not None:
            self.leases[label] = lease

    async def leave(self, what: int) -> None:
        if self.leases:
            label = sorted(self.leases)[what % len(self.leases)]
            self.machine.leave(KEY, self.requests[label], 0.0)
            await self.leases.pop(label).release()

    async def give_up(self, what: int) -> None:
        if self.waits:
            label = sorted(self.waits)[what % len(self.waits)]
            self.machine.leave(KEY, self.requests[label], 0.0)
            task = self.waits.pop(label)
            task.cancel()
            await asyncio.wait([task])

    async def downgrade(self, what: int) -> None:
        writing = [label for label, lease in self.leases.items() if lease.kind.mode.value == "write"]
        if writing and self.downgrades:
            label = writing[what % len(writing)]
            self.machine.downgrade(KEY, self.requests[label], 0.0)
            await self.leases[label].downgrade()

    async def set_limit(self, what: int) -> None:
        if self.act == "permits":
            limit = (LIMIT, LIMIT + 1, 0, LIMIT + 2)[what % 4]
            self.machine.set_limit(KEY, limit, 0.0)
            await self.clients[0].semaphore("x", LIMIT).set_limit(limit)

    async def play(self, script: Script) -> None:
        for step, what, how in script:
            if step == "ask":
                await self.ask(what, how)
            else:
                await getattr(self, step)(what)
            await until(self.same, f"{step} {what} {how}: {self.expected()}")

    async def end(self) -> None:
        for task in self.waits.values():
            task.cancel()
        if self.waits:
            await asyncio.wait(self.waits.values())
        for lease in self.leases.values():
            await lease.release()


STEPS = ["ask", "ask", "ask", "leave", "leave", "give_up", "downgrade", "set_limit"]
SCRIPTS = st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 5), st.integers(0, 8)), max_size=16)


@pytest.mark.parametrize("act", ["mutex", "read-write", "permits"])
def test_it_does_what_the_machine_says(deployment: Deployment, act: str):
    @settings(
        max_examples=max(3, round(24 / deployment.slow**2)),
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(script=SCRIPTS)
    def explore(script: Script) -> None:
        async def main() -> None:
            deployment.begin()
            async with (
                deployment.connect(label="one", ttl=60) as one,
                deployment.connect(label="two", ttl=60) as two,
            ):
                world = World(act, [one, two], downgrades="downgrade" in deployment.kinds)
                try:
                    await world.play(script)
                finally:
                    await world.end()

        asyncio.run(main())

    explore()
