"""``aiolock run``: a command under a lock, with the flags of flock."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import shutil
from collections.abc import Sequence

from aiolock.cli import nested, settings
from aiolock.cli.child import Child, Switch, children
from aiolock.cli.closing import HURRY, close
from aiolock.cli.guard import DYING
from aiolock.cli.inbox import JOB, LEAVE, Inbox
from aiolock.cli.inner_runs import InnerRuns, OuterHold, borrow
from aiolock.cli.locks import ask, choose, kind_of
from aiolock.cli.loss import check_kill_after, default_kill_after, fitting, guarded
from aiolock.cli.output import Output
from aiolock.cli.statuses import CANNOT_RUN, LOST, NOT_FOUND, Ended, ended_by
from aiolock.cli.supervise import Supervisor
from aiolock.cli.table import seconds
from aiolock.cli.terminal import Terminal
from aiolock.cli.waiting import wait_for
from aiolock.client import Client
from aiolock.clock import system_clock
from aiolock.errors import AcquireTimeout, BackendError, ConfigError, shorten
from aiolock.kinds import Mode
from aiolock.lease import Lease
from aiolock.lock import Lock

__all__ = ["run"]


async def run(options: argparse.Namespace, output: Output) -> int:
    """Wait for the lock, run the command under it, give the lock back; the status to end with."""
    kill_after = default_kill_after(options.ttl)
    if options.kill_after is not None:
        kill_after = check_kill_after(options.kill_after, options.ttl)
    if any(address.lower().startswith("memory:") for address in settings.url(options).split()):
        raise ConfigError(
            "memory:// is inside one process and keeps nobody else out: say which server with --url"
        )
    command = _command(options)
    # Also what giving everything back may take at the end.
    limit = min(options.ttl / 3, 5.0)
    client = settings.connect(options, ttl=options.ttl, command_timeout=limit)
    lock = choose(client, options)
    children()
    check(command[0])
    status = await _inside(options, command, kill_after, output)
    if status is not None:
        return status
    await client.open()
    return await _guarded(client, lock, options, command, kill_after, limit, output)


def _command(options: argparse.Namespace) -> list[str]:
    if options.command_string is not None:
        return [os.environ.get("SHELL") or "/bin/sh", "-c", options.command_string]
    return list(options.command)


def check(program: str) -> None:
    """Refuse a command that is not there, before anybody waits for its lock."""
    if shutil.which(program) is None:
        there = os.path.exists(program) and "/" in program  # noqa: PTH110 - a Path would lose a trailing slash
        status, why = (CANNOT_RUN, "it is no program") if there else (NOT_FOUND, "there is no such command")
        raise Ended(status, f"cannot run {program}: {why}")


async def _inside(
    options: argparse.Namespace, command: Sequence[str], kill_after: float, output: Output
) -> int | None:
    """Run the command under the hold of the run around this one, and return its status; ``None`` if there is no such run."""
    kind, name = kind_of(options), options.name
    word = nested.find(os.environ.get(nested.VARIABLE, ""), _identity(options))
    if word is None or not nested.covers(word, kind):
        return None
    inbox = Inbox()
    async with inbox.listen(*LEAVE):
        asking = borrow(
            word.address,
            name,
            word.token,
            shared=kind.mode is Mode.READ,
            refusal=nested.refusal(word, kind, name),
            timeout=options.wait,
        )
        try:
            hold = await wait_for(asyncio.create_task(asking), None, settings.label(options), inbox, output)
        except AcquireTimeout as error:
            raise _not_free(options, error, output) from error
        if hold is None:
            return None
        try:
            output.event("nested", f"the run around this one holds {shorten(name)}", name=name)
            return await _work(options, hold, command, kill_after, inbox, output)
        finally:
            await hold.release()


def _identity(options: argparse.Namespace) -> str:
    return nested.identity(settings.url(options), settings.namespace(options), kind_of(options), options.name)


def _not_free(options: argparse.Namespace, error: AcquireTimeout, output: Output) -> Ended:
    # As flock, this says nothing to a script, for which the status is enough.
    name, so_long = shorten(error.name), f" within {error.timeout:g} s" if error.timeout else ""
    message = (
        f"lock {name} was not free{so_long}; wait longer with -w, or see who holds it with `aiolock inspect`"
    )
    return Ended(options.conflict_exit_code, message if output.chatty or output.json else "")


async def _guarded(
    client: Client,
    lock: Lock,
    options: argparse.Namespace,
    command: Sequence[str],
    kill_after: float,
    limit: float,
    output: Output,
) -> int:
    inbox = Inbox()
    lease = None
    async with inbox.listen(*LEAVE):
        try:
            held = lease = await _acquire(lock, options, inbox, output)
            status = await _work(options, held, command, kill_after, inbox, output)
            told = held.lost
        except Ended as end:
            if end.signal:
                limit = min(limit, HURRY)
            raise
        finally:
            await close(client, lease, inbox, limit)
    if held.lost and not told:
        output.message(
            f"lock {shorten(held.name)} was lost before the command had ended, which the server says only now: another "
            "holder may have been at work beside it",
            event="lost",
            name=held.name,
            token=held.token,
            reason="revoked",
        )
        if status == 0 and options.on_loss != "warn":
            return LOST
    return status


async def _acquire(lock: Lock, options: argparse.Namespace, inbox: Inbox, output: Output) -> Lease:
    label = settings.label(options)
    start = system_clock()
    try:
        lease = await wait_for(asyncio.create_task(ask(lock, options)), lock, label, inbox, output)
    except AcquireTimeout as error:
        raise _not_free(options, error, output) from error
    waited = system_clock() - start
    output.event(
        "acquired",
        f"got {shorten(options.name)} after {seconds(waited)}, with token {lease.token}",
        name=options.name,
        token=lease.token,
        label=label,
        waited=round(waited, 3),
    )
    return lease


async def _work(
    options: argparse.Namespace,
    lease: Lease | OuterHold,
    command: Sequence[str],
    kill_after: float,
    inbox: Inbox,
    output: Output,
) -> int:
    if isinstance(lease, Lease) and lease.remaining() < lease.ttl / 2:
        # A grant that was pushed is short; confirmed, it is a full one.
        with contextlib.suppress(BackendError):
            await lease.renew()
    lease.check()
    runs = InnerRuns(lease, inbox.wake.set)
    async with runs as address:
        environment = _environment(options, lease, address)
        status, supervisor = await _supervised(
            options, lease, command, environment, kill_after, inbox, output
        )
        status = await _last_inner_run(runs, lease, supervisor, status, inbox)
    if supervisor.died_of is not None:
        raise ended_by(supervisor.died_of, job=supervisor.job_missed)
    return status


async def _last_inner_run(
    runs: InnerRuns, lease: Lease | OuterHold, supervisor: Supervisor, status: int, inbox: Inbox
) -> int:
    """Wait until no inner run has the hold any more; the status, which is that of a loss if it ended one."""
    runs.close_door()
    give_up = math.inf
    while len(runs) and system_clock() < give_up:
        while (number := inbox.take()) is not None:
            supervisor.pass_on(number)
        await inbox.wait(0.25)
        if not lease.held and give_up == math.inf:
            status, give_up = LOST, system_clock() + max(DYING, supervisor.kill_after)
    return status


async def _supervised(
    options: argparse.Namespace,
    lease: Lease | OuterHold,
    command: Sequence[str],
    environment: dict[str, str],
    kill_after: float,
    inbox: Inbox,
    output: Output,
) -> tuple[int, Supervisor]:
    terminal = Terminal()
    terminal.remember()
    keep = (lease.connection,) if isinstance(lease, OuterHold) else ()
    switch = None if options.on_loss == "warn" else await Switch.start(json=output.json, keep=keep)
    try:
        if switch is not None:
            # Also for a command that begins while we stand still.
            switch.until(system_clock() + guarded(lease.remaining(), lease.ttl))
        async with inbox.listen(*JOB):
            try:
                child = await Child.start(
                    command, environment, foreground=terminal.lend_at_once, switch=switch
                )
            except BaseException:
                if terminal.lend_at_once:
                    # What was to become the command may have taken it before it failed.
                    terminal.lend(os.getpgrp())
                raise
            supervisor = Supervisor(
                child,
                lease,
                inbox,
                terminal,
                switch,
                output,
                kill_after=fitting(kill_after, lease.remaining()),
                policy=options.on_loss,
            )
            start = system_clock()
            status = await supervisor.run()
    finally:
        terminal.close()
        if switch is not None:
            await switch.stop()
    took = system_clock() - start
    output.event(
        "exited",
        f"the command ended with status {status} after {seconds(took)}",
        name=options.name,
        token=lease.token,
        status=status,
        held=round(took, 3),
    )
    return status, supervisor


def _environment(options: argparse.Namespace, lease: Lease | OuterHold, address: str) -> dict[str, str]:
    kind = kind_of(options)
    word = nested.Word(_identity(options), lease.token, kind.mode.value, kind.permits, address)
    label = settings.label(options)
    if isinstance(lease, OuterHold):
        # Under which the server has the hold.
        label = os.environ.get("AIOLOCK_LABEL", label)
    return {
        **os.environ,
        "AIOLOCK_NAME": options.name,
        "AIOLOCK_TOKEN": str(lease.token),
        "AIOLOCK_LABEL": label,
        nested.VARIABLE: nested.add(os.environ.get(nested.VARIABLE, ""), word),
    }
