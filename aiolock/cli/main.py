"""The entry point: run a command, and turn every outcome into an exit status."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Sequence
from importlib import import_module
from signal import Signals

from aiolock.cli.exit_status import CANNOT_WRITE, EXHAUSTED, EXHAUSTING, INTERNAL, Ended, of_error
from aiolock.cli.output import Output, prepare
from aiolock.cli.parser import parse
from aiolock.cli.run.signals import DEADLY, die
from aiolock.errors import LockError

__all__ = ["main"]

Command = Callable[[argparse.Namespace, Output], Awaitable[int]]

MODULES = {
    "run": "run.command",
    **dict.fromkeys(("ls", "inspect", "force-release", "schema", "purge"), "admin"),
}
"""The modules of commands that have no module of their own name."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; an error is one sentence on stderr.

    :param argv: the arguments; by default those of this process.

    Raises :class:`SystemExit` for wrong usage, help and the version, as :mod:`argparse` does.
    """
    prepare()
    options = parse(sys.argv[1:] if argv is None else argv)
    output = Output(json=options.json, verbose=options.verbose)
    _log(output)
    try:
        _heed_interrupts()
        return asyncio.run(_run(options, output))
    except Ended as end:
        if end.message:
            output.trouble(end.message, end.status, end.__cause__)
        if end.status == CANNOT_WRITE:
            # The interpreter would try again at its end to write the buffer of the real one.
            sys.stdout = output.out
        if end.signal in DEADLY:
            die(Signals(end.signal), job=end.job)
        return end.status
    except LockError as error:
        output.trouble(str(error), of_error(error), error)
        return of_error(error)
    except KeyboardInterrupt:
        die(Signals.SIGINT, job=False)
        return 128 + Signals.SIGINT
    except BrokenPipeError:
        # The reader has closed the pipe. The interpreter flushes stdout once more at its end, and must not complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + Signals.SIGPIPE
    except Exception as error:  # noqa: BLE001 - the last resort, so that scripts can tell defects from results
        if isinstance(error, OSError) and error.errno in EXHAUSTING:
            output.trouble(
                f"this machine gives no more of what is needed: {error.strerror}", EXHAUSTED, error
            )
            return EXHAUSTED
        output.say("".join(traceback.format_exception(error)))
        output.trouble(f"this is a defect in aiolock, please report it: {error!r}", INTERNAL, error)
        return INTERNAL


def _heed_interrupts() -> None:
    """Have asyncio turn Ctrl-C into a cancellation from here on; before, it ended the process."""
    if signal.getsignal(Signals.SIGINT) not in (signal.SIG_IGN, signal.default_int_handler):
        signal.signal(Signals.SIGINT, signal.default_int_handler)


async def _run(options: argparse.Namespace, output: Output) -> int:
    return await _command(options.verb)(options, output)


def _command(verb: str) -> Command:
    # Imported by name, because most commands need only a small part of the package.
    module = import_module(f"aiolock.cli.{MODULES.get(verb, verb)}")
    command: Command = getattr(module, verb.replace("-", "_"))
    return command


class _Messages(logging.Handler):
    def __init__(self, output: Output) -> None:
        super().__init__(logging.WARNING)
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        self._output.message(record.getMessage(), event="log", logger=record.name)


def _log(output: Output) -> None:
    # Commands report errors themselves; the log of the library is for --verbose.
    logger = logging.getLogger("aiolock")
    for handler in [handler for handler in logger.handlers if isinstance(handler, _Messages)]:
        logger.removeHandler(handler)
    logger.addHandler(_Messages(output) if output.verbose else logging.NullHandler())
    logger.propagate = False
