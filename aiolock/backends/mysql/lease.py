"""What the lease mode does for all of its claims: renew them in one statement, look, take away by force."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from aiolock.backends.mysql.connection import Session
from aiolock.backends.mysql.lease_claim import LeaseClaim
from aiolock.backends.mysql.looking import in_line
from aiolock.backends.mysql.renewing import Renewing
from aiolock.backends.mysql.shared_claim import SharedClaim
from aiolock.backends.mysql.sharing import Sharing
from aiolock.backends.mysql.statements import hexed, quote
from aiolock.backends.mysql.tables import check_tables
from aiolock.backends.mysql.turns import left
from aiolock.contract import (
    Bid,
    Claim,
    Family,
    Holder,
    LockInfo,
    Mode,
    News,
    Notice,
    Renewal,
)
from aiolock.errors import BackendError
from aiolock.logs import Log, get_logger

if TYPE_CHECKING:
    from aiolock.backends.mysql.backend import MySQLBackend

__all__ = ["LeaseMode"]

log: Log = get_logger("aiolock")

SHARED = (Family.RW, Family.SEMAPHORE)
"""The families that several may be in."""


class LeaseMode:
    """The row is the truth."""

    name = "lease"

    def __init__(self, backend: MySQLBackend) -> None:
        self.backend = backend
        self.sharing = Sharing(backend)
        self._renewing = Renewing(backend, self.sharing)

    def claim(self, bid: Bid) -> Claim:
        """A new claim, with an owner id of its own."""
        return LeaseClaim(self, bid) if bid.kind.mode is Mode.MUTEX else self.sharing.claim(bid)

    async def enter(self, session: Session, *, main: bool) -> None:
        """See that the tables, if they are there, have our data format."""
        if main:
            await check_tables(self.backend, session)

    def ended(self, session: Session) -> None:
        """A session is gone: rows live on, but it is time to look."""
        if session.locks or not session.contended:
            self.backend.notices.put(Notice(News.DOUBT))
            self.sharing.listener.doubt_all()

    # --- keeping

    async def renew(self, claims: Sequence[Claim]) -> list[Renewal]:
        """All holds of each kind in a few statements."""
        shared = [claim for claim in claims if isinstance(claim, SharedClaim)]
        answers: dict[Claim, Renewal] = await self.sharing.renew(shared) if shared else {}
        own = [claim for claim in claims if isinstance(claim, LeaseClaim)]
        if own:
            answers.update(await self._renewing.renew(own))
        return [answers[claim] for claim in claims]

    # --- the turnstile

    async def look(self, claim: LeaseClaim) -> tuple[float, int]:
        """For how many seconds the row is held (below zero: free since), and which session has the turnstile."""
        packet = self.backend.statements("look", id=quote(claim.key), turnstile=quote(claim.turnstile))
        remaining, user = (await self.backend.ask(packet))[0].rows[0]
        return int(remaining) / 1_000_000, int(user)

    async def kill(self, turnstile: str, number: int) -> None:
        """End the session that has the turnstile, if it is still that one."""
        ours = self.backend.sessions.find(number)
        if ours is not None and isinstance(other := ours.locks.get(turnstile), LeaseClaim):
            other.lose_turnstile()
            self.backend.notices.put(Notice(News.DOUBT, other))
            return
        packet = self.backend.statements("kill_holder", turnstile=quote(turnstile), number=number)
        try:
            control = await self.backend.sessions.control()
            await control.run(packet, self.backend.settings.command_timeout)
        except BackendError as error:
            # Another account's, or it has gone by itself.
            log.info("session %d, which sits on a turnstile, could not be ended: %s", number, error)

    def free_turnstile(self, claim: LeaseClaim) -> None:
        """We have the row but not the turnstile: end whoever sits on it, or our release would wake nobody."""
        self.backend.sessions.spawn(self._free_turnstile(claim), "aiolock-mysql-turnstile")

    async def _free_turnstile(self, claim: LeaseClaim) -> None:
        try:
            _, user = await self.look(claim)
        except BackendError:
            return
        if user:
            await self.kill(claim.turnstile, user)

    # --- looking

    async def inspect(self, name: str, family: Family) -> LockInfo:
        """The row, and the statements that wait."""
        if family in SHARED:
            return await self.sharing.inspect(name, family)
        key = self.backend.key(name, family)
        statements = self.backend.statements
        await left(*self.backend.sessions.holders(f"aiolock:t:{key}"))
        row = statements("inspect", id=quote(key))
        prefix = statements("line_up", turnstile=quote(f"aiolock:t:{key}"), who="%")
        listing = statements("waiters", processlist=self.backend.processlist, pattern=hexed(prefix))
        answers = await self.backend.ask(f"{row}; {listing}")
        waiting = await in_line(self.backend, answers[1].rows)
        return LockInfo(name, tuple(_holder(row) for row in answers[0].rows), waiting, family)

    async def force_release(self, name: str, family: Family) -> bool:
        """Free the row; then end the session of the holder, which tells it at once and wakes the next."""
        if family in SHARED:
            return await self.sharing.force_release(name, family)
        key = self.backend.key(name, family)
        turnstile = f"aiolock:t:{key}"
        packet = self.backend.statements("force", id=quote(key), turnstile=quote(turnstile))
        # Not twice if the answer is lost: the second would take it from the next.
        freed, used = await self.backend.ask(packet, repeat=False)
        if not freed.changed:
            return False
        user = int(used.rows[0][0])
        if user:
            await self.kill(turnstile, user)
        return True

    async def request_release(self, name: str, family: Family, reason: str) -> bool:
        """Leave a word in the row, which the renewals of its holder read."""
        if family in SHARED:
            return await self.sharing.request_release(name, family, reason)
        packet = self.backend.statements(
            "request", id=quote(self.backend.key(name, family)), reason=hexed(reason)
        )
        answers = await self.backend.ask(packet)
        return bool(int(answers[-1].rows[0][0]))

    async def names(self, pattern: str) -> list[tuple[str, Family]]:
        """Every lock of the namespace that is held or waited for, if its name matches."""
        packet = self.backend.statements("names", namespace=quote(self.backend.settings.namespace))
        [found] = await self.backend.ask(packet)
        return sorted(
            (str(name), Family(family)) for name, family in found.rows if fnmatchcase(str(name), pattern)
        )


def _holder(row: tuple[Any, ...]) -> Holder:
    label, token, since, remaining = row
    return Holder(
        label=label, token=int(token), since=since.replace(tzinfo=UTC), remaining=int(remaining) / 1_000_000
    )
