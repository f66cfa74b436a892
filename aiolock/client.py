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
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, overload

from aiolock.backends import from_url, from_urls
from aiolock.clock import Clock, system_clock
from aiolock.contract import ELECTION, MUTEX, Backend, Bid, Finding, Kind, LockInfo, Settings, permits
from aiolock.errors import ConfigError, UnsafeBackend, shorten
from aiolock.figures import Figures
from aiolock.lease import Terms
from aiolock.lock import Lock
from aiolock.names import check_label, check_name, check_namespace
from aiolock.options import (
    MIN_TTL,
    OnLoss,
    check_count,
    check_flag,
    check_max_hold,
    check_on_loss,
    check_seconds,
    check_timeout,
    check_ttl,
)
from aiolock.outages import Outages
from aiolock.runtime import Generations, Runtime, State
from aiolock.tasks import start

if TYPE_CHECKING:
    from aiolock.barrier import Barrier
    from aiolock.borrowed import TransactionLock
    from aiolock.decorators import Locked, Once
    from aiolock.election import Election
    from aiolock.latch import Latch
    from aiolock.reentrant import ReentrantLock
    from aiolock.rwlock import LockOptions, RWLock
    from aiolock.semaphore import Semaphore

__all__ = ["Client", "connect"]

# The other kinds of lock are imported by the methods that make them: most programs use one or two, and the start of
# a program is paid for every time.

L = TypeVar("L", bound=Lock)

MAX_PARTIES = 1000
"""How many may meet at a barrier: all of them stand in one small document."""

LOOKS = 100
"""How many locks are looked at together."""

_closing: set[asyncio.Task[None]] = set()
"""Closings under way: one that its caller no longer waits for goes on."""


