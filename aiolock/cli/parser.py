"""The commands, their options and their help."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import aiolock
from aiolock.cli.arguments import count, given, measurable, pattern, permits, positive, seconds, status
from aiolock.cli.help import ABOUT, EXAMPLES, SHORT
from aiolock.cli.statuses import TABLE, USAGE
from aiolock.cli.words import split
from aiolock.kinds import Family

__all__ = ["parse"]

Parser = argparse.ArgumentParser


class _Parser(argparse.ArgumentParser):
    def __init__(self, **more: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **more)

    json = False
    """Whether the words ask for JSON; known before they are understood."""

    def error(self, message: str) -> NoReturn:
        if _Parser.json:
            trouble = {"event": "error", "error": "Usage", "status": USAGE, "message": message}
            self.exit(USAGE, json.dumps(trouble) + "\n")
        self.exit(USAGE, f"{self.format_usage()}{self.prog}: {message}\n")


REFUSED = {
    (
        "-u",
        "--unlock",
    ): "a lock is given back when its command ends; to take it away, see aiolock force-release",
    ("-F", "--no-fork"): "somebody has to renew the lock while the command runs",
}
"""What flock has and we have not."""


class _Refused(argparse.Action):
    def __init__(self, *, why: str, **more: Any) -> None:
        super().__init__(**more)
        self._why = why

    def __call__(self, *_: object) -> NoReturn:
        raise argparse.ArgumentError(self, f"there is none here: {self._why}")


def _common(parser: Parser, *, server: bool = True) -> None:
    group = parser.add_argument_group("common options")
    if server:
        group.add_argument(
            "--url",
            type=given,
            help="the server, as redis://127.0.0.1:6379/0; several Redis servers as one, with spaces between them "
            "(default: $AIOLOCK_URL, which also hides a password)",
        )
        group.add_argument(
            "--namespace",
            type=given,
            help="what the names of its locks begin with (default: $AIOLOCK_NAMESPACE, else aiolock)",
        )
        group.add_argument("--label", help="how others see this process (default: host:pid)")
    group.add_argument(
        "--json", action="store_true", help="data on stdout and messages on stderr, both as JSON"
    )
    group.add_argument("-v", "--verbose", action="store_true", help="say on stderr how it goes")


def _run(parser: Parser) -> None:
    wait = parser.add_mutually_exclusive_group()
    wait.add_argument(
        "-n",
        "--nonblock",
        "--nb",
        dest="wait",
        action="store_const",
        const=0.0,
        help="do not wait: fail if it is taken",
    )
    wait.add_argument(
        "-w",
        "--wait",
        "--timeout",
        dest="wait",
        type=seconds,
        metavar="SECONDS",
        help="wait at most so long",
    )
    parser.add_argument(
        "-E",
        "--conflict-exit-code",
        type=status,
        default=1,
        metavar="CODE",
        help="exit status if it was not free (1)",
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("-s", "--shared", action="store_true", help="together with others that say -s")
    kind.add_argument(
        "-x", "-e", "--exclusive", action="store_true", help="alone, without any others that say -s or -x"
    )
    kind.add_argument(
        "--permits", type=permits, metavar="N/LIMIT", help="take N of LIMIT permits of a semaphore"
    )
    parser.add_argument(
        "--ttl",
        type=positive,
        default=30.0,
        metavar="S",
        help="seconds until the server gives up on a machine that died (30); the command may run for longer",
    )
    parser.add_argument(
        "--on-loss",
        choices=("term", "kill", "warn"),
        default="term",
        help="term: TERM, then KILL in time; kill: KILL in time; warn: say so, and go on without the lock",
    )
    parser.add_argument(
        "--kill-after",
        type=seconds,
        metavar="S",
        help="seconds that the command has after TERM (5, or a quarter of a short ttl)",
    )
    parser.add_argument(
        "-c", "--command", dest="command_string", metavar="STRING", help="run STRING by the shell"
    )
    # Children that outlive COMMAND never hold the lock, which is what -o is for.
    parser.add_argument(
        "-o", "--close", action="store_true", help="as it is anyway: accepted for flock's sake"
    )
    for words, why in REFUSED.items():
        parser.add_argument(*words, action=_Refused, nargs=0, why=why, help=argparse.SUPPRESS)
    parser.add_argument("name", metavar="NAME", nargs="?", help="the lock")
    parser.add_argument(
        "command", metavar="-- COMMAND ...", nargs="?", help="what to run, with its arguments"
    )


def _ls(parser: Parser) -> None:
    parser.add_argument(
        "pattern",
        type=pattern,
        metavar="PATTERN",
        nargs="?",
        default="*",
        help="names with * ? [abc], as 'order:*' (all)",
    )


def _family(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME", help="the lock")
    parser.add_argument(
        "--family",
        choices=[family.value for family in (Family.LOCK, Family.RW, Family.SEMAPHORE, Family.ELECTION)],
        help="lock, rw (-s and -x of run), sem (--permits of run) or election; default: whichever is in use",
    )


def _force(parser: Parser) -> None:
    _family(parser)
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask, also on a terminal")


def _watch(parser: Parser) -> None:
    _ls(parser)
    parser.add_argument(
        "-i", "--interval", type=positive, default=1.0, metavar="SECONDS", help="time between looks (1)"
    )


def _schema(parser: Parser) -> None:
    parser.add_argument("server", choices=["mysql"], help="the server that needs tables")
    parser.add_argument("--table", default="aiolock", help="what the tables are called (aiolock)")


def _purge(parser: Parser) -> None:
    parser.add_argument(
        "--idle",
        type=positive,
        required=True,
        metavar="SECONDS",
        help="for how long nobody has needed what is deleted; at least 3600",
    )


def _bench(parser: Parser) -> None:
    parser.add_argument(
        "--seconds", type=measurable, default=2.0, metavar="S", help="how long to measure each (2)"
    )
    parser.add_argument("--tasks", type=count, default=10, metavar="N", help="tasks that contend (10)")
    parser.add_argument("--locks", type=count, default=1, metavar="N", help="locks that they contend for (1)")


def _demo(parser: Parser) -> None:
    parser.add_argument("--worker", metavar="LABEL", help=argparse.SUPPRESS)


FILL: dict[str, Callable[[Parser], None]] = {
    "run": _run,
    "ls": _ls,
    "inspect": _family,
    "watch": _watch,
    "force-release": _force,
    "doctor": lambda _: None,
    "schema": _schema,
    "purge": _purge,
    "bench": _bench,
    "demo": _demo,
}


def _parser() -> tuple[Parser, dict[str, Parser]]:
    parser = _Parser(
        prog="aiolock",
        description="Distributed locks, from the command line.",
        epilog=f"{EXAMPLES}\n{TABLE}\n\n`aiolock COMMAND --help` says more about each.",
    )
    parser.add_argument("-V", "--version", action="version", version=aiolock.__version__)
    commands = parser.add_subparsers(dest="verb", required=True, metavar="COMMAND", parser_class=_Parser)
    made: dict[str, Parser] = {}
    for name, fill in FILL.items():
        usage = "aiolock run [OPTIONS] NAME -- COMMAND ..." if name == "run" else None
        epilog = f"{EXAMPLES}\n{TABLE}" if name == "run" else None
        made[name] = commands.add_parser(
            name, help=SHORT[name], description=ABOUT[name], usage=usage, epilog=epilog
        )
        fill(made[name])
        _common(made[name], server=name != "schema")
    return parser, made


def parse(words: Sequence[str]) -> argparse.Namespace:
    """What the words of a command line say; ends the program on wrong usage, and after help."""
    words = list(words)
    parser, made = _parser()
    ours = words[: words.index("--")] if "--" in words else words
    _Parser.json = "--json" in ours
    if words[:1] != ["run"]:
        return parser.parse_args(words)
    run = made["run"]
    takes_value = set()
    for action in run._actions:  # noqa: SLF001 - the only place where argparse keeps what an option takes
        if action.nargs != 0:
            takes_value |= set(action.option_strings)
    told = split(words[1:], takes_value)
    # The name has a place of its own so that one like -x is not taken for an option.
    options = parser.parse_args(["run", *told.options])
    if not told.names:
        run.error("the name of the lock is missing: aiolock run NAME -- COMMAND ...")
    options.name = told.names[0]
    options.command = told.command
    if options.command_string is not None and told.command:
        run.error("a command and -c exclude each other")
    if options.command_string is None and not told.command:
        run.error("the command is missing: aiolock run NAME -- COMMAND ...")
    return options
