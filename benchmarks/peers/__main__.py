"""Build the programs; the status is 1 if one of them could not be built."""

from __future__ import annotations

import sys

from benchmarks.peers import LIBRARIES, absent, versions

if __name__ == "__main__":
    for who, version in versions().items():
        reason = absent().get(who)
        print(f"{who} {version}: {f'left out: {reason}' if reason else f'built, in {LIBRARIES[who]}'}")
    sys.exit(int(bool(absent())))
