"""Standard output and error: messages, tables, JSON."""

from __future__ import annotations

import io
import json
import math
import os
import sys
import unicodedata
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, TextIO, cast

from aiolock.cli.exit_status import CANNOT_WRITE, Ended
from aiolock.core.present import named
from aiolock.types import Holder, Kept, LockInfo

__all__ = [
    "Output",
    "age",
    "clean",
    "cut",
    "holder_of",
    "kept_after",
    "lay_out",
    "prepare",
    "seconds",
    "silence",
    "state_of",
    "time_left",
    "width",
]

# --- standard streams


class _Silence(io.TextIOBase):
    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        return len(text)


def silence() -> TextIO:
    """Return a stream that discards what is written."""
    # TextIO is a class and no protocol; this stream has its methods.
    return cast("TextIO", _Silence())


def prepare() -> None:
    """Make ``sys.stdin``, ``sys.stdout`` and ``sys.stderr`` usable where they are closed or have a limited encoding.

    A closed stream stays closed for child processes.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            _occupy(number)
            setattr(sys, name, silence() if number else io.StringIO())
        elif number and isinstance(stream, io.TextIOWrapper):
            # Names of locks may have characters that the terminal does not have.
            stream.reconfigure(errors="backslashreplace")


def _occupy(number: int) -> None:
    # Otherwise the next connection gets this descriptor, and what is written to the stream goes there.
    try:
        os.fstat(number)
    except OSError:
        null = os.open(os.devnull, os.O_RDWR)
        if null != number:
            os.dup2(null, number, inheritable=False)
            os.close(null)


# --- tables

GAP = "  "
SLIM = 4
"""Columns of a terminal that every column of a table keeps."""


def width(text: str) -> int:
    """Return the columns of a terminal that a text takes."""
    if text.isascii():
        return len(text)
    shown = (char for char in text if not unicodedata.combining(char))
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in shown)


def cut(text: str, most: int) -> str:
    """Shorten a text to so many columns, with an ellipsis."""
    if width(text) <= most:
        return text
    taken = ""
    for char in text:
        if width(taken + char) > most - 1:
            break
        taken += char
    return f"{taken}…" if most > 0 else ""


def lay_out(
    rows: Sequence[Sequence[str]],
    *,
    most: int | None = None,
    right: Sequence[int] = (),
    spare: Sequence[int] = (),
) -> list[str]:
    """Return the lines of a table; the first row is its head.

    :param most: the columns of the terminal; the widest columns of the table are cut first.
    :param right: the columns of the table, from 0, that are aligned to the right.
    :param spare: the columns of the table that are left out, one after another, if it is too wide.
    """
    if not rows:
        return []
    widths = {column: max(width(row[column]) for row in rows) for column in range(len(rows[0]))}

    def total() -> int:
        return sum(widths.values()) + len(GAP) * (len(widths) - 1)

    if most is not None:
        for column in spare:
            if total() > most:
                del widths[column]
        while total() > most and max(widths.values()) > SLIM:
            widths[max(widths, key=lambda column: widths[column])] -= 1
    lines = []
    for row in rows:
        cells = []
        for column, columns in widths.items():
            text = cut(row[column], columns)
            pad = " " * (columns - width(text))
            cells.append(pad + text if column in right else text + pad)
        line = GAP.join(cells).rstrip()
        lines.append(line if most is None else cut(line, most))
    return lines


# --- texts


def seconds(value: float) -> str:
    """Format a duration: ``0.4 s``, ``12 s``, ``3 m 05 s``, ``2 h 10 m``, ``3 d 4 h``; ``never`` without an end."""
    value = max(0.0, value)
    if value == math.inf:
        return "never"
    if value < 9.95:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} m"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def age(holder: Holder) -> float:
    """Return the seconds since the grant; as exact as the clocks of both machines agree."""
    return max(0.0, (datetime.now(UTC) - holder.since).total_seconds())


def clean(text: str) -> str:
    """Escape everything that a terminal would take for a command; names come from other programs."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def holder_of(info: LockInfo) -> str:
    """Name the first holder and the number of others; empty if the lock is not held."""
    if not info.holders:
        return ""
    first, *others = info.holders
    return clean(named(first)) + (f" and {len(others)} more" if others else "")


def time_left(kept: Kept) -> float:
    """Return the seconds until what is kept is free."""
    return max(0.0, (kept.until - datetime.now(UTC)).total_seconds())


