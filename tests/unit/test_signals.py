"""SIGTERM and SIGINT end a program in good order: real processes, whose lock is free at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

import aiolock
from tests.servers import Redis

ROOT = Path(__file__).parents[2]

# In debug mode asyncio writes to stderr what took long.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONASYNCIODEBUG"}

PROGRAM = """
import asyncio, sys, aiolock

async def main():
    async with aiolock.connect({url!r}, namespace={namespace!r}) as client:
        async with client.lock("x", ttl=60):
            print("inside", flush=True)
            try:
                await asyncio.sleep(600)
            finally:
                print("cleaning up", flush=True)
                {cleanup}
    {after}

{run}(aiolock.run_until_signal(main()))
"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with Redis() as server:
        yield server.url


@contextlib.contextmanager
def started(
    url: str, namespace: str, *, cleanup="pass", after="pass", run="asyncio.run"
) -> Iterator[subprocess.Popen[str]]:
    """A program that holds the lock."""
    text = PROGRAM.format(url=url, namespace=namespace, cleanup=cleanup, after=after, run=run)
    with subprocess.Popen(
        # From Python 3.14 on the compiler warns of a `return` in a `finally` block.
        [sys.executable, "-W", "ignore::SyntaxWarning", "-c", text],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "inside\n", process.stderr.read()
            yield process
        finally:
            process.kill()


async def is_free(url: str, namespace: str) -> bool:
    async with aiolock.connect(url, namespace=namespace) as client:
        return await client.lock("x").try_acquire() is not None


@pytest.mark.filterwarnings("ignore:a lease of:ResourceWarning")
@pytest.mark.parametrize("run", ["asyncio.run", "__import__('uvloop').run"])
@pytest.mark.parametrize(
    ("sent", "status", "message"),
    [(signal.SIGTERM, 143, ""), (signal.SIGINT, -signal.SIGINT, "KeyboardInterrupt")],
)
async def test_a_program_that_is_ended_by_a_signal_gives_its_lock_back_at_once(
    url, sent, status, message, run
):
    namespace = secrets.token_hex(4)
    with started(url, namespace, run=run) as process:
        process.send_signal(sent)
        out, err = await asyncio.to_thread(process.communicate, None, 60)
        assert await is_free(url, namespace)
    assert process.returncode == status
    assert out == "cleaning up\n"
    assert message in err
    assert bool(message) == bool(err), err


async def test_without_it_the_lock_stays_taken(url):
    namespace = secrets.token_hex(4)
    with started(url, namespace, run="(lambda main: asyncio.run(main.cr_frame.f_locals['main']))") as process:
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(process.communicate, None, 60)
        assert not await is_free(url, namespace)
    assert process.returncode == -signal.SIGTERM


async def test_a_second_signal_ends_the_process_at_once(url):
    with started(url, secrets.token_hex(4), cleanup="await asyncio.sleep(600)") as process:
        process.send_signal(signal.SIGTERM)
        line = await asyncio.to_thread(process.stdout.readline)
        assert line == "cleaning up\n"
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(process.communicate, None, 60)
    assert process.returncode == -signal.SIGTERM


async def test_an_exception_of_the_program_goes_first(url):
    with started(url, secrets.token_hex(4), cleanup="raise ValueError('in clean-up')") as process:
        process.send_signal(signal.SIGTERM)
        _, err = await asyncio.to_thread(process.communicate, None, 60)
    assert process.returncode == 1
    assert "ValueError: in clean-up" in err


async def test_a_program_that_suppresses_the_cancellation_still_ends_by_the_signal(url):
    with started(url, secrets.token_hex(4), cleanup="return") as process:
        process.send_signal(signal.SIGTERM)
        _, err = await asyncio.to_thread(process.communicate, None, 60)
    assert (process.returncode, err) == (143, "")


def handlers() -> list[object]:
    return [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]


async def test_results_exceptions_and_cancellations_pass_through_and_handlers_are_put_back():
    before = handlers()

    async def works() -> int:
        assert handlers() != before
        await asyncio.sleep(0)
        return 7

    async def fails() -> None:
        raise ValueError("no")

    assert await aiolock.run_until_signal(works()) == 7
    with pytest.raises(ValueError, match="no"):
        await aiolock.run_until_signal(fails())
    ended = asyncio.Event()

    async def waits() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    running = asyncio.ensure_future(aiolock.run_until_signal(waits()))
    await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended.is_set()
    assert handlers() == before


@pytest.mark.parametrize(
    "factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
def test_another_thread_is_refused(factory):
    errors: list[BaseException] = []

    async def never() -> None:
        raise AssertionError("it ran")

    def run() -> None:
        loop = factory()
        try:
            loop.run_until_complete(aiolock.run_until_signal(never()))
        except BaseException as error:
            errors.append(error)
        finally:
            loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert [type(error) for error in errors] == [RuntimeError]
    assert "main thread" in str(errors[0])


async def test_what_is_no_coroutine_is_refused():
    with pytest.raises(TypeError, match="takes a coroutine"):
        await aiolock.run_until_signal(os.getpid)  # type: ignore[arg-type]
