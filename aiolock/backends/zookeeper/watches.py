"""What one claim or document wants to be told of: its callbacks in the session, which it forgets all at once.

The server tells once for each time that it was asked, and forgets with the connection. So a callback here means that
somebody listens, not that the server will speak: whoever needs that asks the server again.
"""

from __future__ import annotations

from collections.abc import Callable

from aiozk import protocol

from aiolock.backends.zookeeper.session import Session

__all__ = ["CHILDREN", "CREATED", "DATA", "DELETED", "Watches"]

CREATED: int = protocol.WatchEvent.CREATED
DELETED: int = protocol.WatchEvent.DELETED
DATA: int = protocol.WatchEvent.DATA_CHANGED
CHILDREN: int = protocol.WatchEvent.CHILDREN_CHANGED

Callback = Callable[[str], None]


class Watches:
    """Callbacks, by the path and the kinds of events that lead to them."""

    __slots__ = ("_callbacks", "_session")

    def __init__(self, session: Session) -> None:
        self._session = session
        self._callbacks: dict[tuple[int, str], Callback] = {}

    def __contains__(self, path: str) -> bool:
        return (DELETED, path) in self._callbacks

    def has(self, kind: int, path: str) -> bool:
        """Whether somebody listens to this."""
        return (kind, path) in self._callbacks

    def on(self, path: str, callback: Callback, *kinds: int) -> None:
        """Call back with the path when one of these happens there."""
        for kind in kinds:
            if (kind, path) not in self._callbacks:
                self._callbacks[kind, path] = callback
                self._session.add_watch_callback(kind, path, callback)

    def off(self, *, keep: tuple[str, ...] = ()) -> None:
        """Forget all, except those for these paths."""
        for (kind, path), callback in list(self._callbacks.items()):
            if path not in keep:
                del self._callbacks[kind, path]
                self._session.remove_watch_callback(kind, path, callback)

    def forget(self, path: str) -> None:
        """The server has told of this path, and will not again."""
        for kind in (CREATED, DELETED, DATA, CHILDREN):
            callback = self._callbacks.pop((kind, path), None)
            if callback is not None:
                self._session.remove_watch_callback(kind, path, callback)
