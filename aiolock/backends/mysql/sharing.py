"""Locks that several may be in, for all claims of one client: decisions, renewals, looking, taking away by force.

The table of bids says who is in line and who is inside, the row of the lock gives the decisions their order. Each
decision is one transaction in one packet, so a client that is stopped holds nobody up; whoever is let in by it is told
by ending the sleep of its client's listener.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from aiolock.backends.mysql.failures import NOT_NOW, code
from aiolock.backends.mysql.listener import Listener
from aiolock.backends.mysql.shared_claim import SharedClaim
from aiolock.backends.mysql.statements import quote
from aiolock.contract import (
    Bid,
    Claim,
    Family,
    Grant,
    Holder,
    LockInfo,
    News,
    Notice,
    Renewal,
    Waiting,
    certain_until,
)
from aiolock.errors import BackendUnavailable, DeadlockDetected, LockError

if TYPE_CHECKING:
    from aiolock.backends.mysql.backend import MySQLBackend

__all__ = ["Outcome", "Sharing", "judge"]

log = logging.getLogger("aiolock")

BATCH = 500
"""How many rows one statement renews."""
AGAIN = (0.001, 0.01)
"""Seconds before a decision is tried again that met another one."""
DAY, MINUTE = timedelta(days=1), timedelta(minutes=1)
FORCED = 3
NOBODY = "-"
"""The owner in decisions that are nobody's own."""


class Outcome(NamedTuple):
    """What a decision came to, for the bid of whoever took it."""

    state: int | None
    """``None``: there is no such bid."""
    token: int
    limits: tuple[int, int]
    """What the first user declared, and what counts now."""
    changed: tuple[int, ...]
    """How many rows each statement changed."""
    sent: float


