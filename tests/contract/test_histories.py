"""Random work on each kind of lock, written down by all who take part, and judged by the checker of histories."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest

from aiolock import AcquireTimeout
from aiolock.testing.checker import READ_WRITE, REENTRANT, Model, check, linearizable, operations, semaphore
from aiolock.testing.history import Recorder, load
from tests.faults.staging import shown_token

NEEDS = {"read-write": "read-write", "permits": "semaphore"}
LIMIT = 3
TASKS = 6
TURNS = 6


class Diary:
    """Two clients, and what their tasks write down; each task is an owner."""

    def __init__(self, path, client, rival, kind: str, *, downgrades: bool) -> None:
        self.files = [path / "client", path / "rival"]
        self.pens = [Recorder(file, file.name) for file in self.files]
        self.clients = [client, rival]
        self.kind = kind
        self.downgrades = downgrades

    def close(self):
        for recorder in self.pens:
            recorder.close()
        return load(self.files)

    def wish(self, client, chance: random.Random):
        """A lock, how the diary calls what is asked for, and how it is asked for."""
        if self.kind == "permits":
            count = chance.randint(1, LIMIT)
            lock = client.semaphore("x", LIMIT)
            return "permits", count, lambda timeout: lock.acquire(timeout, permits=count)
        if self.kind == "reentrant":
            return "reentrant", 1, client.reentrant_lock("x").acquire
        mode = chance.choice(["read", "read", "write"])
        return mode, 1, getattr(client.rwlock("x"), mode)().acquire

    async def turn(self, number: int, chance: random.Random) -> None:
        recorder, client = self.pens[number % 2], self.clients[number % 2]
        mode, permits, ask = self.wish(client, chance)
        timeout = chance.choice([None] * 7 + [0.005])
        levels = chance.randint(1, 2) if mode == "reentrant" else 1
        stack = []
        for _ in range(levels):
            hold = recorder.acquiring("x", f"task{number}", mode=mode, permits=permits, timeout=timeout)
            try:
                lease = await ask(timeout)
            except AcquireTimeout:
                recorder.unknown(hold)
                break
            recorder.acquired(hold, shown_token(lease) or next(TURN))
            stack.append((hold, lease))
            await asyncio.sleep(chance.choice([0, 0, 0.001]))
        for hold, lease in reversed(stack):
            lease.check()
            if self.downgrades and mode == "write" and chance.random() < 0.5:
                recorder.downgrading(hold)
                await lease.downgrade()
                recorder.downgraded(hold)
                await asyncio.sleep(0)
                lease.check()
            recorder.releasing(hold)
            await lease.release()
            recorder.released(hold)


TURN = itertools.count(1)
"""In the place of tokens where there are none: all of this is in one process."""

KINDS: dict[str, tuple[Model, dict[str, int]]] = {
    "read-write": (READ_WRITE, {}),
    "permits": (semaphore(LIMIT), {"x": LIMIT}),
    "reentrant": (REENTRANT, {}),
}


@pytest.mark.parametrize("act", KINDS)
async def test_a_random_history_is_one_of_a_correct_lock(deployment, client, rival, act, tmp_path):
    diary = Diary(tmp_path, client, rival, act, downgrades="downgrade" in deployment.kinds)
    seeds = itertools.count(1)

    async def work(number: int) -> None:
        chance = random.Random(next(seeds))
        for _ in range(TURNS):
            await diary.turn(number, chance)

    async with asyncio.TaskGroup() as group:
        for number in range(TASKS):
            group.create_task(work(number))
    history = diary.close()
    model, capacity = KINDS[act]
    assert len(history.holds) > TASKS
    assert check(history, capacity=capacity) == []
    assert linearizable(operations(history, "x"), model) == []
