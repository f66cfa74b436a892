"""Wrong arguments: every one is refused with a sentence that helps, before the server hears of anything."""

from __future__ import annotations

import math
import warnings
from decimal import Decimal

import pytest
import redis.asyncio

import aiolock
from aiolock.backends import redact
from aiolock.backends.memory import MemoryBackend, MemoryServer


class Hostile:
    """A value that cannot even be shown."""

    def __repr__(self) -> str:
        raise ZeroDivisionError


class Spy(MemoryBackend):
    """Counts what reaches the server."""

    def __init__(self) -> None:
        self.asked = 0
        super().__init__(server=MemoryServer(), transport=self._count_step)

    async def _count_step(self, step):
        self.asked += 1
        return step()


@pytest.fixture
async def spy():
    """An open client, and a check that the server saw nothing of the whole test."""
    backend = Spy()
    async with aiolock.Client(backend) as client:
        yield client
        assert backend.asked == 0
        assert client.stats()["held"] == client.stats()["cleanups"] == 0


NOT_SECONDS = [
    True,
    False,
    "1",
    b"1",
    -1,
    -0.001,
    math.nan,
    math.inf,
    -math.inf,
    10**400,
    400 * 86_400,
    1j,
    [],
    {},
]
NOT_SECONDS += [Decimal(1), object(), Hostile()]
NOT_TEXT = [
    3,
    b"text",
    ["text"],
    object(),
    Hostile(),
    "",
    "two\nlines",
    "\x00",
    "\ud800",
    "x" * 257,
    "😀" * 65,
]
NOT_FLAGS = [None, 0, 1, "yes", "", [], Hostile()]


def show(value: object) -> str:
    # The same in every process that collects these tests: no addresses, and no order of a set.
    if type(value) in (object, set, Hostile):
        return type(value).__name__.lower()
    return repr(value)[:20]


def each(values):
    return pytest.mark.parametrize("value", values, ids=show)


def refuses(what: str, error: type[Exception] = aiolock.ConfigError):
    """The error says which argument was wrong and what would be right."""
    return pytest.raises(error, match=rf"^{what} must be .*, not .+")


def reading(client):
    return lambda name, **options: client.rwlock(name).read(**options)


def writing(client):
    return lambda name, **options: client.rwlock(name).write(**options)


def permits(client):
    return lambda name, **options: client.semaphore(name, 3, **options)


@pytest.fixture(
    params=["lock", "reentrant_lock", reading, writing, permits],
    ids=lambda each: getattr(each, "__name__", each),
)
def make(spy, request):
    return request.param(spy) if callable(request.param) else getattr(spy, request.param)


# --- names


BAD_NAMES = [
    None,
    3,
    1.5,
    b"a",
    bytearray(b"a"),
    ["a"],
    ("a",),
    {"a"},
    object(),
    Hostile(),
    "",
    "\ud800",
    "a\udfff",
]
BAD_NAMES += ["x" * 1025, "é" * 513, "😀" * 257]


@each(BAD_NAMES)
async def test_names(make, value):
    with pytest.raises(aiolock.InvalidName, match=r"^a lock's name must "):
        make(value)


# --- options of locks


@each([*NOT_SECONDS, 0, 0.0999])
async def test_ttl_of_a_lock(make, value):
    with refuses("ttl"):
        make("a", ttl=value)


@each(NOT_SECONDS)
async def test_timeout_of_a_lock(make, value):
    with refuses("timeout"):
        make("a", timeout=value)


@each([*NOT_SECONDS, 0])
async def test_max_hold(make, value):
    with refuses("max_hold"):
        make("a", max_hold=value)


@each(["raise", "Cancel", "", 0, True, b"cancel", object(), Hostile()])
async def test_on_loss_of_a_lock(make, value):
    with refuses("on_loss"):
        make("a", on_loss=value)


@each(NOT_FLAGS)
async def test_fair(make, value):
    with refuses("fair"):
        make("a", fair=value)


@each(NOT_FLAGS)
async def test_renew(make, value):
    with refuses("renew"):
        make("a", renew=value)


@each([*NOT_SECONDS, 3.334, 10])
async def test_grace(make, value):
    with refuses("grace"):
        make("a", ttl=10, grace=value)


