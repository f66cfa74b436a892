"""A client shows its password nowhere: not in what it is made of, nor when it is pickled, nor in the locals of a traceback."""

from __future__ import annotations

import asyncio
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aiolock
from aiolock import BackendError, Client, connect
from tests.servers import Redis

SECRET = "hunter2-and-more"
LIBRARY = Path(aiolock.__file__).parent

LOGIN = f"user:{SECRET}@127.0.0.1:1"
ADDRESSES: dict[str, Callable[[], Client]] = {
    "redis": lambda: connect(f"redis://{LOGIN}/0", command_timeout=0.5),
    "redis-option": lambda: connect("redis://127.0.0.1:1", password=SECRET, command_timeout=0.5),
    "redis-tls": lambda: connect(f"rediss://{LOGIN}/0", command_timeout=0.5),
    "redis-cluster": lambda: connect(f"redis+cluster://{LOGIN}", command_timeout=0.5),
    "redis-sentinel": lambda: connect(f"redis+sentinel://{LOGIN}/service/0", command_timeout=0.5),
    "quorum": lambda: connect(
        [f"redis://user:{SECRET}@127.0.0.{n}:1/0" for n in (1, 2, 3)], command_timeout=0.5
    ),
    "zookeeper": lambda: connect(f"zookeeper://{LOGIN}", command_timeout=0.5),
    "mysql": lambda: connect(f"mysql://{LOGIN}/db", command_timeout=0.5),
    "postgresql": lambda: connect(f"postgresql://{LOGIN}/db", command_timeout=0.5),
    "etcd": lambda: connect(f"etcd://{LOGIN}", command_timeout=0.5),
    "mongodb": lambda: connect(f"mongodb://{LOGIN}/db", command_timeout=0.5),
}
"""Clients of servers that are not there."""


def shown(client: Client) -> dict[str, str]:
    """What a log, a debugger or a report of an exception shows of a client and its backend."""
    backend = client._runtime.backend
    texts = {
        f"{how.__name__}({type(it).__name__})": how(it) for it in (client, backend) for how in (repr, str)
    }
    for it in (client, backend, *getattr(getattr(backend, "members", None), "all", ())):
        # Objects with slots have none.
        texts[f"vars({type(it).__name__})"] = repr(getattr(it, "__dict__", {}))
        try:
            pickled = pickle.dumps(it)
        except Exception as error:
            texts[f"pickle({type(it).__name__})"] = repr(error)
        else:
            texts[f"pickle({type(it).__name__})"] = pickled.decode("latin-1")
    return texts


def of_the_library(error: BaseException | None) -> str:
    """The locals of the library's frames, in an exception and what led to it. Those of tests know the password."""
    texts = []
    while error is not None:
        report = traceback.TracebackException.from_exception(error, capture_locals=True)
        texts += [
            f"{frame.filename}:{frame.lineno} {frame.locals}"
            for frame in report.stack
            if Path(frame.filename).is_relative_to(LIBRARY)
        ]
        error = error.__cause__ or error.__context__
    return "\n".join(texts)


@pytest.mark.parametrize("server", ADDRESSES)
async def test_a_password_is_not_shown_while_no_server_answers(server: Any):
    pytest.importorskip({"zookeeper": "aiozk", "mysql": "aiomysql"}.get(server, "redis"))
    client = ADDRESSES[server]()
    for moment in ("before it is opened", "before it is opened again"):
        for what, text in shown(client).items():
            assert SECRET not in text, f"{what}, {moment}"
        with pytest.raises(BackendError) as caught:
            await client.open()
        assert SECRET not in "".join(traceback.format_exception(caught.value))
        for what, text in shown(client).items():
            assert SECRET not in text, f"{what}, after an attempt {moment}"
        found = of_the_library(caught.value)
        assert "client.py" in found
        assert SECRET not in found, f"locals, {moment}"
        await client.aclose()


@pytest.mark.parametrize(
    "url",
    [
        "redis://{}/0",
        "redis+cluster://{}",
        "zookeeper://{}",
        "mysql://{}/db",
        "postgresql://{}/db",
        "etcd://{}",
        "mongodb://{}/db",
    ],
)
@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["nothing", "nonsense"])
async def test_a_password_is_not_shown_where_another_server_answers(url: str, answer: bytes):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if answer:
            await reader.read(10)
            writer.write(answer)
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        client = connect(url.format(f"user:{SECRET}@127.0.0.1:{port}"), command_timeout=1.0)
        with pytest.raises(BackendError) as caught:
            await client.open()
        assert SECRET not in "".join(traceback.format_exception(caught.value))
        found = of_the_library(caught.value)
        assert "client.py" in found
        assert SECRET not in found
        for what, text in shown(client).items():
            assert SECRET not in text, what
        await client.aclose()


async def test_a_password_is_not_shown_while_a_client_is_open_and_after_it_was_opened_again():
    with Redis(password=SECRET) as redis:
        client = connect(redis.url)
        for moment in ("opened", "opened again"):
            async with client, client.lock("x"):
                for what, text in shown(client).items():
                    assert SECRET not in text, f"{what}, {moment}"
            for what, text in shown(client).items():
                assert SECRET not in text, f"{what}, closed after it was {moment}"
