"""Barriers: grants and renewals that count once enough replicas have them.

A primary answers before its replicas have what it has written, so a failover may forget what a client was told. With ``replicas=n`` a
client believes an answer only when n replicas have confirmed it. ``WAIT`` tells how many have all that its own connection
wrote before, and blocks that connection. So each primary has one more connection, for barriers: a small write, and ``WAIT``
behind it. Replication is one order, and a barrier is sent after the answers that it covers, so a replica that has its write has what
they were about. One barrier is under way at a time; what is answered meanwhile joins the next one.

The write and the answers have to be of one server: a name may come to mean another one, and the connection for barriers be
there first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Unpack

from redis.asyncio.connection import AbstractConnection

from aiolock.backends.redis.commands import Reply, Script, source
from aiolock.backends.redis.connection import Connection
from aiolock.backends.redis.run_id import RunId, agree
from aiolock.backends.redis.url import Endpoint, Verify
from aiolock.backends.transport import FIRST_PAUSE, ConnectionState, Options
from aiolock.core.logs import Log, get_logger
from aiolock.core.tasks import Backoff, reject, settle
from aiolock.errors import BackendRefused, BackendUnavailable, UnsafeBackend, copy_of

__all__ = ["BARRIER", "SOON", "Barriers", "Confirm", "noting", "patience"]

log: Log = get_logger("aiolock")

BARRIER = Script(source("barrier"))
LONGEST = 2.0
"""Most seconds of one ``WAIT``: meanwhile the connection answers no PING."""
LATE = 1.5
"""So many times as long as a barrier may take its answer is waited for."""
SOON = 0.5
"""Seconds in which replicas answer when a client opens."""
LONGEST_PAUSE = 1.0
"""Most seconds between connections that turn out to be at another server than the commands."""
SLACK = 0.005
"""Seconds before its deadline at which nothing joins another barrier."""

Confirm = Callable[[Reply, float, float], "asyncio.Future[None]"]
"""Wait until enough replicas have what a reply was about: the reply, until when it can be believed, and when it was asked for.

