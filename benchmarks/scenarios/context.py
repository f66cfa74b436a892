"""What every scenario needs: a server, workers, how long it may take; and what each kind of server tells about itself."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.calm import Calm
from benchmarks.measure import Report, alternate
from benchmarks.peers import LIBRARIES, absent
from benchmarks.workers import Workers
from tests.processes import Server, ask
from tests.servers import Etcd, MariaDB, Memcached, PostgreSQL, Redis, ZooKeeper

__all__ = [
    "Context",
    "EtcdContext",
    "MemcachedContext",
    "MySQLContext",
    "PostgreSQLContext",
    "RedisContext",
    "Scenario",
    "ZooKeeperContext",
]

T = TypeVar("T")

INSIDE = {"hmget", "hset", "hget", "hdel", "hexists", "time", "pexpire", "pttl", "publish", "get", "del"}
"""What scripts call inside the server; clients of ours do not."""
OWN = {"info", "quit"}
"""What looking costs."""
EXECUTED = re.compile(r"duration: [\d.]+ ms  (?:execute [^:]*|statement): (\w+)")
"""A statement in the log of PostgreSQL."""


@dataclass(slots=True)
class Context:
    """One run with one server."""

    server: Server
    workers: Workers
    quick: bool
    rounds: int
    calm: Calm
    peers: bool = True
    """Whether libraries of other languages compete."""

    @property
    def url(self) -> str:
        url: str = self.server.url  # type: ignore[attr-defined]
        return url

    def alternate(
        self, rounds: int, contestants: Sequence[str], play: Callable[[str], T]
    ) -> dict[str, list[T]]:
        """Rounds that alternate between the contestants; those in which others used the machine are run again."""
        return alternate(rounds, contestants, lambda who: self.calm.play(lambda: play(who)))

    def competing(self, report: Report, contestants: Sequence[str]) -> list[str]:
        """Return the contestants that can compete here; the report says why the others cannot."""
        if not self.peers:
            return [who for who in contestants if who not in LIBRARIES]
        if not LIBRARIES.keys().isdisjoint(contestants):
            reasons = {who: reason for who, reason in absent().items() if who in contestants}
            report.notes += [f"{who} is left out: {reason}." for who, reason in reasons.items()]
            return [who for who in contestants if who not in reasons]
        return list(contestants)

    def count(self, full: int, quick: int) -> int:
        """How many of something."""
        return quick if self.quick else full

    @contextmanager
    def pinned(self, *, apart: bool) -> Iterator[None]:
        """The server and the workers each on their own side of the machine, or all on one core.

        Left to the scheduler, two processes that take turns land on one core or on two by chance, and waking
        somebody up on another core of a virtual machine costs several times what the work does.
        """
        every = os.sched_getaffinity(0)
        first = {min(every)}
        self._pin(first, (every - first or every) if apart else first)
        try:
            yield
        finally:
            self._pin(every, every)

    def _pin(self, server: set[int], workers: set[int]) -> None:
        for thread in Path(f"/proc/{self.server.pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), server)
        self.workers.pin(workers)

    def prepare(self) -> None:
        """Make what contestants find there."""

    def flush(self) -> None:
        """Begin with a server that knows nothing of what was before."""

    def before(self) -> None:
        """A drain begins: what :meth:`after` tells is counted from here."""

    def after(self) -> dict[str, float]:
        """A drain has ended, its clients are still there: what it cost the server."""
        return {}


class RedisContext(Context):
    """Redis tells everything by INFO."""

    server: Redis

    def info(self, section: str) -> dict[str, str]:
        """A section of INFO."""
        answer = ask(self.server.socket, f"INFO {section}\r\nQUIT\r\n".encode()).decode()
        return dict(line.split(":", 1) for line in answer.splitlines() if ":" in line)

    def commands(self, *, inside: bool = False) -> dict[str, int]:
        """How often clients have called which command; with ``inside``, what scripts called instead."""
        calls = {
            name.removeprefix("cmdstat_"): int(re.match(r"calls=(\d+)", value)[1])  # type: ignore[index]
            for name, value in self.info("commandstats").items()
        }
        return {name: n for name, n in calls.items() if (name in INSIDE) == inside and name not in OWN}

    def processor_seconds(self) -> float:
        """What the server has used."""
        cpu = self.info("cpu")
        return float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"])

    def flush(self) -> None:
        ask(self.server.socket, b"FLUSHALL\r\nQUIT\r\n")


class ZooKeeperContext(Context):
    """ZooKeeper counts its packets, watches and ephemeral nodes."""

    server: ZooKeeper
    _packets = 0

    def monitor(self) -> dict[str, str]:
        """The answer to ``mntr``."""
        answer = ask(("127.0.0.1", self.server.port), b"mntr").decode()
        return dict(line.split("\t", 1) for line in answer.splitlines() if "\t" in line)

    def packets(self) -> int:
        """How many requests the server has got."""
        return int(self.monitor()["zk_packets_received"])

    def before(self) -> None:
        self._packets = self.packets()

    def after(self) -> dict[str, float]:
        return {"requests": self.packets() - self._packets}

    def until_quiet(self, nodes: int) -> None:
        """Wait until there are so many ephemeral nodes, and until nobody says anything any more but heartbeats."""
        said = -1
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            seen = self.monitor()
            if int(seen["zk_ephemerals_count"]) >= nodes and int(seen["zk_packets_received"]) - said <= 3:
                return
            said = int(seen["zk_packets_received"])
            time.sleep(0.1)
        raise RuntimeError(f"the queue did not come to rest with {nodes} nodes: {seen}")


class MySQLContext(Context):
    """MariaDB, whose most connections at one time are what a drain is asked for."""

    server: MariaDB
    _questions = 0

    def run(self, *statements: str) -> list[tuple[Any, ...]]:
        """Statements on a connection of our own; the rows of the last one."""
        from pymysql import connect

        connection = connect(unix_socket=self.server.socket, user="root", database="test", autocommit=True)
        try:
            with connection.cursor() as cursor:
                for statement in statements:
                    cursor.execute(statement)
                return list(cursor.fetchall())
        finally:
            connection.close()

    def prepare(self) -> None:
        """The tables of those who lock by hand, with the rows that they find there."""
        names = ["single", "baton", *(f"{job}:{number}" for job in ("hot", "many") for number in range(100))]
        rows = ", ".join(f"('{name}')" for name in names)
        column = "name VARCHAR(100) CHARACTER SET ascii NOT NULL PRIMARY KEY"
        self.run(
            f"CREATE TABLE IF NOT EXISTS rows_by_hand ({column}, owner INT NULL) ENGINE=InnoDB",
            f"CREATE TABLE IF NOT EXISTS held_by_hand ({column}) ENGINE=InnoDB",
            f"INSERT IGNORE INTO rows_by_hand (name) VALUES {rows}",
        )

    def status(self, name: str) -> int:
        """One of the counters of the server."""
        [(_, value)] = self.run(f"SHOW GLOBAL STATUS LIKE '{name}'")
        return int(value)

    def before(self) -> None:
        # What is read from it after that is never less than what is open now, so idle connections count.
        self.run("FLUSH STATUS")
        self._questions = self.status("Questions")

    def after(self) -> dict[str, float]:
        # Less the question itself, and the connection that asks.
        return {
            "statements": self.status("Questions") - self._questions - 1,
            "connections": self.status("Max_used_connections") - 1,
        }


class MemcachedContext(Context):
    """memcached, which counts what it was asked for."""

    server: Memcached

    def commands(self) -> Counter[str]:
        """How many items were written and read."""
        answer = ask(("127.0.0.1", self.server.port), b"stats\r\nquit\r\n").decode()
        figures = dict(line.split(" ")[1:3] for line in answer.splitlines() if line.startswith("STAT cmd_"))
        return Counter(
            UPDATE=int(figures["cmd_set"]) + int(figures["cmd_touch"]), SELECT=int(figures["cmd_get"])
        )

    def processor_seconds(self) -> float:
        """What the threads of the server have used."""
        return threads_seconds(self.server.pid)

    def flush(self) -> None:
        ask(("127.0.0.1", self.server.port), b"flush_all\r\nquit\r\n")


class EtcdContext(Context):
    """One member of etcd, which counts its requests."""

    server: Etcd

    def requests(self) -> Counter[str]:
        """How many keys were written and leases granted or prolonged, and how many transactions only read."""
        keys = sum(self.server.figure(f"etcd_mvcc_{change}_total") for change in ("put", "delete"))
        leases = self._received("Lease", "LeaseGrant", "unary")
        leases += self._received("Lease", "LeaseKeepAlive", "bidi_stream")
        return Counter(UPDATE=int(keys + leases), SELECT=int(self._received("KV", "Txn", "unary") - keys))

    def _received(self, service: str, method: str, kind: str) -> float:
        labels = f'grpc_method="{method}",grpc_service="etcdserverpb.{service}",grpc_type="{kind}"'
        return self.server.figure(f"grpc_server_msg_received_total{{{labels}}}")

    def processor_seconds(self) -> float:
        """What the threads of the server have used."""
        return threads_seconds(self.server.pid)


class PostgreSQLContext(Context):
    """PostgreSQL, whose connections at the end of a drain are what it is asked for: nobody closes any before."""

    server: PostgreSQL

    def after(self) -> dict[str, float]:
        [[count]] = self.server.ask(
            "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'"
        )
        # Less the one that asks.
        return {"connections": int(count) - 1}

    def processor_seconds(self) -> float:
        """What the processes of the server have used that are there now."""
        every = [self.server.pid, *self.server._processes()]
        return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in every) / 1e9

    @contextmanager
    def logging(self) -> Iterator[Callable[[], Counter[str]]]:
        """Have the server log the statements of connections that are opened meanwhile; how many there were, by first word."""
        log = self.server.folder / "postgresql.log"
        settings = "log_min_duration_statement = 0", "log_parameter_max_length = 0"
        self.server.ask(*(f"ALTER ROLE postgres SET {setting}" for setting in settings))
        start = log.stat().st_size
        try:
            yield lambda: Counter(EXECUTED.findall(log.read_bytes()[start:].decode()))
        finally:
            self.server.ask("ALTER ROLE postgres RESET ALL")


def threads_seconds(pid: int) -> float:
    """Return what the threads of a process have used that are there now."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((each / "schedstat").read_text().split()[0]) for each in threads) / 1e9


Scenario = Callable[[Any], Report]
