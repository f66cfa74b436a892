"""The real kazoo and the real Curator on the other side of the same lock: we exclude each other, also when one is killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.processes import missing

HERE = Path(__file__).parent
JARS = (
    "curator-recipes curator-framework curator-client zookeeper zookeeper-jute guava slf4j-api slf4j-simple"
)
CLASS_PATH = [f"/usr/share/java/{jar}.jar" for jar in JARS.split()]

PROGRAMS = {
    "kazoo": [sys.executable, str(HERE / "contender.py")],
    "curator": [
        "java",
        "-Xmx64m",
        "-XX:+UseSerialGC",
        "-XX:TieredStopAtLevel=1",
        "-Dorg.slf4j.simpleLogger.defaultLogLevel=off",
        "-cp",
        ":".join(CLASS_PATH),
        str(HERE / "Contender.java"),
    ],
}


class Contender:
    """Another library in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def says(self, *words: str) -> str:
        """The next line, which has to be one of these."""
        async with asyncio.timeout(60):
            line = (await self._process.stdout.readline()).decode().strip()
        assert line in words, f"said {line!r} instead of {' or '.join(words)}"
        return line

    async def is_silent(self, seconds: float) -> None:
        """It says nothing for so long."""
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(seconds):
                line = await self._process.stdout.readline()
                raise AssertionError(f"said {line!r}")

    def let_go(self) -> None:
        """Have it release."""
        self._process.stdin.write(b"\n")

    def kill(self) -> None:
        """End it in the middle of whatever it does."""
        self._process.kill()