class Sharing:
    """The client's part in the table of bids."""

    def __init__(self, backend: MySQLBackend) -> None:
        self.backend = backend
        self.client = backend.client
        self.listener = Listener(self)

    def claim(self, bid: Bid) -> SharedClaim:
        """A new claim, with an owner id of its own."""
        return SharedClaim(self, bid)

    @staticmethod
    def bell(client: str) -> str:
        """The user lock of the session in which a client sleeps while it waits."""
        return f"aiolock:l:{client}"

    @staticmethod
    def presence(client: str) -> str:
        """The user lock of a session whose end makes a client look after its holds."""
        return f"aiolock:c:{client}"

    # --- deciding

    async def decide(self, steps: Sequence[str], words: dict[str, Any], *, repeat: bool = True) -> Outcome:
        """Carry out the steps as one transaction, and tell whoever it let in.

        Decisions that meet on two nodes of a cluster, or in a deadlock, are undone by the server and tried again. A node does
        not always say that it has: so what came of it is read after the commit.
        With ``repeat=False``, one whose answer is lost is not.
        """
        backend = self.backend
        give_up = backend.settings.clock() + backend.settings.command_timeout
        packet = "; ".join(backend.statements(step, **words) for step in (*steps, "outcome"))
        while True:
            sent = backend.settings.clock()
            try:
                answers = await backend.ask(packet, atomic=True, repeat=repeat)
                inside, _, stand, granted = answers[-4:]
                if int(inside.rows[0][0]) and stand.rows:
                    break
            except (DeadlockDetected, BackendUnavailable) as error:
                if not isinstance(error, DeadlockDetected) and code(error.__cause__) not in NOT_NOW:
                    raise
                if backend.settings.clock() >= give_up:
                    raise BackendUnavailable(
                        f"{backend!r}: too many decisions about one lock at once"
                    ) from error
            if backend.settings.clock() >= give_up:
                raise BackendUnavailable(f"{backend!r}: too many decisions about one lock at once")
            await backend.pause(AGAIN)
        await self.tell([(str(client), str(owner)) for client, owner in granted.rows])
        state, token, declared, capacity = stand.rows[0]
        return Outcome(
            None if state is None else int(state),
            int(token or 0),
            (int(declared), int(capacity)),
            tuple(answer.changed for answer in answers),
            sent,
        )

    async def advance(self, key: str, family: str, name: str) -> None:
        """Somebody inside or in line may be over: serve who is next."""
        await self.decide(("step", "serve"), self._words(key, family, name))

    async def bury(self, owner: str, key: str, family: str, name: str) -> None:
        """A grant that nobody waits for goes to the next; one that has been confirmed in the meantime stays."""
        words = self._words(key, family, name) | {"owner": quote(owner)}
        await self.decide(("step", "bury", "serve"), words)

    async def tell(self, granted: Sequence[tuple[str, str]]) -> None:
        """Wake the clients of bids that were granted while they waited."""
        others = {client for client, _ in granted} - {self.client}
        if len(others) < len({client for client, _ in granted}):
            self.listener.heard_of([owner for client, owner in granted if client == self.client])
        await self.ring(others)

    async def ring(self, clients: set[str]) -> None:
        """End the sleep of these clients' listeners, if they sleep; nobody waits for the answers."""
        if not clients:
            return
        session = await self.backend.sessions.main()
        for client in clients:
            packet = self.backend.statements("ring", bell=quote(self.bell(client)))
            session.send(packet, self.backend.settings.command_timeout)

    # --- keeping

    async def renew(self, claims: Sequence[SharedClaim]) -> dict[Claim, Renewal]:
        """All of them in a few statements, whatever their ttl; if some are gone, another one tells which."""
        answers: dict[Claim, Renewal] = {}
        for start in range(0, len(claims), BATCH):
            batch = claims[start : start + BATCH]
            try:
                answers.update(await self._renew(batch))
            except LockError as error:
                answers.update(dict.fromkeys(batch, error))
        return answers

    async def _renew(self, batch: Sequence[SharedClaim]) -> dict[Claim, Renewal]:
        backend = self.backend
        # In the order of the rows, so that two of these do not wait for each other.
        owners = ", ".join(sorted(quote(claim.owner) for claim in batch))
        sent = backend.settings.clock()
        renewed, requests = await backend.ask(backend.statements("renew_bids", owners=owners))
        wanted = {str(owner): str(reason) for owner, reason in requests.rows}
        for claim in batch:
            self.request(claim, wanted.get(claim.owner))
        grants: dict[Claim, Renewal] = {
            claim: Grant(0, 0, certain_until(sent, claim.bid.ttl), demand=True) for claim in batch
        }
        if renewed.changed == len(batch):
            return grants
        [states] = await backend.ask(backend.statements("bids", owners=owners))
        found = {str(owner): int(state) for owner, state, _ in states.rows}
        return {claim: judge(found.get(claim.owner), grants[claim]) for claim in batch}

    def request(self, claim: Any, reason: str | None) -> None:
        """Somebody asks the holder to let go; said once for each reason."""
        if reason is not None and reason != claim.requested:
            claim.requested = reason
            self.backend.notices.put(Notice(News.REQUESTED, claim, text=reason))

    # --- what administrators ask

    def _words(self, key: str, family: str, name: str) -> dict[str, Any]:
        return {
            "id": quote(key),
            "namespace": quote(self.backend.settings.namespace),
            "family": quote(family),
            "name": quote(name),
            "owner": quote(NOBODY),
            "limit": 0,
        }

    async def inspect(self, name: str, family: Family) -> LockInfo:
        """The rows of its bids."""
        packet = self.backend.statements("inspect_bids", id=quote(self.backend.key(name, family)))
        bids, lock = await self.backend.ask(packet)
        rows = [(int(state), *rest) for state, *rest in bids.rows]
        holders = sorted((_holder(*rest) for state, *rest in rows if state), key=lambda one: one.token)
        waiters = [_waiting(*rest) for state, *rest in rows if not state]
        limit = _limit(lock.rows, used=bool(rows)) if family is Family.SEMAPHORE else None
        return LockInfo(name, tuple(holders), tuple(waiters), family, limit)

    async def force_release(self, name: str, family: Family) -> bool:
        """Take it from whoever is inside, and shake their clients, so that they learn it at once."""
        words = self._words(self.backend.key(name, family), family.value, name)
        outcome = await self.decide(("step", "force_out", "serve"), words, repeat=False)
        # START TRANSACTION, the row, what is over; then those that were kept for nobody, and those that were held.
        if not any(outcome.changed[3:5]):
            return False
        [clients] = await self.backend.ask(self.backend.statements("forced_out", id=words["id"]))
        session = await self.backend.sessions.main()
        for (client,) in clients.rows:
            if client == self.client:
                self.backend.notices.put(Notice(News.DOUBT))
            else:
                packet = self.backend.statements("shake", client=quote(self.presence(str(client))))
                session.send(packet, self.backend.settings.command_timeout)
        return True

    async def request_release(self, name: str, family: Family, reason: str) -> bool:
        """Leave a word for whoever is inside, which their renewals read."""
        packet = self.backend.statements(
            "request_bids", id=quote(self.backend.key(name, family)), reason=quote(reason)
        )
        answers = await self.backend.ask(packet)
        return bool(int(answers[-1].rows[0][0]))

    async def set_limit(self, name: str, limit: int) -> None:
        """Change the capacity, and let in whom it has room for."""
        key = self.backend.key(name, Family.SEMAPHORE)
        words = self._words(key, Family.SEMAPHORE.value, name) | {"capacity": limit}
        await self.decide(("step", "resize", "serve"), words)


def judge(state: int | None, grant: Renewal) -> Renewal:
    """What the state of a bid means for its holder, who asked for a renewal."""
    if state in (1, 2):
        return grant
    return "force-released" if state == FORCED else "revoked"


def _holder(label: str, token: int, since: datetime, remaining: int, weight: int, mode: str) -> Holder:
    permits = int(weight) if mode == "permits" else 1
    return Holder(label, int(token), since.replace(tzinfo=UTC), int(remaining) / 1_000_000, permits, mode)


def _waiting(label: str, token: int, since: datetime, remaining: int, weight: int, mode: str) -> Waiting:  # noqa: ARG001 - the columns
    return Waiting(label, mode, int(weight) if mode == "permits" else 1)


def _limit(rows: Sequence[Sequence[Any]], *, used: bool) -> int | None:
    for declared, capacity, idle in rows:
        memory = MINUTE if declared == capacity else DAY
        if capacity and (used or int(idle) < memory.total_seconds() * 1_000_000):
            return int(capacity)
    return None
