"""Interrupt a piece of work at each of its awaits in turn, and check that nothing is left behind.

A wrapper around the coroutine counts its suspensions. Each attempt interrupts it one suspension later, until an attempt
ends untouched: so every ``await`` that the work reaches is met, also those inside the libraries that it uses.
"""

from __future__ import annotations

import asyncio
import os
import sysconfig
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from dataclasses import dataclass, field
from functools import partial
from inspect import isawaitable
from pathlib import Path
from typing import Any, Literal, get_args

import aiolock
from aiolock.client import Client
from aiolock.core.tasks import start
from aiolock.errors import ConfigError, LockLost, shorten

__all__ = ["Report", "Way", "interrupt_everywhere"]

Way = Literal["cancel", "race", "twice", "timeout", "loss"]
"""A way to interrupt work:

``cancel``  its task is cancelled while what it waits for is still to come
``race``    its task is cancelled in the very step in which what it waits for arrives
``twice``   as ``cancel``, and again at every later await: the clean-up is cancelled too
``timeout`` an ``asyncio.timeout`` around it fires there
``loss``    every lease that the clients hold at that moment is lost
"""

ENOUGH = 2000
"""Work with more suspensions than this counts as endless."""
GRACE = 5.0
"""Seconds in which interrupted work, clean-ups and tasks have to end."""
SHOWN = 20
"""The number of faults that are listed; the others are counted."""

_LIBRARIES = (
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    str(Path(aiolock.__file__).parent) + os.sep,
    "<frozen",
)
"""Prefixes of the files of other code than the work: the standard library, site-packages, aiolock."""

Work = Callable[[], Coroutine[Any, Any, Any]]
Check = Callable[[], Awaitable[object] | object]


@dataclass
class Report:
    """The attempts, the awaits that each way has interrupted, and the faults."""

    attempts: int = 0
    points: dict[Way, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


async def interrupt_everywhere(
    work: Work,
    *,
    clients: Client | Iterable[Client] = (),
    ways: Iterable[Way] | None = None,
    check: Check | None = None,
    raises: tuple[type[BaseException], ...] = (),
) -> Report:
    """Run ``work()`` again and again, interrupted one ``await`` later each time, in every way.

    :param work: a function that makes the coroutine; each attempt runs in a task of its own.
    :param clients: the clients whose locks it uses. After each attempt they must neither hold nor wait for a lock.
    :param ways: see :data:`Way`; the default is ``cancel``, ``race``, ``timeout``, and with clients ``loss``.
    :param check: called (and awaited) after each attempt: asserts the conditions that hold however the work ended, and
        prepares the next attempt.
    :param raises: further exceptions that interrupted work may end with.

    Raises :class:`AssertionError` with all faults and their places: a swallowed cancellation, an unexpected end, a lock that
    stayed, a task that still runs, a failed ``check``. A lock or task that stayed ends it at once. Cancelling it cancels the
    attempt under way.
    """
    used = [clients] if isinstance(clients, Client) else list(clients)
    if any(not isinstance(client, Client) for client in used):
        raise ConfigError(f"clients must be aiolock clients, not {shorten(used)}")
    default: tuple[Way, ...] = (
        ("cancel", "race", "timeout", "loss") if used else ("cancel", "race", "timeout")
    )
    chosen = default if ways is None else tuple(ways)
    for way in chosen:
        if way not in get_args(Way):
            raise ConfigError(f"ways must be of {', '.join(get_args(Way))}, not {shorten(way)}")
    if "loss" in chosen and not used:
        raise ConfigError("leases can only be lost of known clients: pass clients=")
    report = Report()
    for _ in range(25):
        # Clients that were opened just now start their own tasks in the next passes of the loop.
        await asyncio.sleep(0)
    for way in chosen:
        at = 1
        while True:
            if at > ENOUGH:
                raise AssertionError(f"the work was suspended {ENOUGH} times and does not come to an end")
            before = asyncio.all_tasks()
            attempt = _Attempt(work(), way, at, used)
            await attempt.run()
            report.attempts += 1
            left = await _left(used, before)
            faults = [*attempt.faults(raises), *left]
            if check is not None:
                faults += await _checked(check)
            report.faults += [f"{way} at await {at}, {attempt.where}: {fault}" for fault in faults]
            if left:
                # The next attempt could wait for it for ever.
                raise _verdict(report)
            if attempt.suspensions < at:
                break
            report.points[way] = at
            at += 1
    if report.faults:
        raise _verdict(report)
    return report


def _verdict(report: Report) -> AssertionError:
    more = len(report.faults) - SHOWN
    lines = report.faults[:SHOWN] + ([f"and {more} more"] if more > 0 else [])
    return AssertionError(
        "\n".join([f"{len(report.faults)} fault(s) in {report.attempts} attempts:", *lines])
    )


class _Attempt:
    """The work, interrupted at its suspension number ``at``."""

    def __init__(self, work: Coroutine[Any, Any, Any], way: Way, at: int, clients: list[Client]) -> None:
        self._work = work
        self._way: Way = way
        self._at = at
        self._clients = clients
        self._task: asyncio.Task[Any]
        self._deadline: asyncio.Timeout | None = None
        self.suspensions = 0
        self.where = "untouched"
        self._fired = False
        """True if an interruption came before the work had ended."""
        self._error: BaseException | None = None
        self._returned = False
        self._stuck = False

    async def run(self) -> None:
        """Run the attempt to its end. Cancelling it cancels the work, and waits for its end for at most :data:`GRACE` seconds."""
        self._task = start(self._bounded(), "interrupted work")
        try:
            while not self._task.done():
                was_fired = self._fired
                done, _ = await asyncio.wait([self._task], timeout=GRACE)
                if not done and was_fired:
                    # Work that swallows a cancellation may wait for ever.
                    self._stuck = True
                    self._task.cancel()
        except BaseException:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=GRACE)
            raise
        if self._task.cancelled():
            self._error = asyncio.CancelledError()
        elif (error := self._task.exception()) is not None:
            self._error = error
        else:
            self._returned = True

    async def _bounded(self) -> Any:
        if self._way != "timeout":
            return await self
        async with asyncio.timeout(None) as self._deadline:
            return await self

    def __await__(self) -> Generator[Any, Any, Any]:
        step = partial(self._work.send, None)
        while True:
            try:
                awaited = step()
            except StopIteration as end:
                return end.value
            self._suspended(awaited)
            try:
                value = yield awaited
            except BaseException as error:  # noqa: BLE001 - it is thrown into the work
                step = partial(self._work.throw, error)
            else:
                step = partial(self._work.send, value)

    def _suspended(self, awaited: Any) -> None:
        self.suspensions += 1
        if self.suspensions == self._at:
            self.where = _innermost(self._work)
        if self.suspensions == self._at or (self.suspensions > self._at and self._way == "twice"):
            if self._way == "race" and awaited is not None:
                # Registered before the task's own callback, so it runs between the result and the task.
                awaited.add_done_callback(self._fire)
            else:
                asyncio.get_running_loop().call_soon(self._fire)

    def _fire(self, _: object = None) -> None:
        if self._task.done():
            return
        if self._way == "loss":
            for client in self._clients:
                scheduler = client._runtime.scheduler  # noqa: SLF001 - a client does not list its leases
                for validity in list(scheduler._validities()):  # noqa: SLF001 - as above
                    self._fired = True
                    scheduler.lose(validity, "expired")
            return
        self._fired = True
        if self._deadline is not None:
            self._deadline.reschedule(asyncio.get_running_loop().time())
        else:
            self._task.cancel()

    # --- the verdict

    def faults(self, raises: tuple[type[BaseException], ...]) -> list[str]:
        """Return the faults of its end."""
        if self._stuck:
            return [f"it went on for more than {GRACE:g} s"]
        if self._error is not None and isinstance(self._error, raises):
            return []
        late = self._deadline is not None and not self._deadline.expired()
        if not self._fired or late:
            return [] if self._returned else [f"it ended with {self._error!r} without being interrupted"]
        if self._way == "loss":
            # Work may catch the loss and return.
            fine = self._returned or _lost(self._error)
            return [] if fine else [f"it lost its lease, and ended with {self._error!r}"]
        if self._returned:
            return ["the cancellation was swallowed"]
        expected = TimeoutError if self._way == "timeout" else asyncio.CancelledError
        return [] if type(self._error) is expected else [f"it was cancelled, and ended with {self._error!r}"]


