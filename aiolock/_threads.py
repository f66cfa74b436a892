"""Run coroutines for threads: an event loop in a thread of its own, with one task for each thread that uses it.

The rules of locks are about tasks: which one is inside a block, and which may enter again. The coroutines of one thread
are therefore run by one task, for as long as the thread lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal

__all__ = ["Call", "LoopThread"]

T = TypeVar("T")

Work = Callable[[], Coroutine[Any, Any, T]]


class Call(Generic[T]):
    """A coroutine that a thread waits for, and one that takes its result back if that thread was interrupted."""

    __slots__ = ("done", "undo", "work")

    def __init__(self, work: Work[T], undo: Callable[[T], Coroutine[Any, Any, object]] | None = None) -> None:
        self.work = work
        self.undo = undo
        self.done: Future[T] = Future()

    def raised(self, error: BaseException) -> bool:
        """Return whether ``error`` is what the coroutine raised, and not an interruption of the thread."""
        return self.done.done() and not self.done.cancelled() and self.done.exception() is error

    def refuse(self) -> None:
        """End the call, which the loop never ran to its end."""
        if not self.done.done():
            self.done.set_exception(RuntimeError("the client was closed while this thread waited"))


class ThreadTask:
    """The task that stands for one thread: it runs the coroutines of that thread one after the other."""

    def __init__(self) -> None:
        self._calls: asyncio.Queue[Call[Any] | None] = asyncio.Queue()
        self._task: asyncio.Task[Any] | None = None
        self._running: Call[Any] | None = None

    def put(self, call: Call[Any] | None) -> None:
        """Run ``call`` when the earlier ones have ended; ``None`` ends the task. Called on the loop."""
        self._calls.put_nowait(call)

    async def live(self) -> None:
        """Run what the thread asks for until the thread ends, or the loop.

        Cancelling it, other than by :meth:`abandon`, cancels the call that runs: its thread gets a :class:`RuntimeError`.
        """
        self._task = asyncio.current_task()
        while (call := await self._calls.get()) is not None:
            if call.done.done():
                # The thread was interrupted before the call began.
                continue
            self._running = call
            try:
                result = await call.work()
            except asyncio.CancelledError:
                if not self._interrupted(call):
                    call.refuse()
                    raise
                call.done.cancel()
            except BaseException as error:  # noqa: BLE001 - the thread raises it
                self._interrupted(call)
                call.done.set_exception(error)
                del error
            else:
                self._interrupted(call)
                call.done.set_result(result)
                del result
            del call

    def _interrupted(self, call: Call[Any]) -> bool:
        """End the running call; return whether :meth:`abandon` has cancelled it, and take that cancellation back."""
        interrupted, self._running = self._running is not call, None
        if interrupted and self._task is not None:
            self._task.uncancel()
        return interrupted

    async def abandon(self, call: Call[Any]) -> None:
        """End a call whose thread was interrupted: cancel it, and undo it if it has a result all the same.

        If this is cancelled as well, it stops waiting, and a result may not be undone.
        """
        if self._running is call and self._task is not None:
            self._running = None
            self._task.cancel()
        elif not call.done.done():
            call.done.cancel()
        with contextlib.suppress(Exception, asyncio.CancelledError):
            result = await asyncio.wrap_future(call.done)
            if call.undo is not None and result is not None:
                undo, taken = call.undo, result
                back = Call(lambda: undo(taken))
                self.put(back)
                await asyncio.wrap_future(back.done)


class _Owner:
    """Ends the task of a thread when the thread ends: kept by the thread alone."""

    def __init__(self, loop: asyncio.AbstractEventLoop, task: ThreadTask) -> None:
        self._loop = loop
        self.task = task

    def __del__(self) -> None:
        # The loop may be closed, or the interpreter on its way out.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.task.put, None)


class LoopThread:
    """An event loop in a daemon thread, which runs the coroutines of other threads."""

    def __init__(self, make_portal: Callable[[], BlockingPortal]) -> None:
        ready: Future[tuple[BlockingPortal, asyncio.AbstractEventLoop]] = Future()
        self._make_portal = make_portal
        self._local = threading.local()
        self._calls: set[Call[Any]] = set()
        """The calls that threads wait for."""
        self._thread = threading.Thread(target=self._live, args=(ready,), name="aiolock-portal", daemon=True)
        self._thread.start()
        self._portal, self._loop = ready.result()

    def _live(self, ready: Future[tuple[BlockingPortal, asyncio.AbstractEventLoop]]) -> None:
        async def serve() -> None:
            async with self._make_portal() as portal:
                ready.set_result((portal, asyncio.get_running_loop()))
                await portal.sleep_until_stopped()

        try:
            asyncio.run(serve())
        except BaseException as error:  # noqa: BLE001 - a thread waits for `ready`
            if not ready.done():
                ready.set_exception(error)

    def run(self, work: Work[T], undo: Callable[[T], Coroutine[Any, Any, object]] | None = None) -> T:
        """Run ``work`` in the task of the calling thread, and wait for it.

        If this thread is interrupted meanwhile, by an exception of a signal handler, the coroutine is cancelled; a result
        that it has all the same is passed to ``undo``, unless it is ``None``.
        """
        call = Call(work, undo)
        self._calls.add(call)
        try:
            self._loop.call_soon_threadsafe(self._task().put, call)
            return call.done.result()
        except BaseException as error:
            if not call.raised(error):
                with contextlib.suppress(RuntimeError):
                    self._portal.start_task_soon(self._task().abandon, call).result()
            raise
        finally:
            self._calls.discard(call)
            del call

    def spawn(self, work: Work[T]) -> Future[T]:
        """Run ``work`` in a task of its own; cancelling the future cancels it."""
        return self._portal.start_task_soon(work)

    def soon(self, function: Callable[[], object]) -> None:
        """Call ``function`` on the loop."""
        self._loop.call_soon_threadsafe(function)

    def _task(self) -> ThreadTask:
        owner: _Owner | None = getattr(self._local, "owner", None)
        if owner is None:
            task = ThreadTask()
            self._portal.start_task_soon(task.live)
            owner = self._local.owner = _Owner(self._loop, task)
        return owner.task

    def close(self) -> None:
        """End the loop and its thread; threads that still wait get a :class:`RuntimeError`."""
        self._portal.call(self._portal.stop, True)  # noqa: FBT003 - cancels the tasks that still run
        self._thread.join()
        for call in list(self._calls):
            call.refuse()
