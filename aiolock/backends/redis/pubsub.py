"""Subscriber connection, and dispatch of its messages to claims and registers."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, Unpack

from hiredis import ProtocolError, Reader, ReplyError

from aiolock.backends.redis.claim import GONE, Context, RedisClaim, renewal
from aiolock.backends.redis.commands import NOTHING, Arg, Reply, encode
from aiolock.backends.redis.connection import Pairing
from aiolock.backends.redis.errors import from_reply
from aiolock.backends.redis.run_id import RunId
from aiolock.backends.redis.url import Endpoint
from aiolock.backends.transport import ConnectionState, Hook, Options, Transport
from aiolock.core.backend import Event, EventKind, EventQueue, expires_at
from aiolock.core.inbox import WakeReason
from aiolock.core.wakeup import LITTLE
from aiolock.errors import BackendError, BackendUnavailable

__all__ = ["Messages", "PairingOf", "Subscriber"]

DENIED_PAUSE = 30.0
"""Seconds after which a subscription that was denied is asked for again."""

_NUMBER = re.compile(r"-?[0-9]{1,18}")
_PING = encode("PING")


class Subscriber(Transport):
    """A subscription that reconnects; ``generation`` counts its confirmations.

    A server that denies the subscription does not make :meth:`open` fail: the state is then ``DENIED``, ``denied`` is
    the reason, ``on_down`` is called once, and the subscription is asked for again every half minute.

    :param channels: returns the names of its channels for each new connection.
    :param server: is noted on each new connection, before it subscribes.
    :param on_message: is called with the payload of each message.
    :param on_up: is called when messages begin to arrive, ``on_down`` when some may be missed.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        channels: Callable[[], Sequence[Arg]],
        *,
        on_message: Callable[[bytes], object],
        server: RunId | None = None,
        on_up: Hook | None = None,
        on_down: Hook | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(endpoint.address, endpoint.connect, on_up, on_down, **options)
        self._on_message = on_message
        self._channels = channels
        self._count = 0
        """Number of channels that were asked for on this connection."""
        self._server = server
        self._asked = False
        """The next reply is about the server."""
        self._reader = Reader()
        self.denied: BackendError | None = None

    def begin(self) -> asyncio.Future[None]:
        """Connect and subscribe in the background; see :meth:`Transport.begin`."""
        self.denied = None
        return super().begin()

    @property
    def subscribed(self) -> bool:
        """True while messages arrive, as far as is known."""
        return self.state is ConnectionState.READY

    def give_up(self, pause: float) -> None:
        """Leave this server, whose messages are of no use, and subscribe anew after about ``pause`` seconds."""
        self._lost(
            BackendUnavailable(f"{self.address}: the subscription was at another server than the commands"),
            ConnectionState.DENIED,
            pause,
        )

    def _greet(self, transport: asyncio.WriteTransport) -> None:
        self._reader = Reader(notEnoughData=NOTHING)
        channels = self._channels()
        self._count = len(channels)
        subscribe = encode("SUBSCRIBE", *channels)
        self._asked = self._server is not None
        self._write(transport, encode(*RunId.question) + subscribe if self._asked else subscribe)

    def _ping(self, transport: asyncio.WriteTransport) -> None:
        self._write(transport, _PING)

    def data_received(self, data: bytes) -> None:
        """Pass on messages; note confirmations and refusals."""
        self.received = self._clock()
        self.full = len(data) >= LITTLE
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not NOTHING:
                if self._asked and self._server is not None:
                    self._asked = False
                    self._server.note(reply)
                elif type(reply) is list:
                    self._reply(reply)
                elif type(reply) is ReplyError and self.state is not ConnectionState.READY:
                    # In the state READY it is the PING of an account without the right to it.
                    self._refused(from_reply(str(reply)), reply)
                    return
        except ProtocolError as error:
            garbage = BackendUnavailable(f"{self.address} sent what is no message")
            garbage.__cause__ = error
            self._lost(garbage)

    def _reply(self, reply: list[Any]) -> None:
        if reply[0] == b"message":
            self._on_message(reply[2])
        elif reply[0] == b"subscribe" and reply[2] == self._count:
            self.denied = None
            self._up()

    def _refused(self, error: BackendError, reply: ReplyError) -> None:
        error.__cause__ = reply
        if error.retryable:
            self._lost(error)
            return
        first_time = self.denied is None
        self.denied = error
        self._lost(error, ConnectionState.DENIED, DENIED_PAUSE)
        self._opened()
        if first_time and self._on_down is not None:
            self._on_down()


