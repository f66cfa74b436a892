"""Whoever competes on Redis in the benchmarks takes turns there: the floors are made of parts of the backend."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks.contestants import contestant

LIBRARIES = ["aiolock", "aiolock fair", "redis-py 0.01", "WATCH/MULTI/EXEC 0.01"]


@pytest.mark.parametrize("who", ["raw floor", "script floor", *LIBRARIES])
async def test_contestants_take_turns(server, who):
    async with contestant(who, server.url) as it:
        await it.prepare(["x", "y"])
        await it.turns("x", 3)
        await it.each(["x", "y"], 2)


@pytest.mark.parametrize("who", LIBRARIES)
async def test_contestants_say_when_they_entered_and_left(server, who):
    async with contestant(who, server.url) as it:
        lock = it.lock("x")
        for _ in range(2):
            assert await it.take(lock) <= await it.leave(lock)


@pytest.mark.parametrize("who", LIBRARIES)
async def test_contestants_wait_for_each_other(server, who):
    spans: list = []
    async with contestant(who, server.url) as it:
        await it.drain(["x", "x"], 3, 0.0, spans)
    spans.sort(key=lambda span: span[1])
    assert len(spans) == 6
    assert all(left <= entered for (_, _, left, _), (_, entered, _, _) in pairwise(spans))
