"""What we lean on in aiozk is there, and what we work round in it is still wrong: each of its faults that we replace, shown."""

from __future__ import annotations

import asyncio
import inspect
import logging
import struct
from importlib.metadata import version

import aiozk
import pytest
from aiozk import exc, protocol
from aiozk.protocol.primitives import Long
from aiozk.retry import RetryPolicy
from aiozk.session import Session
from aiozk.states import SessionStateMachine, States

from aiolock.backends.zookeeper import frames, session, wire
from aiolock.backends.zookeeper.connecting import framed
from tests.faults.proxy import Proxy, length_frames

CREATE2 = 15


# --- what we lean on


def test_it_is_the_version_whose_inside_we_know():
    assert version("aiozk").startswith("0.32.")


def test_everything_that_we_replace_or_inherit_is_there():
    for name in ("add_watch_callback", "remove_watch_callback"):
        assert getattr(session.Session, name) is getattr(Session, name)
    for name in ("start", "repair_loop", "event_dispatch", "close"):
        assert callable(getattr(Session, name))
        assert getattr(session.Session, name) is not getattr(Session, name)
    assert list(inspect.signature(Session.__init__).parameters)[1:] == [
        "servers",
        "timeout",
        "retry_policy",
        "allow_read_only",
        "read_timeout",
    ]


def test_the_protocol_has_what_we_send():
    for name in ("Connect", "Close", "Create2", "Delete", "Exists", "GetData", "GetChildren", "Sync", "Auth"):
        assert hasattr(protocol, f"{name}Request")
    assert protocol.WATCH_XID == -1
    assert {States.CONNECTED, States.SUSPENDED, States.LOST} == {"connected", "suspended", "lost"}
    assert (States.LOST, States.CONNECTED) in SessionStateMachine.valid_transitions


# --- what we write and read by hand

PATHS = ["/", "/a", "/aiolock/lock/\u00fc\u20ac", "/" + "x" * 300]
OPEN = [protocol.UNRESTRICTED_ACCESS]
OWN = [protocol.AUTHED_UNRESTRICTED, protocol.WORLD_READABLE]


def with_ttl(**fields):
    """A request that aiozk does not have, made of its parts."""

    class CreateTTL(protocol.CreateRequest):
        opcode = 21
        parts = (*protocol.CreateRequest.parts, ("ttl", Long))

    return CreateTTL(**fields)


def with_opcode(code: int, request):
    request.opcode = code
    return request


def pairs(path: str):
    """Ours and aiozk's, of each kind."""
    data = b"\x00me\nasked=1"
    node = {"path": path, "data": data, "acl": OPEN}
    return [
        (wire.create(path, data, wire.OPEN, sequential=True), protocol.Create2Request(**node, flags=3)),
        (
            wire.create(path, b"", wire.OPEN, sequential=False),
            protocol.Create2Request(path=path, data=b"", acl=OPEN, flags=1),
        ),
        (
            wire.persistent(path, data, wire.acl(*OWN)),
            protocol.Create2Request(path=path, data=data, acl=OWN, flags=0),
        ),
        (wire.container(path, wire.OPEN, data), with_opcode(19, protocol.CreateRequest(**node, flags=4))),
        (wire.lasting(path, data, wire.OPEN, 1.5), with_ttl(**node, flags=5, ttl=1500)),
        (wire.delete(path), protocol.DeleteRequest(path=path, version=-1)),
        (wire.delete(path, 7), protocol.DeleteRequest(path=path, version=7)),
        (wire.listing(path, watch=True), protocol.GetChildrenRequest(path=path, watch=True)),
        (wire.get(path, watch=False), protocol.GetDataRequest(path=path, watch=False)),
        (wire.exists(path, watch=True), protocol.ExistsRequest(path=path, watch=True)),
        (wire.put(path, data, 3), protocol.SetDataRequest(path=path, data=data, version=3)),
        (wire.check(path), protocol.CheckVersionRequest(path=path, version=-1)),
        (wire.sync(), protocol.SyncRequest(path="/")),
    ]


@pytest.mark.parametrize("path", PATHS)
def test_a_request_is_written_as_aiozk_writes_it(path):
    for ours, theirs in pairs(path):
        payload = theirs.serialize(11)
        assert framed(ours, 11)[0] == struct.pack("!i", len(payload)) + payload, theirs
    several = protocol.TransactionRequest()
    for _, theirs in pairs(path)[:-1]:
        several.add(theirs)
    payload = several.serialize(12)
    ours = wire.together(*(ours for ours, _ in pairs(path)[:-1]))
    assert framed(ours, 12)[0] == struct.pack("!i", len(payload)) + payload


STAT = struct.pack("!qqqqiiiqiiq", *range(101, 112))


def same(ours, theirs) -> bool:
    """Whether two replies have the same fields, Stats included."""
    return all(
        same(getattr(ours, name), value) if name == "stat" else getattr(ours, name) == value
        for name, value in vars(theirs).items()
    )


