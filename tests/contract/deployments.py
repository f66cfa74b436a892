"""The servers that the contract is held against; one class each, listed at the end.

A deployment is made once per run and gives each test a namespace of its own. What it promises is written down here
independently of the backend's own words, and the contract asserts the negation of what is not promised.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import secrets
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Self
from urllib.parse import unquote, urlsplit

import pytest

import aiolock
from aiolock import Client, Lease
from aiolock.backends.memcached import MemcachedBackend
from aiolock.backends.memory import MemoryBackend, MemoryServer
from aiolock.backends.memory.backend import shared
from aiolock.backends.quorum import QuorumBackend
from aiolock.backends.redis.backend import BaseBackend
from aiolock.backends.redis.cluster.backend import ClusterBackend
from aiolock.backends.redis.cluster.server import ClusterServer
from aiolock.backends.redis.cluster.slots import NodeEndpoint, Seeds
from aiolock.backends.rows.backend import RowBackend
from aiolock.backends.rows.lockrow import decode, encode
from aiolock.backends.rows.store import Edit, RowStore
from aiolock.backends.sqlite import SqliteBackend
from aiolock.backends.urls import Host
from aiolock.core.backend import Backend
from aiolock.types import Family
from tests import servers
from tests.faults.links import Cuttable, CuttableStore, Link, Linked, Proxied, Way, drop
from tests.faults.proxy import (
    Frames,
    Proxy,
    length_frames,
    memcached_frames,
    mongodb_frames,
    mysql_frames,
    raw,
    resp_frames,
)
from tests.pace import pace
from tests.servers import EXTERNAL, SERVERS
from tests.simulation.rowstore import RowServer, RowTestBackend, forget_hold
from tests.toys import page

REDIS_PAGE = Path(__file__).parents[2] / "docs" / "backends" / "redis.md"

WORDS = frozenset({"exclusion", "fencing", "fifo", "keep", "push"})
"""The words of `require=` whose meaning the contract knows how to test."""

KINDS = frozenset(
    {
        "read-write",
        "downgrade",
        "semaphore",
        "registers",
        "requests",
        "names",
        "extension",
        "values",
        "tokens",
        "elections",
    }
)
"""What a backend may have beside the mutex: kinds of holds, a write hold that becomes one for reading, registers (latch, barrier), elections, requests to let go, a list, another life of a hold, values of campaigns; and whether
the server knows the token of a holder."""


WHOLE = bool(os.environ.get("AIOLOCK_WHOLE_CONTRACT"))
"""Whether deployments that run a part of the contract by default run all of it: `AIOLOCK_WHOLE_CONTRACT=1 pytest …`."""


class Deployment(ABC):
    """One way to run a server."""

    name: ClassVar[str]
    promises: frozenset[str] = WORDS
    """Which of the words it promises."""
    kinds: ClassVar[frozenset[str]] = KINDS
    """Which of those it has; the rest is refused with `UnsupportedKind` before any I/O."""
    slow: ClassVar[float] = 1.0
    """How much longer than in memory everything may take."""
    needs: ClassVar[str | None] = None
    """The server that the run must be about, in the words of `make test SERVERS=...`."""
    many: ClassVar[int] = 4_000
    """How many leases one client is asked to hold at once."""
    ttl: ClassVar[float] = 10.0
    """Of clients that ask for no other. Where nothing is pushed, a loss is learnt after a third of it."""
    shows: ClassVar[bool] = True
    """Whether the server knows the labels and tokens of holders."""
    queues: ClassVar[bool] = True
    """Whether waiters of several clients have an order, in which `inspect` shows them."""
    tells: ClassVar[bool] = True
    """Whether the server knows how much is left of a hold; without a clock, that is what it lasts at most."""
    forces: ClassVar[bool] = True
    """Whether a lock can be taken by force from another client."""
    external: ClassVar[bool] = False
    """Whether it can also be a server that is there already."""
    part: ClassVar[frozenset[str] | None] = None
    """The modules of the contract that are run for it by default; all if it does not say."""
    distinct: ClassVar[bool] = True
    """Whether locks of different names have different tokens, which no lock promises."""
    named: ClassVar[bool] = False
    """Whether it is run only where it is chosen by name."""
    prompt: ClassVar[bool] = True
    """Whether what is given up at the end of a timeout has left the server before the client's next request arrives."""
    reports: ClassVar[bool] = True
    """Whether renewals tell the server which task of the holder's client has the hold, and how many wait there."""
    prolongs: ClassVar[bool] = True
    """Whether a renewal that somebody asks for gives the full ttl at once."""

    def __init__(self) -> None:
        self.namespace = ""
        self.pace = 1.0
        """The same for a whole test."""

    @contextmanager
    def running(self) -> Iterator[Self]:
        """Once per run, around the tests that use it."""
        yield self

    def begin(self) -> None:
        """Before each test: a namespace that nobody has used."""
        self.namespace = f"t{secrets.token_hex(6)}"
        self.pace = pace()

    def make(self, **options: Any) -> Client:
        """A client of this server with these options of `connect`."""
        return aiolock.connect(self.found(), **options)

    def connect(self, **options: Any) -> Client:
        """A new client in the namespace of the test; not yet open."""
        # Generous: a busy machine answers late, and tests of what a command timeout does say which.
        defaults = {"namespace": self.namespace, "ttl": self.ttl, "command_timeout": 15.0}
        return self.make(**{**defaults, **options})

    def ttl_of(self, asked: float) -> float:
        """The ttl that a hold has for which so much was asked; not the same where it lives in something longer."""
        return asked

    def seconds(self, quick: float) -> float:
        """A time that is short here, given how short it is in memory."""
        return quick * self.slow * self.pace

    def lasting(self, quick: float) -> float:
        """A short ttl as well, of a hold that stays although this process gets no processor for two seconds."""
        return max(4.0, self.seconds(quick))

    way: tuple[str, int] | None = None
    """Where clients that are made now find the server, if not directly."""

    def url(self) -> str:
        """Where the server is."""
        raise NotImplementedError(f"{self.name} is at no address")

    def found(self) -> str:
        """The same for the client that is being made."""
        url = self.url()
        if self.way is None:
            return url
        parts = urlsplit(url)
        account = "".join(parts.netloc.rpartition("@")[:2])
        return parts._replace(netloc=f"{account}{self.way[0]}:{self.way[1]}").geturl()

    framing: ClassVar[Callable[[], Frames]] = raw
    """Where an answer of the server ends."""
    extends: ClassVar[bytes] = b""
    """By what the request that extends a hold is known, where another one goes before it."""

    @asynccontextmanager
    async def over(self, **options: Any) -> AsyncIterator[tuple[Client, Way]]:
        """An open client, and its way to the server, on which answers can be lost and which can be cut."""
        place = urlsplit(self.url()).netloc.rpartition("@")[2].partition(",")[0].rpartition(":")
        async with Proxy(place[0], int(place[2]), framing=self.framing) as proxy:
            self.way = proxy.host, proxy.port
            try:
                client = self.connect(**options)
            finally:
                self.way = None
            async with client:
                yield client, (way := Proxied([proxy]))
                way.settle()

    @asynccontextmanager
    async def _proxies(self, ports: Iterable[int]) -> AsyncIterator[list[Proxy]]:
        """A proxy before each of several servers."""
        async with AsyncExitStack() as stack:
            proxies = [Proxy("127.0.0.1", port, framing=self.framing) for port in ports]
            yield [await stack.enter_async_context(proxy) for proxy in proxies]

    async def forget(self, lease: Lease) -> None:
        """Make the server forget the hold of `lease`, which is told to nobody where the server can be silent about it."""
        for part in getattr(lease, "parts", [lease]):
            await self._forget(part._hold.validity.claim)

    async def _forget(self, claim: Any) -> None:
        async with self.connect(label="administrator") as client:
            assert await client._runtime.backend.force_release(claim.request.name, claim.request.kind.family)

    refuses: ClassVar[bool] = False
    """Whether a test can have the server refuse everything."""

    async def refuse(self) -> None:
        """Take the ground away from all locks, as an administrator may; it is no outage."""
        raise NotImplementedError(self.name)

    async def allow(self) -> None:  # noqa: B027 - most are put in order by the next client that is opened
        """Take that back."""

    reason: ClassVar[str] = "force-released"
    """Why a lease is lost that `lose` takes away."""

    async def lose(self, lease: Lease) -> None:
        """Make the server drop the hold of `lease`, so that its holder has to learn it."""
        async with self.connect(label="administrator") as client:
            for part in getattr(lease, "parts", [lease]):
                assert await client._runtime.backend.force_release(part.name, part.kind.family)


