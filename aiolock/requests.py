"""A request to let go, as the holder sees it: asked or not, why, and waiting for it."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Generator
from typing import Any, Protocol

from aiolock.errors import shorten
from aiolock.runtime import Runtime

__all__ = ["Asked", "ReleaseRequest"]


class Home(Protocol):
    """Where the runtime is."""

    runtime: Runtime


class Asked(Protocol):
    """The lease that somebody asks for."""

    __slots__ = ("__weakref__",)

    @property
    def open(self) -> bool:
        """Whether it was neither released nor lost."""
        ...

    @property
    def home(self) -> Home:
        """Where it goes back to."""
        ...

    def watch(self) -> asyncio.Future[None]:
        """A future that is done when it has ended."""
        ...


class ReleaseRequest:
    """Whether the holder of a lease was asked to let go, and why. Comes from :attr:`Lease.release_requested`.

    False until then. ``await`` waits for it and returns the reason, or ``None`` if the lease ended before anybody
    asked; cancelling that changes nothing. In another loop or thread than the client's it raises :class:`RuntimeError`.
    """

    __slots__ = ("_lease", "_waiters", "reason")

    def __init__(self, lease: Asked) -> None:
        self.reason: str | None = None
        """What the asker said; ``None`` until somebody asks. The latest counts."""
        self._lease = weakref.ref(lease)
        self._waiters: set[asyncio.Future[None]] = set()

    def __bool__(self) -> bool:
        return self.reason is not None

    def __await__(self) -> Generator[Any, None, str | None]:
        lease = self._lease()
        if lease is not None and lease.open:
            lease.home.runtime.guard()
        if self.reason is None and lease is not None and lease.open:
            watcher = lease.watch()
            self._waiters.add(watcher)
            try:
                yield from watcher
            finally:
                self._waiters.discard(watcher)
                watcher.cancel()
        return self.reason

    def __repr__(self) -> str:
        return f"<ReleaseRequest: {'not asked' if self.reason is None else shorten(self.reason)}>"

    def ask(self, reason: str) -> None:
        """Remember why, and wake whoever waits for it."""
        self.reason = reason
        for watcher in list(self._waiters):
            if not watcher.done():
                watcher.set_result(None)
