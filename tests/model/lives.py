"""A model of holds that are given other lives: the client's validity and the server's rules, with every order of their messages.

A client has a grant that was pushed, and whose confirmation is under way. It asks for other lives, longer and shorter ones, while
earlier requests are unanswered. Each request arrives at any time, more than once, or never; each answer is heard at any time or
never, which is what a stop of the client looks like as well. The clock of the server is as fast as it may be. Validity
and rules are the library's own.

*Promises*: BELIEF, the server keeps the hold for longer than the client believes in it; LIFE, when the last request was answered,
the client believes in the life that it has asked for.

``removed`` names the rules that are left out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from aiolock.backends.rows.rules import Hold, Lock, Machine, StoredRequest
from aiolock.core.backend import NEVER, Claim, Grant, Release, Request, expires_at
from aiolock.core.renewal import Validity
from aiolock.types import MUTEX

__all__ = ["LivesModel"]

TTL = 60.0
LIVES = (30.0, 120.0)
TICK = 15.0
FAST = 1.009
"""The pace of the server's clock: `expires_at` allows for one per cent."""
KEY = ("mutex", "x")
STORED = StoredRequest("me", "mutex", TTL)
CONFIRMATION = 0
"""The number of the request that confirms the grant."""


class Message(NamedTuple):
    number: int
    seconds: float
    sent: float
    end: float
    """The end of the life that it asks for, as the client has counted it."""
    copies: int = 2
    """How often it may still arrive."""
    answer: bool = False
    """The server has answered, and the client has not heard it."""


class World(NamedTuple):
    now: float
    until: float
    end: float
    fixed: bool
    extensions: int
    deadline: float
    """By the clock of the server, which has shown 0 when that of the client did."""
    extension: int
    messages: tuple[Message, ...]
    wrong: str = ""


class SomeClaim(Claim):
    """The claim of a validity that is looked at, and not used."""

    async def acquire(self, wait: bool) -> Grant | None:
        raise NotImplementedError

    async def release(self, keep: float = 0) -> Release:
        raise NotImplementedError


class LivesModel:
    """One run: how many requests, and the rules that are removed.

    :param requests: how often the client asks for another life.
    :param ticks: after which time passes no more.
    """

    def __init__(self, _: tuple, *, requests: int = 3, ticks: int = 6, removed: tuple[str, ...] = ()) -> None:
        self.requests, self.last, self.removed = requests, ticks * TICK, removed

    def initial(self) -> World:
        window, confirmation = TTL / 10, Message(CONFIRMATION, TTL, 0.0, math.inf)
        return World(
            now=0.0,
            until=expires_at(0.0, window),
            end=math.inf,
            fixed=False,
            extensions=0,
            deadline=window,
            extension=0,
            messages=(confirmation,),
        )

    def key(self, world: World) -> int:
        return hash(world)

    def check(self, world: World) -> str:
        if world.wrong:
            return world.wrong
        left = world.deadline - world.now * FAST
        if world.until > world.now and (left <= 0 or world.until - world.now >= left / FAST):
            return f"BELIEF: until {world.until - world.now:.1f} s from now, and the server keeps it for {left:.1f} s"
        return ""

    # --- what may happen next

    def steps(self, world: World) -> Iterator[tuple[str, World, str]]:
        if world.now < self.last:
            yield "time passes", world._replace(now=world.now + TICK), ""
        if world.extensions < self.requests and world.until > world.now:
            for seconds in LIVES:
                yield f"asks for {seconds:g} s", self.ask(world, seconds), ""
        for place, message in enumerate(world.messages):
            name = f"request {message.number}" if message.number else "the confirmation"
            if message.copies:
                yield f"{name} arrives", self.arrive(world, place), ""
            if message.answer:
                yield f"the answer to {name} is heard", self.hear(world, place), ""

    def validity(self, world: World) -> Validity:
        """Return the validity of the client."""
        claim = SomeClaim(Request("x", MUTEX, TTL, "me", life=TTL))
        validity = Validity(claim, Grant(1, 1, 0.0, demand=False), 0.0, lambda event: None)  # type: ignore[arg-type]
        validity.until, validity.end, validity.extensions = world.until, world.end, world.extensions
        validity.renewed, claim.fixed = not world.fixed, world.fixed
        return validity

    @staticmethod
    def known(world: World, validity: Validity) -> World:
        """Return the world after a change of the validity."""
        fixed = validity.claim.fixed
        return world._replace(
            until=validity.until,
            end=validity.end,
            fixed=fixed,
            extensions=validity.extensions if fixed else 0,
        )

    def ask(self, world: World, seconds: float) -> World:
        validity, until = self.validity(world), world.until
        number, end = validity.begin_extension(seconds, world.now)
        if "an earlier end counts at once" in self.removed:
            validity.until = until
        message = Message(number, seconds, world.now, end)
        return self.known(world, validity)._replace(messages=(*world.messages, message))

    def arrive(self, world: World, place: int) -> World:
        message, machine, now = world.messages[place], Machine(), world.now * FAST
        hold = Hold(STORED, 1, 0.0, deadline=world.deadline, extension=world.extension)
        machine.locks[KEY] = Lock({"me": hold})
        if message.number == CONFIRMATION:
            if "a renewal prolongs nothing that was extended" in self.removed:
                hold.extension = 0
            answer = machine.renew(KEY, STORED, now)
        else:
            if "the server ignores older requests" in self.removed:
                hold.extension = 0
            answer = machine.extend(KEY, STORED, message.seconds, message.number, now)
        changed = message._replace(
            copies=message.copies - 1, answer=answer is not None and message.copies == 2
        )
        if not changed.copies and not changed.answer:
            messages = (*world.messages[:place], *world.messages[place + 1 :])
        else:
            messages = (*world.messages[:place], changed, *world.messages[place + 1 :])
        extension = max(world.extension, hold.extension)
        return world._replace(deadline=hold.deadline, extension=extension, messages=messages)

    def hear(self, world: World, place: int) -> World:
        message, validity, now = world.messages[place], self.validity(world), world.now
        rest = message._replace(answer=False)
        messages = (*world.messages[:place], *((rest,) if rest.copies else ()), *world.messages[place + 1 :])
        if world.until <= now:
            # The hold has ended for the client.
            return world._replace(messages=messages)
        sent = now if "a life counts from the sending of its request" in self.removed else message.sent
        until = expires_at(sent, message.seconds)
        wrong = ""
        if message.number == CONFIRMATION:
            validity.prolong(until, now)
        else:
            number, end = message.number, max(message.end, until)
            if "only the answer to the last request counts" in self.removed:
                number = validity.extensions
            validity.extended(number, end, Grant(1, 0, until, demand=False), now)
            if message.number == world.extensions and validity.until != until:
                wrong = (
                    f"LIFE: until {validity.until - now:.1f} s from now, and it asked for {until - now:.1f} s"
                )
        # A verification proves the hold, and prolongs nothing.
        validity.prolong(NEVER, now)
        return self.known(world, validity)._replace(messages=messages, wrong=wrong)
