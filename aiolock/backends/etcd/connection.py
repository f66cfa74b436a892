"""The connection to one member of an etcd cluster at a time; another one is tried when it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Unpack

from aiolock.backends.dial import dial
from aiolock.backends.etcd import messages
from aiolock.backends.etcd.channel import Channel, ProtocolError
from aiolock.backends.etcd.errors import DENIED, NOT_ENABLED, RpcError, refused, unreachable
from aiolock.backends.etcd.url import Address
from aiolock.backends.transport import ConnectionState, Hook, Options, Slot, WaitingTransport
from aiolock.backends.urls import Host
from aiolock.core.tasks import reject, settle
from aiolock.core.wakeup import LITTLE
from aiolock.errors import BackendError, BackendRefused, BackendUnavailable, UnsafeBackend, copy_of, shorten

__all__ = ["FORMAT", "OLDEST", "Call", "Connection", "NewConnection", "new_connection"]

FORMAT = b"1"
"""The version of the keys, the mark of every namespace."""
OLDEST = 3, 4
LOGIN = 120.0
"""Seconds after which a client logs in again: a token may end 300 s after it was given."""


class NewConnection(asyncio.Protocol):
    """A connection that is being made, until its channel is handed on."""

    def __init__(self, host: Host, address: Address) -> None:
        self.host = host
        self.address = address
        self.channel = Channel(f"etcd://{host}", str(host), tls=address.tls is not None)
        self.transport: asyncio.WriteTransport | None = None
        self.cluster = 0
        self._spoken = False

    async def open(self) -> None:
        """Connect and log in. Raises what :func:`unreachable` translates.

        Cancelling it leaves the transport, if there is one, to be closed by the caller.
        """
        transport, _ = await dial(lambda: self, self.host.name, self.host.port, tls=self.address.tls)
        self.transport = transport
        self.channel.send = transport.write
        self.channel.begin()
        if self.address.user:
            await self.login()

    async def login(self) -> None:
        """Get the token that names the user in each call. Cancelling it ends the wait; no token is kept."""
        try:
            self.channel.token = messages.token(await self._authenticate())
        except BackendError as error:
            if NOT_ENABLED not in str(error.__cause__):
                raise
            # As clients of etcd do: authentication is enabled while they run.

    def _authenticate(self) -> asyncio.Future[bytes]:
        # No frame that a traceback may show keeps the request, which contains the password.
        return self.ask(
            messages.AUTHENTICATE, messages.authenticate(self.address.user, self.address.password)
        )

    def ask(self, path: str, request: bytes = b"") -> asyncio.Future[bytes]:
        """Make a call; the future gets its answer."""
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.channel.call(path, request, future)
        self.channel.flush()
        return future

    async def status(self) -> messages.Status:
        """Return the state of the member. Cancelling it ends the wait only."""
        return messages.status(await self.ask(messages.STATUS))

    def data_received(self, data: bytes) -> None:
        """Process answers."""
        try:
            self.channel.receive(data)
        except ProtocolError:
            tls = self.address.tls is not None
            first = b"" if self._spoken else data
            self.channel.fail(lambda: refused(self.host, first, tls=tls))
        self._spoken = True

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail what is asked."""
        tls = self.address.tls is not None
        self.channel.fail(lambda: unreachable(self.host, exc or EOFError(), tls=tls))


async def new_connection(host: Host, address: Address, timeout: float) -> NewConnection:
    """Connect to a member and log in, within ``timeout`` seconds; to be ended by the caller.

    Raises :class:`BackendError`. Cancelling it leaves no socket behind.
    """
    made = NewConnection(host, address)
    try:
        async with asyncio.timeout(timeout):
            await made.open()
    except BaseException as error:
        if made.transport is not None:
            made.transport.abort()
        if isinstance(error, OSError | EOFError | ValueError):
            raise unreachable(host, error, tls=address.tls is not None) from error
        raise
    return made


class Call:
    """A request, and its answer."""

    __slots__ = ("future", "generation", "path", "request")

    def __init__(self, path: str, request: bytes, future: asyncio.Future[bytes]) -> None:
        self.future = future
        self.path = path
        self.request = request
        self.generation = 0
        """The connection on which it was sent."""


