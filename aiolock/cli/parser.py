"""Parse the command line: commands, options and help."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import aiolock
from aiolock.cli.exit_status import TABLE, USAGE
from aiolock.errors import Redacted, redact

__all__ = ["parse", "split"]

T = TypeVar("T")

# --- values of options


def _checked(convert: Callable[[str], T], fits: Callable[[T], bool], expected: str) -> Callable[[str], T]:
    """Return the type of an option whose texts ``convert`` reads, and whose values fit."""

    def value_of(text: str) -> T:
        try:
            value = convert(text)
        except ValueError:
            pass
        else:
            if fits(value):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")

    return value_of


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise ValueError
    return int(text)


def _pair(text: str) -> tuple[int, int]:
    count, _, limit = text.partition("/")
    return _whole(count), _whole(limit)


_seconds = _checked(float, lambda value: 0 <= value < math.inf, "a number of seconds, such as 10 or 0.5")
_positive = _checked(float, lambda value: 0 < value < math.inf, "a number of seconds above 0")
_status = _checked(_whole, lambda value: value <= 255, "an exit status from 0 to 255")
_token = _checked(_whole, lambda value: value < 2**64, "a fencing token, a whole number")
_processes = _checked(_whole, lambda value: 2 <= value <= 8, "a number of processes from 2 to 8")
_rate = _checked(float, lambda value: 0 < value < math.inf, "a number of turns per second above 0")
_permits = _checked(
    _pair, lambda pair: 1 <= pair[0] <= pair[1], "a number of permits and their limit, such as 1/3"
)
# An empty value comes from a variable that was not set.
EMPTY = "a value; leave it out for the default"
_given = _checked(str, bool, EMPTY)


# --- words of run


def split(words: Sequence[str], takes_value: Collection[str]) -> tuple[list[str], list[str], list[str]]:
    """Separate the words of ``run`` into options, NAME (none if it is missing) and command.

    As with flock and env, the first word after NAME that is no option begins the command, and so does the word after ``--``;
    argparse would parse options of the command as well. ``takes_value`` are the options to which the next word belongs.
    """
    options: list[str] = []
    names: list[str] = []
    rest = list(words)
    while rest:
        word = rest[0]
        if word == "--":
            del rest[0]
            if names:
                return options, names, rest
            # A NAME that begins with a dash follows a -- of its own.
            names, rest = rest[:1], rest[1:]
        elif word.startswith("-") and word != "-":
            count = 2 if _takes_next(word, takes_value) else 1
            options += rest[:count]
            del rest[:count]
        elif names:
            return options, names, rest
        else:
            names.append(rest.pop(0))
    return options, names, []


def _takes_next(word: str, takes_value: Collection[str]) -> bool:
    if word.startswith("--"):
        return word in takes_value
    # -nw3 is -n -w 3, and -nw takes the next word.
    for position, letter in enumerate(word[1:], start=2):
        if f"-{letter}" in takes_value:
            return position == len(word)
    return False


def _forward(words: Sequence[str], takes_value: Collection[str]) -> list[str]:
    """Move common options that stand before the command behind it, where argparse expects them."""
    count = 0
    while count < len(words) and words[count].partition("=")[0] in COMMON:
        count += 2 if words[count] in takes_value else 1
    return [*words[count : count + 1], *words[:count], *words[count + 1 :]]


def _similar(word: str, known: Collection[str]) -> str:
    """Return a question that names the known word most like ``word``; empty if none is."""
    close = difflib.get_close_matches(word.partition("=")[0], known, 1)
    return f"; did you mean {close[0]}?" if close else ""


# --- commands


EXAMPLES = """\
examples:
  export AIOLOCK_URL=redis://127.0.0.1:6379/0
  aiolock run -n nightly-report -- ./report.sh     run it on one machine only; others skip
  aiolock run -w 30 deploy make deploy             wait at most 30 seconds
  aiolock run -s tree -- ls; aiolock run -x tree -- rm -r old      readers together, writers alone
  aiolock run --permits 1/3 api -- ./crawl         at most three at a time
  aiolock run --local -n backup -- ./backup.sh     without a server: once on this machine
  aiolock ls 'order:*'                             list locks and their holders
  aiolock watch                                    the same, live
  aiolock doctor                                   diagnose the server
