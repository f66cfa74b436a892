"""`aiolock verify` on Redis: it finds a restart without persistence, and a mend that was taken out; it finds nothing else."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
import redis

from tests.backends.redis.test_same_server import AT_ONCE, Balanced, follow
from tests.cli.test_json import check
from tests.faults.staging import until
from tests.servers import Redis
from tests.verification import Verification, verifying

ROOT = Path(__file__).parents[3]

WITHOUT_THE_MEND = """\
import hashlib
from aiolock.backends.redis import commands
from aiolock.backends.redis.same_server import SameServer

# Whatever server a message comes from, it is believed; and a grant is published whether or not the client can be reached.
SameServer.check = lambda self: setattr(self, "known", True)
COUNTED = "redis.pcall('PUBSUB', 'NUMSUB', to .. subscription)[2]"
complete = commands.Script.__init__

def planted(self, source):
    complete(self, source.replace(COUNTED, "1"))

commands.Script.__init__ = planted
"""
"""Read by every Python of the command at its start, as `sitecustomize`."""


async def test_a_restart_without_persistence_is_found_and_is_the_exception_of_the_page():
    with Redis() as server:
        async with verifying(server.url, 8) as command:
            namespace = await command.contending()
            restarting = asyncio.create_task(_restart(server))
            status, report = await command.report()
            restarting.cancel()
            await asyncio.wait([restarting])
        check(report, "verify", "verify")
        assert report["losses"]
        assert report["grants"] > 50, report
        assert (status, report["kept"], report["contradicted"]) == (1, False, ["exclusion"]), report
        assert report["overlaps"]
        assert report["unlisted"] == 0
        assert "survives-restart" in report["listed"]
        assert report["tokens"] == []
        assert all(one["outages"] for one in report["connections"]), report
        assert 0 < report["stretch"] < 20
        with redis.Redis(port=server.port) as admin:
            assert admin.keys(f"{namespace}*") == []


async def _restart(server: Redis) -> None:
    """Restart it again and again: whether the holder or the next one is back first is a matter of chance."""
    while True:
        await asyncio.sleep(0.7)
        server.kill()
        await asyncio.to_thread(server.start)


async def _repoint(command: Verification, name: Balanced, old: Redis, new: Redis) -> None:
    """Fail over while connections stay where they are, as behind a TCP proxy, a virtual address or a service."""
    await command.contending()
    await asyncio.sleep(1)
    with redis.Redis(port=new.port) as promoted, redis.Redis(port=old.port) as demoted:
        promoted.replicaof("NO", "ONE")
        demoted.replicaof("127.0.0.1", new.port)
    name.lead(new.port)


@pytest.mark.parametrize("mended", [pytest.param(True, marks=pytest.mark.slow), False])
async def test_a_name_that_moves_is_broken_without_the_check_of_the_server(tmp_path, mended):
    environment = {}
    if not mended:
        (tmp_path / "sitecustomize.py").write_text(WITHOUT_THE_MEND)
        environment["PYTHONPATH"] = f"{tmp_path}:{ROOT}"
    with Redis(extra=AT_ONCE) as old, Redis(extra=AT_ONCE) as new:
        follow(new, old)
        async with (
            Balanced(old.port) as name,
            verifying(name.url(), 6, environment=environment) as command,
        ):
            await _repoint(command, name, old, new)
            status, report = await command.report()
    assert report["grants"] > 50, report
    assert report["kept"] is mended, report
    assert status == (0 if mended else 1)
    assert ("exclusion" in report["contradicted"]) is not mended


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
async def test_the_processes_end_with_the_command(number):
    with Redis() as server, redis.Redis(port=server.port) as admin:
        async with verifying(server.url, 60) as command:
            namespace = await command.contending()
            assert len(admin.client_list()) > 4
            command.process.send_signal(number)
            await command.process.communicate()
        assert command.process.returncode == -number
        await until(lambda: len(admin.client_list()) == 1, "no client is left")
        if number == signal.SIGINT:
            assert admin.keys(f"{namespace}*") == []
