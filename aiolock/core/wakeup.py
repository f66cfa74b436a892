"""Resume the task that waits for a reply at once, instead of in the next pass of the event loop.

A future that gets its result has the loop run its task in the next pass, and each pass polls every socket. Replies are read
where no task is running, so the task can go on right there, in the same order as if the loop had woken it. Other callbacks of
the future are called as usual.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
from collections.abc import Callable
from contextvars import Context
from operator import itemgetter
from typing import Any, Final, NoReturn

__all__ = ["LITTLE", "Waking", "answer", "current_task", "expect", "read_little", "wake"]

Future = asyncio.Future[Any]
Waking = tuple[Any, Context, Future]
"""The step of a task that awaits a future, its context, and the future."""

current_task: Callable[[asyncio.AbstractEventLoop | None], asyncio.Task[Any] | None] = asyncio.current_task
if sys.version_info < (3, 12):
    # A function in Python there, and asked several times for each acquire; this is the dict that it reads.
    current_task = asyncio.tasks._current_tasks.get  # type: ignore[attr-defined] # noqa: SLF001 - one version, and done

LITTLE = 65536
"""Bytes that a connection reads at most in one pass of the loop; less was all that had arrived."""

Due = tuple[float, Callable[[], float]]
"""A time, and the clock that it belongs to."""

_NEVER: Final[Due] = (math.inf, float)
_expected: dict[asyncio.AbstractEventLoop, dict[object, Due]] = {}
"""By loop and owner, the times of timers that must be called before a task is resumed."""
_first: dict[asyncio.AbstractEventLoop, Due] = {}
"""The first of these times, by loop."""

_TASK: Final = asyncio.Task
_when: Final = itemgetter(0)


def read_little(transport: object) -> None:
    """Have a connection read no more at a time than answers about locks are long.

    By itself asyncio makes room for 256 KiB before each read. The C library gets so much from the system and gives it back
    each time, as long as nothing else has taught it better: 14 of the 17 µs that a read took. Transports of other loops
    have other ways.
    """
    with contextlib.suppress(AttributeError):
        transport.max_size = LITTLE  # type: ignore[attr-defined]


def answer(future: Future, reply: Any) -> Waking | None:
    """Set a future's result and return a deferred wake-up for :func:`wake`, to be called once the caller's state is in order.

    Return ``None`` if the loop wakes instead, because the future has other callbacks or none.
    """
    # A future of asyncio has this in C and in Python; where another has not, the loop does everything.
    callbacks: list[tuple[Any, Context]] | None = getattr(future, "_callbacks", None)
    if callbacks and len(callbacks) == 1:
        step, context = callbacks[0]
        if isinstance(getattr(step, "__self__", None), _TASK):
            future.remove_done_callback(step)
            future.set_result(reply)
            return step, context, future
    future.set_result(reply)
    return None


def expect(loop: asyncio.AbstractEventLoop, owner: object, when: float, clock: Callable[[], float]) -> None:
    """Resume no task at once from ``when`` on (``inf``: no such time), until the timer of ``owner`` has been called.

    After a stop of the process the reply to a task is read before the timers that came due meanwhile are called. One of
    them may have to cancel that task. ``clock`` is not the loop's: that one stands still during suspend, and with uvloop
    until the end of a callback.
    """
    if loop not in _expected:
        for closed in [other for other in list(_expected) if other.is_closed()]:
            _expected.pop(closed, None)
            _first.pop(closed, None)
    timers = _expected.setdefault(loop, {})
    if when < math.inf:
        timers[owner] = when, clock
    else:
        timers.pop(owner, None)
    if timers:
        _first[loop] = min(timers.values(), key=_when)
    else:
        _expected.pop(loop, None)
        _first.pop(loop, None)


def wake(wakings: list[Waking]) -> None:
    """Resume tasks of one loop, one after the other.

    What a task raises (:class:`KeyboardInterrupt`, :class:`SystemExit`) stops the loop, as usual, after the others have run.
    """
    loop = wakings[0][2].get_loop()
    when, clock = _first.get(loop, _NEVER)
    # A write of the running task has led to a reply in one and the same step: no task may begin inside of another.
    later = current_task(loop) is not None or clock() >= when
    for step, context, future in wakings:
        if later:
            loop.call_soon(step, future, context=context)
            continue
        try:
            context.run(step, future)
        except BaseException as error:  # noqa: BLE001 - it is raised again by the loop
            future.get_loop().call_soon(_again, error)


def _again(error: BaseException) -> NoReturn:
    raise error
