"""Connect to a server and make locks: `connect()` and the client.

One class, although long: users read it as one page, and two fifths of it are the documentation of its methods.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from random import Random
from threading import get_ident
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, overload

from aiolock.backends import from_url, from_urls
from aiolock.clock import Clock, system_clock
from aiolock.core.backend import Backend, Request, Settings
from aiolock.core.capabilities import Administration, UnreadableLock, diagnose
from aiolock.core.hold import LeaseOptions
from aiolock.core.hooks import C, Moment, S
from aiolock.core.logs import Log, Outages, get_logger
from aiolock.core.present import caller_of, has_token, told_apart
from aiolock.core.runtime import Generations, Runtime, State
from aiolock.core.tasks import Backoff, TaskSet
from aiolock.errors import (
    BackendError,
    BackendUnavailable,
    ConfigError,
    UnsafeBackend,
    forgets_arguments,
    shorten,
)
from aiolock.lock import UNSET, Lock, Unset
from aiolock.metrics import Figures
from aiolock.types import ELECTION, MUTEX, Family, Finding, Kind, LockInfo
from aiolock.validation import (
    MIN_TTL,
    CampaignOptions,
    LockOptions,
    OnError,
    OnLoss,
    check_count,
    check_flag,
    check_label,
    check_max_hold,
    check_name,
    check_namespace,
    check_on_error,
    check_on_loss,
    check_options,
    check_pattern,
    check_require,
    check_seconds,
    check_timeout,
    check_token,
    check_ttl,
)

# Methods import the kinds of lock that they make: most programs use one or two, and every start pays for imports.
if TYPE_CHECKING:
    from redis.asyncio import Redis

    from aiolock.decorators import Locked, Once
    from aiolock.kinds.barrier import Barrier
    from aiolock.kinds.election import Election
    from aiolock.kinds.latch import Latch
    from aiolock.kinds.reentrant import ReentrantLock
    from aiolock.kinds.rwlock import RWLock
    from aiolock.kinds.semaphore import Semaphore
    from aiolock.transaction_lock import TransactionLock

__all__ = ["Client", "connect"]

L = TypeVar("L", bound=Lock)

log: Log = get_logger("aiolock")

MAX_PARTIES = 1000
"""The largest number of parties of a barrier: all of them stand in one small register."""

INSPECTIONS = 100
"""Locks that :meth:`Client.locks` inspects at the same time."""

_closing = TaskSet()
"""Closings under way: each goes on when its caller is cancelled."""


@forgets_arguments
def connect(
    url: str | Sequence[str] | Redis,
    /,
    *,
    namespace: str = "aiolock",
    ttl: float = 30.0,
    timeout: float | Unset | None = UNSET,
    on_loss: OnLoss = "cancel",
    label: str | None = None,
    require: Iterable[str] = (),
    command_timeout: float | None = None,
    wait_for_server: float = 0.0,
    lazy: bool = False,
    **options: Any,
) -> Client:
    """Return a client for the server at ``url``; does no I/O before ``async with`` (or ``await client.open()``).

    :param url: ``memory://``, ``redis://host:6379/0``, ``rediss://…`` (TLS), ``unix:///path/to.sock``,
        ``redis+sentinel://h1:26379,h2:26379,h3:26379/service/0`` (the primary that Sentinels name),
        ``redis+cluster://h1:7000,h2:7000,h3:7000`` (some nodes of a cluster),
        ``zookeeper://h1:2181,h2:2181,h3:2181``, ``mysql://user:password@host:3306/database``,
        ``postgresql://user:password@host:5432/database``, ``etcd://h1:2379,h2:2379,h3:2379``,
        ``mongodb://h1,h2,h3/database?replicaSet=rs0``, ``sqlite:///path`` or ``memcached://h1:11211,h2:11211`` (for efficiency only). A list of several independent Redis servers makes a quorum
        (Redlock). Messages never show a password.
        Or an application's own ``redis.asyncio.Redis``: the same server, credentials and TLS, on connections of this client.
    :param namespace: prefixes every key; clients of one namespace share their locks.
    :param ttl: seconds for which the server keeps a hold that is not renewed; every lock may have its own.
    :param timeout: not the connection's (that is ``command_timeout``): the seconds that ``async with``, ``acquire()`` and
        ``locked`` wait for a mutex, a re-entrant or read-write lock, a semaphore or ``lock_all`` that names no ``timeout`` of its own
        (default: for ever). A lock's own ``timeout=None`` waits for ever. Elections, latches, barriers, ``try_acquire()`` and ``once`` do not follow it.
    :param on_loss: ``"cancel"``: losing a lease cancels the block under it; ``"signal"``: the lease only reports it.
    :param label: names this process to people, beside its host and process id, which are always shown.
    :param require: capabilities that the deployment must have, such as ``"fencing"`` or ``"fifo"``; otherwise ``open``
        raises :class:`UnsafeBackend`.
    :param command_timeout: seconds that bound every round trip; the default is ``min(ttl / 3, 5)``.
    :param wait_for_server: seconds for which ``open`` tries while the server cannot be reached, instead of one
        ``command_timeout``.
    :param lazy: ``open`` does no I/O, and succeeds without a server. The first use connects, and checks ``require``; until
        that has succeeded, each use raises what ``open`` would, within the ``command_timeout``.
    :param options: the backend's own; see its page.

    Raises :class:`ConfigError` for an unknown scheme, option or value, with the known ones, and :class:`MissingDriver`
    with the command that installs the driver.
    """
    return Client(
        from_urls(url, options) if isinstance(url, list | tuple) else from_url(url, options),
        namespace=namespace,
        ttl=ttl,
        timeout=timeout,
        on_loss=on_loss,
        label=label,
        require=require,
        command_timeout=command_timeout,
        wait_for_server=wait_for_server,
        lazy=lazy,
    )


_request = lru_cache(maxsize=512)(Request)
"""Locks of one name and the same options share one request, a value: making a lock for each use costs little."""


class Client:
    """Locks on one server, for one event loop at a time.

    Made by :func:`connect`, or from a backend: ``Client(RedisBackend(client=my_redis))``. Used with ``async with``, as often
    as needed: a closed client may be opened again. Its locks may be made before it is opened, and outlive each opening.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        namespace: str = "aiolock",
        ttl: float = 30.0,
        timeout: float | Unset | None = UNSET,
        on_loss: OnLoss = "cancel",
        label: str | None = None,
        require: Iterable[str] = (),
        command_timeout: float | None = None,
        wait_for_server: float = 0.0,
        lazy: bool = False,
        clock: Clock = system_clock,
        random: Random | None = None,
    ) -> None:
        if not isinstance(backend, Backend):
            raise ConfigError(
                f"a client needs a backend, not a {type(backend).__name__}; connect() makes one from a URL"
            )
        if not callable(clock):
            raise ConfigError(f"clock must be a function that returns seconds, not {shorten(clock)}")
        if random is not None and not isinstance(random, Random):
            raise ConfigError(f"random must be a random.Random, not {shorten(random)}")
        ttl = check_ttl(ttl)
        bound = min(ttl / 3, 5.0) if command_timeout is None else command_timeout
        self._settings = Settings(
            namespace=check_namespace(namespace),
            label="" if label is None else check_label(label),
            ttl=ttl,
            command_timeout=check_seconds("command_timeout", bound, 0.01),
            clock=clock,
            require=check_require(require),
        )
        self._timeout = None if isinstance(timeout, Unset) else check_timeout(timeout)
        """Seconds that a lock waits which names no timeout of its own."""
        self._wait = check_seconds("wait_for_server", wait_for_server, 0)
        self._lazy = check_flag("lazy", lazy)
        if self._lazy and self._wait:
            raise ConfigError(
                "wait_for_server is for an open() that connects, and with lazy=True it does not: give one of them"
            )
        self._lease_options = LeaseOptions(None, check_on_loss(on_loss))
        self._random = random
        self._generations = Generations()
        self._begin(backend)

    def _begin(self, backend: Backend) -> None:
        """Prepare an opening; no I/O."""
        # The process may be a child that was forked after the client was made.
        label, caller = self._settings.label, caller_of(socket.gethostname(), os.getpid())
        outages, random = Outages(self._settings.clock), self._random or Random()
        backend.bind(replace(self._settings, outages=outages, random=random))
        self._backend = backend
        self._end: asyncio.Task[None] | None = None
        self._runtime = Runtime(
            backend,
            clock=self._settings.clock,
            random=random,
            command_timeout=self._settings.command_timeout,
            label=label,
            caller=caller,
            generations=self._generations,
            outages=outages,
        )

    def __repr__(self) -> str:
        # Reports of errors also show a client whose options were refused.
        runtime = getattr(self, "_runtime", None)
        return f"<Client of {runtime.backend.name}, {runtime.state.value}>" if runtime else "<Client>"

    def __reduce__(self) -> str:
        raise TypeError("a client cannot be copied or pickled: connect anew where it is needed")

    # --- opening and closing

    async def open(self) -> Self:
        """Connect, within the ``command_timeout`` or ``wait_for_server``; the same as entering ``async with``.

        Raises :class:`BackendUnavailable`, :class:`BackendRefused`, :class:`ConfigError` if two addresses of a quorum lead to
        one server, and :class:`UnsafeBackend` if ``require=`` asks for more than the deployment promises; a lazy client does not
        connect here, and raises them at its first use instead. Cancelling it leaves nothing open, and it may be tried again.

        A closed client may be opened again, also on another event loop and in a forked child: options, locks and
        decorated functions go on working, leases of earlier openings stay lost. Closing the event loop first counts as
        closing the client. Raises :class:`RuntimeError` while the client is open.
        """
        self._again()
        runtime = self._runtime
        runtime.loop = asyncio.get_running_loop()
        runtime.thread = get_ident()
        try:
            if self._lazy:
                runtime.connect = self._connect
            else:
                await self._connect_in_time()
        except BaseException:
            runtime.loop = None
            raise
        runtime.become(State.OPEN)
        runtime.spawn(runtime.scheduler.run(), "aiolock-renewal-scheduler")
        runtime.begin_reports()
        return self

    async def _connect(self) -> None:
        """Open the backend once; after an error or a cancellation nothing is open."""
        backend = self._backend
        try:
            await backend.open()
            missing = self._settings.require - backend.capabilities
            if missing:
                raise UnsafeBackend(
                    f"{backend.name} does not promise {', '.join(sorted(missing))}; "
                    f"this deployment promises {', '.join(sorted(backend.capabilities))}"
                )
        except BaseException:
            await asyncio.shield(_closing.spawn(backend.aclose(), "aiolock-close"))
            raise

    async def _connect_in_time(self) -> None:
        """Open the backend, again and again for ``wait_for_server`` seconds while it cannot be reached.

        Cancelling it leaves nothing open.
        """
        if not self._wait:
            await self._connect()
            return
        error: BackendError | None = None
        backoff = Backoff(self._runtime.random)
        try:
            async with asyncio.timeout(self._wait):
                while True:
                    try:
                        await self._connect()
                    except BackendError as trouble:
                        if not trouble.retryable:
                            raise
                        if error is None:
                            log.info(
                                "%s; trying again for at most %g s",
                                trouble,
                                self._wait,
                                extra={"address": self._backend.address},
                            )
                        error = trouble
                    else:
                        return
                    await backoff.pause()
        except TimeoutError:
            raise error or BackendUnavailable(
                f"{self._backend.name} was not reached within {self._wait:g} s"
            ) from None

    def _again(self) -> None:
        """Prepare the next opening unless one is prepared; raise :class:`RuntimeError` while one is open."""
        runtime, end = self._runtime, self._end
        if runtime.state is State.NEW and runtime.loop is None:
            if not runtime.forked:
                return
        else:
            closing = end is not None and not (end.done() or end.get_loop().is_closed())
            if closing or not runtime.over:
                if runtime.forked:
                    raise RuntimeError(
                        "this client was open when the process was forked, and is the parent's: connect anew in the child"
                    )
                state = "being opened" if runtime.state is State.NEW else runtime.state.value
                raise RuntimeError(
                    f"this client cannot be opened: it is {'closing' if closing else state}; each event loop needs a "
                    "client of its own"
                )
            runtime.end_without_loop()
        # In a forked child also if it was never opened: parent and child must not share one random id.
        self._begin(self._backend.again())

    async def aclose(self, timeout: float | None = None) -> None:
        """Lose leases that are under a block (reason ``"closed"``), release every lease, finish pending clean-ups.

        Then end the client's tasks and close its connections. Takes at most ``timeout`` seconds (default: the
        ``command_timeout``); a hold that the server did not release by then ends by its ttl. Idempotent. Cancelling it
        stops the waiting, not the closing.
        """
        runtime = self._runtime
        limit = runtime.command_timeout if timeout is None else check_seconds("timeout", timeout, 0)
        if runtime.forked or runtime.state is State.NEW:
            return
        if self._end is None:
            if runtime.over:
                # The event loop was closed first.
                runtime.end_without_loop()
                return
            runtime.guard()
            runtime.become(State.CLOSING)
            self._end = _closing.spawn(self._close(limit), "aiolock-close")
        await asyncio.shield(self._end)

    async def _close(self, limit: float) -> None:
        """Close, waiting at most ``limit`` seconds for releases; a task that no caller cancels runs it.

        Cancelling it, as the end of ``asyncio.run`` does, ends that wait; then it closes.
        """
        runtime = self._runtime
        ending = runtime.end()
        try:
            for _ in ending:
                await asyncio.sleep(0)
            loop = asyncio.get_running_loop()
            deadline = loop.time() + limit
            while (rest := runtime.cleanups | runtime.writing) and (left := deadline - loop.time()) > 0:
                await asyncio.wait(rest, timeout=left)
            await runtime.backend.settle(deadline - loop.time())
        finally:
            # What a cancellation has left, and what a task has begun meanwhile under a lease that was not lost yet.
            for _ in chain(ending, runtime.end()):
                pass
            runtime.become(State.CLOSED)
            runtime.scheduler.close()
            runtime.report()
            tasks = [task for task in runtime.tasks if not task.done()]
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
            await runtime.backend.aclose()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # --- locks

    @overload
    def lock(self, name: str, *, connection: None = None, **options: Unpack[LockOptions]) -> Lock: ...

    @overload
    def lock(
        self, name: str, *, connection: object, timeout: float | None = None, label: str | None = None
    ) -> TransactionLock: ...

    def lock(
        self, name: str, *, connection: object = None, **options: Unpack[LockOptions]
    ) -> Lock | TransactionLock:
        """Return a mutex: one holder per ``name``, in all processes and on all machines.

        :param name: a non-empty ``str`` of at most 1,024 UTF-8 bytes; different names are different locks.
        :param ttl: seconds for which the server keeps a hold that is not renewed (at least 0.1; default: the client's).
        :param timeout: seconds that ``async with`` and ``acquire()`` wait (default: the client's); ``None`` waits for ever, 0 tries once.
        :param on_loss: ``"cancel"`` or ``"signal"`` (default: the client's).
        :param fair: strict order of arrival, also between the tasks of this process and those of others.
        :param renew: ``False``: a hold of one ttl, which is not renewed; :meth:`Lease.extend` gives it another life. Each such
            hold is granted by the server, in strict order of arrival: none is handed over inside the client.
        :param grace: seconds, at most a third of the ttl, by which the lease is lost earlier than the server can grant the lock
            to another, so that ``finally`` blocks end first (default: 0).
        :param max_hold: seconds after which the lease is no longer renewed, and lost.
        :param label: names the holder to people (default: the client's).
        :param connection: a connection of your own with an open transaction (PostgreSQL; MySQL and MariaDB with
            ``?mode=row``): the lock lives in that transaction, and there is no lease; see :class:`TransactionLock`.

        Does no I/O. Raises :class:`InvalidName` or :class:`ConfigError`, and with ``connection`` :class:`UnsupportedKind`
        on other servers.
        """
        checked = check_options("Client.lock", options, ttl=self._settings.ttl)
        name = check_name(name)
        if connection is None:
            return self._lock(Lock, MUTEX, name, checked)
        from aiolock.transaction_lock import TransactionLock  # noqa: PLC0415

        idle = {"fair": False, "renew": True}
        fixed = {"ttl", "on_loss", "max_hold", "grace", "fair", "renew"}
        if given := [
            each for each, value in checked.items() if each in fixed and value is not idle.get(each)
        ]:
            raise ConfigError(
                f"a lock in your own transaction lives as long as that: {', '.join(given)} cannot be given "
                "together with connection"
            )
        request = self._request(MUTEX, name, {**checked, "fair": True})
        return TransactionLock(self._runtime, request, connection, checked.get("timeout", self._timeout))

    def reentrant_lock(self, name: str, **options: Unpack[LockOptions]) -> ReentrantLock:
        """Return a lock that the task that holds it may enter again; ``options`` are those of :meth:`lock`.

        Levels are counted in the client, and child tasks do not inherit them.
        """
        from aiolock.kinds.reentrant import ReentrantLock  # noqa: PLC0415

        checked = check_options("Client.reentrant_lock", options, ttl=self._settings.ttl)
        return self._lock(ReentrantLock, MUTEX, check_name(name), checked)

    def rwlock(self, name: str) -> RWLock:
        """Return a read-write lock: ``client.rwlock(name).read(…)`` and ``client.rwlock(name).write(…)`` are locks.

        Does no I/O. Raises :class:`InvalidName`.
        """
        from aiolock.kinds.rwlock import RWLock  # noqa: PLC0415

        return RWLock(self._lock, check_name(name), self._settings.ttl)

    def semaphore(
        self, name: str, limit: int, *, permits: int = 1, **options: Unpack[LockOptions]
    ) -> Semaphore:
        """Return a semaphore: at most ``limit`` permits are held at once; every permit is leased.

        :param limit: the number of permits, from 1 to 1,000,000, the same for all clients.
        :param permits: how many of them ``async with`` and ``acquire()`` take at once, from 1 to ``limit``.
        :param options: those of :meth:`lock`.

        Does no I/O. Raises :class:`InvalidName` or :class:`ConfigError`.
        """
        from aiolock.kinds.semaphore import Semaphore, kind_of  # noqa: PLC0415

        checked = check_options("Client.semaphore", options, ttl=self._settings.ttl)
        name = check_name(name)
        kind = kind_of(name, check_count("limit", limit), permits)
        return self._lock(Semaphore, kind, name, checked)

    def latch(self, name: str, count: int) -> Latch:
        """Return a latch: a count that reaches zero once, and then wakes all its waiters.

        :param count: the start of the count, from 1 to 1,000,000, the same for all clients.

        Does no I/O. Raises :class:`InvalidName` or :class:`ConfigError`.
        """
        from aiolock.kinds.latch import Latch  # noqa: PLC0415

        return Latch(self._generations, check_name(name), check_count("count", count))

    def barrier(
        self, name: str, parties: int, *, ttl: float | None = None, label: str | None = None
    ) -> Barrier:
        """Return a barrier: waiters pass together when ``parties`` have arrived, round after round.

        :param parties: the parties of a round, from 1 to 1,000, the same for all clients.
        :param ttl: seconds after which a party without heartbeat counts as dead (default: the client's).
        :param label: names a failed party to the others (default: the client's).

        Does no I/O. Raises :class:`InvalidName` or :class:`ConfigError`.
        """
        from aiolock.kinds.barrier import Barrier  # noqa: PLC0415

        return Barrier(
            self._generations,
            check_name(name),
            check_count("parties", parties, MAX_PARTIES),
            self._settings.ttl if ttl is None else check_ttl(ttl),
            None if label is None else check_label(label),
        )

    def election(self, name: str, **options: Unpack[CampaignOptions]) -> Election:
        """Return an election: one leader at a time among all who campaign, in the order in which campaigns began.

        The options are those of :meth:`lock` without ``fair``, for each term. Does no I/O. Raises :class:`InvalidName` or
        :class:`ConfigError`.
        """
        from aiolock.kinds.election import Campaign, Election  # noqa: PLC0415

        checked = check_options("Client.election", options, CampaignOptions, ttl=self._settings.ttl)
        # Every term has a claim of its own, so that its token is the one that the server reports to others.
        campaign = self._lock(
            Campaign, ELECTION, check_name(name), {"timeout": None, **checked, "fair": True}
        )
        return Election(self._generations, campaign)

    def locked(self, template: str, **options: Unpack[LockOptions]) -> Locked:
        """Decorate a coroutine function or an async generator function: it holds the lock while it runs.

        :param template: the name of the lock; ``"order:{order_id}"`` is filled in from the arguments of each call.
        :param options: those of :meth:`lock`.

        The decorated function keeps its signature and types. It raises what ``async with lock`` raises; a loss does not
        cancel an async generator, which gets :class:`LockLost` at its next resume. May be used before the client is opened;
        calling the function then is :class:`RuntimeError`.

        Does no I/O. Raises :class:`ConfigError` if an option is wrong or the template names no parameter.
        """
        from aiolock.decorators import Locked  # noqa: PLC0415

        checked = check_options("Client.locked", options, ttl=self._settings.ttl)
        return Locked(lambda name: self._lock(Lock, MUTEX, check_name(name), checked, template), template)

    def once(
        self,
        name: str,
        *,
        ttl: float | None = None,
        at_least: float = 0.0,
        max_hold: float | None = None,
        on_error: OnError = "keep",
        at_most: float | None = None,
        label: str | None = None,
    ) -> Once:
        """Decorate a coroutine function: a job that one worker does while the others skip it.

        :param name: the name of the lock, the mutex of :meth:`lock` with that name; ``"report:{tenant}"`` is filled in from the
            arguments of each call, as by :meth:`locked`.
        :param ttl: seconds after which the job of a worker that died is free again (default: the client's). While the job runs
            the lock is renewed, so its loop must not be blocked for so long.
        :param at_least: seconds from its beginning for which others skip the job after a run that counts, however short the run.
        :param max_hold: seconds after which a run is ended as by a loss: it is cancelled and raises :class:`LockLost`.
        :param on_error: ``"keep"``: a run that raises an :class:`Exception` counts; ``"release"``: the lock is free at once, so
            that the next worker tries.
        :param at_most: seconds for which one hold lasts that is not renewed, instead of ``ttl`` and ``max_hold``: for a job that
            blocks its loop. A run that takes longer is cancelled as soon as the loop runs again, and raises :class:`LockLost`; the
            job of a worker that died is free after that time.
        :param label: names the worker to people (default: the client's).

        A run counts if it returns, or raises an exception under ``"keep"``. A run that is cancelled or loses its lock does not,
        nor does that of a worker that died. The decorated function returns the result of the job, or ``None`` if it was
        skipped (which :meth:`on_skipped` reports): another worker has it, or began a run that counts within ``at_least``. May be used before the client is opened;
        calling the function then is :class:`RuntimeError`, and :class:`UnsupportedKind` on servers that cannot keep a lock for
        ``at_least``. Cancelling it cancels the job and releases the lock.

        Does no I/O. Raises :class:`InvalidName` or :class:`ConfigError`, also when the function is decorated: the name must name
        parameters of it.
        """
        from aiolock.decorators import Once  # noqa: PLC0415

        # What is wrong with a name as it stands is wrong with each that is filled in.
        check_name(name)
        least = check_seconds("at_least", at_least, 0)
        if at_most is not None and not (ttl is None and max_hold is None):
            raise ConfigError(
                "at_most is one hold that is not renewed, and ttl and max_hold are of one that is: give either at_most or those"
            )
        if at_most is None:
            longest, most = "max_hold", check_max_hold(max_hold)
            lifetime: dict[str, object] = {"ttl": ttl, "max_hold": max_hold}
        else:
            longest, most = "at_most", check_seconds("at_most", at_most, MIN_TTL)
            lifetime = {"ttl": most, "renew": False}
        if most is not None and least > most:
            raise ConfigError(f"at_least must be at most {longest}, which is {most:g}, not {least:g}")
        options = check_options(
            "Client.once", {**lifetime, "on_loss": "cancel", "label": label}, ttl=self._settings.ttl
        )
        return Once(
            self._generations,
            lambda filled: self._lock(Lock, MUTEX, check_name(filled), options, name),
            name,
            least,
            check_on_error(on_error),
        )

    def _lock(self, cls: type[L], kind: Kind, name: str, options: LockOptions, template: str = "") -> L:
        """Make a lock of a name and options that were checked; ``template`` is the name before it was filled in."""
        lease_options = self._lease_options
        if template or "max_hold" in options or "on_loss" in options or "label" in options:
            on_loss = options.get("on_loss") or lease_options.on_loss
            label = options.get("label") or ""
            lease_options = LeaseOptions(options.get("max_hold"), on_loss, template, label)
        request = self._request(kind, name, options)
        return cls(self._runtime, request, lease_options, options.get("timeout", self._timeout))

    def _request(self, kind: Kind, name: str, options: LockOptions) -> Request:
        ttl, label = options.get("ttl") or self._settings.ttl, options.get("label")
        label = self._runtime.identity(label) if label else self._runtime.shown
        fair, life = options.get("fair", False), math.inf
        if not options.get("renew", True):
            # A hand-over inside the client would give the next task what is left of the life of this hold.
            fair, life = True, ttl
        return _request(name, kind, ttl, label, fair, life, options.get("grace") or 0.0)

    # --- callbacks

    def on_acquired(self, callback: C) -> C:
        """Call ``callback`` with a :class:`LockEvent` for each lease that is acquired from now on; may be a decorator.

        :param callback: a plain function. It runs on the loop of the client, before the call that acquires returns: it must be
            short, and neither block nor wait. An error that it raises is logged, and changes nothing else.

        A lease is that of a lock of any kind or of a campaign, through whichever object of this client; a hold that its task
        entered again, or that several locks share, counts once for each name. Callbacks stay when the client is closed and
        opened again. Does no I/O. Raises :class:`ConfigError` if ``callback`` is no plain function.
        """
        return self._generations.hooks.add(Moment.ACQUIRED, callback)

    def on_released(self, callback: C) -> C:
        """Call ``callback`` with a :class:`LockEvent` when a lease is given back that :meth:`on_acquired` reports.

        It runs as the release begins, before the request to the server, in a copy of the context (:mod:`contextvars`) in which
        the lock was acquired. Otherwise as :meth:`on_acquired`.
        """
        return self._generations.hooks.add(Moment.RELEASED, callback)

    def on_lost(self, callback: C) -> C:
        """Call ``callback`` with a :class:`LockEvent` when a lease is lost that :meth:`on_acquired` reports.

        It runs after the tasks that work under the lease were cancelled. A lease is lost instead of released; only if no
        more than the answer to the release reported the loss, this follows :meth:`on_released`, with ``event.released`` set.
        A client whose event loop was closed first reports nothing. Otherwise as :meth:`on_released`.
        """
        return self._generations.hooks.add(Moment.LOST, callback)

    def on_renewal_failing(self, callback: C) -> C:
        """Call ``callback`` with a :class:`LockEvent` when renewals of a lease begin to fail that :meth:`on_acquired` reports.

        The lease still holds, for ``event.remaining`` seconds, and the client goes on asking: this is the time to finish, or to
        begin nothing more. It is called once until a renewal succeeds, and again when renewals then begin to fail another time.
        A server that does not answer has failed after the ``command_timeout``. A lease that is not renewed
        (``renew=False``, or the end of ``max_hold``) reports none. Otherwise as :meth:`on_released`.
        """
        return self._generations.hooks.add(Moment.RENEWAL_FAILING, callback)

    def on_skipped(self, callback: S) -> S:
        """Call ``callback`` with a :class:`SkipEvent` for each call of a job of :meth:`once` that is skipped and returns ``None``.

        With such a callback the client asks the server who has the lock before that call returns, within the
        ``command_timeout``; without one it does not. If it cannot find out, the event has no holder and no end, and the job is
        skipped all the same. :meth:`Lock.try_acquire` skips nothing: its caller decides. Otherwise as :meth:`on_acquired`.
        """
        return self._generations.hooks.add(Moment.SKIPPED, callback)

    # --- administration

    @property
    def capabilities(self) -> frozenset[str]:
        """The capabilities of this deployment, as in ``require=``; complete once the client is open
        (a lazy client: once it has reached its server)."""
        return self._backend.capabilities

    async def locks(self, pattern: str = "*") -> list[LockInfo]:
        """List the locks of the namespace that are held or waited for and whose name matches ``pattern``, by name.

        :param pattern: a glob pattern: ``*`` is any text, ``?`` any character, ``[abc]`` one of these.

        For people and tools: the server scans the namespace. Each lock is as it was at one moment, and not all at the
        same. A lock that another version of this library wrote is ``unreadable``.
        Cancelling it changes nothing. Raises :class:`UnsupportedKind` if the server cannot list,
        :class:`BackendUnavailable` and :class:`BackendRefused`.
        """
        self._runtime.guard()
        backend = Administration.of(self._backend, "list of locks")
        await self._runtime.reach()
        names = await backend.names(check_pattern(pattern))
        infos: list[LockInfo] = []
        try:
            for first in range(0, len(names), INSPECTIONS):
                async with asyncio.TaskGroup() as group:
                    some = names[first : first + INSPECTIONS]
                    tasks = [group.create_task(_listed(backend, *each)) for each in some]
                infos += [task.result() for task in tasks]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        # Others were released in the meantime.
        return [info for info in infos if info.locked or info.waiters]

    async def is_current(self, name: str, token: int) -> bool:
        """Return whether the mutex ``name`` is held under this fencing token at this moment, as the server sees it.

        :param name: the name of a lock of :meth:`lock` or :meth:`reentrant_lock`; other kinds have names of their own.
        :param token: the :attr:`Lease.token` that came with a request.

        For a service that gets requests from holders: an answer of ``True`` may be out of date when it arrives, so what must
        never be written twice is still fenced by comparing tokens. A lock that is kept after its release has no present
        token. Where tasks of one client hand a lock over between themselves, without a request to the server, each token
        that the client may give out under its hold counts, from that which its last renewal has reported on; with
        ``fair=True`` a hold has a single one.

        Ends within the ``command_timeout``; cancelling it changes nothing. Raises :class:`UnsupportedKind`, before any I/O,
        where the server does not know the tokens of holders (quorum, MySQL with ``?mode=session`` or ``?mode=row``),
        :class:`InvalidName`, and :class:`ConfigError` if ``token`` is no token.
        """
        self._runtime.guard()
        checked, number = check_name(name), check_token(token)
        backend = Administration.of(self._backend, "is_current()")
        backend.check_tokens("is_current()", "compare tokens where the data are")
        await self._runtime.reach()
        info = await backend.inspect(checked, MUTEX.family)
        return any(has_token(holder, number) for holder in info.holders)

    async def diagnose(self) -> list[Finding]:
        """Describe this deployment for ``aiolock doctor``: reads settings, changes nothing.

        Works also before the client is open, or if it cannot be opened; it then leaves nothing open. Cancelling it
        changes nothing. Raises :class:`BackendUnavailable` if the server cannot be reached.
        """
        runtime = self._runtime
        if runtime.forked or runtime.state is not State.NEW:
            runtime.guard()
            await runtime.reach()
            return await diagnose(self._backend)
        try:
            return await diagnose(self._backend)
        finally:
            await asyncio.shield(_closing.spawn(self._backend.aclose(), "aiolock-close"))

    def stats(self) -> Figures:
        """Return counters since the client was opened and gauges of this moment, for a metrics exporter.

        :class:`~aiolock.metrics.Figures` describes each of them.
        """
        return self._runtime.figures()


def report_figures(client: Client, reporter: Callable[[Runtime], None]) -> None:
    """Have ``reporter`` called with each opening of ``client``, on its loop, once a second while it is open and when it is closed."""
    client._generations.report_to(reporter)  # noqa: SLF001 - no method, because it is for exporters and not for users


async def _listed(backend: Administration, name: str, family: Family) -> LockInfo:
    try:
        return told_apart(await backend.inspect(name, family))
    except UnreadableLock as error:
        return LockInfo(name, (), (), family, unreadable=str(error))
