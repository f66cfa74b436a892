"""Registers: a node that names the present value, and under it a node with the value, which the server may remove.

ZooKeeper's version numbers begin again when a node is created again, so a version alone is no stamp: a write that was
meant for a register of long ago could hit its successor. So each value node gets a random name, in one transaction with
the entry in the node above, and the stamp is that name with its version. The name also says for how many milliseconds
the value is kept after its last write: where the server removes nothing, an administrator can see what is over.
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets
from typing import Any, NamedTuple

from aiozk import exc

from aiolock.backends.zookeeper import protocol
from aiolock.backends.zookeeper.context import Context, Watches
from aiolock.backends.zookeeper.protocol import WatchEvent
from aiolock.clock import Deadline
from aiolock.core.capabilities import ABSENT, MOST_BYTES, Entry, Register
from aiolock.core.inbox import Inbox, WakeReason
from aiolock.errors import ConfigError

__all__ = ["NodeRegister"]

_NAME = re.compile(rb"[0-9a-f]{32}-\d{1,15}")


class _Seen(NamedTuple):
    """The result of one read."""

    above: int | None
    """The version of the node above; ``None`` if there is none."""
    name: str = ""
    value: bytes = b""
    version: int = -1

    @property
    def there(self) -> bool:
        return self.version >= 0

    @property
    def stamp(self) -> str:
        return f"{self.name}.{self.version}" if self.there else ABSENT.stamp


def _kept(name: str) -> float:
    """Return for how many seconds after its last write a value of that name is kept."""
    return int(name.rpartition("-")[2]) / 1000


class NodeRegister(Register):
    """One client's view of the register at ``path``."""

    def __init__(self, context: Context, name: str, path: str) -> None:
        self._context = context
        self._session = context.session
        self._path = path
        self._name = ""
        """The name of the value node when it was last seen."""
        self._inbox: Inbox[None] = Inbox(name)
        self._watches = Watches(context.session)
        self._expects = False
        """True if the server was asked to announce the creation of the node above."""

    async def read(self) -> Entry:
        """Read the value as the leader knows it; one round trip, or two if its node is a new one."""
        async with self._context.bounded():
            seen = await self._read_state()
        return Entry(seen.value, seen.stamp) if seen.there else ABSENT

    async def write(self, value: bytes, stamp: str, keep: float) -> str | None:
        """Write in one round trip, or a few for a value that is new or has to be kept for longer."""
        if len(value) > MOST_BYTES:
            raise ConfigError(f"a register has at most {MOST_BYTES} bytes, not {len(value)}")
        async with self._context.bounded():
            await self._session.ready()
            name, _, version = stamp.partition(".")
            if not stamp or _kept(name) < keep:
                return await self._make(value, stamp, keep)
            try:
                reply = await self._session.ask(protocol.put(f"{self._path}/{name}", value, int(version)))
            except (exc.BadVersion, exc.NoNode):
                return None
            return f"{name}.{reply.stat.version}"

    async def _make(self, value: bytes, stamp: str, keep: float) -> str | None:
        """Create a value node in the place of the one with this stamp, or of none."""
        nodes = self._context.nodes
        while True:
            seen = await self._read_state()
            if seen.stamp != stamp:
                return None
            if seen.above is None:
                await nodes.make(self._path)
                continue
            name = f"{secrets.token_hex(16)}-{math.ceil(keep * 1000)}"
            entry = protocol.put(self._path, name.encode(), seen.above)
            old = [protocol.delete(f"{self._path}/{seen.name}", seen.version)] if seen.there else []
            new = nodes.temporary(f"{self._path}/{name}", value, keep)
            try:
                error = protocol.failure(await self._session.ask(protocol.together(entry, *old, new)))
            except exc.ResponseError as refusal:
                error = refusal
            if error is None:
                return f"{name}.0"
            if isinstance(error, exc.BadVersion):
                return None
            if isinstance(error, exc.Unimplemented) and nodes.expire:
                # This server has no nodes with a time to live: values stay.
                nodes.expire = False
            elif not isinstance(error, exc.NoNode):
                # NoNode: the value, or the node above, is gone since the read. Read again.
                raise error

    async def changed(self, stamp: str) -> None:
        """Wait for an event of the nodes, a change of the session, or the poll."""
        context = self._context
        self._inbox.take()
        self._session.listeners.add(self._reconnected)
        try:
            async with context.bounded():
                seen = await self._read_state(watch=True)
            if seen.stamp == stamp:
                await self._inbox.wait(Deadline.after(context.poll_delay(), context.clock))
        finally:
            self._watches.off()
            self._session.listeners.discard(self._reconnected)

    async def _read_state(self, *, watch: bool = False) -> _Seen:
        return await self._session.persist(lambda: self._read_once(watch=watch))

    async def _read_once(self, *, watch: bool) -> _Seen:
        name = self._name
        requests = [self._get(self._path, watch=watch)]
        if name:
            requests.append(self._get(f"{self._path}/{name}", watch=watch))
        node, *values = await self._session.read(*requests)
        if node is None:
            if watch:
                await self._expect()
            return _Seen(None)
        entry, version = bytes(node.data or b""), node.stat.version
        # Another program may have written anything else there.
        self._name = entry.decode() if _NAME.fullmatch(entry) else ""
        if not self._name:
            return _Seen(version)
        if self._name != name:
            values = await self._session.read(self._get(f"{self._path}/{self._name}", watch=watch))
        if values[0] is None:
            # The server has removed it, and there is no new one.
            return _Seen(version, self._name)
        return _Seen(version, self._name, bytes(values[0].data or b""), values[0].stat.version)

    def _get(self, path: str, *, watch: bool) -> Any:
        if watch:
            self._watches.on(path, self._event)
        return protocol.get(path, watch=watch)

    async def _expect(self) -> None:
        """Watch for the creation of the node above."""
        self._watches.on(self._path, self._event)
        self._expects = True
        try:
            await self._session.ask(protocol.exists(self._path, watch=True))
        except exc.NoNode:
            return
        # It was created meanwhile.
        self._inbox.wake(WakeReason.NOTIFIED)

    def _event(self, event: WatchEvent) -> None:  # noqa: ARG002 - any event is worth a read
        self._inbox.wake(WakeReason.NOTIFIED)

    def _reconnected(self) -> None:
        self._inbox.wake(WakeReason.RECONNECTED)

    async def aclose(self) -> None:
        """End the wait, and the watch at the server on a node that may never be created."""
        self._inbox.wake(WakeReason.CLOSED)
        session = self._session
        if self._expects and session.connected and self._path not in session.watchers:
            self._expects = False
            try:
                async with asyncio.timeout(self._context.command_timeout):
                    await session.ask(protocol.unwatch(self._path))
            except (exc.ZKError, TimeoutError):
                # It has happened, or the connection is gone, and the watch with it.
                return
