"""The listener session, and the blocking statement that notifications end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from itertools import islice

from aiolock.backends.mysql.connection import MySQLSession
from aiolock.backends.mysql.context import RETRY, Context, quote
from aiolock.backends.mysql.errors import INTERRUPTED, code
from aiolock.backends.mysql.protocol import Result
from aiolock.backends.mysql.renewal import BATCH, FRESH, RowClaim
from aiolock.core.backend import Grant, confirmation_window
from aiolock.core.inbox import Inbox, WakeReason
from aiolock.errors import BackendError, BackendRefused, LockError

__all__ = ["Listener", "ListeningClaim", "Sleep", "Watch", "interrupted", "run_until_done"]


class ListeningClaim(RowClaim):
    """A claim that the listener wakes by its owner id: when it is granted, or when its row is gone."""

    __slots__ = ("block", "context", "key", "owner", "requested")

    context: Context
    block: int
    """The number of tokens of a grant."""

    @property
    def row(self) -> str:
        """The key of the row of the request."""
        return self.owner

    def granted(self, token: int, sent: float) -> Grant:
        """Return the grant of a hold that the server has had for a full ttl since ``sent`` or later."""
        return self.context.granted(self, token, self.block, sent)


class Watch:
    """A watch on a register: the listener wakes it when the register has another version than it knows."""

    def __init__(self, name: str, key: str, owner: str) -> None:
        self.key = key
        self.owner = owner
        self.version = ""
        """The version that its client knows; empty if the register is absent."""
        self.inbox: Inbox[None] = Inbox(name)


def presence(client: str) -> str:
    """Return the user lock of a session whose end makes a client verify its holds."""
    return f"aiolock:c:{client}"


# --- the blocking statement
# The listener waits for a user lock, the sleep lock, that the client's main session has and does not give back; another client
# wakes it by ending that statement with KILL QUERY, and finds its session by another user lock, the wake lock.


class Sleep:
    """The blocking statement of the listener, which other clients can end."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.asleep = False
        """There is a sleep that can be ended."""
        self._findable: MySQLSession | None = None
        self._sleep_lock_at: MySQLSession | None = None
        """The sessions that have the wake lock and the sleep lock."""

    @property
    def _sleep_lock(self) -> str:
        return quote(f"aiolock:s:{self._context.client}")

    @staticmethod
    def wake_lock(client: str) -> str:
        """Return the user lock of the session in which a client sleeps while it waits."""
        return f"aiolock:l:{client}"

    async def prepare(self, session: MySQLSession) -> None:
        """Take the wake lock, so that other clients can end the sleep, and the sleep lock, so that it blocks.

        Cancelling it leaves open which of them the server gives; another call takes again what was not answered.
        """
        context = self._context
        if self._findable is not session:
            packet = context.statements("take_wake_lock", wake_lock=quote(self.wake_lock(context.client)))
            [answer] = await run_until_done(session, packet)
            # The server may not have noticed yet that an earlier session of this client has ended.
            self._findable = session if answer.rows[0][0] else None
        main = await context.sessions.main()
        if self._sleep_lock_at is not main:
            await context.within(
                context.execute(context.statements("take_sleep_lock", sleep_lock=self._sleep_lock), main)
            )
            self._sleep_lock_at = main

    async def sleep(self, session: MySQLSession, timeout: float, changed: str) -> bool:
        """Sleep until there may be news, for ``timeout`` seconds at most; return whether the sleep was not ended by another client.

        ``changed`` is the condition that a watched register has changed. Cancelling it does not end the statement at the
        server, which may sleep on for the rest of ``timeout``.
        """
        context = self._context
        packet = context.statements(
            "listen",
            client=quote(context.client),
            timeout=round(timeout, 6),
            changed=changed,
            sleep_lock=self._sleep_lock,
        )
        self.asleep = True
        try:
            [answer] = await session.run(packet, blocks=True, limit=timeout + context.timeout)
        except BackendError as error:
            if not interrupted(session, error):
                raise
            return False
        finally:
            self.asleep = False
        [[came]] = answer.rows
        if came:
            # The main session that had it is gone; the next one takes it.
            self._sleep_lock_at = None
            await run_until_done(
                session, context.statements("release_sleep_lock", sleep_lock=self._sleep_lock)
            )
            await self.prepare(session)
        # MariaDB has no error for GET_LOCK when it is ended, but no answer either.
        return came is not None


