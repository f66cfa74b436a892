"""Several servers as one, on the command line: their addresses in one word, with spaces between them."""

from __future__ import annotations

import subprocess

import pytest

from tests.cli.conftest import PROGRAM, Shell
from tests.servers import Redis


@pytest.fixture(scope="module")
def three():
    with Redis() as first, Redis() as second, Redis() as third:
        yield first, second, third


@pytest.fixture
def shell(three):
    shell = Shell(" ".join(server.url for server in three))
    yield shell
    shell.close()


def test_what_one_program_holds_no_other_gets(shell):
    holder = shell.start("run", "report", "--", "sh", "-c", "echo in; read line", stdin=subprocess.PIPE)
    assert holder.line() == "in"
    # As flock does, it says so by its status alone.
    assert shell.run("run", "-n", "report", "true")[:2] == (1, "")
    [row] = shell.json("ls")
    assert (row["name"], len(row["holders"])) == ("report", 1)
    waiter = shell.start("run", "report", "true")
    shell.waiting("report", 1)
    assert holder.end("\n")[0] == 0
    assert waiter.end()[0] == 0
    assert shell.unused("report")


def test_the_lock_is_known_inside_of_it_in_whatever_order_the_servers_are_named(shell, three):
    other = " ".join(server.url for server in reversed(three))
    status, out, err = shell.run(
        "run", "report", "--", *PROGRAM, "run", "--url", other, "report", "echo", "inside"
    )
    assert (status, out) == (64, ""), err
    assert "is held by the run around this one" in err


def test_doctor_tells_each_of_them_apart(shell, three):
    status, out, _ = shell.run("doctor")
    assert status == 0
    assert all(f"{server.url} version: this is" in out for server in three)
    assert "use one server, or ZooKeeper" in out


def test_one_that_is_away_is_found_by_doctor_and_missed_by_nobody_else(shell):
    with Redis() as gone:
        missing = gone.url
    *there, _ = shell.environment["AIOLOCK_URL"].split()
    shell.environment["AIOLOCK_URL"] = " ".join([*there, missing])
    assert shell.run("run", "other", "--", "echo", "done")[:2] == (0, "done\n")
    status, out, _ = shell.run("doctor")
    assert status == 1
    assert f"{missing} connection: " in out