class Memory(Deployment):
    """The server inside this process, a function call away."""

    name = "memory"

    def make(self, **options: Any) -> Client:
        return aiolock.connect("memory://contract", **options)

    def server(self) -> MemoryServer:
        """What is behind that."""
        return shared("contract")

    def backend(self, links: list[Cuttable]) -> Backend:
        """A backend of this server, whose links are added to a list."""
        links.append(link := Cuttable())
        return MemoryBackend(server=self.server(), transport=link)

    @asynccontextmanager
    async def over(self, **options: Any) -> AsyncIterator[tuple[Client, Way]]:
        """As over a network, for servers that are in this process."""
        links: list[Cuttable] = []
        settings = {"namespace": self.namespace, "ttl": self.ttl, **options}
        async with Client(self.backend(links), **settings) as client:
            yield client, (way := Linked(links))
            way.settle()

    async def _forget(self, claim: Any) -> None:
        drop(self.server(), claim)


class FarMemory(Memory):
    """The same server behind a link with delays: everything that a network lets happen in between, happens."""

    name = "memory-far"
    prompt = False  # a request takes several passes of the loop to leave
    slow = 1.5

    def __init__(self) -> None:
        super().__init__()
        self._server = MemoryServer()

    def make(self, **options: Any) -> Client:
        return Client(MemoryBackend(server=self._server, transport=Link()), **options)

    def server(self) -> MemoryServer:
        return self._server


