"""Many callers on one connection: commands of one pass of the loop leave in one write, replies come back in order.

There is no task per command. Each has a slot, a future that the connection owns; whoever stops waiting for it orphans
the slot, its reply is discarded when it comes, and everybody else stays in step. Nothing that blocks in the server may
be sent here, because everybody would wait behind it.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from operator import itemgetter
from random import Random
from typing import Any

from hiredis import ProtocolError, Reader, ReplyError

from aiolock.backends.redis.commands import Arg, Script, as_eval, encode
from aiolock.backends.redis.endpoint import Endpoint
from aiolock.backends.redis.format import Verify
from aiolock.backends.redis.link import STABLE, Forks, Hook, Link, State
from aiolock.backends.redis.replies import NotSent, from_reply
from aiolock.clock import Clock
from aiolock.delivery import Waking, answer, wake
from aiolock.errors import BackendError, BackendUnavailable, UnsafeBackend

__all__ = ["LIMIT", "Connection", "Script", "State"]

CHUNK = 32
"""So many commands of one pass are written before it ends: the server works on them while we issue the others."""
LIMIT = 65_536
"""Most commands that may be under way or wait to be sent."""

Slot = tuple["asyncio.Future[Any]", bytes, float]
"""Who waits, the command (it is sent again in another form if the server has forgotten its script), and since when."""

_NOTHING = object()
_PING = encode("PING")


class Connection(Link):
    """A pipelined connection for commands.

    :param scripts: are made known to the server whenever it comes up, before any other command.
    :param verify: looks at the server before that; a server that it refuses is not used.
    """

    __slots__ = (
        "_burst",
        "_limit",
        "_mixed",
        "_moved",
        "_nobody",
        "_parked",
        "_pending",
        "_reader",
        "_scheduled",
        "_scripts",
        "_shuffled",
        "_waiting",
        "verify",
    )

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        clock: Clock,
        command_timeout: float,
        scripts: Sequence[Script] = (),
        random: Random | None = None,
        on_up: Hook | None = None,
        on_down: Hook | None = None,
        limit: int = LIMIT,
        verify: Verify | None = None,
    ) -> None:
        super().__init__(
            endpoint,
            clock=clock,
            command_timeout=command_timeout,
            random=random,
            on_up=on_up,
            on_down=on_down,
        )
        self.verify = verify
        self._scripts = scripts
        self._limit = limit
        self._reader = Reader()
        self._pending: deque[Slot] = deque()
        """Written, in the order in which replies will come."""
        self._waiting: list[Slot] = []
        """Issued in this pass of the loop, and not written yet."""
        self._parked: deque[Slot] = deque()
        """Issued while there was no connection."""
        self._shuffled = False
        """They are not in the order in which they were issued."""
        self._scheduled = False
        self._burst = False
        """The latest replies came together, so their readers will write together as well."""
        self._moved: BackendError | None = None
        self._mixed = False
        """A command is under way that is older than what was sent before it."""

    # --- for callers

    def call(self, *args: Arg) -> asyncio.Future[Any]:
        """Issue a command; the future gets its reply, or an error within ``command_timeout``.

        It is on the wire before anything runs that is scheduled later, such as a task that is woken afterwards.
        Cancelling the future does not take the command back. :class:`BackendRefused` is the server's answer;
        :class:`NotSent` says that the server has certainly not seen it; after any other
        :class:`BackendUnavailable` nobody knows whether it was executed. An error need not be looked at.
        """
        return self.issue(encode(*args))

    def script(self, script: Script, keys: Sequence[Arg], args: Sequence[Arg] = ()) -> asyncio.Future[Any]:
        """Issue a script like a command.

        Should the server have forgotten it, this one command is sent again in full, behind what was sent meanwhile.
        """
        return self.issue(script.encode(keys, args))

    @property
    def in_flight(self) -> int:
        """How many commands are under way or wait to be sent."""
        return len(self._pending) + len(self._waiting) + len(self._parked)

    async def aclose(self) -> None:
        """Send what was issued, and close without waiting for replies: whoever still waits gets an error."""
        if self._fork == Forks.generation:
            self._flush()
        await super().aclose()

    # --- out

    def issue(self, command: bytes) -> asyncio.Future[Any]:
        """Issue a command that is encoded already; see :meth:`call`."""
        transport = self._transport
        if transport is None or self._fork != Forks.generation:
            return self._park(command)
        future: asyncio.Future[Any] = asyncio.Future(loop=self._loop)
        pending = self._pending
        if not (pending or self._scheduled or self._burst):
            # Alone, as far as one can see: to wait for company would cost it a pass of the loop.
            pending.append((future, command, self._clock()))
            try:
                transport.write(command)
            except Exception as error:  # noqa: BLE001 - a transport that is being closed may raise what it likes
                self.connection_lost(error)
            return future
        waiting = self._waiting
        if len(pending) + len(waiting) >= self._limit:
            self._overload(future)
            return future
        waiting.append((future, command, self._clock()))
        if not self._scheduled:
            self._schedule()
        elif len(waiting) >= CHUNK:
            self._write_out()
        return future

    def reissue(self, future: asyncio.Future[Any], command: bytes, issued: float, *before: bytes) -> None:
        """Issue a command that another server has not executed, right behind what has to come ``before`` it.

        It is not younger for that, and whoever reissues it sees to its time.
        """
        if self._transport is None:
            # Put in order by whoever needs that, once for all of them: there may be thousands.
            self._shuffled = self._shuffled or bool(self._parked and self._parked[-1][2] > issued)
            self._parked.append((future, command, issued))
            return
        self._waiting.extend((self._nobody, first, issued) for first in before)
        self._waiting.append((future, command, issued))
        self._mixed = True
        if not self._scheduled:
            self._schedule()

    def reclaim(self, stays: Callable[[bytes], bool]) -> list[Slot]:
        """Take back the commands that wait for a connection, and need not stay."""
        parked, self._parked = self._in_order(), deque()
        gone = []
        for slot in parked:
            if slot[0].done():
                continue
            if stays(slot[1]):
                self._parked.append(slot)
            else:
                gone.append(slot)
        return gone

    def _in_order(self) -> deque[Slot]:
        """What is parked, the oldest first."""
        if self._shuffled:
            self._parked = deque(sorted(self._parked, key=itemgetter(2)))
            self._shuffled = False
        return self._parked

    def _schedule(self) -> None:
        self._scheduled = True
        assert self._loop is not None  # noqa: S101 - it is open
        self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._scheduled = False
        self._write_out()

    def _write_out(self) -> None:
        waiting = self._waiting
        if not waiting or self._transport is None:
            return
        self._pending.extend(waiting)
        data = waiting[0][1] if len(waiting) == 1 else b"".join([command for _, command, _ in waiting])
        waiting.clear()
        self._write(self._transport, data)

    def _failed(self, error: BackendError) -> None:
        super()._failed(error)
        if isinstance(error, UnsafeBackend):
            # No later attempt helps those who wait now.
            while self._parked:
                _reject(self._parked.popleft()[0], UnsafeBackend(str(error)))

    def _park(self, command: bytes) -> asyncio.Future[Any]:
        """Keep it until there is a connection, or its time is over."""
        self._guard()
        if self._loop is None or self.state is State.CLOSED:
            raise RuntimeError(f"{self!r} is not open")
        future: asyncio.Future[Any] = self._loop.create_future()
        if isinstance(self.failure, UnsafeBackend):
            _reject(future, UnsafeBackend(str(self.failure)))
        elif len(self._parked) >= self._limit:
            self._overload(future)
        else:
            self._parked.append((future, command, self._clock()))
        return future

    def _overload(self, future: asyncio.Future[Any]) -> None:
        _reject(
            future, NotSent(f"overloaded: {self._limit} commands to {self._endpoint} are under way already")
        )

    # --- in

    def data_received(self, data: bytes) -> None:
        """Hand replies to their slots, in order; then those who waited for them go on."""
        self.received = self._clock()
        reader = self._reader
        reader.feed(data)
        gets = reader.gets
        popleft = self._pending.popleft
        wakings: list[Waking] = []
        count = 0
        try:
            while (reply := gets()) is not _NOTHING:
                future, command, issued = popleft()
                count += 1
                if future.done():
                    if type(reply) is ReplyError:
                        self._unheard(command, issued, reply)
                    continue
                if type(reply) is ReplyError:
                    self._refuse(future, command, issued, reply)
                elif (waking := answer(future, reply)) is not None:
                    wakings.append(waking)
        except (ProtocolError, IndexError) as error:
            garbage = BackendUnavailable(f"{self._endpoint} answered something that no command had asked for")
            garbage.__cause__ = error
            self._moved = garbage
        self._burst = count > 1
        if self._moved is not None:
            self._lost(self._moved)
        if wakings:
            # What several of them issue leaves together.
            mine, self._scheduled = count > 1 and not self._scheduled, self._scheduled or count > 1
            wake(wakings)
            if mine:
                self._flush()

    def _refuse(self, future: asyncio.Future[Any], command: bytes, issued: float, reply: ReplyError) -> None:
        text = str(reply)
        if text.startswith("NOSCRIPT") and (again := as_eval(command)) is not None:
            # Its caller has waited since then, and waits no longer because it is sent twice.
            self._waiting.append((future, again, issued))
            self._mixed = True
            if not self._scheduled:
                self._schedule()
            return
        error = from_reply(text)
        error.__cause__ = ReplyError(text.partition(", with args beginning with")[0])
        _reject(future, error)
        # Not of the reply: older servers put what a script has met behind words of their own.
        if str(error).startswith(("READONLY", "MASTERDOWN")) and (
            self._endpoint.moves or self.received - self._since >= STABLE
        ):
            # What was the primary is none any more; whoever is, is found by connecting again.
            self._moved = error

    def _unheard(self, command: bytes, issued: float, reply: ReplyError) -> None:
        """A command was refused of which nobody waits for the answer."""

    # --- the life of the connection

    def _greet(self, transport: asyncio.WriteTransport) -> None:
        del transport
        assert self._loop is not None  # noqa: S101 - it is open
        self._nobody: asyncio.Future[Any] = self._loop.create_future()
        self._nobody.cancel()
        self._reader = Reader(notEnoughData=_NOTHING)
        self._burst, self._moved = False, None
        parked, self._parked = self._in_order(), deque()
        # What overtakes is as old as what it overtakes: whoever looks for what is overdue stops at the first that is not.
        since = parked[0][2] if parked else self._clock()
        self._waiting.extend((self._nobody, script.load, since) for script in self._scripts)
        self._waiting.extend(slot for slot in parked if not slot[0].done())
        self._up()
        self._flush()

    def _ping(self, transport: asyncio.WriteTransport) -> None:
        self._pending.append((self._nobody, _PING, self._clock()))
        self._write(transport, _PING)

    def _gone(self, error: BackendError) -> None:
        pending, self._pending = self._pending, deque()
        waiting, self._waiting = self._waiting, []
        for future, _, _ in pending:
            if not future.done():
                doubt = BackendUnavailable(f"{error}; whether it executed this command is not known")
                doubt.__cause__ = error.__cause__
                _reject(future, doubt)
        now = self._clock()
        self._parked.extend((future, command, now) for future, command, _ in waiting if not future.done())
        if self.state is State.CLOSED:
            while self._parked:
                _reject(self._parked.popleft()[0], NotSent(str(error)))

    def _expire(self, now: float) -> float:
        limit = now - self._timeout
        parked, pending = self._in_order(), self._pending
        while parked and parked[0][2] <= limit:
            why = self.failure or f"{self._endpoint} does not answer"
            late = NotSent(f"there was no connection for {self._timeout:g} s: {why}")
            late.__cause__ = self.failure
            _reject(parked.popleft()[0], late)
        next_one = parked[0][2] if parked else math.inf
        for future, _, issued in pending:
            if issued > limit:
                next_one = min(next_one, issued)
                if self._mixed:
                    continue
                break
            _reject(
                future,
                BackendUnavailable(
                    f"{self._endpoint} did not answer within {self._timeout:g} s; "
                    f"whether it executed this command is not known"
                ),
            )
        self._mixed = self._mixed and bool(pending or self._waiting)
        return next_one + self._timeout


def _reject(future: asyncio.Future[Any], error: BackendError) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # looked at: whoever does not wait need not be warned
