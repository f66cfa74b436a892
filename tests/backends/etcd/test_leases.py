"""Leases that certainly last, by a clock that the test sets."""

from __future__ import annotations

import pytest

from aiolock.backends.etcd.leases import SHORTEST, SPARE, Leases, seconds_of
from aiolock.backends.etcd.messages import GRANT, KEEP_ALIVE, Fields, grant, keep_alive


class Cluster:
    """Grants and renews leases, each of which it forgets at its end, and writes down what it was asked."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.asked: list[str] = []
        self._leases: dict[int, tuple[int, float]] = {}

    def clock(self) -> float:
        return self.now

    async def call(self, path: str, request: bytes) -> bytes:
        self.asked.append(path)
        number = Fields(request).number(1)
        if path == GRANT:
            lease, ttl = len(self._leases) + 1, number
        else:
            lease, (ttl, end) = number, self._leases[number]
            if end <= self.now:
                ttl = 0
        self._leases[lease] = ttl, self.now + ttl
        # An answer has the lease as its second field and the ttl as its third one.
        return b"\x10" + grant(lease)[1:] + (b"\x18" + keep_alive(ttl)[1:] if ttl else b"")

    def left(self, lease: int) -> float:
        return self._leases[lease][1] - self.now


@pytest.fixture
def cluster():
    return Cluster()


@pytest.fixture
def leases(cluster):
    return Leases(cluster.call, cluster.clock)


async def test_a_heartbeat_renews_the_lease_of_its_session(cluster, leases):
    lease = await leases.own("s", 10.0)
    for _ in range(5):
        cluster.now += 10 / 3
        assert await leases.own("s", 10.0) == lease
        assert cluster.left(lease) > 10.0
    assert cluster.asked == [GRANT] + [KEEP_ALIVE] * 5


async def test_a_lease_is_used_as_long_as_it_lasts_for_the_whole_ttl(cluster, leases):
    lease = await leases.own("s", 10.0)
    cluster.now += SPARE - 2
    assert await leases.own("s", 10.0) == lease
    assert cluster.asked == [GRANT]
    assert cluster.left(lease) > 10.0


async def test_a_lease_that_has_ended_is_followed_by_another_one(cluster, leases):
    lease = await leases.own("s", 10.0)
    cluster.now += seconds_of(10.0)
    assert await leases.own("s", 10.0) != lease
    assert cluster.asked == [GRANT, KEEP_ALIVE, GRANT]


@pytest.mark.parametrize("ttl", [1.0, 60.0, SHORTEST, SHORTEST + 1, 86_400.0])
async def test_rows_share_a_lease_that_is_never_renewed(cluster, leases, ttl):
    first = await leases.shared(ttl)
    assert leases.ready(ttl) == first
    used = {first}
    for _ in range(20):
        cluster.now += ttl / 4
        lease = leases.ready(ttl) or await leases.shared(ttl)
        assert cluster.left(lease) > ttl
        used.add(lease)
    assert set(cluster.asked) == {GRANT}
    assert len(cluster.asked) == len(used)


async def test_sessions_that_have_ended_are_forgotten(cluster, leases):
    for number in range(1_100):
        await leases.own(f"{number}", 1.0)
        cluster.now += 0.1
    assert len(leases._own) < 1_000
