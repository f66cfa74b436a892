"""Names to addresses: asked anew for each attempt, in a thread that nobody waits for."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import threading
from random import Random

from aiolock.backends.zookeeper.address import Host

__all__ = ["Resolver"]


class Resolver:
    """The addresses behind names; about each name one question at a time, however long the answer takes."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._asked: dict[Host, asyncio.Future[list[str]]] = {}

    async def resolve(self, host: Host) -> list[str]:
        """Every address behind a name, in random order; asked anew each time, because addresses change.

        Cancelling it leaves the question open: the next call waits for the same answer. Raises :class:`OSError`.
        """
        try:
            return [str(ipaddress.ip_address(host.name))]
        except ValueError:
            pass
        asked = self._asked.get(host)
        if asked is None:
            asked = self._asked[host] = _look_up(host)
        await asyncio.wait([asked])
        self._asked.pop(host, None)
        addresses = asked.result()
        return self._random.sample(addresses, len(addresses))


def _look_up(host: Host) -> asyncio.Future[list[str]]:
    """Ask the resolver in a thread that nobody waits for: one that hangs would keep the loop's executor from ending."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[list[str]] = loop.create_future()

    def tell(addresses: list[str] | None, error: OSError | None) -> None:
        if error is not None:
            found.set_exception(error)
            # Nobody may be left who asks, and that is no mistake.
            found.exception()
        else:
            found.set_result(addresses or [])

    def work() -> None:
        addresses: list[str] | None = None
        failure: OSError | None = None
        try:
            answers = socket.getaddrinfo(host.name, host.port, type=socket.SOCK_STREAM)
            addresses = [str(answer[4][0]) for answer in answers]
        except (OSError, UnicodeError) as error:
            failure = (
                error if isinstance(error, OSError) else OSError(f"{host.name} is no host name: {error}")
            )
        # The loop may be gone by now, and with it whoever asked.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(tell, addresses, failure)

    threading.Thread(target=work, name="aiolock-zookeeper-resolve", daemon=True).start()
    return found
