"""What is promised depends on how many servers vote, which every server shows."""

from __future__ import annotations

import pytest

import aiolock
from aiolock import UnsafeBackend
from aiolock.backends.zookeeper.diagnosis import ALWAYS, capabilities, voters

GET = 4
"""The opcode of the question for the members."""

THREE = (
    b"server.1=h1:2888:3888:participant;2181\nserver.2=h2:2888:3888\nserver.3=h3:1:2:participant\nversion=0"
)
OBSERVED = b"server.1=h1:1:2:participant\nserver.2=h2:1:2:participant\nserver.3=h3:1:2:observer;0.0.0.0:2181"


def test_servers_that_vote_are_counted():
    assert voters(THREE) == 3
    assert voters(OBSERVED) == 2
    assert voters(b"") == 0


@pytest.mark.parametrize(
    ("config", "named", "survives"),
    [(THREE, 1, True), (OBSERVED, 3, False), (b"", 3, False), (None, 3, True), (None, 2, False)],
)
def test_what_survives_a_failover_is_an_ensemble(config, named, survives):
    assert ("survives-failover" in capabilities(config, named)) is survives
    assert capabilities(config, named) >= ALWAYS


async def test_a_server_that_stands_alone_promises_nothing_about_a_failover(server, tools):
    async with tools.connect(server.port, require={"no-eviction", "survives-restart"}) as client:
        assert client.capabilities == ALWAYS
    with pytest.raises(UnsafeBackend, match="zookeeper does not promise survives-failover"):
        await tools.connect(server.port, require={"survives-failover"}).open()
    # Below a chroot it is the same.
    async with aiolock.connect(f"{server.url}/a/b", namespace=tools.namespace) as client:
        assert client.capabilities == ALWAYS


async def test_a_connection_that_breaks_before_the_answer_is_made_again(proxy, tools):
    lost = proxy.down.drop_next(1, tools.replies(proxy).to(GET), reset=True)
    async with tools.connect(proxy.port) as client:
        assert lost.is_set()
        assert client.capabilities == ALWAYS
