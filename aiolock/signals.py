"""End a program in good order when it gets SIGTERM or SIGINT, so that its locks are given back at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

from aiolock.errors import shorten

__all__ = ["run_until_signal"]

T = TypeVar("T")

SIGNALS = (signal.SIGTERM, signal.SIGINT)


async def run_until_signal(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` until it ends, or until SIGTERM or SIGINT cancels it: ``asyncio.run(aiolock.run_until_signal(main()))``.

    The signal cancels ``main`` as a task is cancelled, and the program ends when ``main`` has: every ``finally`` and
    ``async with`` in it is done, so locks are released and clients are closed. A second signal ends the process at once.

    Returns the result of ``main``, or raises its exception. After SIGTERM it raises :class:`SystemExit` with status 143
    (128 + 15), after SIGINT :class:`KeyboardInterrupt`, also if ``main`` suppressed the cancellation; an exception that
    ``main`` raised instead of it goes first. Cancelling it cancels ``main``.

    Raises :class:`RuntimeError` outside of the main thread, and on event loops that handle no signals (Windows).
    """
    if not asyncio.iscoroutine(main):
        raise TypeError(f"run_until_signal() takes a coroutine, as main() returns it, not {shorten(main)}")
    loop = asyncio.get_running_loop()
    handlers = {each: signal.getsignal(each) for each in SIGNALS}
    # A program that was started with a signal ignored (nohup, a shell's background job) goes on ignoring it.
    before = {each: handler for each, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}
    came: list[signal.Signals] = []
    task: asyncio.Task[T]

    def stop(came_now: signal.Signals) -> None:
        came.append(came_now)
        for each in before:
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)
        task.cancel()

    try:
        for each in before:
            loop.add_signal_handler(each, stop, each)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        main.close()
        raise RuntimeError(
            "run_until_signal() needs the main thread, and an event loop that handles signals (not on Windows)"
        ) from error
    task = loop.create_task(main, name="aiolock-main")
    try:
        result = await task
    except asyncio.CancelledError:
        if not came:
            raise
    else:
        if not came:
            return result
    finally:
        for each, handler in before.items():
            loop.remove_signal_handler(each)
            signal.signal(each, handler)
    raise KeyboardInterrupt if came[0] is signal.SIGINT else SystemExit(128 + came[0])
