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
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from types import FunctionType, UnionType
from typing import Annotated, Any, NamedTuple, Union, Unpack, get_args, get_origin
from weakref import WeakKeyDictionary

from aiolock import starlette
from aiolock._web import RouteLock, RouteLockOptions, Source
from aiolock.client import Client
from aiolock.core.runtime import State
from aiolock.decorators import Template
from aiolock.errors import ConfigError, MissingDriver, forgets_arguments, name_of, shorten
from aiolock.lease import Lease
from aiolock.starlette import Lifespan, client_of, exception_handlers, refusal

try:
    from fastapi import Depends, routing
    from fastapi.dependencies.models import Dependant
    from fastapi.dependencies.utils import request_params_to_args
    from fastapi.exceptions import RequestValidationError
    from pydantic import BaseModel
    from starlette.requests import HTTPConnection
except ImportError as _missing:
    raise MissingDriver("fastapi", "fastapi") from _missing

__all__ = ["LockClient", "client", "exception_handlers", "lifespan", "locked"]

# A dependency ends when the function returns: always from 0.106 to 0.117, and by this parameter since 0.121. The versions
# in between have no way, and are excluded.
_UNTIL_RETURN: dict[str, Any] = (
    {"scope": "function"} if "scope" in inspect.signature(Depends).parameters else {}
)

_HELD: WeakKeyDictionary[Any, Template | None] = WeakKeyDictionary()
"""The dependencies that hold locks, and the templates of their names; ``None`` if a function makes the name."""


@forgets_arguments
def lifespan(
    source: Source, inner: Lifespan | None = None, /, **options: Any
) -> Callable[[Any], AbstractAsyncContextManager[Mapping[str, Any]]]:
    """Return a lifespan with an open client in it: ``FastAPI(lifespan=lifespan("redis://…"))``.

    The parameters and errors are those of :func:`aiolock.starlette.lifespan`. When the application starts it also checks
    every path operation with :func:`locked`, and raises :class:`ConfigError` for those that cannot work: generators, and
    templates with names that the request does not have or that have more than one value. A dependency does not know its
    function earlier.

    If ``app.dependency_overrides`` replaces :func:`client`, the replacement is called instead, and the client that it
    returns is opened: nothing connects to ``source``. So tests with FastAPI's ``TestClient`` need no server.
    """
    run = starlette.lifespan(source, inner, **options)

    def checked(app: Any) -> AbstractAsyncContextManager[Mapping[str, Any]]:
        _check(app.routes)
        make = _replacement(app)
        return run(app) if make is None else starlette.around(make, inner)(app)

    return checked


async def client(connection: HTTPConnection) -> Client:
    """Return the application's client: a dependency, which tests replace by ``app.dependency_overrides[client]``.

    Raises :class:`ConfigError` if the application has none. It waits for nothing, so that cancelling it has no effect.
    """
    return client_of(connection)


LockClient = Annotated[Client, Depends(client)]
"""The type of a parameter that is the application's client: ``async def report(locks: LockClient)``."""


def locked(name: str | Callable[..., Any], /, **options: Unpack[RouteLockOptions]) -> Any:
    """Return a dependency that holds a lock while the path operation runs: ``Annotated[Lease, locked("a:{b}")]``.

    :param name: a template whose names are path or query parameters of the function or of its dependencies, with the
        values that these get (7 and 07 are one order where one of them declares ``order_id: int``; an undeclared part of
        the path is a text); or a dependency of your own that returns the name.
    :param timeout: seconds to wait for the lock (default: 5); ``None`` waits for ever, 0 tries once.
    :param retry_after: seconds, for the header of that name in a refusal (default: 1).
    :param lock: a function of the client and the name that makes another lock than a mutex.

    The other options are those of :meth:`Client.lock`: ``ttl``, ``renew``, ``grace``, ``on_loss``, ``fair``,
    ``max_hold``, ``label``.
    ``dependencies=[locked(…)]`` locks a function that needs no lease. The lock is released when the function returns; a
    streamed body and background tasks run after that, and take locks of their own. So generators are refused.

    A lock that is not free in time is answered 409 with ``Retry-After``; a lost lease and a server that cannot be
    reached, 503; WebSockets are closed with 1013. The loss cancels the function, unless ``on_loss="signal"``. A function
    with ``def`` runs in a thread, which cannot be cancelled: it goes on, ``lease.check()`` raises, and the answer is 503.

    :func:`lifespan` raises :class:`ConfigError` for mistakes when the application starts; without it, the first request
    is answered 500 with the same error.
    """
    template = None if callable(name) else Template(name)
    route_lock = RouteLock(options, template)
    key_of: Any = name if template is None else _name_from_route(template)

    # Defaults instead of Annotated: FastAPI looks up the names in annotations where they are not, in the module.
    async def hold(
        connection: HTTPConnection,
        locks: Client = Depends(client),  # noqa: B008 - how dependencies are declared
        key: Any = Depends(key_of),  # noqa: B008 - as above
    ) -> AsyncIterator[Lease]:
        endpoint = connection.scope.get("endpoint")
        async with route_lock.block(locks, key, refusal(connection), signal=_in_a_thread(endpoint)) as lease:
            yield lease

    _HELD[hold] = template
    return Depends(hold, **_UNTIL_RETURN)