"""

Parser = argparse.ArgumentParser


class _Parser(argparse.ArgumentParser):
    def __init__(self, **more: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **more)

    json = False
    """True if the command line asks for JSON; set before it is parsed."""

    def error(self, message: str) -> NoReturn:
        # Words that cannot be parsed are quoted, and may be an address with a password.
        message = re.sub(r"\S+://\S+", lambda word: redact(word[0]), message)
        if _Parser.json:
            trouble = {"event": "error", "error": "Usage", "status": USAGE, "message": message}
            self.exit(USAGE, json.dumps(trouble) + "\n")
        self.exit(USAGE, f"{self.format_usage()}{self.prog}: {message}\n")


class _Refused(argparse.Action):
    """An option of flock that does not exist here; its help is the reason."""

    def __call__(self, *_: object) -> NoReturn:
        raise argparse.ArgumentError(self, f"aiolock does not have it: {self.const}")


COMMON = frozenset({"--url", "--local", "--namespace", "--label", "--json", "-v", "--verbose"})
"""The options of :func:`_common`, which may stand before the command as well."""


def _common(parser: Parser, *, server: bool = True) -> None:
    group = parser.add_argument_group("common options")
    add = group.add_argument
    if server:
        either = group.add_mutually_exclusive_group().add_argument
        either(
            "--url",
            type=_checked(Redacted, bool, EMPTY),
            help="the server, as redis://127.0.0.1:6379/0; several Redis servers as one, separated by spaces "
            "(default: $AIOLOCK_URL, which also hides a password)",
        )
        about = "a file for the processes of this user on this machine: locks.db in $AIOLOCK_DIR, or in ~/.local/state/aiolock"
        either("--local", action="store_true", help=about)
        add(
            "--namespace",
            type=_given,
            help="the namespace of the locks (default: $AIOLOCK_NAMESPACE, else aiolock)",
        )
        add("--label", help="the name of this process for others, beside its host and process id")
    add("--json", action="store_true", help="data on stdout and messages on stderr, both as JSON")
    add("-v", "--verbose", action="store_true", help="report progress on stderr")


def _run(parser: Parser) -> None:
    add, wait = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    no_wait = "do not wait: fail if the lock is taken"
    wait("-n", "--nonblock", "--nb", dest="wait", action="store_const", const=0.0, help=no_wait)
    about = "wait at most SECONDS"
    wait("-w", "--wait", "--timeout", dest="wait", type=_seconds, metavar="SECONDS", help=about)
    about = "exit status if the lock was not free in time (1)"
    add("-E", "--conflict-exit-code", type=_status, default=1, metavar="CODE", help=about)
    kind = parser.add_mutually_exclusive_group().add_argument
    kind("-s", "--shared", action="store_true", help="together with other holders that use -s")
    kind(
        "-x", "-e", "--exclusive", action="store_true", help="alone, without other holders that use -s or -x"
    )
    kind("--permits", type=_permits, metavar="N/LIMIT", help="take N of LIMIT permits of a semaphore")
    about = "seconds until the lock of a machine that died is free (30); the command may run for longer"
    add("--ttl", type=_positive, default=30.0, metavar="S", help=about)
    about = "term: TERM, then KILL in time; kill: KILL in time; warn: a message, and the command goes on without the lock"
    add("--on-loss", choices=("term", "kill", "warn"), default="term", help=about)
    about = "seconds between TERM and KILL (5, or a quarter of a short ttl)"
    add("--kill-after", type=_seconds, metavar="S", help=about)
    about = "stop a command that hangs: after S seconds it gets TERM, and KILL --kill-after later; exit status 124"
    add("--max-hold", type=_positive, metavar="S", help=about)
    about = "keep the lock for S seconds from its grant if the command ends by itself sooner: others skip it for so long"
    add("--at-least", type=_seconds, default=0.0, metavar="S", help=about)
    add("-c", "--command", dest="command_string", metavar="STRING", help="run STRING by the shell")
    # Children that outlive COMMAND never hold the lock, which is what -o is for.
    add("-o", "--close", action="store_true", help="no effect: accepted for compatibility with flock")
    why = "a lock is released when its command ends; to take it away, see aiolock force-release"
    add("-u", "--unlock", action=_Refused, nargs=0, const=why, help=argparse.SUPPRESS)
    why = "the lock must be renewed while the command runs"
    add("-F", "--no-fork", action=_Refused, nargs=0, const=why, help=argparse.SUPPRESS)
    add("name", metavar="NAME", nargs="?", help="the lock")
    add("command", metavar="-- COMMAND ...", nargs="?", help="the command, with its arguments")


def _ls(parser: Parser) -> None:
    about = "names with * ? [abc], as 'order:*' (default: all)"
    parser.add_argument("pattern", type=_given, metavar="PATTERN", nargs="?", default="*", help=about)


def _family(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME", help="the lock")
    parser.add_argument(
        "--family",
        choices=("lock", "rw", "sem", "election"),
        help="lock, rw (-s and -x of run), sem (--permits of run) or election; default: the one in use",
    )


def _force(parser: Parser) -> None:
    _family(parser)
    about = "only from the holder that has this fencing token, as ls and inspect show it; none that came after it is harmed"
    parser.add_argument("--token", type=_token, metavar="N", help=about)
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask, also on a terminal")


def _watch(parser: Parser) -> None:
    _ls(parser)
    add = parser.add_argument
    add("-i", "--interval", type=_positive, default=1.0, metavar="SECONDS", help="time between updates (1)")


def _schema(parser: Parser) -> None:
    parser.add_argument("server", choices=["mysql", "postgresql"], help="the server that needs tables")
    parser.add_argument(
        "--table",
        default="aiolock",
        help="the name of the tables, for PostgreSQL also schema.table (aiolock)",
    )


def _purge(parser: Parser) -> None:
    about = "delete what was not used for SECONDS, which is at least 3600"
    parser.add_argument("--idle", type=_positive, required=True, metavar="SECONDS", help=about)


def _verify(parser: Parser) -> None:
    add = parser.add_argument
    add("--for", dest="seconds", type=_positive, default=60.0, metavar="S", help="for S seconds (60)")
    about = "contend from N processes of this machine, 2 to 8 (8)"
    add("--processes", type=_processes, default=8, metavar="N", help=about)
    about = "take and leave locks at most R times per second, in all processes together (200)"
    add("--rate", type=_rate, default=200.0, metavar="R", help=about)


def _demo(parser: Parser) -> None:
    parser.add_argument("--worker", metavar="LABEL", help=argparse.SUPPRESS)


class _Command(NamedTuple):
    fill: Callable[[Parser], None]
    short: str
    about: str


COMMANDS = {
    "run": _Command(
        _run,
        "run a command under a lock",
        """\
