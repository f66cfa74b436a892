"""The command while it runs: a process group of its own, signals to all of it, and how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aiolock.cli.guard import Group
from aiolock.cli.inbox import FORWARDED
from aiolock.cli.statuses import Ended, of_exec
from aiolock.cli.terminal import blocked
from aiolock.errors import MissingDriver

__all__ = ["Child", "Switch", "children"]

HERE = Path(__file__).parent
PYTHON = (sys.executable, "-I", "-S")
"""An interpreter that starts quickly, and that nothing in the environment of the command can change."""

LOOK = 0.1
"""Seconds between looks whether what is to become the command was stopped."""


def children() -> Any:
    """The module ``anyio``, by which processes are started."""
    try:
        import anyio  # noqa: PLC0415 - only those who start commands need it
    except ImportError as error:
        raise MissingDriver("anyio", "cli") from error
    return anyio


class Child:
    """One command; made by :meth:`start`."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid: int = process.pid
        """Also the id of its process group."""
        self.group = Group(process.pid)

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        foreground: bool,
        switch: Switch | None,
    ) -> Child:
        """Start ``command``, which inherits our standard streams.

        :param foreground: give it the terminal.
        :param switch: what kills its group, and the kernel it, should we be killed.

        Raises :class:`Ended` with the status that shells have for a command that cannot be started. Cancelling it kills
        what was started.
        """
        read, write = os.pipe()
        try:
            try:
                # What comes meanwhile waits until the new process can take it as the command would.
                with blocked(*FORWARDED, signal.SIGTTOU) as before:
                    numbers = ",".join(str(number) for number in sorted(before))
                    guard = () if switch is None else (switch.pipe,)
                    told = str(switch.pipe if switch is not None else -1)
                    preparing = (str(write), told, str(os.getpid()), str(int(foreground)), numbers)
                    process = await children().open_process(
                        [*PYTHON, str(HERE / "launch.py"), *preparing, *command],
                        stdin=None,
                        stdout=None,
                        stderr=None,
                        env=environment,
                        pass_fds=(write, *guard),
                    )
            finally:
                os.close(write)
            child = cls(process)
            try:
                error = await _read(read, child)
            except BaseException:
                process.kill()
                raise
        finally:
            os.close(read)
        if error:
            await process.wait()
            raise Ended(of_exec(int(error)), f"cannot run {command[0]}: {os.strerror(int(error))}")
        return child

    def send(self, number: int) -> bool:
        """Send a signal to the whole group; ``False`` if all of it is beyond us."""
        return self.group.send(number)

    def stopped_by(self, more: int = 0) -> int | None:
        """The signal that has stopped it since this was last asked; ``os.WNOWAIT`` leaves that to be asked again."""
        try:
            state = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG | more)
        except ChildProcessError:
            return None
        return None if state is None else state.si_status

    async def wait(self) -> int:
        """Wait for its end; a negative number for a signal. Cancelling it changes nothing."""
        returncode: int = await self._process.wait()
        return returncode


class Switch:
    """Our end of the dead man's switch (:mod:`aiolock.cli.guard`); a guard that is gone makes no trouble."""

    def __init__(self, process: Any, pipe: int) -> None:
        self._process = process
        self.pipe = pipe
        """What the guard listens to; it acts when nobody has it open any more."""

    @classmethod
    async def start(cls, *, json: bool, keep: Sequence[int] = ()) -> Switch:
        """Start the guard, which speaks as ``json`` says, and has ``keep`` open until it ends. Cancelling it leaves none."""
        read, write = os.pipe()
        try:
            # Out of reach of the terminal and of whoever signals our group; it must not keep a pipe of ours open.
            process = await children().open_process(
                [*PYTHON, str(HERE / "guard.py")],
                stdin=read,
                stdout=asyncio.subprocess.DEVNULL,
                # It says there what nobody else can say when we are gone.
                stderr=None,
                cwd="/",
                env={},
                start_new_session=True,
                pass_fds=keep,
            )
        except BaseException:
            os.close(write)
            raise
        finally:
            os.close(read)
        os.set_blocking(write, False)  # noqa: FBT003 - the argument has no name
        switch = cls(process, write)
        if json:
            switch._say("json")
        return switch

    def until(self, moment: float) -> None:
        """The lock is certain until then, on the clock of :mod:`aiolock.clock`."""
        self._say(f"until {moment!r}")

    def told(self) -> None:
        """It has been said that the group cannot be killed."""
        self._say("told")

    async def stop(self) -> None:
        """There is nothing to guard any more."""
        self._say("unguarded")
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        os.close(self.pipe)
        await self._process.wait()

    def _say(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            os.write(self.pipe, f"{line}\n".encode())


async def _read(pipe: int, child: Child) -> bytes:
    """What is said on a pipe until all who could say something have closed it, or ``child`` is stopped before it can."""
    loop = asyncio.get_running_loop()
    said = b""
    while True:
        readable = loop.create_future()
        loop.add_reader(pipe, _tell, readable)
        try:
            async with asyncio.timeout(LOOK):
                await readable
        except TimeoutError:
            if child.stopped_by(os.WNOWAIT) is None:
                continue
            # By Ctrl-Z, just before it became the command: the shell has to hear of it, and the rest comes later.
            return said
        finally:
            loop.remove_reader(pipe)
        chunk = os.read(pipe, 64)
        if not chunk:
            return said
        said += chunk


def _tell(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
