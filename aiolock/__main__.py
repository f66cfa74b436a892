"""The command line: ``aiolock`` and ``python -m aiolock``."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import aiolock
from aiolock.demo import demo
from aiolock.stage import worker

__all__ = ["main"]

USAGE = 64
UNAVAILABLE = 69
INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE, f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="aiolock",
        description="Distributed locks for asyncio, from the command line.",
        epilog=f"Exit status: 0 all went well, {UNAVAILABLE} the server cannot be used, {USAGE} wrong usage.",
    )
    parser.add_argument("--version", action="version", version=aiolock.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    play = commands.add_parser(
        "demo",
        help="show in a few seconds what a lock does when workers contend, die and hang",
        description="Workers contend for a lock; one dies, one loses its lease, and its late write is refused. "
        "Over memory:// they are tasks of this process, over any other URL they are processes.",
    )
    play.add_argument(
        "--url", help="the server, such as redis://127.0.0.1:6379/0 (default: $AIOLOCK_URL, else memory://)"
    )
    play.add_argument("--worker", metavar="LABEL", help=argparse.SUPPRESS)
    play.add_argument("--namespace", default="aiolock", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit status; trouble is one sentence on stderr."""
    options = _parser().parse_args(argv)
    url: str = options.url or os.environ.get("AIOLOCK_URL") or "memory://"
    try:
        if options.worker is None:
            asyncio.run(demo(url))
        else:
            asyncio.run(worker(url, options.worker, options.namespace))
    except aiolock.BackendError as error:
        print(f"aiolock: {error}", file=sys.stderr)
        return UNAVAILABLE
    except (aiolock.ConfigError, aiolock.MissingDriver) as error:
        print(f"aiolock: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read has enough. The interpreter flushes once more at its end, and must not complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
