"""``aiolock demo``: what the demonstration tells, with --json as a line of JSON for every step."""

from __future__ import annotations

import io
import re
from typing import Any

from aiolock.cli.output import Output

__all__ = ["Story", "as_step"]

STEP = re.compile(r"\s*(\d+\.\d+) s  (\S+)  (.*)")


class Story(io.TextIOBase):
    """A stream that is told a story for people, and passes its lines on."""

    def __init__(self, output: Output) -> None:
        super().__init__()
        self._output = output
        self._begun = ""

    def writable(self) -> bool:
        """Yes."""
        return True

    def write(self, text: str, /) -> int:
        """Pass on the lines that are complete."""
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            if not self._output.json:
                self._output.line(line)
            elif line.strip():
                self._output.data(as_step(line))
        return len(text)


def as_step(line: str) -> dict[str, Any]:
    """One line of the story: what a worker did and when, or what the narrator says."""
    step = STEP.fullmatch(line)
    if step is None:
        return {"event": "said", "message": line.strip()}
    return {"event": "step", "at": float(step[1]), "who": step[2], "message": step[3]}
