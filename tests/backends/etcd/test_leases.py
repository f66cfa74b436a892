"""Leases that certainly last, by a clock that the test sets."""

from __future__ import annotations

import pytest

from aiolock.backends.etcd import leases as module
from aiolock.backends.etcd.leases import SHORTEST, SPARE, Leases, for_rows, for_session
from aiolock.backends.etcd.messages import GRANT, Fields, grant


class Cluster:
    """Grants leases, and writes down what it was asked."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.asked: list[str] = []
        self.away = 0.0
        """Seconds for which a request and its answer are on their way."""
        self._ends: list[float] = []

    def clock(self) -> float:
        return self.now

    async def call(self, path: str, request: bytes) -> bytes:
        self.asked.append(path)
        ttl = Fields(request).number(1)
        self._ends.append(self.now + ttl)
        self.now += self.away
        # An answer has the lease as its second field and the ttl as its third one.
        return b"\x10" + grant(len(self._ends))[1:] + b"\x18" + grant(ttl)[1:]

    def left(self, lease: int) -> float:
        return self._ends[lease - 1] - self.now


@pytest.fixture
def cluster():
    return Cluster()


@pytest.fixture
def leases(cluster):
    return Leases(cluster.call, cluster.clock)


async def test_heartbeats_are_written_with_leases_that_are_never_renewed(cluster, leases):
    """What a cluster is said about a lease after it was granted, the leader that stood still meanwhile may not have heard."""
    used = set()
    for _ in range(6):
        used.add(lease := await leases.get(for_session(30.0), 30.0))
        assert cluster.left(lease) > 30.0
        cluster.now += 30 / 3
    assert cluster.asked == [GRANT] * 6
    assert len(used) == 6


async def test_a_lease_is_used_as_long_as_it_lasts_for_the_whole_ttl(cluster, leases):
    lease = await leases.get(for_session(10.0), 10.0)
    cluster.now += SPARE - 1
    assert await leases.get(for_session(10.0), 10.0) == lease
    assert leases.ready(for_session(10.0), 10.0) == lease
    assert cluster.asked == [GRANT]
    assert cluster.left(lease) > 10.0


async def test_a_lease_that_was_granted_late_lasts_from_its_sending(cluster, leases):
    """A session relies on its row from the sending of its heartbeat, which is before that."""
    cluster.away = 30.0
    sent = cluster.now
    lease = await leases.get(for_session(10.0), 10.0)
    assert cluster.now + cluster.left(lease) > sent + 10.0
    assert not leases.ready(for_session(10.0), 10.0)


@pytest.mark.parametrize("ttl", [1.0, 60.0, SHORTEST, SHORTEST + 1, 86_400.0])
async def test_rows_share_a_lease_for_half_of_its_time(cluster, leases, ttl):
    first = await leases.get(for_rows(ttl), ttl)
    assert leases.ready(for_rows(ttl), ttl) == first
    used = {first}
    for _ in range(20):
        cluster.now += ttl / 4
        lease = leases.ready(for_rows(ttl), ttl) or await leases.get(for_rows(ttl), ttl)
        assert cluster.left(lease) > ttl
        used.add(lease)
    assert len(cluster.asked) == len(used) < 20


async def test_leases_that_have_ended_are_forgotten(cluster, leases, monkeypatch):
    monkeypatch.setattr(module, "KNOWN", 10)
    for number in range(1, 50):
        await leases.get(for_session(float(number)), float(number))
        cluster.now += 2 * number
    assert len(leases._leases) <= 10
