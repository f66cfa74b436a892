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
from aiozk.connection import Connection
from aiozk.retry import RetryPolicy
from aiozk.session import Session
from aiozk.states import SessionStateMachine, States

from aiolock.backends.zookeeper import connecting, session, wire
from tests.faults.proxy import Proxy, length_frames

CREATE2 = 15


# --- what we lean on


def test_it_is_the_version_whose_inside_we_know():
    assert version("aiozk").startswith("0.32.")


@pytest.mark.parametrize(
    ("cls", "base"),
    [(session.Session, Session), (connecting.Connection, Connection)],
    ids=["session", "connection"],
)
def test_everything_that_we_replace_or_inherit_is_there(cls, base):
    inherited = {
        Session: ("add_watch_callback", "remove_watch_callback"),
        Connection: ("send", "read_response", "drain_all_pending", "start_read_loop"),
    }[base]
    replaced = {
        Session: ("start", "repair_loop", "event_dispatch", "close"),
        Connection: ("connect", "_read", "read_loop"),
    }[base]
    for name in inherited:
        assert name not in vars(cls)
        assert callable(getattr(base, name))
    for name in replaced:
        assert name in vars(cls)
        assert callable(getattr(base, name))
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
    assert (protocol.WATCH_XID, protocol.CLOSE_XID) == (-1, None)
    assert {States.CONNECTED, States.SUSPENDED, States.LOST} == {"connected", "suspended", "lost"}
    assert (States.LOST, States.CONNECTED) in SessionStateMachine.valid_transitions


@pytest.mark.parametrize("names", [[], ["a"], ["", "ü/\U0001f511", "x" * 300, *map(str, range(500))]])
def test_a_list_is_read_as_aiozk_reads_it(names):
    raw = struct.pack("!i", len(names))
    for name in names:
        raw += struct.pack("!i", len(name.encode())) + name.encode()
    assert wire.Names.deserialize(raw).children == names
    assert protocol.GetChildrenResponse.deserialize(raw).children == names


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