def _lost(error: BaseException | None) -> bool:
    """Return whether work ended by losses alone, which a task group wraps in groups."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(_lost, error.exceptions))
    return isinstance(error, LockLost)


def _innermost(work: Any) -> str:
    """Return the place of the innermost user frame among the coroutines that await each other, else of the innermost."""
    frames = []
    while (frame := getattr(work, "cr_frame", None)) is not None:
        frames.append(frame)
        work = work.cr_await
    own = [frame for frame in frames if not frame.f_code.co_filename.startswith(_LIBRARIES)]
    for frame in reversed(own or frames):
        return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"
    return "?"


async def _left(clients: list[Client], before: set[asyncio.Task[Any]]) -> list[str]:
    """Return the leases, waiters, clean-ups and tasks that are still there after ``GRACE`` seconds."""

    def remains() -> list[str]:
        found = []
        for client in clients:
            runtime = client._runtime  # noqa: SLF001 - clean-ups are internal
            figures = client.stats()
            if figures["held"] or figures["waiting"] or runtime.cleanups:
                found.append(
                    f"a client still has {figures['held']} leases, {figures['waiting']} waiting tasks "
                    f"and {len(runtime.cleanups)} clean-ups"
                )
        own = {task for client in clients for task in client._runtime.tasks}  # noqa: SLF001 - as above
        tasks = asyncio.all_tasks() - before - own
        return found + [f"a task still runs: {task!r}" for task in tasks]

    loop = asyncio.get_running_loop()
    give_up = loop.time() + GRACE
    for passes in range(1_000_000):
        if not remains() or loop.time() > give_up:
            break
        await asyncio.sleep(0 if passes < 100 else 0.001)
    return remains()


async def _checked(check: Check) -> list[str]:
    try:
        answer = check()
        if isawaitable(answer):
            await answer
    except AssertionError as error:
        return [f"the check failed: {error}"]
    return []
