"""One sleeper for everybody of a client who waits: for a grant, for a lock whose holder is over, for a document.

A session of its own sleeps at the server, in a statement that ends by itself when there is something to know, at the
latest when the next hold in the way ends. Whoever grants something ends the sleep by KILL QUERY. Nothing is lost when
that does not arrive: a grant is committed before it is told, and the sleeper looks before it sleeps, and at least
three times within the claim of a grant.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from aiolock.backends.mysql.bed import Bed, insist, interrupted
from aiolock.backends.mysql.connection import Session
from aiolock.backends.mysql.statements import quote
from aiolock.backends.mysql.stragglers import FRESH
from aiolock.contract import Grant, claim_time
from aiolock.errors import BackendError, BackendRefused, LockError

if TYPE_CHECKING:
    from aiolock.backends.mysql.shared_claim import SharedClaim
    from aiolock.backends.mysql.sharing import Sharing

__all__ = ["Listener", "Watch"]

BATCH = 500
"""How many places one statement prolongs."""
SHORTEST_STAY = 3.0
"""A place lives so many seconds without a word at least; `sharing.sql` says the same."""
LONGEST = 1.0
"""At most so many seconds between looks."""
GRANTED, HELD, WAITING = 1, 2, (0, 5)
"""The states of a grant, of a confirmed hold, and of places and watches."""
ACROSS = 0.2
"""The same where a grant may come from another node of a cluster, which cannot wake us."""
RETRY = (0.05, 0.15)
"""Seconds between looks while there is no session to sleep in, or while somebody keeps a row locked."""
SHARE = 0.25
"""For how many seconds all wait for a decision about the lock of one of them."""
SOON = (0.003, 0.01)
"""The same while a row is locked, as it is for a moment by every decision."""
NEVER = (0.0, 0.0)


class Watch(Protocol):
    """Somebody who looks at a document."""

    key: str
    owner: str
    stamp: str
    event: asyncio.Event


class Listener:
    """Wakes claims and watches of one client; runs while there are any."""

    def __init__(self, sharing: Sharing) -> None:
        self._sharing = sharing
        self._claims: dict[str, SharedClaim] = {}
        self._lines: dict[str, dict[str, SharedClaim]] = {}
        """The same by lock, in the order in which they came."""
        self._watches: dict[str, Watch] = {}
        self._doubts: set[str] = set()
        """Owners that were let in perhaps, by a decision that had no answer."""
        self._bed = Bed(sharing)
        self._running = False
        self._searched = 0.0
        """When it was last looked for holds that are over."""
        self._look = LONGEST
        self._stayed = 0.0
        self._pause = NEVER
        """How long to wait before the next look, because somebody has something locked that is to be seen to."""
        self._deciding: set[str] = set()
        """Locks about which a decision of the listener's is under way."""

    # --- who waits

    def add(self, claim: SharedClaim) -> None:
        """Wake this claim when it is granted, or has lost its place."""
        self._claims[claim.owner] = claim
        self._lines.setdefault(claim.key, {})[claim.owner] = claim
        self._run(claim_time(claim.bid.ttl) / 3)

    def discard(self, claim: SharedClaim) -> None:
        """It does not wait any more."""
        if self._claims.pop(claim.owner, None) is not None:
            line = self._lines[claim.key]
            del line[claim.owner]
            if not line:
                del self._lines[claim.key]
        self._hurry()

    def first(self, key: str, most: int) -> dict[str, SharedClaim]:
        """Who waits for this lock, by owner: the first of them."""
        return dict(islice(self._lines.get(key, {}).items(), most))

    def hand(self, claim: SharedClaim, grant: Grant) -> None:
        """Give a claim what it waits for, if it still does."""
        if claim.owner in self._claims:
            claim.pushed = grant
            self.discard(claim)
            claim.event.set()

    def doubt(self, owners: Iterable[str]) -> None:
        """Find out whether they were let in."""
        self._doubts.update(owner for owner in owners if owner in self._claims)
        if self._doubts:
            self.look()

    def doubt_all(self) -> None:
        """The same of everybody who waits."""
        self.doubt(list(self._claims))

    def look(self) -> None:
        """There may be something to hear."""
        if self._bed.asleep:
            self._ring()

    def watch(self, watch: Watch) -> None:
        """Wake this watch when its document has another stamp than it knows."""
        self._watches[watch.owner] = watch
        self._run(LONGEST)

    def forget(self, watch: Watch) -> None:
        """Nobody looks any more."""
        self._watches.pop(watch.owner, None)
        self._hurry()

    def _hurry(self) -> None:
        """End the sleep if there is nobody left for whom it is slept."""
        if not self._claims and not self._watches:
            self.look()

    def _ring(self) -> None:
        self._sharing.backend.sessions.spawn(self._sharing.ring({self._sharing.client}), "aiolock-mysql-ring")

    # --- sleeping

    def _run(self, look: float) -> None:
        backend = self._sharing.backend
        look = min(look, ACROSS if backend.across else LONGEST)
        if not self._running:
            self._running = True
            self._look = look
            self._stayed = backend.settings.clock()
            backend.sessions.spawn(self._serve(), "aiolock-mysql-listen")
        elif look < self._look:
            # It sleeps for longer than this one may wait.
            self._look = look
            self.look()

    async def _serve(self) -> None:
        backend = self._sharing.backend
        try:
            while self._claims or self._watches:
                try:
                    await self._turn()
                except BackendRefused:
                    # The table was dropped, for example. All ask again, and hear why it was refused.
                    waiting: list[SharedClaim | Watch] = [*self._claims.values(), *self._watches.values()]
                    for one in waiting:
                        one.event.set()
                    await backend.pause(RETRY)
                except LockError:
                    # The server cannot be asked, or somebody ended the statement that was asked instead of the sleep.
                    await backend.pause(RETRY)
        finally:
            self._running = False

    async def _turn(self) -> None:
        backend = self._sharing.backend
        try:
            session = await backend.sessions.listener()
        except BackendError:
            # No more connections are to be had: look on the one there is.
            await self._hear(await backend.sessions.main())
            await backend.pause(RETRY)
            return
        await self._bed.settle(session)
        while self._claims or self._watches:
            try:
                searches = not self._doubts and await self._bed.sleep(session, self._look, self._news())
                await self._hear(session, searches=searches)
                if self._pause != NEVER:
                    # There is no sleep while a grant is not confirmed, or something is over and still there.
                    pause, self._pause = self._pause, NEVER
                    await backend.pause(pause)
            except BackendError as error:
                if not interrupted(session, error):
                    raise

    def _news(self) -> str:
        """The condition that a document has changed that somebody looks at."""
        known = [
            f"(id = {quote(watch.key)} AND version <> {int(watch.stamp or 0)})"
            for watch in self._watches.values()
        ]
        return " OR ".join(known) or "FALSE"

    # --- hearing

    async def _hear(self, session: Session, *, searches: bool = True) -> None:
        """Look, and act on it. Whether a hold in the way is over is seen if it ``searches``, and when that was long ago."""
        backend = self._sharing.backend
        timeout = backend.settings.command_timeout
        await self._stay(session)
        client = quote(self._sharing.client)
        [granted] = await session.run(backend.statements("hear_grants", client=client), timeout)
        taken = await self._take(session, {str(owner) for owner, *_ in granted.rows})
        for owner, key, family, name in granted.rows:
            if owner not in taken:
                # Its bid arrived after it was given up: nobody will ask for it.
                burial = self._sharing.bury(str(owner), str(key), str(family), str(name))
                await self._decide(str(key), burial)
        now = backend.settings.clock()
        if searches or now - self._searched >= self._look:
            self._searched = now
            [over] = await session.run(backend.statements("hear_ends", client=client), timeout)
            for lock in over.rows:
                words = tuple(map(str, lock))
                await self._decide(words[0], self._sharing.advance(*words))
        for watch in await self._changed(session):
            self.forget(watch)
            watch.event.set()

    async def _decide(self, key: str, deciding: Coroutine[Any, Any, None]) -> None:
        """A decision about a lock, in the time of all who wait only while that is short: somebody may have a row of it locked."""
        if key in self._deciding:
            deciding.close()
        else:
            task = self._sharing.backend.sessions.spawn(deciding, "aiolock-mysql-advance")
            self._deciding.add(key)
            task.add_done_callback(lambda _: self._deciding.discard(key))
            if (await asyncio.wait([task], timeout=SHARE))[0]:
                # Raises what it raised.
                task.result()
                return
        self._pause = RETRY

    async def _changed(self, session: Session) -> list[Watch]:
        """The watches whose documents have another stamp than they know."""
        if not self._watches:
            return []
        backend = self._sharing.backend
        watched = ", ".join({quote(watch.key) for watch in self._watches.values()})
        packet = backend.statements("hear_documents", watched=watched)
        [documents] = await session.run(packet, backend.settings.command_timeout)
        versions = {str(key): str(version) for key, version in documents.rows}
        return [one for one in self._watches.values() if versions.get(one.key, "") != one.stamp]

    async def _take(self, session: Session, granted: set[str]) -> set[str]:
        """Confirm grants, and what may be one, for the claims that wait for them; who these are."""
        backend = self._sharing.backend
        clock, timeout = backend.settings.clock, backend.settings.command_timeout
        doubts, self._doubts = self._doubts, set()
        mine = sorted(owner for owner in granted | doubts if owner in self._claims)
        try:
            for start in range(0, len(mine), BATCH):
                batch = mine[start : start + BATCH]
                words = ", ".join(map(quote, batch))
                packet = backend.statements("confirm_bids", owners=words, count=len(batch))
                await insist(session, packet, timeout)
                asked = clock()
                [bids] = await insist(session, backend.statements("bids", owners=words), timeout)
                stand = {str(owner): tuple(map(int, row)) for owner, *row in bids.rows}
                for owner in batch:
                    state, token, left = stand.get(owner, (None, 0, 0))
                    if (claim := self._claims.get(owner)) is None:
                        continue
                    if state == HELD:
                        # Perhaps not confirmed by us, nor now.
                        sent = asked - (claim.bid.ttl - left / 1_000_000)
                        self.hand(claim, claim.granted(token, sent))
                    elif state == GRANTED:
                        # Somebody has it locked at this moment.
                        self._pause = max(self._pause, SOON)
                    elif state not in WAITING:
                        # It was taken away before it was known here, or is over.
                        claim.event.set()
        except BaseException:
            # Some may be confirmed, and no look would find them again.
            self.doubt(mine)
            raise
        return set(mine)

    async def _stay(self, session: Session) -> None:
        """Prolong places and watches in time; who has none any more asks again."""
        backend = self._sharing.backend
        timeout = backend.settings.command_timeout
        waiting: dict[str, SharedClaim | Watch] = {**self._claims, **self._watches}
        life = max(SHORTEST_STAY, min((claim.bid.ttl for claim in self._claims.values()), default=0.0))
        now = backend.settings.clock()
        if now - self._stayed < life / 3:
            return
        self._stayed = now
        owners = sorted(waiting)
        for start in range(0, len(owners), BATCH):
            batch = owners[start : start + BATCH]
            words = ", ".join(map(quote, batch))
            packet = backend.statements("stay", owners=words, count=len(batch))
            await insist(session, packet, timeout)
            [bids] = await insist(session, backend.statements("bids", owners=words), timeout)
            found = {str(owner): int(left) for owner, state, _, left in bids.rows if int(state) in WAITING}
            for owner, left in found.items():
                claim = self._claims.get(owner)
                if claim is not None and left < FRESH * max(SHORTEST_STAY, claim.bid.ttl) * 1_000_000:
                    # Somebody has it locked at this moment: at the next look again.
                    self._stayed = 0.0
            for owner in set(batch) - found.keys():
                waiting[owner].event.set()