@pytest.mark.parametrize("text", ["", "a", "\u00fc/\U0001f511", "x" * 300])
def test_a_reply_is_read_as_aiozk_reads_it(text):
    field = struct.pack("!i", len(text.encode())) + text.encode()
    for body, read, theirs in (
        (field + STAT, frames.read_created, protocol.Create2Response),
        (field + STAT, frames.read_data, protocol.GetDataResponse),
        (b"\xff\xff\xff\xff" + STAT, frames.read_data, protocol.GetDataResponse),
        (STAT, frames.read_stat, protocol.SetDataResponse),
        (STAT, frames.read_stat, protocol.ExistsResponse),
    ):
        assert same(read(body), theirs.deserialize(body))
    event = struct.pack("!ii", 2, 3) + field
    ours, theirs = frames.read_event(bytes(16) + event), protocol.WatchEvent.deserialize(event)
    assert (ours.type, ours.state, ours.path) == (theirs.type, theirs.state, theirs.path)


@pytest.mark.parametrize("names", [[], ["a"], ["", "\u00fc/\U0001f511", "x" * 300, *map(str, range(500))]])
def test_a_list_is_read_as_aiozk_reads_it(names):
    raw = struct.pack("!i", len(names))
    for name in names:
        raw += struct.pack("!i", len(name.encode())) + name.encode()
    assert frames.read_names(raw).children == names
    assert protocol.GetChildrenResponse.deserialize(raw).children == names


def test_the_answer_to_a_transaction_is_read_as_aiozk_reads_it():
    def part(opcode: int, body: bytes, *, end: bool = False) -> bytes:
        return struct.pack("!i?i", opcode, end, -1 if end else 0) + body

    path = struct.pack("!i", 2) + b"/a"
    done = (
        part(1, path)
        + part(15, path + STAT)
        + part(2, b"")
        + part(5, STAT)
        + part(13, b"")
        + part(-1, b"", end=True)
    )
    failed = part(-1, struct.pack("!i", 0)) + part(-1, struct.pack("!i", -101)) + part(-1, b"", end=True)
    ours, theirs = (
        frames.read_several(done).responses,
        protocol.TransactionResponse.deserialize(done).responses,
    )
    assert len(ours) == len(theirs) == 5
    assert ours[0] == theirs[0].path
    assert same(ours[1], theirs[1])
    assert same(ours[3], theirs[3])
    ours, theirs = (
        frames.read_several(failed).responses,
        protocol.TransactionResponse.deserialize(failed).responses,
    )
    assert [type(answer) for answer in ours] == [type(answer) for answer in theirs]
    assert isinstance(ours[1], exc.NoNode)


@pytest.mark.parametrize(
    "read", [frames.read_created, frames.read_data, frames.read_stat, frames.read_names, frames.read_several]
)
def test_a_reply_that_is_cut_off_is_an_error_and_no_reply(read):
    whole = {
        frames.read_created: struct.pack("!i", 3) + b"abc" + STAT,
        frames.read_data: struct.pack("!i", 3) + b"abc" + STAT,
        frames.read_stat: STAT,
        frames.read_names: struct.pack("!ii", 1, 3) + b"abc",
        frames.read_several: struct.pack("!i?i", 5, False, 0) + STAT + struct.pack("!i?i", -1, True, -1),
    }[read]
    read(whole)
    for length in range(len(whole)):
        with pytest.raises((struct.error, ValueError)):
            read(whole[:length])


# --- what is wrong with it


async def stock(server_or_proxy, timeout: float = 4.0, **options) -> aiozk.ZKClient:
    client = aiozk.ZKClient(f"127.0.0.1:{server_or_proxy.port}", session_timeout=timeout, **options)
    await client.start()
    return client


@pytest.fixture
def quiet(caplog):
    """aiozk reports what we provoke as errors with tracebacks."""
    with caplog.at_level(logging.CRITICAL + 1, logger="aiozk"):
        yield


async def test_a_request_is_repeated_after_a_lost_reply_and_done_twice(server, tools, quiet):
    async with Proxy("127.0.0.1", server.port, framing=length_frames) as proxy:
        client = await stock(proxy)
        await client.create(f"/{tools.namespace}")
        proxy.down.drop_next(1, tools.replies(proxy).to(CREATE2), reset=True)
        await client.create(f"/{tools.namespace}/node-", sequential=True)
        assert len(await client.get_children(f"/{tools.namespace}")) == 2
        await client.close()


async def test_a_closed_connection_goes_unnoticed(server, quiet):
    async with Proxy("127.0.0.1", server.port, framing=length_frames) as proxy:
        client = await stock(proxy, 6.0)
        proxy.reset_all()
        await asyncio.sleep(0.5)
        assert client.session.state == States.CONNECTED
        client.session.repair_loop_task.cancel()
        client.session.state.transition_to(States.LOST)
        client.session.heartbeat_handle.cancel()
        await client.session.conn.close(0.1)


async def test_a_container_is_none(server, tools):
    client = await stock(server)
    path = f"/{tools.namespace}"
    await client.create(path, container=True)
    stat = (await client.session.send(protocol.ExistsRequest(path=path, watch=False))).stat
    # A real container says so with the smallest owner there is.
    assert stat.ephemeral_owner == 0
    await client.close()


async def test_a_policy_of_one_attempt_remembers_by_addresses_that_are_used_again(quiet):
    policy = RetryPolicy.once()
    request = protocol.SyncRequest(path="/")
    await policy.enforce(request)
    with pytest.raises(exc.FailedRetry):
        # As another request at the same address would be refused, although it was never tried.
        await policy.enforce(request)
    assert policy.timings


def test_sasl_cannot_even_be_written():
    with pytest.raises((TypeError, ValueError, AttributeError)):
        protocol.SASLRequest(token=b"token").serialize(1)