Acquire the lock NAME, run COMMAND under it, and release it when COMMAND ends.

-n, -w, -E, -s, -x, -o and -c mean the same as for flock. Locks of -s and -x exclude each other; locks without
either, and those with --permits, are different locks, also under the same name.

If the lock cannot be renewed, COMMAND gets TERM so early that it has --kill-after seconds to end, and KILL a
moment before the server may grant the lock to another client. It runs in a process group of its own, which gets the
signals that aiolock gets, and it is killed if aiolock is killed. A command of another user cannot be killed:
put aiolock inside sudo, not sudo inside aiolock.

Its environment has AIOLOCK_NAME, AIOLOCK_TOKEN (the fencing token) and AIOLOCK_LABEL. A run of NAME inside COMMAND that
would wait for this one is refused at once.
""",
    ),
    "ls": _Command(
        _ls,
        "list the locks that are held or waited for",
        "List every lock of the namespace that is held or waited for.",
    ),
    "inspect": _Command(
        _family,
        "show the holders and waiters of a lock",
        "Show the holders of a lock with their tokens and times, and its queue. Exit status 1 if it is not held.",
    ),
    "watch": _Command(
        _watch,
        "show changes of locks, live",
        "A live table in a terminal (Ctrl-C ends it); otherwise a line of JSON for every change between two updates.",
    ),
    "force-release": _Command(
        _force,
        "take a lock away from its holder",
        """\
The holder is notified that it has lost the lock, and the next in the queue gets it at once. The two can overlap:
fencing tokens keep their writes apart. A dead holder's lock is free after its ttl without this.

With --token N, the lock is taken only from the holder that inspect has shown with that token. If that hold is over, nothing is
done, the present holder is named, and the status is 1.
""",
    ),
    "doctor": _Command(
        lambda _: None,
        "diagnose the server",
        """\
Read the settings of the server, and change nothing. Explain the promises that locks keep on it, those that they do not
keep, and the settings that would add them. Exit status 1 if something is wrong.
""",
    ),
    "verify": _Command(
        _verify,
        "contend for locks while you break the server, and judge what happened",
        """\
