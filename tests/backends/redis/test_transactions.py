"""The recipes of docs/how-to/redis-transactions.md, as they stand there, beside others who write to the same keys."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
from types import SimpleNamespace

import pytest
from redis.asyncio import Redis
from redis.asyncio.client import Pipeline

from tests.faults.proxy import Proxy, resp_frames
from tests.faults.staging import until
from tests.unit.test_docs import ROOT, blocks

RECIPES = "import asyncio\n" + "\n".join(
    text for _, text in blocks(ROOT / "docs/how-to/redis-transactions.md") if "asyncio.run" not in text
)
PROCESSES, TASKS = 3, 30


@pytest.fixture(scope="module")
def page():
    """The functions of the page."""
    names: dict = {}
    exec(compile(RECIPES, "redis-transactions.md", "exec"), names)
    return SimpleNamespace(**names)


@pytest.fixture
def goods() -> str:
    return f"tea-{secrets.token_hex(4)}"


@pytest.fixture
def before_exec(monkeypatch):
    """Have something done before the next EXEC is sent."""
    execute = Pipeline.execute

    def stage(act):
        async def late(self, raise_on_error=True):
            monkeypatch.setattr(Pipeline, "execute", execute)
            await act()
            return await execute(self, raise_on_error)

        monkeypatch.setattr(Pipeline, "execute", late)

    return stage


def play(program: str, *arguments: str) -> list[str]:
    """Run a program in several processes that begin together; what each of them printed last."""
    begin = "import sys\nprint('ready', flush=True)\nsys.stdin.readline()\n"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RECIPES + begin + program, *arguments, str(process)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for process in range(PROCESSES)
    ]
    for one in started:
        assert one.stdout.readline() == "ready\n"
    for one in started:
        one.stdin.write("\n")
        one.stdin.flush()
    output = [one.communicate(timeout=150)[0] for one in started]
    assert [one.returncode for one in started] == [0] * PROCESSES
    return output


# --- the stock


async def test_processes_sell_what_there_is_and_no_more(server, admin, goods):
    stock = 50
    await admin.set(f"{{{goods}}}:stock", stock)
    program = f"""
async def main(url, goods, process):
    async with Redis.from_url(url) as redis:
        print(sum(await asyncio.gather(*(sell(redis, goods, f"{{process}}-{{n}}") for n in range({TASKS})))))
asyncio.run(main(*sys.argv[1:]))
"""
    sold = [int(output) for output in await asyncio.to_thread(play, program, server.url, goods)]
    assert sum(sold) == stock < PROCESSES * TASKS
    assert await admin.scard(f"{{{goods}}}:orders") == stock
    assert await admin.get(f"{{{goods}}}:stock") == b"0"


async def test_an_exec_that_others_came_before_leaves_nothing(admin, page, goods, before_exec):
    await admin.set(f"{{{goods}}}:stock", 5)
    before_exec(lambda: admin.decr(f"{{{goods}}}:stock"))
    with pytest.raises(TimeoutError, match="1 attempts"):
        await page.sell(admin, goods, "late", attempts=1)
    assert await admin.get(f"{{{goods}}}:stock") == b"4"
    assert not await admin.exists(f"{{{goods}}}:orders")
    before_exec(lambda: admin.set(f"{{{goods}}}:stock", 0))
    assert not await page.sell(admin, goods, "late")
    assert await admin.get(f"{{{goods}}}:stock") == b"0"


async def test_an_order_whose_answer_is_lost_has_one_piece(server, admin, page, goods):
    await admin.set(f"{{{goods}}}:stock", 5)
    async with (
        Proxy("127.0.0.1", server.port, framing=resp_frames) as proxy,
        Redis(host=proxy.host, port=proxy.port) as redis,
    ):
        lost = proxy.down.drop_next(1, lambda frame: frame.startswith(b"*2\r\n:4\r\n"), reset=True)
        assert await page.sell(redis, goods, "once")
        assert lost.is_set()
    assert await admin.get(f"{{{goods}}}:stock") == b"4"
    assert await admin.smembers(f"{{{goods}}}:orders") == {b"once"}


# --- the lock


async def test_processes_are_inside_one_at_a_time(server, admin, goods):
    program = f"""
async def main(url, key, process):
    async with Redis.from_url(url) as redis:
        async def turn():
            async with locked(redis, key, ttl_ms=600_000, timeout=150):
                seen = int(await redis.get(key + ":turns") or 0)
                await asyncio.sleep(0.001)
                await redis.set(key + ":turns", seen + 1)
        await asyncio.gather(*(turn() for _ in range({TASKS})))
asyncio.run(main(*sys.argv[1:]))
"""
    await asyncio.to_thread(play, program, server.url, goods)
    assert int(await admin.get(f"{goods}:turns")) == PROCESSES * TASKS
    assert not await admin.exists(goods)


async def test_a_holder_whose_key_expired_does_not_delete_the_next_ones(admin, page, goods):
    assert await page.take(admin, goods, b"first", 1)

    async def expired() -> bool:
        return not await admin.exists(goods)

    await until(expired, "the key expired")
    assert await page.take(admin, goods, b"second", 600_000)
    assert not await page.give_back(admin, goods, b"first")
    assert await admin.get(goods) == b"second"


async def test_a_key_that_expires_and_changes_hands_during_the_release_stays(admin, page, goods, before_exec):
    assert await page.take(admin, goods, b"first", 600_000)

    async def next_holder() -> None:
        await admin.pexpire(goods, 1)
        await until(lambda: page.take(admin, goods, b"second", 600_000), "the next holder is in")

    before_exec(next_holder)
    assert not await page.give_back(admin, goods, b"first")
    assert await admin.get(goods) == b"second"
    assert await page.give_back(admin, goods, b"second")


async def test_of_two_who_find_the_lock_free_one_has_it(admin, page, goods, before_exec):
    before_exec(lambda: admin.set(goods, b"second", px=600_000))
    assert not await page.take(admin, goods, b"first", 600_000)
    assert await admin.get(goods) == b"second"