async def test_a_grace_leaves_room_in_the_ttl_of_the_client(make, spy):
    make("a", grace=10)
    with refuses("grace"):
        make("a", grace=10.1)
    with refuses("grace"):
        spy.locked("order:{order_id}", grace=10.1)
    with refuses("grace"):
        spy.election("a", grace=10.1)
    with refuses("grace"):
        aiolock.lock_all(spy.lock("a", ttl=20, grace=6), spy.lock("a", ttl=10))


@each(NOT_TEXT)
async def test_label_of_a_lock(make, value):
    with refuses("label"):
        make("a", label=value)


async def test_keyword_names(make):
    with pytest.raises(TypeError, match="blocking_timeout"):
        make("a", blocking_timeout=3)
    with pytest.raises(TypeError, match="positional"):
        make("a", 3)
    with pytest.raises(TypeError, match="name"):
        make()


# --- other kinds


@each(BAD_NAMES)
async def test_names_of_other_kinds(spy, value):
    for make in (
        spy.rwlock,
        spy.election,
        lambda name: spy.semaphore(name, 1),
        lambda name: spy.latch(name, 1),
        lambda name: spy.barrier(name, 1),
        lambda name: spy.once(name, at_most=1),
    ):
        with pytest.raises(aiolock.InvalidName, match=r"^a lock's name must "):
            make(value)


NOT_COUNTS = [0, -1, True, False, 1.0, "1", None, math.inf, 10**9, [], object(), Hostile(), Decimal(1)]


@each(NOT_COUNTS)
async def test_counts(spy, value):
    for what, make in (("limit", spy.semaphore), ("count", spy.latch), ("parties", spy.barrier)):
        with pytest.raises(
            aiolock.ConfigError, match=rf"^{what} must be a whole number from 1 to \d+, not .+"
        ):
            make("a", value)
    with refuses("permits"):
        spy.semaphore("a", 3, permits=value)
    with refuses("permits"):
        await spy.semaphore("a", 3).acquire(permits=value)
    with refuses("permits"):
        await spy.semaphore("a", 3).try_acquire(permits=value)
    if value != 0 or value is False:
        # 0 pauses it.
        with refuses("limit"):
            await spy.semaphore("a", 3).set_limit(value)
    with refuses("n"):
        await spy.latch("a", 3).count_down(value)


@each(NOT_SECONDS)
async def test_times_of_other_kinds(spy, value):
    for call in (spy.latch("a", 1).wait, spy.barrier("a", 2).wait, aiolock.lock_all(spy.lock("a")).acquire):
        with refuses("timeout"):
            await call(timeout=value)
    # False is 0 here, and refused all the same.
    for call in (spy.semaphore("a", 2).try_acquire, aiolock.lock_all(spy.lock("a")).try_acquire):
        with refuses("timeout"):
            await call(timeout=value)
    with refuses("timeout"):
        aiolock.lock_all(spy.lock("a"), timeout=value)
    with refuses("ttl"):
        spy.barrier("a", 2, ttl=value)
    with refuses("ttl"):
        spy.election("a", ttl=value)
    with refuses("at_most"):
        spy.once("a", at_most=value)
    with refuses("at_least"):
        spy.once("a", at_most=1, at_least=value)
    if value is not None:
        with refuses("ttl"):
            spy.once("a", ttl=value)
        with refuses("max_hold"):
            spy.once("a", max_hold=value)


@each([value for value in NOT_TEXT if value != ""])
async def test_reasons(spy, value):
    with refuses("reason"):
        await spy.lock("a").request_release(value)


@each([None, True, -1, 1.0, "7", b"7", math.inf, [], object(), Hostile()])
async def test_tokens(spy, value):
    with refuses("token"):
        await spy.is_current("a", value)


@each([None, True, 7, "host:1", bytearray(b"host:1"), b"x" * 257, [b"x"], object(), Hostile()])
async def test_values_of_campaigns(spy, value):
    with refuses("value"):
        spy.election("a").campaign(value=value)


@each(BAD_NAMES)
async def test_names_of_tokens(spy, value):
    with pytest.raises(aiolock.InvalidName, match=r"^a lock's name must "):
        await spy.is_current(value, 1)


@each([None, 3, "a", object(), Hostile()])
async def test_what_is_no_lock(spy, value):
    with refuses("lock_all"):
        aiolock.lock_all(value)
    with refuses("lock_all"):
        aiolock.lock_all(spy.lock("a"), value)


