"""What a user's type checker sees: is everything that can be reached from the public names fully typed?

``pyright --verifytypes`` looks at the whole package; this asks the same of the modules whose names are public, and of
everything in their signatures. Then the programs beside this one are checked as programs of a user, by mypy and by pyright. Run as
``python tests/typing/verify.py`` with both of them on the PATH.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PUBLIC = (
    "aiolock.client.",
    "aiolock.lock.",
    "aiolock.kinds.reentrant.",
    "aiolock.kinds.rwlock.",
    "aiolock.kinds.semaphore.",
    "aiolock.kinds.latch.",
    "aiolock.kinds.barrier.",
    "aiolock.kinds.election.",
    "aiolock.kinds.multi.",
    "aiolock.decorators.",
    "aiolock.lease.",
    "aiolock.core.backend.",
    "aiolock.errors.",
    "aiolock.portal.",
    *("aiolock.fastapi.", "aiolock.starlette.", "aiolock.aiohttp."),
    *("aiolock.testing.", "aiolock.metrics.", "aiolock.prometheus.", "aiolock.opentelemetry."),
)


PROGRAMS = [
    Path(__file__).with_name(name) for name in ("clients.py", "decorators.py", "locks.py", "threads.py")
]
FORGOTTEN = Path(__file__).with_name("forgotten.py")
CHECKERS = (
    (("mypy", "--strict", "--warn-unused-ignores"), [*PROGRAMS, FORGOTTEN]),
    (("pyright", "--warnings"), PROGRAMS),
)


def wrong_uses() -> int:
    """Print what the type checkers find in programs that are as they should be; how many of them find anything."""
    found = 0
    for command, programs in CHECKERS:
        done = subprocess.run([*command, *map(str, programs)], check=False, capture_output=True, text=True)
        print(f"{command[0]}: {done.stdout.strip().splitlines()[-1:]}")
        if done.returncode:
            print(done.stdout, done.stderr)
            found += 1
    return found


def main() -> int:
    """Print what is not fully typed, or typed wrongly; 1 if there is anything."""
    command = ["pyright", "--verifytypes", "aiolock", "--ignoreexternal", "--outputjson"]
    report = json.loads(subprocess.run(command, check=False, capture_output=True, text=True).stdout)
    symbols = [s for s in report["typeCompleteness"]["symbols"] if s["name"].startswith(PUBLIC)]
    bad = [s for s in symbols if not s["isTypeKnown"] or s["isTypeAmbiguous"]]
    for symbol in bad:
        print(symbol["name"])
        for diagnostic in symbol["diagnostics"]:
            print("   ", diagnostic["message"].replace("\n", " "))
    print(f"{len(symbols) - len(bad)} of {len(symbols)} public symbols are fully typed")
    return 1 if wrong_uses() or bad or not symbols else 0


if __name__ == "__main__":
    sys.exit(main())
