"""Signals as they come, in order, beside everything else that can wake up who waits for them."""

from __future__ import annotations

import asyncio
import signal
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from signal import Signals

from aiolock.errors import MissingDriver

__all__ = ["FORWARDED", "JOB", "LEAVE", "Inbox"]

LEAVE = (
    Signals.SIGTERM,
    Signals.SIGINT,
    Signals.SIGHUP,
    Signals.SIGQUIT,
    Signals.SIGUSR1,
    Signals.SIGUSR2,
)
"""What ends a program that does not say otherwise: whoever waits for a lock leaves the queue."""

JOB = (Signals.SIGWINCH, Signals.SIGTSTP, Signals.SIGCONT, Signals.SIGCHLD)
"""What matters only while a command runs."""

FORWARDED = (*LEAVE, Signals.SIGWINCH, Signals.SIGTSTP, Signals.SIGCONT)


class Inbox:
    """The signals that came and were not taken yet."""

    def __init__(self) -> None:
        self.wake: asyncio.Event = asyncio.Event()
        """Set when there may be something to do; others may set it as well."""
        self._came: deque[Signals] = deque()

    def take(self) -> Signals | None:
        """The oldest signal."""
        return self._came.popleft() if self._came else None

    async def wait(self, seconds: float) -> None:
        """Until :attr:`wake` is set, which it then is no more, or until so many seconds are over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.wake.wait()
        self.wake.clear()

    @asynccontextmanager
    async def listen(self, *signals: Signals) -> AsyncIterator[None]:
        """Within the block, these signals come here, except those that this process was started to ignore."""
        try:
            from anyio import open_signal_receiver  # noqa: PLC0415 - only those who take signals need it
        except ImportError as error:
            raise MissingDriver("anyio", "cli") from error

        heeded = [number for number in signals if not _is_ignored(number)]
        with open_signal_receiver(*heeded) as receiver:

            async def pump() -> None:
                async for number in receiver:
                    self._came.append(Signals(number))
                    self.wake.set()

            pumping = asyncio.create_task(pump())
            try:
                yield
            finally:
                pumping.cancel()
                await asyncio.wait([pumping])


def _is_ignored(number: Signals) -> bool:
    # As nohup and shells without job control do for their children; nobody means it for SIGCHLD, where a program that
    # waits for its children must not inherit it.
    return number != Signals.SIGCHLD and signal.getsignal(number) is signal.SIG_IGN
