"""A first look: workers contend for a lock, one dies, one loses its lease, and its late write is refused.

Three scenes are played on a stage (:mod:`aiolock.stage`); this process tells the story, and guards the resource that
the workers write to.
"""

from __future__ import annotations

import asyncio
import logging

import aiolock
from aiolock.backends import redact
from aiolock.clock import system_clock
from aiolock.stage import LIMIT, NAME, TTL, Event, Here, Order, Processes, Stage

__all__ = ["demo"]


class Story:
    """Tells what happens, and is the resource that the lock protects: it accepts no token older than one it has seen."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._start = system_clock()
        self._seen: list[Event] = []
        self._highest = 0
        self.grants = 0
        self.refused = 0

    def say(self, text: str) -> None:
        """A line of the narrator's."""
        print(text, flush=True)

    def tell(self, who: str, text: str) -> None:
        """A line about somebody, with the time."""
        print(f"  {system_clock() - self._start:5.2f} s  {who}  {text}", flush=True)

    async def see(self, who: str, what: str) -> None:
        """Go on until ``who`` did ``what`` in this scene."""
        while not any(event.who == who and event.what == what for event in self._seen):
            event = await self._stage.events.get()
            self._seen.append(event)
            self._react(event)

    def _react(self, event: Event) -> None:
        who, what, token, detail = event
        if what == "enters":
            self.grants += 1
            self.tell(who, f"has the lock, with fencing token {token}")
        elif what == "writes":
            if token < self._highest:
                self.refused += 1
                self.tell(who, f"writes with token {token}: REFUSED, {self._highest} was here already")
            else:
                self._highest = token
                self.tell(who, f"writes with token {token}: accepted")
            self._stage.answer(who)
        elif what == "lost":
            self.tell(who, f"its block is cancelled, and ends with LockLost ({detail})")
        elif what == "failed":
            raise aiolock.BackendError(f"{who} gave up: {detail}")

    async def play(self) -> None:
        """The three scenes and the summary."""
        stage = self._stage
        ann, bob, eve = "worker-1", "worker-2", "worker-3"
        for who in (ann, bob, eve):
            await stage.hire(who)

        self.say(f"\n1. Three workers want the lock {NAME!r}, twice each. One at a time is inside.")
        self.say("   Every turn has a fencing token, greater than all before it; gaps mean nothing.")
        for who in (ann, bob, eve):
            stage.order(who, Order(2, 0.15))
        for who in (ann, bob, eve):
            await self.see(who, "done")

        self.say(f"\n2. A holder dies. The server keeps its lock for at most the ttl, here {TTL:g} s.")
        await self._occupy(ann, bob)
        died = system_clock()
        stage.kill(ann)
        self.tell(ann, stage.dies)
        await self.see(bob, "enters")
        self.tell(bob, f"waited {system_clock() - died:.2f} s for what was left of the dead worker's ttl")
        await self.see(bob, "done")

        self.say(
            "\n3. A holder is alive, but out of reach. It is told that its lock is lost, and its late write fails."
        )
        await self._occupy(bob, eve)
        stage.freeze(bob)
        self.tell(bob, stage.freezes)
        await self.see(eve, "done")
        stage.wake(bob)
        self.tell(bob, stage.wakes)
        await self.see(bob, "done")

    async def _occupy(self, holder: str, waiter: str) -> None:
        self._seen.clear()
        self._stage.order(holder, Order(1, 3600.0))
        await self.see(holder, "enters")
        self._stage.order(waiter, Order(1, 0.1))
        await self.see(waiter, "asks")

    async def end(self, observer: aiolock.Client) -> None:
        """The summary."""
        info = await observer.lock(NAME).inspect()
        left = "nothing is left" if not info.holders and not info.waiters else f"left behind: {info}"
        self.say(
            f"\nIn {system_clock() - self._start:.1f} s the lock was granted {self.grants} times. One worker died and one "
            "lost its lease;\nnobody had to tidy up after them. "
            f"{self.refused} late write was refused by its fencing token. On the server, {left}."
        )


async def demo(url: str) -> None:
    """Play the story on the server at ``url``, in a few seconds; raises what :func:`aiolock.connect` and ``open`` do."""
    # Refuses what cannot work before anything starts.
    aiolock.connect(url)
    local = url.lower().startswith("memory://")
    stage: Stage = Here() if local else Processes(url)
    # Losses are part of the story; their log lines would be told twice.
    logging.getLogger("aiolock").addHandler(logging.NullHandler())
    async with stage.observer() as observer:
        story = Story(stage)
        where = "a server in this process" if local else f"{redact(url)} and three worker processes"
        story.say(f"aiolock {aiolock.__version__}, with {where}.")
        try:
            async with asyncio.timeout(LIMIT):
                await story.play()
                await story.end(observer)
        except TimeoutError:
            raise aiolock.BackendUnavailable(
                f"the demonstration did not come to its end within {LIMIT:g} s"
            ) from None
        finally:
            await stage.close()
