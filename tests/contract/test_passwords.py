"""A client shows its password nowhere: not in what it is made of, nor when it is pickled, nor in the locals of a traceback."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import pickle
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import aiolock
import aiolock.aiohttp
import aiolock.cli.main
import aiolock.fastapi
import aiolock.portal
import aiolock.starlette
from aiolock import BackendError, Client, ConfigError, LockError, backends, connect
from aiolock.backends import SCHEMES, from_url
from aiolock.backends.quorum import QuorumBackend
from aiolock.backends.redis.url import Endpoint
from aiolock.cli import output, settings
from aiolock.cli.parser import parse
from tests.public_api import BACKENDS
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


# --- addresses that are refused

PLACES = {
    **dict.fromkeys(SCHEMES, f"user:{SECRET}@h1/0"),
    **{scheme: f"user:{SECRET}@h1,h2/service/0" for scheme in SCHEMES if "sentinel" in scheme},
    "unix": f"//user:{SECRET}@/run/redis.sock",
}
BAD: dict[str, Callable[[str], tuple[Any, dict[str, Any]]]] = {
    "port": lambda url: (url.replace("h1", "h1:99999"), {}),
    "host": lambda url: (url.replace("h1", "[h1"), {}),
    "no host": lambda url: (url.replace("h1", ""), {}),
    "place of the login": lambda url: (url.replace("@h1", "/@h1"), {}),
    "fragment": lambda url: (url.replace("@", "#@"), {}),
    "coding": lambda url: (url.replace("@", "%ff@"), {}),
    "path": lambda url: (f"{url}/no/\0/place", {}),
    "parameter": lambda url: (f"{url}?no_such={SECRET}", {}),
    "value of a parameter": lambda url: (f"{url}?tls=perhaps&db=many&mode=none", {}),
    "parameter that is given twice": lambda url: (f"{url}?password={SECRET}&password={SECRET}", {}),
    "parameter with the sign before a place": lambda url: (f"x{url}?password={SECRET}@2", {}),
    "option": lambda url: (url, {"no_such": SECRET}),
    "option that is no text": lambda url: (url, {"password": [SECRET]}),
    "option for every server": lambda url: (url, {"ttl": -1}),
    "namespace": lambda url: (url, {"namespace": "/"}),
    "scheme": lambda url: (f"x{url}", {}),
    "no URL": lambda url: ([url.encode()], {}),
    "servers of a quorum": lambda url: ([url, url, url], {}),
    "parameter of a server of a quorum": lambda url: (
        [f"redis+cluster://h1/0?password={SECRET}@2", url, url],
        {},
    ),
}
"""Mistakes, made in a URL."""
MAKERS: dict[str, Callable[..., object]] = {
    "connect": aiolock.connect,
    "portal": aiolock.portal.connect,
    "aiohttp": aiolock.aiohttp.cleanup_ctx,
    "starlette": aiolock.starlette.lifespan,
    "fastapi": aiolock.fastapi.lifespan,
    "command line": lambda url, **options: settings.connect(
        argparse.Namespace(local=False, url=url, namespace=None, label=None), **options
    ),
}
"""Everything that takes a URL of any server."""
CLASSES = sorted(BACKENDS - {"aiolock.backends.memory.MemoryServer", "aiolock.backends.quorum.QuorumBackend"})
"""Everything that takes a URL of its own server."""


def error_of(make: Callable[[], object]) -> Exception | None:
    """What is raised, if anything is."""
    try:
        make()
    except (LockError, TypeError) as error:
        return error
    return None


@pytest.mark.parametrize("mistake", BAD)
@pytest.mark.parametrize("maker", MAKERS)
def test_a_report_of_a_wrong_address_shows_no_password(maker: str, mistake: str):
    wrong = 0
    for scheme, place in PLACES.items():
        url, options = BAD[mistake](f"{scheme}://{place}")
        if not isinstance(url, str) and maker not in ("connect", "portal"):
            url = " ".join(map(str, url))
        if (error := error_of(lambda: MAKERS[maker](url, **options))) is not None:  # noqa: B023 - called at once
            wrong += 1
            found = of_the_library(error)
            assert "aiolock/" in found
            assert SECRET not in found, scheme
            assert SECRET not in str(error), scheme
            assert "repr() failed" not in found
    assert wrong > len(PLACES) / 2


@pytest.mark.parametrize("maker", ["connect", "portal"])
def test_functions_of_the_caller_go_on_after_a_wrong_address(maker: str):
    errors: list[ValueError] = []

    def numbers() -> Iterator[int]:
        try:
            raise ValueError("the caller's own")
        except ValueError as error:
            errors.append(error)
        yield from (1, 2)

    class Require:
        def __iter__(self) -> Iterator[str]:
            mine = "a local variable of the caller"
            raise errors[0] if mine else AssertionError

    generator = numbers()
    assert next(generator) == 1
    with pytest.raises(ValueError, match="the caller's own") as caught:
        MAKERS[maker](f"redis://user:{SECRET}@h1/0", require=Require())
    frames = {frame.f_code.co_name: frame for frame, _ in traceback.walk_tb(caught.tb)}
    assert frames["numbers"] is generator.gi_frame
    assert next(generator) == 2
    assert frames["__iter__"].f_locals["mine"] == "a local variable of the caller"
    assert SECRET not in of_the_library(caught.value)


def test_a_backend_of_another_package_shows_no_password_either(monkeypatch: pytest.MonkeyPatch):
    package = types.ModuleType("foreign_locks")
    exec(  # noqa: S102 - a module of its own, by whose name its functions are known
        "def parse(url):\n    raise ValueError('no such place')\ndef init(self, url):\n    parse(url)",
        vars(package),
    )
    cls = type("Foreign", (backends.Backend,), {"__init__": package.init, "__module__": package.__name__})
    cls.__abstractmethods__ = frozenset()
    package.Foreign = cls
    monkeypatch.setitem(sys.modules, package.__name__, package)
    point = EntryPoint("foreign", "foreign_locks:Foreign", backends.GROUP)
    monkeypatch.setattr(backends, "_others", lambda: {"foreign": [point]})
    with pytest.raises(ValueError, match="no such place") as caught:
        connect(f"foreign://user:{SECRET}@h1/0")
    shown = {frame.f_code.co_name: repr(frame.f_locals) for frame, _ in traceback.walk_tb(caught.tb)}
    assert {"connect", "from_url", "init", "parse"} <= set(shown)
    assert [name for name, text in shown.items() if SECRET in text] == []


@pytest.mark.parametrize("name", CLASSES)
def test_a_report_of_a_wrong_address_of_a_backend_class_shows_no_password(name: str):
    module, _, attribute = name.rpartition(".")
    cls, wrong = getattr(importlib.import_module(module), attribute), 0
    for mistake in BAD.values():
        # Also those of other servers.
        for scheme, place in PLACES.items():
            url, options = mistake(f"{scheme}://{place}")
            if (error := error_of(lambda: cls(url, **options))) is not None:  # noqa: B023 - called at once
                wrong += 1
                found = of_the_library(error)
                assert "aiolock/" in found
                assert SECRET not in found, url
                assert "repr() failed" not in found
    assert wrong > len(BAD) * len(PLACES) / 2


@pytest.mark.parametrize("mistake", ["port", "path", "parameter", "scheme"])
@pytest.mark.parametrize("words", [["ls"], ["doctor"], ["demo"], ["run", "x", "--", "true"]], ids=" ".join)
def test_the_command_line_keeps_no_password_in_what_is_on_its_way(
    words: list[str], mistake: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    url, _ = BAD[mistake](f"mysql://{PLACES['mysql']}")
    errors: list[BaseException | None] = []
    monkeypatch.setattr(output.Output, "trouble", lambda _, text, status, error=None: errors.append(error))
    monkeypatch.setattr("sys.argv", ["aiolock", words[0], "--url", url, *words[1:]])
    assert aiolock.cli.main.main() == 64
    assert isinstance(errors[0], ConfigError)
    found = of_the_library(errors[0])
    assert "cli/main.py" in found
    assert SECRET not in found
    assert SECRET not in "".join(capsys.readouterr())
    assert SECRET not in repr(parse(["ls", "--url", url]))


@pytest.mark.parametrize("mistake", BAD)
def test_what_is_half_made_can_be_shown(mistake: str):
    makers: list[Callable[[Any, dict[str, Any]], object]] = [
        from_url,
        lambda url, options: Endpoint(url, **options),
        lambda url, options: Client(from_url(url, options), ttl=-1),
    ]
    wrong = 0
    for scheme, place in PLACES.items():
        url, options = BAD[mistake](f"{scheme}://{place}")
        for make in makers:
            if (error := error_of(lambda: make(url, options))) is not None:  # noqa: B023 - called at once
                wrong += 1
                assert "repr() failed" not in of_the_library(error), scheme
    assert wrong > len(PLACES)


def test_what_is_half_made_of_a_client_can_be_shown():
    backend = from_url("redis://127.0.0.1:1", {})
    for make in (
        lambda: Client(backend, ttl=-1),
        lambda: aiolock.portal.SyncClient(backend),
        lambda: QuorumBackend([backend]),
        lambda: QuorumBackend([None, None, None]),
    ):
        with pytest.raises(Exception) as caught:
            make()
        assert "repr() failed" not in of_the_library(caught.value)


# --- servers that are not there


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
