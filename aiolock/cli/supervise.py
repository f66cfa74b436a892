"""A command under a lock: signals go on to it, it stops and goes on with us, and it does not outlive the lock.

One loop looks at everything that can happen: a signal, the end of the command, the end of the lease, and the clock. What
has to be done about the lease is decided by the pure functions of :mod:`aiolock.cli.loss`.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
from signal import Signals
from typing import Any

from aiolock.cli.child import Child, Switch
from aiolock.cli.dying import DEADLY
from aiolock.cli.guard import BEYOND_US, DYING, Left
from aiolock.cli.inbox import LEAVE, Inbox
from aiolock.cli.inner_runs import OuterHold
from aiolock.cli.loss import Deed, guarded, moment, next_look, what_to_do
from aiolock.cli.output import Output
from aiolock.cli.statuses import LOST, of_child
from aiolock.cli.table import seconds
from aiolock.cli.terminal import Terminal
from aiolock.clock import system_clock
from aiolock.errors import LockLost, LossReason, shorten
from aiolock.lease import Lease

__all__ = ["Supervisor"]

STOPS = {Signals.SIGTSTP, Signals.SIGTTIN, Signals.SIGTTOU}
"""How a terminal stops a job; what stops it otherwise is meant for the command alone."""


GRACE = 0.2
"""Seconds between our own KILL and that of the guard, where nothing depends on the moment."""


class Supervisor:
    """Looks after one command until it ends.

    :param switch: our end of the dead man's switch, or ``None`` with the policy ``warn``.
    :param kill_after: seconds that the command has between TERM and KILL.
    :param policy: ``term``, ``kill`` or ``warn``.
    """

    def __init__(
        self,
        child: Child,
        lease: Lease | OuterHold,
        inbox: Inbox,
        terminal: Terminal,
        switch: Switch | None,
        output: Output,
        *,
        kill_after: float,
        policy: str,
    ) -> None:
        self._child = child
        self._lease = lease
        self._inbox = inbox
        self._terminal = terminal
        self._switch = switch
        self._output = output
        self.kill_after: float = kill_after
        self._policy = policy
        self._lent = terminal.lend_at_once
        """Whether the command gets the terminal again when the job comes back to the foreground."""
        self._stopped = False
        self._asked_at: float | None = None
        """When the command got TERM because of the lock."""
        self._killed = False
        self._told = False
        self._lost: LossReason | None = None
        self._beyond_us = False
        """Whether it was said that the command cannot be killed."""
        self._passed: set[Signals] = set()
        """The signals that came and were passed on."""
        self.died_of: Signals | None = None
        """What a terminal sent, or whoever sent it to us, and the command died of: then we have to die of it as well."""
        self.job_missed = False
        """Whether that went to the command alone, because it had the terminal."""

    async def run(self) -> int:
        """The status to end with. If this is cancelled or fails, the command is killed."""
        ended = asyncio.create_task(self._child.wait())
        losing = asyncio.create_task(self._lease.wait_lost())
        for task in (ended, losing):
            task.add_done_callback(lambda _: self._inbox.wake.set())
        try:
            while not ended.done():
                self._mind_the_lock()
                while (number := self._inbox.take()) is not None:
                    self._on_signal(number)
                if not ended.done():
                    await self._inbox.wait(self._pause())
            return await self._over(ended.result())
        finally:
            losing.cancel()
            if not ended.done():
                self._child.send(Signals.SIGKILL)
            await asyncio.wait([ended, losing])
            self._terminal.take_back(self._child.pid)

    async def _over(self, returncode: int) -> int:
        lent = self._terminal.take_back(self._child.pid)
        if returncode < 0:
            self._terminal.restore()
        if self._guard_was_first(returncode):
            self._say(f"the command was killed, because lock {shorten(self._lease.name)} had ended")
        elif self._asked_at is None and not self._killed:
            if -returncode in DEADLY and (lent or -returncode in self._passed):
                self.died_of, self.job_missed = Signals(-returncode), lent
            return of_child(returncode)
        # What the command has started and left behind worked under the lock as well.
        self._child.send(Signals.SIGKILL)
        give_up = system_clock() + DYING
        # Nothing tells of the end of processes that are no children of ours.
        while (left := self._child.group.left) is Left.OURS and system_clock() < give_up:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        if left is Left.BEYOND_US:
            self._complain()
        return LOST

    def _guard_was_first(self, returncode: int) -> bool:
        """Whether it was the guard that killed the command: we stood still until the lock had ended."""
        told = self._killed or self._asked_at is not None or self._switch is None
        ended = self._lease.remaining() <= moment(self._lease.ttl)
        return not told and ended and returncode == -Signals.SIGKILL

    # --- the lock

    @property
    def _forced(self) -> bool:
        """Whether somebody took the lock away on purpose, and overlaps by design: the command may end in good order."""
        return self._lost == "force-released" and self._policy == "term"

    @property
    def _remaining(self) -> float:
        if self._forced:
            return self.kill_after if self._asked_at is None else math.inf
        return self._lease.remaining()

    @property
    def _since_term(self) -> float | None:
        return None if self._asked_at is None else system_clock() - self._asked_at

    def _pause(self) -> float:
        if self._killed:
            return 1.0
        return next_look(self._remaining, self._lease.ttl, self.kill_after, self._since_term, self._policy)

    def _learn_why(self) -> None:
        # Asked, because the task that waits for it hears it a few passes of the loop later: until then it would look as if
        # the term had run out, of which a command is killed at once.
        if self._lost is None:
            try:
                self._lease.check()
            except LockLost as loss:
                self._lost = loss.reason

    def _mind_the_lock(self) -> None:
        self._learn_why()
        lease = self._lease
        if self._switch is not None and not (self._forced and self._asked_at is not None):
            left = self.kill_after + GRACE if self._forced else guarded(lease.remaining(), lease.ttl)
            self._switch.until(system_clock() + left)
        deed = what_to_do(self._remaining, lease.ttl, self.kill_after, self._since_term, self._policy)
        if self._killed:
            return
        if deed is Deed.KILL:
            self._say(f"killing the command, {self._why()}")
            self._killed = True
            if not self._child.send(Signals.SIGKILL):
                self._complain()
        elif deed is Deed.TERM:
            self._say(f"stopping the command, which has {seconds(self.kill_after)} left: {self._why()}")
            self._asked_at = system_clock()
            self._child.send(Signals.SIGTERM)
            if self._stopped:
                # It could not hear it otherwise.
                self._child.send(Signals.SIGCONT)
        elif self._lost is not None and not self._told:
            self._say(f"the command goes on without the lock, {self._why()}")

    def _why(self) -> str:
        name = shorten(self._lease.name)
        if self._lost is None:
            return f"lock {name} could not be renewed and ends in {seconds(self._lease.remaining())}"
        return f"lock {name} was lost ({self._lost})"

    def _say(self, text: str, **more: Any) -> None:
        self._told = True
        self._output.message(
            text,
            event="lost",
            name=self._lease.name,
            token=self._lease.token,
            reason=self._lost or "expired",
            **more,
        )

    def _complain(self) -> None:
        if not self._beyond_us:
            self._beyond_us = True
            self._say(BEYOND_US, unstoppable=True)
            if self._switch is not None:
                self._switch.told()

    # --- signals

    def pass_on(self, number: Signals) -> None:
        """Send a signal to what the command has left behind in its group."""
        if number in LEAVE:
            self._child.send(number)

    def _on_signal(self, number: Signals) -> None:
        if number is Signals.SIGCHLD:
            stopped = self._child.stopped_by()
            if stopped is not None:
                self._stopped = True
                if stopped in STOPS and self._terminal.there:
                    self._stop(Signals(stopped))
        elif number is Signals.SIGCONT:
            self._resume()
        else:
            self._passed.add(number)
            if not self._child.send(number) and number is not Signals.SIGWINCH:
                self._output.message(
                    f"the command runs as another user and cannot be sent {number.name}: end it yourself, or start "
                    "aiolock as that user",
                    event="not-forwarded",
                    name=self._lease.name,
                    token=self._lease.token,
                    signal=number.name,
                )

    def _stop(self, number: Signals) -> None:
        """The terminal has stopped the command: so stops the job, of which the shell sees only us."""
        if number is not Signals.SIGTSTP and self._terminal.ours:
            # It wants the terminal, which our group has and does not need.
            self._lent = True
            self._resume()
            return
        self._lent = self._terminal.take_back(self._child.pid) or self._lent
        before = signal.signal(Signals.SIGTSTP, signal.SIG_DFL)
        try:
            # All of the job stops in this very call, unless nobody is there who could let it go on.
            os.killpg(os.getpgrp(), Signals.SIGTSTP)
        finally:
            signal.signal(Signals.SIGTSTP, before)

    def _resume(self) -> None:
        """Let the command go on, unless the lock ended while it stood still."""
        if self._policy != "warn" and not self._forced and not self._lease.held:
            self._mind_the_lock()
            return
        if self._lent and self._terminal.ours:
            self._terminal.lend(self._child.pid)
        self._stopped = False
        self._child.send(Signals.SIGCONT)
