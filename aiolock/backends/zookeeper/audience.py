"""Who hears of changes: every claim and document, of those of the session; the client, of what becomes of its holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiolock.contract import News, Notice
from aiolock.errors import LossReason
from aiolock.notices import Notices

if TYPE_CHECKING:
    from aiolock.backends.zookeeper.claim import QueueClaim
    from aiolock.backends.zookeeper.document import NodeDocument
    from aiolock.backends.zookeeper.session import Session

__all__ = ["Audience"]


class Audience:
    """That of one client. With ``cautious``, a hold ends with its connection."""

    def __init__(self, *, cautious: bool) -> None:
        self._cautious = cautious
        self._notices = Notices()
        self.claims: set[QueueClaim] = set()
        """Those that have, or may have, a node."""
        self.documents: set[NodeDocument] = set()
        """Those that somebody waits at."""

    def changed(self, session: Session) -> None:
        """The session is another one, or connected, or not, or certain again."""
        connected = session.connected
        if connected:
            self._notices.put(Notice(News.DOUBT))
        for claim in list(self.claims):
            if claim.held and (claim.owner != session.session_id or (self._cautious and not connected)):
                self.lost(claim, "session")
            elif claim.hold is not None:
                claim.hold.begin_again()
            else:
                claim.wake()
        for document in self.documents:
            document.wake()

    def lost(self, claim: QueueClaim, reason: LossReason) -> None:
        """A hold has ended without us."""
        claim.end()
        self._notices.put(Notice(News.LOST, claim, reason))

    def requested(self, claim: QueueClaim, reason: str) -> None:
        """A holder is asked to let go."""
        self._notices.put(Notice(News.REQUESTED, claim, text=reason))

    async def notice(self) -> Notice:
        """The next thing that the client has to hear."""
        return await self._notices.get()
