"""Locks for FastAPI applications: a client that lives as long as the application, and locks as dependencies.

::

    from aiolock.fastapi import lifespan, locked

    app = FastAPI(lifespan=lifespan("redis://127.0.0.1:6379/0"))

    @app.post("/orders/{order_id}/pay")
    async def pay(order_id: int, lease: Annotated[Lease, locked("order:{order_id}", timeout=2)]) -> Receipt:
        ...

The lock is released when the function returns, before the response is sent.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from types import FunctionType
from typing import Annotated, Any, Unpack
from weakref import WeakKeyDictionary

from aiolock import starlette
from aiolock.answers import Source
from aiolock.client import Client
from aiolock.errors import ConfigError, MissingDriver, shorten
from aiolock.handling import Wish, WishOptions
from aiolock.lease import Lease
from aiolock.parameters import Sources, all_below, name_from_route, routes_of
from aiolock.runtime import State
from aiolock.starlette import Lifespan, client_of, exception_handlers, refusal
from aiolock.templates import Template

try:
    from fastapi import Depends
    from starlette.requests import HTTPConnection
except ImportError as _missing:
    raise MissingDriver("fastapi", "fastapi") from _missing

__all__ = ["LockClient", "client", "exception_handlers", "lifespan", "locked"]

# From 0.106 to 0.117, a dependency ends when the function returns; from 0.118 on, it does so if it asks to, by a parameter
# that 0.121 brought. The versions between are excluded.
_UNTIL_RETURN: dict[str, Any] = (
    {"scope": "function"} if "scope" in inspect.signature(Depends).parameters else {}
)

_HELD: WeakKeyDictionary[Any, Template | None] = WeakKeyDictionary()
"""The dependencies that hold locks, with what their names are made of if it is a template."""


def lifespan(
    source: Source, inner: Lifespan | None = None, /, **options: Any
) -> Callable[[Any], AbstractAsyncContextManager[Mapping[str, Any]]]:
    """A lifespan with an open client in it: ``FastAPI(lifespan=lifespan("redis://…"))``.

    The same as :func:`aiolock.starlette.lifespan`, with the same parameters and errors. When the application starts it
    also looks at every path operation with :func:`locked`, and raises :class:`ConfigError` for those that cannot work:
    generators, and templates with names that nothing in the request has or that have more than one value. FastAPI tells
    a dependency nothing of the function that it is for, so this is the first moment at which both are known.

    If ``app.dependency_overrides`` replaces :func:`client`, the replacement is called instead, and the client that it
    returns is opened: nothing connects to ``source``. So tests with FastAPI's ``TestClient`` need no server.
    """
    run = starlette.lifespan(source, inner, **options)

    def checked(app: Any) -> AbstractAsyncContextManager[Mapping[str, Any]]:
        _check(app)
        make = _replacement(app)
        return run(app) if make is None else starlette.around(make, inner)(app)

    return checked


async def client(connection: HTTPConnection) -> Client:
    """The application's client, as a dependency; tests replace it with ``app.dependency_overrides[client]``.

    Raises :class:`ConfigError` if the application has none.
    """
    return client_of(connection)


LockClient = Annotated[Client, Depends(client)]
"""For a parameter that is the application's client: ``async def report(locks: LockClient)``."""


def locked(name: str | Callable[..., Any], /, **options: Unpack[WishOptions]) -> Any:
    """A dependency that holds a lock while the path operation function runs: ``Annotated[Lease, locked("a:{b}")]``.

    :param name: a template whose names are path or query parameters of the function or of its dependencies, with the
        values that these get (so that 7 and 07 are one order where one of them says ``order_id: int``; a part of the
        path that nobody declares is a text); or a dependency of your own that returns the name.
    :param timeout: seconds to wait for the lock (default: 5); ``None`` waits for ever, 0 tries once.
    :param retry_after: seconds, for the header of that name in a refusal (default: 1).
    :param lock: a function of the client and the name that makes another lock than a mutex.

    The other options are those of :meth:`Client.lock`: ``ttl``, ``on_loss``, ``fair``, ``max_hold``, ``label``.
    Also good for ``dependencies=[locked(…)]``, where nobody needs the lease. The lock is released when the function
    returns; a streamed body and background tasks run after that, and take locks of their own. So this is refused
    for functions that are generators.

    A lock that is not free in time is answered 409 with ``Retry-After``; a lease that was lost and a server that cannot
    be reached, 503; WebSockets are closed with 1013. The loss cancels the function, unless ``on_loss="signal"``. A
    function with ``def`` runs in a thread, which cannot be cancelled: it goes on, ``lease.check()`` tells it, and the
    answer is 503.

    What cannot work on its route is said when the application starts, by :func:`lifespan`; without that, the first
    request is 500 with the same :class:`ConfigError`.
    """
    wish = Wish(options)
    template = None if callable(name) else Template(name)
    name_of: Any = name if template is None else name_from_route(template)

    # Defaults instead of Annotated: FastAPI looks up the names in annotations where they are not, in the module.
    async def hold(
        connection: HTTPConnection,
        locks: Client = Depends(client),  # noqa: B008 - how dependencies are declared
        key: Any = Depends(name_of),  # noqa: B008 - as above
    ) -> AsyncIterator[Lease]:
        endpoint = connection.scope.get("endpoint")
        async with wish.block(locks, key, refusal(connection), signal=_in_a_thread(endpoint)) as lease:
            yield lease

    _HELD[hold] = template
    return Depends(hold, **_UNTIL_RETURN)


def _replacement(app: Any) -> Callable[[], AbstractAsyncContextManager[Client]] | None:
    """What makes the client that tests put in the place of the application's, if it can be known before a request."""
    function = app.dependency_overrides.get(client)
    if not isinstance(function, FunctionType) or inspect.signature(function).parameters:
        return None
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return None

    def make() -> AbstractAsyncContextManager[Client]:
        made = function()
        if not isinstance(made, Client):
            raise ConfigError(
                f"what replaces the dependency `client` must return a client, not {shorten(made)}"
            )
        # One that the test has opened by itself is the test's to close.
        is_open = made._runtime.state is State.OPEN and not made._runtime.over  # noqa: SLF001 - of one library
        return nullcontext(made) if is_open else made

    return make


def _check(app: Any) -> None:
    """Raise :class:`ConfigError` for the first path operation whose locks cannot work."""
    for dependant, path in routes_of(app):
        for each in all_below(dependant):
            # Other callables may have no hash.
            if isinstance(each.call, FunctionType) and each.call in _HELD:
                _in_a_thread(dependant.call)
                template = _HELD[each.call]
                if template is not None:
                    Sources(template, dependant, path)


def _in_a_thread(endpoint: Any) -> bool:
    function = inspect.unwrap(endpoint) if callable(endpoint) else endpoint
    function = function.func if isinstance(function, functools.partial) else function
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        raise ConfigError(
            f"{shorten(function)} is a generator: what it yields is sent after a dependency's lock is released; "
            "take the lock inside of it, with `async with`"
        )
    if inspect.iscoroutinefunction(function):
        return False
    return not inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004 - its kind, not whether
