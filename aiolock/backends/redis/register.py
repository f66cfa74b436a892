"""Registers: a hash each, changed by compare-and-set, and the clients that watch it.

The push is a hint, as it is for locks: a waiter reads again every two seconds, or ten times a second without pub/sub.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from aiolock.backends.redis.commands import Issue, Scripts, encode
from aiolock.clock import Clock, Deadline
from aiolock.core.capabilities import ABSENT, MOST_BYTES, Entry, Register
from aiolock.core.inbox import Inbox, WakeReason
from aiolock.errors import BackendUnavailable, ConfigError

__all__ = ["RedisRegister", "Registers"]

POLL_WITH_PUSH = 2.0
"""Seconds between reads of a register that is waited for."""
POLL = 0.1
"""Seconds between these reads while changes cannot be pushed to this client."""
LIFE_MS = "6000"
"""Milliseconds for which the server remembers a watch, unless it is renewed."""


class Registers:
    """The registers of one client.

    :param process: random identity of the client.
    :param pushed: returns whether changes are pushed to this client.
    """

    def __init__(
        self, issue: Issue, scripts: Scripts, process: str, clock: Clock, pushed: Callable[[], bool]
    ) -> None:
        self.issue = issue
        self.scripts = scripts
        self.process = process
        self.clock = clock
        self.pushed = pushed
        self.closed = False
        self._writes = 0
        self._latest = 0
        self.watched: dict[str, set[RedisRegister]] = {}
        """Views with a waiter, by key."""

    def notify(self, key: str) -> None:
        """Wake the waiters of a register that has changed."""
        for register in self.watched.get(key, ()):
            register.inbox.wake(WakeReason.NOTIFIED)

    def wake_all(self) -> None:
        """Wake every waiter, which reads again: a message may have been missed."""
        for registers in self.watched.values():
            for register in registers:
                register.inbox.wake(WakeReason.RECONNECTED)

    def open(self) -> None:
        """Accept waiters again after :meth:`close`."""
        self.closed = False

    def close(self) -> None:
        """End every wait."""
        self.closed = True
        self.wake_all()

    def stamp(self, raw: bytes) -> str:
        """Decode a stamp, and note its time: the highest travels with every write."""
        text = raw.decode()
        if text:
            self._latest = max(self._latest, int(text.partition("-")[0]))
        return text

    def write_id(self) -> tuple[str, int]:
        """Return an id of its own for a write, so that no other leads to the same stamp, and the highest time in a stamp."""
        self._writes += 1
        return f"{self.process}{self._writes:x}", self._latest


class RedisRegister(Register):
    """One view of one register."""

    def __init__(self, registers: Registers, key: str, name: str) -> None:
        self.key = key
        self.inbox: Inbox[None] = Inbox(name)
        self._registers = registers
        self._watched = False
        """The server may know that this client watches."""

    async def read(self) -> Entry:
        """Read value and stamp in one round trip."""
        value, stamp = await self._registers.issue(encode("HMGET", self.key, "value", "stamp"))
        return Entry(value, self._registers.stamp(stamp)) if stamp else ABSENT

    async def write(self, value: bytes, stamp: str, keep: float) -> str | None:
        """Replace the value if its stamp is ``stamp``, in one round trip; return the new stamp, or ``None`` if it was another.

        Raises :class:`ConfigError` for a value that is too long.
        """
        if len(value) > MOST_BYTES:
            raise ConfigError(f"a register may have {MOST_BYTES} bytes, this one has {len(value)}")
        registers = self._registers
        write_id, latest = registers.write_id()
        arguments = value, stamp, write_id, round(keep * 1000), latest
        written = await registers.issue(registers.scripts["register_write"].encode((self.key,), arguments))
        return None if written is None else registers.stamp(written)

    async def changed(self, stamp: str) -> None:
        """Wait for a notification, or the time of the next poll."""
        registers = self._registers
        # Before the first byte is sent: the push may come before the answer.
        self.inbox.take()
        self._watched = True
        try:
            if await self._watch() == stamp:
                pause = POLL_WITH_PUSH if registers.pushed() else POLL
                await self.inbox.wait(Deadline.after(pause, registers.clock))
        finally:
            self._unwatch()

    async def _watch(self) -> str:
        registers = self._registers
        if registers.closed:
            raise BackendUnavailable("the client was closed while this register was watched", retryable=False)
        registers.watched.setdefault(self.key, set()).add(self)
        arguments = registers.process, LIFE_MS if registers.pushed() else "0"
        return registers.stamp(
            await registers.issue(registers.scripts["register_watch"].encode((self.key,), arguments))
        )

    def _unwatch(self) -> None:
        watched = self._registers.watched.get(self.key)
        if watched is not None:
            watched.discard(self)
            if not watched:
                del self._registers.watched[self.key]

    async def aclose(self) -> None:
        """End a wait that is under way, and end the watch at the server without waiting for the answer."""
        registers = self._registers
        if not self._watched:
            return
        self._watched = False
        self.inbox.wake(WakeReason.CLOSED)
        self._unwatch()
        if self.key not in registers.watched and not registers.closed:
            # In a forked child the connection is its parent's, and so is the watch.
            with contextlib.suppress(RuntimeError):
                registers.issue(
                    registers.scripts["register_watch"].encode((self.key,), (registers.process, "0"))
                )
