"""A session at the server: one connection, its queue of commands, and the ways in which it ends.

Commands wait in a queue, callers on futures. So a caller that is cancelled leaves the connection in step: its command is
carried out or never sent, and its answer goes to no other caller. Sessions do not reconnect, because locks live in them.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from typing import Protocol

from aiolock.backends.mysql.errors import INTERRUPTED, Late, code, deadly, takes_no_writes, translate
from aiolock.backends.mysql.protocol import Driver, Result
from aiolock.backends.mysql.url import Address
from aiolock.clock import Clock, Deadline
from aiolock.core.tasks import reject, settle
from aiolock.errors import BackendUnavailable, LockError, UnsafeBackend

__all__ = ["Answers", "LockUser", "MySQLSession"]

Answers = asyncio.Future[list[Result]]


class _Command:
    """A packet and the future of its answers; :meth:`MySQLSession.run` explains the parameters."""

    __slots__ = ("again", "answers", "atomic", "blocks", "limit", "packet", "then")

    def __init__(
        self,
        packet: str,
        limit: float,
        then: Callable[[], None] | None = None,
        *,
        blocks: bool = False,
        atomic: bool = False,
    ) -> None:
        self.packet = packet
        self.limit = limit
        """Seconds that the answer may take once it was sent."""
        self.then = then
        self.blocks = blocks
        self.atomic = atomic
        self.answers: Answers = asyncio.get_running_loop().create_future()
        self.again = False
        """True if the command was sent before, and the server refused it."""


class LockUser(Protocol):
    """A claim, or a position in a queue, that has a user lock of a session, or may have it, or waits for it."""

    @property
    def leaving(self) -> asyncio.Future[None] | None:
        """Done when it has given the lock back; ``None`` if that has not begun."""
        ...


class MySQLSession:
    """A connection with its own settings, its id at the server, and the user locks that it has."""

    def __init__(
        self,
        address: Address,
        setup: str,
        clock: Clock,
        timeout: float,
        ended: Callable[[MySQLSession], None],
        lateness: float = 0,
        greeted: Callable[[str], None] | None = None,
    ) -> None:
        """Take the functions to call at the end, and with the version of the server, which may refuse it by raising."""
        self._address = address
        self._setup = setup
        self._clock = clock
        self._timeout = timeout
        self._ended = ended
        self._greeted = greeted
        self._lateness = lateness
        """Seconds for which a session that has locks may be late with an answer before it is closed."""
        self._driver: Driver | None = None
        self._commands: deque[_Command] = deque()
        self._urgent: deque[_Command] = deque()
        """Commands that go before the others."""
        self._current: _Command | None = None
        """The command that the server has not answered yet."""
        self._silent = False
        """The current answer is late and is waited for: other commands would be late as well."""
        self._rolling_back = False
        self.interrupt: Callable[[MySQLSession, asyncio.Future[None]], None] | None = None
        """Has the server end the statement whose answer is late, until the future is done, and then calls :meth:`go_on`."""
        self._interrupted: asyncio.Future[None] | None = None
        """An interruption is under way: no statement is sent that it could hit. Done when the late one was answered."""
        self._timer: asyncio.TimerHandle | None = None
        """Calls when the current answer is late."""
        self._over = False
        self.id = 0
        self.locks: dict[str, LockUser] = {}
        """The user locks that this session has or may have, with the claim or position of each."""
        self.silence = 0
        """The ``wait_timeout`` of the session: seconds without a command after which the server ends it; 0: not known."""
        self.contended = False
        """True if a statement on this session may block: it counts among the sessions that do."""
        self.lost = False
        """True if the session ended otherwise than by :meth:`quit`."""
        self.server = ""
        """The name of the server's machine: behind one address may be one server after another."""
        self.demoted = False
        """True if the session ended because its server takes no writes any more."""
        self.used = 0.0
        """The time of the server's last answer."""

    @property
    def alive(self) -> bool:
        """True if commands can be sent."""
        return self._driver is not None and not self._over

    @property
    def idle(self) -> bool:
        """True if no command is sent or waits."""
        return not self._unanswered()

    @property
    def blocked(self) -> bool:
        """True if the server executes a command that waits for others."""
        return self._current is not None and self._current.blocks

    async def open(self, deadline: Deadline) -> list[Result]:
        """Connect and set up by the deadline; the answers to the set-up. Cancelling it leaves nothing."""
        try:
            async with asyncio.timeout(deadline.left()):
                driver = await self._address.connect(self._at_end)
                try:
                    # Before it is asked what it may not understand.
                    if self._greeted is not None:
                        self._greeted(driver.server_version)
                    answers = await driver.execute(self._setup)
                    if driver.wire.over:
                        raise self._lost()
                except BaseException:
                    driver.abort()
                    raise
        except LockError:
            raise
        except Exception as error:
            raise translate(error, self._address.text, plain=self._address.plain) from error
        self.id, self.server = int(answers[-1].rows[0][0]), str(answers[-1].rows[0][-1])
        if self.id != driver.thread_id():
            driver.abort()
            raise UnsafeBackend(
                f"{self._address.text}: a proxy that has its own connection numbers stands in between, and may swap "
                "the session that locks live in: connect to the server itself"
            )
        self._driver = driver
        self.used = self._clock()
        return answers

    # --- commands

    async def run(
        self,
        packet: str,
        *,
        blocks: bool = False,
        limit: float | None = None,
        atomic: bool = False,
        urgent: bool = False,
    ) -> list[Result]:
        """Send a packet after those that came before, and wait for its answers.

        :param blocks: it waits for others, for ``limit`` seconds at most (``None``: as long as it likes).
        :param atomic: it is a transaction, which is rolled back if one of its statements fails.
        :param urgent: it goes before commands that are not.

        Cancelling it stops the waiting; the command is carried out if it was sent. If the server has not answered
        within the timeout since it was sent, it raises :class:`Late`, which leaves open whether it was carried out; the
        server is made to end the statement, which may wait for a row, and if it does not, the session ends. One
        that has locks ends only after that time and its ``lateness``.
        """
        limit = (limit or math.inf) if blocks else self._timeout
        answers = self._take(_Command(packet, limit, blocks=blocks, atomic=atomic), urgent=urgent)
        try:
            return await answers
        finally:
            # Without this, a command of a cancelled caller would still be sent.
            answers.cancel()

    def begin(self, packet: str, then: Callable[[], None] | None = None) -> Answers:
        """Send a packet as :meth:`run` does, in this step; its answers. Raises :class:`BackendUnavailable` if it cannot.

        :param then: called when it is done. Such a command gives something back: it is sent whatever becomes of the
            caller, and if the server refuses it twice, the session ends.
        """
        return self._take(_Command(packet, self._timeout, then))

    def send(self, packet: str) -> None:
        """Send a packet whose answer is not waited for, if the session is alive."""
        if self.alive and not self._silent:
            self.begin(packet)

    async def set_silence(self, seconds: int) -> None:
        """Set the ``wait_timeout``, if it is another one. After an error or a cancellation it is not known."""
        if self.silence != seconds:
            self.silence = 0
            await self.run(f"SET SESSION wait_timeout={seconds}")
            self.silence = seconds

    def _take(self, command: _Command, *, urgent: bool = False) -> Answers:
        if not self.alive:
            raise BackendUnavailable(f"{self._address.text}: the connection is closed")
        if self._silent and command.then is None:
            raise self._no_answer()
        (self._urgent if urgent else self._commands).append(command)
        self._next()
        return command.answers

    def _next(self) -> None:
        """Send the next command if it may be sent now."""
        while self._current is None and (queue := self._urgent or self._commands):
            if self._over or self._rolling_back or self._interrupted is not None:
                return
            command = queue.popleft()
            if command.answers.done() and command.then is None:
                # The caller was cancelled before it was sent.
                continue
            self._current = command
            if command.limit < math.inf:
                self._timer = asyncio.get_running_loop().call_later(command.limit, self._late, command)
            assert self._driver is not None  # noqa: S101 - commands are taken while it is there
            self._driver.wire.ask(command.packet, self._answered)

    def _answered(self, outcome: list[Result] | Exception) -> None:
        if self._over:
            return
        command, self._current = self._current, None
        assert command is not None  # noqa: S101 - one was sent
        self._unset_timer()
        self._silent = False
        if self._interrupted is not None:
            settle(self._interrupted, None)
        if isinstance(outcome, Exception):
            self._failed(command, outcome)
        else:
            self.used = self._clock()
            if command.then is not None:
                command.then()
            if not command.answers.done():
                command.answers.set_result(outcome)
        self._next()

    def _failed(self, command: _Command, error: Exception) -> None:
        # Connecting again finds the server that has taken over. Locks that live in the session end by their terms.
        self.demoted = takes_no_writes(error) and not (self.locks and self._lateness)
        fatal = self.demoted or deadly(error)
        if command.then is not None and not fatal:
            if not command.again or code(error) in INTERRUPTED:
                # KILL QUERY may hit this one any number of times.
                command.again = command.again or code(error) not in INTERRUPTED
                self._urgent.appendleft(command)
                return
            fatal = True
        translated = translate(error, self._address.text)
        translated.__cause__ = error
        if fatal:
            self.abort()
        reject(command.answers, translated)
        if command.atomic and not self._over:
            self._rolling_back = True
            if self._interrupted is None:
                self._roll_back()

    def _roll_back(self) -> None:
        if self._driver is not None:
            self._driver.wire.ask("ROLLBACK", self._rolled_back)

    def _rolled_back(self, outcome: list[Result] | Exception) -> None:
        if not isinstance(outcome, Exception):
            self._rolling_back = False
            self._next()
        elif code(outcome) in INTERRUPTED and not self._over:
            self._roll_back()
        else:
            # The end of the session rolls back as well.
            self.abort()

    # --- late answers

    def _unset_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self, command: _Command) -> None:
        reject(command.answers, self._no_answer())
        tolerated = bool(self.locks and self._lateness)
        if self.interrupt is not None and not tolerated:
            # The other commands wait until the statement was ended.
            self._interrupted = asyncio.get_running_loop().create_future()
            self.interrupt(self, self._interrupted)
            return
        self._silent = True
        for queue in (self._urgent, self._commands):
            # Commands that give something back are sent when the server answers again.
            for other in [other for other in queue if other.then is None]:
                queue.remove(other)
                reject(other.answers, self._no_answer())
        if tolerated:
            # With the session its locks would go, and the answer may come before their leases end.
            asyncio.get_running_loop().call_later(self.silence or self._lateness, self._give_up, command)
        else:
            self.abort()

    def go_on(self) -> None:
        """Send commands again: the late statement was ended, and KILL QUERY was answered."""
        if self._over or self._interrupted is None:
            return
        self._interrupted = None
        if self._rolling_back:
            self._roll_back()
        else:
            self._next()

    def _give_up(self, command: _Command) -> None:
        if command is self._current:
            self.abort()

    def _no_answer(self) -> Late:
        return Late(f"{self._address.text}: no answer in time")

    def _lost(self) -> BackendUnavailable:
        return BackendUnavailable(f"{self._address.text}: the connection was lost")

    # --- the end

    def _at_end(self) -> None:
        # While it is being opened, `open` sees it.
        if self._driver is not None:
            self.abort()

    def abort(self) -> None:
        """Close at once; the server frees its locks as soon as it notices."""
        self._close(quit_first=False)

    def demote(self) -> None:
        """Close at once, because the server takes no writes any more."""
        self.demoted = True
        self.abort()

    def quit(self) -> None:
        """Close in good order."""
        self._close(quit_first=True)

    def _close(self, *, quit_first: bool) -> None:
        if self._over:
            return
        self._over = True
        self.lost = not quit_first
        self._unset_timer()
        if self._driver is not None:
            if quit_first and self._current is None:
                self._driver.quit()
            else:
                self._driver.abort()
        unanswered = self._unanswered()
        self._current = None
        self._commands.clear()
        self._urgent.clear()
        if self._interrupted is not None:
            settle(self._interrupted, None)
        for command in unanswered:
            reject(command.answers, self._lost())
        self._ended(self)

    def _unanswered(self) -> list[_Command]:
        current = [self._current] if self._current is not None else []
        return [*current, *self._urgent, *self._commands]

    async def drain(self) -> None:
        """Wait for commands that do not block, such as a release whose caller did not wait for it.

        Cancelling it ends the wait only.
        """
        answers = [command.answers for command in self._unanswered() if not command.blocks]
        if answers and self.alive:
            await asyncio.wait(answers, timeout=self._timeout)
