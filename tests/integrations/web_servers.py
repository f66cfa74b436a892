"""Web servers for tests: uvicorn and aiohttp on free ports, in this loop; and a client that goes away."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn
from aiohttp import web

from tests.faults.staging import PATIENCE, until

__all__ = ["PATIENCE", "aiohttp", "asgi", "closed_port", "hang_up", "until"]


class _Quiet(uvicorn.Server):
    """Leaves signals to the tests."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def closed_port() -> Iterator[int]:
    """A port of this machine on which connections are refused: it is taken, and does not listen."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@contextlib.asynccontextmanager
async def asgi(app: Any, **options: Any) -> AsyncIterator[str]:
    """Serve an ASGI application with uvicorn; yields its address."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        config = uvicorn.Config(app, log_config=None, lifespan="on", **options)
        server = _Quiet(config)
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            await until(lambda: server.started or serving.done(), "the server is up")
            if serving.done():
                await serving
                raise RuntimeError("the application did not start")
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


@contextlib.asynccontextmanager
async def aiohttp(app: web.Application, **options: Any) -> AsyncIterator[str]:
    """Serve an aiohttp application; yields its address."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=2.0, **options)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def hang_up(address: str, path: str, method: str = "POST") -> AsyncIterator[None]:
    """A client that sends a request, and closes the connection at the end of the block without an answer."""
    host, _, port = address.removeprefix("http://").partition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\n\r\n".encode())
    await writer.drain()
    try:
        yield
    finally:
        writer.transport.abort()
