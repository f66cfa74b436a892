"""Lease mode: mutexes and shared locks in rows; inspection and force release of mutex rows."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from datetime import UTC
from fnmatch import fnmatchcase
from typing import Any

from aiolock.backends.mysql.claim import LeaseClaim, kill_holder, lock_names
from aiolock.backends.mysql.connection import MySQLSession
from aiolock.backends.mysql.context import BLOCK, Context, hexed, quote
from aiolock.backends.mysql.queue import in_queue, left
from aiolock.backends.mysql.renewal import Renewals
from aiolock.backends.mysql.shared import Sharing
from aiolock.backends.mysql.shared_claim import SharedClaim
from aiolock.core.backend import Claim, Event, EventKind, Renewal, Request
from aiolock.core.present import decode_present, presented
from aiolock.types import Family, Holder, LockInfo, Mode

__all__ = ["LeaseMode"]


class LeaseMode:
    """The row is the truth."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.sharing = Sharing(context)
        self.renewals = Renewals(context)

    def claim(self, request: Request) -> Claim:
        """Return a new claim of any kind."""
        if request.kind.mode is Mode.MUTEX:
            return LeaseClaim(self._context, request)
        return SharedClaim(self.sharing, request)

    def ended(self, session: MySQLSession) -> None:
        """Verify holds and positions at the end of a session: rows live on."""
        if session.locks or not session.contended:
            self._context.events.put(Event(EventKind.DOUBT))
            self.sharing.listener.doubt_all()

    def renewal_group(self, claim: Claim) -> Hashable:
        """Return whether it is a mutex, whether it is only verified, and the ttl of a mutex that is not."""
        mutex = isinstance(claim, LeaseClaim)
        return mutex, claim.fixed, claim.request.ttl if mutex and not claim.fixed else None

    async def renew(self, claims: Sequence[Claim]) -> list[Renewal]:
        """Prolong the holds of one group in a few statements."""
        shared = [claim for claim in claims if isinstance(claim, SharedClaim)]
        if shared:
            return await self.sharing.renew(shared)
        return await self.renewals.renew([claim for claim in claims if isinstance(claim, LeaseClaim)])

    # --- administration

    async def inspect(self, name: str, family: Family) -> LockInfo:
        """Return the holder of the row, and the statements that wait."""
        if family.shareable:
            return await self.sharing.inspect(name, family)
        context = self._context
        key, turnstile = lock_names(context, name, family)
        await left(context, turnstile)
        row = context.statements("inspect", id=quote(key))
        prefix = context.statements("wait_for_turnstile", turnstile=quote(turnstile), who="%")
        listing = context.statements("waiters", processlist=context.site.processlist, pattern=hexed(prefix))
        holders, others = await context.execute(f"{row}; {listing}")
        waiting = await in_queue(context, others.rows)
        return LockInfo(name, tuple(_holder(row) for row in holders.rows), waiting, family)

    async def force_release(self, name: str, family: Family) -> bool:
        """Free the row; then end the session of the holder, so that it learns of it at once and the next waiter wakes."""
        if family.shareable:
            return await self.sharing.force_release(name, family)
        key, turnstile = lock_names(self._context, name, family)
        packet = self._context.statements("force", id=quote(key), turnstile=quote(turnstile))
        # Not twice if the answer is lost: the second would take it from the next holder.
        freed, used = await self._context.execute(packet, repeat=False)
        if not freed.changed:
            return False
        if user := int(used.rows[0][0]):
            await kill_holder(self._context, turnstile, user)
        return True

    async def request_release(self, name: str, family: Family, reason: str) -> bool:
        """Write the reason to the row, which the renewals of its holder read."""
        statement, key = (
            "request_release_shared" if family.shareable else "request_release",
            self._context.key(name, family),
        )
        packet = self._context.statements(statement, id=quote(key), reason=hexed(reason))
        answers = await self._context.execute(packet)
        return bool(int(answers[-1].rows[0][0]))

    async def names(self, pattern: str) -> list[tuple[str, Family]]:
        """Return every lock of the namespace that is held or waited for, if its name matches."""
        packet = self._context.statements("names")
        [found] = await self._context.execute(packet)
        return sorted(
            (str(name), Family(family)) for name, family in found.rows if fnmatchcase(str(name), pattern)
        )


def _holder(row: tuple[Any, ...]) -> Holder:
    label, token, since, remaining, owned, value, present = row
    holder = Holder(
        label=label,
        token=int(token),
        since=since.replace(tzinfo=UTC),
        remaining=int(remaining) / 1_000_000,
        tokens=BLOCK if int(owned) else 0,
        value=bytes(value),
    )
    return presented(holder, decode_present(present or ""))
