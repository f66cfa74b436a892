"""One ZooKeeper session, kept for as long as the ensemble keeps it, with a deadline before which it certainly lives.

A request is sent once, on one session, and is answered, in doubt, or not sent; nothing is repeated here. What died
with a connection (watches) is not set up again either: whoever waits is woken at every change, and looks again.
Session id and password are kept through every failure, and dropped only when a server says that they are gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

from aiozk import exc, protocol, session
from aiozk.states import States

from aiolock.backends.zookeeper import wire
from aiolock.backends.zookeeper.address import Address, Host
from aiolock.backends.zookeeper.connecting import Connection, Refused, Resolver
from aiolock.backends.zookeeper.heartbeats import Heartbeats, interval
from aiolock.backends.zookeeper.wire import NotSent, SessionChanged
from aiolock.clock import Clock
from aiolock.errors import BackendRefused

__all__ = ["Session"]

log = logging.getLogger("aiolock.zookeeper")

CLOSING = 1.0
"""Seconds that a server has to answer the request to close the session."""

PAUSE = 0.4
"""Seconds between attempts, at most: a server that is back serves again within half a second."""

Future = asyncio.Future[Any]


class Session(session.Session):  # type: ignore[misc]
    """aiozk's session with its own way to connect, to send, to beat and to close.

    ``on_change`` is called after every change: connected, suspended, lost, and when the deadline becomes certain again.
    """

    conn: Connection | None
    session_id: int | None
    last_zxid: int | None
    timeout: float
    """What was asked for, and then what the server granted."""
    password: bytes
    xid: int

    def __init__(
        self,
        address: Address,
        timeout: float,
        *,
        patience: float,
        clock: Clock,
        random: Random,
        on_change: Callable[[], None],
    ) -> None:
        super().__init__("replaced", timeout, None, False, None)  # noqa: FBT003 - aiozk's signature
        self._address = address
        self._wanted = timeout
        self._patience = patience
        """For how many seconds the callers of a first attempt wait."""
        self._clock = clock
        self._random = random
        self._resolver = Resolver(random)
        self._on_change = on_change
        self._heartbeats: Heartbeats | None = None
        self._beat_now = asyncio.Event()
        self._waiting: set[Future] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._last_error: BaseException | None = None
        self._silent: Host | None = None
        """Which server has last left a heartbeat unanswered."""
        self._unheard = False
        """Whether a server took our connection and said nothing, when all were last tried."""
        self.failure: BackendRefused | None = None
        """Why no further attempt to connect is made."""

    # --- what others see

    @property
    def connected(self) -> bool:
        """Whether requests can be sent at this moment."""
        return bool(self.state.current_state == States.CONNECTED)

    @property
    def deadline(self) -> float:
        """The last instant, on the clock, at which the session certainly lives."""
        return self._heartbeats.deadline if self._heartbeats is not None else 0.0

    @property
    def certain(self) -> bool:
        """Whether the session certainly lives at this moment."""
        return self._heartbeats is not None and self._clock() < self._heartbeats.deadline

    def ask(self, request: Any, owner: int | None = None) -> Future:
        """Send ``request`` once and return the future of its reply.

        The future fails with :class:`InDoubt` if the connection ends first, and with an error of ``aiozk.exc`` if the
        server refuses. Raises :class:`SessionChanged` if ``owner`` is not the present session, :class:`NotSent` if
        there is no connection. Cancelling the future leaves open whether the server has done it.
        """
        if owner is not None and owner != self.session_id:
            raise SessionChanged
        if self.closing or self.conn is None or not self.connected:
            raise NotSent
        return self._ask(self.conn, request)

    @contextmanager
    def asked(self, *requests: Any, owner: int | None = None) -> Iterator[list[Future]]:
        """Send several at once, to be answered in this order; what is not awaited inside is given up at the end."""
        futures: list[Future] = []
        try:
            futures.extend(self.ask(request, owner) for request in requests)
            yield futures
        finally:
            for future in futures:
                future.cancel()

    def _ask(self, conn: Connection, request: Any) -> Future:
        if conn.broken:
            # The state is told at once, so that nobody who tries again meets the same connection.
            conn.die()
            raise NotSent
        self.xid = self.xid % 0x7FFFFFF0 + 1
        future: Future = conn.send(request, xid=self.xid)
        if request.opcode == protocol.GetChildrenRequest.opcode:
            conn.opcode_xref[self.xid] = wire.Names.opcode
        return future

    def watched(self, path: str) -> bool:
        """Whether anybody here wants to be told of what happens at ``path``."""
        return any(where == path for _, where in self.watch_callbacks)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds; looked at after every change. Raises when the session is closed for good."""
        while not condition():
            if self.failure is not None:
                # One for each task: exceptions collect tracebacks, and must not be shared.
                raise BackendRefused(str(self.failure)) from self.failure.__cause__
            if self.closing:
                raise NotSent
            future: Future = asyncio.get_running_loop().create_future()
            self._waiting.add(future)
            try:
                await future
            finally:
                self._waiting.discard(future)

    async def ready(self) -> int:
        """Wait for a connection; the id of the present session."""
        if not self.connected:
            await self.until(lambda: self.connected)
        assert self.session_id is not None  # noqa: S101 - connected says so
        return self.session_id

    def why(self) -> BaseException | None:
        """The last reason for which an attempt to connect failed."""
        return self._last_error

    def _tell(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._on_change()

    def _move(self, state: str) -> None:
        if self.state.current_state != state:
            log.info("session %#x is %s", self.session_id or 0, state)
            self.state.transition_to(state)
            self._tell()

    # --- beginning and end

    async def start(self) -> None:
        """Begin to connect, and wait until there is a session. Cancelling it leaves the attempts to :meth:`close`."""
        self.started = True
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self.repair_loop(), name="aiolock-zookeeper-connect"),
            loop.create_task(self.beat_loop(), name="aiolock-zookeeper-heartbeat"),
        ]
        await self.ready()

    async def close(self) -> None:
        """End the session at the server if it can be told at once, and every task and connection here."""
        self.closing = True
        self._tell()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if (conn := self.conn) is not None:
            conn.on_dead = None
            if self.connected and not conn.dead:
                try:
                    async with asyncio.timeout(CLOSING):
                        await self._ask(conn, wire.close())
                except (exc.ZKError, TimeoutError) as error:
                    log.info("the session could not be closed, it ends by its timeout: %s", error)
            conn.die()
            await conn.closed()
        self.conn = None
        self._forget()

    # --- keeping connected

    async def repair_loop(self) -> None:
        """Whenever there is no connection, make one; until cancelled, or refused for good."""
        passes = 0
        refused_since: float | None = None
        while self.failure is None:
            if self.connected:
                await self.state.wait_for(States.SUSPENDED, States.LOST)
                passes, refused_since = 0, None
            refused = await self._try_all()
            if self.connected:
                continue
            # Servers refuse a client that has seen more than they have: an ensemble without its data, for example.
            now = self._clock()
            refused_since = None if not refused else now if refused_since is None else refused_since
            if refused_since is not None and now - refused_since > 2 * self.timeout:
                refused_since = None
                self._forget()
            elif self._unheard and self._heartbeats is not None and now > self.deadline + self.timeout:
                # Our attempts may arrive, and the answers do not: then it is these that keep a session alive which
                # has been of no use to us for long, and whose nodes others wait for.
                self._forget()
            await asyncio.sleep(min(PAUSE, 0.05 * 2 ** min(passes, 10)) * self._random.uniform(0.5, 1.0))
            passes += 1
        self._tell()

    async def _try_all(self) -> bool:
        """Try the servers in random order until one works; whether one of them refused us."""
        hosts = self._address.hosts
        limit = max(0.3, min(self.timeout / 3, self._patience) / len(hosts))
        refused = self._unheard = False
        # Whoever was silent comes last: trying it again may cost what is left of the deadline.
        for host in sorted(self._random.sample(hosts, len(hosts)), key=lambda host: host == self._silent):
            try:
                async with asyncio.timeout(limit):
                    addresses = await self._resolver.resolve(host)
            except (OSError, TimeoutError) as error:
                self._last_error = error
                continue
            for where in addresses:
                conn = Connection(host, where, self._address.tls, self._saw, self.event_dispatch)
                try:
                    if await self._attempt(conn, limit):
                        return refused
                except TimeoutError as error:
                    self._last_error = error
                    self._unheard = self._unheard or conn.writer is not None
                except Refused as error:
                    self._last_error = error
                    refused = True
                except Exception as error:  # noqa: BLE001 - whatever a stranger answers, the next one is tried
                    self._last_error = error
        return refused

    async def _attempt(self, conn: Connection, limit: float) -> bool:
        """Try one server: whether it ended with a connected session."""
        try:
            async with asyncio.timeout(limit):
                await conn.connect()
                sent = self._clock()
                reply = await conn.handshake(
                    protocol.ConnectRequest(
                        protocol_version=0,
                        last_seen_zxid=self.last_zxid or 0,
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
                self._accept(conn, reply, sent)
                await self._authenticate(conn)
        except BaseException:
            conn.die()
            raise
        if conn.dead:
            # It died before anybody was told that it lives.
            return False
        self._move(States.CONNECTED)
        self._beat_now.set()
        return True

    def _accept(self, conn: Connection, reply: Any, sent: float) -> None:
        if reply.session_id != self.session_id:
            self.session_id = reply.session_id
            self.timeout = reply.timeout / 1000
            self._heartbeats = Heartbeats(self.timeout, sent, self._address.options.tick_time)
            log.info("new session %#x, timeout %g s", self.session_id, self.timeout)
        self.password = reply.password
        self.conn = conn
        conn.on_dead = self._died
        conn.start_read_loop()

    async def _authenticate(self, conn: Connection) -> None:
        """Before anybody else speaks on this connection; a server forgets it with the connection."""
        if self._address.credentials is None:
            return
        try:
            await self._ask(conn, wire.mark(self._address.credentials))
        except exc.AuthFailed as error:
            self.failure = BackendRefused("the ensemble does not accept this user and password")
            self.failure.__cause__ = error
            raise

    def _died(self, conn: Connection) -> None:
        if conn is self.conn and self.connected:
            self._move(States.SUSPENDED)

    def _forget(self) -> None:
        """The session is gone, so the server says; the next attempt asks for a new one."""
        self.session_id, self.password, self.last_zxid = None, b"\x00", None
        self.timeout, self._heartbeats = self._wanted, None
        if self.state.current_state == States.LOST:
            self._tell()
        else:
            self._move(States.LOST)

    # --- heartbeats

    async def beat_loop(self) -> None:
        """Prove again and again that the leader knows of us; a connection that cannot is dropped."""
        beat = wire.proof if self._address.options.heartbeat == "write" else wire.sync
        while True:
            await self.until(lambda: self.connected)
            self._beat_now.clear()
            conn, heartbeats, sent = self.conn, self._heartbeats, self._clock()
            assert conn is not None  # noqa: S101 - connected says so
            assert heartbeats is not None  # noqa: S101
            try:
                # Short enough to find another server before the deadline that the last heartbeats have proved.
                async with asyncio.timeout(self.timeout / 3):
                    await self._ask(conn, beat())
            except (exc.ZKError, TimeoutError) as error:
                log.info("no heartbeat from %s:%s: %r", conn.host, conn.port, error)
                self._silent = conn.where
                conn.die()
                continue
            if heartbeats is self._heartbeats:
                now = self._clock()
                doubtful = now >= heartbeats.deadline
                if heartbeats.acknowledge(sent, now) and doubtful:
                    self._tell()
            try:
                async with asyncio.timeout(interval(self.timeout)):
                    await self._beat_now.wait()
            except TimeoutError:
                pass

    # --- what a server says unasked

    def _saw(self, zxid: int) -> None:
        if zxid > (self.last_zxid or 0):
            self.last_zxid = zxid

    def event_dispatch(self, event: Any) -> None:
        """Call whoever watches this path for this kind of event."""
        if event.type < 0:
            log.info("the server says that the connection's state is %s", event.state)
            return
        for callback in tuple(self.watch_callbacks.get((event.type, event.path), ())):
            callback(event.path)
