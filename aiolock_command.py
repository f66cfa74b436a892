"""The command ``aiolock``, from its first moment: a signal ends it without a traceback while its modules are imported.

A module of its own, because a module of the package is imported after the package, which takes most of that time. What the
interpreter itself does before is beyond it, a few hundredths of a second.
"""

from __future__ import annotations

# `signal` itself imports `enum` first, which takes a third of the time until here.
import _signal as signal
import os
import sys

__all__ = ["main"]


def _end(number: int, _: object) -> None:
    os._exit(128 + number)


def main() -> int:
    """Run the command of this process; return its exit status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # nohup and shells without job control ignore signals for their children.
        if signal.getsignal(number) != signal.SIG_IGN:
            # The kernel keeps signals from the first process of a container that has no handler for them.
            signal.signal(number, _end if os.getpid() == 1 else signal.SIG_DFL)
    from aiolock.cli.main import main as command  # noqa: PLC0415 - takes most of the time

    return command()


if __name__ == "__main__":
    sys.exit(main())
