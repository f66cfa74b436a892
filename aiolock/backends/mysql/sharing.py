"""Locks that several may be in, for all claims of one client: decisions, renewals, looking, taking away by force.

The table of bids says who is in line and who is inside, the row of the lock gives the decisions their order. Each
decision is one transaction in one packet, so a client that is stopped holds nobody up; whoever is let in by it is told
by ending the sleep of its client's listener.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from aiolock.backends.mysql.decision import Outcome, Transaction, carried_out
from aiolock.backends.mysql.desk import Desk, Wish
from aiolock.backends.mysql.driver import Result
from aiolock.backends.mysql.listener import Listener
from aiolock.backends.mysql.shared_claim import SharedClaim
from aiolock.backends.mysql.statements import hexed, quote
from aiolock.backends.mysql.stragglers import Stragglers, prolonged
from aiolock.contract import (
    NEVER,
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
from aiolock.errors import LockError
from aiolock.logs import Log, get_logger

if TYPE_CHECKING:
    from aiolock.backends.mysql.backend import MySQLBackend

__all__ = ["Sharing", "judge"]

log: Log = get_logger("aiolock")

BATCH = 500
"""How many rows one statement renews."""
SOON = ((0.003, 0.01), (0.01, 0.02))
"""Seconds before rows are asked for again that were passed over: decisions take a few milliseconds."""
DAY, MINUTE = timedelta(days=1), timedelta(minutes=1)
GRANTED, HELD, FORCED = 1, 2, 3
"""States of bids; `sharing.sql` has the list."""
NAMED = 64
"""So many of ours who wait are let in like whoever asks: they are those who came first, and nobody else is likely to be next."""
NOBODY = "-"
"""An owner that is nobody's."""


