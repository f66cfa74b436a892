"""Hold a lock around a request, and turn lock errors into responses: shared by the web integrations."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from aiolock.client import Client, connect
from aiolock.core.cancellation import owns_block
from aiolock.decorators import Template
from aiolock.errors import AcquireTimeout, BackendUnavailable, ConfigError, InvalidName, LockLost, shorten
from aiolock.lease import Lease
from aiolock.validation import LockOptions, check_options, check_seconds

__all__ = [
    "ANSWERED",
    "RETRY_AFTER",
    "TIMEOUT",
    "Block",
    "ErrorResponse",
    "MakeLock",
    "RouteLock",
    "RouteLockOptions",
    "Source",
    "answer",
    "around_handlers",
    "opener",
]

Q = TypeVar("Q")
R = TypeVar("R")

# --- answers
# Responses to lock errors: status, sentence, headers. The sentences name no lock: a name may contain private data.

TIMEOUT = 5.0
"""Default seconds that a request waits for a lock; the user of a browser waits no longer either."""
RETRY_AFTER = 1.0
"""Default seconds after which a refused request may be repeated."""

ANSWERED: tuple[type[Exception], ...] = (AcquireTimeout, LockLost, BackendUnavailable, InvalidName)
"""Errors that are no defect of the application, and have an answer."""

Source = str | Client | Callable[[], Client]
"""The source of an application's client: a URL, a client that is not open, or a function that makes one."""


class ErrorResponse(NamedTuple):
    """The status, text and headers of a response."""

    status: int
    text: str
    headers: dict[str, str]


def answer(error: BaseException, retry_after: float = RETRY_AFTER) -> ErrorResponse | None:
    """Return the answer to ``error``; ``None`` if it is a defect or a matter for administrators."""
    # The header has whole seconds; 0 would invite a stampede.
    again = {"Retry-After": str(max(1, math.ceil(retry_after)))}
    if isinstance(error, AcquireTimeout):
        return ErrorResponse(409, "This is being worked on at the moment; try again later.", again)
    if isinstance(error, LockLost):
        return ErrorResponse(503, "The work was interrupted and may be incomplete; try again later.", again)
    if isinstance(error, BackendUnavailable):
        return ErrorResponse(503, "The service is not available at the moment; try again later.", again)
    if isinstance(error, InvalidName):
        return ErrorResponse(422, "There can be nothing with this name.", {})
    return None


def opener(source: object, options: dict[str, Any]) -> Callable[[], Client]:
    """Return a function that makes the client of an application each time that it starts.

    Raises :class:`ConfigError` unless ``source`` is a :data:`Source`, and for options beside a ready client. A URL is
    parsed here once, so that its mistakes show when the application is built.
    """
    if isinstance(source, str):
        url = source
        connect(url, **options)
        return lambda: connect(url, **options)
    if options:
        raise ConfigError(f"{', '.join(sorted(options))}: options go with a URL; a client has its own")
    if isinstance(source, Client):
        client = source
        return lambda: client
    if not callable(source):
        raise ConfigError(
            f"an application needs a URL, a client or a function that makes one, not a {type(source).__name__}"
        )
    make = source

    def made() -> Client:
        client = make()
        if not isinstance(client, Client):
            raise ConfigError(f"the function that makes the client returned {shorten(client)}")
        return client

    return made


# --- handling

MakeLock = Callable[[Client, str], AbstractAsyncContextManager[Lease]]
"""A function that makes another lock than a mutex from a client and a name, such as the read lock of a pair."""

Refuse = Callable[[ErrorResponse], Exception]
"""Makes the exception by which a framework sends an answer."""


class RouteLockOptions(LockOptions, total=False):
    """The options of ``locked`` in every web framework."""

    retry_after: float
    lock: MakeLock | None