PairingOf = Callable[[RedisClaim], Pairing | None]
"""Return the pairing of the server that published a message about a claim; ``None`` if another one may have the lock."""


class Messages:
    """Dispatch of the messages on this client's channel: provisional grants, demand, losses and release requests.

    Any account may publish on the channel, so a message that names no claim of this client is dropped, and so is one that
    is not written as the scripts write it.

    :param context: of the client's claims, of any family.
    :param on_register: is called with the key of a register that has changed.
    """

    def __init__(self, context: Context, events: EventQueue, on_register: Callable[[str], object]) -> None:
        self._claims = context.claims
        self._believes = context.confirm is None
        """A pushed grant may be entered before its confirmation: replicas need not have it."""
        self._clock = context.clock
        self._process = context.commands.process
        self._events = events
        self._on_register = on_register

    def dispatch(self, pairing_of: PairingOf, payload: bytes) -> None:
        """Deliver one message; that of a server that may not have the lock only has the server of the lock asked."""
        what, _, rest = payload.decode("utf-8", "replace").partition(" ")
        if what == "c":
            self._on_register(rest)
            return
        request_id, _, text = rest.partition(" ")
        claim = self._claim(request_id)
        numbers = text.split(" ")
        if claim is None:
            return
        if what == "g" and len(numbers) == 5 and all(map(_NUMBER.fullmatch, numbers)):
            self._granted(claim, pairing_of(claim), list(map(int, numbers)))
        elif what == "n" and claim.waiting:
            claim.inbox.wake(WakeReason.NOTIFIED)
        elif what == "d":
            claim.note_waiters(self._clock())
        elif what == "f" and not claim.lose():
            kind = EventKind.DOUBT if pairing_of(claim) is None else EventKind.LOST
            self._events.put(Event(kind, claim, "force-released"))
        elif what == "a":
            self.ask(claim, text)

    def ask(self, claim: RedisClaim, text: str) -> None:
        """Report a release request, given as its time at the server and the reason, unless it was reported before."""
        stamp, _, reason = text.partition(" ")
        # While no task uses the hold, there is no holder to ask: the next renewal repeats the request.
        if claim.taken and _NUMBER.fullmatch(stamp) and int(stamp) > claim.asked:
            claim.asked = int(stamp)
            self._events.put(Event(EventKind.REQUESTED, claim, text=reason))

    def _claim(self, request_id: str) -> RedisClaim | None:
        process, _, number = request_id.partition(":")
        try:
            return self._claims.get(int(number, 16)) if process == self._process else None
        except ValueError:
            return None

    def _granted(self, claim: RedisClaim, pairing: Pairing | None, numbers: Sequence[int]) -> None:
        if not claim.waiting:
            # The waiter has left; its leave command may have reached the server before the grant.
            return
        token, count, server, milliseconds, waiting = numbers
        now = self._clock()
        age = None if pairing is None or not self._believes else pairing.age(server / 1_000_000, now)
        seconds = milliseconds / 1000
        if age is None or not age.credible(seconds):
            # Too old, of unknown age, not confirmed by replicas, or perhaps another server's: asking again finds the grant, and is
            # its confirmation.
            claim.inbox.wake(WakeReason.NOTIFIED)
            return
        # The confirmation is on the wire before the waiter runs, so even a block that never awaits has sent it.
        renewal([claim]).add_done_callback(functools.partial(self._confirmed, claim))
        claim.push(token, count, expires_at(now - age.most, seconds), demand=waiting != 0)

    def _confirmed(self, claim: RedisClaim, reply: Reply) -> None:
        if reply.cancelled() or reply.exception() is not None:
            return
        state = reply.result()[1]
        if type(state) is not list and state <= 0 and not claim.lose():
            self._events.put(Event(EventKind.LOST, claim, GONE[state]))