def _keep(closing: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    task = start(closing, "aiolock-close")
    _closing.add(task)
    task.add_done_callback(_closing.discard)
    return task


async def _to_the_end(closing: Coroutine[Any, Any, None]) -> None:
    await asyncio.shield(_keep(closing))


def _check_pattern(pattern: object) -> str:
    if not isinstance(pattern, str) or not pattern:
        raise ConfigError(f"pattern must be a text such as '*' or 'order:*', not {shorten(pattern)}")
    return pattern


async def _together(looks: Iterable[Coroutine[Any, Any, LockInfo]]) -> list[LockInfo]:
    """The results of all of them; the first error ends the others, and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(look) for look in looks]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


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

    :param url: ``memory://``, ``redis://host:6379/0``, ``rediss://…`` (TLS), ``unix:///path/to.sock``,
        ``redis+sentinel://h1:26379,h2:26379,h3:26379/service/0`` (the primary that Sentinels name),
        ``redis+cluster://h1:7000,h2:7000,h3:7000`` (some nodes of a cluster),
        ``zookeeper://h1:2181,h2:2181,h3:2181`` or ``mysql://user:password@host:3306/database``. A list of several
        independent Redis servers makes a quorum (Redlock). A password in it is never shown.
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
    settings = _check(namespace, ttl, on_loss, label, require, command_timeout)
    several = isinstance(url, list | tuple)
    return Client(from_urls(url, options) if several else from_url(url, options), **settings)


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
        "label": None if label is None else check_label(label),
        "require": frozenset(words),
        "command_timeout": check_seconds("command_timeout", command_timeout, 0.01),
    }


_bid = lru_cache(maxsize=512)(Bid)
"""Bids are values, so locks of one name and the same options share one: a lock made anew for each use costs little."""


class Client:
    """Locks on one server, for one event loop at a time.

    Made by :func:`connect`, or from a backend: ``Client(RedisBackend(client=my_redis))``. Used as ``async with``, as often
    as needed: a client that was closed may be opened again. Its locks may be made before it is opened, and used after.
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
        self._namespace: str = options["namespace"]
        self._label: str | None = options["label"]
        self._command_timeout: float = options["command_timeout"]
        self._clock = clock
        self._random = random
        self._generations = Generations()
        self._begin(backend)

    def _begin(self, backend: Backend) -> None:
        """Prepare an opening of its own; no I/O."""
        label = f"{socket.gethostname()}:{os.getpid()}" if self._label is None else self._label
        outages = Outages(self._clock)
        backend.bind(
            Settings(
                namespace=self._namespace,
                label=label,
                ttl=self._ttl,
                command_timeout=self._command_timeout,
                clock=self._clock,
                require=self._require,
                outages=outages,
            )
        )
        self._backend = backend
        self._watching: asyncio.Task[None] | None = None
        self._end: asyncio.Task[None] | None = None
        self._runtime = Runtime(
            backend,
            clock=self._clock,
            random=self._random or Random(),
            command_timeout=self._command_timeout,
            label=label,
            generations=self._generations,
        )
        outages.in_use = self._runtime.in_use

    def __repr__(self) -> str:
        return f"<Client of {self._backend.name}, {self._runtime.state.value}>"

    def __reduce__(self) -> str:
        raise TypeError("a client cannot be copied or pickled: connect anew where it is needed")

    # --- opening and closing

    async def open(self) -> Self:
        """Connect, within the ``command_timeout``; the same as entering ``async with``.

        Raises :class:`BackendUnavailable`, :class:`BackendRefused`, :class:`ConfigError` if several addresses of a quorum
        turn out to lead to one server, or :class:`UnsafeBackend` if ``require=`` asks
        for more than the deployment promises. Cancelling it leaves nothing open, and it may be tried again.

        A client that was closed may be opened again, also on another event loop and in a forked child: options, locks and
        decorated functions go on working, leases of earlier openings stay lost. An event loop that was closed before
        the client counts as its end. Raises :class:`RuntimeError` while the client is open.
        """
        self._again()
        runtime = self._runtime
        runtime.loop = asyncio.get_running_loop()
        runtime.thread = get_ident()
        backend = self._backend
        try:
            await backend.open()
            missing = self._require - self._backend.capabilities
            if missing:
                raise UnsafeBackend(
                    f"{self._backend.name} does not promise {', '.join(sorted(missing))}; "
                    f"this deployment promises {', '.join(sorted(self._backend.capabilities))}"
                )
        except BaseException:
            runtime.loop = None
            await _to_the_end(backend.aclose())
            raise
        runtime.state = State.OPEN
        self._watching = runtime.spawn(runtime.watchdog.run(), "aiolock-watchdog")
        return self

    def _again(self) -> None:
        """Prepare the next opening, unless there is one that has not begun; :class:`RuntimeError` while one is open."""
        runtime = self._runtime
        unused = runtime.state is State.NEW and runtime.loop is None
        if unused and not runtime.forked:
            return
        if not unused:
            closing = self._end is not None and not (self._end.done() or self._end.get_loop().is_closed())
            if closing or not runtime.over:
                state = "being opened" if runtime.state is State.NEW else runtime.state.value
                raise RuntimeError(
                    "this client was open when the process was forked, and is the parent's: connect anew in the child"
                    if runtime.forked
                    else f"this client cannot be opened: it is {'closing' if closing else state}; each event loop "
                    "needs a client of its own"
                )
            runtime.bury()
        # In a forked child also what was never opened: parent and child must not have one random id.
        self._begin(self._backend.again())

    async def aclose(self, timeout: float | None = None) -> None:
        """Lose what is still under a block (reason ``"closed"``), release every lease, finish pending clean-ups.

        Then the client's tasks end and its connections close. Takes at most ``timeout`` seconds (default: the
        ``command_timeout``); what a dead server did not hear by then dies by its ttl. Idempotent. Cancelling it stops
        the waiting, not the closing.
        """
        limit = self._runtime.command_timeout if timeout is None else check_seconds("timeout", timeout, 0)
        runtime = self._runtime
        if runtime.forked or runtime.state is State.NEW:
            return
        if self._end is None and runtime.over:
            # The event loop was closed first.
            runtime.bury()
            return
        if self._end is None:
            self._runtime.guard()
            self._runtime.state = State.CLOSING
            self._end = _keep(self._close(limit))
        await asyncio.shield(self._end)

    async def _close(self, limit: float) -> None:
        runtime = self._runtime
        try:
            claims = [contender.close() for contender in runtime.everybody]
            for claim in claims:
                runtime.clean_up(claim)
            loop = asyncio.get_running_loop()
            deadline = loop.time() + limit
            while runtime.cleanups and (left := deadline - loop.time()) > 0:
                await asyncio.wait(set(runtime.cleanups), timeout=left)
            await runtime.backend.settle(deadline - loop.time())
        finally:
            runtime.state = State.CLOSED
            runtime.watchdog.close()
            tasks = [task for task in runtime.tasks if not task.done()]
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
            await runtime.backend.aclose()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # --- locks

    @overload
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
        connection: None = None,
    ) -> Lock: ...

    @overload
    def lock(
        self, name: str, *, timeout: float | None = None, label: str | None = None, connection: object
    ) -> TransactionLock: ...

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
        connection: object = None,
    ) -> Lock | TransactionLock:
        """Mutual exclusion: one holder per ``name``, whatever process or machine it runs on.

        :param name: a non-empty ``str`` of at most 1,024 UTF-8 bytes; different names are different locks.
        :param ttl: seconds for which the server keeps a hold that is not renewed (at least 0.1; default: the client's).
        :param timeout: seconds that ``async with`` and ``acquire()`` wait; ``None`` waits for ever, 0 tries once.
        :param on_loss: ``"cancel"`` or ``"signal"`` (default: the client's).
        :param fair: strict order of arrival, also between the tasks of this process and those of others.
        :param max_hold: seconds after which the lease is no longer renewed, and lost.
        :param label: names the holder to people (default: the client's).
        :param connection: a connection of your own on which a transaction is open (MySQL and MariaDB with
            ``?mode=row``): the lock lives in that transaction, and there is no lease; see :class:`TransactionLock`.

        Does no I/O. Raises :class:`InvalidName` or :class:`ConfigError`, and with ``connection`` :class:`UnsupportedKind`
        on other servers.
        """
        if connection is not None:
            from aiolock.borrowed import TransactionLock  # noqa: PLC0415

            options = {"ttl": ttl, "on_loss": on_loss, "fair": fair or None, "max_hold": max_hold}
            if given := [option for option, value in options.items() if value is not None]:
                raise ConfigError(
                    f"a lock in your own transaction lives as long as that: {', '.join(given)} cannot be given "
                    "together with connection"
                )
            who = self._runtime.label if label is None else check_label(label)
            bid = Bid(name=check_name(name), kind=MUTEX, ttl=self._ttl, label=who, fair=True)
            return TransactionLock(self._runtime, bid, connection, check_timeout(timeout))
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
        from aiolock.reentrant import ReentrantLock  # noqa: PLC0415

        return self._lock(ReentrantLock, MUTEX, name, ttl, timeout, on_loss, fair, max_hold, label)

    def rwlock(self, name: str) -> RWLock:
        """Many readers or one writer: ``client.rwlock(name).read(…)`` and ``client.rwlock(name).write(…)`` are locks.

        Does no I/O. Raises :class:`InvalidName`.
        """
        from aiolock.rwlock import RWLock  # noqa: PLC0415

        return RWLock(self._lock, check_name(name))

    def semaphore(self, name: str, limit: int, **options: Unpack[LockOptions]) -> Semaphore:
        """At most ``limit`` permits out at once, of which one ``acquire`` may take several; every permit is leased.

        :param limit: how many there are, from 1 to 1,000,000; everybody names the same number.
        :param options: those of :meth:`lock`.

        Does no I/O. Raises :class:`InvalidName` or :class:`ConfigError`.
        """
        from aiolock.rwlock import check_options  # noqa: PLC0415
        from aiolock.semaphore import Semaphore  # noqa: PLC0415

        check_options("Client.semaphore", options)
        kind = permits(1, check_count("limit", limit))
        return self._lock(Semaphore, kind, name, **options)

    def latch(self, name: str, count: int) -> Latch:
        """A count that reaches zero once, and opens for everybody who waits.

        :param count: what it counts down from, 1 to 1,000,000; everybody names the same number.

        Does no I/O. Raises :class:`InvalidName` or :class:`ConfigError`.
        """
        from aiolock.latch import Latch  # noqa: PLC0415

        return Latch(self._generations, check_name(name), check_count("count", count))

    def barrier(
        self, name: str, parties: int, *, ttl: float | None = None, label: str | None = None
    ) -> Barrier:
        """A place where nobody passes until ``parties`` have arrived; again and again.

        :param parties: how many pass together, from 1 to 1,000; everybody names the same number.
        :param ttl: seconds after which a party of which nothing is heard counts as dead (default: the client's).
        :param label: names a party that failed to the others (default: the client's).

        Does no I/O. Raises :class:`InvalidName` or :class:`ConfigError`.
        """
        from aiolock.barrier import Barrier  # noqa: PLC0415

        return Barrier(
            self._generations,
            check_name(name),
            check_count("parties", parties, MAX_PARTIES),
            self._ttl if ttl is None else check_ttl(ttl),
            None if label is None else check_label(label),
        )

    def election(
        self,
        name: str,
        *,
        ttl: float | None = None,
        timeout: float | None = None,
        on_loss: OnLoss | None = None,
        max_hold: float | None = None,
        label: str | None = None,
    ) -> Election:
        """One leader at a time among all who campaign; the options are those of :meth:`lock`, for each term.

        Campaigns are won in the order in which they began. Does no I/O. Raises :class:`InvalidName` or
        :class:`ConfigError`.
        """
        from aiolock.election import Campaign, Election  # noqa: PLC0415

        # Every term has a claim of its own, so that its token is the one that the server tells to others.
        campaign = self._lock(
            Campaign,
            ELECTION,
            name,
            ttl=ttl,
            timeout=timeout,
            on_loss=on_loss,
            fair=True,
            max_hold=max_hold,
            label=label,
        )
        return Election(self._generations, campaign)

    def locked(self, template: str, **options: Unpack[LockOptions]) -> Locked:
        """Decorate a coroutine function or an async generator function: it has the lock while it runs.

        :param template: the name of the lock; ``"order:{order_id}"`` is filled in from the arguments of each call.
        :param options: those of :meth:`lock`.

        The decorated function keeps its signature and types. It raises what ``async with lock`` raises; an async generator
        is not cancelled by a loss, but gets :class:`LockLost` at its next resume. May be used before the client is opened;
        calling the function then is :class:`RuntimeError`.

        Does no I/O. Raises :class:`ConfigError` if an option is wrong or the template names what is no parameter.
        """
        from aiolock.decorators import Locked  # noqa: PLC0415
        from aiolock.rwlock import check_options  # noqa: PLC0415

        check_options("Client.locked", options)
        self._lock(Lock, MUTEX, "checks the options", **options)
        return Locked(lambda name: self._lock(Lock, MUTEX, name, **options), template)

    def once(self, name: str, *, at_most: float, at_least: float = 0.0, label: str | None = None) -> Once:
        """Decorate a job that one worker does while the others skip it: a coroutine function.

        :param name: the name of the lock, the same for all workers; the mutex of :meth:`lock` with that name.
        :param at_most: seconds for which the job may hold it: a ttl without renewal. A job that takes longer is cancelled,
            and raises :class:`LockLost`; the hold of a worker that died ends then.
        :param at_least: seconds from its beginning for which others skip it, also if the job is done earlier or failed.
        :param label: names the worker to people (default: the client's).

        The decorated function returns the result of the job, or ``None`` if it was skipped: another worker has it, or began
        it within ``at_least``. May be used before the client is opened; calling the function then is :class:`RuntimeError`,
        and :class:`UnsupportedKind` on servers that cannot keep a lock for ``at_least``.

        Does no I/O. Raises :class:`InvalidName` or :class:`ConfigError`.
        """
        from aiolock.decorators import Once  # noqa: PLC0415

        most = check_seconds("at_most", at_most, MIN_TTL)
        least = check_seconds("at_least", at_least, 0)
        if least > most:
            raise ConfigError(f"at_least must be at most at_most, which is {most:g}, not {least:g}")
        return Once(
            self._generations,
            self._lock(Lock, MUTEX, name, ttl=most, on_loss="cancel", label=label),
            most,
            least,
        )

    def _lock(
        self,
        cls: type[L],
        kind: Kind,
        name: object,
        ttl: object = None,
        timeout: object = None,
        on_loss: object = None,
        fair: object = False,
        max_hold: object = None,
        label: object = None,
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

    async def locks(self, pattern: str = "*") -> list[LockInfo]:
        """Every lock of the namespace that is held or waited for and whose name matches ``pattern``, sorted by name.

        :param pattern: a glob pattern: ``*`` is any text, ``?`` any character, ``[abc]`` one of these.

        For people and for tools: the server looks through all that it has in the namespace. Each lock is as it was at
        one moment, and not all at the same. Cancelling it changes nothing. Raises :class:`UnsupportedKind` if the
        server cannot list, :class:`BackendUnavailable` and :class:`BackendRefused`.
        """
        self._runtime.guard()
        names = await self._backend.names(_check_pattern(pattern))
        infos: list[LockInfo] = []
        for first in range(0, len(names), LOOKS):
            infos += await _together(self._backend.inspect(*each) for each in names[first : first + LOOKS])
        # Some were given back in the meantime.
        return [info for info in infos if info.holders or info.waiters]

    async def diagnose(self) -> list[Finding]:
        """What this deployment is like, for ``aiolock doctor``: reads settings, changes nothing.

        Also of use before the client is open, or if it cannot be opened; it then leaves nothing open. Cancelling it
        changes nothing. Raises :class:`BackendUnavailable` if the server cannot be reached.
        """
        runtime = self._runtime
        if runtime.forked or runtime.state is not State.NEW:
            runtime.guard()
            return await self._backend.diagnose()
        try:
            return await self._backend.diagnose()
        finally:
            await _to_the_end(self._backend.aclose())

    def stats(self) -> Figures:
        """Counters since the client was opened and gauges of this moment, for a metrics exporter.

        ``held`` and ``waiting`` are gauges; ``acquired``, ``released``, ``passed`` (locally, without the server),
        ``waited``, ``timeouts``, ``lost``, ``renewals``, ``renewal_failures`` and ``cleanups`` only grow. ``losses`` are
        those that were lost by reason; ``waits`` and ``holds`` (seconds) and ``slack`` (what was left of a ttl when it was
        renewed, as a share) are distributions with ``cumulative`` buckets and ``quantile()``. Of many short waits and
        holds one in 64 is measured, and counts for all.
        """
        runtime = self._runtime
        return {
            "held": len(runtime.watchdog),
            "waiting": sum(contender.waiting for contender in runtime.everybody),
            "acquired": runtime.stats.acquired,
            "released": runtime.stats.released,
            "passed": runtime.stats.passed,
            "waited": runtime.stats.waited,
            "timeouts": runtime.stats.timeouts,
            "lost": runtime.stats.lost,
            "renewals": runtime.watchdog.renewals,
            "renewal_failures": runtime.watchdog.failures,
            "cleanups": runtime.stats.cleanups,
            "losses": dict(runtime.stats.losses),
            "waits": runtime.stats.waits.look(),
            "holds": runtime.stats.holds.look(),
            "slack": runtime.watchdog.slack.look(),
        }
