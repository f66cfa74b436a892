"""Standard streams that may be closed, or that cannot say every character."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO, cast

__all__ = ["prepare", "silence"]


class _Silence(io.TextIOBase):
    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        return len(text)


def silence() -> TextIO:
    """A stream that nobody reads."""
    # It has all that TextIO has, which is a class and no protocol.
    return cast("TextIO", _Silence())


def prepare() -> None:
    """Make ``sys.stdin``, ``sys.stdout`` and ``sys.stderr`` usable, whatever we were started with.

    A stream that is closed stays closed for the commands that are started.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:
            _occupy(number)
            setattr(sys, name, silence() if number else io.StringIO())
        elif number and isinstance(stream, io.TextIOWrapper):
            # Names come from everywhere, and a terminal of another alphabet is no reason to fail.
            stream.reconfigure(errors="backslashreplace")


def _occupy(number: int) -> None:
    # Otherwise the next connection gets this number, and whatever is written to the stream goes there.
    try:
        os.fstat(number)
    except OSError:
        null = os.open(os.devnull, os.O_RDWR)
        if null != number:
            os.dup2(null, number, inheritable=False)
            os.close(null)