# --- calls of locks and leases


@each(NOT_SECONDS)
async def test_timeout_of_acquire(make, value):
    for call in (make("a").acquire, make("a").try_acquire):
        with refuses("timeout"):
            await call(timeout=value)
    with refuses("timeout"):
        async with make("a").acquire(timeout=value):
            pass


@each(NOT_SECONDS)
async def test_timeout_of_acquire_within_a_hold(value):
    async with aiolock.Client(MemoryBackend(server=MemoryServer())) as client:
        lock = client.reentrant_lock("a")
        async with lock:
            with refuses("timeout"):
                await lock.acquire(timeout=value)


@each([*NOT_SECONDS, 0, 0.0999])
async def test_seconds_of_extend(value):
    async with aiolock.Client(MemoryBackend(server=MemoryServer())) as client:
        lock = client.lock("a", renew=False)
        locks = aiolock.lock_all(lock, client.lock("b", renew=False))
        async with locks.acquire() as lease:
            before = lease.remaining()
            for each_of_them in (lease, *lease.parts):
                with refuses("seconds"):
                    await each_of_them.extend(value)
            assert before - 5 < lease.remaining() <= before


@each([value for value in NOT_SECONDS if value is not False])
async def test_keep_of_release(value):
    async with aiolock.Client(MemoryBackend(server=MemoryServer())) as client:
        lock = client.lock("a")
        lease = await lock.acquire()
        with refuses("keep"):
            await lease.release(keep=value)
        assert lease.held
        await lease.release()
        assert not await lock.locked()


async def test_keep_where_the_server_cannot(monkeypatch):
    async with aiolock.Client(MemoryBackend(server=MemoryServer())) as client:
        monkeypatch.setattr(MemoryBackend, "capabilities", frozenset({"exclusion"}))
        async with client.lock("a") as lease:
            with pytest.raises(aiolock.UnsupportedKind, match="memory has no release"):
                await lease.release(keep=1)
            assert lease.held


@each(NOT_SECONDS)
async def test_timeout_of_aclose(value):
    client = aiolock.Client(MemoryBackend(server=MemoryServer()))
    with refuses("timeout"):
        await client.aclose(timeout=value)
    async with client:
        with refuses("timeout"):
            await client.aclose(timeout=value)
        assert not await client.lock("a").locked()


# --- connect and Client


def by_url(**options):
    return aiolock.connect("memory://", **options)


def by_backend(**options):
    return aiolock.Client(MemoryBackend(server=MemoryServer()), **options)


@pytest.fixture(params=[by_url, by_backend])
def connect(request):
    return request.param


@each([*NOT_SECONDS, 0, 0.0999, None])
def test_ttl_of_a_client(connect, value):
    with refuses("ttl"):
        connect(ttl=value)


@each([*NOT_SECONDS, 0, 0.009])
def test_command_timeout(connect, value):
    with refuses("command_timeout"):
        connect(command_timeout=value)


@each(["raise", "", None, 0, object()])
def test_on_loss_of_a_client(connect, value):
    with refuses("on_loss"):
        connect(on_loss=value)


@each(NOT_TEXT)
def test_label_of_a_client(connect, value):
    with refuses("label"):
        connect(label=value)


@each([None, 3, b"a", "", "a b", "a/b", "a{b}", "é", "x" * 65, "a\n", "a\x00", "*", object(), Hostile()])
def test_namespace(connect, value):
    with refuses("namespace"):
        connect(namespace=value)


@each(["fencing", None, 3, True, b"fencing", [3], {"fencing", None}, [["fencing"]], object()])
def test_require(connect, value):
    with refuses("require"):
        connect(require=value)


async def test_require_what_is_not_promised():
    client = aiolock.connect("memory://", require={"survives-failover", "fencing"})
    with pytest.raises(
        aiolock.UnsafeBackend, match="memory does not promise survives-failover; this deployment promises"
    ):
        await client.open()
    with pytest.raises(RuntimeError, match="not open"):
        await client.lock("a").acquire()


@each(["memory://", None, MemoryBackend, MemoryServer(), Hostile()])
def test_backend_of_a_client(value):
    with pytest.raises(
        aiolock.ConfigError, match=r"^a client needs a backend, not .*; connect\(\) makes one from a URL"
    ):
        aiolock.Client(value)


