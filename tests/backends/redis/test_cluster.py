"""A cluster as its clients see it: addresses, nodes, rights, what is promised, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import redis
import redis.asyncio

import aiolock
from aiolock import BackendRefused, BackendUnavailable, ConfigError, UnsafeBackend
from aiolock.backends.redis.cluster.backend import ClusterBackend
from aiolock.backends.redis.cluster.nodes import Discovery
from aiolock.backends.redis.cluster.server import summed_up
from aiolock.backends.redis.cluster.slots import (
    Layout,
    Seeds,
    key_in,
    key_of,
    parse,
    redirection,
    slot_of,
)
from aiolock.backends.redis.commands import Script, encode
from aiolock.backends.redis.errors import was_sent
from aiolock.backends.transport import ConnectionState
from aiolock.backends.urls import Host
from aiolock.types import Finding, Level
from tests.contract.deployments import least_rights
from tests.faults.cluster_slots import Move, named
from tests.faults.staging import PATIENCE, queued, until
from tests.pace import pace
from tests.servers import Redis, RedisCluster

# --- slots, and what nodes say of them


@pytest.mark.parametrize(
    "key", [b"a", b"", b"{}a", b"x{}{y}", b"a{b}c{d}", b"aiolock:1:lock:{order:42}", "ключ".encode()]
)
def test_slots_are_those_of_the_driver(key):
    assert slot_of(key) == redis.crc.key_slot(key)


def test_a_lock_and_its_document_are_in_one_slot():
    assert slot_of(b"n:1:sem:{x}") == slot_of(b"n:1:latch.register:{x}") == slot_of(b"other:1:lock:{x}")


def test_a_key_can_be_found_in_any_slot():
    for slot in (0, 1, 12345, 16383):
        assert slot_of(key_in({slot}, "aiolock:1:probe:").encode()) == slot


def test_the_key_of_a_command_is_found_on_the_wire():
    script = Script("return 1\n")
    assert key_of(script.encode(("k{x}",), ("1", "a\r\nb"))) == b"k{x}"
    assert key_of(encode("EVAL", "return\n1", 1, "k", "v")) == b"k"
    assert key_of(encode("HMGET", "doc", "value", "stamp")) == b"doc"
    assert key_of(encode("TIME")) is None


def test_an_answer_to_cluster_slots_is_understood():
    reply = [
        [5461, 16383, [b"10.0.0.2", 7001, b"id2", [b"hostname", b"b"]], [b"10.0.0.4", 7003, b"id4"]],
        [0, 5460, [b"", 7000, b"id1"]],
    ]
    layout = parse(reply, "here")
    assert layout.primaries == (("here", 7000), ("10.0.0.2", 7001))
    assert layout.replicas == ((("10.0.0.2", 7001), 1), (("here", 7000), 0))
    assert layout.covered == 16384
    # A node that does not know its own address says nothing at all.
    assert parse([[0, 1, [None, 7000, b"id"]]], "::1").primaries == (("::1", 7000),)


@pytest.mark.parametrize("reply", [None, b"OK", [[1]], [[0, 1, [b"h", b"x"]]], 7, [[0, 1, []]]])
def test_what_is_no_answer_is_not_taken_for_one(reply):
    with pytest.raises(ValueError, match="no answer"):
        parse(reply, "h")


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("MOVED 3999 127.0.0.1:6381", (3999, ("127.0.0.1", 6381))),
        ("ASK 3999 ::1:6381", (3999, ("::1", 6381))),
        ("MOVED 1 :6381", (1, ("me", 6381))),
        ("MOVED 1 ?:6381", None),
        ("MOVED 1", None),
        ("CLUSTERDOWN Hash slot not served", None),
    ],
)
def test_where_a_node_sends_us(text, where):
    assert redirection(text, "me") == where


async def test_what_most_say_of_the_slots_counts_whatever_they_know_of_replicas():
    async def says(host: Host, replicas: int) -> Layout:
        return Layout(((0, 16383, host),), ((host, replicas),))

    old, new = ("h", 1), ("h", 2)
    discovery = Discovery(Seeds("redis+cluster://h1"), 1.0)
    for answers in (
        [says(old, 1), says(new, 0), says(new, 1)],
        [says(new, 0), says(new, 1), says(old, 1)],
    ):
        layout = await discovery._most(answers, 1.0)
        assert layout.primaries == (new,)


# --- addresses


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis+cluster://", "names no host, as in"),
        ("redis+cluster:///0", "names no host, as in"),
        ("redis+cluster://h1:7000,", "host 2 is missing"),
        ("redis+cluster://h1:secret", "no host and port"),
        ("redis+cluster://h1:7000#secret", "contains a #"),
        ("redis+cluster://h1 h2", "no host and port"),
        ("redis+cluster://h1:7000,h1:7000", "named twice"),
        ("redis+cluster://me:secret@h1:7000,me:secret@h2:7000", "stand once"),
        ("redis+cluster://h1:7000/1", "database 0 alone"),
        ("redis+cluster://h1:7000?db=1", "database 0 alone"),
        ("redis+cluster://h1:7000/secret", "database must be a number"),
        ("redis+cluster://h1:7000?ssl_ca_certs=x", "rediss"),
        ("redis+cluster://h1:7000?wrong=1", "no parameter of a Redis URL"),
        ("redis+cluster://me:sec/ret@h1:7000", "%2F"),
    ],
)
def test_addresses_that_cannot_be_meant(url, says):
    with pytest.raises(ConfigError, match=says) as caught:
        aiolock.connect(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["redis+cluster://h1", "redis+cluster://h1:7000,h2:7001/0", "rediss+cluster://h1,[::1]:7?db=0"]
)
def test_addresses_that_are_right(url):
    assert isinstance(aiolock.connect(url)._backend, ClusterBackend)


def test_an_address_is_shown_without_its_password():
    backend = aiolock.connect("redis+cluster://me:secret@h1:7000,[::1]:7")._backend
    assert "redis+cluster://me@h1:7000,[::1]:7" in repr(backend)
    assert "secret" not in repr(backend) + backend.address + "".join(
        map(repr, backend._server.endpoint.seeds)
    )


def test_options_may_be_given_beside_the_address():
    backend = aiolock.connect("redis+cluster://h1", username="me", password="secret")._backend
    assert "me@h1" in backend.address
    with pytest.raises(
        ConfigError, match=r"no option wrong; it has namespace, .* for redis\+cluster:// username"
    ):
        aiolock.connect("redis+cluster://h1", wrong=1)
    with pytest.raises(ConfigError, match="addressed by its nodes"):
        aiolock.connect("redis+cluster://h1", client=object())
    with pytest.raises(ConfigError, match="cannot be one server of a quorum"):
        aiolock.connect(["redis+cluster://h1", "redis://h2", "redis://h3"])


# --- nodes


async def test_one_address_is_enough_and_those_that_are_away_are_not_missed(cluster, connect):
    with Redis() as gone:
        port = gone.port
    async with connect(f"redis+cluster://127.0.0.1:{port},127.0.0.1:{cluster.ports[2]}") as client:
        assert len(client._backend._server.router.nodes.all) == 3
        async with asyncio.timeout(PATIENCE):
            for index in range(3):
                async with client.lock(named(cluster, index)):
                    pass


async def test_a_cluster_is_not_a_server_and_a_server_is_no_cluster(cluster, connect):
    with Redis() as server, pytest.raises(BackendRefused, match="no node of a cluster: use redis://"):
        await connect(f"redis+cluster://127.0.0.1:{server.port}").open()
    with pytest.raises(BackendRefused, match="redis\\+cluster://"):
        await connect(f"redis://127.0.0.1:{cluster.port}").open()
    findings = await connect(f"redis://127.0.0.1:{cluster.port}")._backend.diagnose()
    [role] = [finding for finding in findings if finding.subject == "role"]
    assert (role.level, role.advice) == (
        Level.ERROR,
        "use redis+cluster:// with the addresses of its nodes",
    )


async def test_a_node_of_no_cluster_yet_is_said_to_be_that(connect):
    with (
        RedisCluster(1, strangers=True) as server,
        pytest.raises(BackendUnavailable, match="knows of no node that serves a slot"),
    ):
        await connect(f"redis+cluster://127.0.0.1:{server.port}").open()


async def test_what_one_node_does_not_promise_the_cluster_does_not(cluster, connect):
    async with connect(cluster.url, require={"no-eviction", "push", "fencing", "fifo", "keep"}):
        pass
    cluster.ask(1, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    try:
        async with connect(cluster.url) as client:
            assert "no-eviction" not in client._backend.capabilities
        with pytest.raises(UnsafeBackend, match="no-eviction"):
            await connect(cluster.url, require={"no-eviction"}).open()
        found = {finding.subject: finding for finding in await client._backend.diagnose()}
    finally:
        cluster.ask(1, "CONFIG", "SET", "maxmemory-policy", "noeviction")
    assert found["maxmemory-policy"].text.startswith(f"at 127.0.0.1:{cluster.ports[1]}: it is allkeys-lru")
    assert found["nodes"].text == "all 3 primaries answer"
    assert found["slots"].text == "all 16384 are served"
    assert found["role"].text == "this is a primary of a cluster"
    assert found["failover"].level is Level.NOTE
    assert len([finding for finding in found.values() if finding.subject == "version"]) == 1


def test_findings_of_many_nodes_are_summed_up():
    def say(level: Level, text: str) -> list[Finding]:
        return [Finding(level, "clock", text)]

    a, b, c = (Host("h", port) for port in (1, 2, 3))
    same = summed_up({a: say(Level.OK, "fine"), b: say(Level.OK, "fine too")})
    assert [(finding.level, finding.text) for finding in same] == [(Level.OK, "fine")]
    [worst] = summed_up({a: say(Level.OK, "x"), b: say(Level.WARNING, "bad"), c: say(Level.WARNING, "worse")})
    assert (worst.level, worst.text) == (Level.WARNING, "at h:2, h:3: bad")


@pytest.mark.parametrize("passes", range(8))
async def test_a_close_that_was_cancelled_closes_the_rest_when_it_is_called_again(cluster, connect, passes):
    async with connect(cluster.url) as client:
        nodes = client._backend._server.router.nodes
        known = list(nodes.all.values())
        assert known
        closing = asyncio.create_task(nodes.aclose())
        for _ in range(passes):
            await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        await nodes.aclose()
        states = {end.state for node in known for end in (node.connection, node.subscriber)}
        assert states == {ConnectionState.CLOSED}


async def test_locks_are_listed_from_all_nodes(cluster, connect):
    async with connect(cluster.url) as client:
        names = sorted(named(cluster, index) for index in (0, 0, 1, 1, 2, 2))
        leases = [await client.lock(name).acquire() for name in names]
        assert [info.name for info in await client.locks()] == names
        for lease in leases:
            await lease.release()
        assert await client.locks() == []


async def test_who_is_sent_on_while_everything_is_closed_connects_to_nobody(cluster, connect):
    client = await connect(cluster.url, command_timeout=5 * pace()).open()
    router = client._backend._server.router
    [node, *_] = router.nodes.all.values()
    await client.aclose()
    for text in (f"ASK 1 127.0.0.1:{cluster.port}", f"MOVED 1 127.0.0.1:{cluster.port}", "TRYAGAIN"):
        future = asyncio.get_running_loop().create_future()
        router.redirect(node, future, encode("HMGET", "k", "f"), client._backend.settings.clock(), text)
        with pytest.raises(BackendUnavailable) as caught:
            await future
        assert not was_sent(caught.value)
        await asyncio.sleep(0)
        assert not router.nodes.all
        assert not router._rerouted


async def test_a_heartbeat_that_is_due_while_the_client_closes_is_not_sent(cluster, connect, monkeypatch):
    async with connect(cluster.url) as holder, holder.lock("x"):
        client = await connect(cluster.url).open()
        backend = client._backend
        waiter = asyncio.create_task(client.lock("x").acquire())
        await until(lambda: backend._mutex.wakeups._waiting)
        [key] = backend._mutex.wakeups._waiting
        nodes, real = backend._server.router.nodes, backend._server.router.nodes.aclose

        async def slowly() -> None:
            # What still comes in may ask for a look.
            backend._mutex.wakeups.ends(key, 0.01, first=True)
            await asyncio.sleep(0.1)
            await real()

        monkeypatch.setattr(nodes, "aclose", slowly)
        backend._mutex.wakeups.ends(key, 0.05, first=True)
        await client.aclose()
        with pytest.raises(RuntimeError, match="closed"):
            await waiter
        # A look without connections would be an error, which the loop tells.
        assert backend._mutex.wakeups._timer is None


# --- pushes and clocks


async def test_every_push_is_heard_once_from_the_node_that_sends_it(cluster, connect, namespace):
    """A cluster brings messages to all its nodes; a second copy would be judged by a wrong clock."""
    async with connect(cluster.url) as one, connect(cluster.url) as other:
        backend = other._backend
        heard: list[tuple[int, bytes]] = []
        for node in backend._server.router.nodes.all.values():
            take = node.subscriber._on_message

            def listen(payload: bytes, port: int = node.host.port, take=take) -> None:
                heard.append((port, payload))
                take(payload)

            node.subscriber._on_message = listen
        for index in range(3):
            name = named(cluster, index)
            async with one.lock(name):
                waiter = asyncio.create_task(other.lock(name).acquire())
                await queued(one.lock(name), 1)
            await (await waiter).release()
            # By now every copy that there is has come: they leave the node before the answer to the next command.
            async with other.lock(name):
                pass
            grants = [port for port, payload in heard if payload.startswith(b"g ")]
            assert grants == [cluster.ports[index]]
            heard.clear()


async def test_who_listens_at_another_node_is_not_counted_and_hears_nothing(cluster, connect, namespace):
    """Else a place would be dropped, because nobody is there, and its owner would believe that it was granted."""
    async with connect(cluster.url) as one, connect(cluster.url) as other:
        name = named(cluster, 0)
        node = other._backend._server.router.node(f"{{{name}}}")
        async with one.lock(name):
            waiter = asyncio.create_task(other.lock(name).acquire())
            await queued(one.lock(name), 1)
            pushed: list[bytes] = []
            for every in other._backend._server.router.nodes.all.values():
                every.on_message = pushed.append
            node.subscriber.leave()
        # Its other two connections stand; it finds its place dropped, and comes back.
        async with asyncio.timeout(PATIENCE):
            await (await waiter).release()
        assert not [payload for payload in pushed if payload.startswith(b"g ")]


async def test_a_grant_of_a_node_that_has_not_the_slot_only_has_its_node_asked(cluster, connect, namespace):
    async with connect(cluster.url, ttl=300) as one, connect(cluster.url, ttl=300) as other:
        name = named(cluster, 0)
        held = await one.lock(name).acquire()
        waiter = asyncio.create_task(other.lock(name).acquire())
        await queued(one.lock(name), 1)
        backend = other._backend
        [claim] = backend.claims.values()
        stranger = next(
            node for node in backend._server.router.nodes.all.values() if node.host.port == cluster.ports[1]
        )
        stranger.pair()
        await until(lambda: stranger.connection.pairing.latest is not None)
        behind = asyncio.Event()
        backend._messages.ask = lambda *_: behind.set()
        async with redis.asyncio.Redis(port=cluster.ports[1]) as admin:
            channel = f"{backend._channel}@{cluster.id(1)}"
            seconds, micros = await admin.time()
            grant = f"g {claim.request_id} 99 1 {seconds * 1_000_000 + micros} 5000 0"
            assert await admin.publish(channel, grant) == 1
            await admin.publish(channel, f"a {claim.request_id} 1 behind it")
        await behind.wait()
        assert claim.inbox.pushed is None
        assert not waiter.done()
        await held.release()
        async with asyncio.timeout(PATIENCE):
            lease = await waiter
        assert lease.token > held.token
        await lease.release()


async def test_each_node_is_paired_with_its_own_clock_alone(cluster, connect):
    async with connect(cluster.url) as client:
        router = client._backend._server.router
        nodes = list(router.nodes.all.values())
        await until(lambda: all(node.connection.pairing.latest is not None for node in nodes))
        before = [node.connection.pairing.latest for node in nodes]
        name = named(cluster, 0)
        async with client.lock(name):
            # What any answer says of time is not used: it may come from where a slot has moved to.
            Move(cluster, name).all()
        async with client.lock(name):
            pass
        assert client._backend._mutex.pairing is None
        assert [node.connection.pairing.latest for node in nodes] == before
        for node in nodes:
            node.connection.leave()
            assert node.connection.pairing.latest is None


async def test_a_node_that_has_got_another_s_address_is_connected_to_anew(cluster, connect):
    async with connect(cluster.url) as client:
        [node, *_] = client._backend._server.router.nodes.all.values()
        generation = node.connection.generation
        # As if who answers at that address had changed between the two connections.
        node._endpoints[0].node = "somebody else"
        node.subscriber.leave()
        await until(lambda: node.connection.generation > generation and node.settled)
        assert node._endpoints[0].node == node._endpoints[1].node
        async with client.lock(named(cluster, 0)):
            pass


# --- rights, passwords, TLS

RIGHTS = "+cluster|slots +cluster|myid +asking"


async def test_the_documented_rights_are_enough_also_while_a_slot_moves(cluster, connect):
    users = {
        "least": f"{least_rights('least', 'f*')} {RIGHTS}",
        "lost": f"{least_rights('lost', 'f*')} +cluster|slots",
        "blind": f"{least_rights('blind', 'f*')} +cluster|myid",
        "mute": f"{least_rights('mute', 'f*', without='+publish')} {RIGHTS}",
    }
    for index in range(3):
        for line in users.values():
            _, *words = line.split(" ")
            cluster.ask(index, "ACL", "SETUSER", *words)
    hosts = cluster.hosts
    try:
        async with (
            connect(f"redis+cluster://least:password@{hosts}") as client,
            connect(f"redis+cluster://mute:password@{hosts}") as mute,
        ):
            assert "push" in client._backend.capabilities
            assert "push" not in mute._backend.capabilities
            name = named(cluster, 0)
            async with client.lock(name):
                waiter = asyncio.create_task(mute.lock(name).acquire())
                await queued(client.lock(name), 1)
                move = Move(cluster, name).begin().keys()
                await client.lock(name).inspect()
            async with asyncio.timeout(PATIENCE):
                await (await waiter).release()
                move.end()
                async with client.lock(name):
                    pass
            assert await client.locks() == []
            found = {finding.subject: finding for finding in await client._backend.diagnose()}
            assert found["rights"].level is Level.OK
        for user in ("lost", "blind"):
            with pytest.raises(BackendRefused, match="NOPERM"):
                await connect(f"redis+cluster://{user}:password@{hosts}").open()
    finally:
        for index in range(3):
            cluster.ask(index, "ACL", "DELUSER", *users)


async def test_a_password_is_not_shown_tls_is_for_all_and_a_cluster_that_is_down_says_so(connect, caplog):
    with RedisCluster(2, node_timeout=500, tls=True, password="hunter2") as cluster:
        assert cluster.certificates is not None
        ca = str(cluster.certificates.ca)
        async with (
            connect(cluster.url, ssl_ca_certs=ca, command_timeout=5 * pace()) as client,
            client.lock("x"),
            client.lock("y"),
        ):
            assert "hunter2" not in repr(client._backend)
        with pytest.raises(BackendRefused, match="not trusted"):
            await connect(cluster.url).open()
        for wrong in ("", ":hunter3@"):
            with pytest.raises(BackendRefused) as caught:
                url = f"rediss+cluster://{wrong}{cluster.hosts}"
                await connect(url, ssl_ca_certs=ca, command_timeout=5 * pace()).open()
            assert "hunter" not in str(caught.value)
        async with connect(cluster.url, ssl_ca_certs=ca, command_timeout=5 * pace()) as client:
            slots = client._backend._server.router.nodes.all["127.0.0.1", cluster.port].slots
            name = next(name for name in map(str, range(100)) if slot_of(name.encode()) in slots)
            async with client.lock(name, ttl=600) as lease:
                cluster.kill(1)
                RedisCluster.until(lambda: "cluster_state:fail" in str(cluster.ask(0, "CLUSTER", "INFO")))
                with pytest.raises(BackendUnavailable, match="the cluster is down"):
                    await client.lock(name).inspect()
                url = cluster.url.partition(",")[0]

                # On a busy machine a client may have no time to learn more than that one address does not answer.
                message, limit = "", pace()
                while "the cluster is down" not in message:
                    limit *= 2
                    assert limit < PATIENCE, message
                    with pytest.raises(BackendUnavailable) as away:
                        await connect(url, ssl_ca_certs=ca, command_timeout=limit).open()
                    message = str(away.value)
                cluster.start(1)
                async with asyncio.timeout(PATIENCE):
                    while True:
                        with contextlib.suppress(BackendUnavailable):
                            await lease.renew()
                            break
                # It has outlived that, and so does who waits.
                assert lease.held
    assert "hunter" not in caplog.text
