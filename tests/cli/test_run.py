"""`aiolock run`: statuses, environment, streams, waiting, nesting."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

AIOLOCK = f"{sys.executable} -m aiolock"


@pytest.mark.parametrize(
    ("script", "status"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -TERM $$", 143)]
)
def test_the_status_is_that_of_the_command(shell, script, status):
    assert shell.run("run", "x", "--", "sh", "-c", script) == (status, "", "")
    assert shell.unused("x")


def test_the_command_begins_after_the_name_as_with_flock(shell):
    assert shell.run("run", "-n", "x", "echo", "-n", "--json", "--", "a") == (0, "--json -- a", "")
    assert shell.run("run", "x", "-n", "--", "echo", "b") == (0, "b\n", "")
    assert shell.run("run", "-no", "x", "-c", "echo $0; exit 3", environment={"SHELL": "/bin/sh"}) == (
        3,
        "/bin/sh\n",
        "",
    )


def test_the_command_cannot_be_run(shell, tmp_path):
    status, out, err = shell.run("run", "x", "no-such-program", "y")
    assert (status, out) == (127, "")
    assert err == "aiolock: cannot run no-such-program: there is no such command\n"
    plain = tmp_path / "plain"
    plain.write_text("echo hi\n")
    assert shell.run("run", "x", str(plain))[0] == 126
    plain.chmod(0o755)
    # Without a first line that names an interpreter, it is the shell's.
    assert shell.run("run", "x", str(plain)) == (0, "hi\n", "")
    plain.write_text("#!/no/such/interpreter\n")
    status, out, err = shell.run("run", "x", str(plain))
    assert (status, out) == (127, "")
    assert len(err.splitlines()) == 1


def test_the_command_learns_the_name_the_token_and_the_label(shell):
    script = 'echo "$AIOLOCK_NAME|$AIOLOCK_TOKEN|$AIOLOCK_LABEL"'
    status, out, _ = shell.run("run", "--label", "night job", "or der:42", "sh", "-c", script)
    name, token, label = out.strip().split("|")
    assert (status, name, label) == (0, "or der:42", "night job")
    later = shell.run("run", "or der:42", "sh", "-c", "echo $AIOLOCK_TOKEN")[1]
    assert 0 < int(token) < int(later)


def test_the_environment_tells_the_command_nothing_about_the_server(shell, redis):
    bare = {key: value for key, value in shell.environment.items() if key != "AIOLOCK_URL"}
    done = subprocess.run(
        [sys.executable, "-m", "aiolock", "run", "--url", redis.url, "x", "env"],
        env=bare, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "hunter2" not in done.stdout + done.stderr


def test_streams_pass_through(shell):
    program = shell.start("run", "x", "sh", "-c", "cat; echo problem >&2", stdin=subprocess.PIPE)
    out, err = program.process.communicate("to be\nor not\n", timeout=30)
    assert (program.process.returncode, out, err) == (0, "to be\nor not\n", "problem\n")


def test_descriptors_of_the_caller_are_not_kept_open(shell):
    # A program that is left behind in the background keeps the pipe open, but nothing of ours does.
    status, out, _ = shell.run("run", "x", "sh", "-c", "ls /proc/self/fd | wc -l")
    assert (status, int(out)) == (0, 4)


def test_one_at_a_time(shell):
    holder = shell.start("run", "x", "sh", "-c", "echo in; read line", stdin=subprocess.PIPE)
    assert holder.line() == "in"
    # Without a terminal, the reason is a line of the log, unless the caller says that it is no trouble.
    status, out, err = shell.run("run", "-n", "x", "true")
    assert (status, out) == (1, "")
    assert err.startswith("aiolock: lock 'x' was not free")
    assert shell.run("run", "-n", "-E", "9", "x", "true")[0] == 9
    assert shell.run("run", "-w", "0.2", "-E", "0", "x", "true") == (0, "", "")
    waiter = shell.start("run", "x", "echo", "next")
    shell.waiting("x", 1)
    holder.end("\n")
    assert waiter.end() == (0, "next\n", "")


def test_shared_and_exclusive(shell):
    reader = shell.start("run", "-s", "tree", "sh", "-c", "echo in; read line", stdin=subprocess.PIPE)
    assert reader.line() == "in"
    assert shell.run("run", "-s", "-n", "tree", "true")[0] == 0
    assert shell.run("run", "-x", "-n", "tree", "true")[0] == 1
    # Families never exclude each other.
    assert shell.run("run", "-n", "tree", "true")[0] == 0
    [lock] = shell.json("inspect", "tree")["locks"]
    assert (lock["family"], lock["holders"][0]["mode"]) == ("rw", "read")
    reader.end("\n")
    writer = shell.start("run", "-x", "tree", "sh", "-c", "echo in; read line", stdin=subprocess.PIPE)
    assert writer.line() == "in"
    assert shell.run("run", "-s", "-n", "tree", "true")[0] == 1
    writer.end("\n")


def test_permits(shell):
    first = shell.start(
        "run", "--permits", "2/3", "api", "sh", "-c", "echo in; read line", stdin=subprocess.PIPE
    )
    assert first.line() == "in"
    assert shell.run("run", "-n", "--permits", "2/3", "api", "true")[0] == 1
    assert shell.run("run", "-n", "--permits", "1/3", "api", "true")[0] == 0
    status, _, err = shell.run("run", "-n", "--permits", "1/4", "api", "true")
    assert status == 64
    assert len(err.splitlines()) == 1
    assert "2 of 3 permits" in shell.run("inspect", "api")[1]
    first.end("\n")


def test_how_it_goes_as_json(shell):
    status, out, err = shell.run("run", "--json", "x", "echo", "data")
    first, last = map(json.loads, err.splitlines())
    assert (status, out) == (0, "data\n")
    assert (first["event"], first["name"], last["event"], last["status"]) == ("acquired", "x", "exited", 0)
    assert first["token"] == last["token"] > 0
    holder = shell.start("run", "x", "sh", "-c", "echo in; read line", stdin=subprocess.PIPE)
    holder.line()
    status, out, err = shell.run("run", "--json", "-n", "x", "true")
    trouble = json.loads(err)
    assert (status, out, trouble["error"], trouble["status"]) == (1, "", "AcquireTimeout", 1)
    assert trouble["message"].startswith("lock 'x' was not free: it is held by ")
    assert (
        "was not free within 0.2 s"
        in json.loads(shell.run("run", "--json", "-w0.2", "x", "true")[2])["message"]
    )
    holder.end("\n")


def test_verbose_says_how_it_goes(shell):
    _, out, err = shell.run("run", "-v", "x", "echo", "data")
    assert out == "data\n"
    assert "got 'x' after" in err
    assert "ended with status 0" in err


# --- no server


def test_a_server_that_does_not_answer_is_one_sentence(offline):
    words = ["--url", "redis://:hunter2@127.0.0.1:1/0", "--ttl", "1", "x", "true"]
    status, out, err = offline.run("run", *words)
    assert (status, out) == (69, "")
    assert err.startswith("aiolock: ")
    assert len(err.splitlines()) == 1
    assert "hunter2" not in err
    status, out, err = offline.run("run", "--json", *words)
    trouble = json.loads(err)
    assert (status, trouble["error"], trouble["status"]) == (69, "BackendUnavailable", 69)
