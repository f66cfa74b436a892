"""Locks for Starlette applications: a client that lives as long as the application, and locks around endpoints.

::

    from aiolock.starlette import exception_handlers, lifespan, locked

    @locked("order:{order_id}", timeout=2)
    async def pay(request: Request, lease: Lease) -> Response:
        ...

    app = Starlette(
        routes=[Route("/orders/{order_id:int}/pay", pay, methods=["POST"])],
        lifespan=lifespan("redis://127.0.0.1:6379/0"),
        exception_handlers=exception_handlers,
    )

FastAPI has :mod:`aiolock.fastapi`, which has all of this as well.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack

from aiolock._web import Refuse, RouteLockOptions, Source, answer, around_handlers, opener
from aiolock.client import Client
from aiolock.errors import (
    AcquireTimeout,
    BackendUnavailable,
    ConfigError,
    LockLost,
    MissingDriver,
    forgets_arguments,
    shorten,
)
from aiolock.lease import Lease

try:
    from starlette.exceptions import HTTPException, WebSocketException
    from starlette.requests import HTTPConnection, Request
    from starlette.responses import JSONResponse, Response
    from starlette.websockets import WebSocket, WebSocketState
except ImportError as _missing:
    raise MissingDriver("starlette", "fastapi") from _missing

__all__ = ["KEY", "client_of", "exception_handlers", "lifespan", "locked", "refusal"]

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")

KEY = "aiolock"
"""The name of the client in the state of application and requests."""

TRY_AGAIN_LATER = 1013
"""The close code of a WebSocket whose lock was not acquired, or was lost."""

Lifespan = Callable[[Any], AbstractAsyncContextManager[Mapping[str, Any] | None]]


@forgets_arguments
def lifespan(
    source: Source, inner: Lifespan | None = None, /, **options: Any
) -> Callable[[Any], AbstractAsyncContextManager[dict[str, Any]]]:
    """Return a lifespan with an open client in it: ``Starlette(lifespan=lifespan("redis://…"))``.

    :param source: a URL (``options`` are then those of :func:`aiolock.connect`), a client that is not open, or a
        function that makes one for each start.
    :param inner: the application's own lifespan. It runs inside, and keeps the state that it yields: the client is there as
        ``app.state.aiolock`` from its beginning to its end.

    The client is opened before the application serves, and closed after its last request: leases that are still under
    a block are lost then (reason ``"closed"``). Raises :class:`ConfigError` and :class:`MissingDriver` at once; starting
    the application raises what :meth:`Client.open` raises.
    """
    make = opener(source, options)
    if inner is not None and not callable(inner):
        raise ConfigError(
            f"a lifespan is a function of the application that returns a context, not {shorten(inner)}"
        )
    return around(make, inner)


def around(
    make: Callable[[], AbstractAsyncContextManager[Client]], inner: Lifespan | None
) -> Callable[[Any], AbstractAsyncContextManager[dict[str, Any]]]:
    """Return a lifespan that opens the client of ``make`` around ``inner``."""

    @asynccontextmanager
    async def run(app: Any) -> AsyncIterator[dict[str, Any]]:
        async with make() as client:
            app.state.aiolock = client
            try:
                if inner is None:
                    yield {KEY: client}
                else:
                    async with inner(app) as state:
                        yield {**(state or {}), KEY: client}
            finally:
                del app.state.aiolock

    return run


def client_of(connection: HTTPConnection) -> Client:
    """Return the client of the application that serves this request, also in applications mounted below it.

    Raises :class:`ConfigError` if its lifespan brought none.
    """
    client = getattr(connection.state, KEY, None) or getattr(connection.app.state, KEY, None)
    if not isinstance(client, Client):
        raise ConfigError(
            "this application has no client: give it lifespan=lifespan(url), and see that the server runs lifespans"
        )
    return client


def refusal(connection: HTTPConnection) -> Refuse:
    """Return a function that makes the exception that answers this request, or closes this WebSocket."""
    if connection.scope["type"] == "websocket":
        return lambda response: WebSocketException(TRY_AGAIN_LATER, response.text)
    return lambda response: HTTPException(response.status, response.text, response.headers)


def locked(
    name: str | Callable[[HTTPConnection], str],
    /,
    **options: Unpack[RouteLockOptions],
) -> Callable[[Callable[Concatenate[A, Lease, P], Awaitable[R]]], Callable[Concatenate[A, P], Awaitable[R]]]:
    """Hold a lock while an endpoint runs: ``@locked("order:{order_id}")`` over ``async def pay(request, lease)``.

    :param name: a template whose names are path parameters, else query parameters, or a function of the request. The
        values are Starlette's: write ``{order_id:int}`` in the route, or 7 and 07 are different locks. A request that
        lacks one is answered 422.
    :param timeout: seconds to wait for the lock (default: 5); ``None`` waits for ever, 0 tries once.
    :param retry_after: seconds, for the header of that name in a refusal (default: 1).
    :param lock: a function of the client and the name that makes another lock than a mutex.

    The other options are those of :meth:`Client.lock`: ``ttl``, ``renew``, ``grace``, ``on_loss``, ``fair``,
    ``max_hold``, ``label``. The
    endpoint gets the lease after its first argument, the request (or after ``self, request`` in an
    ``HTTPEndpoint``). The lock is released when it returns; a streamed body and background tasks run after that.

    A lock that is not free in time is answered 409 with ``Retry-After``; a lease that was lost and a server that cannot
    be reached, 503. The loss cancels the endpoint, unless ``on_loss="signal"``.
    """
    return around_handlers(name, options, _request_of, client_of, _values_of, refusal)


def _request_of(argument: object) -> HTTPConnection | None:
    return argument if isinstance(argument, HTTPConnection) else None


def _values_of(request: HTTPConnection) -> dict[str, object]:
    return {**request.query_params, **request.path_params}


async def _respond(connection: Request | WebSocket, error: Exception) -> Response | None:
    """Answer a request, or close a WebSocket that is still open: an HTTP response in an accepted one would break it."""
    response = answer(error)
    if response is None:
        raise error
    if isinstance(connection, WebSocket):
        ends = (connection.application_state, connection.client_state)
        if WebSocketState.DISCONNECTED not in ends:
            await connection.close(TRY_AGAIN_LATER, response.text)
        return None
    return JSONResponse({"detail": response.text}, response.status, response.headers)


exception_handlers: dict[Any, Callable[[Any, Any], Coroutine[Any, Any, Response | None]]] = dict.fromkeys(
    (AcquireTimeout, LockLost, BackendUnavailable), _respond
)
"""For ``FastAPI(exception_handlers=…)``: answers for locks that an endpoint takes by itself, with ``async with``.

A request gets the responses of :func:`locked`; a WebSocket is closed with 1013.
"""