class Connection(WaitingTransport[Call]):
    """Calls to the cluster, by whichever of its members can be reached.

    :param watched: keys; ``on_change`` gets each new value of one of them.
    """

    def __init__(
        self,
        address: Address,
        namespace: str,
        watched: Sequence[str],
        on_change: Callable[[bytes], None],
        on_down: Hook,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(address.text, self._dial, on_down=on_down, **options)
        self._members = address
        self._namespace = namespace
        self._watched = watched
        self._on_change = on_change
        self._next = self._random.randrange(len(address.hosts))
        """The host that is tried next; each client begins with one of them by chance."""
        self._cluster = 0
        self.members = 0
        """The number of members that the cluster has; 0 while it is not known."""
        self._channel: Channel | None = None
        self._login = 0.0

    def ask(self, path: str, requests: Sequence[bytes], *, write: bool = False) -> list[Call]:
        """Send calls at once; the future of each gets its answer, or an error within the command timeout.

        Without a connection, reads wait for one, and a ``write`` is refused. Cancelling a future takes nothing back.
        """
        now, loop, calls = self._clock(), self._guard(), []
        for request in requests:
            calls.append(call := Call(path, request, loop.create_future()))
            slot = call.future, call, now
            if self._channel is not None and self.state is ConnectionState.READY:
                self._send(self._channel, slot)
            else:
                self._park(slot, write=write)
        if self._channel is not None:
            self._channel.flush()
        return calls

    def _send(self, channel: Channel, slot: Slot[Call]) -> None:
        while self._pending and self._pending[0][0].done():
            self._pending.popleft()
        self._pending.append(slot)
        call = slot[1]
        call.generation = self.generation
        channel.call(call.path, call.request, call.future)

    def data_received(self, data: bytes) -> None:
        """Hand answers to their callers."""
        self.received = self._clock()
        self.full = len(data) >= LITTLE
        channel = self._channel
        if channel is None:
            return
        try:
            channel.receive(data)
        except ProtocolError as error:
            garbage = BackendUnavailable(f"{channel.address} sent what is no HTTP/2")
            garbage.__cause__ = error
            self._lost(garbage)
            return
        if channel.ended:
            self._lost(BackendUnavailable(f"{channel.address}: {channel.ended}"))

    # --- the life of the connection

    async def _dial(self, timeout: float, protocol: asyncio.Protocol) -> asyncio.WriteTransport:
        """Connect to the first member that can be used, beginning with the next; ``protocol`` receives what it sends."""
        hosts = self._members.hosts
        refusal: BackendError | None = None
        for _ in hosts:
            host = hosts[self._next]
            self._next = (self._next + 1) % len(hosts)
            try:
                async with asyncio.timeout(timeout / len(hosts)):
                    made = await new_connection(host, self._members, timeout)
                    try:
                        await self._check(made)
                    except BaseException:
                        assert made.transport is not None  # noqa: S101 - it was connected
                        made.transport.abort()
                        raise
            except TimeoutError:
                error: BackendError = BackendUnavailable(f"{host} did not answer in time")
            except BackendError as failed:
                error = failed
            else:
                return self._take(made, protocol)
            if refusal is None or (refusal.retryable and not error.retryable):
                refusal = error
        assert refusal is not None  # noqa: S101 - there is at least one host
        raise refusal

    def _take(self, made: NewConnection, protocol: asyncio.Protocol) -> asyncio.WriteTransport:
        transport = made.transport
        assert transport is not None  # noqa: S101 - it was connected
        self._cluster = made.cluster
        self._login = self._clock()
        self._channel = made.channel
        self._channel.send = lambda data: self._write_together(transport, data, alone=len(self._pending) < 2)
        transport.set_protocol(protocol)
        return transport

    async def _check(self, made: NewConnection) -> None:
        """Check the member and the format of the namespace, and watch. Raises :class:`BackendError`."""
        try:
            status = await made.status()
        except BackendError as error:
            if not (isinstance(error.__cause__, RpcError) and error.__cause__.code == DENIED):
                raise
        else:
            if status.numbers < OLDEST:
                raise BackendRefused(
                    f"{made.host} is etcd {shorten(status.version)}; locks need {'.'.join(map(str, OLDEST))} or later"
                )
            if status.learner:
                raise BackendUnavailable(f"{made.host} is a learner, which serves no clients yet")
            if self._login and not status.leader:
                # It would not answer; meanwhile the name may come to mean another member. At first an election is waited for.
                raise BackendUnavailable(
                    f"{made.host} knows of no leader: a majority of the members is away from it"
                )
        await self._check_format(made)
        with suppress(BackendRefused):
            # Not every user may ask.
            self.members = len(messages.members(await made.ask(messages.MEMBERS)))
        await self._watch(made)

    async def _check_format(self, made: NewConnection) -> None:
        """Mark the namespace with the format of its keys, or check its mark; linearizable, so the member has a leader."""
        key = f"{self._namespace}/format"
        read = await made.ask(messages.TXN, messages.get([key]))
        made.cluster = messages.cluster_of(read)
        if len(self._members.hosts) > 1 and self._cluster not in (0, made.cluster):
            raise UnsafeBackend(
                f"{made.host} belongs to another cluster than the members that were used before: name members of one cluster; "
                "if the cluster was made anew, open the client again"
            )
        [[*found]] = messages.reading(read).rows
        if not found:
            mark = messages.txn([messages.unchanged(key, 0)], [messages.put(key, FORMAT)])
            if messages.written(await made.ask(messages.TXN, mark)).made:
                return
            [[*found]] = messages.reading(await made.ask(messages.TXN, messages.get([key]))).rows
        if found and found[0].value != FORMAT:
            raise UnsafeBackend(
                f"{made.host}: namespace {self._namespace} has keys of version "
                f"{shorten(found[0].value.decode(errors='replace'))}, and this library writes version {FORMAT.decode()}: use "
                "one version of the library everywhere, or another namespace"
            )

    async def _watch(self, made: NewConnection) -> None:
        """Watch the keys, and return when the member does."""
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        left = len(self._watched)
        channel = made.channel

        def received(message: bytes) -> None:
            nonlocal left
            event = messages.events(message)
            if event.canceled:
                error = BackendUnavailable(
                    f"{channel.address} ended the watch: {event.reason or 'no reason given'}"
                )
                if "ermission" in event.reason:
                    reject(
                        ready,
                        BackendRefused(
                            f"{error}; the user needs the right to read the keys of the namespace"
                        ),
                    )
                reject(ready, error)
                self._watch_ended(channel, error)
                return
            if event.created:
                left -= 1
                if not left:
                    settle(ready, None)
            for each in event.puts:
                self._on_change(each.value)

        stream = channel.stream(messages.WATCH, map(messages.watch, self._watched), received)
        channel.flush()

        def ended(stream: asyncio.Future[bytes]) -> None:
            error = None if stream.cancelled() else stream.exception()
            failed = (
                error
                if isinstance(error, BackendError)
                else BackendUnavailable(f"{channel.address}: the watch ended")
            )
            reject(ready, failed)
            self._watch_ended(channel, failed)

        stream.add_done_callback(ended)
        await ready

    def _watch_ended(self, channel: Channel, error: BackendError) -> None:
        """Connect anew after a watch has ended: the member has lost its leader, or the login its time."""
        if channel is self._channel and self.state is ConnectionState.READY:
            self._lost(copy_of(error))
        else:
            # It may have become ready at the same moment, and be taken next.
            channel.ended = "the watch ended"

    def _greet(self, transport: asyncio.WriteTransport) -> None:
        del transport
        self._up()
        if (channel := self._channel) is not None:
            for slot in self._unpark():
                self._send(channel, slot)
            channel.flush()

    def _ping(self, transport: asyncio.WriteTransport) -> None:
        del transport
        if self._channel is not None:
            # A call, because etcd ends the connection of a client that sends it some pings of HTTP/2 and nothing else.
            answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            answer.add_done_callback(_answered)
            self._channel.call(messages.STATUS, b"", answer)
            self._channel.flush()

    def _gone(self, error: BackendError) -> None:
        channel, self._channel = self._channel, None
        super()._gone(error)
        if channel is not None:
            channel.fail(lambda: copy_of(error))

    def _expire(self, now: float) -> float:
        if self._members.user and self._channel is not None and now - self._login >= LOGIN:
            self._login = now
            self._log_in_again(self._channel)
        return super()._expire(now)

    def _log_in_again(self, channel: Channel) -> None:
        def answered(answer: asyncio.Future[bytes]) -> None:
            # Without another token the connection is lost with the first call that the server does not accept any more.
            with suppress(BackendError, ValueError, asyncio.CancelledError):
                channel.token = messages.token(answer.result())

        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        future.add_done_callback(answered)
        request = messages.authenticate(self._members.user, self._members.password)
        channel.call(messages.AUTHENTICATE, request, future)
        channel.flush()


def _answered(answer: asyncio.Future[bytes]) -> None:
    """Do nothing: an error is an answer as well."""
    if not answer.cancelled():
        answer.exception()
