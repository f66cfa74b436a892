"""The servers that other tests lean on: they come up, go down, stand still and come back as they are told."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import servers
from tests.processes import ask, program, reserve_port
from tests.servers import Etcd, MariaDB, Memcached, PostgreSQL, Redis, ServerFailed, ServerMissing, ZooKeeper

# `make test` names the servers that it has installed; the others are not looked for.
INSTALLED = os.environ.get("AIOLOCK_SERVERS", "redis").split()
MAKERS = {
    "redis": [Redis],
    "mariadb": [MariaDB],
    "memcached": [Memcached],
    "postgresql": [PostgreSQL],
    "zookeeper": [ZooKeeper, lambda: ZooKeeper(3)],
    "etcd": [Etcd, lambda: Etcd(3)],
}


def ping(redis: Redis) -> bytes:
    return ask(("127.0.0.1", redis.port), b"PING\r\nQUIT\r\n")


def state(pid: int) -> str:
    """The kernel's letter for a process: T stopped, Z dead but not yet waited for, X gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


@pytest.fixture(scope="module")
def shared():
    with Redis() as redis:
        yield redis


def test_a_started_server_answers_at_its_url(shared):
    assert shared.url == f"redis://127.0.0.1:{shared.port}/0"
    assert ping(shared).startswith(b"+PONG")


def test_a_frozen_server_stands_still_until_its_thaw(shared):
    shared.freeze()
    try:
        assert state(shared.pid) == "T"
    finally:
        shared.thaw()
    assert ping(shared).startswith(b"+PONG")


def test_starting_twice_is_refused_and_leaves_the_server_running(shared):
    pid = shared.pid
    with pytest.raises(RuntimeError, match="running already"):
        shared.start()
    assert shared.pid == pid
    assert ping(shared).startswith(b"+PONG")


def test_a_killed_server_is_gone_and_returns_on_the_same_port():
    with Redis() as redis:
        port, pid = redis.port, redis.pid
        redis.kill()
        assert state(pid) == "X"
        with pytest.raises(ConnectionRefusedError):
            ping(redis)
        redis.restart()
        assert redis.port == port
        assert redis.pid != pid
        assert ping(redis).startswith(b"+PONG")


def test_the_port_of_a_stopped_server_is_given_to_nobody_else(monkeypatch):
    with Redis() as redis, contextlib.ExitStack() as until:
        redis.stop()
        monkeypatch.setattr(random.SystemRandom, "randrange", lambda *_: redis.port)
        with pytest.raises(ServerFailed, match="no free loopback port"):
            reserve_port(until)
        redis.close()
        assert reserve_port(until) == redis.port


def test_a_frozen_server_can_be_stopped_and_leaves_no_files():
    with Redis() as redis:
        redis.freeze()
        assert redis.folder.exists()
    assert state(redis.pid) == "X"
    assert not redis.folder.exists()


def test_data_survive_a_crash_only_with_the_append_only_file():
    with Redis(appendonly=True, extra=["--appendfsync", "always"]) as kept, Redis() as lost:
        for redis in (kept, lost):
            ask(("127.0.0.1", redis.port), b"SET name value\r\nQUIT\r\n")
            redis.kill()
            redis.restart()
        assert b"value" in ask(("127.0.0.1", kept.port), b"GET name\r\nQUIT\r\n")
        assert b"value" not in ask(("127.0.0.1", lost.port), b"GET name\r\nQUIT\r\n")


def test_a_password_is_asked_for_and_stands_quoted_in_the_url():
    with Redis(password="s/cret") as redis:
        assert redis.url == f"redis://:s%2Fcret@127.0.0.1:{redis.port}/0"
        assert ping(redis).startswith(b"-NOAUTH")
        assert b"+PONG" in ask(("127.0.0.1", redis.port), b"AUTH s/cret\r\nPING\r\nQUIT\r\n")


def test_lines_of_an_acl_file_make_users():
    with Redis(users=["user default off", "user app on >word ~* &* +ping"]) as redis:
        assert ping(redis).startswith(b"-NOAUTH")
        answer = ask(("127.0.0.1", redis.port), b"AUTH app word\r\nPING\r\nGET x\r\nQUIT\r\n")
        assert b"+PONG" in answer
        assert b"-NOPERM" in answer


def test_tls_is_trusted_with_its_own_authority_only():
    with Redis(tls=True) as redis:
        ours = ssl.create_default_context(cafile=str(redis.certificates.ca))
        with (
            socket.create_connection(("127.0.0.1", redis.port)) as plain,
            ours.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
        ):
            secure.sendall(b"PING\r\n")
            assert secure.recv(100) == b"+PONG\r\n"
        with (
            socket.create_connection(("127.0.0.1", redis.port)) as plain,
            pytest.raises(ssl.SSLCertVerificationError),
        ):
            ssl.create_default_context().wrap_socket(plain, server_hostname="127.0.0.1")
        assert redis.url.startswith("rediss://")


def test_a_server_that_cannot_start_says_what_its_log_says():
    redis = Redis(extra=["--no-such-option", "1"])
    with pytest.raises(ServerFailed, match=r"(?s)redis ended with status 1 .*no-such-option"):
        redis.__enter__()
    assert not redis.folder.exists()


def test_a_missing_program_is_named_with_its_package(monkeypatch):
    monkeypatch.setattr(servers, "REDIS", "")
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(
        ServerMissing,
        match=r"redis-server is not installed: run `make servers SERVERS=redis`.* package redis-server",
    ):
        Redis()


@pytest.mark.parametrize(
    ("path", "words"),
    [("/no/such/redis-server", "cannot be run"), (sys.executable, "must be the server of a Redis or Valkey")],
)
def test_a_program_that_is_no_redis_is_refused_with_what_it_says(monkeypatch, path, words):
    monkeypatch.setattr(servers, "REDIS", path)
    with pytest.raises(ServerMissing, match=rf"AIOLOCK_REDIS={path} {words}"):
        servers.redis_server()


def test_a_redis_that_is_named_is_started_in_place_of_the_installed_one(monkeypatch, tmp_path):
    usual = servers.REDIS or program("redis-server", "valkey-server", package="redis-server", server="redis")
    chosen = tmp_path / "chosen"
    chosen.write_text(f'#!/bin/sh\necho $$ > {tmp_path}/pid\nexec {usual} "$@"\n')
    chosen.chmod(0o755)
    monkeypatch.setattr(servers, "REDIS", str(chosen))
    assert servers.redis_server()
    with Redis() as redis:
        assert int((tmp_path / "pid").read_text()) == redis.pid


def test_servers_die_with_a_parent_that_is_killed(tmp_path):
    program = "from tests.servers import Redis; print(Redis().start().pid, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TMPDIR": str(tmp_path)},  # nobody tidies up after a killed parent
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as parent:
        pid = int(parent.stdout.readline())
        assert state(pid) not in "XZ"
        parent.send_signal(signal.SIGKILL)
    while state(pid) not in "XZ":  # ends at the latest with the timeout of the test
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("make", [make for name in INSTALLED for make in MAKERS[name]])
def test_every_kind_of_server_loses_its_first_process_and_gets_it_back(make):
    with make() as server:
        ports, url = list(server.ports), server.url
        victim = server.leader() if isinstance(server, ZooKeeper) else 0
        server.kill(victim)
        assert not server.children[victim].running
        if len(server.children) > 1:
            assert server.leader() != victim
        server.restart(victim)
        assert server.children[victim].running
        assert (server.ports, server.url) == (ports, url)
        server.freeze(victim)
        assert state(server.children[victim].pid) == "T"
    assert all(not child.running for child in server.children)