@contextlib.asynccontextmanager
async def contender(library: str, *words: str) -> AsyncIterator[Contender]:
    absent = [jar for jar in CLASS_PATH if not await asyncio.to_thread(Path(jar).exists)]
    if library == "curator" and absent:
        raise missing(absent[0], "libcurator-recipes-java", "zookeeper")
    process = await asyncio.create_subprocess_exec(
        *PROGRAMS[library],
        *words,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield Contender(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def in_line(tools, client, family: str) -> None:
    """Until there is somebody behind us: a process says that it is ready before it asks."""

    async def two() -> bool:
        return len(await tools.nodes(client, "x", family)) == 2

    await tools.until(two)


@pytest.fixture
def hosts(server) -> str:
    return f"127.0.0.1:{server.port}"


@pytest.mark.parametrize("library", PROGRAMS)
async def test_they_wait_for_us_and_we_for_them(library, hosts, client, rival, tools):
    lease = await client.lock("x").acquire()
    async with contender(library, "hold", hosts, tools.path("x")) as other:
        await other.says("ready")
        await in_line(tools, client, "lock")
        await other.is_silent(0.5)
        following = asyncio.create_task(rival.lock("x").acquire())
        await lease.release()
        await other.says("held")
        assert await client.lock("x").try_acquire() is None
        info = await client.lock("x").inspect()
        assert len(info.holders) == 1
        other.let_go()
        await other.says("released")
        async with asyncio.timeout(tools.PATIENCE):
            next_lease = await following
        assert next_lease.token > lease.token
        await next_lease.release()


@pytest.mark.parametrize("library", PROGRAMS)
async def test_a_holder_of_theirs_that_is_killed_is_followed_by_us(library, hosts, client, tools):
    async with contender(library, "hold", hosts, tools.path("x")) as other:
        await other.says("ready")
        await other.says("held")
        following = asyncio.create_task(client.lock("x").acquire())
        await asyncio.sleep(0.2)
        assert not following.done()
        other.kill()
        async with asyncio.timeout(tools.PATIENCE):
            await (await following).release()


@pytest.mark.parametrize("library", PROGRAMS)
async def test_a_session_of_ours_that_ends_is_followed_by_them(library, hosts, server, proxy, tools):
    async with tools.connect(proxy.port) as cut:
        lease = await cut.lock("x").acquire()
        async with contender(library, "hold", hosts, tools.path("x")) as other:
            await other.says("ready")
            proxy.blackhole()
            await other.says("held")
            assert not lease.held
            proxy.heal(release=False)


async def test_nobody_is_inside_with_another_while_contenders_are_killed(
    hosts, client, rival, tools, tmp_path
):
    """Each library and both of our clients take turns, then its process is killed in the middle.

    One library at a time: Curator does not see kazoo's nodes, so the two are inside together.
    """
    section = tmp_path / "section"
    loops = ["loop", hosts, tools.path("x"), str(section)]
    together = 0

    async def ours(one, turns: int) -> None:
        nonlocal together
        for _ in range(turns):
            async with one.lock("x"):
                try:
                    os.close(os.open(section, os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    together += 1
                    continue
                await asyncio.sleep(0.002)
                os.unlink(section)  # noqa: PTH108 - the loop may block for so little

    for library in PROGRAMS:
        async with contender(library, *loops, "40") as other:
            await other.says("ready")
            await asyncio.gather(ours(client, 40), ours(rival, 40), other.says("done"))
        assert together == 0
        async with contender(library, *loops, "100000") as victim:
            await victim.says("ready")
            await ours(client, 3)
            victim.kill()
            # What it may have left there goes before its session does, and so before anybody else may enter.
            await asyncio.sleep(0.2)
            section.unlink(missing_ok=True)
            await asyncio.gather(ours(client, 10), ours(rival, 10))
    assert together == 0


async def test_kazoo_by_default_does_not_see_us(hosts, client, tools):
    """What the page warns of: without extra_lock_patterns it counts only names of its own."""
    lease = await client.lock("x").acquire()
    async with contender("kazoo", "hold", hosts, tools.path("x"), "default") as other:
        await other.says("ready")
        await other.says("held")
        lease.check()
        other.let_go()
        await other.says("released")
    await lease.release()


# --- read-write locks


@pytest.mark.parametrize("library", PROGRAMS)
async def test_their_writer_waits_for_our_reader_and_ours_for_theirs(library, hosts, client, rival, tools):
    lease = await client.rwlock("x").read().acquire()
    async with contender(library, "write", hosts, tools.path("x", "rw")) as writer:
        await writer.says("ready")
        await in_line(tools, client, "rw")
        await writer.is_silent(0.5)
        # It stops later readers.
        reader = asyncio.create_task(rival.rwlock("x").read().acquire())
        await lease.release()
        await writer.says("held")
        assert await client.rwlock("x").write().try_acquire() is None
        assert not reader.done()
        writer.let_go()
        await writer.says("released")
        async with asyncio.timeout(tools.PATIENCE):
            await (await reader).release()


@pytest.mark.parametrize("library", PROGRAMS)
async def test_their_reader_is_inside_with_ours_and_waits_for_our_writer(
    library, hosts, client, rival, tools
):
    lease = await client.rwlock("x").write().acquire()
    async with contender(library, "read", hosts, tools.path("x", "rw")) as reader:
        await reader.says("ready")
        await in_line(tools, client, "rw")
        await reader.is_silent(0.5)
        await lease.downgrade()
        await reader.says("held")
        lease.check()
        writer = asyncio.create_task(rival.rwlock("x").write().acquire())
        await lease.release()
        await asyncio.sleep(0.3)
        assert not writer.done()
        reader.let_go()
        await reader.says("released")
        async with asyncio.timeout(tools.PATIENCE):
            await (await writer).release()


async def test_a_writer_of_curators_that_becomes_a_reader_lets_our_readers_in_and_no_writer(
    hosts, client, rival, tools
):
    async with contender("curator", "downgrade", hosts, tools.path("x", "rw")) as other:
        await other.says("ready")
        await other.says("held")
        reader = asyncio.create_task(client.rwlock("x").read().acquire())
        await asyncio.sleep(0.3)
        assert not reader.done()
        other.let_go()
        await other.says("downgraded")
        async with asyncio.timeout(tools.PATIENCE):
            lease = await reader
        assert await rival.rwlock("x").write().try_acquire() is None
        await lease.release()
        assert await rival.rwlock("x").write().try_acquire() is None
        other.let_go()
        await other.says("released")
        async with asyncio.timeout(tools.PATIENCE):
            await (await rival.rwlock("x").write().acquire()).release()


# --- requests to let go


async def test_a_holder_of_curators_that_may_be_asked_hears_us(hosts, client, tools):
    async with contender("curator", "revocable", hosts, tools.path("x")) as other:
        await other.says("ready")
        await other.says("held")
        assert await client.lock("x").request_release("please")
        await other.says("asked")
        other.let_go()
        await other.says("released")


async def test_curators_revoker_is_heard_by_our_holder(hosts, client, tools):
    lease = await client.lock("x").acquire()
    [node] = await tools.nodes(client, "x")
    async with contender("curator", "revoke", hosts, f"{tools.path('x')}/{node}") as other:
        await other.says("ready")
        await other.says("done")
    async with asyncio.timeout(tools.PATIENCE):
        assert await lease.release_requested == ""
    await lease.release()
