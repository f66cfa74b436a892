"""What a turn at a lock, a hand-over, waiting and holding cost in requests, on servers of rows; the page of figures has these numbers."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from aiolock import Client
from aiolock.types import Family
from tests.contract.deployments import LocalRows, Stored, registry
from tests.faults.staging import queued, until, waiting

pytestmark = pytest.mark.parametrize(
    "server",
    [each for each in registry() if issubclass(each, (Stored, LocalRows))],
    ids=lambda each: each.name,
    indirect=True,
    scope="session",
)

REFUSED = ["compare_and_set", "get", "compare_and_set"]
"""A write against a version that is no longer there, a read, and a write."""


class Sent:
    """The requests of one client about one lock, or (of `size`) about how many rows each was."""

    def __init__(self, client: Client, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        backend: Any = client._runtime.backend
        self.store = (backend._at(name, Family.LOCK) if hasattr(backend, "_at") else backend).store
        self.about: list[str] = []
        self.size: list[tuple[str, int]] = []
        for request in ("get", "versions", "compare_and_set", "enter"):
            monkeypatch.setattr(self.store, request, self._count(request, getattr(self.store, request), name))

    def _count(self, request: str, send: Any, name: str) -> Any:
        async def count(words: Any, *rest: Any) -> Any:
            each = [words] if request == "enter" else list(words)
            self.size.append((request, len(each)))
            # Reads of versions are polls and verifications.
            if request != "versions" and any(getattr(one, "key", one).endswith(f"/{name}") for one in each):
                self.about.append(request)
            return await send(words, *rest)

        return count

    def taken(self) -> list[str]:
        """Return what was sent about the lock since the last call."""
        sent, self.about = self.about, []
        return sent


async def turn(client: Client, sent: Sent, name: str) -> tuple[list[str], list[str]]:
    sent.taken()
    lease = await client.lock(name).acquire()
    entered = sent.taken()
    await lease.release()
    return entered, sent.taken()


async def test_a_free_lock_costs_one_request_to_enter_and_one_to_leave(deployment, monkeypatch):
    async with deployment.connect(ttl=600) as one, deployment.connect(ttl=600) as two:
        mine, other = Sent(one, "x", monkeypatch), Sent(two, "x", monkeypatch)
        enters = mine.store.enters
        enter = "enter" if enters else "compare_and_set"
        await turn(one, mine, "x")
        for _ in range(3):
            assert await turn(one, mine, "x") == ([enter], ["compare_and_set"])
        await turn(two, other, "x")
        # Where the server reads the row itself, it does not matter whose turn was the last.
        refused = ["enter"] if enters else REFUSED
        for _ in range(2):
            assert await turn(one, mine, "x") == (refused, ["compare_and_set"])
            assert await turn(two, other, "x") == (refused, ["compare_and_set"])


async def test_a_hand_over_costs_the_release_and_a_read(deployment, monkeypatch):
    async with deployment.connect(ttl=600) as one, deployment.connect(ttl=600) as two:
        mine, other = Sent(one, "x", monkeypatch), Sent(two, "x", monkeypatch)
        lease = await one.lock("x").acquire()
        waiter = asyncio.create_task(two.lock("x").acquire())
        await queued(one.lock("x"), 1)
        await waiting(two, 1)
        # The holder learns that it is waited for.
        await lease.renew()
        mine.taken()
        other.taken()
        await lease.release()
        following = await waiter
        # A release by a client that has not read the row since is refused first.
        released = mine.taken()
        assert released[0] == "compare_and_set"
        assert len(released) <= len(REFUSED)
        assert other.taken() == ["get"]
        await following.release()


async def test_holding_and_waiting_cost_a_heartbeat_and_a_read_for_all_locks(deployment, monkeypatch):
    locks, ttl = 20, deployment.ttl_of(3)
    async with deployment.connect(ttl=ttl) as one, deployment.connect(ttl=ttl) as two:
        leases = [await one.lock(f"{number}").acquire() for number in range(locks)]
        waiters = [asyncio.create_task(two.lock(f"{number}").acquire()) for number in range(locks)]
        await waiting(two, locks)
        for number in range(locks):
            await queued(one.lock(f"{number}"), 1)
        for client in (one, two):
            sent = Sent(client, "0", monkeypatch)
            rows = locks if not hasattr(client._runtime.backend, "servers") else None
            await until(lambda sent=sent: Counter(sent.size)["compare_and_set", 1] >= 3)
            beats = Counter(sent.size)["compare_and_set", 1]
            assert (
                len([size for request, size in sent.size if request == "compare_and_set" and size > 1]) == 0
            )
            reads = [size for request, size in sent.size if request == "versions"]
            if rows is not None:
                assert set(reads) <= {rows}, sent.size
            if client is one:
                assert len(reads) <= beats + 1, sent.size
        for waiter in waiters:
            waiter.cancel()
        await asyncio.wait(waiters)
        for lease in leases:
            await lease.release()
