"""The entry: from the words of the command line to an exit status, whatever happens in between."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Awaitable, Callable, Sequence
from signal import Signals

from aiolock.cli import settings
from aiolock.cli.dying import DEADLY, die
from aiolock.cli.output import Output
from aiolock.cli.parser import parse
from aiolock.cli.statuses import CANNOT_WRITE, EXHAUSTED, EXHAUSTING, INTERNAL, Ended, of_error, of_signal
from aiolock.cli.streams import prepare
from aiolock.errors import LockError

__all__ = ["main"]

Command = Callable[[argparse.Namespace, Output], Awaitable[int]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit status; trouble is one sentence on stderr.

    :param argv: the words after the program's name; the default is those of this process.

    Raises :class:`SystemExit` for wrong usage, help and the version, as :mod:`argparse` does.
    """
    prepare()
    options = parse(sys.argv[1:] if argv is None else argv)
    output = Output(json=options.json, verbose=options.verbose)
    _log(output)
    try:
        return asyncio.run(_go(options, output))
    except Ended as end:
        if end.message:
            output.trouble(end.message, end.status, end.__cause__)
        if end.status == CANNOT_WRITE:
            # What stands in the buffer of the real one would be tried again at the end of the interpreter.
            sys.stdout = output.out
        if end.signal in DEADLY:
            die(Signals(end.signal), job=end.job)
        return end.status
    except LockError as error:
        output.trouble(str(error), of_error(error), error)
        return of_error(error)
    except KeyboardInterrupt:
        die(Signals.SIGINT, job=False)
        return of_signal(Signals.SIGINT)
    except BrokenPipeError:
        # Whoever read has enough. The interpreter flushes once more at its end, and must not complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return of_signal(13)
    except OSError as error:
        if error.errno not in EXHAUSTING:
            return _defect(output, error)
        output.trouble(f"this machine gives no more of what is needed: {error.strerror}", EXHAUSTED, error)
        return EXHAUSTED
    except Exception as error:  # noqa: BLE001 - the last resort, so that scripts can tell defects from results
        return _defect(output, error)


def _defect(output: Output, error: Exception) -> int:
    output.say("".join(traceback.format_exception(error)))
    output.trouble(f"this is a defect in aiolock, please report it: {error!r}", INTERNAL, error)
    return INTERNAL


async def _go(options: argparse.Namespace, output: Output) -> int:
    return await _command(options)(options, output)


def _command(options: argparse.Namespace) -> Command:
    # Each is imported when it is asked for: most commands need only a small part of all this.
    match options.verb:
        case "run":
            from aiolock.cli.run import run  # noqa: PLC0415

            return run
        case "ls" | "inspect" | "force-release":
            from aiolock.cli import locks  # noqa: PLC0415

            return {"ls": locks.ls, "inspect": locks.inspect, "force-release": locks.force_release}[
                options.verb
            ]
        case "watch":
            from aiolock.cli.watch import watch  # noqa: PLC0415

            return watch
        case "doctor":
            from aiolock.cli.doctor import doctor  # noqa: PLC0415

            return doctor
        case "schema":
            from aiolock.cli.schema import schema  # noqa: PLC0415

            return schema
        case "purge":
            from aiolock.cli.purge import purge  # noqa: PLC0415

            return purge
        case "bench":
            from aiolock.cli.bench import bench  # noqa: PLC0415

            return bench
    return _demo


async def _demo(options: argparse.Namespace, output: Output) -> int:
    from aiolock.demo import demo  # noqa: PLC0415
    from aiolock.stage import worker  # noqa: PLC0415

    url = settings.url(options, "memory://")
    if options.worker is None:
        from aiolock.cli.story import Story  # noqa: PLC0415

        with contextlib.redirect_stdout(Story(output)):
            await demo(url)
    else:
        await worker(url, options.worker, settings.namespace(options))
    return 0


class _Tell(logging.Handler):
    def __init__(self, output: Output) -> None:
        super().__init__(logging.WARNING)
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        self._output.message(record.getMessage(), event="log", logger=record.name)


def _log(output: Output) -> None:
    # Commands say themselves what matters; what the library says beside that is for who asks.
    logger = logging.getLogger("aiolock")
    for handler in [handler for handler in logger.handlers if isinstance(handler, _Tell)]:
        logger.removeHandler(handler)
    logger.addHandler(_Tell(output) if output.verbose else logging.NullHandler())
    logger.propagate = False