class MemoryQuorum(Memory):
    """Three servers inside this process, each behind a link with delays, of which two are a majority."""

    name = "memory-quorum"
    reports = False
    prompt = False
    slow = 2.0
    many = 2_000  # each is three, and a busy machine has to renew them within a third of their ttl
    promises = WORDS - {"fencing", "fifo"}
    kinds = frozenset({"read-write", "requests", "names", "values", "elections"})

    def __init__(self) -> None:
        super().__init__()
        self._servers = [MemoryServer() for _ in range(3)]

    def make(self, **options: Any) -> Client:
        return Client(
            QuorumBackend([MemoryBackend(server=one, transport=Link()) for one in self._servers]), **options
        )

    def backend(self, links: list[Cuttable]) -> Backend:
        links += [Cuttable() for _ in self._servers]
        return QuorumBackend(
            [
                MemoryBackend(server=one, transport=link)
                for one, link in zip(self._servers, links, strict=True)
            ]
        )

    async def _forget(self, claim: Any) -> None:
        for vote in claim.votes:
            if vote.granted:
                drop(vote.claim.context.server, vote.claim)


class Rows(Deployment):
    """The engine for stores with compare-and-set, over rows in this process behind a link with delays."""

    name = "rows"
    slow = 2.0
    many = 1_000
    # SQLite and PostgreSQL run the same engine through all of it; see WHOLE.
    part = frozenset({"test_exclusion", "test_loss", "test_releases"})

    def __init__(self) -> None:
        super().__init__()
        self._server = RowServer()

    def make(self, **options: Any) -> Client:
        return Client(RowTestBackend(self._server, Link()), **options)

    @asynccontextmanager
    async def over(self, **options: Any) -> AsyncIterator[tuple[Client, Way]]:
        link = Cuttable()
        settings = {"namespace": self.namespace, "ttl": self.ttl, **options}
        async with Client(RowTestBackend(self._server, link), **settings) as client:
            yield client, (way := Linked([link]))
            way.settle()

    async def _forget(self, claim: Any) -> None:
        forget_hold(self._server, claim.key, claim.member.id)


class RowsObserved(Rows):
    """The same without notifications and without a shared clock: everything is polled and observed."""

    name = "rows-observed"
    promises = WORDS - {"push"}
    slow = 3.0
    ttl = 3.0
    tells = False
    # Those in which nothing is told that others are told, or in which a session has to be observed for its whole ttl; see WHOLE.
    part = Rows.part | {
        "test_downgrade",
        "test_elections",
        "test_leases",
        "test_outages",
        "test_queueing",
        "test_readwrite",
        "test_reentrant",
        "test_reopening",
        "test_several",
    }

    def __init__(self) -> None:
        super().__init__()
        self._server = RowServer(push=False, shared_clock=False)

    def make(self, **options: Any) -> Client:
        return Client(RowTestBackend(self._server, Link(), poll=0.01), **options)


class LocalRows(Deployment):
    """Rows at no address that a proxy could stand before: their answers are lost inside the store."""

    request: ClassVar[str]
    """The coroutine method of the store that carries out each of its requests."""

    @abstractmethod
    def backend(self) -> RowBackend:
        """A new backend."""

    def make(self, **options: Any) -> Client:
        return Client(self.backend(), **options)

    @asynccontextmanager
    async def over(self, **options: Any) -> AsyncIterator[tuple[Client, Way]]:
        """As over a network, although there is none."""
        link, backend = CuttableStore(self.request), self.backend()
        make = backend.make_store
        backend.make_store = lambda: link.put_into(make())
        settings = {"namespace": self.namespace, "ttl": self.ttl, **options}
        async with Client(backend, **settings) as client:
            yield client, (way := Linked([link]))
            way.settle()


class Sqlite(LocalRows):
    """A file, which every process of this machine opens for itself."""

    name = "sqlite"
    slow = 2.0
    many = 1_000  # each is a row that is written to a disk
    promises = WORDS - {"push"}
    ttl = 3.0
    request = "_request"

    @contextmanager
    def running(self) -> Iterator[Self]:
        with TemporaryDirectory(prefix="aiolock-") as directory:
            self._file = Path(directory, "locks.db")
            yield self

    def url(self) -> str:
        return f"sqlite://{self._file}"

    def backend(self) -> SqliteBackend:
        return SqliteBackend(self.url())

    refuses = True

    async def refuse(self) -> None:
        with closing(sqlite3.connect(self._file, timeout=30, isolation_level=None)) as db:
            db.execute("DROP TABLE aiolock")

    async def allow(self) -> None:
        # A file of locks without its table is refused; the next client makes a new one.
        for file in self._file.parent.glob(f"{self._file.name}*"):  # noqa: ASYNC240 - as quick as what is tested
            file.unlink(missing_ok=True)

    async def _forget(self, claim: Any) -> None:
        """As somebody does who changes the file by hand."""
        with closing(sqlite3.connect(self._file, timeout=30, isolation_level=None)) as db:
            db.execute("BEGIN IMMEDIATE")
            [[value]] = db.execute("SELECT value FROM aiolock WHERE key = ?", [claim.key])
            row = decode(value)
            del row.holds[claim.member.id]
            changed = encode(row), secrets.token_hex(12), claim.key
            db.execute("UPDATE aiolock SET value = ?, version = ? WHERE key = ?", changed)
            db.execute("COMMIT")


