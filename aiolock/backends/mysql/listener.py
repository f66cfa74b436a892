"""One sleeper for everybody of a client who waits: for a grant, for a lock whose holder is over, for a document.

A session of its own sleeps at the server, in a statement that ends by itself when there is something to know, at the
latest when the next hold in the way ends. Whoever grants something ends the sleep by KILL QUERY. Nothing is lost when
that does not arrive: a grant is committed before it is told, and the sleeper looks before it sleeps, and at least
three times within the claim of a grant.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from aiolock.backends.mysql.connection import Session
from aiolock.backends.mysql.failures import INTERRUPTED, code
from aiolock.backends.mysql.statements import quote
from aiolock.contract import claim_time
from aiolock.errors import BackendError, LockError

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
HELD, WAITING = 2, (0, 5)
"""The states of a confirmed hold, and of places and watches."""
ACROSS = 0.2
"""The same where a grant may come from another node of a cluster, which cannot wake us."""
RETRY = (0.05, 0.15)
"""Seconds between looks while there is no session to sleep in."""


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
        self._watches: dict[str, Watch] = {}
        self._taken: set[str] = set()
        """Owners whose grants were confirmed by the last look."""
        self._running = self._asleep = False
        self._look = LONGEST
        self._stayed = 0.0

    # --- who waits

    def add(self, claim: SharedClaim) -> None:
        """Wake this claim when it is granted, or has lost its place."""
        self._claims[claim.owner] = claim
        self._run(claim_time(claim.bid.ttl) / 3)

    def discard(self, claim: SharedClaim) -> None:
        """It does not wait any more."""
        self._claims.pop(claim.owner, None)
        self._hurry()

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
        if self._asleep and not self._claims and not self._watches:
            self._ring()

    def _ring(self) -> None:
        self._sharing.backend.sessions.spawn(self._sharing.ring({self._sharing.client}), "aiolock-mysql-ring")

    def heard_of(self, owners: Iterable[str]) -> None:
        """Claims of ours were granted by a decision of ours."""
        for owner in owners:
            if (claim := self._claims.get(owner)) is not None:
                claim.event.set()

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
            self._ring()

    async def _serve(self) -> None:
        backend = self._sharing.backend
        try:
            while self._claims or self._watches:
                try:
                    await self._turn()
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
        timeout = backend.settings.command_timeout
        bell = quote(self._sharing.bell(self._sharing.client))
        await session.run(backend.statements("answer_the_bell", bell=bell), timeout)
        while self._claims or self._watches:
            try:
                if not await self._hear(session) and (self._claims or self._watches):
                    packet = backend.statements(
                        "listen",
                        client=quote(self._sharing.client),
                        look=round(self._look, 6),
                        changed=self._news(),
                    )
                    self._asleep = True
                    await session.run(packet, self._look + timeout, blocks=True)
            except BackendError as error:
                if not session.alive or code(error.__cause__) not in INTERRUPTED:
                    raise
            finally:
                self._asleep = False

    def _news(self) -> str:
        """The condition that a document has changed that somebody looks at."""
        known = [
            f"(id = {quote(watch.key)} AND version <> {int(watch.stamp or 0)})"
            for watch in self._watches.values()
        ]
        return " OR ".join(known) or "FALSE"

    # --- hearing

    async def _hear(self, session: Session) -> bool:
        """Look, and act on it; whether there was anything."""
        backend = self._sharing.backend
        timeout = backend.settings.command_timeout
        await self._stay(session)
        client = quote(self._sharing.client)
        [granted] = await session.run(backend.statements("hear_grants", client=client), timeout)
        if granted.rows:
            await self._take(session, [str(row[0]) for row in granted.rows])
        for owner, key, family, name in granted.rows:
            if owner not in self._claims and owner not in self._taken:
                # Its bid arrived after it was given up: nobody will ask for it.
                await self._sharing.bury(str(owner), str(key), str(family), str(name))
        [over] = await session.run(backend.statements("hear_ends", client=client), timeout)
        for key, family, name in over.rows:
            await self._sharing.advance(str(key), str(family), str(name))
        changed = await self._changed(session)
        for watch in changed:
            self.forget(watch)
            watch.event.set()
        return bool(granted.rows or over.rows or changed)

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

    async def _take(self, session: Session, owners: list[str]) -> None:
        """Confirm grants for the claims that wait for them."""
        backend = self._sharing.backend
        timeout = backend.settings.command_timeout
        self._taken.clear()
        mine = sorted(owner for owner in owners if owner in self._claims)
        for start in range(0, len(mine), BATCH):
            words = ", ".join(map(quote, mine[start : start + BATCH]))
            sent = backend.settings.clock()
            try:
                await session.run(backend.statements("confirm_bids", owners=words), timeout)
                [bids] = await session.run(backend.statements("bids", owners=words), timeout)
            except LockError:
                # Some may be confirmed, and no look would find them again: they ask for themselves.
                self.heard_of(mine)
                raise
            for owner, state, token in bids.rows:
                claim = self._claims.get(str(owner))
                if claim is not None and int(state) == HELD:
                    claim.pushed = claim.granted(int(token), sent)
                    self._taken.add(str(owner))
                    self.discard(claim)
                    claim.event.set()

    async def _stay(self, session: Session) -> None:
        """Prolong places and watches in time; who has none any more asks again."""
        backend = self._sharing.backend
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
            await session.run(backend.statements("stay", owners=words), backend.settings.command_timeout)
            [bids] = await session.run(
                backend.statements("bids", owners=words), backend.settings.command_timeout
            )
            found = {str(owner) for owner, state, _ in bids.rows if int(state) in WAITING}
            for owner in set(batch) - found:
                waiting[owner].event.set()
