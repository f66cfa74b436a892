"""The channel of this process: one long-lived SUBSCRIBE on a connection of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

from hiredis import ProtocolError, Reader, ReplyError

from aiolock.backends.redis.commands import Arg, encode
from aiolock.backends.redis.endpoint import Endpoint
from aiolock.backends.redis.link import Hook, Link, State, settle
from aiolock.backends.redis.replies import from_reply
from aiolock.clock import Clock
from aiolock.errors import BackendError, BackendUnavailable

__all__ = ["Subscriber"]

DENIED_PAUSE = 30.0
"""Seconds after which a subscription that was denied is asked for again."""

_NOTHING = object()
_PING = encode("PING")


class Subscriber(Link):
    """A subscription that comes back; ``generation`` counts its confirmations.

    ``on_message(payload)`` is called with each message. ``on_up()`` says that from now on messages arrive, ``on_down()``
    that some may be missed. A server that denies the subscription is no failure of :meth:`open`:
    the state is then ``DENIED``, ``denied`` says why, ``on_down`` is called once, and it is asked again every half
    minute.
    """

    __slots__ = ("_on_message", "_reader", "_subscribe", "denied")

    def __init__(
        self,
        endpoint: Endpoint,
        channel: Arg,
        *,
        clock: Clock,
        command_timeout: float,
        on_message: Callable[[bytes], object],
        random: Random | None = None,
        on_up: Hook | None = None,
        on_down: Hook | None = None,
    ) -> None:
        super().__init__(
            endpoint,
            clock=clock,
            command_timeout=command_timeout,
            random=random,
            on_up=on_up,
            on_down=on_down,
        )
        self._on_message = on_message
        self._subscribe = encode("SUBSCRIBE", channel)
        self._reader = Reader()
        self.denied: BackendError | None = None

    @property
    def subscribed(self) -> bool:
        """Whether messages arrive at this moment, as far as we know."""
        return self.state is State.READY

    def _greet(self, transport: asyncio.WriteTransport) -> None:
        self._reader = Reader(notEnoughData=_NOTHING)
        self._write(transport, self._subscribe)

    def _ping(self, transport: asyncio.WriteTransport) -> None:
        self._write(transport, _PING)

    def data_received(self, data: bytes) -> None:
        """Hand on messages; take note of the rest."""
        self.received = self._clock()
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not _NOTHING:
                if type(reply) is list:
                    self._told(reply)
                elif (
                    type(reply) is ReplyError and self.state is not State.READY
                ):  # else an account without PING
                    self._refused(from_reply(str(reply)), reply)
                    return
        except ProtocolError as error:
            garbage = BackendUnavailable(f"{self._endpoint} sent what is no message")
            garbage.__cause__ = error
            self._lost(garbage)

    def _told(self, reply: list[Any]) -> None:
        if reply[0] == b"message":
            self._on_message(reply[2])
        elif reply[0] == b"subscribe":
            self.denied = None
            self._up()

    def _refused(self, error: BackendError, reply: ReplyError) -> None:
        error.__cause__ = reply
        if error.retryable:
            self._lost(error)
            return
        first_time = self.denied is None
        self.denied = error
        self._lost(error, State.DENIED, DENIED_PAUSE)
        if self._first is not None:
            settle(self._first)
        if first_time and self._on_down is not None:
            self._on_down()
