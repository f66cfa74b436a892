"""The pure parts of the command line: words, loss, nesting, tables, changes, promises."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from random import Random

import pytest

from aiolock.cli import exit_status
from aiolock.cli.admin import _as_json, _describe, row
from aiolock.cli.doctor import CAPABILITIES, in_words
from aiolock.cli.output import Output, clean, cut, lay_out, seconds, width
from aiolock.cli.parser import split
from aiolock.cli.run import nested
from aiolock.cli.run.command import progress
from aiolock.cli.run.supervisor import Action, check_kill_after, decide, moment
from aiolock.cli.watch import changes, picture
from aiolock.errors import BackendRefused, BackendUnavailable, ConfigError, LockLost, UnsupportedKind
from aiolock.types import MUTEX, READ, WRITE, Family, Holder, LockInfo, Waiting, permits

VALUES = {"-w", "--wait", "--ttl", "-E", "-c"}


@pytest.mark.parametrize(
    ("line", "options", "names", "command"),
    [
        ("x true", "", "x", "true"),
        ("x -- true", "", "x", "true"),
        ("-n x true -n", "-n", "x", "true -n"),
        ("-w 3 x true", "-w 3", "x", "true"),
        ("-w3 x true", "-w3", "x", "true"),
        ("-nw 3 x true", "-nw 3", "x", "true"),
        ("-nw3 x true", "-nw3", "x", "true"),
        ("--wait 3 x true", "--wait 3", "x", "true"),
        ("--wait=3 x true", "--wait=3", "x", "true"),
        ("x -n --ttl 5 -- true -- y", "-n --ttl 5", "x", "true -- y"),
        ("x -n true", "-n", "x", "true"),
        ("x sh -c a -- b", "", "x", "sh -c a -- b"),
        ("-- -x -- true", "", "-x", "true"),
        ("-- -x -n true", "-n", "-x", "true"),
        ("x -- -n", "", "x", "-n"),
        ("- true", "", "-", "true"),
        ("x", "", "x", ""),
        ("", "", "", ""),
        ("-w", "-w", "", ""),
        ("--", "", "", ""),
    ],
)
def test_words(line, options, names, command):
    assert split(line.split(), VALUES) == (options.split(), names.split(), command.split())


# --- loss


def test_a_command_is_always_dead_before_the_term_ends():
    random = Random(7)
    for _ in range(400):
        ttl = random.choice([0.1, 0.5, 1, 3, 10, 30, 120])
        kill_after = random.uniform(0, ttl / 3)
        policy = random.choice(["term", "kill"])
        end = random.uniform(0, ttl)
        now, term_at, kill_at = 0.0, None, None
        while kill_at is None:
            since = None if term_at is None else now - term_at
            action, pause = decide(end - now, ttl, kill_after, since, policy)
            if action is Action.TERM:
                assert term_at is None
                term_at = now
            elif action is Action.KILL:
                kill_at = now
            else:
                now += pause
        assert kill_at < end
        assert policy == "term" or term_at is None
        if term_at is not None:
            # It has what it was promised, if there was so much left when it began.
            assert kill_at - term_at >= min(kill_after, end) - moment(ttl) - 0.01


def test_an_undisturbed_lease_stops_nothing():
    for ttl in (0.3, 1, 3, 30, 600):
        for left in (1.0, 0.9, 0.67, 0.5, 0.4):
            assert decide(left * ttl, ttl, check_kill_after(None, ttl), None, "term")[0] is Action.NOTHING


def test_what_is_gone_is_the_end_at_once():
    assert decide(0, 30, 5, None, "term")[0] is Action.KILL
    assert decide(0, 30, 5, None, "kill")[0] is Action.KILL
    assert decide(0, 30, 5, None, "warn")[0] is Action.NOTHING


def test_a_renewal_after_term_does_not_call_it_back():
    assert decide(29, 30, 5, 4.9, "term")[0] is Action.NOTHING
    assert decide(29, 30, 5, 5.0, "term")[0] is Action.KILL
    assert decide(math.inf, 30, 5, 5.0, "term")[0] is Action.KILL


# --- statuses


def test_statuses():
    assert [exit_status.of_child(code) for code in (0, 3, -9, -15)] == [0, 3, 137, 143]
    assert exit_status.of_error(LockLost("x", "expired")) == 75
    assert exit_status.of_error(BackendUnavailable("away")) == 69
    assert exit_status.of_error(BackendRefused("no")) == 69
    assert exit_status.of_error(UnsupportedKind("list", "this")) == 64
    assert exit_status.of_error(ZeroDivisionError()) == 70


# --- nested runs


def info(
    *holders: tuple[int, str, int],
    waiters: int = 0,
    family: Family = Family.LOCK,
    name: str = "x",
    local: int | None = None,
) -> LockInfo:
    since = datetime.now(UTC) - timedelta(seconds=90)
    return LockInfo(
        name,
        tuple(
            Holder(f"host:{token}", token, since, 20.0, count, mode, local_waiters=local)
            for token, mode, count in holders
        ),
        tuple(Waiting("", host="waiter", pid=number) for number in range(waiters)),
        family,
    )


def test_an_entry_survives_the_environment():
    who = nested.identity("redis://:secret@host/0", "app", MUTEX, "x y:z")
    held = f"{nested.Entry('0e', 1)} {nested.Entry(who, 17)} {nested.Entry(who, 18)}"
    assert nested.find(held, who) == [17, 18]
    assert nested.find(held, "nobody") == []
    assert "secret" not in held


def test_who_it_is_depends_on_everything_but_the_password():
    who = nested.identity("redis://u:p@host/0", "app", MUTEX, "x")
    assert who == nested.identity("REDIS://host/0", "app", MUTEX, "x")
    others = {
        nested.identity("redis://host/1", "app", MUTEX, "x"),
        nested.identity("redis://host/0", "ap", MUTEX, "px"),
        nested.identity("redis://host/0", "app", READ, "x"),
        nested.identity("redis://host/0", "app", MUTEX, "y"),
    }
    assert who not in others
    assert len(others) == 4


@pytest.mark.parametrize("number", ["\u00b2", "9" * 5000, "-1", "", "x", "1:mutex"])
def test_an_entry_that_no_run_wrote_is_ignored(number):
    assert nested.find(f"0e:{number} 0e {number}", "0e") == []


def test_a_hold_counts_by_its_token_and_its_mode():
    nested.refuse(info((16, "mutex", 1)), [17], MUTEX)
    with pytest.raises(ConfigError, match="host:17, token 17"):
        nested.refuse(info((17, "mutex", 1)), [17], MUTEX)
    readers = info((16, "read", 1), (17, "read", 1), family=Family.RW)
    nested.refuse(readers, [17], READ)
    with pytest.raises(ConfigError, match="use -x for the outer run"):
        nested.refuse(readers, [17], WRITE)
    for kind in (READ, WRITE):
        with pytest.raises(ConfigError, match="without aiolock"):
            nested.refuse(info((17, "write", 1), family=Family.RW), [17], kind)


def test_permits_of_the_runs_around_count_together_and_the_limit_is_that_of_the_server():
    holders = info((16, "permits", 2), (17, "permits", 1), (18, "permits", 1), family=Family.SEMAPHORE)
    nested.refuse(holders, [17, 18], permits(3, 5))
    with pytest.raises(ConfigError, match="fewer permits"):
        nested.refuse(holders, [17, 18], permits(4, 5))
    nested.refuse(replace(holders, limit=6), [17, 18], permits(4, 5))


# --- what is shown


def test_width_and_cut():
    assert [width(text) for text in ("abc", "日本", "é", "e\u0301")] == [3, 4, 1, 1]
    assert [cut("abcdef", most) for most in (6, 4, 1, 0)] == ["abcdef", "abc…", "…", ""]
    assert cut("日本語", 5) == "日本…"
    assert cut("日本語", 4) == "日…"


def test_durations():
    assert [seconds(value) for value in (-1, 0.04, 9.94, 9.96, 59.4, 59.6, 3599, 3600, 90_000)] == [
        *("0.0 s", "0.0 s", "9.9 s", "10 s", "59 s", "1 m 00 s", "59 m 59 s", "1 h 00 m", "1 d 1 h"),
    ]


def test_a_table_fits():
    rows = [("NAME", "HOLDER", "N"), ("x" * 50, "日本" * 20, "17"), ("y", "z", "3")]
    for most in range(1, 120):
        for spare in ((), (1,), (1, 2)):
            for line in lay_out(rows, most=most, right=(2,), spare=spare):
                assert width(line) <= most
    assert lay_out([("A", "B"), ("x", "10"), ("yy", "3")], right=(1,)) == ["A    B", "x   10", "yy   3"]
    assert lay_out([]) == []


def test_the_picture_fits_every_terminal():
    infos = [info((number, "mutex", 1), waiters=number, name=f"lock {number}") for number in range(30)]
    for columns in (1, 20, 80, 200):
        for rows in (1, 2, 3, 4, 10, 50):
            lines = picture(infos, "title" * 30, "", columns, rows)
            assert len(lines) <= rows
            assert all(width(line) <= columns for line in lines)
    lines = picture(infos, "title", "", 80, 10)
    # Where most wait comes first.
    assert lines[3].startswith("lock 29")
    assert lines[-1] == "… and 24 more"
    assert picture(infos, "title", "it is away", 80, 10)[1] == "it is away"


def test_progress():
    held = info((7, "mutex", 1), waiters=3)
    text = progress(held, "waiter:1", 12.0)
    assert text == "waiting for 'x' for 12 s, position 2 of 3; held by host:7 for 1 m 30 s"
    assert progress(info(waiters=0), "host:1", 1.0) == "waiting for 'x' for 1.0 s"
    assert "host:1 and 1 more for" in progress(info((1, "read", 1), (2, "read", 1)), "me", 1.0)


def test_clean():
    assert clean("plain äß 日本") == "plain äß 日本"
    assert clean("a\x1b[2J\u202e\n") == "a\\x1b[2J\\u202e\\n"


def test_changes():
    one, two = info((1, "mutex", 1), waiters=1), info((2, "mutex", 1))
    told = [(each["event"], each.get("token"), each["waiting"]) for each in changes([one], [two])]
    assert told == [("released", 1, 0), ("granted", 2, 0), ("waiting", None, 0)]
    assert list(changes([one], [one])) == []
    assert [each["event"] for each in changes([], [one])] == ["granted", "waiting"]
    assert [each["event"] for each in changes([one], [])] == ["released", "waiting"]
    both = [info((1, "mutex", 1)), info((1, "read", 1), family=Family.RW)]
    assert [each["family"] for each in changes([], both)] == ["lock", "rw"]


def test_local_waiters_are_shown_where_they_are_known():
    known, unknown = info((1, "mutex", 1), local=3), info((1, "mutex", 1))
    assert [row(each)[-1] for each in (known, unknown, info())] == ["3", "-", ""]
    assert [each.local_waiters for each in (known, unknown, info())] == [3, None, None]
    assert info((1, "read", 1), (2, "read", 1), local=2).local_waiters == 4
    told = [(each["event"], each["waiting"], each["local_waiters"]) for each in changes([known], [unknown])]
    assert told == [("waiting", 0, None)]
    assert list(changes([unknown], [info((1, "mutex", 1), local=0)])) == []
    shown = [_describe(each, Output())[1] for each in (known, unknown)]
    assert shown[0].endswith("; waiting in its process: 3")
    assert shown[1].endswith("; waiting in its process: -")
    assert _as_json(known)["local_waiters"] == _as_json(known)["holders"][0]["local_waiters"] == 3
    assert _as_json(unknown)["local_waiters"] is _as_json(unknown)["holders"][0]["local_waiters"] is None


def test_a_hand_over_inside_a_client_is_another_hold():
    """Others learn of the next lease by its token."""
    before, after = info((1, "mutex", 1), local=1), info((2, "mutex", 1), local=0)
    assert [each["event"] for each in changes([before], [after])] == ["released", "granted", "waiting"]


def test_a_paused_semaphore_is_said_to_be():
    held = info((1, "permits", 2), family=Family.SEMAPHORE)
    assert row(replace(held, limit=0))[1] == "2 of 0 permits, paused"
    assert row(replace(held, limit=2))[1] == "2 of 2 permits"


def test_every_word_is_said_on_every_server():
    for capabilities in ({"exclusion"}, set(CAPABILITIES), {"exclusion", "tomorrow's"}):
        told = in_words(capabilities)
        assert {each.capability for each in told if each.promised} == capabilities
        assert {each.capability for each in told} == set(CAPABILITIES) | capabilities
        assert all(each.advice for each in told if not each.promised)