def kept_after(info: LockInfo) -> str:
    """Say that a lock is kept, and by whom it was released."""
    last = dict.fromkeys(clean(named(kept)) for kept in info.kept)
    return f"kept after {', '.join(last)}"


def state_of(info: LockInfo) -> str:
    """Say who holds a lock that is held or kept, and since when: ``held by web-3:4711 (token 17) for 3 m 05 s, since …``."""
    if info.holders:
        first, *others = info.holders
        token = f" (token {first.token})" if first.token else ""
        more = f", and by {len(others)} more" if others else ""
        since = f"{first.since.astimezone():%Y-%m-%d %H:%M:%S}"
        return f"held by {clean(named(first))}{token} for {seconds(age(first))}, since {since}{more}"
    if info.kept:
        return f"{kept_after(info)}, for {seconds(max(map(time_left, info.kept)))} more"
    return f"held by holders that cannot be read ({clean(info.unreadable)})"


# --- output

CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


class Output:
    """The output of one command: data on stdout, messages on stderr, with ``json`` both as JSON.

    A terminal gets colours unless ``NO_COLOR`` is set.
    """

    def __init__(
        self,
        *,
        json: bool = False,
        verbose: bool = False,
        out: TextIO | None = None,
        err: TextIO | None = None,
    ) -> None:
        self.json = json
        self.verbose = verbose
        self.out: TextIO = sys.stdout if out is None else out
        self.err: TextIO = sys.stderr if err is None else err

    @property
    def chatty(self) -> bool:
        """True if messages that are not errors are wanted."""
        return self.verbose or (not self.json and _is_terminal(self.err))

    @property
    def live(self) -> bool:
        """True if stderr is a terminal that can show changing lines."""
        return not self.json and _is_terminal(self.err) and os.environ.get("TERM") != "dumb"

    def style(self, text: str, name: str, stream: TextIO | None = None) -> str:
        """Add a colour or weight to a text, if it has a name and the stream (default: stdout) shows it."""
        # no-color.org: present and not empty.
        plain = not name or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        if plain or not _is_terminal(stream or self.out):
            return text
        return f"\x1b[{CODES[name]}m{text}\x1b[0m"

    def paint(self, text: str) -> None:
        """Write data; raises :class:`Ended` if that fails, and :class:`BrokenPipeError`."""
        try:
            self.out.write(text)
            self.out.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            self.out = silence()
            raise Ended(CANNOT_WRITE, f"cannot write to stdout: {error.strerror}") from error

    def line(self, text: str = "") -> None:
        """Write a line of data."""
        self.paint(text + "\n")

    def data(self, value: Any) -> None:
        """Write one JSON value on one line."""
        self.line(_dumps(value, self.out))

    def document(self, value: Any) -> None:
        """Write one JSON value, on a terminal with indentation."""
        self.line(_dumps(value, self.out, indent=2 if _is_terminal(self.out) else None))

    def message(self, text: str, **fields: Any) -> None:
        """Write a sentence to stderr; with --json an object of ``fields`` and the sentence."""
        if self.json:
            self.say(_dumps({**fields, "message": text}, self.err) + "\n")
        else:
            self.say(f"aiolock: {text}\n")

    def say(self, text: str) -> None:
        """Write to stderr; a failure is ignored."""
        try:
            self.err.write(text)
            self.err.flush()
        except (OSError, ValueError):
            if self.err is sys.stderr:
                sys.stderr = silence()
            self.err = silence()

    def event(self, what: str, text: str, **fields: Any) -> None:
        """Write a sentence about progress, with --json or --verbose."""
        if self.json or self.verbose:
            self.message(text, event=what, **fields)

    def trouble(self, text: str, status: int, error: BaseException | None = None) -> None:
        """Write the reason for which the command ends with ``status``."""
        kind = "Usage" if error is None else type(error).__name__
        self.message(text, event="error", error=kind, status=status)


def _dumps(value: Any, stream: TextIO, indent: int | None = None) -> str:
    # Escapes of JSON where the stream cannot encode all characters: its own escapes are not valid JSON.
    unicode = (getattr(stream, "encoding", None) or "utf-8").lower().startswith("utf")
    return json.dumps(value, ensure_ascii=not unicode, indent=indent)


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:
        # It is closed.
        return False