class RouteLock:
    """The options of the lock of one route, checked once, when the application is built."""

    def __init__(self, options: RouteLockOptions, template: Template | None = None) -> None:
        self._template = template
        there = RouteLockOptions.__annotations__
        if unknown := sorted(options.keys() - there.keys()):
            raise ConfigError(f"locked() has no option {', '.join(unknown)}; it has {', '.join(there)}")
        self.retry_after: float = check_seconds("retry_after", options.get("retry_after", RETRY_AFTER), 0)
        given = {name: value for name, value in options.items() if name not in ("lock", "retry_after")}
        self._make: MakeLock | None = options.get("lock")
        if self._make is not None and not callable(self._make):
            raise ConfigError(
                f"lock must be a function of a client and a name that returns a lock, not {shorten(self._make)}"
            )
        if self._make is not None and given:
            raise ConfigError(
                f"{', '.join(sorted(given))}: with lock=, options go to the lock that the function makes"
            )
        self._options = check_options("locked", {"timeout": TIMEOUT, **given})

    def block(self, client: Client, name: str, refuse: Refuse, *, signal: bool = False) -> Block:
        """Return the block for one request; with ``signal``, a loss does not cancel the task that enters it."""

        def lock() -> AbstractAsyncContextManager[Lease]:
            if self._make is not None:
                return self._make(client, name)
            options = self._options.copy()
            if signal:
                options["on_loss"] = "signal"
            if self._template is None:
                return client.lock(name, **options)
            return client.locked(self._template.text, **options).make(name)

        return Block(lock, self.retry_after, refuse)


class Block:
    """``async with`` a lock, with errors that a web framework understands.

    A generator may stand between it and the handler: the loss of the lease cancels the handler all the same.
    """

    __slots__ = ("_lock", "_make", "_refuse", "_retry_after")

    def __init__(
        self,
        make: Callable[[], AbstractAsyncContextManager[Lease]],
        retry_after: float,
        refuse: Refuse,
    ) -> None:
        self._make = make
        self._retry_after = retry_after
        self._refuse = refuse
        self._lock: AbstractAsyncContextManager[Lease]

    @owns_block
    async def __aenter__(self) -> Lease:
        """Wait for the lock. Cancelling it leaves nothing behind."""
        try:
            self._lock = self._make()
            return await self._lock.__aenter__()
        except ANSWERED as error:
            raise self._refusal(error) from error

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release, as the end of every block does; an exception of the handler goes on as it is."""
        try:
            await self._lock.__aexit__(kind, error, trace)
        except LockLost as loss:
            raise self._refusal(loss) from loss

    def _refusal(self, error: Exception) -> Exception:
        response = answer(error, self._retry_after)
        return error if response is None else self._refuse(response)


def around_handlers(
    name: str | Callable[[Q], str],
    options: RouteLockOptions,
    request_of: Callable[[object], Q | None],
    client_of: Callable[[Q], Client],
    values_of: Callable[[Q], Mapping[str, object]],
    refusal: Callable[[Q], Refuse],
) -> Callable[[Callable[..., Awaitable[R]]], Callable[..., Awaitable[R]]]:
    """Return a decorator that holds a lock while a handler runs, and passes the lease behind the request.

    :param request_of: returns the request if an argument of the handler is one, or has one.
    :param values_of: the values of a request from which a template makes the name.
    :param refusal: makes the exceptions of one request.
    """
    name_of: Callable[[Q], str]
    if callable(name):
        template, name_of = None, name
    else:
        template = Template(name)
        name_of = _from_template(template, values_of, refusal)
    route_lock = RouteLock(options, template)

    def decorate(handler: Callable[..., Awaitable[R]]) -> Callable[..., Awaitable[R]]:
        if not inspect.iscoroutinefunction(handler):
            raise ConfigError(f"locked() is for functions with `async def`, not for {shorten(handler)}")

        @functools.wraps(handler)
        async def hold(*args: Any, **kwargs: Any) -> R:
            for index, argument in enumerate(args, 1):
                if (request := request_of(argument)) is not None:
                    block = route_lock.block(client_of(request), name_of(request), refusal(request))
                    async with block as lease:
                        return await handler(*args[:index], lease, *args[index:], **kwargs)
            raise ConfigError(
                f"locked() is for functions that are called with a request, not {shorten(args)}"
            )

        # Frameworks read the signature of the function that they call: it has no lease.
        del hold.__wrapped__
        return hold

    return decorate


def _from_template(
    template: Template, values_of: Callable[[Q], Mapping[str, object]], refusal: Callable[[Q], Refuse]
) -> Callable[[Q], str]:
    def fill(request: Q) -> str:
        values = values_of(request)
        if missing := [field for field in template.fields if field not in values]:
            raise refusal(request)(ErrorResponse(422, f"The address lacks {', '.join(missing)}.", {}))
        return template.fill(values)

    return fill
