"""The command line with locks in the format of another library: there are no tokens, and foreign holders are shown."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import redis as driver

from tests.cli.conftest import Shell

SHOW = "import os; print(sorted(name for name in os.environ if name.startswith('AIOLOCK_') and name != 'AIOLOCK_URL'))"
HOLD = ["sh", "-c", "echo in; read line"]


@pytest.fixture
def plain(redis):
    shell = Shell(f"{redis.url}?dialect=plain&prefix=app:")
    yield shell
    shell.close()


def test_a_run_has_no_token(plain):
    status, out, err = plain.run("run", "-v", "job", "--", sys.executable, "-c", SHOW)
    assert status == 0
    assert "AIOLOCK_NAME" in out
    assert "AIOLOCK_TOKEN" not in out
    assert "with token" not in err


def test_a_run_inside_a_run_is_refused_although_there_is_no_token(plain):
    inner = [sys.executable, "-m", "aiolock", "run", "--wait", "60", "job", "true"]
    status, _, err = plain.run("run", "job", "--", *inner)
    assert status != 0
    assert "is held by the run around this one" in err


def test_what_is_listed_has_a_dash_for_the_token_and_no_end_for_a_foreign_holder_without_one(plain, redis):
    program = plain.start("run", "--label", "night", "job", *HOLD, stdin=subprocess.PIPE)
    assert program.line() == "in"
    with driver.Redis.from_url(redis.url) as client:
        client.set("app:theirs", "0123456789abcdef")
        rows = [line.split() for line in plain.run("ls")[1].splitlines()[1:]]
        assert [(row[0], "-" in row) for row in rows] == [("job", True), ("theirs", True)]
        assert any("never" in row for row in rows)
        [holder] = plain.json("inspect", "theirs")["locks"][0]["holders"]
        assert (holder["label"], holder["token"], holder["remaining"]) == ("foreign: 01234567…", None, None)
        assert "token -" in plain.run("inspect", "job")[1]
        findings = {
            finding["subject"]: finding["text"]
            for finding in json.loads(plain.run("doctor", "--json")[1])["findings"]
        }
        assert "dialect=plain" in findings["dialect"]
        assert "app:theirs" in findings["foreign holders"]
        client.delete("app:theirs")
    assert program.end("\n")[0] == 0
