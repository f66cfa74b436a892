"""ZooKeeper session: state, heartbeats, requests and watches."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Awaitable, Callable
from enum import Enum
from random import Random
from typing import Any, TypeVar

from aiozk import exc
from aiozk import protocol as aiozk_protocol

from aiolock.backends.zookeeper import protocol
from aiolock.backends.zookeeper.connection import Connection, Search, Unheard
from aiolock.backends.zookeeper.errors import (
    InDoubt,
    NotSent,
    Refused,
    SessionChanged,
    tls_hint,
    translate,
    unwrap,
)
from aiolock.backends.zookeeper.protocol import WatchEvent
from aiolock.backends.zookeeper.url import Address, Host
from aiolock.clock import Clock
from aiolock.core.logs import Log, get_logger
from aiolock.core.tasks import Backoff, end, start
from aiolock.errors import BackendError, copy_of

__all__ = [
    "CHILDREN",
    "CREATED",
    "DATA",
    "DELETED",
    "Heartbeats",
    "OnEvent",
    "Session",
    "SessionState",
    "interval",
]

log: Log = get_logger("aiolock.zookeeper")

Future = asyncio.Future[Any]
T = TypeVar("T")

# --- heartbeats
#
# A follower answers for itself, and reports the sessions that sent it heartbeats to the leader only every half tick; the leader
# alone expires sessions. So an acknowledged packet proves nothing about the leader yet. The rule: on the acknowledgement
# of heartbeat k (a ``sync``, which passes through the leader), the session lives at least one session timeout from when
# the newest heartbeat was *sent* that had been acknowledged at least a relay time before k was sent. Between those two
# the follower has answered a ping of the leader's that carried the news of the earlier one, and their link is FIFO.
#
# A new session is a quorum write that happens after its ConnectRequest was sent, so its deadline counts from that time.


def interval(timeout: float) -> float:
    """Return the seconds between an acknowledgement and the next heartbeat."""
    return max(0.6, timeout / 6)


class Heartbeats:
    """Deadline arithmetic of one session, on the clock that the times of its heartbeats were read from."""

    def __init__(self, timeout: float, opened: float, tick_time: float | None = None) -> None:
        self.timeout = timeout
        self.margin = 0.2 + 0.01 * timeout
        # The shortest session timeout that a server grants by default is two ticks, so a quarter of this one is at least
        # half a tick. A whole tick, where it is known, allows for jitter between the servers as well.
        self.relay = timeout / 4 if tick_time is None else tick_time
        self.deadline = opened + timeout - self.margin
        self._acknowledged: deque[tuple[float, float]] = deque()

    def acknowledge(self, sent: float, now: float) -> bool:
        """Record that a heartbeat sent at ``sent`` was acknowledged; return whether that moved the deadline."""
        proof = -math.inf
        while self._acknowledged and self._acknowledged[0][1] <= sent - self.relay:
            proof, _ = self._acknowledged.popleft()
        self._acknowledged.append((sent, now))
        deadline = proof + self.timeout - self.margin
        moved = deadline > self.deadline
        self.deadline = max(self.deadline, deadline)
        return moved


# --- session
#
# Session id and password are kept through every failure, and dropped only when a server reports that the session is gone.
# A request is sent once, on one session, and is answered, in doubt, or not sent; nothing is repeated here. Watches die
# with their connection and are not set again here either: every change is announced, and claims read again.

PAUSES = (0.05, 0.4)
"""The first and the longest pause between attempts to connect, in seconds: a server that is back serves again within half a
second."""
CLOSING = 1.0
"""Seconds that a server has to answer the request to close the session."""

CREATED: int = aiozk_protocol.WatchEvent.CREATED
DELETED: int = aiozk_protocol.WatchEvent.DELETED
DATA: int = aiozk_protocol.WatchEvent.DATA_CHANGED
CHILDREN: int = aiozk_protocol.WatchEvent.CHILDREN_CHANGED

OnEvent = Callable[[WatchEvent], None]
Begin = Callable[[Callable[[Any], Awaitable[Any]]], Awaitable[None]]


class SessionState(Enum):
    """The state of a session as far as this process knows.

    ============= ============================================================== ==============================
    State         Event                                                          Next state
    ============= ============================================================== ==============================
    ``LOST``      a server has begun a new session                               ``CONNECTED``
    ``CONNECTED`` the connection ended                                           ``SUSPENDED``
    ``SUSPENDED`` a server has taken the session over                            ``CONNECTED``
    ``SUSPENDED`` the session has expired, or is given up because no server      ``LOST``
                  answers in it, or all refuse it
    ============= ============================================================== ==============================
    """

    CONNECTED = "connected"
    SUSPENDED = "suspended"
    LOST = "lost"


class Session:
    """One ZooKeeper session with a deadline before which it certainly lives, and its successors after it has ended.

    ``on_change``, and then each of ``listeners``, is called when the session is connected, suspended, lost, or certain
    again. ``on_begin`` is awaited in each new session, with a function that sends a request, before anything else is sent
    in it; a :class:`BackendError` from it ends all attempts.
    """

    def __init__(
        self,
        address: Address,
        timeout: float,
        *,
        command_timeout: float,
        clock: Clock,
        random: Random,
        on_change: Callable[[], None],
        on_begin: Begin | None = None,
    ) -> None:
        self._address = address
        self._asked_timeout = timeout
        self.timeout = timeout
        """The timeout to ask for, and then the one that the server granted, in seconds."""
        self._command_timeout = command_timeout
        self._clock = clock
        self._random = random
        self._on_change = on_change
        self._on_begin = on_begin
        self._begun: int | None = None
        """The session for which ``on_begin`` has ended."""
        self.state = SessionState.LOST
        self.session_id: int | None = None
        self.password = b"\x00"
        self.conn: Connection | None = None
        self.closing = False
        self.failure: BackendError | None = None
        """The reason why no further attempt to connect is made."""
        self.listeners: set[Callable[[], None]] = set()
        self.watchers: dict[str, set[OnEvent]] = {}
        """By path: the callbacks for its events."""
        self.xid = 0
        self._last_zxid = 0
        self._heartbeats: Heartbeats | None = None
        self._search = Search(address.hosts, random, self._attempt)
        self._changed = asyncio.Event()
        self._heartbeat_now = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def connected(self) -> bool:
        """True if requests can be sent now."""
        return self.state is SessionState.CONNECTED

    @property
    def deadline(self) -> float:
        """The last instant, on the clock, at which the session certainly lives."""
        return self._heartbeats.deadline if self._heartbeats is not None else 0.0

    @property
    def certain(self) -> bool:
        """True if the session certainly lives now."""
        return self._heartbeats is not None and self._clock() < self._heartbeats.deadline

    @property
    def error(self) -> BaseException | None:
        """The error of the last attempt to connect that failed."""
        return self._search.error

    @property
    def reason(self) -> str:
        """The error of the last attempt to connect that failed, in words."""
        error = self._search.error
        return "" if error is None else f"{error!r}{tls_hint(error, tls=self._address.tls is not None)}"

    # --- opening and closing

    async def start(self) -> None:
        """Start to connect, and wait until there is a session. Cancelling it leaves the attempts to :meth:`close`."""
        self._tasks = [
            start(self._connect_loop(), "aiolock-zookeeper-connect"),
            start(self._heartbeat_loop(), "aiolock-zookeeper-heartbeat"),
        ]
        await self.ready()

    async def close(self) -> None:
        """End the session at the server if it answers within a second, and every task and connection here.

        Cancelling it may leave the connection open, for another call; the session ends by its timeout at the latest.
        """
        self.closing = True
        self._announce()
        await end(self._tasks)
        if (conn := self.conn) is not None:
            conn.on_dead = None
            if self.connected and not conn.dead:
                try:
                    async with asyncio.timeout(CLOSING):
                        await conn.send(protocol.close(), self._next_xid())
                except (exc.ZKError, TimeoutError) as error:
                    log.info("the session could not be closed, it ends by its timeout: %s", error)
            conn.die()
            await conn.closed()
        self.conn = None
        self._forget()

    # --- requests

    def ask(self, request: Any, owner: int | None = None) -> Future:
        """Send ``request`` once and return the future of its reply.

        The future fails with :class:`InDoubt` if the connection ends first, and with an error of ``aiozk.exc`` if the
        server refuses. Raises :class:`SessionChanged` if ``owner`` is not the present session, :class:`NotSent` if
        there is no connection. Cancelling the future leaves open whether the server has carried it out.
        """
        return self._usable(owner).send(request, self._next_xid())

    def ask_all(self, *requests: Any, owner: int | None = None) -> Future:
        """Send requests together; return the future of a list of their replies, each of which may be an exception.

        Raises as :meth:`ask` does, and then none was sent. The future itself does not fail.
        """
        return self._usable(owner).send_all(requests, self._next_xid(len(requests)))

    async def read(self, *requests: Any, owner: int | None = None) -> list[Any]:
        """Send requests behind a ``sync``; return what the leader knew, ``None`` where there is no such node.

        Cancelling it changes nothing.
        """
        synced, *replies = await self.ask_all(protocol.sync(), *requests, owner=owner)
        unwrap(synced)
        return [None if isinstance(reply, exc.NoNode) else unwrap(reply) for reply in replies]

    async def persist(self, work: Callable[[], Awaitable[T]]) -> T:
        """Await ``work()`` in the present session, and again after a lost reply; it only reads. Cancelling it is cancelling ``work()``."""
        while True:
            await self.ready()
            try:
                return await work()
            except (InDoubt, NotSent, SessionChanged):
                if self.closing:
                    raise

    def _usable(self, owner: int | None) -> Connection:
        if owner is not None and owner != self.session_id:
            raise SessionChanged
        conn = self.conn
        if self.closing or conn is None or not self.connected:
            raise NotSent
        if conn.broken:
            # The state changes now, so that a caller who tries again does not meet the same connection.
            conn.die()
            raise NotSent
        return conn

    def _next_xid(self, count: int = 1) -> int:
        if self.xid > 0x7FFF0000:
            self.xid = 0
        self.xid += count
        return self.xid - count + 1

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds; tested after every change. Raises if the session is closed for good.

        Cancelling it ends the wait only.
        """
        while not condition():
            if self.failure is not None:
                raise copy_of(self.failure)
            if self.closing:
                raise NotSent
            await self._changed.wait()

    async def ready(self) -> int:
        """Wait for a connection, as :meth:`until` does; return the id of the present session.

        Cancelling it ends the wait only.
        """
        if not self.connected:
            await self.until(lambda: self.connected)
        assert self.session_id is not None  # noqa: S101 - connected implies it
        return self.session_id

    # --- what the server announces

    def _received_event(self, event: WatchEvent) -> None:
        # An event of the connection has no path.
        for callback in tuple(self.watchers.get(event.path, ())):
            callback(event)

    def _received_zxid(self, zxid: int) -> None:
        self._last_zxid = max(self._last_zxid, zxid)

    # --- state

    def _announce(self) -> None:
        self._changed.set()
        self._changed.clear()
        self._on_change()
        for listener in tuple(self.listeners):
            listener()

    def _become(self, state: SessionState, session_id: int | None = None) -> None:
        """Change the state of the session, the present one if none is named; all transitions pass through here."""
        if self.state is not state:
            log.debug("session %#x is %s", session_id or self.session_id or 0, state.value)
            self.state = state
            self._announce()

    def _died(self, conn: Connection) -> None:
        if conn is self.conn and self.connected:
            self._become(SessionState.SUSPENDED)

    def _forget(self) -> None:
        """Give the session up; the next attempt asks for a new one."""
        before = self.session_id
        self.session_id, self.password, self._last_zxid = None, b"\x00", 0
        self.timeout, self._heartbeats = self._asked_timeout, None
        if self.state is SessionState.LOST:
            self._announce()
        else:
            self._become(SessionState.LOST, before)

    # --- connecting

    async def _connect_loop(self) -> None:
        """Connect whenever there is no connection; until cancelled, or refused for good."""
        backoff = Backoff(self._random, *PAUSES)
        refused_since: float | None = None
        while self.failure is None:
            if self.connected:
                await self.until(lambda: not self.connected)
                backoff.reset()
                refused_since = None
            await self._search.once(min(self.timeout / 3, self._command_timeout))
            if self.connected:
                continue
            search, now = self._search, self._clock()
            # Servers refuse a client that has seen more than they have: an ensemble without its data, for example.
            refused_since = (refused_since or now) if search.met(Refused) else None
            refused = refused_since is not None and now - refused_since > 2 * self.timeout
            # The attempts may arrive and the replies do not: then the attempts keep a session alive that has long been of
            # no use here, and whose nodes others wait for.
            unheard = search.met(Unheard) and self._heartbeats and now > self.deadline + self.timeout
            if refused or unheard:
                refused_since = None
                self._forget()
            await backoff.pause()
        self._announce()

    async def _attempt(self, host: Host, addresses: list[str], limit: float) -> bool:
        among = addresses.copy()
        # If none of them answers, none is left.
        addresses.clear()
        conn = Connection(host, among[0], self._address.tls, self._received_zxid, self._received_event)
        try:
            async with asyncio.timeout(limit):
                await conn.connect(among)
                addresses += [address for address in among if address != conn.host]
                sent = self._clock()
                reply = await conn.handshake(
                    aiozk_protocol.ConnectRequest(
                        protocol_version=0,
                        last_seen_zxid=self._last_zxid,
                        timeout=round(self.timeout * 1000),
                        session_id=self.session_id or 0,
                        password=self.password,
                        read_only=False,
                    )
                )
                if reply.session_id == 0:
                    conn.die()
                    self._forget()
                    return False
                await self._begin(conn, reply, sent)
        except TimeoutError as error:
            conn.die()
            raise error if conn.transport is None else Unheard(f"{host} did not answer in time") from error
        except BaseException:
            conn.die()
            raise
        if conn.dead:
            # It died before the session was announced as connected.
            return False
        self._become(SessionState.CONNECTED)
        self._heartbeat_now.set()
        return True

    async def _begin(self, conn: Connection, reply: Any, sent: float) -> None:
        """Take the session over, and send what has to come before any other request."""
        if reply.session_id != self.session_id:
            self.session_id = reply.session_id
            self.timeout = reply.timeout / 1000
            self._heartbeats = Heartbeats(self.timeout, sent, self._address.options.tick_time)
            log.debug("new session %#x, timeout %g s", self.session_id, self.timeout)
        self.password = reply.password
        self.conn = conn
        conn.on_dead = self._died
        try:
            if self._address.credentials is not None:
                # The server forgets the user with the connection.
                await conn.send(protocol.login(self._address.credentials), self._next_xid())
            if self._on_begin is not None and self._begun != self.session_id:
                await self._on_begin(lambda request: conn.send(request, self._next_xid()))
                self._begun = self.session_id
        except BackendError as error:
            self._fail(error)
            raise
        except exc.AuthFailed as error:
            refusal = translate(error)
            refusal.__cause__ = error
            self._fail(refusal)
            raise

    def _fail(self, error: BackendError) -> None:
        self.failure = error
        self._announce()

    # --- heartbeat

    async def _heartbeat_loop(self) -> None:
        """Prove again and again that the leader knows the session; abort a connection that cannot."""
        heartbeat = protocol.proof if self._address.options.heartbeat == "write" else protocol.sync
        while True:
            await self.until(lambda: self.connected)
            self._heartbeat_now.clear()
            conn, heartbeats, sent = self.conn, self._heartbeats, self._clock()
            assert conn is not None  # noqa: S101 - connected implies both
            assert heartbeats is not None  # noqa: S101
            try:
                # Short enough to find another server before the deadline that the last heartbeats have proved.
                async with asyncio.timeout(self.timeout / 3):
                    await conn.send(heartbeat(), self._next_xid())
            except (exc.ZKError, TimeoutError) as error:
                log.info("no heartbeat from %s:%s: %r", conn.host, conn.port, error)
                self._search.silent = conn.where
                conn.die()
                continue
            if heartbeats is self._heartbeats:
                now = self._clock()
                doubtful = now >= heartbeats.deadline
                if heartbeats.acknowledge(sent, now) and doubtful:
                    self._announce()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval(self.timeout)):
                    await self._heartbeat_now.wait()
