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
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any, Unpack, get_args

from aiolock.client import Client
from aiolock.errors import ConfigError, MissingDriver, shorten
from aiolock.handling import Wish, WishOptions
from aiolock.lease import Lease
from aiolock.starlette import client_of, exception_handlers, lifespan, refusal
from aiolock.templates import Template

try:
    from fastapi import Depends
    from fastapi.exceptions import RequestValidationError
    from fastapi.params import Param
    from pydantic import TypeAdapter, ValidationError
    from starlette.requests import HTTPConnection
except ImportError as _missing:
    raise MissingDriver("fastapi", "fastapi") from _missing

__all__ = ["LockClient", "client", "exception_handlers", "lifespan", "locked"]


async def client(connection: HTTPConnection) -> Client:
    """The application's client, as a dependency; tests replace it with ``app.dependency_overrides[client]``.

    Raises :class:`ConfigError` if the application has none.
    """
    return client_of(connection)


LockClient = Annotated[Client, Depends(client)]
"""For a parameter that is the application's client: ``async def report(locks: LockClient)``."""


def locked(name: str | Callable[..., Any], /, **options: Unpack[WishOptions]) -> Any:
    """A dependency that holds a lock while the path operation function runs: ``Annotated[Lease, locked("a:{b}")]``.

    :param name: a template whose names are path or query parameters, with the values that the function gets (so that 7
        and 07 are one order where it says ``order_id: int``); or a dependency of your own that returns the name.
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
    """
    wish = Wish(options)
    name_of = name if callable(name) else _from_parameters(Template(name))

    # Defaults instead of Annotated: FastAPI looks up the names in annotations where they are not, in the module.
    async def hold(
        connection: HTTPConnection,
        locks: Client = Depends(client),  # noqa: B008 - how dependencies are declared
        key: Any = Depends(name_of),  # noqa: B008 - as above
    ) -> AsyncIterator[Lease]:
        endpoint = connection.scope.get("endpoint")
        async with wish.block(locks, key, refusal(connection), signal=_in_a_thread(endpoint)) as lease:
            yield lease

    return Depends(hold, scope="function")


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


# --- names from the parameters of the function

_NOTHING: Any = inspect.Parameter.empty


def _from_parameters(template: Template) -> Callable[..., Any]:
    async def name_of(connection: HTTPConnection) -> str:
        endpoint = connection.scope["endpoint"]
        sources = {"path": connection.path_params, "query": connection.query_params}
        values: dict[str, object] = {}
        for field in template.fields:
            place = next((place for place, given in sources.items() if field in given), None)
            reader = _reader(endpoint, field)
            if place is not None:
                text = sources[place][field]
                values[field] = text if reader is None else reader.read(text, place)
            elif reader is not None:
                values[field] = reader.without()
        return template.fill(values)

    return name_of


class _Reader:
    """How a parameter of a function is read from the text in a URL, as FastAPI reads it."""

    def __init__(self, field: str, annotation: Any, default: Any) -> None:
        self._field = field
        self._adapter: TypeAdapter[Any] = TypeAdapter(annotation)
        self._default = default

    def read(self, text: object, place: str) -> object:
        """The value of ``text``; what is wrong with it is said as FastAPI says it (422)."""
        try:
            value: object = self._adapter.validate_python(text)
        except ValidationError as error:
            details = error.errors(include_url=False)
            raise RequestValidationError(
                [{**detail, "loc": (place, self._field, *detail["loc"])} for detail in details]
            ) from error
        return value

    def without(self) -> object:
        """The value where the URL says nothing."""
        if self._default is _NOTHING:
            missing = {
                "type": "missing",
                "loc": ("query", self._field),
                "msg": "Field required",
                "input": None,
            }
            raise RequestValidationError([missing])
        return self._default


@functools.lru_cache(maxsize=4096)
def _reader(endpoint: Callable[..., Any], field: str) -> _Reader | None:
    """The reader of the parameter that is called ``field`` in the URL; ``None`` if the function has none."""
    for parameter in inspect.signature(endpoint, eval_str=True).parameters.values():
        annotation = Any if parameter.annotation is _NOTHING else parameter.annotation
        default = parameter.default
        infos = [extra for extra in get_args(annotation)[1:] if isinstance(extra, Param)]
        if isinstance(default, Param):
            infos = [default]
            annotation = Annotated[annotation, default]
            default = _NOTHING if default.is_required() else default.get_default(call_default_factory=True)
        if field == next((info.alias for info in infos if info.alias), parameter.name):
            return _Reader(field, annotation, default)
    return None