class Redis(Deployment):
    """A Redis of its own, without persistence."""

    name = "redis"
    needs = "redis"
    slow = 1.5
    external = True
    framing = staticmethod(resp_frames)

    @contextmanager
    def running(self) -> Iterator[Self]:
        if "redis" in EXTERNAL:
            yield self
            return
        with servers.Redis(users=self.users()) as server:
            self._server = server
            yield self

    def users(self) -> tuple[str, ...]:
        """The lines of its list of users."""
        return ()

    def url(self) -> str:
        """How clients reach it."""
        return EXTERNAL.get("redis") or self._server.url

    refuses = True
    user: ClassVar[str] = "default"
    """The account of the clients."""

    def nodes(self) -> list[str]:
        """Where administrators reach each server of the deployment."""
        return [self._server.url]

    async def refuse(self) -> None:
        self._rights = [rule for url in self.nodes() for rule in await acl(url, "LIST")]
        for url in self.nodes():
            await acl(url, "SETUSER", self.user, "-@scripting")

    async def allow(self) -> None:
        [rights, *_] = [rule.split()[2:] for rule in self._rights if rule.split()[1] == self.user]
        for url in self.nodes():
            await acl(url, "SETUSER", self.user, "reset", *rights)

    async def _forget(self, claim: Any) -> None:
        await delete(EXTERNAL.get("redis") or self._server.url, claim.key)


async def acl(url: str, *words: str) -> list[str]:
    """Ask a server about its accounts, as a user who may do everything."""
    from redis.asyncio import Redis as Driver  # noqa: PLC0415 - only runs about Redis have a driver

    async with Driver.from_url(url, decode_responses=True) as driver:
        answer = await driver.execute_command("ACL", *words)
        await driver.connection_pool.disconnect()
    return list(answer)


async def delete(url: str, key: str) -> None:
    """As a user who may do everything."""
    from redis.asyncio import Redis as Driver  # noqa: PLC0415 - only runs about Redis have a driver

    async with Driver.from_url(url) as driver:
        assert await driver.delete(key)
        # Older versions leave it to those who have not made the pool themselves.
        await driver.connection_pool.disconnect()


class RedisWithoutPubSub(Redis):
    """The same with a user who may not use channels: nothing is pushed, waiters look."""

    name = "redis-without-pubsub"
    user = "quiet"
    external = False
    promises = WORDS - {"push"}
    slow = 2.0
    ttl = 3.0

    def users(self) -> tuple[str, ...]:
        return (
            "user default on nopass ~* &* +@all",
            "user quiet on >secret ~* resetchannels +@all",
        )

    def url(self) -> str:
        return f"redis://quiet:secret@127.0.0.1:{self._server.port}/0"


class RedisReplicas(Redis):
    """A primary whose grants count once a replica has them."""

    name = "redis-replicas"
    external = False
    part = frozenset({"test_sweep"})

    @contextmanager
    def running(self) -> Iterator[Self]:
        at_once = "--repl-diskless-sync-delay", "0"
        with servers.Redis(extra=at_once) as primary, servers.Redis(extra=at_once) as replica:
            replica.follow(primary)
            self._server = primary
            yield self

    def url(self) -> str:
        return f"{self._server.url}?replicas=1"


class RedisQuorum(Redis):
    """Three of them, of which two are a majority."""

    name = "redis-quorum"
    reports = False
    external = False
    promises = WORDS - {"fencing", "fifo"}
    kinds = frozenset({"read-write", "requests", "names", "values", "elections"})
    slow = 2.0
    many = 2_000

    @contextmanager
    def running(self) -> Iterator[Self]:
        with servers.Redis() as first, servers.Redis() as second, servers.Redis() as third:
            self._three = first, second, third
            yield self

    def make(self, **options: Any) -> Client:
        return aiolock.connect(self.nodes(), **options)

    def nodes(self) -> list[str]:
        return [server.url for server in self._three]

    @asynccontextmanager
    async def over(self, **options: Any) -> AsyncIterator[tuple[Client, Way]]:
        async with self._proxies(server.port for server in self._three) as proxies:
            urls = [f"redis://127.0.0.1:{proxy.port}/0" for proxy in proxies]
            settings = {"namespace": self.namespace, "ttl": self.ttl, **options}
            async with aiolock.connect(urls, **settings) as client:
                # One of them may be away.
                yield client, (way := Proxied(proxies, 1))
                way.settle()

    async def _forget(self, claim: Any) -> None:
        for vote in claim.votes:
            if vote.granted:
                await delete(vote.member.backend.address, vote.claim.key)