async def run_until_done(session: MySQLSession, statement: str) -> list[Result]:
    """Have a statement carried out that may be repeated, also if KILL QUERY ends it that was meant for the sleep.

    Cancelling it is cancelling :meth:`MySQLSession.run`.
    """
    while True:
        try:
            return await session.run(statement)
        except BackendError as error:
            if not interrupted(session, error):
                raise


def interrupted(session: MySQLSession, error: BackendError) -> bool:
    """Return whether the statement was ended, and nothing else is wrong."""
    return session.alive and code(error.__cause__) in INTERRUPTED


# --- the listener


SHORTEST_LIFE = 3.0
"""Seconds that a position lives at least without being prolonged; `sharing.sql` says the same."""
LONGEST = 1.0
"""Most seconds between polls."""
GRANTED, HELD, WAITING = 1, 2, (0, 5)
"""The states of a grant, of a confirmed hold, and of positions and watches."""
ACROSS = 0.2
"""Most seconds between polls where a grant may come from another node of a cluster, which cannot wake this client."""
SHARE = 0.25
"""For how many seconds all wait for a decision about the lock of one of them."""
SOON = (0.003, 0.01)
"""The range of a pause, in seconds, while the row of a grant is locked, as every decision locks it for a moment."""
NEVER = (0.0, 0.0)


