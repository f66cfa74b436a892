"""From a URL to locks: connect(), the client, and closing it in order."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Coroutine, Iterable, Sequence
from functools import lru_cache
from random import Random
from threading import get_ident
from types import TracebackType
from typing import Any, Self, TypeVar

from aiolock.backends import from_url
from aiolock.clock import Clock, system_clock
from aiolock.contract import MUTEX, Backend, Bid, Kind, Settings
from aiolock.errors import ConfigError, UnsafeBackend, shorten
from aiolock.lease import Terms
from aiolock.lock import Lock
from aiolock.names import check_label, check_name, check_namespace
from aiolock.options import (
    OnLoss,
    check_flag,
    check_max_hold,
    check_on_loss,
    check_seconds,
    check_timeout,
    check_ttl,
)
from aiolock.reentrant import ReentrantLock
from aiolock.runtime import Runtime, State

__all__ = ["Client", "connect"]

L = TypeVar("L", bound=Lock)

_closing: set[asyncio.Task[None]] = set()
"""Closings under way: one that its caller no longer waits for goes on."""


def _keep(closing: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    task = asyncio.get_running_loop().create_task(closing, name="aiolock-close")
    _closing.add(task)
    task.add_done_callback(_closing.discard)
    return task


async def _to_the_end(closing: Coroutine[Any, Any, None]) -> None:
    await asyncio.shield(_keep(closing))


def connect(
    url: str | Sequence[str],
    /,
    *,
    namespace: str = "aiolock",
    ttl: float = 30.0,
    on_loss: OnLoss = "cancel",
    label: str | None = None,
    require: Iterable[str] = (),
    command_timeout: float | None = None,
    **options: Any,
) -> Client:
    """A client for the server at ``url``; does no I/O before ``async with`` (or ``await client.open()``).

    :param url: ``memory://``, ``redis://host:6379/0``, ``rediss://…`` (TLS) or ``unix:///path/to.sock``. A password
        in it is never shown.
    :param namespace: prefixes every key; clients of one namespace share their locks.
    :param ttl: seconds for which the server keeps a hold that is not renewed; every lock may have its own.
    :param on_loss: ``"cancel"``: losing a lease cancels the block under it; ``"signal"``: it only tells.
    :param label: names this process to people; the default is ``host:pid``.
    :param require: what the deployment must promise, such as ``"fencing"`` or ``"fifo"``; ``open`` raises
        :class:`UnsafeBackend` if it does not.
    :param command_timeout: seconds that bound every round trip; the default is ``min(ttl / 3, 5)``.
    :param options: what the backend has of its own; see its page.

    Raises :class:`ConfigError` that lists what there is for a scheme, option or value that is not known, and
    :class:`MissingDriver` with the command that installs what is missing.
    """
    if isinstance(url, list | tuple):
        raise ConfigError(
            "several servers as one quorum are not supported by this version: pass one URL as a str"
        )
    settings = _check(namespace, ttl, on_loss, label, require, command_timeout)
    return Client(from_url(url, options), **settings)


def _check(
    namespace: object, ttl: object, on_loss: object, label: object, require: object, command_timeout: object
) -> dict[str, Any]:
    ttl = check_ttl(ttl)
    if isinstance(require, str) or not isinstance(require, Iterable):
        raise ConfigError(f"require must be a set of words such as {{'fencing'}}, not {shorten(require)}")
    words = list(require)
    if not all(isinstance(word, str) for word in words):
        raise ConfigError(f"require must be a set of words such as {{'fencing'}}, not {shorten(words)}")
    if command_timeout is None:
        command_timeout = min(ttl / 3, 5.0)
    return {
        "namespace": check_namespace(namespace),
        "ttl": ttl,
        "on_loss": check_on_loss(on_loss),
        "label": f"{socket.gethostname()}:{os.getpid()}" if label is None else check_label(label),
        "require": frozenset(words),
        "command_timeout": check_seconds("command_timeout", command_timeout, 0.01),
    }


_bid = lru_cache(maxsize=512)(Bid)
"""Bids are values, so locks of one name and the same options share one: a lock made anew for each use costs little."""


class Client:
    """Locks on one server, for one event loop.

    Made by :func:`connect`, or from a backend: ``Client(RedisBackend(client=my_redis))``. Used as ``async with``.
    Its locks may be made before it is opened, and used after.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        namespace: str = "aiolock",
        ttl: float = 30.0,
        on_loss: OnLoss = "cancel",
        label: str | None = None,
        require: Iterable[str] = (),
        command_timeout: float | None = None,
        clock: Clock = system_clock,
        random: Random | None = None,
    ) -> None:
        if not isinstance(backend, Backend):
            raise ConfigError(
                f"a client needs a backend, not {shorten(backend)}; connect() makes one from a URL"
            )
        if not callable(clock):
            raise ConfigError(f"clock must be a function that returns seconds, not {shorten(clock)}")
        if random is not None and not isinstance(random, Random):
            raise ConfigError(f"random must be a random.Random, not {shorten(random)}")
        options = _check(namespace, ttl, on_loss, label, require, command_timeout)
        self._ttl: float = options["ttl"]
        self._on_loss: OnLoss = options["on_loss"]
        self._terms = Terms(None, self._on_loss)
        self._require: frozenset[str] = options["require"]
        self._backend = backend
        self._watching: asyncio.Task[None] | None = None
        self._end: asyncio.Task[None] | None = None
        backend.bind(
            Settings(
                namespace=options["namespace"],
                label=options["label"],
                ttl=self._ttl,
                command_timeout=options["command_timeout"],
                clock=clock,
                require=self._require,
            )
        )
        self._runtime = Runtime(
            backend,
            clock=clock,
            random=random or Random(),
            command_timeout=options["command_timeout"],
            label=options["label"],
        )

    def __repr__(self) -> str:
        return f"<Client of {self._backend.name}, {self._runtime.state.value}>"

    def __reduce__(self) -> str:
        raise TypeError("a client cannot be copied or pickled: connect anew where it is needed")

    # --- opening and closing

    async def open(self) -> Self:
        """Connect, within the ``command_timeout``; the same as entering ``async with``.

        Raises :class:`BackendUnavailable`, :class:`BackendRefused`, or :class:`UnsafeBackend` if ``require=`` asks
        for more than the deployment promises. Cancelling it leaves nothing open, and it may be tried again.
        """
        runtime = self._runtime
        if runtime.forked or runtime.state is not State.NEW or runtime.loop is not None:
            raise RuntimeError(
                "this client cannot be opened: it was opened before, or made before a fork; connect anew"
            )
        runtime.loop = asyncio.get_running_loop()
        runtime.thread = get_ident()
        try:
            await self._backend.open()
            missing = self._require - self._backend.capabilities
            if missing:
                raise UnsafeBackend(
                    f"{self._backend.name} does not promise {', '.join(sorted(missing))}; "
                    f"this deployment promises {', '.join(sorted(self._backend.capabilities))}"
                )
        except BaseException:
            runtime.loop = None
            await _to_the_end(self._backend.aclose())
            raise
        runtime.state = State.OPEN
        self._watching = runtime.spawn(runtime.watchdog.run(), "aiolock-watchdog")
        return self

    async def aclose(self, timeout: float | None = None) -> None:
        """Lose what is still under a block (reason ``"closed"``), release every lease, finish pending clean-ups.

        Then the client's tasks end and its connections close. Takes at most ``timeout`` seconds (default: the
        ``command_timeout``); what a dead server did not hear by then dies by its ttl. Idempotent. Cancelling it stops
        the waiting, not the closing.
        """
        limit = self._runtime.command_timeout if timeout is None else check_seconds("timeout", timeout, 0)
        if self._runtime.forked or self._runtime.state is State.NEW:
            return
        if self._end is None:
            self._runtime.guard()
            self._runtime.state = State.CLOSING
            self._end = _keep(self._close(limit))
        await asyncio.shield(self._end)

    async def _close(self, limit: float) -> None:
        runtime = self._runtime
        try:
            claims = [contender.close() for contender in list(runtime.contenders)]
            for claim in claims:
                runtime.clean_up(claim)
            loop = asyncio.get_running_loop()
            deadline = loop.time() + limit
            while runtime.cleanups and (left := deadline - loop.time()) > 0:
                await asyncio.wait(set(runtime.cleanups), timeout=left)
        finally:
            runtime.state = State.CLOSED
            tasks = [task for task in runtime.tasks if not task.done()]
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
            await self._backend.aclose()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # --- locks

    def lock(
        self,
        name: str,
        *,
        ttl: float | None = None,
        timeout: float | None = None,
        on_loss: OnLoss | None = None,
        fair: bool = False,
        max_hold: float | None = None,
        label: str | None = None,
    ) -> Lock:
        """Mutual exclusion: one holder per ``name``, whatever process or machine it runs on.

        :param name: a non-empty ``str`` of at most 1,024 UTF-8 bytes; different names are different locks.
        :param ttl: seconds for which the server keeps a hold that is not renewed (at least 0.1; default: the client's).
        :param timeout: seconds that ``async with`` and ``acquire()`` wait; ``None`` waits for ever, 0 tries once.
        :param on_loss: ``"cancel"`` or ``"signal"`` (default: the client's).
        :param fair: strict order of arrival, also between the tasks of this process and those of others.
        :param max_hold: seconds after which the lease is no longer renewed, and lost.
        :param label: names the holder to people (default: the client's).

        Does no I/O. Raises :class:`InvalidName` or :class:`ConfigError`.
        """
        return self._lock(Lock, MUTEX, name, ttl, timeout, on_loss, fair, max_hold, label)

    def reentrant_lock(
        self,
        name: str,
        *,
        ttl: float | None = None,
        timeout: float | None = None,
        on_loss: OnLoss | None = None,
        fair: bool = False,
        max_hold: float | None = None,
        label: str | None = None,
    ) -> ReentrantLock:
        """As :meth:`lock`, and the task that holds it may enter again; counted in the client, not inherited by tasks."""
        return self._lock(ReentrantLock, MUTEX, name, ttl, timeout, on_loss, fair, max_hold, label)

    def _lock(
        self,
        cls: type[L],
        kind: Kind,
        name: object,
        ttl: object,
        timeout: object,
        on_loss: object,
        fair: object,
        max_hold: object,
        label: object,
    ) -> L:
        bid = _bid(
            check_name(name),
            kind,
            self._ttl if ttl is None else check_ttl(ttl),
            self._runtime.label if label is None else check_label(label),
            check_flag("fair", fair),
        )
        if max_hold is None and on_loss is None:
            terms = self._terms
        else:
            terms = Terms(
                check_max_hold(max_hold), self._on_loss if on_loss is None else check_on_loss(on_loss)
            )
        return cls(self._runtime, bid, terms, check_timeout(timeout))

    # --- looking

    @property
    def capabilities(self) -> frozenset[str]:
        """What this deployment promises, in the words of ``require=``; complete once the client is open."""
        return self._backend.capabilities

    def stats(self) -> dict[str, int]:
        """Counters since the client was opened and gauges of this moment, for a metrics exporter.

        ``held`` and ``waiting`` are gauges; ``acquired``, ``released``, ``passed`` (locally, without the server),
        ``timeouts``, ``lost``, ``renewals``, ``renewal_failures`` and ``cleanups`` only grow.
        """
        runtime = self._runtime
        return {
            "held": len(runtime.watchdog),
            "waiting": sum(contender.waiting for contender in runtime.contenders),
            "acquired": runtime.stats.acquired,
            "released": runtime.stats.released,
            "passed": runtime.stats.passed,
            "timeouts": runtime.stats.timeouts,
            "lost": runtime.stats.lost,
            "renewals": runtime.watchdog.renewals,
            "renewal_failures": runtime.watchdog.failures,
            "cleanups": runtime.stats.cleanups,
        }