def test_a_backend_has_one_client():
    backend = MemoryBackend()
    aiolock.Client(backend)
    with pytest.raises(RuntimeError, match="belongs to another client"):
        aiolock.Client(backend)


@each([0, "now", object()])
def test_clock_of_a_client(value):
    with refuses("clock"):
        by_backend(clock=value)


@each([0, 42, object()])
def test_random_of_a_client(value):
    with refuses("random"):
        by_backend(random=value)


def test_unknown_options_of_a_client():
    with pytest.raises(TypeError, match="timeouts"):
        by_backend(timeouts=3)
    with pytest.raises(
        aiolock.ConfigError,
        match=r"^connect\(\) has no option timeouts, nmaespace; it has namespace, ttl, timeout, .*, and for memory:// server, transport",
    ):
        aiolock.connect("memory://", timeouts=3, nmaespace="x")
    for address, scheme, own in (
        ("redis://h", "redis", "username, .*credential_provider"),
        ("unix:///s", "unix", "username, .*credential_provider"),
        ("redis+cluster://h", r"redis\+cluster", "username, .*credential_provider"),
        ("redis+sentinel://h/s", r"redis\+sentinel", "username, .*sentinel_password, credential_provider"),
        (["redis://a", "redis://b", "redis://c"], "redis", "username, .*credential_provider"),
        (redis.asyncio.Redis(), "redis", "username, .*credential_provider"),
    ):
        its = rf"^connect\(\) has no option timeouts; it has namespace, ttl, timeout, .*, and for {scheme}:// {own}; did you mean timeout\?$"
        with pytest.raises(aiolock.ConfigError, match=its):
            aiolock.connect(address, timeouts=3)
    with pytest.raises(TypeError, match="positional"):
        aiolock.connect("memory://", "x")
    with pytest.raises(TypeError, match="positional"):
        aiolock.connect(url="memory://")
    with pytest.raises(aiolock.ConfigError, match=r"^server must be a MemoryServer, not 3"):
        aiolock.connect("memory://", server=3)


# --- URLs


@each([None, 3, b"memory://", object(), {"url": "memory://"}, Hostile()])
def test_addresses_that_are_no_text(value):
    with pytest.raises(
        aiolock.ConfigError, match=r"^the address of a server must be a str such as 'redis://"
    ):
        aiolock.connect(value)


@each([[], ("memory://",), ["redis://a", "redis://b"]])
def test_too_few_servers_for_a_quorum(value):
    with pytest.raises(aiolock.ConfigError, match="a quorum needs at least 3 servers"):
        aiolock.connect(value)


@each(
    [
        ["redis://a", "redis://b", "redis://a"],
        ["redis://a", "redis://b", "rediss://user:secret@a/?tls_ca=x"],
        ["redis://a", "redis://b", "redis://a:6379/0"],
        ["redis://a", "redis://b", "redis://A:6379"],
        ["redis://a", "redis://b", "REDIS://a:6379/0"],
        ["memory://a", "memory://b", "memory://a"],
    ]
)
def test_a_server_that_is_named_twice(value):
    with pytest.raises(aiolock.ConfigError, match="one of these is named twice") as caught:
        aiolock.connect(value)
    assert "secret" not in str(caught.value)


@each(["zookeeper://c", "mysql://u:secret@c/d", "c", 3, None, ["redis://c"]])
def test_what_cannot_be_one_server_of_a_quorum(value):
    with pytest.raises(aiolock.ConfigError, match="cannot be one server of a quorum") as caught:
        aiolock.connect(["redis://a", "redis://b", value])
    assert "secret" not in str(caught.value)


def test_servers_of_a_quorum_have_one_order_however_they_are_listed():
    urls = ["redis://b", "redis://user:secret@a", "redis://c"]
    order = [repr(aiolock.connect(urls[at:] + urls[:at])._backend) for at in range(3)]
    assert len(set(order)) == 1
    assert "secret" not in order[0]


@each(
    [
        "",
        "memory",
        "memory:",
        "memory:tests",
        "localhost:6379",
        "//localhost",
        "http://localhost",
        "redis",
        "://",
    ]
)
def test_addresses_that_name_no_backend(value):
    with pytest.raises(aiolock.ConfigError, match=r"names no backend; known are .*memory://, .*redis://"):
        aiolock.connect(value)


