"""Play worlds in virtual time: python -m tests.simulation [--quorum | --rows] [--seed N | --seeds N]."""

from __future__ import annotations

import argparse
import logging
import sys
import time

from tests.simulation.quorum import QuorumWorld
from tests.simulation.rows import RowWorld
from tests.simulation.world import World, explore, play


def main() -> int:
    """Print the log of one world, or the sums of many; the status is 1 if an invariant was violated."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument(
        "--quorum", action="store_true", help="three servers as one instead of a single server"
    )
    parser.add_argument("--rows", action="store_true", help="a row store instead of the memory server")
    parser.add_argument("--seed", type=int, help="print the log of this world")
    parser.add_argument("--seeds", type=int, default=2000, help="number of worlds")
    parser.add_argument("--start", type=int, default=0, help="the first of them")
    parser.add_argument("--patience", type=int, default=10, help="stop after this number of violated worlds")
    options = parser.parse_args()
    world = QuorumWorld if options.quorum else RowWorld if options.rows else World
    logging.getLogger("aiolock").addHandler(logging.NullHandler())
    if options.seed is not None:
        outcome = play(options.seed, world)
        for moment, subject, what in outcome.log:
            print(f"{moment:12.6f}  {subject:20}  {what}")
        for violation in outcome.violations:
            print(f"violated: {violation}")
        return bool(outcome.violations)
    start = time.monotonic()
    seeds = range(options.start, options.start + options.seeds)
    total = explore(seeds, patience=options.patience, world=world)
    for violation in total.violations:
        print(violation)
    print(
        f"{options.seeds} seeds in {time.monotonic() - start:.1f} s: {total.seconds / 3600:.1f} virtual hours, "
        f"{total.grants} grants, {total.lives} lives, {total.losses} losses, {total.faults} faults, "
        + "".join(f"{count} {what}, " for what, count in sorted(total.together.items()))
        + f"{len(total.violations)} violations"
    )
    return bool(total.violations)


if __name__ == "__main__":
    sys.exit(main())
