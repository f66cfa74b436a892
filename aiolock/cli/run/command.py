"""Command `run`: acquire a lock, run a command under it, release it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import shutil
import socket
from collections.abc import Coroutine, Sequence
from typing import TypeVar

from aiolock.cli import settings
from aiolock.cli.exit_status import CANNOT_RUN, LOST, NOT_FOUND, Ended, ended_by
from aiolock.cli.output import Output, age, cut, holder_of, kept_after, seconds, state_of, time_left
from aiolock.cli.run import nested
from aiolock.cli.run.signals import ENDING, JOB, LEAVE, SignalQueue, Terminal, size
from aiolock.cli.run.supervisor import (
    UNSTOPPABLE,
    Child,
    Supervisor,
    Switch,
    check_kill_after,
    guarded,
    token_of,
)
from aiolock.client import Client
from aiolock.clock import system_clock
from aiolock.core.present import caller_of
from aiolock.errors import AcquireTimeout, BackendError, ConfigError, LockError, UnsupportedKind, shorten
from aiolock.lease import Lease
from aiolock.lock import Lock
from aiolock.types import LockInfo

__all__ = ["progress", "run"]

Hold = TypeVar("Hold", Lease, None)

QUIET = 0.3
"""Seconds of waiting without a progress line."""

POLL = 1.0
"""Seconds between two progress lines."""

HURRY = 0.5
"""Seconds after a signal in which a server that answers gets everything; what it does not get ends by its ttl."""

CLOSING = 0.25
"""Seconds for closing the connections to a server that does not answer."""


async def run(options: argparse.Namespace, output: Output) -> int:
    """Wait for the lock, run the command under it, and release it; return the status to end with.

    Cancelling it leaves the queue, or kills the command and releases the lock.
    """
    kill_after = check_kill_after(options.kill_after, options.ttl)
    _check_limits(options)
    if any(address.lower().startswith("memory:") for address in settings.url(options).split()):
        raise ConfigError(
            "memory:// is inside one process and keeps no other process out: say which server with --url, or --local"
        )
    if options.local:
        output.event("local", f"the locks are in {(file := settings.local_file())}", file=str(file))
    if options.command_string is not None:
        options.command = [os.environ.get("SHELL") or "/bin/sh", "-c", options.command_string]
    # Also the bound for the release at the end.
    limit = min(options.ttl / 3, 5.0)
    client = settings.connect(options, ttl=options.ttl, command_timeout=limit)
    lock = settings.lock(client, options)
    _check(options.command[0])
    this = _Run(options, output, lock, kill_after, limit)
    await client.open()
    return await this.under_lock(client)


def _check_limits(options: argparse.Namespace) -> None:
    """Raise :class:`ConfigError` for limits that contradict each other."""
    if options.max_hold is None:
        return
    if options.at_least > options.max_hold:
        raise ConfigError(
            f"--at-least must be at most --max-hold, which is {options.max_hold:g}, not {options.at_least:g}"
        )
    if options.on_loss == "warn":
        raise ConfigError(
            "--max-hold stops the command, and with --on-loss warn it goes on: leave one of them out"
        )


def _check(program: str) -> None:
    """Refuse a missing command before waiting for its lock."""
    if shutil.which(program) is None:
        there = os.path.exists(program) and "/" in program  # noqa: PTH110 - a Path would lose a trailing slash
        status, why = (CANNOT_RUN, "it is no program") if there else (NOT_FOUND, "there is no such command")
        raise Ended(status, f"cannot run {program}: {why}")


class _Run:
    """One `aiolock run`."""

    def __init__(
        self, options: argparse.Namespace, output: Output, lock: Lock, kill_after: float, limit: float
    ) -> None:
        self._options = options
        self._output = output
        self._kill_after = kill_after
        self._queue = SignalQueue()
        self._lock = lock
        self._kind = lock.kind
        self._label = settings.label(options)
        self._identity = nested.identity(
            settings.url(options), settings.namespace(options), self._kind, options.name
        )
        self._held = os.environ.get(nested.VARIABLE, "")
        self._limit = limit
        self._seen = ""
        """The holder when the lock was refused."""
        self._began = 0.0
        """The time of the grant."""
        self._counts = False
        """True once the command has ended by itself."""

    async def under_lock(self, client: Client) -> int:
        """Acquire the lock, run the command and close the client, which takes at most the command timeout.

        Cancelling it leaves the queue, or kills the command and releases the lock; the client is closed as well.
        """
        held, limit = None, self._limit
        with self._queue.listen(*LEAVE):
            try:
                await self._refuse_inside()
                if self._options.at_least and "keep" not in client.capabilities:
                    raise UnsupportedKind("--at-least", settings.server(self._options), "leave it out")
                held = lease = await self._acquire()
                status = await self._work(lease)
                known = lease.lost
            except Ended as end:
                if end.signal:
                    limit = min(limit, HURRY)
                raise
            finally:
                await self._close(client, held, limit)
        if lease.lost and not known:
            text = (
                f"lock {shorten(lease.name)} was lost before the command had ended, which the server says only now: another "
                "holder may have been at work beside it"
            )
            self._output.message(text, event="lost", name=lease.name, token=token_of(lease), reason="revoked")
            if status == 0 and self._options.on_loss != "warn":
                return LOST
        return status

    # --- the lock

    async def _refuse_inside(self) -> None:
        """Raise :class:`ConfigError` if this run would wait for a run around it. Cancelling it changes nothing."""
        tokens = nested.find(self._held, self._identity)
        if tokens:
            await self._wait_for(self._refuse(tokens))

    async def _refuse(self, tokens: Sequence[int]) -> None:
        nested.refuse(await self._lock.inspect(), tokens, self._kind)

    async def _acquire(self) -> Lease:
        start, lock = system_clock(), self._lock
        lease = await self._wait_for(lock.acquire(self._options.wait), lock)
        self._began = system_clock()
        waited = self._began - start
        token = token_of(lease)
        what = "" if token is None else f", with token {token}"
        text = f"got {shorten(lease.name)} after {seconds(waited)}{what}"
        self._event("acquired", text, lease, label=self._label, waited=round(waited, 3))
        return lease

    async def _wait_for(self, request: Coroutine[None, None, Hold], lock: Lock | None = None) -> Hold:
        """Wait for a hold, and show the queue of ``lock`` on a terminal.

        Raises what the request raises, but :class:`Ended` after its timeout, and at a signal. The request has left the queue when
        this ends, also by being cancelled.
        """
        output, options = self._output, self._options
        acquiring = asyncio.create_task(request)
        showing = asyncio.create_task(_show(lock, output)) if output.live and lock else None
        self._queue.watch(acquiring)
        try:
            while not acquiring.done():
                await self._queue.wait(60.0)
                for number in self._queue.taken():
                    if number in LEAVE:
                        raise ended_by(number)
            return acquiring.result()
        except AcquireTimeout as error:
            # Without a terminal it is the line that a log has; with -E 0 a lock that is taken is no trouble.
            if options.conflict_exit_code == 0 and not (output.chatty or output.json):
                raise Ended(0) from error
            so_long = f" within {error.timeout:g} s" if error.timeout else ""
            await self._wait_for(self._ask_holder())
            message = (
                f"lock {shorten(error.name)} was not free{so_long}{self._seen}; wait longer with -w, or see who holds it with "
                "`aiolock inspect`"
            )
            raise Ended(options.conflict_exit_code, message) from error
        except BaseException:
            acquiring.cancel()
            await asyncio.wait([acquiring])
            if not acquiring.cancelled() and acquiring.exception() is None:
                # It was granted at the same moment.
                hold = acquiring.result()
                if hold is not None:
                    await hold.release()
            raise
        finally:
            if showing is not None:
                showing.cancel()
                await asyncio.wait([showing])

    async def _ask_holder(self) -> None:
        """Find out who holds the lock, if the server says it within the command timeout. Cancelling it changes nothing."""
        with contextlib.suppress(LockError, TimeoutError):
            async with asyncio.timeout(self._limit):
                info = await self._lock.inspect()
            self._seen = f": it is {state_of(info)}" if info.locked else ": it is free by now"

    async def _close(self, client: Client, lease: Lease | None, limit: float) -> None:
        """Release the lease and close the client, together in ``limit`` seconds, and a moment for the connections.

        Raises :class:`Ended` after a signal, which shortens the time. Cancelling it stops the waiting.
        """
        end, came = system_clock() + limit, None

        async def bounded(step: Coroutine[None, None, None]) -> None:
            nonlocal end, came
            task = asyncio.create_task(step)
            self._queue.watch(task)
            # With no time left it still needs its first step.
            await asyncio.sleep(0)
            try:
                while not task.done() and system_clock() < end:
                    for number in self._queue.taken():
                        if number in ENDING and came is None:
                            came, end = number, min(end, system_clock() + HURRY)
                    await self._queue.wait(end - system_clock())
            finally:
                task.cancel()
                await asyncio.wait([task])
            if not task.cancelled():
                task.result()

        if lease is not None:
            left = self._began + self._options.at_least - system_clock()
            await bounded(lease.release(keep=max(0.0, left) if self._counts and not lease.lost else 0.0))
        left = max(0.0, end - system_clock())
        end = system_clock() + left + CLOSING
        await bounded(client.aclose(timeout=left))
        if came is not None:
            raise ended_by(came)

    # --- the command

    async def _work(self, lease: Lease) -> int:
        """Run the command; return the status."""
        if lease.remaining() < lease.ttl / 2:
            # A pushed grant is short; confirmed, it has the full ttl.
            with contextlib.suppress(BackendError):
                await lease.renew()
        lease.check()
        options, output, terminal, switch = self._options, self._output, Terminal(), None
        try:
            if options.on_loss != "warn":
                event = {"event": "lost", "unstoppable": True, "message": UNSTOPPABLE}
                complaint = json.dumps(event) if output.json else f"aiolock: {UNSTOPPABLE}"
                switch = await Switch.start(complaint)
                # Also for a command that begins while aiolock stands still.
                switch.until(system_clock() + guarded(lease.remaining(), lease.ttl))
            with self._queue.listen(*JOB):
                child = await Child.start(
                    options.command, self._environment(lease), foreground=terminal.lend_at_once, switch=switch
                )
                supervisor = Supervisor(
                    child,
                    lease,
                    self._queue,
                    terminal,
                    switch,
                    output,
                    kill_after=self._kill_after,
                    policy=options.on_loss,
                    max_hold=math.inf if options.max_hold is None else options.max_hold,
                    began=self._began,
                )
                start = system_clock()
                status = await supervisor.run()
        finally:
            terminal.close()
            if switch is not None:
                await switch.stop()
        took = system_clock() - start
        text = f"the command ended with status {status} after {seconds(took)}"
        self._event("exited", text, lease, status=status, held=round(took, 3))
        self._counts = supervisor.by_itself
        if supervisor.ending is not None:
            raise supervisor.ending
        return status

    def _event(self, what: str, text: str, lease: Lease, **more: str | float) -> None:
        self._output.event(what, text, name=lease.name, token=token_of(lease), **more)

    def _environment(self, lease: Lease) -> dict[str, str]:
        token, me = token_of(lease), caller_of(socket.gethostname(), os.getpid())
        entry = nested.Entry(
            self._identity, nested.mark(me, self._options.label or "") if token is None else token
        )
        environment = {
            **os.environ,
            "AIOLOCK_NAME": lease.name,
            "AIOLOCK_LABEL": self._label,
            nested.VARIABLE: f"{self._held} {entry}".strip(),
        }
        # That of a run around this one is not the token of this lock.
        environment.pop("AIOLOCK_TOKEN", None)
        return environment if token is None else environment | {"AIOLOCK_TOKEN": str(token)}


async def _show(lock: Lock, output: Output) -> None:
    """Show on a terminal how the waiting goes, until cancelled."""
    start, me = system_clock(), caller_of(socket.gethostname(), os.getpid())
    await asyncio.sleep(QUIET)
    try:
        while True:
            waited = system_clock() - start
            try:
                text = progress(await lock.inspect(), me, waited)
            except LockError:
                text = f"waiting for {shorten(lock.name)} for {seconds(waited)}: the server does not answer"
            text = cut(text, size(output.err).columns - 1)
            output.say(f"\r\x1b[K{output.style(text, 'dim', output.err)}")
            await asyncio.sleep(POLL)
    finally:
        output.say("\r\x1b[K")


def progress(info: LockInfo, me: str, waited: float) -> str:
    """Describe the waiting of a process, by its host and id, on one line."""
    text = f"waiting for {shorten(info.name)} for {seconds(waited)}"
    waiting = [caller_of(one.host, one.pid or 0) for one in info.waiters]
    if me in waiting:
        text += f", position {waiting.index(me) + 1} of {len(waiting)}"
    if info.holders:
        text += f"; held by {holder_of(info)} for {seconds(age(info.holders[0]))}"
    elif info.kept:
        text += f"; {kept_after(info)}, for {seconds(max(map(time_left, info.kept)))} more"
    return text
