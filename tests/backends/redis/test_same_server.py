"""The subscription at another server than the commands: a name that moved, a balanced name, a replica, an earlier primary."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator

import pytest
import redis
import redis.asyncio

import aiolock
from aiolock.backends.redis import RedisBackend, commands
from aiolock.backends.redis.diagnosis import Facts, Pushing, _pushes
from aiolock.backends.redis.run_id import agree
from aiolock.clock import system_clock
from aiolock.core.backend import Settings
from tests.backends.redis.test_scripts import Lock
from tests.backends.redis.test_scripts_many import ManyLock
from tests.contract.deployments import least_rights
from tests.faults.proxy import End, Proxy, resp_frames
from tests.faults.staging import PATIENCE, queued, until
from tests.servers import Redis

KINDS = {
    "fair": lambda client: client.lock("x", fair=True),
    "lock": lambda client: client.lock("x"),
    "semaphore": lambda client: client.semaphore("x", 1),
    "write": lambda client: client.rwlock("x").write(),
}

AT_ONCE = "--repl-diskless-sync-delay", "0"
"""A replica is there at once."""
USERS = [
    "user default on nopass ~* &* +@all",
    least_rights("least", "f*"),
    least_rights("blind", "f*", without="+info"),
    least_rights("uncounted", "f*", without="+pubsub|numsub"),
    least_rights("neither", "f*", without="+info").replace(" +pubsub|numsub", ""),
]


class Balanced(Proxy):
    """Leads every new connection to the next of several servers, and leaves those that there are."""

    def __init__(self, *ports: int, **options) -> None:
        super().__init__("127.0.0.1", ports[0], **options)
        self.turns: Iterator[int] = iter(())
        self.lead(*ports)

    def lead(self, *ports: int) -> None:
        """From now on to these, and then always to the last."""
        self.turns = itertools.chain(ports, itertools.repeat(ports[-1]))

    def welcome(self, client: End) -> None:
        self.upstream = "127.0.0.1", next(self.turns)
        super().welcome(client)

    def url(self, user: str = "") -> str:
        return f"redis://{user}{self.host}:{self.port}/0"

    def at(self, server: Redis) -> int:
        """How many connections lead there."""
        return sum(
            end.transport.get_extra_info("peername")[1] == server.port
            for end in self.ends
            if end.lane is self.down and not end.gone
        )


def follow(replica: Redis, primary: Redis) -> None:
    with redis.Redis(port=replica.port) as client:
        client.replicaof("127.0.0.1", primary.port)
        linked(client)


def linked(client: redis.Redis) -> None:
    while client.info("replication").get("master_link_status") != "up":
        client.ping()


@pytest.fixture(scope="module")
def pair():
    """A primary, and a replica of it."""
    with Redis(users=USERS, extra=AT_ONCE) as primary, Redis(users=USERS, extra=AT_ONCE) as replica:
        follow(replica, primary)
        yield primary, replica


@contextlib.asynccontextmanager
async def apart(pair) -> AsyncIterator[Balanced]:
    """A name whose first connection leads to the primary and all others to its replica: commands there, messages here."""
    primary, replica = pair
    async with Balanced(primary.port, replica.port) as name:
        yield name


async def soon(waiter: asyncio.Task[aiolock.Lease]) -> aiolock.Lease:
    async with asyncio.timeout(PATIENCE):
        return await waiter


# --- two holders


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "user", ["", "blind:password@", "neither:password@"], ids=["info", "no-info", "neither"]
)
async def test_a_message_that_only_a_replica_brings_lets_nobody_in(pair, connect, kind, user):
    lock_of = KINDS[kind]
    async with (
        apart(pair) as name,
        connect(pair[0].url, ttl=5) as one,
        connect(name.url(user), ttl=5) as two,
        connect(pair[0].url, ttl=5) as three,
    ):
        held = await lock_of(one).acquire()
        inside: list[int] = []

        async def wait() -> None:
            async with lock_of(two).acquire() as lease:
                inside.append(lease.token)

        waiter = asyncio.create_task(wait())
        await queued(lock_of(one), 1)
        # Nothing that the waiter sends arrives, so it cannot confirm a grant; messages arrive.
        name.up.blackhole()
        await held.release()
        async with lock_of(three).acquire() as lease:
            assert inside == []
            assert lease.token > held.token
            name.up.heal()
        async with asyncio.timeout(PATIENCE):
            await waiter
        assert inside[0] > lease.token


@pytest.fixture(params=["mutex", "shared"])
async def line(request, pair, namespace) -> AsyncIterator[Lock]:
    """A lock at the primary that a holds and b waits for; b is subscribed at the replica, as `replicated` hears."""
    primary, replica = pair
    async with (
        redis.asyncio.Redis(port=primary.port) as admin,
        redis.asyncio.Redis(port=replica.port) as other,
    ):
        lock = (
            Lock(admin, namespace) if request.param == "mutex" else ManyLock(admin, namespace, family="sem")
        )
        lock.replicated = Lock(other, namespace)
        await lock.replicated.listen("b")
        for holder in ("a:1", "b:1"):
            await (lock.enter(holder) if request.param == "mutex" else lock.enter(holder, (1, 1)))
        yield lock
        await lock.replicated.close()
        await lock.close()


async def test_nothing_is_published_to_who_is_not_subscribed_at_the_server_of_the_lock(line):
    before = await line.fields()
    assert await line.release("a:1") == 0
    after = await line.fields()
    assert "owner" not in after
    assert not [field for field in after if field[:2] == "h:"]
    assert after["top"] == before["top"]
    await line.admin.publish(f"{line._channels}b", "behind it")
    assert await line.replicated.heard() == ("b", "behind it")


async def test_a_token_that_was_published_is_used_up_whoever_received_it(line):
    script = "many_release" if isinstance(line, ManyLock) else "release"
    counted = b"redis.pcall('PUBSUB', 'NUMSUB', to .. subscription)[2]"
    source = commands.SCRIPTS[script].source
    assert counted in source
    # As if the subscription had ended between the count and the message.
    assert await line.admin.eval(source.replace(counted, b"1"), 1, line.key, "a:1", 0) == 0
    _, message = await line.replicated.heard()
    letter, request, token, count, *_ = message.split(" ")
    assert (letter, request) == ("g", "b:1")
    fields = await line.fields()
    assert "owner" not in fields
    assert int(fields["top"]) >= int(token) + int(count) - 1


async def test_without_the_right_to_publish_nothing_is_granted(line, pair):
    await line.listen("b")
    async with redis.asyncio.Redis(port=pair[0].port) as admin:
        name = f"mute{line.key.partition(':')[0]}"
        await admin.acl_setuser(name, enabled=True, nopass=True, keys=["*"], commands=["+@all", "-publish"])
        async with redis.asyncio.Redis(port=pair[0].port, username=name, password="") as mute:
            line.admin = mute
            assert await line.release("a:1") == 0
        line.admin = admin
        fields = await line.fields()
        assert "owner" not in fields
        assert not [field for field in fields if field[:2] == "h:"]
        await admin.acl_deluser(name)


# --- failovers


async def test_a_name_that_moves_in_a_failover_lets_no_two_in_and_pushes_again(connect, caplog):
    with Redis(extra=AT_ONCE) as old, Redis(extra=AT_ONCE) as new:
        follow(new, old)
        async with Balanced(old.port) as name, contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(connect(name.url(), ttl=3)) for _ in range(3)]
            inside: dict[str, list[int]] = {kind: [] for kind in KINDS}
            tokens: dict[str, list[int]] = {kind: [] for kind in KINDS}
            overlaps: list[object] = []
            over = asyncio.Event()

            async def work(kind: str, client: aiolock.Client) -> None:
                while not over.is_set():
                    with contextlib.suppress(aiolock.LockLost, aiolock.BackendError):
                        async with KINDS[kind](client).acquire(timeout=20) as lease:
                            overlaps.extend((kind, other, lease.token) for other in inside[kind])
                            inside[kind].append(lease.token)
                            tokens[kind].append(lease.token)
                            try:
                                await asyncio.sleep(0.003)
                            finally:
                                inside[kind].remove(lease.token)
                    await asyncio.sleep(0)

            workers = [asyncio.create_task(work(kind, client)) for kind in KINDS for client in clients]
            await until(lambda: all(len(given) > 20 for given in tokens.values()))
            # The connections stay where they are, at what is a replica now.
            with redis.Redis(port=new.port) as promoted, redis.Redis(port=old.port) as demoted:
                promoted.replicaof("NO", "ONE")
                demoted.replicaof("127.0.0.1", new.port)
            name.lead(new.port)
            await until(lambda: name.at(new) == 2 * len(clients))
            before = {kind: len(given) for kind, given in tokens.items()}
            await until(lambda: all(len(tokens[kind]) > before[kind] + 20 for kind in KINDS))
            over.set()
            await asyncio.gather(*workers)
            assert overlaps == []
            assert all(len(set(given)) == len(given) for given in tokens.values())
            assert all(client._backend._mutex.wakeups.pushed for client in clients)
            assert caplog.text.count("messages come from another server") <= len(clients)


async def test_a_server_that_has_become_a_replica_is_unavailable_for_now_and_left(connect, caplog):
    with Redis(extra=AT_ONCE) as old, Redis(extra=AT_ONCE) as new:
        follow(new, old)
        async with Balanced(old.port) as name, connect(name.url(), ttl=300) as client:
            held = await client.lock("held").acquire()
            with redis.Redis(port=new.port) as promoted, redis.Redis(port=old.port) as demoted:
                demoted.set("behind it", "")
                assert demoted.wait(1, 30_000) == 1
                promoted.replicaof("NO", "ONE")
                demoted.replicaof("127.0.0.1", new.port)
            errors: set[tuple[type[Exception], bool]] = set()

            async def gets_in() -> bool:
                try:
                    async with client.lock("x"):
                        return True
                except aiolock.BackendError as error:
                    errors.add((type(error), error.retryable))
                    return False

            # The name still leads to the old one.
            assert not await gets_in()
            name.lead(new.port)
            await until(gets_in)
            assert errors == {(aiolock.BackendUnavailable, True)}
            assert held.held
            assert caplog.text.count("lost the connection to") == 1
            assert "READONLY" in caplog.text
            await until(lambda: name.at(new) == 2 and client._backend._server.same.known)
        # A client that is opened there is refused at once.
        with pytest.raises(aiolock.BackendRefused, match=r"READONLY: .* of the primary"):
            await connect(old.url).open()
        with redis.Redis(port=old.port) as demoted:
            demoted.acl_setuser(
                "blind", enabled=True, nopass=True, keys=["*"], channels=["*"], commands=["+@all", "-info"]
            )
        with pytest.raises(aiolock.BackendRefused, match=r"READONLY: .* of the primary"):
            await connect(f"redis://blind:x@127.0.0.1:{old.port}/0").open()


@pytest.mark.parametrize("user", ["", "blind:password@"], ids=["info", "no-info"])
async def test_a_subscription_at_an_earlier_primary_is_given_up_once_the_commands_are_elsewhere(
    connect, user
):
    with Redis(users=USERS) as old, Redis(users=USERS) as new:
        async with Balanced(old.port) as name, connect(name.url(user), ttl=5) as client:
            backend = client._backend
            await until(lambda: backend._server.same.known)
            name.lead(new.port)
            # The old one goes on, and so does the subscription there.
            backend._server.connection.leave()
            assert not backend._server.same.known
            await until(lambda: backend._server.subscriber.subscribed and backend._server.same.known)
            assert (name.at(old), name.at(new)) == (0, 2)


async def test_an_earlier_subscription_that_the_server_has_not_missed_yet_does_not_count(connect, caplog):
    with Redis(users=USERS) as old, Redis(users=USERS) as new:
        async with (
            Balanced(old.port) as name,
            connect(name.url("blind:password@"), ttl=5) as client,
            redis.asyncio.Redis(port=old.port) as admin,
        ):
            backend = client._backend
            subscriber = backend._server.subscriber
            await until(lambda: backend._server.same.known)
            name.lead(new.port)
            ours = subscriber._transport.get_extra_info("sockname")[1]
            [end] = [
                end
                for end in name.ends
                if end.lane is name.up and end.transport.get_extra_info("peername")[1] == ours
            ]
            end.reset()
            await until(lambda: "messages come from another server" in caplog.text)
            assert not backend._server.same.known
            name.lead(old.port)
            await until(lambda: backend._mutex.wakeups.pushed and backend._server.same.known)
            [(_, count)] = await admin.pubsub_numsub(backend._channel)
            assert count == 2, "the server still counts the earlier one"


@pytest.mark.parametrize("user", ["blind:password@", "neither:password@"])
async def test_until_both_are_known_to_be_at_one_server_a_pushed_grant_only_wakes(
    pair, connect, namespace, user
):
    primary, _ = pair
    held_back, arrived = asyncio.Event(), asyncio.Event()

    async def hold(direction: str, frame: bytes) -> None:
        if direction == "up" and b"NUMSUB" in frame and b"EVAL" not in frame:
            arrived.set()
            await held_back.wait()

    async with (
        Balanced(primary.port, framing=resp_frames) as name,
        connect(name.url(user), ttl=5) as two,
        connect(primary.url, ttl=5) as one,
        redis.asyncio.Redis(port=primary.port) as admin,
    ):
        backend = two._backend
        held = await one.lock("x").acquire()
        waiter = asyncio.create_task(two.lock("x").acquire())
        await queued(one.lock("x"), 1)
        name.on_frame = hold
        backend._server.subscriber.leave()
        await arrived.wait()
        [claim] = backend.claims.values()
        seconds, micros = await admin.time()
        forged = f"g {claim.request_id} 99 1 {seconds * 1_000_000 + micros} 5000 0"
        assert await admin.publish(backend._channel, forged) == 1
        message = asyncio.Event()
        backend._messages.ask = lambda *_: message.set()
        await admin.publish(backend._channel, f"a {claim.request_id} 1 behind it")
        await message.wait()
        assert claim.inbox.pushed is None
        assert not waiter.done()
        held_back.set()
        await held.release()
        lease = await soon(waiter)
        assert lease.token > held.token
        await lease.release()


# --- without an end


async def test_a_subscription_that_stays_elsewhere_is_lived_with(pair, connect, caplog):
    primary, _ = pair
    async with apart(pair) as name, connect(name.url(), ttl=30) as two, connect(primary.url, ttl=30) as one:
        backend = two._backend
        assert "push" in two.capabilities
        assert not backend._mutex.wakeups.pushed
        await until(lambda: name.connections > 4)
        assert caplog.text.count("messages come from another server") == 1
        for kind in KINDS.values():
            held = await kind(one).acquire()
            waiter = asyncio.create_task(kind(two).acquire())
            await queued(kind(one), 1)
            await held.release()
            lease = await soon(waiter)
            assert lease.token > held.token
            await lease.release()
        # It is tried again and again.
        name.lead(primary.port)
        await until(lambda: backend._mutex.wakeups.pushed and backend._server.same.known)


async def test_where_nothing_can_be_asked_the_waiter_asks_instead_of_being_passed_over(pair, connect):
    """Each push would be published at the server of the lock, where no subscriber is counted, and cost the position."""
    async with (
        apart(pair) as name,
        connect(name.url("neither:password@"), ttl=30) as two,
        connect(pair[0].url, ttl=30) as one,
    ):
        await until(lambda: not two._backend._mutex.wakeups.pushed)
        held = await one.lock("x").acquire()
        waiter = asyncio.create_task(two.lock("x").acquire())
        await queued(one.lock("x"), 1)
        await held.release()
        await (await soon(waiter)).release()


async def test_the_pauses_between_subscriptions_grow_up_to_half_a_minute(pair, connect, monkeypatch):
    async with apart(pair) as name, connect(name.url()) as client:
        subscriber, pauses = client._backend._server.subscriber, []
        monkeypatch.setattr(subscriber, "give_up", pauses.append)
        for _ in range(20):
            client._backend._server.same._found(same=False)
        assert all(early < late * 2 for early, late in itertools.pairwise(pauses))
        assert 15 <= pauses[-1] <= 30


@pytest.mark.parametrize(
    ("commands", "messages", "same"),
    [("a", "a", True), ("a", "b", False), (None, "a", None), ("a", None, None), (None, None, None)],
)
def test_run_ids_decide_where_both_are_known(commands, messages, same):
    assert agree(commands, messages) is same


# --- the doctor


@pytest.mark.parametrize(
    ("user", "found"),
    [
        ("", Pushing.PUSHED),
        ("least", Pushing.PUSHED),
        ("blind", Pushing.PUSHED),
        ("uncounted", Pushing.UNCOUNTED),
    ],
)
async def test_the_doctor_says_where_the_subscription_is(pair, user, found):
    async with apart(pair) as name:
        backend = RedisBackend(name.url(f"{user}:password@" if user else ""))
        backend.bind(Settings("f-doctor", "me", 30.0, 10.0, system_clock))
        # The first connection of the diagnosis to the primary, its subscription to the replica; then both to the primary.
        for ports, pushing in (([server.port for server in pair], Pushing.APART), ([pair[0].port], found)):
            name.lead(*ports)
            [finding] = [one for one in await backend.diagnose() if one.subject == "pub/sub"]
            [expected] = _pushes(Facts(pushing=pushing))
            assert finding == expected


# --- rights


async def handed_over(one: aiolock.Client, two: aiolock.Client, kind: str) -> None:
    lock_of = KINDS[kind]
    held = await lock_of(one).acquire()
    waiter = asyncio.create_task(lock_of(two).acquire())
    await queued(lock_of(one), 1)
    await held.release()
    lease = await soon(waiter)
    assert lease.token > held.token
    await lease.release()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("user", "letter"), [("least", b"g "), ("uncounted", b"n ")])
async def test_without_the_right_to_count_the_message_says_ask(
    pair, connect, monkeypatch, user, letter, kind
):
    primary, _ = pair
    url = f"redis://{user}:password@127.0.0.1:{primary.port}/0"
    async with connect(url, ttl=300) as one, connect(url, ttl=300) as two:
        assert "push" in two.capabilities
        heard, dispatch = [], two._backend._messages.dispatch
        monkeypatch.setattr(
            two._backend._messages, "dispatch", lambda *both: (heard.append(both[1]), dispatch(*both))
        )
        await handed_over(one, two, kind)
        assert [message[:2] for message in heard] == [letter]


async def test_taken_by_force_is_told_at_once_whatever_is_known(pair, connect):
    primary, _ = pair
    for user in ("least", "neither"):
        url = f"redis://{user}:password@127.0.0.1:{primary.port}/0"
        async with connect(url, ttl=300) as one, connect(url, ttl=300) as two:
            lease = await one.lock("x").acquire()
            assert await two.lock("x").force_release()
            assert await lease.wait_lost() == "force-released"


def test_no_script_asks_for_the_right_to_count_at_open():
    assert b"NUMSUB" not in commands.PROBE.source
