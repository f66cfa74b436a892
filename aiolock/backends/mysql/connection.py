"""One session of the server: commands one after the other, and what is known about its end.

Commands stand in line, callers wait on futures. So a caller that is cancelled leaves the connection in step, with
its command done or never sent, and never an answer for the next one. There is no reconnecting
here: locks live in sessions, and another session is another story.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from typing import Any

from aiolock.backends.mysql.address import Address
from aiolock.backends.mysql.command import Command
from aiolock.backends.mysql.driver import Driver, Result
from aiolock.backends.mysql.failures import INTERRUPTED, Late, code, deadly, translate
from aiolock.clock import Clock
from aiolock.errors import BackendUnavailable, LockError, UnsafeBackend

__all__ = ["Session"]


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
        self._commands: deque[Command] = deque()
        self._urgent: deque[Command] = deque()
        """Those that do not stand behind the others."""
        self._current: Command | None = None
        """What the server has not answered yet."""
        self._repeated = ""
        """What was last sent to wait for others."""
        self._prepared: int | None = None
        """The number of the statement that was prepared for that."""
        self._silent = False
        """Whether the answer to what was sent is late: nothing that is asked now would be answered in time."""
        self._rolling_back = False
        self.interrupt: Callable[[Session], None] | None = None
        """What has the server end the statement whose answer is late, and then calls :meth:`go_on`."""
        self._interrupted = False
        """Whether that is under way: nothing is sent that it could hit."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._over = False
        self._hear = self._heard
        """Who is told what the server answers: one for all that is sent."""
        self.id = 0
        self.locks: dict[str, Any] = {}
        """The user locks of this session, or those that it may have, and for whom."""
        self.silence = 0
        """After how many seconds without a word the server ends it, as far as it has answered; 0: not known."""
        self.contended = False
        """Whether it may block, and counts as one in line."""
        self.lost = False
        """Whether it ended otherwise than by :meth:`quit`."""
        self.used = 0.0
        """When the server last answered."""

    @property
    def alive(self) -> bool:
        """Whether commands can be sent."""
        return self._driver is not None and not self._over

    @property
    def idle(self) -> bool:
        """Whether it has nothing to do at this moment."""
        return self._current is None and not self._commands and not self._urgent

    @property
    def free(self) -> bool:
        """Whether what is sent now is sent at once."""
        return (
            self._current is None
            and not self._over
            and not self._commands
            and not self._urgent
            and not self._rolling_back
            and not self._interrupted
        )

    @property
    def busy(self) -> bool:
        """Whether the server has not answered what was sent."""
        return self._current is not None

    @property
    def blocked(self) -> bool:
        """Whether the server is at a command that waits for others."""
        return self._current is not None and self._current.blocks

    async def open(self, timeout: float) -> list[Result]:
        """Connect and set up within ``timeout`` seconds; the answers to the set-up. Cancelling it leaves nothing."""
        try:
            async with asyncio.timeout(timeout):
                driver = await self._address.connect(self._at_end)
                try:
                    answers = await driver.execute(self._setup)
                    if driver.over:
                        raise BackendUnavailable(f"{self._address.text}: the connection was lost")
                except BaseException:
                    driver.abort()
                    raise
        except LockError:
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
        urgent: bool = False,
    ) -> list[Result]:
        """Send a packet after those that came before, and wait for its answers, at most ``timeout`` seconds.

        The time counts from when it is sent: as long as the server answers, what others have asked for before is no reason
        to give up. One that is ``urgent`` stands only behind others of that kind.

        ``atomic`` says that it is a transaction, which is rolled back if one of its statements fails. ``silence`` is
        the ``wait_timeout`` that the session has from then on; if it must be set, its answer comes first. ``then`` is
        called when the packet is done: such a one gives something back, so it is carried out for as long as the session
        lives, whatever becomes of the caller; if the server refuses it twice, the session ends.

        Cancelling it stops the waiting; the command is carried out if it was sent. When the time is over nobody knows
        whether it was, and it is :class:`Late`: the server is made to end the statement, which may wait for a row of somebody
        else's, and if it does not, the session ends; one that has locks only after as long as they may be silent.
        """
        command = Command(packet, math.inf if timeout is None else timeout)
        command.blocks, command.atomic, command.silence = blocks, atomic, silence
        answer = self._begin(command, then, urgent=urgent)
        try:
            return await answer
        except BaseException:
            # Nobody else looks at it: without this, one that is not on its way yet would still be sent.
            if not answer.cancel():
                answer.exception()
            raise

    def begin(
        self, packet: str, timeout: float, then: Callable[[], None] | None = None
    ) -> asyncio.Future[list[Result]]:
        """Send a packet as :meth:`run` does, in this step; its answers. Raises :class:`BackendUnavailable` if it cannot be sent."""
        answer = self._begin(Command(packet, timeout), then)
        # Whoever waits for it may be gone when the client is closed.
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        return answer

    def _begin(
        self, command: Command, then: Callable[[], None] | None, *, urgent: bool = False
    ) -> asyncio.Future[list[Result]]:
        if not self.alive:
            raise BackendUnavailable(f"{self._address.text}: the connection is closed")
        if self._silent and then is None:
            raise self._unanswered()
        answer: asyncio.Future[list[Result]] = asyncio.get_running_loop().create_future()
        command.answer, command.then = answer, then
        self._take(command, urgent=urgent)
        return answer

    def send(self, packet: str, timeout: float) -> None:
        """Send a packet whose answer nobody waits for."""
        if self.alive:
            self._take(Command(packet, timeout))

    def line_up(self, command: Command) -> None:
        """Send a packet that waits for others; who waits is told by the command's ``heard``."""
        if not self.alive:
            command.tell(BackendUnavailable(f"{self._address.text}: the connection is closed"))
        elif command.timeout < math.inf or not self.at_once(command):
            self._take(command)

    def at_once(self, command: Command) -> bool:
        """The same, if it can be sent now; whether that is so. As :meth:`_take`, on the shortest way."""
        driver = self._driver
        if driver is None or not self.free:
            return False
        packet = command.packet
        if packet != self._repeated:
            self._repeat(driver, packet)
        elif (prepared := self._prepared) is not None:
            driver.repeat(prepared, self._hear)
            self._current = command
            return True
        else:
            driver.prepare(packet, self._learn)
        driver.ask(packet, self._hear, usual=True)
        self._current = command
        return True

    def _repeat(self, driver: Driver, packet: str) -> None:
        """It may be sent again and again from now on; the second time, it is prepared."""
        if self._prepared is not None:
            driver.forget(self._prepared)
        self._repeated, self._prepared = packet, None

    def _learn(self, outcome: list[Result] | Exception) -> None:
        if not isinstance(outcome, Exception):
            self._prepared = outcome[0].rows[0][0]

    # --- one after the other

    def _asked(self) -> list[Command]:
        current = [self._current] if self._current is not None else []
        return [*current, *self._urgent, *self._commands]

    def _take(self, command: Command, *, urgent: bool = False) -> None:
        (self._urgent if urgent else self._commands).append(command)
        self._next()

    def _next(self) -> None:
        """Send what may be sent now."""
        driver = self._driver
        while self._current is None and driver is not None:
            if self._over or self._rolling_back or self._interrupted:
                return
            if not self._urgent and not self._commands:
                return
            command = (self._urgent or self._commands).popleft()
            if command.unwanted:
                # It was not sent.
                continue
            self._current = command
            packet = command.packet
            command.changes = command.silence not in (0, self.silence)
            if command.changes:
                packet = f"SET SESSION wait_timeout={command.silence}; {packet}"
            if command.timeout < math.inf:
                command.late = asyncio.get_running_loop().time() + command.timeout
                if self._timer is None or command.late < self._timer_at:
                    self._arm(command.late)
            driver.ask(packet, self._hear, usual=command.blocks)

    def _heard(self, outcome: list[Result] | Exception) -> None:
        if self._over:
            return
        command, self._current = self._current, None
        assert command is not None  # noqa: S101 - somebody asked
        self._silent = False
        if isinstance(outcome, Exception):
            self._failed(command, outcome)
        else:
            self.used = self._clock()
            if command.changes:
                self.silence = command.silence
            if command.then is not None:
                command.then()
            if (heard := command.heard) is not None:
                command.heard = None
                heard(outcome)
            else:
                command.tell(outcome)
        if self._commands or self._urgent:
            self._next()

    def _failed(self, command: Command, error: Exception) -> None:
        if command.changes:
            self.silence = 0
        fatal = deadly(error)
        if command.then is not None and not fatal:
            if not command.again or code(error) in INTERRUPTED:
                # Whoever ends statements may hit this one as often as he likes.
                command.again = command.again or code(error) not in INTERRUPTED
                self._urgent.appendleft(command)
                return
            fatal = True
        translated = translate(error, self._address.text)
        translated.__cause__ = error
        if fatal:
            self.abort()
        command.tell(translated)
        if command.atomic and not self._over:
            self._rolling_back = True
            if not self._interrupted:
                self._roll_back()

    def _roll_back(self) -> None:
        if self._driver is not None:
            self._driver.ask("ROLLBACK", self._rolled_back)

    def _rolled_back(self, outcome: list[Result] | Exception) -> None:
        if isinstance(outcome, Exception):
            if code(outcome) in INTERRUPTED and not self._over:
                self._roll_back()
            else:
                # The end of the session rolls back as well.
                self.abort()
            return
        self._rolling_back = False
        self._next()

    # --- answers that do not come

    def _arm(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(when, self._look)
        # uvloop returns a handle without `when` for a time that has passed.
        self._timer_at = when

    def _look(self) -> None:
        """One timer for all commands: most are over long before it."""
        self._timer = None
        command = self._current
        if command is None or command.late == math.inf:
            return
        if command.late <= asyncio.get_running_loop().time():
            command.late = math.inf
            self._late(command)
        else:
            self._arm(command.late)

    def _unanswered(self) -> Late:
        return Late(f"{self._address.text}: no answer in time")

    def _late(self, command: Command) -> None:
        command.tell(self._unanswered())
        patient = bool(self.locks and self._patience)
        if self.interrupt is not None and not patient:
            # Others' commands wait for what comes of it.
            self._interrupted = True
            self.interrupt(self)
            return
        self._silent = True
        for queue in (self._urgent, self._commands):
            # What gives something back is sent all the same, if there is anybody to hear it some day.
            waiting = [other for other in queue if other.then is None]
            for other in waiting:
                queue.remove(other)
                other.tell(self._unanswered())
        if patient:
            # With the session its locks would go; until their terms end the answer may still come.
            asyncio.get_running_loop().call_later(self.silence or self._patience, self._given_up, command)
        else:
            self.abort()

    def go_on(self) -> None:
        """The late statement has been ended, and whatever was sent to end it has been answered."""
        if self._over or not self._interrupted:
            return
        self._interrupted = False
        if self._rolling_back:
            self._roll_back()
        else:
            self._next()

    def _given_up(self, command: Command) -> None:
        if command is self._current:
            self.abort()

    def _at_end(self) -> None:
        # What was on its way has been told. While it is being opened, whoever opens it sees to it.
        if self._driver is not None:
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
        self.lost = not quit_first
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._driver is not None:
            if quit_first and self._current is None:
                self._driver.quit()
            else:
                self._driver.abort()
        commands = self._asked()
        self._current = None
        self._commands.clear()
        self._urgent.clear()
        for command in commands:
            command.tell(BackendUnavailable(f"{self._address.text}: the connection was lost"))
        self._ended(self)

    async def drain(self, timeout: float) -> None:
        """Wait for what has been asked for and does not block, such as a release whose caller was told to go on."""
        answers = [
            command.answer for command in self._asked() if command.answer is not None and not command.blocks
        ]
        if answers and self.alive:
            await asyncio.wait(answers, timeout=timeout)