class Sharing:
    """The client's part in the table of bids."""

    def __init__(self, backend: MySQLBackend) -> None:
        self.backend = backend
        self.client = backend.client
        self.listener = Listener(self)
        self.stragglers = Stragglers(backend)
        self.desks: dict[str, Desk] = {}
        """Where requests wait for the decision that takes them, by the lock that they are about."""

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

    @staticmethod
    def bed(client: str) -> str:
        """The user lock that a client's listener waits for while it sleeps."""
        return f"aiolock:s:{client}"

    # --- deciding

    async def ask(self, claim: SharedClaim, wish: Wish) -> Outcome:
        """Have a wish carried out by a decision, together with others about the same lock."""
        return await (self.desks.get(claim.key) or Desk(self, claim.key)).ask(claim, wish)

    async def decide(self, key: str, what: Transaction, *, repeat: bool = True) -> Outcome:
        """Carry out one transaction, and tell whoever it let in.

        With ``repeat=False``, one whose answer is lost is not tried again.

        Those of ours who are first in line are let in by it like whoever asks, and hear of it by its answer. If it has none,
        or nobody waits for it any more, the listener finds out.
        """
        waiting = self.listener.first(key, NAMED)
        ours = dict.fromkeys((*what.asking, *waiting))
        words = what.words | {
            "client": quote(self.client),
            "ours": _listed(ours),
            "asking": _listed(what.asking),
        }
        packet = "; ".join(
            self.backend.statements(step, **words)
            for step in ("step", *what.wants, "serve", *what.after, "outcome")
        )
        try:
            answers, sent, again = await carried_out(self.backend, packet, key, repeat=repeat)
        except BaseException:
            self.listener.doubt(waiting)
            raise
        rows = answers[-1].rows
        stand = {str(owner): (int(state), int(token)) for _, _, owner, _, state, token, _ in rows if owner}
        for _, _, owner, _, state, token, new in rows:
            if state == HELD and owner in waiting and owner not in what.asking:
                if new:
                    self.listener.hand(waiting[owner], waiting[owner].granted(int(token), sent))
                else:
                    # Since when is not known here.
                    self.listener.doubt([owner])
        await self.tell(
            {str(client) for *_, client, state, _, new in rows if state == GRANTED and (new or again)}
        )
        declared, capacity = rows[0][:2]
        return Outcome(
            stand,
            (int(declared), int(capacity)),
            tuple(answer.changed for answer in answers),
            sent,
            None if again else _inside(what, answers),
        )

    async def advance(self, key: str, family: str, name: str) -> None:
        """Somebody inside or in line may be over: serve who is next."""
        await self.decide(key, Transaction([], [], self._words(key, family, name), []))

    async def bury(self, owner: str, key: str, family: str, name: str) -> None:
        """A grant that nobody waits for goes to the next; one that has been confirmed in the meantime stays."""
        words = self._words(key, family, name) | {"owner": quote(owner)}
        await self.decide(key, Transaction(["bury"], [], words, []))

    async def tell(self, granted: set[str]) -> None:
        """Wake the clients of bids that were granted while they waited."""
        if self.client in granted:
            self.listener.look()
        await self.ring(granted - {self.client})

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
        """All of them in a few statements, whatever their ttl; if some are gone, another one tells which.

        Rows that somebody else has locked are passed over: for a moment by every decision about their lock, so those are asked
        for again in a moment, and after that apart from the others, which wait for nobody.
        """
        answers: dict[Claim, Renewal] = await self._verify([claim for claim in claims if claim.fixed])
        claims = [claim for claim in claims if not claim.fixed]
        apart = [claim for claim in claims if claim in self.stragglers]
        others = [claim for claim in claims if claim not in self.stragglers]
        for start in range(0, len(others), BATCH):
            batch: Sequence[SharedClaim] = others[start : start + BATCH]
            for pause in (*SOON, None):
                try:
                    found = await self._renew(batch)
                except LockError as error:
                    found = dict.fromkeys(batch, error)
                answers.update({claim: answer for claim, answer in found.items() if answer is not None})
                batch = [claim for claim, answer in found.items() if answer is None]
                if not batch:
                    break
                if pause is not None:
                    await self.backend.pause(pause)
            apart += batch
        if apart:
            statements = self.backend.statements
            packets: dict[Claim, str] = {
                claim: statements("renew_bid", owner=quote(claim.owner)) for claim in apart
            }
            answers.update(await self.stragglers.ask(packets))
        return answers

    async def _verify(self, claims: Sequence[SharedClaim]) -> dict[Claim, Renewal]:
        """The holds that are not to be prolonged."""
        answers: dict[Claim, Renewal] = {}
        for start in range(0, len(claims), BATCH):
            batch = claims[start : start + BATCH]
            packet = self.backend.statements(
                "verify_bids", owners=", ".join(quote(claim.owner) for claim in batch)
            )
            try:
                rows, requests = await self.backend.ask(packet, urgent=True)
            except LockError as error:
                answers.update(dict.fromkeys(batch, error))
                continue
            states = {str(owner): int(state) for owner, state, _ in rows.rows}
            wanted = {str(owner): str(reason) for owner, reason in requests.rows}
            for claim in batch:
                self.request(claim, wanted.get(claim.owner))
                answer = judge(states.get(claim.owner), Grant(0, 0, NEVER, demand=True))
                assert answer is not None  # noqa: S101 - nothing was passed over
                answers[claim] = answer
        return answers

    async def _renew(self, batch: Sequence[SharedClaim]) -> dict[SharedClaim, Renewal | None]:
        """``None`` for those that were passed over."""
        clock = self.backend.settings.clock
        # In the order of the rows, so that two of these do not wait for each other.
        words = {"owners": ", ".join(sorted(quote(claim.owner) for claim in batch)), "count": len(batch)}
        sent = clock()
        if await self._ask_to_renew(batch, words) == len(batch):
            return {claim: Grant(0, 0, certain_until(sent, claim.bid.ttl), demand=True) for claim in batch}
        sent = clock()
        [rows] = await self.backend.ask(self.backend.statements("renewed_bids", **words), urgent=True)
        stand = {str(owner): (int(state), int(left)) for owner, state, left in rows.rows}
        found: dict[SharedClaim, Renewal | None] = {}
        for claim in batch:
            state, left = stand.get(claim.owner, (None, 0))
            found[claim] = judge(state, prolonged(left, claim.bid.ttl, sent))
        return found

    async def _ask_to_renew(self, batch: Sequence[SharedClaim], words: dict[str, Any]) -> int:
        packet = self.backend.statements("renew_bids", **words)
        renewed, requests = await self.backend.ask(packet, urgent=True)
        wanted = {str(owner): str(reason) for owner, reason in requests.rows}
        for claim in batch:
            self.request(claim, wanted.get(claim.owner))
        return renewed.changed

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
            "name": hexed(name),
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
        key = self.backend.key(name, family)
        words = self._words(key, family.value, name)
        outcome = await self.decide(key, Transaction(["force_out"], [], words, []), repeat=False)
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
            "request_bids", id=quote(self.backend.key(name, family)), reason=hexed(reason)
        )
        answers = await self.backend.ask(packet)
        return bool(int(answers[-1].rows[0][0]))

    async def set_limit(self, name: str, limit: int) -> None:
        """Change the capacity, and let in whom it has room for."""
        key = self.backend.key(name, Family.SEMAPHORE)
        words = self._words(key, Family.SEMAPHORE.value, name) | {"capacity": limit}
        await self.decide(key, Transaction(["resize"], [], words, []))


def _inside(what: Transaction, answers: Sequence[Result]) -> frozenset[str]:
    """Who was inside of those who left."""
    if "depart" not in what.wants:
        return frozenset()
    # After the three statements of `step`, and one for each want before it.
    rows = answers[3 + list(what.wants).index("depart")].rows
    return frozenset(str(owner) for (owner,) in rows)


def _listed(owners: Iterable[str]) -> str:
    return ", ".join(map(quote, owners)) or quote(NOBODY)


def judge(state: int | None, grant: Renewal | None) -> Renewal | None:
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
