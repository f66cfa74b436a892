"""The pipelined connection to one memcached server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple, Unpack

from aiolock.backends.memcached.conversation import conversation
from aiolock.backends.memcached.protocol import NOOP, Parser, ProtocolError, Response, fits
from aiolock.backends.transport import Asked, ConnectionState, Hook, Options, WaitingTransport
from aiolock.backends.urls import Host
from aiolock.core.tasks import settle
from aiolock.errors import BackendRefused, BackendUnavailable

__all__ = ["Connection", "Reply"]


class Reply(NamedTuple):
    """The answers to commands that were sent together."""

    answers: list[Response]
    generation: int
    """The connection on which they were given."""
    started: int
    """When the server was started, in seconds since 1970: a constant of its run."""


class _Batch(Asked[Reply]):
    """Commands that are sent together, and their answers so far."""

    __slots__ = ("answers", "commands")

    def __init__(self, commands: Sequence[bytes], future: asyncio.Future[Reply], issued: float) -> None:
        super().__init__(future, issued)
        self.commands = commands
        self.answers: list[Response] = []


class Connection(WaitingTransport[_Batch]):
    """A pipelined connection: what tasks ask in one pass of the loop leaves together, and answers come in the same order.

    A caller that stops waiting leaves its batch in place, whose answers are discarded, and the others stay in step.

    :param namespace: is marked whenever the server is connected.
    """

    def __init__(self, host: Host, namespace: str, on_down: Hook, **options: Unpack[Options]) -> None:
        super().__init__(f"memcached://{host}", self._dial, on_down, **options)
        self._host = host
        self._namespace = namespace
        self._parser = Parser()
        self._time = self._read_at = 0.0
        self._started = 0

    @property
    def now(self) -> float:
        """The clock of the server, or up to a second more, and one per cent of the time that it is connected."""
        return self._time + 1 + 1.01 * (self._clock() - self._read_at)

    def ask(self, commands: Sequence[bytes], *, write: bool = False) -> asyncio.Future[Reply]:
        """Send commands; the future gets their answers, or an error within the command timeout.

        Without a connection, reads wait for one, and a ``write`` is refused. Cancelling the future takes nothing back.
        """
        batch = _Batch(commands, self._guard().create_future(), self._clock())
        if self._transport is not None and self.state is ConnectionState.READY:
            self._send(self._transport, batch)
        else:
            self._park(batch, write=write)
        return batch.future

    def _send(self, transport: asyncio.WriteTransport, batch: _Batch) -> None:
        alone = not self._pending
        self._pending.append(batch)
        self._write_together(transport, b"".join(batch.commands), alone=alone)

    def data_received(self, data: bytes) -> None:
        """Hand answers to their batches, in order."""
        self.received = self._clock()
        try:
            for answer in self._parser.feed(data):
                batch = self._pending[0]
                if not fits(batch.commands[len(batch.answers)], answer):
                    raise ProtocolError
                batch.answers.append(answer)
                if len(batch.answers) == len(batch.commands):
                    self._pending.popleft()
                    settle(batch.future, Reply(batch.answers, self.generation, self._started))
        except (ProtocolError, IndexError) as error:
            garbage = BackendUnavailable(f"{self.address} answered something that no command had asked for")
            garbage.__cause__ = error
            self._lost(garbage)

    # --- the life of the connection

    async def _dial(self, timeout: float, protocol: asyncio.Protocol) -> asyncio.WriteTransport:
        """Connect and check the server; ``protocol`` receives what it sends afterwards."""
        try:
            async with conversation(self._host, timeout) as talk:
                figures = await talk.stats()
                await talk.check()
                await talk.mark(self._namespace)
                self._time, self._read_at = float(figures["time"]), self._clock()
                self._started = int(figures["time"]) - int(figures["uptime"])
                transport, talk.transport = talk.transport, None
        except BackendRefused as error:
            if self.generation and error.retryable:
                # It was a memcached without TLS before: it is being restarted, or the network is at fault.
                raise BackendUnavailable(str(error)) from error
            raise
        assert transport is not None  # noqa: S101 - it was connected
        transport.set_protocol(protocol)
        return transport

    def _greet(self, transport: asyncio.WriteTransport) -> None:
        self._parser = Parser()
        self._up()
        for batch in self._unpark():
            self._send(transport, batch)

    def _ping(self, transport: asyncio.WriteTransport) -> None:
        assert self._loop is not None  # noqa: S101 - it is open
        self._send(transport, _Batch([NOOP], self._loop.create_future(), self._clock()))
