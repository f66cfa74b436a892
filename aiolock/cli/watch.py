"""``aiolock watch``: a table that is always right in a terminal, and a line of JSON per change otherwise."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from signal import Signals

from aiolock.cli import settings
from aiolock.cli.changes import changes
from aiolock.cli.inbox import LEAVE, Inbox
from aiolock.cli.locks import HEAD, NUMBERS, SPARE, row
from aiolock.cli.output import Output
from aiolock.cli.statuses import ended_by
from aiolock.cli.table import cut, lay_out
from aiolock.cli.terminal import size
from aiolock.client import Client
from aiolock.clock import system_clock
from aiolock.errors import BackendError
from aiolock.info import LockInfo

__all__ = ["picture", "watch"]

ENTER, LEAVE_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""Another page of the terminal, without a cursor; and back to what was there before."""

HOME, END_OF_LINE, END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
"""Painting over what is there does not flicker as clearing it first would."""


async def watch(options: argparse.Namespace, output: Output) -> int:
    """Look again and again, until a signal or Ctrl-C."""
    async with settings.connect(options) as client:
        if output.out.isatty() and not output.json and os.environ.get("TERM") != "dumb":
            return await _live(client, options, output)
        return await _stream(client, options, output)


async def _look(client: Client, pattern: str) -> tuple[list[LockInfo] | None, str]:
    try:
        return await client.locks(pattern), ""
    except BackendError as error:
        # It may come back, and whoever watches wants to see that.
        return None, str(error)


async def _stream(client: Client, options: argparse.Namespace, output: Output) -> int:
    seen: list[LockInfo] = []
    told = ""
    # The first look raises what is wrong.
    infos: list[LockInfo] | None = await client.locks(options.pattern)
    trouble = ""
    next_look = system_clock()
    while True:
        at = {"at": datetime.now(UTC).isoformat(timespec="milliseconds")}
        if infos is not None:
            if told:
                output.data({**at, "event": "reachable"})
            for change in changes(seen, infos):
                output.data({**at, **change})
            seen = infos
        elif not told:
            output.data({**at, "event": "unreachable", "message": trouble})
        told = trouble
        next_look = max(system_clock(), next_look + options.interval)
        await asyncio.sleep(next_look - system_clock())
        infos, trouble = await _look(client, options.pattern)


# --- in a terminal


async def _live(client: Client, options: argparse.Namespace, output: Output) -> int:
    inbox = Inbox()
    infos: list[LockInfo] | None = await client.locks(options.pattern)
    trouble, last = "", infos
    async with inbox.listen(*LEAVE, Signals.SIGWINCH, Signals.SIGTSTP, Signals.SIGCONT):
        with _page(output):
            next_look = system_clock() + options.interval
            looking: asyncio.Task[tuple[list[LockInfo] | None, str]] | None = None
            try:
                while True:
                    _paint(output, options, last or [], trouble)
                    # While the server is asked, it is the answer that ends the waiting.
                    await inbox.wait(60.0 if looking else max(0.0, next_look - system_clock()))
                    while (number := inbox.take()) is not None:
                        if number is Signals.SIGINT:
                            return 0
                        if number in LEAVE:
                            raise ended_by(number)
                        if number is Signals.SIGTSTP:
                            _stop(output)
                        elif number is Signals.SIGCONT:
                            # The shell has used the terminal in the meantime.
                            output.paint(ENTER)
                    if looking is not None and looking.done():
                        infos, trouble = looking.result()
                        last = last if infos is None else infos
                        next_look, looking = system_clock() + options.interval, None
                    elif looking is None and system_clock() >= next_look:
                        looking = asyncio.create_task(_look(client, options.pattern))
                        looking.add_done_callback(lambda _: inbox.wake.set())
            finally:
                if looking is not None:
                    looking.cancel()
                    await asyncio.wait([looking])


def _stop(output: Output) -> None:
    """Stop as Ctrl-Z means it, with the terminal as it was before; returns when we go on."""
    output.paint(LEAVE_SCREEN)
    before = signal.signal(Signals.SIGTSTP, signal.SIG_DFL)
    try:
        os.kill(os.getpid(), Signals.SIGTSTP)
    finally:
        signal.signal(Signals.SIGTSTP, before)
    output.paint(ENTER)


@contextmanager
def _page(output: Output) -> Iterator[None]:
    output.paint(ENTER)
    try:
        yield
    finally:
        output.paint(LEAVE_SCREEN)


def _paint(output: Output, options: argparse.Namespace, infos: Sequence[LockInfo], trouble: str) -> None:
    columns, rows = size(output.out)
    title = f"{settings.place(options)}  {settings.namespace(options)}  {options.pattern}"
    lines = picture(infos, title, trouble, columns, rows)
    styled = [
        output.style(line, style) if style else line
        for line, style in zip(lines, _styles(lines, trouble), strict=True)
    ]
    # No line break after the last line: it would scroll a full screen.
    output.paint(HOME + f"{END_OF_LINE}\n".join(styled) + END_OF_LINE + END_OF_SCREEN)


def _styles(lines: Sequence[str], trouble: str) -> list[str]:
    styles = ["dim"] + ["" for _ in lines[1:]]
    if len(styles) > 1 and trouble:
        styles[1] = "red"
    if len(styles) > 2:
        styles[2] = "bold"
    return styles


def picture(infos: Sequence[LockInfo], title: str, trouble: str, columns: int, rows: int) -> list[str]:
    """The lines of a screen of that size: never more, and never longer."""
    held = sum(info.locked for info in infos)
    waiting = sum(len(info.waiters) for info in infos)
    now = datetime.now().astimezone()
    state = trouble or f"{held} held, {waiting} waiting   Ctrl-C ends   {now:%H:%M:%S}"
    room = max(0, rows - 3)
    # Where people wait is where somebody will look first.
    order = sorted(infos, key=lambda info: (-len(info.waiters), info.name, info.family.value))
    shown = order if len(order) <= room else order[: max(0, room - 1)]
    table = lay_out([HEAD, *map(row, shown)], most=columns, right=NUMBERS, spare=SPARE)
    if len(shown) < len(infos):
        table.append(cut(f"… and {len(infos) - len(shown)} more", columns))
    return [cut(title, columns), cut(state, columns), *table][:rows]
