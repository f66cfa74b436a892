"""The contestants of the benchmarks on etcd take turns, and those that are locks let one in at a time."""

from __future__ import annotations

import pytest

from benchmarks.contestants import contestant
from benchmarks.contestants.base import Span
from benchmarks.scenarios.draining import figures
from tests.servers import Etcd


@pytest.mark.parametrize("who", ["aiolock", "v3lock", "polling key 0.005"])
async def test_one_is_inside_at_a_time(server: Etcd, who: str):
    async with contestant(who, server.url) as it:
        await it.prepare(["warm:1", "warm:2"])
        spans: list[Span] = []
        await it.drain(["hot"] * 5, 3, 0.001, spans)
    assert len(spans) == 15
    assert figures(spans, 3, 1)["double"] == 0


async def test_etcdctl_waits_for_a_lock_of_its_own(server: Etcd):
    async with contestant("etcdctl lock", server.url) as it:
        spans: list[Span] = []
        await it.drain(["hot"] * 2, 1, 0.3, spans)
    assert len(spans) == 2
    assert figures(spans, 1, 1)["double"] == 0


@pytest.mark.parametrize("who", ["put + delete", "round trip"])
async def test_a_floor_makes_its_requests(server: Etcd, who: str):
    async with contestant(who, server.url) as it:
        await it.turns("bare", 3)


@pytest.mark.parametrize(("who", "locks"), [("aiolock", 1), ("a lease each", 3), ("put + get", 1)])
async def test_kept_locks_have_leases_that_last(server: Etcd, who: str, locks: int):
    it = contestant(who, server.url)
    it.ttl = 10
    async with it, it.keep(["a", "b", "c"]):
        leases = server.ctl("lease", "list").split("\n")
        assert len([line for line in leases if line and not line.startswith("found")]) >= locks
