"""What a command says: data on stdout, messages on stderr, and both as JSON when that is asked for.

A terminal gets colours unless ``NO_COLOR`` is set. Names come from other people: what a terminal would take for a
command is shown as an escape.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, TextIO

from aiolock.cli.statuses import CANNOT_WRITE, Ended
from aiolock.cli.streams import silence

__all__ = ["Output", "clean"]

CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}


def clean(text: str) -> str:
    """Text on one line, without anything that a terminal would obey."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


class Output:
    """Both streams of one command."""

    def __init__(
        self,
        *,
        json: bool = False,
        verbose: bool = False,
        out: TextIO | None = None,
        err: TextIO | None = None,
    ) -> None:
        self.json = json
        """Whether data and messages are JSON."""
        self.verbose = verbose
        self.out: TextIO = sys.stdout if out is None else out
        self.err: TextIO = sys.stderr if err is None else err

    @property
    def chatty(self) -> bool:
        """Whether somebody reads messages that are not about trouble."""
        return self.verbose or (not self.json and _is_terminal(self.err))

    @property
    def live(self) -> bool:
        """Whether stderr may show something that changes."""
        return not self.json and _is_terminal(self.err) and os.environ.get("TERM") != "dumb"

    def style(self, text: str, name: str, stream: TextIO | None = None) -> str:
        """``text`` in a colour or weight, where the stream (default: stdout) shows it."""
        # no-color.org: present and not empty.
        if (
            os.environ.get("NO_COLOR")
            or os.environ.get("TERM") == "dumb"
            or not _is_terminal(stream or self.out)
        ):
            return text
        return f"\x1b[{CODES[name]}m{text}\x1b[0m"

    def paint(self, text: str) -> None:
        """Data as it is; raises :class:`Ended` if it cannot be written, and :class:`BrokenPipeError`."""
        try:
            self.out.write(text)
            self.out.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            self.out = silence()
            raise Ended(CANNOT_WRITE, f"cannot write to stdout: {error.strerror}") from error

    def line(self, text: str = "") -> None:
        """A line of data."""
        self.paint(text + "\n")

    def data(self, value: Any) -> None:
        """One JSON value on a line of its own."""
        self.line(_dumps(value, self.out))

    def document(self, value: Any) -> None:
        """One JSON value that people may want to read as well."""
        self.line(_dumps(value, self.out, indent=2 if _is_terminal(self.out) else None))

    def message(self, text: str, **fields: Any) -> None:
        """A sentence; with --json an object of ``fields`` with the sentence in it."""
        if self.json:
            self.say(_dumps({**fields, "message": text}, self.err) + "\n")
        else:
            self.say(f"aiolock: {text}\n")

    def say(self, text: str) -> None:
        """Write to stderr; what cannot be written there is lost, and stops nobody."""
        try:
            self.err.write(text)
            self.err.flush()
        except (OSError, ValueError):
            if self.err is sys.stderr:
                sys.stderr = silence()
            self.err = silence()

    def event(self, what: str, text: str, **fields: Any) -> None:
        """A sentence about how things go: always with --json, else where somebody asked for it."""
        if self.json or self.verbose:
            self.message(text, event=what, **fields)

    def trouble(self, text: str, status: int, error: BaseException | None = None) -> None:
        """Why the command ends with ``status``."""
        kind = "Usage" if error is None else type(error).__name__
        self.message(text, event="error", error=kind, status=status)


def _dumps(value: Any, stream: TextIO, indent: int | None = None) -> str:
    # What a stream cannot encode is written as an escape, and not every one of those is JSON.
    unicode = (getattr(stream, "encoding", None) or "utf-8").lower().startswith("utf")
    return json.dumps(value, ensure_ascii=not unicode, indent=indent)


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:
        # It was closed.
        return False