def _replacement(app: Any) -> Callable[[], AbstractAsyncContextManager[Client]] | None:
    """Return the maker of the client by which tests replace the application's, if it needs no request."""
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
        # The test closes a client that it opened.
        is_open = made._runtime.state is State.OPEN and not made._runtime.over  # noqa: SLF001 - of one library
        return nullcontext(made) if is_open else made

    return make


def _check(routes: Any, path: frozenset[str] = frozenset()) -> None:
    """Raise :class:`ConfigError` for the first route whose locks cannot work, also in mounts, where ``path`` has the names so far."""
    # Older versions list every route of an included router.
    for route in getattr(routing, "iter_route_contexts", iter)(routes or ()):
        names = path | set(getattr(route, "param_convertors", None) or ())
        dependant = getattr(route, "dependant", None) or Dependant()
        for each in _functions(dependant):
            # Other callables may be unhashable.
            if isinstance(each.call, FunctionType) and each.call in _HELD:
                _in_a_thread(dependant.call)
                if (template := _HELD[each.call]) is not None:
                    list(_find(template, dependant, names))
        # Starlette's name for the rest of the path is no parameter.
        _check(getattr(route, "routes", None), names - {"path"})


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


# --- names: the path and query parameters that a route declares


class _Parameter(NamedTuple):
    """A parameter of a function, or a field of its model of query parameters; FastAPI validates ``field``."""

    function: object
    location: str
    field: Any
    name: str
    kind: Any
    aliases: Collection[str]


def _name_from_route(template: Template) -> Callable[..., Any]:
    """Return a dependency that fills ``template`` on the route that it is asked on; an invalid value is FastAPI's 422."""

    async def name(connection: HTTPConnection) -> str:
        # Newer versions share a route between all inclusions of its router; the context of one knows the prefix as well.
        route = connection.scope.get("route")
        included = connection.scope.get("fastapi", {}).get("effective_route_context")
        if included is not None and included.original_route is route:
            route = included
        values = dict(connection.path_params)
        for name, one in _find(template, getattr(route, "dependant", Dependant()), connection.path_params):
            got, errors = request_params_to_args([one.field], getattr(connection, f"{one.location}_params"))
            if errors:
                raise RequestValidationError(errors)
            value = got[one.field.name]
            values[name] = getattr(value, one.name) if isinstance(value, BaseModel) else value
        return template.fill(values)

    return name


def _find(template: Template, dependant: Any, path: Collection[str]) -> Iterator[tuple[str, _Parameter]]:
    """Yield what fills each name in ``template``; a part of the ``path`` that no function declares has none: it is text.

    Raises :class:`ConfigError` for a placeholder that no request can fill, or that may have two values.
    """

    def wrong(why: str) -> ConfigError:
        about = f"{shorten(template.text)} over {name_of(dependant.call)}"
        return ConfigError(f"{about}: {why}; a dependency of your own can make the name: locked(function)")

    known = [one for each in _functions(dependant) for one in _declared(each)]
    for name in template.fields:
        found = [one for one in known if one.location in ("path", "query") and name in one.aliases]
        if not found and name in path:
            continue
        if not (found := found or [one for one in known if name in (one.name, *one.aliases)]):
            there = ", ".join(sorted({*path, *(one.name for one in known)})) or "nothing"
            raise wrong(f"there is no {name} to make a name of; there is {there}")
        # The function's own declaration counts; those of dependencies must agree: 7 and 07 would be one order or two.
        first, *others = [one for one in found if one.function is dependant.call] or found
        if first.location not in ("path", "query"):
            raise wrong(f"{name} is in the {first.location}; names are made of path and query")
        if any(issubclass(each, Collection | BaseModel) for each in _types(first.kind)):
            raise wrong(f"{name} is more than one value ({first.kind})")
        if other := next(
            (one for one in others if (one.location, one.kind) != (first.location, first.kind)), None
        ):
            both = f"{name_of(first.function)} and {name_of(other.function)}"
            raise wrong(f"{both} declare {name} differently; declare it in {name_of(dependant.call)} as well")
        yield name, first


def _functions(dependant: Any) -> list[Any]:
    """Return FastAPI's Dependant of a function, then those of its dependencies."""
    return [dependant, *(one for each in dependant.dependencies for one in _functions(each))]


def _declared(dependant: Any) -> Iterator[_Parameter]:
    for location in ("path", "query", "header", "cookie", "body"):
        for field in getattr(dependant, f"{location}_params"):
            info = field.field_info
            models = [each for each in _types(info.annotation) if issubclass(each, BaseModel)]
            fields = models[0].model_fields if models and location == "query" else {field.name: info}
            for name, part in fields.items():
                alias = part.validation_alias or part.alias or name
                aliases = getattr(alias, "choices", [alias])
                yield _Parameter(dependant.call, location, field, name, part.annotation, aliases)


def _types(annotation: Any) -> list[type]:
    """Return the classes in an annotation, without those of texts."""
    annotation = getattr(annotation, "__value__", annotation)
    origin, args = get_origin(annotation) or annotation, get_args(annotation)
    if origin in (Union, UnionType, Annotated):
        return [each for choice in args[: 1 if origin is Annotated else None] for each in _types(choice)]
    return [origin] if isinstance(origin, type) and not issubclass(origin, str | bytes) else []
