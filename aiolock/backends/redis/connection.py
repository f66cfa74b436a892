"""Pipelined RESP connection, and the pairing of server and local time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import NamedTuple, Unpack

from hiredis import ProtocolError, Reader, ReplyError

from aiolock.backends.redis.commands import NOTHING, Arg, Reply, Script, as_eval, encode
from aiolock.backends.redis.errors import from_reply, not_sent
from aiolock.backends.redis.url import Endpoint, Verify
from aiolock.backends.transport import STABLE, ConnectionState, Hook, Options, Slot, WaitingTransport
from aiolock.core.tasks import reject
from aiolock.core.wakeup import LITTLE, Waking, answer, wake
from aiolock.errors import BackendError, BackendUnavailable, UnsafeBackend

__all__ = ["LIMIT", "Age", "Connection", "Pairing"]

CHUNK = 32
"""Commands of one loop iteration after which they are written: the server works while the others are issued."""
LIMIT = 65_536
"""Most commands that may be under way or wait to be sent."""
FRESH = 30.0
"""Seconds for which a pair of times can be used."""
DRIFT = 0.01
"""Largest difference between the speeds of two clocks."""

_PING = encode("PING")


class Age(NamedTuple):
    """Seconds since the server stamped something, and the error of that estimate."""

    seconds: float
    error: float

    @property
    def most(self) -> float:
        """Upper bound of the age."""
        return self.seconds + self.error

    def credible(self, claim: float) -> bool:
        """Test whether a grant of that age, provisional for ``claim`` seconds, may be entered before it is confirmed."""
        return self.seconds >= -self.error and self.most <= claim / 2


class Pairing:
    """The latest pair of server time and local time.

    A reply with the server's time was sent and received at known local times, so the server's clock stood at that value
    in between. A later stamp of the server is thereby placed on the local clock with an error of half that round trip,
    plus drift. A server clock that is stepped breaks the earlier pairs, and shows as an impossible age; "deadline minus
    estimated now" would overstate the life of a grant instead.
    """

    __slots__ = ("latest", "received")

    def __init__(self) -> None:
        self.received = 0.0
        """Local time at which the latest reply of any command arrived."""
        self.latest: tuple[int, float, float] | None = None
        """Server time in µs, and the local times at which its request was sent and its reply arrived."""

    def age(self, stamp: float, now: float) -> Age | None:
        """Age at local time ``now`` of what the server stamped ``stamp``; ``None`` without a fresh pair."""
        if self.latest is None:
            return None
        server, sent, received = self.latest
        since = now - received
        if since > FRESH:
            return None
        half = (received - sent) / 2
        return Age((now - sent - half) - (stamp - server / 1_000_000), half + DRIFT * (since + half))


class Connection(WaitingTransport[bytes]):
    """A pipelined connection: commands of one loop iteration leave in few writes, replies come back in order.

    The first command on an idle connection is written at once, the others of that iteration together.

    There is no task per command: each has a slot with a future that the connection owns. A caller that stops waiting
    orphans its slot, whose reply is then discarded, and the others stay in step. Commands that block in the server must
    not be sent here, because all later ones would wait behind them.

    :param scripts: are loaded whenever the server is connected, before any other command.
    :param verify: checks the server before that; a server that it refuses is not used.
    """

    _request = "this command"

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        scripts: Sequence[Script] = (),
        verify: Verify | None = None,
        limit: int = LIMIT,
        on_up: Hook | None = None,
        on_down: Hook | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(
            endpoint.address, partial(endpoint.connect, verify=verify), on_up, on_down, **options
        )
        self._moves = endpoint.moves
        self._scripts = scripts
        self._limit = limit
        self._reader = Reader()
        self._waiting: list[Slot[bytes]] = []
        """Issued in this iteration of the loop, and not written yet."""
        self._shuffled = False
        """The parked slots are not in the order in which they were issued."""
        self._scheduled = False
        self._burst = False
        """The latest replies came together, so their readers will write together as well."""
        self._moved: BackendError | None = None
        self.pairing = Pairing()

    # --- for callers

    def call(self, *args: Arg) -> Reply:
        """Issue a command; the future gets its reply, or an error within ``command_timeout``.

        It is on the wire before anything runs that is scheduled later, such as a task that is woken afterwards.
        Cancelling the future does not take the command back. :class:`BackendRefused` is the server's answer;
        an error that was not :func:`was_sent` says that the server has certainly not seen the command; after any other
        :class:`BackendUnavailable` it may have been executed. An error need not be retrieved.
        """
        return self.issue(encode(*args))

    async def aclose(self) -> None:
        """Send what was issued, and close without waiting for replies; callers that still wait get an error."""
        if not self.forked:
            self._flush()
        await super().aclose()

    # --- out

    def issue(self, command: bytes) -> Reply:
        """Issue an encoded command; see :meth:`call`. A script that the server has forgotten is sent again in full."""
        transport = self._transport
        if transport is None or self.forked:
            return self._keep(command)
        future: Reply = asyncio.Future(loop=self._loop)
        pending = self._pending
        if not (pending or self._scheduled or self._burst):
            # Alone, as far as can be seen: to wait for company would cost it an iteration of the loop.
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

    def reissue(self, future: Reply, command: bytes, issued: float, *before: bytes) -> None:
        """Issue a command that another server has not executed, directly behind the commands ``before``.

        Without a connection it waits for one, and ``before`` is left out. ``issued`` is the time of its first issue; its
        deadline is enforced by the caller of ``reissue``, not here.
        """
        if self._transport is None:
            # Sorted once by the reader of the queue, which may have thousands.
            self._shuffled = self._shuffled or bool(self._parked and self._parked[-1][2] > issued)
            self._parked.append((future, command, issued))
            return
        self._waiting.extend((self._orphan, first, issued) for first in before)
        self._resend(future, command, issued)

    def _resend(self, future: Reply, command: bytes, issued: float) -> None:
        self._waiting.append((future, command, issued))
        if not self._scheduled:
            self._schedule()

    def reclaim(self, stays: Callable[[bytes], bool]) -> list[Slot[bytes]]:
        """Take back the commands that wait for a connection, except those that ``stays`` accepts."""
        parked = [slot for slot in self._in_order() if not slot[0].done()]
        self._parked = deque(slot for slot in parked if stays(slot[1]))
        return [slot for slot in parked if not stays(slot[1])]

    def _in_order(self) -> deque[Slot[bytes]]:
        """Return the parked slots, the oldest first."""
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

    def _keep(self, command: bytes) -> Reply:
        """Keep a command until there is a connection, or its deadline passes."""
        self.refuse_fork("connection")
        if self._loop is None or self.state is ConnectionState.CLOSED:
            raise RuntimeError(f"{self!r} is not open")
        future: Reply = self._loop.create_future()
        if len(self._parked) >= self._limit:
            self._overload(future)
        else:
            self._park((future, command, self._clock()))
        return future

    def _permanent(self, error: BackendError) -> bool:
        return isinstance(error, UnsafeBackend)

    def _away(self) -> BackendError:
        if self._closed():
            return not_sent(f"the connection to {self.address} was closed")
        if isinstance(self.failure, UnsafeBackend):
            return UnsafeBackend(str(self.failure))
        why = self.failure or f"{self.address} does not answer"
        late = not_sent(f"there was no connection for {self._timeout:g} s: {why}")
        late.__cause__ = self.failure
        return late

    def _overload(self, future: Reply) -> None:
        reject(
            future, not_sent(f"overloaded: {self._limit} commands to {self.address} are under way already")
        )

    # --- in

    def data_received(self, data: bytes) -> None:
        """Hand replies to their slots, in order; then resume the tasks that wait for them."""
        self.received = self.pairing.received = self._clock()
        self.full = len(data) >= LITTLE
        reader = self._reader
        reader.feed(data)
        gets = reader.gets
        popleft = self._pending.popleft
        wakings: list[Waking] = []
        count = 0
        try:
            while (reply := gets()) is not NOTHING:
                future, command, issued = popleft()
                count += 1
                if type(reply) is ReplyError:
                    if future.done():
                        self._on_late_refusal(command, issued, reply)
                    else:
                        self._refuse(future, command, issued, reply)
                elif not future.done() and (waking := answer(future, reply)) is not None:
                    wakings.append(waking)
        except (ProtocolError, IndexError) as error:
            garbage = BackendUnavailable(f"{self.address} answered something that no command had asked for")
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

    def _refuse(self, future: Reply, command: bytes, issued: float, reply: ReplyError) -> None:
        text = str(reply)
        if text.startswith("NOSCRIPT") and (again := as_eval(command)) is not None:
            # Its deadline stays that of the first copy.
            self._resend(future, again, issued)
            return
        error = from_reply(text)
        error.__cause__ = ReplyError(text.partition(", with args beginning with")[0])
        reject(future, error)
        # Not the text of the reply: older servers put words of their own before the error inside a script.
        if str(error).startswith(("READONLY", "MASTERDOWN")) and (
            self._moves or self.received - self._since >= STABLE
        ):
            # The primary has become a replica; connecting again finds the new primary.
            self._moved = error

    def _on_late_refusal(self, command: bytes, issued: float, reply: ReplyError) -> None:
        """Ignore the error of a refused command whose caller no longer waits."""

    # --- the life of the connection

    def _greet(self, transport: asyncio.WriteTransport) -> None:
        del transport
        assert self._loop is not None  # noqa: S101 - it is open
        self._orphan: Reply = self._loop.create_future()
        self._orphan.cancel()
        self._reader = Reader(notEnoughData=NOTHING)
        self._burst, self._moved = False, None
        # The server may be another one now.
        self.pairing.latest = None
        now = self._clock()
        self._waiting.extend((self._orphan, script.load, now) for script in self._scripts)
        self._in_order()
        self._waiting.extend(self._unpark())
        self._up()
        self._flush()

    def _ping(self, transport: asyncio.WriteTransport) -> None:
        self._pending.append((self._orphan, _PING, self._clock()))
        self._write(transport, _PING)

    def _gone(self, error: BackendError) -> None:
        self.pairing.latest = None
        now = self._clock()
        waiting, self._waiting = self._waiting, []
        self._parked.extend((future, command, now) for future, command, _ in waiting if not future.done())
        super()._gone(error)

    def _expire(self, now: float) -> float:
        self._in_order()
        return super()._expire(now)
