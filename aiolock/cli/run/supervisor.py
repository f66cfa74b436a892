"""Supervise a command under a lock: forward signals, follow job control, stop it before the lock can have another holder."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Mapping, Sequence
from enum import Enum
from signal import Signals

from aiolock.cli.exit_status import LOST, OVERDUE, Ended, ended_by, of_child, of_exec
from aiolock.cli.output import Output, seconds
from aiolock.cli.run import guard
from aiolock.cli.run.guard import Reach
from aiolock.cli.run.signals import DEADLY, ENDING, FORWARDED, SignalQueue, Terminal, blocked, stop
from aiolock.clock import system_clock
from aiolock.errors import ConfigError, LockLost, LossReason, UnsupportedKind, shorten
from aiolock.lease import Lease

__all__ = [
    "UNSTOPPABLE",
    "Action",
    "Child",
    "Supervisor",
    "Switch",
    "check_kill_after",
    "decide",
    "guarded",
    "moment",
    "token_of",
]

POLL = 0.25
"""Seconds between checks of the clock: timers stand still while the machine is suspended, the clock does not."""

GRACE = 0.2
"""Seconds between the KILL of the supervisor and that of the guard, where nothing depends on the moment."""

MOST_OF_TTL = 3.0
"""``kill_after`` is at most a third of the ttl: an undisturbed lease is always longer than that."""

STOPS = {Signals.SIGTSTP, Signals.SIGTTIN, Signals.SIGTTOU}
"""Signals with which a terminal stops a job; SIGSTOP is meant for the command alone."""

UNSTOPPABLE = (
    "the command CANNOT BE KILLED, because it or a part of it runs as another user: it goes on WITHOUT THE LOCK, and may "
    "be at work together with the next holder"
)

PROGRAM = (sys.executable, "-I", "-S", guard.__file__)
"""An interpreter that starts quickly and ignores the environment of the command."""


# --- when to stop the command


class Action(Enum):
    """The next step against a command that must not outlive its lock."""

    NOTHING = "nothing"
    TERM = "term"
    KILL = "kill"


def moment(ttl: float) -> float:
    """Seconds between KILL and the end of the lease: processes need a little time to die."""
    return min(max(0.02 * ttl, 0.02), 0.5)


def token_of(lease: Lease) -> int | None:
    """Return the fencing token; ``None`` if the lock has none."""
    try:
        return lease.token
    except UnsupportedKind:
        return None


def guarded(remaining: float, ttl: float) -> float:
    """Seconds until the guard kills the command, a little later than the supervisor."""
    return max(0.0, remaining - moment(ttl) / 2)


def check_kill_after(kill_after: float | None, ttl: float) -> float:
    """Return the seconds between TERM and KILL; raises :class:`ConfigError` if a lease of that ttl leaves no room for them."""
    if kill_after is None:
        return min(5.0, ttl / 4)
    if kill_after > ttl / MOST_OF_TTL:
        raise ConfigError(
            f"--kill-after {kill_after:g} needs a --ttl of at least {kill_after * MOST_OF_TTL:g}, not {ttl:g}: "
            "renewals must have time to be tried again before the command is stopped"
        )
    return kill_after


def decide(
    remaining: float, ttl: float, kill_after: float, since_term: float | None, policy: str
) -> tuple[Action, float]:
    """Return the next step, and the seconds after which to decide again.

    The command gets TERM so early that it has ``kill_after`` seconds to end in good order, and KILL a moment before the server
    may grant the lock to another holder. A renewal that succeeds in between does not call TERM back: the command is on its way out.

    :param remaining: seconds for which the hold is certain; 0 if it is gone.
    :param since_term: seconds since TERM was sent, or ``None``.
    :param policy: ``term``, ``kill`` or ``warn``.
    """
    last = moment(ttl)
    if policy == "warn":
        return Action.NOTHING, POLL
    if remaining <= last or (since_term is not None and since_term >= kill_after):
        return Action.KILL, POLL
    action, pause = Action.NOTHING, min(POLL, remaining - last)
    if since_term is not None:
        pause = min(pause, kill_after - since_term)
    elif policy == "term" and remaining <= kill_after:
        action, pause = Action.TERM, min(pause, kill_after)
    elif policy == "term":
        pause = min(pause, remaining - kill_after)
    return action, max(0.001, pause)


# --- the processes: the command in its own process group, and the guard


class Child:
    """A command in a process group of its own, made by :meth:`start`."""

    def __init__(self, command: str, process: Process, report: int) -> None:
        self._command = command
        self._process = process
        self._report = report
        self.pid: int = process.pid
        """The id of the process, and of its group."""

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        foreground: bool,
        switch: Switch | None,
    ) -> Child:
        """Start ``command``, which inherits the standard streams.

        With a ``switch``, the guard kills its group and the kernel the command if aiolock is killed. Cancelling it kills
        what was started.
        """
        report, write = os.pipe()
        try:
            # The new process inherits this mask, so that signals wait until the command takes them.
            with blocked(*FORWARDED, Signals.SIGTTOU) as before:
                numbers = ",".join(map(str, sorted(before)))
                pipe = () if switch is None else (switch.pipe,)
                prepare = (write, *(pipe or (-1,)), os.getpid(), int(foreground), numbers)
                process = await asyncio.create_subprocess_exec(
                    *PROGRAM, *map(str, prepare), *command, env=environment, pass_fds=(write, *pipe)
                )
        except BaseException:
            os.close(report)
            raise
        finally:
            os.close(write)
        return cls(command[0], process, report)

    def send(self, number: int) -> Reach:
        """Send a signal to the whole process group."""
        reach = guard.send(self.pid, number)
        if reach is Reach.GONE:
            # The first moments of the process, before it has a group. What waits for a blocked signal gets it as the command.
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
        return reach

    async def kill(self) -> Reach:
        """Kill the whole process group, and wait until it is gone; return what is left. Cancelling it ends the waiting."""
        return await asyncio.to_thread(guard.kill, self.pid)

    def stopped_by(self) -> int | None:
        """The signal that has stopped the command since the last call."""
        try:
            state = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG)
        except ChildProcessError:
            return None
        return None if state is None else state.si_status

    async def wait(self) -> int:
        """Wait for the end of the command; a negative number is a signal. Cancelling it changes nothing.

        Raises :class:`Ended` with the status of shells if the command could not be executed.
        """
        returncode = await self._process.wait()
        with open(self._report, "rb") as report:  # noqa: PTH123, ASYNC230 - a pipe that nothing has open any more
            error = report.read()
        if error:
            raise Ended(of_exec(int(error)), f"cannot run {self._command}: {os.strerror(int(error))}")
        return returncode


class Switch:
    """The writing end of the dead man's switch (:mod:`aiolock.cli.run.guard`); works without effect if the guard is gone."""

    def __init__(self, process: Process, pipe: int) -> None:
        self._process = process
        self.pipe = pipe
        """The guard acts when no process has it open any more."""

    @classmethod
    async def start(cls, complaint: str) -> Switch:
        """Start the guard, which writes ``complaint`` to stderr if it cannot kill the command.

        Cancelling it leaves no process.
        """
        read, write = os.pipe()
        try:
            # A session of its own: out of reach of the terminal and of signals for the group of aiolock.
            process = await asyncio.create_subprocess_exec(
                *PROGRAM,
                stdin=read,
                stdout=DEVNULL,
                cwd="/",
                env={},
                start_new_session=True,
            )
        except BaseException:
            os.close(write)
            raise
        finally:
            os.close(read)
        os.set_blocking(write, False)  # noqa: FBT003 - the argument has no name
        switch = cls(process, write)
        switch.complain(complaint)
        return switch

    def until(self, moment: float) -> None:
        """Set the deadline, on the clock of :mod:`aiolock.clock`."""
        self._write(f"until {moment!r}")

    def complain(self, text: str) -> None:
        """Set the complaint about a group that cannot be killed; empty once aiolock has made it."""
        self._write(f"complaint {text}")

    async def stop(self) -> None:
        """End the guard without effect. Cancelling it ends the waiting: the guard is already killed."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        os.close(self.pipe)
        await self._process.wait()

    def _write(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            os.write(self.pipe, f"{line}\n".encode())


# --- the supervisor


class Supervisor:
    """Supervises one command until it ends.

    One loop serves everything that can happen: a signal, the end of the command, the loss of the lease, and the clock.

    :param switch: the dead man's switch, or ``None`` with the policy ``warn``.
    :param kill_after: most seconds between TERM and KILL; half of what is left of the lease, if that is less.
    :param policy: ``term``, ``kill`` or ``warn``.
    :param max_hold: seconds after which the command is stopped; the lock is held until it is gone.
    :param began: the time of the grant, from which they count.
    """

    def __init__(
        self,
        child: Child,
        lease: Lease,
        queue: SignalQueue,
        terminal: Terminal,
        switch: Switch | None,
        output: Output,
        *,
        kill_after: float,
        policy: str,
        max_hold: float = math.inf,
        began: float = 0.0,
    ) -> None:
        self._child = child
        self._lease = lease
        self._queue = queue
        self._terminal = terminal
        self._switch = switch
        self._output = output
        self._policy = policy
        # A server may grant a shorter ttl than it was asked for.
        self._kill_after: float = min(kill_after, lease.remaining() / 2)
        self._max_hold = max_hold
        self._due: float = began + max_hold
        """The time at which the command is stopped."""
        self.ending: Ended | None = None
        """The death by a signal to repeat: the command died of a signal of the terminal, or of one that was passed on."""
        self.by_itself = False
        """True once the command has ended, unless it was stopped, or asked to end by a signal."""
        self._lent = terminal.lend_at_once
        """True if the command gets the terminal again when the job comes back to the foreground."""
        self._stopped = False
        self._term_at: float | None = None
        """The time of TERM because of the lock."""
        self._killed = False
        self._overdue = False
        """True once ``max_hold`` is over, and the lock was not lost before."""
        self._reported = False
        self._complained = False
        self._lost: LossReason | None = None
        self._passed: set[Signals] = set()

    async def run(self) -> int:
        """Return the status to end with. If this is cancelled or fails, the command is killed."""
        ended = asyncio.create_task(self._child.wait())
        losing = asyncio.create_task(self._lease.wait_lost())
        for task in (ended, losing):
            self._queue.watch(task)
        try:
            while not ended.done():
                pause = self._follow_lock()
                for number in self._queue.taken():
                    self._on_signal(number)
                if not ended.done():
                    await self._queue.wait(pause)
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
        if self._term_at is None and not self._killed:
            # The guard kills the command if aiolock stood still until the lock had ended.
            ended = self._switch is not None and self._lease.remaining() <= moment(self._lease.ttl)
            if not ended or returncode != -Signals.SIGKILL:
                if -returncode in DEADLY and (lent or -returncode in self._passed):
                    self.ending = ended_by(-returncode, job=lent)
                self.by_itself = self.ending is None and self._passed.isdisjoint(ENDING)
                return of_child(returncode)
            self._report(f"the command was killed, because lock {shorten(self._lease.name)} had ended")
        # The children that the command has left behind worked under the lock as well.
        if await self._child.kill() is Reach.FOREIGN:
            self._complain()
        return OVERDUE if self._overdue and self._lost is None else LOST

    # --- the lock

    @property
    def _forced(self) -> bool:
        """True if the lock was taken away on purpose, and overlaps by design: the command may end in good order."""
        return self._lost == "force-released" and self._policy == "term"

    def _follow_lock(self) -> float:
        """Do what the state of the lease demands; return the seconds after which to check again."""
        # Asked, because `losing` ends a few passes of the loop after the loss: until then it would look as if the lease had
        # expired, of which a command is killed at once.
        if self._lost is None:
            try:
                self._lease.check()
            except LockLost as loss:
                self._lost = loss.reason
        now, ttl, remaining = system_clock(), self._lease.ttl, self._lease.remaining()
        since_term = None if self._term_at is None else now - self._term_at
        until = now + guarded(remaining, ttl)
        if self._forced:
            remaining = self._kill_after if since_term is None else math.inf
            until = now + self._kill_after + GRACE
        elif now >= self._due and (self._overdue or self._lost is None):
            self._overdue = True
            if self._policy == "kill":
                remaining = 0.0
            elif since_term is None:
                remaining = min(remaining, self._kill_after)
        if self._switch is not None and not (self._forced and since_term is not None):
            self._switch.until(until)
        action, pause = decide(remaining, ttl, self._kill_after, since_term, self._policy)
        if not self._overdue:
            pause = max(0.001, min(pause, self._due - now))
        if self._killed:
            return POLL
        if action is Action.KILL:
            self._report(f"killing the command, {self._why()}")
            self._killed = True
            if self._child.send(Signals.SIGKILL) is Reach.FOREIGN:
                self._complain()
        elif action is Action.TERM:
            self._report(f"stopping the command, which has {seconds(self._kill_after)} left: {self._why()}")
            self._term_at = now
            self._child.send(Signals.SIGTERM)
            if self._stopped:
                # A stopped process does not take TERM.
                self._child.send(Signals.SIGCONT)
        elif self._lost is not None and not self._reported:
            self._report(f"the command goes on without the lock, {self._why()}")
        return pause

    def _why(self) -> str:
        name = shorten(self._lease.name)
        if self._overdue and self._lost is None:
            return f"it has had lock {name} for longer than --max-hold {self._max_hold:g}"
        if self._lost is None:
            return f"lock {name} could not be renewed and ends in {seconds(self._lease.remaining())}"
        return f"lock {name} was lost ({self._lost})"

    def _report(self, text: str, event: str = "lost", **more: str | bool) -> None:
        if event == "lost" and self._overdue and self._lost is None:
            event = "overdue"
        elif event == "lost":
            self._reported = True
            more = {"reason": self._lost or "expired", **more}
        self._output.message(text, event=event, name=self._lease.name, token=token_of(self._lease), **more)

    def _complain(self) -> None:
        if not self._complained:
            self._complained = True
            self._report(UNSTOPPABLE, unstoppable=True)
            if self._switch is not None:
                self._switch.complain("")

    # --- signals

    def _on_signal(self, number: Signals) -> None:
        if number is Signals.SIGCHLD:
            by = self._child.stopped_by()
            if by is not None:
                self._stopped = True
                if by in STOPS and self._terminal.there:
                    self._stop_job(by)
        elif number is Signals.SIGCONT:
            self._resume()
        else:
            self._passed.add(number)
            if self._child.send(number) is Reach.FOREIGN and number is not Signals.SIGWINCH:
                text = (
                    f"the command runs as another user and cannot be sent {number.name}: end it yourself, or start "
                    "aiolock as that user"
                )
                self._report(text, "not-forwarded", signal=number.name)

    def _stop_job(self, number: int) -> None:
        """Stop aiolock after the terminal has stopped the command: of the job, the shell sees only aiolock."""
        if number != Signals.SIGTSTP and self._terminal.foreground:
            # The command asks for the terminal, which the group of aiolock has and does not need.
            self._lent = True
            self._resume()
            return
        self._lent = self._terminal.take_back(self._child.pid) or self._lent
        stop(job=True)

    def _resume(self) -> None:
        """Let the command go on, unless the lock ended while it stood still."""
        if self._policy != "warn" and not self._forced and not self._lease.held:
            self._follow_lock()
            return
        if self._lent and self._terminal.foreground:
            self._terminal.lend(self._child.pid)
        self._stopped = False
        self._child.send(Signals.SIGCONT)
