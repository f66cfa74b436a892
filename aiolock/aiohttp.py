"""Locks for aiohttp applications: a client that lives as long as the application, and locks around handlers.

::

    from aiolock.aiohttp import cleanup_ctx, locked

    @locked("order:{order_id}", timeout=2)
    async def pay(request: web.Request, lease: Lease) -> web.Response:
        ...

    app = web.Application()
    app.cleanup_ctx.append(cleanup_ctx("redis://127.0.0.1:6379/0"))
    app.router.add_post(r"/orders/{order_id:[1-9][0-9]*}/pay", pay)

A handler whose client went away is cancelled if the application runs with ``handler_cancellation=True``: it releases
its lock, or leaves the queue.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack

from aiolock._web import ErrorResponse, Refuse, RouteLockOptions, Source, around_handlers, opener
from aiolock.client import Client
from aiolock.errors import ConfigError, MissingDriver, forgets_arguments
from aiolock.lease import Lease

try:
    from aiohttp import web
except ImportError as _missing:
    raise MissingDriver("aiohttp", "aiohttp") from _missing

__all__ = ["CLIENT", "cleanup_ctx", "client_of", "locked"]

P = ParamSpec("P")
R = TypeVar("R", bound=web.StreamResponse)
A = TypeVar("A")

CLIENT: web.AppKey[Client] = web.AppKey("aiolock", Client)
"""The key of the application's client: ``request.config_dict[CLIENT]``, also in subapplications."""


@forgets_arguments
def cleanup_ctx(source: Source, /, **options: Any) -> Callable[[web.Application], AsyncIterator[None]]:
    """Return a context for ``app.cleanup_ctx``: an open client in ``app[CLIENT]`` from start-up to clean-up.

    :param source: a URL (``options`` are then those of :func:`aiolock.connect`), a client that is not open, or a
        function that makes one for each start.

    Raises :class:`ConfigError` and :class:`MissingDriver` at once; starting the application raises what
    :meth:`Client.open` raises.
    """
    make = opener(source, options)

    async def run(app: web.Application) -> AsyncIterator[None]:
        async with make() as client:
            app[CLIENT] = client
            yield

    return run


def client_of(request: web.Request) -> Client:
    """Return the client of the application that serves this request; raise :class:`ConfigError` if there is none."""
    client = request.config_dict.get(CLIENT)
    if not isinstance(client, Client):
        raise ConfigError(
            "this application has no client: app.cleanup_ctx.append(cleanup_ctx(url)) brings it"
        )
    return client


def locked(
    name: str | Callable[[web.Request], str],
    /,
    **options: Unpack[RouteLockOptions],
) -> Callable[[Callable[Concatenate[A, Lease, P], Awaitable[R]]], Callable[Concatenate[A, P], Awaitable[R]]]:
    """Hold a lock while a handler runs: ``@locked("order:{order_id}")`` over ``async def pay(request, lease)``.

    :param name: a template whose names are parts of the path, else query parameters, or a function of the request. The
        values are texts: where 7 and 07 are the same, let the route admit only one, or pass a function. A request that
        lacks one is answered 422.
    :param timeout: seconds to wait for the lock (default: 5); ``None`` waits for ever, 0 tries once.
    :param retry_after: seconds, for the header of that name in a refusal (default: 1).
    :param lock: a function of the client and the name that makes another lock than a mutex.

    The other options are those of :meth:`Client.lock`: ``ttl``, ``renew``, ``grace``, ``on_loss``, ``fair``,
    ``max_hold``, ``label``. The
    handler gets the lease after the request, also as a method (``async def pay(self, request, lease)``); in a
    ``web.View`` after the view. The lock is released when it returns: after a stream, before a returned response is sent.

    A lock that is not free in time is answered 409 with ``Retry-After``; a lease that was lost and a server that cannot
    be reached, 503; if a stream has begun, the connection is closed instead. The loss cancels the handler, unless
    ``on_loss="signal"``.
    """
    return around_handlers(name, options, _request_of, client_of, _values_of, _refusal)


def _request_of(argument: object) -> web.Request | None:
    if isinstance(argument, web.View):
        return argument.request
    return argument if isinstance(argument, web.Request) else None


def _values_of(request: web.Request) -> dict[str, object]:
    return {**request.query, **request.match_info}


def _refusal(request: web.Request) -> Refuse:
    return functools.partial(_refused, request)


def _refused(request: web.Request, response: ErrorResponse) -> Exception:
    if request.writer.output_size > 0:
        # A second response in the middle of the first would be read as part of it.
        return ConnectionError(response.text)
    answers: dict[int, type[web.HTTPError]] = {
        409: web.HTTPConflict,
        422: web.HTTPUnprocessableEntity,
        503: web.HTTPServiceUnavailable,
    }
    return answers[response.status](text=response.text, headers=response.headers)
