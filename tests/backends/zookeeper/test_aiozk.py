"""What we lean on in aiozk is there, and what we work round in it is still wrong: each of its faults that we replace, shown."""

from __future__ import annotations

import asyncio
import logging
import struct
from importlib.metadata import version

import aiozk
import pytest
from aiozk import exc
from aiozk import protocol as aiozk_protocol
from aiozk.protocol.primitives import Long
from aiozk.retry import RetryPolicy
from aiozk.states import States

from aiolock.backends.zookeeper import protocol
from aiolock.backends.zookeeper.connection import framed
from tests.faults.proxy import Proxy, length_frames

CREATE2 = 15


# --- what we lean on


def test_it_is_the_version_whose_inside_we_know():
    assert version("aiozk").startswith("0.32.")


def test_the_protocol_has_what_we_send():
    for name in ("Connect", "Close", "Create2", "Delete", "Exists", "GetData", "GetChildren", "Sync", "Auth"):
        assert hasattr(aiozk_protocol, f"{name}Request")
    assert aiozk_protocol.WATCH_XID == -1


# --- what we write and read by hand

PATHS = ["/", "/a", "/aiolock/lock/\u00fc\u20ac", "/" + "x" * 300]
OPEN = [aiozk_protocol.UNRESTRICTED_ACCESS]
OWN = [aiozk_protocol.AUTHED_UNRESTRICTED, aiozk_protocol.WORLD_READABLE]


def with_ttl(**fields):
    """A request that aiozk does not have, made of its parts."""

    class CreateTTL(aiozk_protocol.CreateRequest):
        opcode = 21
        parts = (*aiozk_protocol.CreateRequest.parts, ("ttl", Long))

    return CreateTTL(**fields)


def with_opcode(code: int, request):
    request.opcode = code
    return request


def pairs(path: str):
    """Ours and aiozk's, of each kind."""
    data = b"\x00me\nasked=1"
    node = {"path": path, "data": data, "acl": OPEN}
    return [
        (
            protocol.create(path, data, protocol.OPEN, sequential=True),
            aiozk_protocol.Create2Request(**node, flags=3),
        ),
        (
            protocol.create(path, b"", protocol.OPEN, sequential=False),
            aiozk_protocol.Create2Request(path=path, data=b"", acl=OPEN, flags=1),
        ),
        (
            protocol.persistent(path, data, protocol.acl(*OWN)),
            aiozk_protocol.Create2Request(path=path, data=data, acl=OWN, flags=0),
        ),
        (
            protocol.container(path, protocol.OPEN, data),
            with_opcode(19, aiozk_protocol.CreateRequest(**node, flags=4)),
        ),
        (protocol.lasting(path, data, protocol.OPEN, 1.5), with_ttl(**node, flags=5, ttl=1500)),
        (protocol.delete(path), aiozk_protocol.DeleteRequest(path=path, version=-1)),
        (protocol.delete(path, 7), aiozk_protocol.DeleteRequest(path=path, version=7)),
        (protocol.listing(path, watch=True), aiozk_protocol.GetChildrenRequest(path=path, watch=True)),
        (protocol.get(path, watch=False), aiozk_protocol.GetDataRequest(path=path, watch=False)),
        (protocol.exists(path, watch=True), aiozk_protocol.ExistsRequest(path=path, watch=True)),
        (protocol.put(path, data, 3), aiozk_protocol.SetDataRequest(path=path, data=data, version=3)),
        (protocol.check(path), aiozk_protocol.CheckVersionRequest(path=path, version=-1)),
        (protocol.sync(), aiozk_protocol.SyncRequest(path="/")),
    ]


@pytest.mark.parametrize("path", PATHS)
def test_a_request_is_written_as_aiozk_writes_it(path):
    for ours, theirs in pairs(path):
        payload = theirs.serialize(11)
        assert framed(ours, 11)[0] == struct.pack("!i", len(payload)) + payload, theirs
    several = aiozk_protocol.TransactionRequest()
    for _, theirs in pairs(path)[:-1]:
        several.add(theirs)
    payload = several.serialize(12)
    ours = protocol.together(*(ours for ours, _ in pairs(path)[:-1]))
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
        (field + STAT, protocol.read_created, aiozk_protocol.Create2Response),
        (field + STAT, protocol.read_data, aiozk_protocol.GetDataResponse),
        (b"\xff\xff\xff\xff" + STAT, protocol.read_data, aiozk_protocol.GetDataResponse),
        (STAT, protocol.read_stat, aiozk_protocol.SetDataResponse),
        (STAT, protocol.read_stat, aiozk_protocol.ExistsResponse),
    ):
        assert same(read(body), theirs.deserialize(body))
    event = struct.pack("!ii", 2, 3) + field
    ours, theirs = protocol.read_event(bytes(16) + event), aiozk_protocol.WatchEvent.deserialize(event)
    assert (ours.type, ours.state, ours.path) == (theirs.type, theirs.state, theirs.path)


@pytest.mark.parametrize("names", [[], ["a"], ["", "\u00fc/\U0001f511", "x" * 300, *map(str, range(500))]])
def test_a_list_is_read_as_aiozk_reads_it(names):
    raw = struct.pack("!i", len(names))
    for name in names:
        raw += struct.pack("!i", len(name.encode())) + name.encode()
    assert protocol.read_names(raw).children == names
    assert aiozk_protocol.GetChildrenResponse.deserialize(raw).children == names


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
        protocol.read_several(done).responses,
        aiozk_protocol.TransactionResponse.deserialize(done).responses,
    )
    assert len(ours) == len(theirs) == 5
    assert ours[0] == theirs[0].path
    assert same(ours[1], theirs[1])
    assert same(ours[3], theirs[3])
    ours, theirs = (
        protocol.read_several(failed).responses,
        aiozk_protocol.TransactionResponse.deserialize(failed).responses,
    )
    assert [type(answer) for answer in ours] == [type(answer) for answer in theirs]
    assert isinstance(ours[1], exc.NoNode)


@pytest.mark.parametrize(
    "read",
    [
        protocol.read_created,
        protocol.read_data,
        protocol.read_stat,
        protocol.read_names,
        protocol.read_several,
    ],
)
def test_a_reply_that_is_cut_off_is_an_error_and_no_reply(read):
    whole = {
        protocol.read_created: struct.pack("!i", 3) + b"abc" + STAT,
        protocol.read_data: struct.pack("!i", 3) + b"abc" + STAT,
        protocol.read_stat: STAT,
        protocol.read_names: struct.pack("!ii", 1, 3) + b"abc",
        protocol.read_several: struct.pack("!i?i", 5, False, 0) + STAT + struct.pack("!i?i", -1, True, -1),
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
    stat = (await client.session.send(aiozk_protocol.ExistsRequest(path=path, watch=False))).stat
    # A real container says so with the smallest owner there is.
    assert stat.ephemeral_owner == 0
    await client.close()


async def test_a_policy_of_one_attempt_remembers_by_addresses_that_are_used_again(quiet):
    policy = RetryPolicy.once()
    request = aiozk_protocol.SyncRequest(path="/")
    await policy.enforce(request)
    with pytest.raises(exc.FailedRetry):
        # As another request at the same address would be refused, although it was never tried.
        await policy.enforce(request)
    assert policy.timings


def test_sasl_cannot_even_be_written():
    with pytest.raises((TypeError, ValueError, AttributeError)):
        aiozk_protocol.SASLRequest(token=b"token").serialize(1)
