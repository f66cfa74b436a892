"""Simulated processes and clocks on the virtual event loop of aiolock.testing.

A :class:`Host` is a process inside that world. Everything that its code schedules carries the host in its context, so
the loop can hold all of it back: that is what SIGSTOP does to a process (time goes on, timers that ran out fire at
once on waking), and with ``suspended=True`` what suspend does to a machine (its timers stand still as well, and only
the clock that runs during suspend knows).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

from aiolock.testing.world import Deadlock, VirtualLoop

__all__ = ["Deadlock", "Host", "HostLoop", "VirtualClock", "current_host", "host_loop", "run"]

T = TypeVar("T")

_host: ContextVar[Host | None] = ContextVar("host", default=None)


class _Timer:
    """A timer of a host, which may come due while the host cannot run."""

    __slots__ = ("args", "asleep", "callback", "handle", "host", "when")

    def __init__(
        self, host: Host, when: float, callback: Callable[..., object], args: tuple[object, ...]
    ) -> None:
        self.host = host
        self.when = when
        self.asleep = host.asleep
        self.callback = callback
        self.args = args
        self.handle: asyncio.TimerHandle | None = None


class HostLoop(VirtualLoop):
    """A virtual loop that holds back the callbacks and timers of stopped hosts."""

    def __init__(self) -> None:
        self._stopping_hosts: list[Host] = []
        super().__init__()

    def time(self) -> float:
        host = _host.get()
        return self.now if host is None else self.now - host.asleep

    def call_soon(
        self, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.Handle:
        handle = super().call_soon(callback, *args, context=context)
        host = handle._context.get(_host)
        if host is not None and host.stopped:
            host.held.append(self._ready.pop())
        return handle

    def call_at(
        self, when: float, callback: Callable[..., object], *args: object, context: Context | None = None
    ) -> asyncio.TimerHandle:
        caller = _host.get()
        if caller is not None:
            when += caller.asleep
        host = caller if context is None else context.get(_host)
        if host is None:
            return super().call_at(when, callback, *args, context=context)
        timer = _Timer(host, when, callback, args)
        timer.handle = super().call_at(when, self._ring, timer, context=context)
        return timer.handle

    def _ring(self, timer: _Timer) -> None:
        host = timer.host
        assert timer.handle is not None
        if timer.handle.cancelled():
            return
        if host.stopped:
            host.held.append(asyncio.Handle(self._ring, (timer,), self, copy_context()))
        elif host.asleep > timer.asleep:
            timer.when += host.asleep - timer.asleep
            timer.asleep = host.asleep
            super().call_at(timer.when, self._ring_again, timer.handle)
        else:
            timer.callback(*timer.args)

    def _ring_again(self, handle: asyncio.TimerHandle) -> None:
        # It forgets its timer when it is cancelled, and with it what the timer would have called.
        if not handle.cancelled():
            self._ring(*handle._args)

    def _run_once(self) -> None:
        # A stop begins between two passes; the ready queue must not shrink during one.
        while self._stopping_hosts:
            host = self._stopping_hosts.pop()
            host.stopped = True
            theirs = [handle for handle in self._ready if handle._context.get(_host) is host]
            if theirs:
                host.held += theirs
                others = [handle for handle in self._ready if handle._context.get(_host) is not host]
                self._ready.clear()
                self._ready.extend(others)
        super()._run_once()


class Host:
    """A simulated process; what it runs can be held back as a whole."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.stopped = False
        self.asleep = 0.0
        """Seconds for which its machine was suspended so far."""
        self.away = 0.0
        """Seconds for which it could not run so far, for whatever reason."""
        self.woke = 0.0
        """When it was resumed last."""
        self.held: list[asyncio.Handle] = []
        self.context = copy_context()
        self.context.run(_host.set, self)
        self._since = 0.0

    def run(self, work: Coroutine[Any, Any, T], name: str | None = None) -> asyncio.Task[T]:
        """Start a task of this host; what it starts belongs to the host as well."""
        return asyncio.get_running_loop().create_task(work, name=name, context=self.context.copy())

    def stop(self) -> None:
        """Hold everything back from the loop's next pass on; to be called from outside of the host."""
        loop = host_loop()
        self._since = loop.now
        loop._stopping_hosts.append(self)

    def resume(self, *, suspended: bool = False) -> None:
        """Let it run again: first what was ready, in the order in which it would have run."""
        loop = host_loop()
        if self in loop._stopping_hosts:
            loop._stopping_hosts.remove(self)
            return
        self.stopped = False
        self.woke = loop.now
        self.away += loop.now - self._since
        if suspended:
            self.asleep += loop.now - self._since
        held, self.held = self.held, []
        loop._ready.extend(held)


class VirtualClock:
    """A clock for the library: the loop's time at ``rate``, plus an offset of its own.

    ``suspend`` lets it advance while the loop's timers do not.
    """

    def __init__(self, offset: float = 0.0, rate: float = 1.0) -> None:
        self._loop = host_loop()
        self._rate = rate
        self.offset = offset

    def __call__(self) -> float:
        return self._loop.now * self._rate + self.offset

    def until(self, moment: float) -> float:
        """How many of the loop's seconds are left until this clock shows ``moment``."""
        return (moment - self()) / self._rate

    def suspend(self, seconds: float) -> None:
        self.offset += seconds


def run(main: Coroutine[Any, Any, T], *, debug: bool | None = None) -> T:
    """Run ``main`` in virtual time and return its result; ``debug`` is asyncio's, which is slow."""
    with asyncio.Runner(loop_factory=HostLoop, debug=debug) as runner:
        return runner.run(main)


def host_loop() -> HostLoop:
    """Return the running loop, which has to be one of :func:`run`."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, HostLoop), "this needs tests.simulation.loop.run()"
    return loop


def current_host() -> Host | None:
    """Return the host whose code runs now."""
    return _host.get()