The future fails with :class:`BackendUnavailable` if too few have confirmed it in time. Cancelling it changes nothing at the server.
"""


def patience(left: float, command_timeout: float) -> float:
    """Return the seconds in which replicas have to confirm what can be believed for ``left`` more seconds."""
    return max(0.0, min(left, command_timeout) / 2)


def noting(server: RunId, verify: Verify | None = None) -> Verify:
    """Return a function that notes the run id of the server of a new connection, and then verifies it."""

    async def note(driver: AbstractConnection) -> None:
        await driver.send_command(*server.question)
        await server.read(driver)
        if verify is not None:
            await verify(driver)

    return note


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    """Something that was answered, and waits for a barrier."""

    done: asyncio.Future[None]
    deadline: float
    generation: int
    """Of the connection that brought the answer."""


class _Line(Connection):
    """The connection for barriers."""

    def give_up(self, pause: float) -> None:
        """Leave this server, where nothing can be confirmed, and connect anew after about ``pause`` seconds."""
        error = BackendUnavailable(f"{self.address}: barriers were at another server than the commands")
        self._lost(error, ConnectionState.DENIED, pause)


class Barriers:
    """The barriers of one client at one primary.

    :param commands: the connection whose answers are covered, and ``server`` the run id of its server.
    :param key: returns a key without another use at that primary; asked anew after a failure.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        replicas: int,
        commands: Connection,
        server: RunId,
        key: Callable[[], str],
        **options: Unpack[Options],
    ) -> None:
        self.replicas = replicas
        self._commands = commands
        self._server = server
        self._new_key = key
        self._key: str | None = None
        self._clock = options["clock"]
        self._limit = options["command_timeout"]
        self._mine = RunId()
        self.connection = _Line(endpoint, verify=noting(self._mine), on_up=self._send, **options)
        self._waiting: list[_Waiter] = []
        """Join the next barrier."""
        self._under_way = False
        self._backoff = Backoff(options.get("random") or Random(), FIRST_PAUSE, LONGEST_PAUSE)
        self._logged = False

    async def check(self) -> None:
        """Find out whether barriers are possible; warn if too few replicas answer soon.

        Raises :class:`UnsafeBackend` without the rights, and :class:`BackendError` if the server cannot be asked. Cancelling it changes
        nothing.
        """
        soon = max(1, round(min(SOON, self._limit / 4) * 1000))
        what = f"{self.connection.address}: replicas={self.replicas} "
        try:
            count = await self.connection.call("WAIT", self.replicas, soon)
        except BackendRefused as error:
            if error.retryable:
                raise
            raise UnsafeBackend(
                f"{what}needs WAIT, which cannot be used there: grant the account +wait, or leave replicas= out: {error}"
            ) from error
        if self._mine.value is None or self._server.value is None:
            raise UnsafeBackend(
                f"{what}needs INFO, to know that its connections are at one server: grant the account +info, or leave replicas= out"
            )
        if count < self.replicas:
            log.warning(
                "%s, and %d answer: until %d do, no lock is granted", what.strip(), count, self.replicas
            )

    async def aclose(self) -> None:
        """Close the connection; what waits fails. Cancelling it may leave it open, for another call."""
        waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            reject(waiter.done, BackendUnavailable(f"the connection to {self.connection.address} was closed"))
        await self.connection.aclose()

    def compare(self) -> None:
        """Connect anew if the commands have gone to another server: nothing can be confirmed at the one that was left."""
        same = agree(self._mine.value, self._server.value)
        if same:
            self._backoff.reset()
            self._logged = False
        elif same is False:
            pause = self._backoff.next() if self._logged else 0.0
            if not self._logged:
                self._logged = True
                text = "%s: barriers are at another server than the commands: until both are at one, no grant is confirmed"
                log.warning(text, self.connection.address)
            self.connection.give_up(pause)

    def confirm(self, until: float, sent: float) -> asyncio.Future[None]:
        """Wait for a barrier, for what was asked for at ``sent``, has just been answered, and can be believed ``until`` then."""
        now, loop = self._clock(), asyncio.get_running_loop()
        seconds = patience(until - now, self._limit)
        done: asyncio.Future[None] = loop.create_future()
        waiter = _Waiter(done, now + seconds, self._commands.generation)
        late = max(0.0, min(LATE * seconds, sent + self._limit - now))
        timer = loop.call_later(late, self._late, done, late)
        done.add_done_callback(lambda _: timer.cancel())
        self._waiting.append(waiter)
        self._send()
        return done

    def _late(self, done: asyncio.Future[None], seconds: float) -> None:
        connection = self.connection
        why = connection.failure or f"{connection.address} has not answered within {seconds:.3g} s"
        error = BackendUnavailable(f"it is not known whether {self.replicas} replicas have it: {why}")
        error.__cause__ = connection.failure
        reject(done, error)

    # --- one barrier

    def _send(self) -> None:
        """Send a barrier for all that waits, unless one is under way or the connection is not up."""
        waiting = [waiter for waiter in self._waiting if not waiter.done.done()]
        if self._under_way or not waiting or self.connection.state is not ConnectionState.READY:
            return
        self._waiting, self._under_way = [], True
        seconds = min(LONGEST, min(waiter.deadline for waiter in waiting) - self._clock())
        # In full: a script that the server has forgotten would be sent again behind WAIT. And 0 ms is for ever.
        self._key = self._key or self._new_key()
        written = self.connection.call("EVAL", BARRIER.source, "1", self._key)
        waited = self.connection.call("WAIT", self.replicas, max(1, round(seconds * 1000)))
        answered = partial(self._answered, waiting, written, self.connection.generation)
        waited.add_done_callback(answered)

    def _answered(self, waiters: list[_Waiter], written: Reply, generation: int, waited: Reply) -> None:
        self._under_way = False
        error = self._failed(written, generation, waited)
        same = agree(self._mine.value, self._server.value)
        if error is not None:
            # In a cluster its slot may be on its way to another node.
            self._key = None
        else:
            self.compare()
        count, now = 0 if error is not None else waited.result(), self._clock()
        for waiter in waiters:
            if waiter.done.done():
                continue
            if error is not None:
                reject(waiter.done, copy_of(error))
            elif waiter.generation != self._commands.generation or same is None:
                reject(waiter.done, self._unknown("its connection was made anew since"))
            elif same and count >= self.replicas:
                settle(waiter.done, None)
            elif now < waiter.deadline - SLACK:
                # Another one had less time.
                self._waiting.append(waiter)
            elif same:
                reject(waiter.done, self._few(count))
            else:
                reject(waiter.done, self._unknown("barriers were at another server"))
        self._send()

    def _failed(self, written: Reply, generation: int, waited: Reply) -> BackendUnavailable | None:
        """Return why a barrier says nothing, if it does not."""
        for reply in (written, waited):
            if not reply.done() or reply.cancelled():
                return self._unknown("the client is being closed")
            if (why := reply.exception()) is not None:
                failure = self._unknown(str(why))
                failure.__cause__ = why
                return failure
        # A WAIT on another connection is about none of the write.
        return None if generation == self.connection.generation else self._unknown("the connection was lost")

    def _unknown(self, why: str) -> BackendUnavailable:
        return BackendUnavailable(f"it is not known whether {self.replicas} replicas have it: {why}")

    def _few(self, count: int) -> BackendUnavailable:
        return BackendUnavailable(
            f"{self.connection.address}: {count} of replicas={self.replicas} have confirmed it in time: "
            f"until {self.replicas} do, no lock is granted and none is renewed"
        )
