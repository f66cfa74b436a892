"""Ways between a client and its server on which single answers are lost, kept back or cut: proxies and in-process links."""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from aiolock.backends.memory import MemoryServer
from aiolock.backends.rows.rules import Machine
from aiolock.backends.rows.store import Listener
from aiolock.core.backend import Settings
from aiolock.core.tasks import start
from aiolock.errors import BackendUnavailable
from tests.faults.proxy import Proxy

__all__ = ["Cuttable", "CuttableStore", "Link", "Linked", "Proxied", "Way", "drop"]


class Way(ABC):
    """What lies between a client and its server."""

    @abstractmethod
    def lose_answer(self) -> None:
        """Lose the next answer of the server, after it has done what it was asked for."""

    @abstractmethod
    def hold(self) -> None:
        """Keep all answers back."""

    @abstractmethod
    def let_go(self) -> None:
        """Deliver what was kept back."""

    @abstractmethod
    def cut(self, *, refused: bool) -> None:
        """Let nothing through any more: connections are refused, or requests stay without an answer."""

    @abstractmethod
    def mend(self) -> None:
        """End what `cut` began; a connection that stays without answers goes on doing so."""

    @abstractmethod
    def settle(self) -> None:
        """Let the client close, which takes its time while no answer comes."""

    @abstractmethod
    def strand(self, mark: bytes = b"") -> None:
        """Keep back what the client asks over the connections that it has, from the first request on that has ``mark`` in it."""

    @property
    @abstractmethod
    def stranded(self) -> bool:
        """Whether a request was kept back."""

    @abstractmethod
    def break_off(self) -> None:
        """Break these connections, as the client sees it; what it asks over others gets through."""

    @abstractmethod
    async def deliver(self) -> None:
        """Have the server carry out what was kept back, late as it is."""


class Proxied(Way):
    """A proxy before each server; `cut` is for the first `away` of them, or for all."""

    def __init__(self, proxies: Sequence[Proxy], away: int | None = None) -> None:
        self._proxies = proxies
        self._away = proxies[:away]

    def lose_answer(self) -> None:
        for proxy in self._proxies:
            proxy.down.drop_next(reset=True)

    def hold(self) -> None:
        for proxy in self._proxies:
            proxy.down.blackhole()

    def let_go(self) -> None:
        for proxy in self._proxies:
            proxy.down.heal()

    def cut(self, *, refused: bool) -> None:
        for proxy in self._away:
            proxy.refuse = refused
            if refused:
                proxy.reset_all()
            else:
                proxy.blackhole()

    def mend(self) -> None:
        for proxy in self._away:
            proxy.refuse = False

    def settle(self) -> None:
        self.mend()
        for proxy in self._away:
            proxy.reset_all()
            proxy.heal(release=False)

    def strand(self, mark: bytes = b"") -> None:
        self._stranded = [proxy.strand(mark) for proxy in self._proxies]

    @property
    def stranded(self) -> bool:
        return any(stranded.begun for stranded in self._stranded)

    def break_off(self) -> None:
        for proxy in self._proxies:
            proxy.reset_all(proxy.up)

    async def deliver(self) -> None:
        for stranded in self._stranded:
            await stranded.deliver()


class Link:
    """A way to a server that takes its time, as a connection does.

    A caller is suspended before its request is sent and until the answer is there. A request on its way arrives even
    if its caller is gone, and then later than everything that is said afterwards.
    """

    def __init__(self, late: int = 12) -> None:
        self._late = late

    async def __call__(self, step: Any) -> Any:
        loop = asyncio.get_running_loop()
        written: asyncio.Future[None] = loop.create_future()
        loop.call_soon(_answer, written, None)
        await written
        reply: asyncio.Future[Any] = loop.create_future()
        arrived = False

        def arrive() -> None:
            nonlocal arrived
            arrived = True
            loop.call_soon(_answer, reply, step())

        arrival = loop.call_soon(arrive)
        try:
            return await reply
        except BaseException:
            if not arrived:
                arrival.cancel()
                self._delay(self._late, step)
            raise

    def _delay(self, passes: int, step: Any) -> None:
        loop = asyncio.get_running_loop()
        if passes:
            loop.call_soon(self._delay, passes - 1, step)
        else:
            step()


def _answer(future: asyncio.Future[Any], answer: Any) -> None:
    if not future.done():
        future.set_result(answer)


