"""One process of a history run with a planted bug: `python -m tests.faults.planted_worker NAME SETTINGS`, with a name of mutants.py."""

from __future__ import annotations

import sys

from tests.mutants import find, plant


def main() -> None:
    plant(find(sys.argv.pop(1)))
    # Not before: it imports the library.
    from tests.faults import worker  # noqa: PLC0415

    worker.main()


if __name__ == "__main__":
    main()