class Listener:
    """Wakes claims and watches of one client; runs while there are any."""

    def __init__(
        self,
        context: Context,
        advance: Callable[[str, str, str], Coroutine[None, None, None]],
        reclaim: Callable[[str, str, str, str], Coroutine[None, None, None]],
    ) -> None:
        """Take the two functions that decide: about a lock of which a hold is over (key, family, name), and about a grant
        without a claim (owner, key, family, name)."""
        self._context = context
        self._advance, self._reclaim = advance, reclaim
        self._claims: dict[str, ListeningClaim] = {}
        self._queues: dict[str, dict[str, ListeningClaim]] = {}
        """The claims by lock, in the order in which they came."""
        self._watches: dict[str, Watch] = {}
        self._doubts: set[str] = set()
        """Owners that may have been let in by a decision that had no answer."""
        self._sleep = Sleep(context)
        self._running = False
        self._searched = 0.0
        """When it last searched for holds that are over."""
        self._interval = LONGEST
        self._prolonged = 0.0
        self._pause = NEVER
        """Seconds to wait before the next poll, because a row that it is about is locked."""
        self._deciding: set[str] = set()
        """Locks about which a decision of the listener's is under way."""

    # --- claims and watches

    def add(self, claim: ListeningClaim) -> None:
        """Wake this claim when it is granted, or has lost its position."""
        self._claims[claim.owner] = claim
        self._queues.setdefault(claim.key, {})[claim.owner] = claim
        self._run(confirmation_window(claim.request.ttl) / 3)

    def discard(self, claim: ListeningClaim) -> None:
        """Forget a claim."""
        if self._claims.pop(claim.owner, None) is not None:
            queue = self._queues[claim.key]
            del queue[claim.owner]
            if not queue:
                del self._queues[claim.key]
        self._end_idle_sleep()

    def first(self, key: str, most: int) -> dict[str, ListeningClaim]:
        """Return the first claims that wait for this lock, by owner."""
        return dict(islice(self._queues.get(key, {}).items(), most))

    def hand(self, claim: ListeningClaim, grant: Grant) -> None:
        """Give a claim its grant, if it still waits."""
        if claim.owner in self._claims:
            self.discard(claim)
            claim.inbox.put(grant)

    def doubt(self, owners: Iterable[str]) -> None:
        """Find out whether these owners were let in."""
        self._doubts.update(owner for owner in owners if owner in self._claims)
        if self._doubts:
            self.end_sleep()

    def doubt_all(self) -> None:
        """Find out which of all waiting claims were let in."""
        self.doubt(list(self._claims))

    def end_sleep(self) -> None:
        """End the sleep: there may be news."""
        if self._sleep.asleep:
            self._wake_self()

    def watch(self, watch: Watch) -> None:
        """Wake this watch when its register has another version than it knows."""
        self._watches[watch.owner] = watch
        self._run(LONGEST)

    def forget(self, watch: Watch) -> None:
        """End a watch."""
        self._watches.pop(watch.owner, None)
        self._end_idle_sleep()

    def _end_idle_sleep(self) -> None:
        """End the sleep if there is no claim or watch left."""
        if not self._claims and not self._watches:
            self.end_sleep()

    def _wake_self(self) -> None:
        self._context.sessions.tasks.spawn(self.wake({self._context.client}), "aiolock-mysql-wake")

    async def wake(self, clients: Iterable[str]) -> None:
        """End the sleep of these clients' listeners, if they sleep; the answers are not waited for.

        Cancelling it sends nothing; an opening of the main session goes on.
        """
        session = await self._context.sessions.main()
        for client in clients:
            session.send(self._context.statements("wake", wake_lock=quote(self._sleep.wake_lock(client))))

    # --- sleeping

    def _run(self, timeout: float) -> None:
        context = self._context
        timeout = min(timeout, ACROSS if context.facts.across else LONGEST)
        if not self._running:
            self._running = True
            self._interval = timeout
            self._prolonged = context.clock()
            context.sessions.tasks.spawn(self._serve(), "aiolock-mysql-listen")
        elif timeout < self._interval:
            # It sleeps for longer than this one may wait.
            self._interval = timeout
            self.end_sleep()

    async def _serve(self) -> None:
        context = self._context
        try:
            while self._claims or self._watches:
                try:
                    await self._turn()
                except BackendRefused as error:
                    # The table was dropped, for example. All ask again, and meet the same error.
                    waiting: list[ListeningClaim | Watch] = [*self._claims.values(), *self._watches.values()]
                    for one in waiting:
                        one.inbox.wake(WakeReason.FAILED, error)
                    await context.pause(RETRY)
                except LockError:
                    # The server cannot be asked, or KILL QUERY hit a statement other than the sleep.
                    await context.pause(RETRY)
        finally:
            self._running = False

    async def _turn(self) -> None:
        context = self._context
        try:
            session = await context.sessions.listener()
        except BackendError:
            # No more connections are to be had: poll on the one there is.
            await self._poll(await context.sessions.main())
            await context.pause(RETRY)
            return
        await self._sleep.prepare(session)
        while self._claims or self._watches:
            try:
                searches = not self._doubts and await self._sleep.sleep(
                    session, self._interval, self._change_condition()
                )
                await self._poll(session, searches=searches)
                if self._pause != NEVER:
                    # There is no sleep while a grant is not confirmed, or something is over and still there.
                    pause, self._pause = self._pause, NEVER
                    await context.pause(pause)
            except BackendError as error:
                if not interrupted(session, error):
                    raise

    def _change_condition(self) -> str:
        """Return the condition that a watched register has changed."""
        known = [
            f"(id = {quote(watch.key)} AND version <> {int(watch.version or 0)})"
            for watch in self._watches.values()
        ]
        return " OR ".join(known) or "FALSE"

    # --- polling

    async def _poll(self, session: MySQLSession, *, searches: bool = True) -> None:
        """Search for grants, ended holds and changed registers, and act on them. Ended holds are searched for if it ``searches``, and when that was long ago."""
        context = self._context
        await self._prolong(session)
        client = quote(self._context.client)
        [granted] = await session.run(context.statements("granted", client=client))
        taken = await self._take(session, {str(owner) for owner, *_ in granted.rows})
        for owner, key, family, name in granted.rows:
            if owner not in taken:
                # Its request arrived after it was given up: no claim will ask for it.
                reclaiming = self._reclaim(str(owner), str(key), str(family), str(name))
                await self._decide(str(key), reclaiming)
        now = context.clock()
        if searches or now - self._searched >= self._interval:
            self._searched = now
            [over] = await session.run(context.statements("ended", client=client))
            for lock in over.rows:
                values = tuple(map(str, lock))
                await self._decide(values[0], self._advance(*values))
        for watch in await self._changed(session):
            self.forget(watch)
            watch.inbox.wake(WakeReason.NOTIFIED)

    async def _decide(self, key: str, deciding: Coroutine[None, None, None]) -> None:
        """Make a decision about a lock, and wait for it only shortly: one of its rows may be locked."""
        if key in self._deciding:
            deciding.close()
        else:
            task = self._context.sessions.tasks.spawn(deciding, "aiolock-mysql-advance")
            self._deciding.add(key)
            task.add_done_callback(lambda _: self._deciding.discard(key))
            if (await asyncio.wait([task], timeout=SHARE))[0]:
                # Raises what it raised.
                task.result()
                return
        self._pause = RETRY

    async def _changed(self, session: MySQLSession) -> list[Watch]:
        """Return the watches whose registers have another version than they know."""
        if not self._watches:
            return []
        context = self._context
        watched = ", ".join({quote(watch.key) for watch in self._watches.values()})
        packet = context.statements("register_versions", watched=watched)
        [registers] = await session.run(packet)
        versions = {str(key): str(version) for key, version in registers.rows}
        return [one for one in self._watches.values() if versions.get(one.key, "") != one.version]

    async def _take(self, session: MySQLSession, granted: set[str]) -> set[str]:
        """Confirm grants, and possible ones, for the claims that wait for them; return the owners of these."""
        context = self._context
        clock = context.clock
        doubts, self._doubts = self._doubts, set()
        mine = sorted(owner for owner in granted | doubts if owner in self._claims)
        try:
            for start in range(0, len(mine), BATCH):
                batch = mine[start : start + BATCH]
                values = ", ".join(map(quote, batch))
                packet = context.statements("confirm_grants", owners=values, count=len(batch))
                await run_until_done(session, packet)
                asked = clock()
                [answer] = await run_until_done(session, context.statements("requests", owners=values))
                stand = {str(owner): tuple(map(int, row)) for owner, *row in answer.rows}
                for owner in batch:
                    state, token, left = stand.get(owner, (None, 0, 0))
                    if (claim := self._claims.get(owner)) is None:
                        continue
                    if state == HELD:
                        # An earlier statement may have confirmed it: the rest of its life says when that was.
                        sent = asked - (claim.request.ttl - left / 1_000_000)
                        self.hand(claim, claim.granted(token, sent))
                    elif state == GRANTED:
                        # It is locked at this moment.
                        self._pause = max(self._pause, SOON)
                    elif state not in WAITING:
                        # It was taken away before it was known here, or is over.
                        claim.inbox.wake(WakeReason.LAPSED)
        except BaseException:
            # Some may be confirmed, and no poll would find them again.
            self.doubt(mine)
            raise
        return set(mine)

    async def _prolong(self, session: MySQLSession) -> None:
        """Prolong positions and watches in time; a claim without one asks again."""
        context = self._context
        waiting: dict[str, ListeningClaim | Watch] = {**self._claims, **self._watches}
        life = max(SHORTEST_LIFE, min((claim.request.ttl for claim in self._claims.values()), default=0.0))
        now = context.clock()
        if now - self._prolonged < life / 3:
            return
        self._prolonged = now
        owners = sorted(waiting)
        for start in range(0, len(owners), BATCH):
            batch = owners[start : start + BATCH]
            values = ", ".join(map(quote, batch))
            packet = context.statements("prolong", owners=values, count=len(batch))
            await run_until_done(session, packet)
            [answer] = await run_until_done(session, context.statements("requests", owners=values))
            found = {str(owner): int(left) for owner, state, _, left in answer.rows if int(state) in WAITING}
            for owner, left in found.items():
                claim = self._claims.get(owner)
                if claim is not None and left < FRESH * max(SHORTEST_LIFE, claim.request.ttl) * 1_000_000:
                    # It is locked at this moment: at the next poll again.
                    self._prolonged = 0.0
            for owner in set(batch) - found.keys():
                waiting[owner].inbox.wake(WakeReason.LAPSED)
