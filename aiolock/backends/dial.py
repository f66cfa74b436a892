"""Dial: connect to whichever address of a host answers first, so that one that is silent does not keep from the others.

The event loop's own way tries one address after the other, each for minutes if it is silent; asyncio can do better when asked,
uvloop cannot, and drivers do not ask. So sockets are connected here, and handed to loops and drivers.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, zip_longest
from typing import Any, TypeVar

from aiolock.core.tasks import start

__all__ = ["DELAY", "Dialer", "dial", "first", "interleaved", "numeric", "open_socket"]

DELAY = 0.25
"""Seconds after which the next address is tried, beside those that have not answered; as RFC 8305 recommends."""

P = TypeVar("P", bound=asyncio.BaseProtocol)
Where = tuple[int, int, int, str, Any]
"""An address as ``getaddrinfo`` has it: family, type, protocol, name, socket address."""


def interleaved(addresses: Iterable[Where]) -> list[Where]:
    """Return addresses with families taking turns, beginning with that of the first: one family may not work as a whole."""
    families: dict[int, list[Where]] = {}
    for address in dict.fromkeys(addresses):
        families.setdefault(address[0], []).append(address)
    return [
        address for address in chain.from_iterable(zip_longest(*families.values())) if address is not None
    ]


def numeric(address: str, port: int) -> Sequence[Where]:
    """Return the address of a host that is named by a number, without the thread that a name needs. Raises ``gaierror``."""
    return socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)


async def open_socket(host: str, port: int) -> socket.socket:
    """Return a socket that is connected to the first address of a host that answers.

    Raises :class:`OSError`. Cancelling it leaves no socket behind.
    """
    try:
        found: Sequence[Where] = numeric(host, port)
    except socket.gaierror:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return await first(interleaved(found))


async def first(addresses: Sequence[Where]) -> socket.socket:
    """Return a socket that is connected to the first of these addresses that answers; each is tried when those before it fail
    or are late.

    Raises :class:`OSError`. Cancelling it leaves no socket behind.
    """
    if len(addresses) == 1:
        return await _connected(addresses[0])
    left = list(addresses)
    tasks: list[asyncio.Task[socket.socket]] = []
    running: set[asyncio.Task[socket.socket]] = set()
    chosen: socket.socket | None = None
    try:
        while (left or running) and chosen is None:
            if left:
                tasks.append(start(_connected(left.pop(0)), "aiolock-dial"))
                running.add(tasks[-1])
            done, running = await asyncio.wait(
                running, timeout=DELAY if left else None, return_when=asyncio.FIRST_COMPLETED
            )
            chosen = next((task.result() for task in done if _succeeded(task)), None)
    finally:
        for task in tasks:
            if not task.cancel() and _succeeded(task) and task.result() is not chosen:
                task.result().close()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        except BaseException:
            # A cancellation at this await keeps the caller from the socket.
            if chosen is not None:
                chosen.close()
            raise
    if chosen is not None:
        return chosen
    errors = [error for task in tasks if not task.cancelled() and (error := task.exception()) is not None]
    if len({str(error) for error in errors}) == 1:
        raise errors[0]
    raise OSError(f"no address answers: {', '.join(map(str, errors)) or 'the attempts were cancelled'}")


def _succeeded(task: asyncio.Task[Any]) -> bool:
    return not task.cancelled() and task.exception() is None


async def _connected(address: Where) -> socket.socket:
    family, kind, protocol, _, where = address
    made = socket.socket(family, kind, protocol)
    try:
        made.settimeout(0)
        await asyncio.get_running_loop().sock_connect(made, where)
    except BaseException:
        made.close()
        raise
    return made


async def dial(
    protocol: Callable[[], P], host: str, port: int, *, tls: ssl.SSLContext | None = None
) -> tuple[asyncio.Transport, P]:
    """Connect as ``loop.create_connection`` does, to the first address of a host that answers; ``tls`` verifies its name.

    Raises :class:`OSError`. Cancelling it leaves no socket behind.
    """
    opened = await open_socket(host, port)
    # From here on the transport closes it, also if this is cancelled.
    name = None if tls is None else host
    return await asyncio.get_running_loop().create_connection(
        protocol, sock=opened, ssl=tls, server_hostname=name
    )


class Dialer:
    """The running event loop for a driver that takes one, with :func:`dial` as its way to connect."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def __getattr__(self, name: str) -> Any:
        """Return what the event loop has under this name."""
        return getattr(self._loop, name)

    async def create_connection(
        self, protocol: Callable[[], P], host: str, port: int
    ) -> tuple[asyncio.Transport, P]:
        """Connect to the first address of a host that answers. Cancelling it leaves no socket behind."""
        return await dial(protocol, host, port)
