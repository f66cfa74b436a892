"""The command line: ``aiolock`` and ``python -m aiolock``."""

from __future__ import annotations

import sys

from aiolock.cli.main import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
