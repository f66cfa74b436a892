"""What Sentinels say unasked: that another server has become the primary.

Who was it until then may go on taking writes for seconds, until a Sentinel comes round to tell it. Whoever still talks to it would
have locks there that others get at the new one; so we do not wait until we are sent away.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from aiolock.backends.redis.endpoint import Endpoint
from aiolock.backends.redis.pubsub import Subscriber
from aiolock.backends.redis.sentinel import Sentinels
from aiolock.backends.redis.watcher import CHANNEL, RIGHTS, Place, named
from aiolock.clock import Clock
from aiolock.errors import BackendError
from aiolock.logs import Log, get_logger
from aiolock.tasks import start

__all__ = ["Switching"]

log: Log = get_logger("aiolock")

AGAIN = 1.0
"""Seconds after which a Sentinel that could not be reached is tried again."""


class Switching:
    """A subscription at each of them; ``switched(place)`` is called with host and port of a primary that took over.

    Also when a subscription is back after a time in which nothing was heard, if that Sentinel names another one than we
    use: then with those of whoever most of them name now.
    """

    def __init__(
        self, endpoint: Sentinels, *, clock: Clock, command_timeout: float, switched: Callable[[Place], None]
    ) -> None:
        self._endpoint = endpoint
        self._timeout = command_timeout
        self._switched = switched
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._subscribers = [
            Subscriber(
                one,
                CHANNEL,
                clock=clock,
                command_timeout=command_timeout,
                on_message=self._heard,
                on_up=partial(self._up, one),
            )
            for one in endpoint.watchers
        ]

    def open(self) -> None:
        """Begin; nobody waits for it, because whoever is away may come later."""
        for subscriber in self._subscribers:
            self._spawn(self._listen(subscriber))

    async def aclose(self) -> None:
        """End all subscriptions."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.gather(*(subscriber.aclose() for subscriber in self._subscribers))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        if self._closed:
            # A subscription came back while another one was being closed.
            work.close()
            return
        task = start(work, "aiolock-redis-sentinel")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _listen(self, subscriber: Subscriber) -> None:
        while True:
            try:
                await subscriber.open()
            except BackendError:
                await asyncio.sleep(AGAIN)
                continue
            if subscriber.denied is not None:
                log.warning(
                    "%s: an account may not hear there of a failover, which is then noticed late; grant it %s",
                    self._endpoint,
                    RIGHTS,
                )
            return

    def _heard(self, payload: bytes) -> None:
        # The service, where its primary was, and where it is.
        words = payload.decode("utf-8", "replace").rsplit(" ", 4)
        if len(words) != 5 or words[0] != self._endpoint.service:
            return
        with contextlib.suppress(ValueError):
            old, new = (words[1], int(words[2])), (words[3], int(words[4]))
            self._endpoint.learn(new, old)
            self._switched(new)

    def _up(self, sentinel: Endpoint) -> None:
        self._spawn(self._ask(sentinel))

    async def _ask(self, sentinel: Endpoint) -> None:
        # What another one says counts as well, so this one need not be asked until it answers.
        with contextlib.suppress(BackendError):
            place = await named(sentinel, self._endpoint.service, self._timeout)
            if any(place != other for other in list(self._endpoint.places.values())):
                # One that was away itself may name who was the primary before.
                place = await self._endpoint.primary(self._timeout)
                self._endpoint.learn(place)
                self._switched(place)
