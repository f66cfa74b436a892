"""A small document on the server, changed by compare-and-set: what latches, barriers and observers stand on.

What they mean is decided by pure functions over the document, written once; a server needs only this much.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

__all__ = ["ABSENT", "MOST_BYTES", "Document", "Entry"]

MOST_BYTES = 65_536
"""How long a document may be."""


class Entry(NamedTuple):
    """What was read: the document, and the stamp that says which version of it this is."""

    value: bytes
    stamp: str


ABSENT = Entry(b"", "")
"""There is no document."""


class Document(ABC):
    """One client's view of one document. No I/O before the first verb; used by one task at a time.

    Only errors of :mod:`aiolock.errors` leave it; each verb but ``changed`` ends within the command timeout.
    """

    @abstractmethod
    async def read(self) -> Entry:
        """The document as it is now, or :data:`ABSENT`. Linearizable: it sees every write that was answered before."""

    @abstractmethod
    async def write(self, value: bytes, stamp: str, keep: float) -> str | None:
        """Replace the version with that ``stamp`` (``""``: there must be none); the new stamp, or ``None`` if it was not it.

        Two writes never lead to the same stamp, also not across the end of a document. The server may forget the
        document ``keep`` seconds after its last write, and not earlier. After an error or a cancellation nobody knows
        whether it was written, or will be: read again.
        """

    @abstractmethod
    async def changed(self, stamp: str) -> None:
        """Wait until the document may have another stamp: may be early, is never infinitely late.

        Cancelling it changes nothing.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """Nobody looks at it any more: watches end. Never raises; idempotent."""