Processes of this machine contend for locks in a namespace of their own, which is emptied at the end, while you restart the
server, fail it over or cut it off. Then the report: two holders inside at once, tokens that are equal or fell, losses
that were told late, the longest stretch without a grant, hand-over and rate, the outages and errors of each process, and the
capabilities that were contradicted. Exit status 1 if exclusion or tokens broke, also where the page of the server lists that
as an exception.
""",
    ),
    "schema": _Command(
        _schema,
        "print the tables that a server needs",
        "Print the statements for an administrator; clients create the tables themselves where they may.",
    ),
    "purge": _Command(
        _purge,
        "delete the rows of unused locks",
        """\
Delete the rows of the namespace that were not used for --idle seconds, on MySQL, MariaDB, PostgreSQL, SQLite and MongoDB.
Locks that are held or waited for stay, and tokens go on rising. May run at any time, for example once a day. Other
servers have no such rows.
""",
    ),
    "demo": _Command(
        _demo,
        "show in a few seconds what a lock does when workers contend, die and hang",
        """\
Workers contend for a lock; one dies, one loses its lease, and its late write is refused. Over memory://
(the default) they are tasks of this process, over any other URL they are processes.
""",
    ),
}


def _parser() -> tuple[Parser, dict[str, Parser]]:
    """Return the parser, and those of the commands."""
    parser = _Parser(
        prog="aiolock",
        description="Distributed locks, from the command line.",
        epilog=f"{EXAMPLES}\n{TABLE}\n\n`aiolock COMMAND --help` explains each command.",
    )
    parser.add_argument("-V", "--version", action="version", version=aiolock.__version__)
    commands = parser.add_subparsers(dest="verb", required=True, metavar="COMMAND", parser_class=_Parser)
    for name, command in COMMANDS.items():
        one = commands.add_parser(name, help=command.short, description=command.about)
        command.fill(one)
        _common(one, server=name != "schema")
    run = commands.choices["run"]
    run.usage, run.epilog = "aiolock run [OPTIONS] NAME -- COMMAND ...", f"{EXAMPLES}\n{TABLE}"
    return parser, dict(commands.choices)


def _options(parser: Parser) -> dict[str, argparse.Action]:
    return {
        name: action
        for action in parser._actions  # noqa: SLF001 - the only place where argparse keeps them
        for name in action.option_strings
    }


def _complete(parser: Parser) -> None:
    """Answer a shell that asks how a word goes on, and end the program; do nothing otherwise."""
    if "_ARGCOMPLETE" in os.environ:
        with contextlib.suppress(ImportError):
            import argcomplete  # noqa: PLC0415 - optional, and needed by a shell only

            # They may stand before the command as well; `_forward` moves them.
            _common(parser)
            argcomplete.autocomplete(parser)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; ends the program on wrong usage, and after help."""
    parser, commands = _parser()
    _complete(parser)
    run = commands["run"]
    takes_value = {name for name, action in _options(run).items() if action.nargs != 0}
    words = _forward(words, takes_value)
    _Parser.json = "--json" in (words[: words.index("--")] if "--" in words else words)
    verb = words[0] if words else ""
    if verb and verb not in commands and verb not in _options(parser):
        parser.error(_no_command(words, commands))
    if verb != "run":
        return _known(parser, commands.get(verb, parser), words)
    given, names, command = split(words[1:], takes_value)
    # Without the name, so that one like -x is not parsed as an option.
    options = _known(parser, run, ["run", *given])
    if not names:
        run.error("the name of the lock is missing: aiolock run NAME -- COMMAND ...")
    options.name, options.command = names[0], command
    if options.command_string is not None and options.command:
        run.error("a command and -c exclude each other")
    if options.command_string is None and not options.command:
        run.error("the command is missing: aiolock run NAME -- COMMAND ...")
    return options


def _no_command(words: Sequence[str], commands: Mapping[str, Parser]) -> str:
    """Return why the first word is no command."""
    option = words[0].partition("=")[0]
    if not option.startswith("-"):
        return f"there is no command {words[0]!r}{_similar(words[0], commands)}"
    if option in COMMON:
        return f"the command is missing after {' '.join(words)}"
    for name, command in commands.items():
        if option in _options(command):
            return f"{option} belongs behind its command: aiolock {name} {option}"
    return f"there is no option {option}{_similar(option, COMMON)}"


def _known(parser: Parser, command: Parser, words: Sequence[str]) -> argparse.Namespace:
    """Parse words; names an option that is like the first unknown one."""
    options, unknown = parser.parse_known_args(words)
    if unknown:
        command.error(f"unrecognized arguments: {' '.join(unknown)}{_similar(unknown[0], _options(command))}")
    return options
