"""The page about `--json` against what the commands write: each field, its type, and whether it may be null or missing."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "command-line-json.md"

TYPES = {
    "text": lambda value: type(value) is str,
    "whole number": lambda value: type(value) is int,
    "number": lambda value: type(value) in (int, float),
    "duration": lambda value: type(value) in (int, float) and value >= 0,
    "true or false": lambda value: type(value) is bool,
    "time": lambda value: type(value) is str and datetime.fromisoformat(value).tzinfo is not None,
}


class Field(NamedTuple):
    type: str
    nullable: bool
    optional: bool


def rows(section: str) -> list[list[str]]:
    """The cells of a table, without its head."""
    lines = [line.strip("| ") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split(" | ")] for line in lines[2:]]


SECTIONS = {
    title.strip(): text
    for title, _, text in (part.partition("\n") for part in PAGE.read_text().split("\n## ")[1:])
}


def fields(title: str) -> dict[str, Field]:
    found = {}
    for name, kind, *_ in rows(SECTIONS[title]):
        kind, _, rest = kind.partition(", ")
        kind, null, _ = kind.partition(" or null")
        assert kind.removeprefix("list of ") in TYPES or kind.removeprefix("list of ") in SECTIONS, kind
        found[name.strip("`")] = Field(kind, bool(null), rest == "not always")
    return found


def check(value: Any, kind: str, where: str) -> None:
    """The value is of the type that the page gives it."""
    if kind.startswith("list of "):
        assert type(value) is list, where
        for each in value:
            check(each, kind.removeprefix("list of "), where)
    elif kind in TYPES:
        assert TYPES[kind](value), f"{where}: {value!r} is not a {kind}"
    else:
        compare(value, fields(kind), where=kind)


def compare(value: dict[str, Any], known: dict[str, Field], where: str) -> None:
    needed = {name for name, field in known.items() if not field.optional}
    assert needed <= value.keys() <= known.keys(), f"{where}: {sorted(value.keys() ^ known.keys())}"
    for name, each in value.items():
        if each is None:
            assert known[name].nullable, f"{where}: {name} is null"
        else:
            check(each, known[name].type, f"{where}: {name}")


def compare_line(line: str, title: str, always: set[str], column: int) -> str:
    """A line with an event has the fields of its row, and these; return the event."""
    said, types = json.loads(line), fields("fields of changes and messages")
    [row] = [row for row in rows(SECTIONS[title]) if f"`{said['event']}`" in row[0]]
    maybe = set(re.findall(r"\(`([a-z_]+)`\)", row[column]))
    known = set(re.findall(r"`([a-z_]+)`", row[column])) | always
    compare(said, {name: types[name]._replace(optional=name in maybe) for name in known}, where=said["event"])
    return str(said["event"])


def message(line: str) -> str:
    return compare_line(line, "messages", {"event", "message"}, 2)


def change(line: str) -> str:
    return compare_line(line, "changes", {"event", "at"}, 1)


def test_what_the_commands_find_is_described(shell):
    watching = shell.start("watch", "-i", "0.05")
    holder = shell.start("run", "--json", "x", "sh", "-c", "echo in; read line", stdin=subprocess.PIPE)
    assert holder.line() == "in"
    assert message(holder.complaint()) == "acquired"
    waiter = shell.start(
        "run", "--permits", "1/2", "x", "sh", "-c", "echo in; read line", stdin=subprocess.PIPE
    )
    assert waiter.line() == "in"
    queueing = shell.start("run", "x", "true")
    shell.waiting("x", 1)
    locks = shell.json("ls")
    assert [len(lock["waiters"]) for lock in locks] == [1, 0]
    check(locks, "list of lock", "ls")
    check(shell.json("inspect", "x"), "inspect", "inspect")
    status, out, err = shell.run("run", "--json", "-n", "x", "true")
    assert (status, out, message(err)) == (1, "", "error")
    status, out, _ = shell.run("force-release", "x", "--family", "sem", "--json")
    known = {**fields("lock"), **fields("force-release")}
    compare(json.loads(out), known, "force-release")
    assert waiter.end("\n")[0] == 75
    status, _, err = holder.end("\n")
    assert (status, message(err)) == (0, "exited")
    assert queueing.end()[0] == 0
    assert shell.run("run", "--at-least", "60", "y", "true")[0] == 0
    [kept] = shell.json("ls", "y")
    check(kept, "lock", "kept")
    assert kept["kept"]
    seen: set[str] = set()
    while not {"granted", "released", "kept", "waiting"} <= seen:
        seen.add(change(watching.line()))
    watching.send(signal.SIGTERM)
    status, out, err = shell.run("ls", "--json", "no*")
    assert (out, message(err)) == ("[]\n", "empty")
    check(shell.json("doctor"), "doctor", "doctor")


def test_a_verification_is_described(shell):
    status, out, err = shell.run("verify", "--for", "1.5", "--processes", "2", "--rate", "50", "--json")
    assert status == 0
    assert [message(line) for line in err.splitlines()] == ["contending"]
    report = json.loads(out)
    check(report, "verify", "verify")
    assert report["hand_over"]
    # Not more than asked for, although the locks would allow it.
    assert 10 < report["grants"] <= 50 * report["seconds"]
    assert [one["grants"] > 0 for one in report["connections"]] == [True, True]


@pytest.mark.parametrize("server", ["mysql", "postgresql"])
def test_a_schema_is_described(offline, server):
    check(json.loads(offline.run("schema", server, "--json")[1]), "schema", "schema")


def test_what_is_said_about_a_job_is_described(offline, tmp_path):
    """Over a file of this machine."""
    offline.environment["AIOLOCK_DIR"] = str(tmp_path)
    words = ["run", "--local", "--json", "--max-hold", "0.2", "--on-loss", "kill", "x", "sleep", "60"]
    status, _, err = offline.run(*words)
    assert status == 124
    assert [message(line) for line in err.splitlines()] == ["local", "acquired", "overdue", "exited"]
    status, _, err = offline.run("force-release", "--local", "x", "--json")
    assert (status, message(err)) == (1, "error")
    out = offline.run("purge", "--local", "--idle", "3600", "--json")[1]
    check(json.loads(out), "purge", "purge")