class RedisCluster(Redis):
    """Three primaries that share the slots."""

    name = "redis-cluster"
    external = False
    slow = 2.0
    distinct = False  # each makes tokens by its own clock
    # What follows from the state of one key is the same as on one server, and is tested there; see WHOLE.
    part = frozenset({"test_exclusion", "test_queueing", "test_inspection", "test_outages", "test_refusals"})

    @contextmanager
    def running(self) -> Iterator[Self]:
        with servers.RedisCluster() as cluster:
            self._cluster = cluster
            yield self

    def make(self, **options: Any) -> Client:
        return aiolock.connect(self._cluster.url, **options)

    def nodes(self) -> list[str]:
        return [f"redis://127.0.0.1:{port}" for port in self._cluster.ports]

    @asynccontextmanager
    async def over(self, **options: Any) -> AsyncIterator[tuple[Client, Way]]:
        """Each node behind a proxy of its own."""
        async with self._proxies(self._cluster.ports) as proxies:
            detours = {port: proxy.port for port, proxy in zip(self._cluster.ports, proxies, strict=True)}
            settings = {"namespace": self.namespace, "ttl": self.ttl, **options}
            async with Client(Detoured(self._cluster.url, detours), **settings) as client:
                yield client, (way := Proxied(proxies))
                way.settle()


class _DetouredSeeds(Seeds):
    """The nodes of a cluster at other ports than they say."""

    def __init__(self, url: str, ways: dict[int, int]) -> None:
        self._ways = ways
        super().__init__(url)

    def at(self, host: Host) -> NodeEndpoint:
        return super().at(Host(host.name, self._ways[host.port]))


class _DetouredServer(ClusterServer):
    """A cluster whose nodes are found behind other ports."""

    def __init__(self, url: str, ways: dict[int, int]) -> None:
        self._ways = ways
        super().__init__(url)

    def _where(self, url: str, options: dict[str, Any]) -> Seeds:  # noqa: ARG002 - has none
        return _DetouredSeeds(url, self._ways)


class Detoured(ClusterBackend):
    """A client of such a cluster."""

    def __init__(self, url: str, ways: dict[int, int]) -> None:
        BaseBackend.__init__(self, _DetouredServer(url, ways))


class RedisPlain(Redis):
    """The same with locks in the format of redis-py and others, where a poll finds what is free."""

    name = "redis-plain"
    # What does not depend on how a server decides is the same elsewhere; see WHOLE.
    part = frozenset(
        {
            "test_answers",
            "test_exclusion",
            "test_inspection",
            "test_kinds",
            "test_late_requests",
            "test_names",
            "test_outages",
            "test_queueing",
            "test_refusals",
            "test_releases",
            "test_sent",
            "test_sweep",
        }
    )
    queues = False
    promises = frozenset({"exclusion", "keep"})
    kinds = frozenset({"names"})
    reports = False
    slow = 3.0
    ttl = 3.0
    reason = "revoked"

    def make(self, **options: Any) -> Client:
        # Other libraries know no namespaces.
        return aiolock.connect(
            self.found(), dialect="plain", prefix=f"{options.get('namespace', 'aiolock')}-", **options
        )


class RedisWithLeastRights(Redis):
    """The account of the documentation, and no right more."""

    name = "redis-least-rights"
    user = "least"
    external = False

    def users(self) -> tuple[str, ...]:
        return ("user default on nopass ~* &* +@all", least_rights("least", "t*"))

    def url(self) -> str:
        return f"redis://least:password@127.0.0.1:{self._server.port}/0"


