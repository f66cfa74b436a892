"""One session of the server: commands one after the other, and what is known about its end.

A task carries out what there is to do, callers wait on futures. So a caller that is cancelled leaves the
connection in step, with its command done or never sent, and never an answer for the next one. There is no reconnecting
here: locks live in sessions, and another session is another story.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from aiolock.backends.mysql.address import Address
from aiolock.backends.mysql.driver import Driver, Result
from aiolock.backends.mysql.failures import deadly, translate
from aiolock.clock import Clock
from aiolock.errors import BackendUnavailable, UnsafeBackend

__all__ = ["Session"]


class _Command:
    __slots__ = ("again", "answer", "atomic", "blocks", "packet", "silence", "then")

    def __init__(
        self,
        packet: str,
        answer: asyncio.Future[list[Result]],
        *,
        blocks: bool = False,
        atomic: bool = False,
        silence: int = 0,
        then: Callable[[], None] | None = None,
    ) -> None:
        self.packet = packet
        self.silence = silence
        """After how many seconds without a word the server is to end the session from then on; 0: as it is."""
        self.then = then
        """What is called when it is done; a command with this is sent even if nobody waits for it any more."""
        self.again = False
        """Whether it was sent before, and refused."""
        self.blocks = blocks
        """Whether it waits for others, as it should: nobody waits for its end when the session is closed."""
        self.atomic = atomic
        """Whether it is a transaction: what is left of one that failed must not become part of the next command."""
        self.answer = answer


class Session:
    """A connection with its own settings, its id at the server, and the user locks that it has."""

    def __init__(
        self,
        address: Address,
        setup: str,
        clock: Clock,
        ended: Callable[[Session], None],
        patience: float = 0,
    ) -> None:
        self._address = address
        self._setup = setup
        self._clock = clock
        self._ended = ended
        self._patience = patience
        """For how many seconds a session that has locks may be late with an answer before it is given up."""
        self._driver: Driver | None = None
        self._commands: deque[_Command] = deque()
        self._current: _Command | None = None
        self._worker: asyncio.Task[None] | None = None
        self._over = False
        self.id = 0
        self.locks: dict[str, Any] = {}
        """The user locks of this session, or those that it may have, and for whom."""
        self.silence = 0
        """After how many seconds without a word the server ends it, as far as it has answered; 0: not known."""
        self.contended = False
        """Whether it may block, and counts as one in line."""
        self.used = 0.0
        """When the server last answered."""

    @property
    def alive(self) -> bool:
        """Whether commands can be sent."""
        return self._driver is not None and not self._over

    @property
    def idle(self) -> bool:
        """Whether it has nothing to do at this moment."""
        return self._current is None and not self._commands

    async def open(self, timeout: float) -> list[Result]:
        """Connect and set up within ``timeout`` seconds; the answers to the set-up. Cancelling it leaves nothing."""
        try:
            async with asyncio.timeout(timeout):
                driver = await self._address.connect(self._at_end)
                try:
                    answers = await driver.execute(self._setup)
                except BaseException:
                    driver.abort()
                    raise
        except Exception as error:
            raise translate(error, self._address.text) from error
        self.id = int(answers[-1].rows[0][0])
        if self.id != driver.thread_id():
            driver.abort()
            raise UnsafeBackend(
                f"{self._address.text}: a proxy that has its own connection numbers stands in between, and may swap "
                "the session that locks live in: connect to the server itself"
            )
        self._driver = driver
        self.used = self._clock()
        self._worker = asyncio.get_running_loop().create_task(
            self._serve(driver), name="aiolock-mysql-session"
        )
        return answers

    async def run(
        self,
        packet: str,
        timeout: float | None,
        *,
        blocks: bool = False,
        atomic: bool = False,
        silence: int = 0,
        then: Callable[[], None] | None = None,
    ) -> list[Result]:
        """Send a packet after those that came before, and wait for its answers, at most ``timeout`` seconds.

        ``atomic`` says that it is a transaction, which is rolled back if one of its statements fails. ``silence`` is
        the ``wait_timeout`` that the session has from then on; if it must be set, its answer comes first. ``then`` is
        called when the packet is done: such a one gives something back, so it is carried out for as long as the session
        lives, whatever becomes of the caller; if the server refuses it twice, the session ends.

        Cancelling it stops the waiting; the command is carried out if it was sent. When the time is over nobody knows
        whether it was, and the session ends; one that has locks only after as long as they may be silent.
        """
        if not self.alive:
            raise BackendUnavailable(f"{self._address.text}: the connection is closed")
        loop = asyncio.get_running_loop()
        command = _Command(
            packet, loop.create_future(), blocks=blocks, atomic=atomic, silence=silence, then=then
        )
        self._take(command)
        timer = None if timeout is None else loop.call_later(timeout, self._late, command, timeout)
        try:
            return await command.answer
        except BaseException:
            # Nobody else looks at it: without this, one that is not on its way yet would still be sent.
            if not command.answer.cancel():
                _look(command.answer)
            if timer is not None and command is self._current:
                # Whether the session is well has to be found out all the same.
                timer = None
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def send(self, packet: str, timeout: float) -> None:
        """Send a packet whose answer nobody waits for."""
        if self.alive:
            command = _Command(packet, asyncio.get_running_loop().create_future())
            command.answer.add_done_callback(_look)
            self._take(command)
            asyncio.get_running_loop().call_later(timeout, self._late, command, timeout)

    # --- the worker

    def _take(self, command: _Command) -> None:
        self._commands.append(command)
        if self._driver is not None and (self._worker is None or self._worker.done()):
            work = self._serve(self._driver)
            self._worker = asyncio.get_running_loop().create_task(work, name="aiolock-mysql-session")

    async def _serve(self, driver: Driver) -> None:
        while self._commands and not self._over:
            command = self._commands.popleft()
            if command.answer.done() and command.then is None:
                # Nobody waits for it any more, and it was not sent.
                continue
            self._current = command
            packet = command.packet
            if change := command.silence not in (0, self.silence):
                packet = f"SET SESSION wait_timeout={command.silence}; {packet}"
            if command.answer.done():
                # Its caller's timer is over.
                asyncio.get_running_loop().call_later(self.silence or self._patience, self._given_up, command)
            try:
                answers = await driver.execute(packet)
            except Exception as error:  # noqa: BLE001 - whatever the driver raises, the caller hears of it
                if change:
                    self.silence = 0
                if command.then is not None and not deadly(error):
                    if not command.again:
                        command.again = True
                        self._commands.appendleft(command)
                        self._current = None
                        continue
                    self.abort()
                if not command.answer.done():
                    translated = translate(error, self._address.text)
                    translated.__cause__ = error
                    command.answer.set_exception(translated)
                if deadly(error) or (command.atomic and not await _rolled_back(driver)):
                    self.abort()
            else:
                self.used = self._clock()
                if change:
                    self.silence = command.silence
                if command.then is not None:
                    command.then()
                if not command.answer.done():
                    command.answer.set_result(answers)
            self._current = None
            if not driver.usable:
                self.abort()

    def _late(self, command: _Command, timeout: float) -> None:
        if not command.answer.done():
            command.answer.set_exception(
                BackendUnavailable(f"{self._address.text}: no answer within {timeout:g} s")
            )
        elif command is not self._current:
            return
        if self.locks and self._patience:
            # With the session its locks would go; until their terms end the answer may still come.
            asyncio.get_running_loop().call_later(self.silence or self._patience, self._given_up, command)
        else:
            self.abort()

    def _given_up(self, command: _Command) -> None:
        if command is self._current:
            self.abort()

    def _at_end(self) -> None:
        # Answers that have been received are read first: the command under way ends by itself.
        if self._driver is not None and self._current is None:
            self.abort()

    # --- the end

    def abort(self) -> None:
        """Close at once; the server frees what the session has as soon as it notices."""
        self._close(quit_first=False)

    def quit(self) -> None:
        """Close in good order."""
        self._close(quit_first=True)

    def _close(self, *, quit_first: bool) -> None:
        if self._over:
            return
        self._over = True
        if self._driver is not None:
            if quit_first and self._current is None:
                self._driver.quit()
            else:
                self._driver.abort()
        if self._worker is not None and self._worker is not asyncio.current_task(self._worker.get_loop()):
            self._worker.cancel()
        commands = [*self._commands, *([self._current] if self._current else [])]
        self._commands.clear()
        for command in commands:
            if not command.answer.done():
                command.answer.set_exception(
                    BackendUnavailable(f"{self._address.text}: the connection was lost")
                )
        self._ended(self)

    async def drain(self, timeout: float) -> None:
        """Wait for what has been asked for and does not block, such as a release whose caller was told to go on."""
        commands = [*self._commands, *([self._current] if self._current else [])]
        answers = [command.answer for command in commands if not command.blocks]
        if answers and self.alive:
            await asyncio.wait(answers, timeout=timeout)

    async def wait_closed(self) -> None:
        """Until the worker has ended."""
        if self._worker is not None:
            await asyncio.wait([self._worker])


async def _rolled_back(driver: Driver) -> bool:
    try:
        await driver.execute("ROLLBACK")
    except Exception:  # noqa: BLE001 - the end of the session rolls back as well
        return False
    return True


def _look(answer: asyncio.Future[list[Result]]) -> None:
    if not answer.cancelled():
        answer.exception()
