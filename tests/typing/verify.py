"""What a user's type checker sees: is everything that can be reached from the public names fully typed?

``pyright --verifytypes`` looks at the whole package; this asks the same of the modules whose names are public, and of
everything in their signatures. Run as ``python tests/typing/verify.py`` with pyright on the PATH.
"""

from __future__ import annotations

import json
import subprocess
import sys

PUBLIC = (
    "aiolock.client.",
    "aiolock.lock.",
    "aiolock.reentrant.",
    "aiolock.rwlock.",
    "aiolock.semaphore.",
    "aiolock.latch.",
    "aiolock.barrier.",
    "aiolock.election.",
    "aiolock.combine.",
    "aiolock.joint.",
    "aiolock.decorators.",
    "aiolock.lease.",
    "aiolock.contract.",
    "aiolock.errors.",
    "aiolock.portal.",
    *("aiolock.fastapi.", "aiolock.starlette.", "aiolock.aiohttp."),
    *("aiolock.testing.", "aiolock.figures."),
)


def main() -> int:
    """Print what is not fully typed; 1 if there is anything."""
    command = ["pyright", "--verifytypes", "aiolock", "--ignoreexternal", "--outputjson"]
    report = json.loads(subprocess.run(command, check=False, capture_output=True, text=True).stdout)
    symbols = [s for s in report["typeCompleteness"]["symbols"] if s["name"].startswith(PUBLIC)]
    bad = [s for s in symbols if not s["isTypeKnown"] or s["isTypeAmbiguous"]]
    for symbol in bad:
        print(symbol["name"])
        for diagnostic in symbol["diagnostics"]:
            print("   ", diagnostic["message"].replace("\n", " "))
    print(f"{len(symbols) - len(bad)} of {len(symbols)} public symbols are fully typed")
    return 1 if bad or not symbols else 0


if __name__ == "__main__":
    sys.exit(main())
