"""Documents: a node that names the present one, and under it that one, which the server may forget after a while.

A version number of ZooKeeper's begins again when its node is made again, so it alone is no stamp: a write that was
meant for a document of long ago could hit its successor. So each document is made under a random name of its own, in one
transaction with the entry in the node above that names it, and its stamp is that name with its version. The name also
says for how long it is kept after its last write, in milliseconds: the server does not tell, and where it forgets nothing,
an administrator can see by it what is over.
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets
from typing import TYPE_CHECKING, Any, NamedTuple

from aiozk import exc

from aiolock.backends.zookeeper import wire
from aiolock.backends.zookeeper.outcomes import InDoubt, NotSent, SessionChanged, said
from aiolock.backends.zookeeper.watches import CREATED, DATA, DELETED, Watches
from aiolock.document import ABSENT, MOST_BYTES, Document, Entry
from aiolock.errors import ConfigError

if TYPE_CHECKING:
    from aiolock.backends.zookeeper.backend import ZooKeeperBackend

__all__ = ["NodeDocument"]


_NAME = re.compile(rb"[0-9a-f]{32}-\d{1,15}")


class _Seen(NamedTuple):
    """What one look has found."""

    shelf: int | None
    """The version of the node above; ``None`` if there is none."""
    name: str
    value: bytes = b""
    version: int = -1

    @property
    def there(self) -> bool:
        return self.version >= 0

    @property
    def stamp(self) -> str:
        return f"{self.name}.{self.version}" if self.there else ABSENT.stamp


def _lasts(name: str) -> float:
    """For how many seconds after its last write a document of that name is kept."""
    return int(name.rpartition("-")[2]) / 1000


class NodeDocument(Document):
    """One client's view of one document at ``path``."""

    def __init__(self, backend: ZooKeeperBackend, path: str) -> None:
        self._backend = backend
        self._path = path
        self._name = ""
        """What the document was called when it was last seen."""
        self._watches: Watches | None = None
        self._woken: asyncio.Future[None] | None = None
        self._expects = False
        """Whether the server was asked to tell when the node above is made."""

    async def read(self) -> Entry:
        """As the leader knows it; one round trip, or two if it is another one than the last time."""
        async with self._backend.bounded():
            seen = await self._look()
        return Entry(seen.value, seen.stamp) if seen.there else ABSENT

    async def write(self, value: bytes, stamp: str, keep: float) -> str | None:
        """One round trip for what is there, a few for what is new or has to be kept for longer."""
        if len(value) > MOST_BYTES:
            raise ConfigError(f"a document has at most {MOST_BYTES} bytes, not {len(value)}")
        backend = self._backend
        async with backend.bounded():
            await backend.session.ready()
            name, _, version = stamp.partition(".")
            if stamp and _lasts(name) >= keep:
                return await self._replace(name, value, int(version))
            return await self._make(value, stamp, keep)

    async def _replace(self, name: str, value: bytes, version: int) -> str | None:
        try:
            reply = await self._backend.session.ask(wire.put(f"{self._path}/{name}", value, version))
        except (exc.BadVersion, exc.NoNode):
            return None
        return f"{name}.{reply.stat.version}"

    async def _make(self, value: bytes, stamp: str, keep: float) -> str | None:
        """A new document in the place of the one with this stamp, or of none."""
        backend = self._backend
        while True:
            seen = await self._look()
            if seen.stamp != stamp:
                return None
            if seen.shelf is None:
                await backend.parents.make(self._path)
                continue
            name = f"{secrets.token_hex(16)}-{math.ceil(keep * 1000)}"
            old = [wire.delete(f"{self._path}/{seen.name}", seen.version)] if seen.there else []
            path = f"{self._path}/{name}"
            new = (
                wire.lasting(path, value, backend.acl, keep)
                if backend.forgets
                else wire.persistent(path, value, backend.acl)
            )
            entry = wire.put(self._path, name.encode(), seen.shelf)
            try:
                error = wire.failure(await backend.session.ask(wire.together(entry, *old, new)))
            except exc.ResponseError as refusal:
                error = refusal
            if error is None:
                return f"{name}.0"
            if isinstance(error, exc.Unimplemented) and backend.forgets:
                # This server was not told to have such nodes: documents stay.
                backend.forgets = False
            elif isinstance(error, exc.NoNode):
                # Gone since the look: the document, or an empty shelf that the server has cleared away. Look again.
                continue
            elif isinstance(error, exc.BadVersion):
                return None
            else:
                raise error

    async def changed(self, stamp: str) -> None:
        """Wait for the nodes, for a change of the session, and at most for a while."""
        backend = self._backend
        if self._watches is None:
            self._watches = Watches(backend.session)
        loop = asyncio.get_running_loop()
        self._woken = woken = loop.create_future()
        backend.audience.documents.add(self)
        try:
            async with backend.bounded():
                seen = await self._look(watch=True)
            if seen.stamp == stamp:
                poll = loop.call_later(backend.session.timeout * backend.random.uniform(1, 2), self.wake)
                try:
                    await woken
                finally:
                    poll.cancel()
        finally:
            self._woken = None
            self._watches.off()
            backend.audience.documents.discard(self)

    async def _look(self, *, watch: bool = False) -> _Seen:
        """Find the present document; repeated until it was answered in one session."""
        session = self._backend.session
        while True:
            await session.ready()
            try:
                return await self._look_once(watch=watch)
            except (InDoubt, NotSent, SessionChanged):
                if session.closing:
                    raise

    async def _look_once(self, *, watch: bool) -> _Seen:
        session = self._backend.session
        name = self._name
        requests = [wire.sync(), self._get(self._path, watch=watch)]
        if name:
            requests.append(self._get(f"{self._path}/{name}", watch=watch))
        fresh, above, *rest = await session.ask_all(*requests)
        said(fresh)
        try:
            shelf = said(above)
        except exc.NoNode:
            if watch:
                return await self._expect()
            return _Seen(None, "")
        entry = bytes(shelf.data or b"")
        # What else may stand there is nobody's entry.
        self._name = entry.decode() if _NAME.fullmatch(entry) else ""
        if not self._name:
            return _Seen(shelf.stat.version, "")
        try:
            if self._name == name:
                document = said(rest[0])
            else:
                document = await session.ask(self._get(f"{self._path}/{self._name}", watch=watch))
        except exc.NoNode:
            # Forgotten, and nobody has written a new one.
            return _Seen(shelf.stat.version, self._name)
        stat = document.stat
        return _Seen(shelf.stat.version, self._name, bytes(document.data or b""), stat.version)

    def _get(self, path: str, *, watch: bool) -> Any:
        if watch and self._watches is not None:
            self._watches.on(path, self._event, DELETED, DATA)
        return wire.get(path, watch=watch)

    async def _expect(self) -> _Seen:
        """There is nothing at all: be told when somebody makes it."""
        assert self._watches is not None  # noqa: S101 - only who watches comes here
        self._watches.on(self._path, self._event, CREATED)
        self._expects = True
        try:
            await self._backend.session.ask(wire.exists(self._path, watch=True))
        except exc.NoNode:
            return _Seen(None, "")
        # It is there now: as if we had been told.
        self.wake()
        return _Seen(None, "")

    def _event(self, path: str) -> None:  # noqa: ARG002 - whichever it was
        self.wake()

    def wake(self) -> None:
        """Whoever waits here should look."""
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    async def aclose(self) -> None:
        """Have the server forget what it was asked to tell about a node that may never be made."""
        if self._woken is not None:
            self._woken.cancel()
        session = self._backend.session
        if self._expects and session.connected and not session.watched(self._path):
            self._expects = False
            try:
                async with asyncio.timeout(self._backend.settings.command_timeout):
                    await session.ask(wire.unwatch(self._path))
            except (exc.ZKError, TimeoutError):
                # It has happened, or the connection is gone, and the watch with it.
                return
