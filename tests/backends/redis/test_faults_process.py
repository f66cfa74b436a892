"""Faults of a client's process (C1 to C9): killed, stopped, blocked, forked; the others go on, and it is told."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import textwrap

import pytest

import aiolock
from tests.faults.lock_process import Worker
from tests.faults.proxy import Proxy, resp_frames
from tests.faults.redis_keys import Stopwatch, is_grant, nothing_is_left
from tests.faults.staging import queued, until, waiting

SOON = 8.0
"""Seconds that a loaded machine may add to what happens at once."""


async def test_c1_kill_nine_of_a_holder_hands_the_lock_on_within_its_ttl(server, connect, options):
    async with Worker.running(server.url, ttl=1, **options) as holder, connect(server.url) as client:
        token = (await holder.acquire("x"))["token"]
        waiter = asyncio.create_task(client.lock("x").acquire())
        await waiting(client, 1)
        await queued(client.lock("x"), 1)
        holder.kill()
        since_death = Stopwatch()
        lease = await waiter
        assert since_death.seconds < 1 + SOON
        assert lease.token > token
        await lease.release()


async def test_c1_kill_nine_of_a_holder_frees_the_lock_for_who_comes_later(server, connect, options):
    async with Worker.running(server.url, ttl=0.5, **options) as holder, connect(server.url) as client:
        await holder.acquire("x")
        holder.kill()

        async def free() -> bool:
            return not await client.lock("x").locked()

        # With no waiter in the queue that the server could have told.
        await until(free)
        lease = await client.lock("x").try_acquire()
        assert lease is not None
        await lease.release()


async def test_c2_kill_nine_of_a_waiter_costs_the_others_nothing(server, admin, connect, options, namespace):
    # With a ttl that nobody could wait for here.
    async with (
        Worker.running(server.url, ttl=300, **options) as doomed,
        connect(server.url, ttl=300) as first,
        connect(server.url, ttl=300) as last,
    ):
        held = await first.lock("x").acquire()
        doomed.tell("acquire", "x", None)
        await queued(first.lock("x"), 1)
        waiter = asyncio.create_task(last.lock("x").acquire())
        await queued(first.lock("x"), 2)
        doomed.kill()
        await until(lambda: _listeners(admin, namespace, 2))
        await held.release()
        since_release = Stopwatch()
        lease = await waiter
        assert since_release.seconds < SOON
        await lease.release()
        await nothing_is_left(admin, namespace)


async def _listeners(admin, namespace: str, count: int) -> bool:
    # A client has a channel for all its subscriptions, and one for each: <namespace>:1:to:<process>, and that with :<n>.
    channels = [channel.decode() for channel in await admin.pubsub_channels(f"{namespace}:1:to:*")]
    return (
        len({channel.removeprefix(f"{namespace}:1:to:").partition(":")[0] for channel in channels}) == count
    )


async def test_c2_kill_nine_of_a_grantee_at_the_moment_of_the_grant_costs_one_claim(
    server, admin, connect, options, namespace
):
    async with (
        # The server does not learn of the death, because the proxy keeps the connections open.
        Proxy("127.0.0.1", server.port, framing=resp_frames) as proxy,
        Worker.running(f"redis://127.0.0.1:{proxy.port}", ttl=10, **options) as doomed,
        connect(server.url, ttl=300) as first,
        connect(server.url, ttl=300) as last,
    ):
        killed = asyncio.Event()

        def on_frame(direction: str, frame: bytes) -> None:
            if direction == "down" and is_grant(frame):
                doomed.kill()
                proxy.blackhole()
                killed.set()

        held = await first.lock("x").acquire()
        doomed.tell("acquire", "x", None)
        await queued(first.lock("x"), 1)
        waiter = asyncio.create_task(last.lock("x").acquire())
        await queued(first.lock("x"), 2)
        proxy.on_frame = on_frame
        await held.release()
        await killed.wait()
        since_death = Stopwatch()
        lease = await waiter
        # A claim of a second, not the ttl of the dead one.
        assert since_death.seconds < 1 + SOON
        await lease.release()
        await nothing_is_left(admin, namespace)


async def test_c3_a_holder_stopped_beyond_its_ttl_is_lost_before_it_takes_a_step(server, connect, options):
    async with Worker.running(server.url, ttl=1, **options) as holder, connect(server.url) as client:
        old = await holder.acquire("x")
        waiter = asyncio.create_task(client.lock("x").acquire())
        await queued(client.lock("x"), 1)
        holder.stop()
        lease = await waiter
        assert lease.token > old["token"]
        holder.go_on()
        state = await holder.ask("state", "x")
        assert not state["held"]
        assert state["lost"]
        assert (await holder.event("lost"))["reason"] in {"expired", "revoked"}
        # Its leaving is nothing to whoever holds the lock now.
        await holder.ask("release", "x")
        await lease.renew()
        assert lease.held
        await lease.release()


async def test_c4_a_holder_stopped_for_less_than_half_its_ttl_keeps_the_lock(server, connect, options):
    async with Worker.running(server.url, ttl=6, **options) as holder, connect(server.url) as client:
        await holder.acquire("x")
        holder.stop()
        await asyncio.sleep(2.5)
        holder.go_on()
        assert (await holder.ask("state", "x"))["held"]
        # Longer than the hold would have lasted without a renewal.
        await asyncio.sleep(4)
        assert (await holder.ask("state", "x"))["held"]
        assert holder.seen("lost") is None
        assert await client.lock("x").try_acquire() is None


async def test_c5_a_waiter_stopped_while_it_is_granted_the_lock_is_passed_over_and_comes_back(
    server, connect, options
):
    async with (
        Worker.running(server.url, ttl=2, **options) as stopped,
        connect(server.url) as first,
        connect(server.url) as last,
    ):
        held = await first.lock("x").acquire()
        stopped.tell("acquire", "x", None)
        await queued(first.lock("x"), 1)
        waiter = asyncio.create_task(last.lock("x").acquire())
        await queued(first.lock("x"), 2)
        stopped.stop()
        await held.release()
        since_release = Stopwatch()
        lease = await waiter
        assert since_release.seconds < 1 + SOON
        stopped.go_on()
        # The grant that lies in its socket is none any more.
        await queued(first.lock("x"), 1)
        assert stopped.seen("granted") is None
        assert lease.held
        await lease.release()
        grant = await stopped.event("granted")
        assert grant["token"] > lease.token


async def test_c6_a_holder_whose_loop_was_blocked_beyond_its_ttl_knows_it_in_the_next_step(
    server, connect, options
):
    async with Worker.running(server.url, ttl=1, **options) as holder, connect(server.url) as client:
        await holder.acquire("x")
        waiter = asyncio.create_task(client.lock("x").acquire())
        await queued(client.lock("x"), 1)
        holder.tell("block", "x", 2)
        lease = await waiter
        answer = await holder.event("block")
        assert not answer["held"]
        assert answer["reason"] == "expired"
        await holder.event("lost")
        assert lease.held
        await lease.release()


async def test_c6_a_loop_blocked_for_a_moment_loses_nothing(server, options):
    async with Worker.running(server.url, ttl=6, **options) as holder:
        await holder.acquire("x")
        answer = await holder.ask("block", "x", 1.0)
        assert answer["held"]
        assert answer["reason"] is None


FORK = """
    import asyncio, os, sys, time
    import aiolock

    async def main(url, namespace):
        async with aiolock.connect(url, namespace=namespace, ttl=1.5) as client:
            async with client.lock("x") as lease, client.lock("y") as other:
                read, write = os.pipe()
                child = os.fork()
                if child == 0:
                    # Nothing of the parent's may be used, and nothing is sent.
                    said = [str(lease.held)]
                    for work in (client.lock("z").acquire(), lease.renew(), lease.release(), client.aclose()):
                        try:
                            work.send(None)
                        except StopIteration:
                            said.append("done")
                        except RuntimeError as error:
                            said.append("fork" if "fork" in str(error) else repr(error))
                        finally:
                            work.close()
                    try:
                        lease.check()
                    except RuntimeError:
                        said.append("fork")
                    os.write(write, " ".join(said).encode())
                    del client, lease, other
                    os._exit(0)
                while os.waitpid(child, os.WNOHANG) == (0, 0):
                    await asyncio.sleep(0.01)
                print(os.read(read, 1000).decode())
                # The parent goes on renewing over connections that the child did not touch.
                await asyncio.sleep(2.5)
                print(lease.held, other.held, client.stats()["lost"], client.stats()["renewal_failures"])

    asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.filterwarnings("ignore:This process")
def test_c9_a_forked_child_neither_holds_nor_renews_nor_releases(server, namespace):
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FORK), server.url, namespace],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    child, parent = done.stdout.splitlines()
    held, acquire, renew, release, aclose, check = child.split()
    assert held == "False"
    assert [acquire, renew, check] == ["fork"] * 3
    assert release in {"fork", "done"}
    assert aclose == "done"
    assert parent == "True True 0 0"


async def test_a_terminated_process_releases_in_order(server, connect, options):
    # SIGINT is what asyncio.run turns into a cancellation of the program.
    async with Worker.running(server.url, ttl=300, **options) as holder, connect(server.url) as client:
        await holder.acquire("x")
        waiter = asyncio.create_task(client.lock("x").acquire(timeout=60))
        await queued(client.lock("x"), 1)
        holder.signal(signal.SIGINT)
        lease = await waiter
        assert isinstance(lease, aiolock.Lease)
        await lease.release()
