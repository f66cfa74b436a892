"""One ZooKeeper session, kept for as long as the ensemble keeps it, with a deadline before which it certainly lives.

Session id and password are kept through every failure, and dropped only when a server says that they are gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

from aiozk import exc, protocol
from aiozk.states import States

from aiolock.backends.zookeeper import wire
from aiolock.backends.zookeeper.address import Address, Host
from aiolock.backends.zookeeper.asking import Asking
from aiolock.backends.zookeeper.connecting import Connection
from aiolock.backends.zookeeper.heartbeats import Heartbeats, interval
from aiolock.backends.zookeeper.searching import Search, Unheard
from aiolock.clock import Clock
from aiolock.errors import BackendError, BackendRefused
from aiolock.logs import Log, get_logger
from aiolock.tasks import start

__all__ = ["Session"]

log: Log = get_logger("aiolock.zookeeper")

CLOSING = 1.0
"""Seconds that a server has to answer the request to close the session."""

Begin = Callable[[Callable[[Any], Awaitable[Any]]], Awaitable[None]]

PAUSE = 0.4
"""Seconds between attempts, at most: a server that is back serves again within half a second."""


class Session(Asking):
    """aiozk's session with its own way to connect, to beat and to close.

    ``on_change`` is called after every change: connected, suspended, lost, and when the deadline becomes certain again.
    ``on_begin`` is awaited in each new session, with a function that sends a request, before anything else is sent in that
    session; a :class:`BackendError` from it is the end of all attempts.
    """

    def __init__(
        self,
        address: Address,
        timeout: float,
        *,
        patience: float,
        clock: Clock,
        random: Random,
        on_change: Callable[[], None],
        on_begin: Begin | None = None,
    ) -> None:
        super().__init__(timeout, clock, on_change)
        self._address = address
        self._wanted = timeout
        self._patience = patience
        """For how many seconds the callers of a first attempt wait."""
        self._random = random
        self._on_begin = on_begin
        self._begun: int | None = None
        """The session for which ``on_begin`` has ended."""
        self._search = Search(address.hosts, random, self._attempt)
        self._beat_now = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def why(self) -> BaseException | None:
        """The last reason for which an attempt to connect failed."""
        return self._search.error

    # --- beginning and end

    async def start(self) -> None:
        """Begin to connect, and wait until there is a session. Cancelling it leaves the attempts to :meth:`close`."""
        self.started = True
        self._tasks = [
            start(self.repair_loop(), "aiolock-zookeeper-connect"),
            start(self.beat_loop(), "aiolock-zookeeper-heartbeat"),
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
                        await conn.send(wire.close(), self._number())
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
            await self._search.once(min(self.timeout / 3, self._patience))
            if self.connected:
                continue
            refused = self._search.refused
            # Servers refuse a client that has seen more than they have: an ensemble without its data, for example.
            now = self._clock()
            refused_since = None if not refused else now if refused_since is None else refused_since
            if refused_since is not None and now - refused_since > 2 * self.timeout:
                refused_since = None
                self._forget()
            elif self._search.unheard and self._heartbeats is not None and now > self.deadline + self.timeout:
                # Our attempts may arrive, and the answers do not: then it is these that keep a session alive which
                # has been of no use to us for long, and whose nodes others wait for.
                self._forget()
            await asyncio.sleep(min(PAUSE, 0.05 * 2 ** min(passes, 10)) * self._random.uniform(0.5, 1.0))
            passes += 1
        self._tell()

    async def _attempt(self, host: Host, where: str, limit: float) -> bool:
        """Try one address of a server: whether it ended with a connected session."""
        conn = Connection(host, where, self._address.tls, self._saw, self.event_dispatch)
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
                await self._begin(conn)
        except TimeoutError as error:
            conn.die()
            raise error if conn.transport is None else Unheard(f"{host} did not answer in time") from error
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

    async def _authenticate(self, conn: Connection) -> None:
        """Before anybody else speaks on this connection; a server forgets it with the connection."""
        if self._address.credentials is None:
            return
        try:
            await conn.send(wire.mark(self._address.credentials), self._number())
        except exc.AuthFailed as error:
            self.failure = BackendRefused("the ensemble does not accept this user and password")
            self.failure.__cause__ = error
            raise

    async def _begin(self, conn: Connection) -> None:
        if self._on_begin is None or self._begun == self.session_id:
            return
        try:
            await self._on_begin(lambda request: conn.send(request, self._number()))
        except BackendError as error:
            self.failure = error
            self._tell()
            raise
        self._begun = self.session_id

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
                    await conn.send(beat(), self._number())
            except (exc.ZKError, TimeoutError) as error:
                log.info("no heartbeat from %s:%s: %r", conn.host, conn.port, error)
                self._search.silent = conn.where
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
