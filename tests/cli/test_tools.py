"""`ls`, `inspect`, `force-release`, `watch`, `doctor`, `schema`, `purge`, `bench`, and how all of them speak."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
from pathlib import Path

import pytest

import aiolock
from aiolock.backends import redact
from tests.cli.test_json import check
from tests.servers import SERVERS, Etcd, MariaDB, Memcached, PostgreSQL, Redis, ZooKeeper

HOLD = ["sh", "-c", "echo in; read line"]


def hold(shell, name: str, *options: str):
    program = shell.start("run", *options, name, *HOLD, stdin=subprocess.PIPE)
    assert program.line() == "in"
    return program


def let_go(program) -> None:
    assert program.end("\n")[0] == 0


# --- looking


def test_ls_lists_what_is_held_and_waited_for(shell):
    url = redact(shell.environment["AIOLOCK_URL"])
    empty = f"no lock in namespace '{shell.namespace}' of {url} is held or waited for"
    assert shell.run("ls") == (0, "", f"aiolock: {empty}\n")
    status, out, err = shell.run("ls", "--json")
    assert (status, json.loads(out)) == (0, [])
    said = {"event": "empty", "namespace": shell.namespace, "server": url, "message": empty}
    assert json.loads(err) == said
    first = hold(shell, "order:1", "--label", "web 1")
    second = hold(shell, "import", "-s", "--label", "web 2")
    waiter = shell.start("run", "order:1", "true")
    shell.waiting("order:1", 1)
    status, out, err = shell.run("ls")
    assert (status, err) == (0, "")
    head, *rows = [line.split() for line in out.splitlines()]
    assert head[:4] == ["NAME", "KIND", "HOLDER", "TOKEN"]
    assert [(row[0], row[1], row[2] + row[3], *row[-2:]) for row in rows] == [
        ("import", "read", "web2", "0", "0"),
        ("order:1", "lock", "web1", "1", "0"),
    ]
    [lock] = shell.json("ls", "order:*")
    assert (lock["name"], lock["family"], lock["locked"]) == ("order:1", "lock", True)
    assert [holder["label"] for holder in lock["holders"]] == ["web 1"]
    assert len(lock["waiters"]) == 1
    assert shell.run("ls", "no*")[2].startswith("aiolock: no lock that matches 'no*' in namespace ")
    for program in (first, second):
        let_go(program)
    assert waiter.end()[0] == 0


def test_inspect_tells_holder_and_line(shell):
    holder = hold(shell, "x", "--label", "night job")
    waiter = shell.start("run", "--label", "second", "x", "true")
    shell.waiting("x", 1)
    status, out, err = shell.run("inspect", "x")
    assert (status, err) == (0, "")
    assert re.search(r"held by night job at \S+:\d+ \(token ", out)
    assert "1. in the queue: second at " in out
    [lock] = shell.json("inspect", "x", "--family", "lock")["locks"]
    assert 0 < lock["holders"][0]["remaining"] <= 30
    status, out, err = shell.run("inspect", "x", "--family", "sem", "--json")
    assert (status, json.loads(out), err) == (1, {"name": "x", "locks": []}, "")
    let_go(holder)
    assert waiter.end()[0] == 0
    assert shell.run("inspect", "x") == (1, "x: not held, and nothing waits for it\n", "")


def test_names_cannot_drive_a_terminal(shell):
    holder = hold(shell, "a\x1b[31mb\nc", "--label", "me")
    for words in (["ls"], ["inspect", "a\x1b[31mb\nc"]):
        status, out, _ = shell.run(*words)
        assert status == 0
        assert "\x1b" not in out
        assert "a\\x1b[31mb\\nc" in out
    assert shell.json("ls")[0]["name"] == "a\x1b[31mb\nc"
    let_go(holder)


# --- force


def test_force_release_needs_a_holder(shell):
    assert shell.run("force-release", "x") == (1, "", "aiolock: 'x' is not held\n")
    status, out, err = shell.run("force-release", "x", "--json")
    trouble = json.loads(err)
    assert (status, out, trouble["status"], trouble["message"]) == (1, "", 1, "'x' is not held")


def test_force_release_does_not_guess(shell):
    lock, readers = hold(shell, "x"), hold(shell, "x", "-s")
    status, _, err = shell.run("force-release", "x")
    assert status == 64
    assert "(lock, rw)" in err
    released = json.loads(shell.run("force-release", "x", "--family", "rw", "--json")[1])
    assert (released["released"], released["family"]) == (True, "rw")
    assert readers.process.wait(30) == 75
    let_go(lock)


def test_force_release_by_token_leaves_who_came_next(shell):
    first, readers = hold(shell, "x", "--label", "stuck"), hold(shell, "x", "-s")
    token = json.loads(shell.run("inspect", "x", "--family", "lock", "--json")[1])["locks"][0]["holders"][0][
        "token"
    ]
    status, out, err = shell.run("force-release", "x", "--token", str(token))
    assert (status, err) == (0, "")
    assert "x was taken from stuck" in out
    assert first.process.wait(30) == 75
    # The token alone says which of the two locks of that name was meant.
    let_go(readers)
    status, out, err = shell.run("force-release", "x", "--token", str(token))
    assert (status, out, err) == (
        1,
        "",
        f"aiolock: nothing was done: no holder of 'x' has token {token}; it is not held\n",
    )
    healthy = hold(shell, "x", "--label", "healthy")
    status, out, err = shell.run("force-release", "x", "--token", str(token), "--json")
    trouble = json.loads(err)
    assert (status, out, trouble["event"], trouble["status"]) == (1, "", "error", 1)
    assert f"no holder of 'x' has token {token}; it is held by healthy" in trouble["message"]
    let_go(healthy)


def test_force_release_by_token_is_refused_before_any_request_where_no_token_is_known():
    urls = " ".join(f"redis://127.0.0.1:{port}" for port in (1, 2, 3))
    words = [*program(), "--url", urls, "force-release", "x", "--token", "1"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 64
    assert "the server does not know the tokens of holders" in done.stderr


def test_force_release_asks_on_a_terminal(shell):
    holder = hold(shell, "x", "--label", "night job")
    screen = shell.screen("force-release", "x")
    screen.until(r"held by night job .*\[y/N\] ")
    screen.type("\n")
    screen.until("nothing was done")
    assert screen.end()[0] == 1
    screen = shell.screen("force-release", "x")
    screen.until(r"\[y/N\] ")
    screen.type("y\n")
    screen.until("was taken from night job")
    assert screen.end()[0] == 0
    assert holder.process.wait(30) == 75


def test_the_question_is_asked_in_the_terminal_and_not_in_a_file(shell, tmp_path):
    holder = hold(shell, "x")
    output = tmp_path / "said"
    command = f"{shlex.join(program())} force-release x --json 2>{shlex.quote(str(output))}"
    screen = shell.screen(command=["sh", "-c", command])
    screen.until(r"\[y/N\] ")
    screen.type("no\n")
    assert screen.end()[0] == 1
    assert json.loads(output.read_text())["message"] == "nothing was done"
    let_go(holder)


# --- watch


def test_watch_tells_a_program_what_changes(shell):
    early = hold(shell, "early")
    watching = shell.start("watch", "-i", "0.1")
    first = json.loads(watching.line())
    assert (first["event"], first["name"]) == ("granted", "early")
    holder = hold(shell, "x", "--label", "night job")
    granted = json.loads(watching.line())
    assert (granted["event"], granted["name"], granted["label"]) == ("granted", "x", "night job")
    waiter = shell.start("run", "x", *HOLD, stdin=subprocess.PIPE)
    waiting = json.loads(watching.line())
    assert (waiting["event"], waiting["waiting"]) == ("waiting", 1)
    let_go(holder)
    # Nothing goes on that was not seen: it looks from time to time.
    told = [json.loads(watching.line()) for _ in range(3)]
    let_go(waiter)
    told.append(json.loads(watching.line()))
    assert [each["event"] for each in told] == ["released", "granted", "waiting", "released"]
    assert told[0]["token"] == granted["token"] < told[1]["token"] == told[3]["token"]
    let_go(early)
    watching.send(signal.SIGINT)
    assert watching.end()[0] == -signal.SIGINT


def test_watch_survives_an_outage(alone):
    watching = alone.start("watch", "-i", "0.1")
    holder = hold(alone, "x", "--ttl", "30")
    assert json.loads(watching.line())["event"] == "granted"
    alone.redis.kill()
    assert json.loads(watching.line())["event"] == "unreachable"
    holder.process.kill()
    alone.redis.start()
    assert json.loads(watching.line())["event"] == "reachable"
    assert json.loads(watching.line())["event"] == "released"


def test_a_reader_that_has_enough_ends_watch_and_ls(shell):
    holder = hold(shell, "x")
    for words in (["watch", "-i", "0.05"], ["ls"]):
        program = shell.start(*words)
        program.process.stdout.close()
        program.process.stdout = None
        # So that there is something to say that cannot be said any more.
        other = hold(shell, "y")
        assert program.process.wait(30) == 141
        assert program.process.stderr.read() == ""
        let_go(other)
    let_go(holder)


# --- doctor


def test_doctor_says_what_is_promised_and_what_is_not(shell):
    status, out, err = shell.run("doctor")
    assert err == ""
    assert "\nPromised\n" in out
    assert "exclusion: at most one holder at a time" in out
    assert "\nNot promised\n" in out
    assert "survives-restart: a restart of the server forgets every lock" in out
    assert "to get it: make the server write to disk" in out
    assert "hunter2" not in out
    told = json.loads(shell.run("doctor", "--json")[1])
    assert {"exclusion", "fencing", "fifo"} <= set(told["promises"])
    assert "survives-restart" in told["missing"]
    assert told["round_trip_ms"] > 0
    assert told["findings"]
    levels = {finding["level"] for finding in told["findings"]}
    assert levels <= {"ok", "note", "warning", "error"}
    assert told["healthy"] is ("error" not in levels) is (status == 0)


def test_doctor_finds_a_server_that_forgets_locks():
    with Redis(maxmemory="50mb", maxmemory_policy="allkeys-lru") as server:
        done = subprocess.run(
            [*program(), "doctor", "--json", "--url", server.url], capture_output=True, text=True, timeout=60, check=False
        )  # fmt: skip
    told = json.loads(done.stdout)
    assert "no-eviction" in told["missing"]
    [finding] = [finding for finding in told["findings"] if "maxmemory" in finding["subject"]]
    assert finding["level"] in ("warning", "error")
    assert finding["advice"]
    assert done.returncode == (0 if told["healthy"] else 1)


def test_doctor_says_why_a_server_refuses():
    with Redis(users=["user default on nopass ~* &* +@all -@scripting"]) as server:
        done = subprocess.run(
            [*program(), "doctor", "--url", server.url], capture_output=True, text=True, timeout=60, check=False
        )  # fmt: skip
    assert done.returncode == 1
    assert "error  connection: " in done.stdout
    assert "Not healthy" in done.stdout


def test_doctor_without_a_server_is_one_sentence(offline):
    status, out, err = offline.run("doctor", "--url", "redis://:hunter2@127.0.0.1:1/0")
    assert (status, out) == (69, "")
    assert len(err.splitlines()) == 1
    assert "hunter2" not in err


def program() -> list[str]:
    from tests.cli.conftest import PROGRAM

    return PROGRAM


# --- schema


def test_schema_prints_the_tables(offline):
    status, out, err = offline.run("schema", "mysql")
    assert (status, err) == (0, "")
    assert "CREATE TABLE IF NOT EXISTS `aiolock` (" in out
    assert "{" not in out
    told = json.loads(offline.run("schema", "mysql", "--table", "locks", "--json")[1])
    assert told["statements"] == out.strip().replace("`aiolock", "`locks")


def test_the_demonstration_as_json(offline):
    status, out, err = offline.run("demo", "--json")
    assert (status, err) == (0, "")
    told = [json.loads(line) for line in out.splitlines()]
    check(told, "list of demo", "demo")
    assert {tuple(each) for each in told} == {("event", "message"), ("event", "at", "who", "message")}
    assert {each["event"] for each in told} == {"said", "step"}
    assert told[1]["message"].startswith("1. Three workers")
    assert 0 < max(each["at"] for each in told if each["event"] == "step") < 60
    assert any("REFUSED" in each["message"] and each["who"] == "worker-2" for each in told if "who" in each)


# --- streams


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_stop_nobody(shell, tmp_path, closed):
    command = f"""{shlex.join(program())} run -v x -- sh -c 'echo $AIOLOCK_NAME > {tmp_path}/ran; exit 5' {closed}"""
    done = subprocess.run(
        ["sh", "-c", command], env=shell.environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (5, "")
    assert ("got 'x'" in done.stderr) is ("2>" not in closed)
    assert (tmp_path / "ran").read_text() == "x\n"


def test_a_closed_stream_is_closed_for_the_command_as_well(shell):
    command = (
        f"{shlex.join(program())} run x -- sh -c 'test -e /proc/self/fd/2 && echo open || echo closed' 2>&-"
    )
    done = subprocess.run(
        ["sh", "-c", command], env=shell.environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "closed\n")


def test_trouble_without_anybody_to_tell_is_a_status(offline):
    command = f"{shlex.join(program())} ls 2>&-"
    done = subprocess.run(
        ["sh", "-c", command], env=offline.environment, capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (64, b"", b"")


@pytest.mark.parametrize(
    "words",
    [["ls", "--json"], ["doctor"], ["demo", "--json", "--url", "memory://"]],
)
def test_a_full_disk_is_one_sentence(shell, words):
    with Path("/dev/full").open("w") as full:
        status, _, err = shell.run(*words, stdout=full)
    assert status == 74
    if "--json" in words:
        err = f"aiolock: {json.loads(err)['message']}\n"
    assert err == "aiolock: cannot write to stdout: No space left on device\n"


def test_messages_that_cannot_be_written_stop_nobody(shell):
    with Path("/dev/full").open("w") as full:
        status, out, _ = shell.run("run", "-v", "x", "sh", "-c", "echo done; exit 5", stderr=full)
    assert (status, out) == (5, "done\n")


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_names_of_any_alphabet_on_any_stream(shell, encoding):
    name = "\u0437\u0430\u043a\u0430\u0437 \xe9 \U0001f512"
    holder = hold(shell, name)
    told = {"PYTHONIOENCODING": encoding}
    status, out, err = shell.run("ls", environment=told, encoding=encoding)
    assert (status, err) == (0, "")
    assert "\\u0437\\u0430" in out
    [lock] = json.loads(shell.run("ls", "--json", environment=told, encoding=encoding)[1])
    assert lock["name"] == name
    status, _, err = shell.run("inspect", name * 200, "--json", environment=told, encoding=encoding)
    assert (status, json.loads(err)["error"]) == (64, "InvalidName")
    let_go(holder)


# --- all of them


@pytest.mark.parametrize(
    "words", [["ls"], ["inspect", "x"], ["watch"], ["force-release", "x"], ["doctor"], ["run", "x", "true"]]
)
def test_without_an_address_the_way_to_say_it_is_told(offline, words):
    status, out, err = offline.run(*words)
    assert (status, out) == (64, "")
    assert err.startswith("aiolock: which server? say it with --url or in AIOLOCK_URL")


def test_the_namespace_keeps_programs_apart(shell):
    holder = hold(shell, "x")
    status, out, err = shell.run("ls", "--namespace", "another", "--json")
    assert (status, json.loads(out), json.loads(err)["namespace"]) == (0, [], "another")
    assert shell.run("run", "-n", "--namespace", "another", "x", "true")[0] == 0
    let_go(holder)


def test_version(offline):
    assert offline.run("--version") == (0, f"{aiolock.__version__}\n", "")


def test_every_command_has_help_with_what_it_takes(offline):
    status, out, _ = offline.run("--help")
    assert status == 0
    assert "examples:" in out
    for number in ("1", "64", "69", "70", "75", "126", "127"):
        assert f" {number} " in out
    for command in (
        "run",
        "ls",
        "inspect",
        "watch",
        "force-release",
        "doctor",
        "schema",
        "purge",
        "demo",
    ):
        assert f"    {command}" in out
        status, about, err = offline.run(command, "--help")
        assert (status, err) == (0, "")
        assert about.startswith("usage: aiolock ")
        assert "--worker" not in about


# --- the other servers

OTHERS = [
    pytest.param(
        server, id=name, marks=pytest.mark.skipif(name not in SERVERS, reason=f"the run is not about {name}")
    )
    for name, server in (
        ("mariadb", MariaDB),
        ("zookeeper", ZooKeeper),
        ("postgresql", PostgreSQL),
        ("memcached", Memcached),
        ("etcd", Etcd),
    )
]


def purges(shell, server) -> None:
    assert shell.run("run", "old", "true")[0] == 0
    held = hold(shell, "held")
    statement = (
        "UPDATE aiolock SET expires_at = expires_at - INTERVAL 2 DAY, token = token - 172800000000 * 64"
    )
    client = ["mariadb", "--no-defaults", "--socket", server.socket, "test"]
    subprocess.run([*client, "-e", f"{statement} WHERE name = 'old'"], check=True)
    assert shell.json("purge", "--idle", "86400", "--namespace", "another")["purged"] == 0
    status, out, err = shell.run("purge", "--idle", "86400")
    assert (status, err) == (0, "")
    assert out.startswith("purged from mysql://")
    assert out.endswith(": 1 lock that had not been used for 86400 s\n")
    assert shell.json("purge", "--idle", "86400") == {
        "namespace": shell.namespace,
        "idle": 86400.0,
        "purged": 0,
    }
    assert [lock["name"] for lock in shell.json("ls")] == ["held"]
    let_go(held)


@pytest.mark.parametrize("make", OTHERS)
def test_everything_works_on_the_other_servers(make, offline):
    with make() as server:
        offline.environment["AIOLOCK_URL"] = server.url
        if make is MariaDB:
            tables = offline.run("schema", "mysql")[1]
            done = subprocess.run(
                ["mariadb", "--no-defaults", "--socket", server.socket, "test"], input=tables, text=True, check=False
            )  # fmt: skip
            assert done.returncode == 0
            purges(offline, server)
        if make is PostgreSQL:
            tables = offline.run("schema", "postgresql")[1]
            server.ask(*filter(None, map(str.strip, tables.split(";\n"))))
            assert offline.run("run", "old", "true")[0] == 0
            server.ask("UPDATE aiolock SET expires = expires - interval '2 days' WHERE key LIKE '%/old'")
            status, out, _ = offline.run("purge", "--idle", "86400")
            assert (status, out.startswith("purged from postgresql://")) == (0, True)
            assert out.endswith(": 1 row that had not been used for 86400 s\n")
            assert offline.json("purge", "--idle", "86400")["purged"] == 0
        holder = hold(offline, "x", "--label", "night job", "--ttl", "10")
        assert offline.run("run", "-n", "--ttl", "10", "x", "true")[0] == 1
        waiter = offline.start("run", "--ttl", "10", "x", "echo", "mine")
        offline.waiting("x", 1)
        [lock] = offline.json("ls")
        assert [each["label"] for each in lock["holders"]] == ["night job"]
        told = json.loads(offline.run("doctor", "--json")[1])
        promised = {"fifo"} if make is Memcached else {"exclusion", "fencing"}
        assert promised <= set(told["promises"])
        assert told["findings"]
        let_go(holder)
        assert waiter.end() == (0, "mine\n", "")
        nested = f"{shlex.join(program())} run --ttl 10 x echo inside"
        assert offline.run("run", "--ttl", "10", "x", "sh", "-c", nested)[0] == 64
        lost = offline.start("run", "--ttl", "10", "x", "sh", "-c", "echo in; sleep 1000")
        assert lost.line() == "in"
        assert offline.run("force-release", "x")[0] == 0
        assert lost.end()[0] == 75