def least_rights(user: str, pattern: str, *, without: str = "") -> str:
    """The documented account as a line of an ACL file, for keys and channels of a pattern, without one of its rights."""
    found = re.search(r"ACL SETUSER aiolock (on .*?)```", REDIS_PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None, f"{REDIS_PAGE} has no ACL line"
    rights = found[1].split()
    assert not without or without in rights
    kept = [right.replace("aiolock:*", pattern) for right in rights if right != without]
    return " ".join(("user", user, *kept))


class Stored(Deployment):
    """Rows that administrators may edit, by the store of a client."""

    def store(self, backend: Any, claim: Any) -> RowStore:  # noqa: ARG002 - for servers that share the rows out
        """The store that has the row of a claim."""
        return backend.store

    async def _forget(self, claim: Any) -> None:
        async with self.connect(label="administrator") as client:
            store, made = self.store(client._runtime.backend, claim), None
            while made is None:
                [found] = await store.get([claim.key])
                row = decode(found.value)
                del row.holds[claim.member.id]
                edit = Edit(claim.key, found.version, secrets.token_urlsafe(12), encode(row))
                [made] = await store.compare_and_set([edit])


class Memcached(Stored):
    """A memcached of its own."""

    name = "memcached"
    needs = "memcached"
    framing = staticmethod(memcached_frames)
    slow = 2.0
    many = 1_000
    promises = frozenset({"fifo", "keep"})
    ttl = 3.0
    tells = False

    @contextmanager
    def running(self) -> Iterator[Self]:
        with servers.Memcached() as server:
            self._server = server
            yield self

    def url(self) -> str:
        return self._server.url

    refuses = True

    async def refuse(self) -> None:
        """Start it again with a list of passwords, which forgets all locks as well."""
        passwords = self._server.folder / "passwords"
        passwords.write_text("user:password\n")
        self._again("-Y", str(passwords))

    async def allow(self) -> None:
        self._again()

    def _again(self, *extra: str) -> None:
        self._server.stop()
        self._server.set(*extra)
        self._server.start()

    def store(self, backend: Any, claim: Any) -> RowStore:
        return backend._at(claim.request.name, claim.request.kind.family).store


class MemcachedServers(Memcached):
    """Three of them, which share the locks."""

    name = "memcached-several"
    refuses = False
    # What follows from the state of one row is the same as on one server, and is tested there; see WHOLE.
    part = frozenset({"test_exclusion", "test_inspection", "test_outages", "test_several", "test_names"})

    @contextmanager
    def running(self) -> Iterator[Self]:
        with servers.Memcached() as first, servers.Memcached() as second, servers.Memcached() as third:
            self._three = first, second, third
            yield self

    def url(self) -> str:
        return "memcached://" + ",".join(f"127.0.0.1:{server.port}" for server in self._three)

    @asynccontextmanager
    async def over(self, **options: Any) -> AsyncIterator[tuple[Client, Way]]:
        async with self._proxies(server.port for server in self._three) as proxies:
            ports = {server.port: proxy.port for server, proxy in zip(self._three, proxies, strict=True)}
            settings = {"namespace": self.namespace, "ttl": self.ttl, **options}
            async with Client(DetouredMemcached(self.url(), ports), **settings) as client:
                yield client, (way := Proxied(proxies))
                way.settle()


class DetouredMemcached(MemcachedBackend):
    """Servers that are found at other ports than those by which locks choose them."""

    def __init__(self, url: str, ports: dict[int, int]) -> None:
        super().__init__(url)
        for server in self.servers:
            server.host = server.host._replace(port=ports[server.host.port])


class ZooKeeper(Deployment):
    """A single ZooKeeper; holds live as long as their session, whatever ttl their lock asks for."""

    name = "zookeeper"
    reports = False
    framing = staticmethod(length_frames)
    needs = "zookeeper"
    promises = WORDS - {"keep"}
    slow = 10.0
    kinds = KINDS - {"extension"}
    prolongs = False
    many = 1_000  # each is a node that a quorum has to agree on
    external = True
    servers: ClassVar[int] = 1

    @contextmanager
    def running(self) -> Iterator[Self]:
        if "zookeeper" in EXTERNAL:
            self._url = EXTERNAL["zookeeper"]
            yield self
            return
        with servers.ZooKeeper(self.servers) as server:
            self._url = server.url
            yield self

    def ttl_of(self, asked: float) -> float:
        return 3.0 * self.pace

    def make(self, **options: Any) -> Client:
        # Short for the tests of losses; whoever asks for a long ttl has to do with a longer one.
        timeout = min(60.0, (3 if options["ttl"] <= self.ttl else 12) * self.pace)
        return aiolock.connect(f"{self.found()}?session_timeout={timeout}&tick_time=0.5", **options)

    def url(self) -> str:
        return self._url

    refuses = True

    async def refuse(self) -> None:
        """Close the nodes of the locks, which are there for one test only, to all clients."""
        await asyncio.to_thread(self._close_nodes)

    def _close_nodes(self) -> None:
        from kazoo.client import KazooClient  # noqa: PLC0415 - only runs about ZooKeeper have a driver
        from kazoo.security import make_acl  # noqa: PLC0415

        zoo = KazooClient(self._url.split("//")[1])
        zoo.start()
        try:
            for family in zoo.get_children(self.namespace):
                for lock in zoo.get_children(f"{self.namespace}/{family}"):
                    zoo.set_acls(
                        f"{self.namespace}/{family}/{lock}", [make_acl("world", "anyone", admin=True)]
                    )
        finally:
            zoo.stop()
            zoo.close()


class ZooKeeperEnsemble(ZooKeeper):
    """Three of them, of which two make a quorum; each client is at a random one."""

    name = "zookeeper-ensemble"
    external = False
    servers = 3


class MariaDB(Deployment):
    """MariaDB in the lease mode: rows with an expiry, and turnstiles to wait at."""

    name = servers.mariadb_name()
    needs = "mariadb"
    framing = staticmethod(mysql_frames)
    extends = b"extension = "  # not what the listeners of the client ask
    slow = 2.0
    many = 1_000  # each is a row that is written to a disk
    external = True
    query: ClassVar[str] = ""

    refuses = True

    async def refuse(self) -> None:
        async with self.connect(label="administrator") as client:
            await client._runtime.backend._context.ask(
                "DROP TABLE aiolock, aiolock_requests, aiolock_registers"
            )

    async def _forget(self, claim: Any) -> None:
        async with self.connect(label="administrator") as client:
            backend = client._runtime.backend
            if claim.request.kind.family in (Family.RW, Family.SEMAPHORE):
                packet = f"DELETE FROM aiolock_requests WHERE owner = '{claim.owner}'"
            else:
                packet = f"DELETE FROM aiolock WHERE id = '{claim.key}' AND owner = '{claim.owner}'"
            [answer] = await backend._context.ask(packet)
            assert answer.changed == 1

    @contextmanager
    def running(self) -> Iterator[Self]:
        if "mariadb" in EXTERNAL:
            self._url = EXTERNAL["mariadb"]
            yield self
            return
        with servers.MariaDB(extra=["--max-connections=400"]) as server:
            self._url = server.url
            yield self

    def make(self, **options: Any) -> Client:
        # Hundreds of requests at once go out one after the other; on a loaded machine that takes its time.
        return aiolock.connect(self.found() + self.query, **{"command_timeout": 15.0, **options})

    def url(self) -> str:
        return self._url


class MariaDBSessions(MariaDB):
    """The session mode: locks are user locks, which end with the connection that has them."""

    name = f"{MariaDB.name}-session"
    refuses = False  # user locks need neither a table nor a right
    kinds = frozenset({"elections"})
    promises = WORDS - {"fencing", "keep"}
    shows = False
    reports = False
    query = "?mode=session"
    reason = "session"
    """A foreign session that is ended says nothing about who did it."""

    async def _forget(self, claim: Any) -> None:
        """As something does that stands between us and the server, and uses the session for others in between."""
        await claim.session.run("DO RELEASE_ALL_LOCKS()")


class MariaDBRows(MariaDBSessions):
    """The row mode: locks are row locks of open transactions, each of which has a connection."""

    name = f"{MariaDB.name}-row"
    # The table is locked by those who hold and wait: it cannot be dropped.
    many = 80
    forces = False
    query = "?mode=row&connections=100"

    @contextmanager
    def running(self) -> Iterator[Self]:
        with super().running():
            [[version]] = servers.ExternalMariaDB(self._url).ask("SELECT VERSION()")
            if "MariaDB" not in version:
                # MySQL serves the transaction that keeps most others waiting.
                self.promises -= {"fifo"}
            yield self

    async def lose(self, lease: Lease) -> None:
        await self._forget(lease._hold.validity.claim)

    async def _forget(self, claim: Any) -> None:
        """Which transaction has a row only administrators may see: one of them ends its connection."""
        import aiomysql  # noqa: PLC0415 - only runs about MariaDB have a driver

        parts = urlsplit(self._url)
        connection = await aiomysql.connect(
            host=parts.hostname or "127.0.0.1",
            port=parts.port or 3306,
            user=unquote(parts.username or ""),
            password=unquote(parts.password or ""),
        )
        try:
            async with connection.cursor() as cursor:
                await cursor.execute(f"KILL {claim.session.id}")
        finally:
            connection.close()


class MariaDBOverRows(Stored):
    """MariaDB with the engine over rows, which is to take the place of the other modes."""

    name = f"{MariaDB.name}-engine"
    needs = "mariadb"
    framing = staticmethod(mysql_frames)
    slow = 2.0
    many = 1_000  # each is a row that is written to a disk
    external = True
    distinct = False  # rows of one transaction may have the same microsecond
    named = True
    refuses = True

    async def refuse(self) -> None:
        await asyncio.to_thread(
            servers.ExternalMariaDB(self._url.replace("mysql+rows:", "mysql:")).ask, "DROP TABLE aiolock_rows"
        )

    @contextmanager
    def running(self) -> Iterator[Self]:
        if "mariadb" in EXTERNAL:
            self._url = EXTERNAL["mariadb"].replace("mysql:", "mysql+rows:")
            yield self
            return
        with servers.MariaDB(extra=["--max-connections=400"]) as server:
            self._url = server.url.replace("mysql:", "mysql+rows:")
            yield self

    def url(self) -> str:
        return self._url


class PostgreSQL(Stored):
    """PostgreSQL: rows that are changed by compare-and-set, and notifications."""

    name = servers.postgresql_name()
    needs = "postgresql"
    slow = 2.0
    many = 1_000  # each is a row that is written to a disk
    external = True
    distinct = False  # rows of one statement may have the same microsecond

    @contextmanager
    def running(self) -> Iterator[Self]:
        if "postgresql" in EXTERNAL:
            self._url = EXTERNAL["postgresql"]
            yield self
            return
        with servers.PostgreSQL() as server:
            self._url = server.url
            yield self

    def url(self) -> str:
        return self._url

    refuses = True

    async def refuse(self) -> None:
        import asyncpg  # noqa: PLC0415 - only runs about PostgreSQL have a driver

        connection = await asyncpg.connect(self._url)
        try:
            await connection.execute("DROP TABLE aiolock")
        finally:
            await connection.close()


class Etcd(Stored):
    """An etcd of one member: keys that are changed by transactions, and watches."""

    name = "etcd"
    needs = "etcd"
    slow = 3.0
    many = 500  # each is a key that is written to a disk
    tells = False
    distinct = False  # counted from one revision
    members: ClassVar[int] = 1
    extends = b'"d":'  # in the row of a session, for which a lease is asked before
    # PostgreSQL and memcached run the same engine through all of it; see WHOLE.
    part = frozenset(
        {
            "test_answers",
            "test_downgrade",
            "test_exclusion",
            "test_late_requests",
            "test_loss",
            "test_outages",
            "test_readwrite",
            "test_refusals",
            "test_releases",
            "test_sent",
            "test_several",
            "test_stopped_holders",
        }
    )

    @contextmanager
    def running(self) -> Iterator[Self]:
        with servers.Etcd(self.members) as server:
            self._server = server
            yield self

    def url(self) -> str:
        return self._server.url

    refuses = True

    async def refuse(self) -> None:
        """Demand a login."""
        await asyncio.to_thread(self._demand_login)

    def _demand_login(self) -> None:
        self._server.ctl("user", "add", "root:password")
        self._server.ctl("user", "grant-role", "root", "root")
        self._server.ctl("auth", "enable")

    async def allow(self) -> None:
        await asyncio.to_thread(self._admit_all)

    def _admit_all(self) -> None:
        self._server.ctl("--user=root:password", "auth", "disable")
        self._server.ctl("user", "delete", "root")


class EtcdCluster(Etcd):
    """Three members."""

    name = "etcd-cluster"
    members = 3
    refuses = False
    part = frozenset({"test_exclusion", "test_loss", "test_outages"})


class MongoDB(Stored):
    """A MongoDB by URL: documents that are changed by compare-and-set, and polled."""

    name = "mongodb"
    needs = "mongodb"
    framing = staticmethod(mongodb_frames)
    # Until it has run on a MongoDB.
    promises = WORDS - {"exclusion", "push"}
    slow = 3.0
    many = 500  # each is a document that is written to a disk
    distinct = False  # counted from one clock of all writes
    ttl = 6.0  # the stand-in is slow beside other work
    passes = 64  # no holder is told that others wait
    external = True

    @contextmanager
    def running(self) -> Iterator[Self]:
        if "mongodb" not in EXTERNAL:
            servers.MongoDB()
        self._url = EXTERNAL["mongodb"]
        yield self

    def url(self) -> str:
        return self._url

    def found(self) -> str:
        # A proxy stands before one member; the driver would find the others by what that says.
        direct = "" if self.way is None or "directConnection" in self._url else "directConnection=true"
        return "?".join(filter(None, [super().found(), direct])) if "?" not in self._url else super().found()

    refuses = True

    async def refuse(self) -> None:
        await asyncio.to_thread(servers.mongodb_ask, self._url, {"drop": "aiolock"})


class MongoStandIn(MongoDB):
    """What speaks like a MongoDB and is none."""

    name = "mongodb-standin"
    needs = "mongodb-standin"
    external = False
    # SQLite, PostgreSQL and memcached run the same engine through all of it; see WHOLE.
    part = frozenset(
        {
            "test_answers",
            "test_exclusion",
            "test_inspection",
            "test_loss",
            "test_outages",
            "test_refusals",
            "test_releases",
            "test_sent",
        }
    )

    @contextmanager
    def running(self) -> Iterator[Self]:
        with servers.MongoStandIn() as server:
            self._url = server.url
            yield self


_ALL: tuple[type[Deployment], ...] = (
    Memory,
    FarMemory,
    MemoryQuorum,
    Rows,
    RowsObserved,
    Sqlite,
    Redis,
    RedisWithoutPubSub,
    RedisWithLeastRights,
    RedisReplicas,
    RedisQuorum,
    RedisCluster,
    RedisPlain,
    Memcached,
    MemcachedServers,
    ZooKeeper,
    ZooKeeperEnsemble,
    MariaDB,
    MariaDBSessions,
    MariaDBRows,
    MariaDBOverRows,
    PostgreSQL,
    Etcd,
    EtcdCluster,
    MongoDB,
    MongoStandIn,
)


CHOSEN = frozenset(os.environ.get("AIOLOCK_DEPLOYMENTS", "").split())
"""The deployments that the run is limited to, by name, or as `module:Class` for one that is not listed here:
`AIOLOCK_DEPLOYMENTS="memory redis my_deployments:MyStore" pytest …`; empty for all that are."""


def registry() -> tuple[type[Deployment], ...]:
    """Deployments of this run. Asked for when tests are collected: the options of the run are known only then."""
    listed = {cls.name: cls for cls in (*_ALL, *_toys())}
    if unknown := {word for word in CHOSEN if ":" not in word} - set(listed):
        raise pytest.UsageError(
            f"AIOLOCK_DEPLOYMENTS: no {', '.join(sorted(unknown))} among {', '.join(listed)}"
        )
    others = tuple(_imported(word) for word in sorted(CHOSEN) if ":" in word)
    return others + tuple(
        cls
        for cls in listed.values()
        if (cls.needs is None or (cls.needs in SERVERS and (cls.external or cls.needs not in EXTERNAL)))
        and (cls.name in CHOSEN if CHOSEN or cls.named else True)
    )


def _imported(word: str) -> type[Deployment]:
    module, _, name = word.partition(":")
    found: type[Deployment] = getattr(importlib.import_module(module), name)
    return found


def _toys() -> tuple[type[Deployment], ...]:
    """Those of the page on writing a backend, whose code imports this module."""
    toys = page.modules()["toy_deployments"]
    # The servers run the same engine, and the same rules of a lock service, through all of it; see WHOLE.
    toys.ToyRows.part = frozenset(
        {"test_answers", "test_exclusion", "test_loss", "test_outages", "test_releases"}
    )
    toys.ToyLocks.part = toys.ToyRows.part | {"test_inspection", "test_kinds", "test_requests", "test_sweep"}
    return toys.ToyRows, toys.ToyLocks
