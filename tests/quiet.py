"""Show of a run of pytest what its reader needs: a line per tenth, failures in full, what was skipped and why, and the count.

    python -m pytest -q 2>&1 | python tests/quiet.py LOG NAMES [PASSED]

The whole output goes to the file LOG; the lines that name failures are appended to the file NAMES, so that a caller with
several runs can print them together at its end. PASSED is what is said of tests instead of "passed". A run that ends without a count, such as one that could not start,
is shown from its end.
"""

from __future__ import annotations

import re
import sys
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

HEADING = re.compile(r"=+ (.+?) =+$")
SHOWN = re.compile(
    r"failures|errors|warnings summary|tests coverage|xdist|interrupted|no tests ran", re.IGNORECASE
)
SUMMARY = "short test summary info"
PROGRESS = re.compile(r"\[ *(\d+)%\]$")
COUNT = re.compile(r"(?:=+ )?(?:\d+ [^,]+, )*(?:\d+ [^,]+|no tests ran) in [\d.]+s")
NAME = re.compile(r"(?:FAILED|ERROR) ")
COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def follow(lines: Iterable[str], log: TextIO, names: TextIO, out: TextIO, passed: str = "passed") -> bool:
    """Read a run of pytest; return whether it ended with a count of its tests."""
    section, tenth, counted, started = "", 0, False, time.monotonic()
    last: deque[str] = deque(maxlen=50)
    for line in lines:
        count = COUNT.match(COLOURS.sub("", line))
        if count:
            # The words for "passed" may look like no count.
            line = line.replace("passed", passed)  # noqa: PLW2901 - whatever is done with it
        log.write(line)
        last.append(line)
        plain = COLOURS.sub("", line).rstrip()
        if count:
            counted = True
            out.write(line)
        elif heading := HEADING.match(plain):
            section = heading[1]
            if SHOWN.search(section):
                out.write(line)
        elif plain.startswith("INTERNALERROR") or SHOWN.search(section):
            out.write(line)
        elif section == SUMMARY:
            if NAME.match(plain):
                names.write(plain + "\n")
            elif plain.startswith("SKIPPED "):
                out.write(line)
        elif (progress := PROGRESS.search(plain)) and int(progress[1]) // 10 > tenth:
            tenth = int(progress[1]) // 10
            out.write(f"{tenth * 10:4} % after {time.monotonic() - started:.0f} s\n")
        out.flush()
    if not counted:
        out.writelines(last)
    return counted


if __name__ == "__main__":
    log_path, names_path = map(Path, sys.argv[1:3])
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("w") as log, names_path.open("a") as names:
        sys.exit(not follow(sys.stdin, log, names, sys.stdout, *sys.argv[3:]))