@each(["memory://[", "redis://[::1", "redis://host]:1/"])
def test_addresses_that_are_no_urls(value):
    with pytest.raises(aiolock.ConfigError, match="is not a URL"):
        aiolock.connect(value)


@each(
    [
        "memory://a/b",
        "memory:///b",
        "memory://?x=1",
        "memory://#x",
        "memory://me@a",
        "memory://:pw@a",
    ]
)
def test_memory_takes_a_name_only(value):
    with pytest.raises(aiolock.ConfigError, match=r"^memory:// takes nothing but the name of a server"):
        aiolock.connect(value)


@pytest.mark.parametrize(
    "url",
    [
        "nosuch://user:hunter2@host/0",
        "nosuch://:hunter2@host",
        "nosuch://user:hun/ter2@host",
        "nosuch://user:hun?ter2@host",
        "nosuch://user:hun#ter2@host",
        "nosuch://user:x@hunter2@host",
        "nosuch://user:a://hunter2@host",
        "nosuch:user:hunter2@host",
        "nosuch://host/0?password=hunter2",
        "redis://user:hunter2@host℀/0",
        "redis://user:hunter2@[::1",
        "memory://user:hunter2@host",
    ],
)
def test_passwords_are_never_shown(url):
    with pytest.raises(aiolock.ConfigError) as caught:
        aiolock.connect(url)
    error: BaseException | None = caught.value
    while error is not None:
        assert "ter2" not in str(error)
        error = error.__cause__ or error.__context__


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://me@host", "redis://me@host"),
        ("redis://me:pw@host:1/0", "redis://me:***@host:1/0"),
        ("unix://:pw@/run/redis.sock?db=1", "unix://:***@/run/redis.sock?…"),
        ("host:6379", "host:6379"),
    ],
)
def test_the_rest_of_an_address_is_shown(url, shown):
    assert redact(url) == shown


# --- misuse


async def test_a_client_that_is_not_open():
    client = by_backend()
    lock = client.lock("a")
    for call in (
        lock.acquire,
        lock.try_acquire,
        lock.locked,
        lock.inspect,
        lock.force_release,
        lock.__aenter__,
        lambda: client.is_current("a", 1),
    ):
        with pytest.raises(RuntimeError, match="this client is not open: enter it with `async with` first"):
            await call()
    async with client:
        assert not await lock.locked()
        with pytest.raises(RuntimeError, match="cannot be opened"):
            await client.open()
    for call in (
        lock.acquire,
        lock.try_acquire,
        lock.locked,
        lock.inspect,
        lock.force_release,
        lock.__aenter__,
    ):
        with pytest.raises(RuntimeError, match="this client is closed: open it again first"):
            await call()


async def test_a_lease_is_entered_once(make):
    async with by_backend() as client:
        lease = await client.lock("a").acquire()
        async with lease:
            with pytest.raises(RuntimeError, match="was entered already"):
                await lease.__aenter__()
        with pytest.raises(RuntimeError, match="was entered already"):
            await lease.__aenter__()


async def test_a_released_lease_is_of_no_use():
    async with by_backend() as client:
        lease = await client.lock("a").acquire()
        await lease.release()
        await lease.release()
        assert await lease.wait_lost() is None
        for use in (lease.check, lease.guard().__enter__):
            with pytest.raises(RuntimeError, match="lease of 'a' was released: acquire the lock again"):
                use()
        for call in (lease.renew, lease.__aenter__):
            with pytest.raises(RuntimeError, match="was released"):
                await call()


async def test_leaving_what_was_not_entered(spy):
    with pytest.raises(RuntimeError, match="no block of lock 'a' is open"):
        await spy.lock("a").__aexit__(None, None, None)


def test_refused_arguments_leave_no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(aiolock.ConfigError):
            aiolock.connect("memory://", ttl=-1)


@each([0.1, 1, 30, 86_400.0, 365 * 86_400])
def test_what_is_right_is_taken(connect, value):
    lock = connect(ttl=value, command_timeout=value, label="clerk 7", namespace="a.b:c-d_9").lock(
        "a", ttl=value, timeout=value, max_hold=value, label="é 😀", fair=True, on_loss="signal"
    )
    assert lock.name == "a"