class Cuttable(Link):
    """The same, until it is cut."""

    def __init__(self) -> None:
        super().__init__()
        self._refused: bool | None = None
        self._mended: asyncio.Event = asyncio.Event()
        self.deaf = False
        """Whether the next answer is lost."""
        self.gate = asyncio.Event()
        """Set while answers are delivered."""
        self.gate.set()
        self.late: list[Callable[[], Any]] = []
        """Requests that were kept back."""
        self.broken: asyncio.Event | None = None
        """Set once the client is to take what is kept back for lost."""

    async def strand(self, request: Callable[[], Any]) -> None:
        """Keep a request back, if it is time for that, and lose the connection."""
        if self.broken is not None and not self.broken.is_set():
            self.late.append(request)
            await self.broken.wait()
            raise BackendUnavailable("the connection broke")

    async def __call__(self, step: Any) -> Any:
        await self.strand(step)
        if self._refused is False:
            await self._mended.wait()
        if self._refused:
            raise BackendUnavailable("connection refused")
        answer = await super().__call__(step)
        if self.deaf:
            self.deaf = False
            raise BackendUnavailable("the connection broke")
        await self.gate.wait()
        return answer

    def cut(self, refused: bool) -> None:
        """Nothing gets through any more."""
        self._refused = refused

    def mend(self) -> None:
        """Everything does."""
        self._refused = None
        self._mended.set()


class CuttableStore(Cuttable):
    """What lies between a row store and what it stands on.

    `request` names the coroutine method that carries out each request of the store. One that has begun is carried out,
    whatever becomes of its answer.
    """

    def __init__(self, request: str) -> None:
        super().__init__()
        self._request = request

    def put_into(self, store: Any) -> Any:
        """Have the requests of a store take this way; returns the store."""
        open_it, carry_out = store.open, getattr(store, self._request)

        async def opened(settings: Settings, listener: Listener) -> None:
            self._interrupted, self._timeout = listener.interrupted, settings.command_timeout
            await open_it(settings, listener)

        async def request(*words: Any, **named: Any) -> Any:
            try:
                await self.strand(partial(carry_out, *words, **named))
            except BackendUnavailable:
                self._interrupted()
                raise
            begun = start(carry_out(*words, **named), "request")
            try:
                async with asyncio.timeout(self._timeout):
                    return await self._carry(begun)
            except TimeoutError:
                raise BackendUnavailable("no answer in time") from None
            finally:
                begun.add_done_callback(lambda done: done.cancelled() or done.exception())

        store.open = opened
        setattr(store, self._request, request)
        return store

    async def _carry(self, request: Awaitable[Any]) -> Any:
        if self._refused is False:
            await self._mended.wait()
        if self._refused:
            raise BackendUnavailable("the store cannot be reached")
        answer = await request
        if self.deaf:
            self.deaf = False
            self._interrupted()
            raise BackendUnavailable("the answer was lost")
        await self.gate.wait()
        return answer

    def cut(self, refused: bool) -> None:
        super().cut(refused)
        if refused:
            self._interrupted()


class Linked(Way):
    """The links of a client to servers in this process."""

    def __init__(self, links: Sequence[Cuttable]) -> None:
        self._links = links

    def lose_answer(self) -> None:
        for link in self._links:
            link.deaf = True

    def hold(self) -> None:
        for link in self._links:
            link.gate.clear()

    def let_go(self) -> None:
        for link in self._links:
            link.gate.set()

    def cut(self, *, refused: bool) -> None:
        for link in self._links:
            link.cut(refused)

    def mend(self) -> None:
        for link in self._links:
            link.mend()

    def settle(self) -> None:
        self.mend()

    def strand(self, mark: bytes = b"") -> None:
        for link in self._links:
            link.broken = asyncio.Event()

    @property
    def stranded(self) -> bool:
        return any(link.late for link in self._links)

    def break_off(self) -> None:
        for link in self._links:
            if link.broken is not None:
                link.broken.set()

    async def deliver(self) -> None:
        for link in self._links:
            for request in link.late:
                if inspect.isawaitable(answer := request()):
                    await answer


def drop(server: MemoryServer, claim: Any) -> None:
    def step(machine: Machine, now: float) -> None:
        lock = machine._at(claim.key, now)
        del lock.holds[claim.stored.id]
        machine._serve(claim.key, lock, now)

    server.ask(step)
