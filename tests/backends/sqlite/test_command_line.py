"""`aiolock run --local`: which file it is, whom it keeps out, and what the other commands see of it."""

from __future__ import annotations

import json
import os
import pwd
import sqlite3
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Self

import pytest

from aiolock.cli import settings
from aiolock.errors import ConfigError
from tests.backends.sqlite.conftest import PATIENCE

HOLD = "echo inside; read line"


@pytest.fixture
def directory(tmp_path, monkeypatch) -> Path:
    """A directory for the file, with a space and whatever else an address gives a meaning."""
    place = tmp_path / "a b#c?d%e@f:g"
    monkeypatch.setenv("AIOLOCK_DIR", str(place))
    for name in ("AIOLOCK_URL", "AIOLOCK_NAMESPACE", "AIOLOCK_HELD", "PYTHONASYNCIODEBUG"):
        monkeypatch.delenv(name, raising=False)
    return place


def aiolock(*words: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "aiolock", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    return done.returncode, done.stdout, done.stderr


class Holder:
    """A run that holds a lock until it is told to end."""

    def __init__(self, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "aiolock", "run", *words, "--", "sh", "-c", HOLD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout.readline() == "inside\n"

    def __enter__(self) -> Self:
        return self

    def end(self) -> int:
        self.process.communicate("\n", timeout=PATIENCE)
        return self.process.returncode

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


def test_runs_of_one_user_exclude_each_other_and_v_names_the_file(directory):
    with Holder("--local", "backup") as holder:
        assert aiolock("run", "--local", "-n", "backup", "--", "true")[0] == 1
        status, _, output = aiolock("run", "--local", "-v", "other", "--", "true")
        assert status == 0
        assert f"the locks are in {directory}/locks.db" in output
        status, shown, _ = aiolock("ls", "--local", "--json")
        assert status == 0
        assert "backup" in shown
        assert holder.end() == 0
    assert aiolock("run", "--local", "-n", "backup", "--", "true")[0] == 0
    assert directory.stat().st_mode & 0o777 == 0o700


def test_local_is_the_same_as_the_address_of_its_file(directory):
    url = settings.url(Namespace(local=True, url=None))
    with Holder("--url", url, "x"):
        assert aiolock("run", "--local", "-n", "x", "--", "true")[0] == 1


def test_a_run_inside_a_run_of_the_same_lock_is_refused(directory):
    for inner, status in (("x", 64), ("y", 0)):
        command = f"{sys.executable} -m aiolock run --local -n {inner} -- echo inner"
        done = aiolock("run", "--local", "x", "-c", command)
        assert (done[0], "inner" in done[1]) == (status, status == 0)


def test_a_killed_run_is_followed_after_its_ttl_without_anybody_having_watched(directory):
    holder = Holder("--local", "--ttl", "1", "x")
    holder.process.kill()
    holder.process.communicate()
    status = 1
    for _ in range(20):
        # Each of these tries once, and learns from the file alone that the holder is dead.
        if (status := aiolock("run", "--local", "-n", "x", "--", "true")[0]) == 0:
            break
    assert status == 0


def test_without_a_place_all_three_are_named(directory):
    status, _, output = aiolock("run", "x", "--", "true")
    assert status == 64
    assert all(word in output for word in ("--url", "AIOLOCK_URL", "--local"))


def test_local_stands_above_the_environment_and_excludes_an_address(directory, monkeypatch):
    monkeypatch.setenv("AIOLOCK_URL", "redis://127.0.0.1:1")
    assert aiolock("run", "--local", "x", "--", "true")[0] == 0
    status, _, output = aiolock("run", "--local", "--url", "redis://127.0.0.1:1", "x", "--", "true")
    assert status == 64
    assert "not allowed with" in output


def test_doctor_explains_the_file(directory):
    status, shown, _ = aiolock("doctor", "--local", "--json")
    found = json.loads(shown)
    assert (status, found["healthy"]) == (0, True)
    assert {"exclusion", "fencing", "fifo", "keep", "no-eviction"} == set(found["promises"]) - {
        "survives-restart"
    }
    (directory / "locks.db").write_bytes(b"no database, but long enough to be taken for one: " * 20)
    status, shown, output = aiolock("doctor", "--local", "--json")
    assert status == 1
    assert "another program wrote it" in shown + output


def test_a_lock_of_another_format_is_named_and_can_be_replaced(directory):
    for name in ("x", "y"):
        assert aiolock("run", "--local", name, "--", "true")[0] == 0
    with sqlite3.connect(directory / "locks.db") as file:
        file.execute("UPDATE aiolock SET value = x'39' || value, version = 'new' WHERE key LIKE '%/l/lock/x'")
    file.close()
    status, _, output = aiolock("run", "--local", "-v", "x", "--", "true")
    assert status not in (0, 1)
    assert "format '9'" in output
    assert "clean up" not in output
    status, shown, _ = aiolock("ls", "--local")
    assert status == 0
    assert "format '9'" in shown
    [found] = json.loads(aiolock("ls", "--local", "--json")[1])
    assert (found["name"], found["locked"], "format '9'" in found["unreadable"]) == ("x", True, True)
    status, shown, _ = aiolock("inspect", "--local", "x")
    assert status == 0
    assert "format '9'" in shown
    status, shown, _ = aiolock("doctor", "--local")
    assert status == 1
    assert "lock/x" in shown
    assert "lock/y" not in shown
    assert "Healthy" not in shown
    assert aiolock("force-release", "--local", "y")[0] == 1
    status, shown, _ = aiolock("force-release", "--local", "x")
    assert (status, shown) == (0, "x was taken from holders that cannot be read\n")
    assert aiolock("run", "--local", "x", "--", "true")[0] == 0
    assert aiolock("ls", "--local", "--json")[1].strip() == "[]"
    assert aiolock("doctor", "--local")[0] == 0


def test_a_register_of_another_format_is_named(directory):
    """A latch, a barrier or the leader that an election shows: its tasks are told when they use it."""
    assert aiolock("run", "--local", "x", "--", "true")[0] == 0
    with sqlite3.connect(directory / "locks.db") as file:
        rows = [
            ("done", b'{"v":2,"n":1,"writes":[],"body":{"left":1}}'),
            ("other", b'{"v":1,"seen":{},"body":{}}'),
        ]
        [[prefix]] = file.execute(
            "SELECT substr(key, 1, instr(key, '/l/') - 1) FROM aiolock WHERE key LIKE '%/l/lock/x'"
        )
        for name, value in rows:
            values = f"{prefix}/r/latch/{name}", value, name
            file.execute("INSERT INTO aiolock (key, value, version) VALUES (?, ?, ?)", values)
    file.close()
    status, shown, _ = aiolock("doctor", "--local")
    assert status == 1
    assert "register latch/other" in shown
    assert "latch/done" not in shown


def test_the_home_is_that_of_the_user_database(tmp_path, monkeypatch):
    home = tmp_path / "home"
    monkeypatch.delenv("AIOLOCK_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "elsewhere"))
    entry = pwd.struct_passwd(("me", "x", os.getuid(), 0, "", str(home), "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda _: entry)
    assert settings.local_file() == home / ".local/state/aiolock/locks.db"
    assert (home / ".local/state/aiolock").is_dir()


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch):
    def unknown(_: int) -> pwd.struct_passwd:
        raise KeyError

    monkeypatch.delenv("AIOLOCK_DIR", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(ConfigError, match="set AIOLOCK_DIR"):
        settings.local_file()


@pytest.mark.parametrize(("place", "why"), [("relative", "absolute path"), ("/proc/no/such", "/proc/no")])
def test_a_directory_that_cannot_be_is_refused(monkeypatch, place, why):
    monkeypatch.setenv("AIOLOCK_DIR", place)
    with pytest.raises(ConfigError, match=why):
        settings.local_file()


def test_rows_that_were_not_used_for_long_are_purged(directory):
    assert aiolock("run", "--local", "x", "true")[0] == 0
    status, out, err = aiolock("purge", "--local", "--idle", "3600")
    assert (status, err) == (0, "")
    assert out.endswith(": 0 rows that had not been used for 3600 s\n")
    with sqlite3.connect(directory / "locks.db") as database:
        database.execute("UPDATE aiolock SET expires = expires - 86400 WHERE key LIKE '%/x'")
    database.close()
    other = aiolock("purge", "--local", "--namespace", "other", "--idle", "3600", "--json")[1]
    assert json.loads(other)["purged"] == 0
    assert json.loads(aiolock("purge", "--local", "--idle", "3600", "--json")[1])["purged"] == 1
    assert aiolock("purge", "--local", "--idle", "60")[0] == 64
