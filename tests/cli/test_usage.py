"""Hostile arguments: the status for wrong usage, and a sentence that says what was wrong; never a traceback, never I/O."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys

import pytest

from aiolock.cli.main import main
from aiolock.cli.parser import parse

WRONG = [
    [],
    ["nonsense"],
    ["--nonsense"],
    ["run"],
    ["run", "x"],
    ["run", "x", "--"],
    ["run", "--", "true"],
    ["run", "-n", "-w", "3", "x", "true"],
    ["run", "-s", "-x", "x", "true"],
    ["run", "-s", "--permits", "1/2", "x", "true"],
    ["run", "-w", "-1", "x", "true"],
    ["run", "-w", "nan", "x", "true"],
    ["run", "-w", "inf", "x", "true"],
    ["run", "-w", "soon", "x", "true"],
    ["run", "-w"],
    ["run", "-E", "256", "x", "true"],
    ["run", "-E", "-1", "x", "true"],
    ["run", "-E", "x", "x", "true"],
    ["run", "--permits", "3", "x", "true"],
    ["run", "--permits", "0/3", "x", "true"],
    ["run", "--permits", "4/3", "x", "true"],
    ["run", "--permits", "1/²", "x", "true"],
    ["run", "--ttl", "0", "x", "true"],
    ["run", "--on-loss", "shrug", "x", "true"],
    ["run", "--max-hold", "0", "x", "true"],
    ["run", "--at-least", "-1", "x", "true"],
    ["force-release", "x", "--token", "-1"],
    ["run", "--kill-after", "-3", "x", "true"],
    ["run", "--tt", "3", "x", "true"],
    ["run", "-c", "true", "x", "true"],
    ["run", "-u", "x", "true"],
    ["run", "-nF", "x", "true"],
    ["run", "--url", "", "x", "true"],
    ["ls", "--namespace", ""],
    ["ls", "a", "b"],
    ["ls", ""],
    ["inspect"],
    ["inspect", "x", "--family", "friends"],
    ["watch", "-i", "0"],
    ["force-release"],
    ["doctor", "x"],
    ["schema", "oracle"],
    ["schema"],
    ["purge"],
    ["purge", "--idle", "0"],
    ["purge", "--idle", "inf"],
    ["demo", "extra"],
    ["verify", "x"],
    ["verify", "--for", "0"],
    ["verify", "--processes", "1"],
    ["verify", "--processes", "9"],
    ["verify", "--rate", "0"],
]
"""What argparse refuses."""

URL = ["--url", "redis://:hunter2@127.0.0.1:1/0"]

REFUSED = {
    "no name": ["run", *URL, "", "true"],
    "a long name": ["run", *URL, "x" * 1025, "true"],
    "no Unicode": ["run", *URL, "\udcff", "true"],
    "a short ttl": ["run", *URL, "--ttl", "0.01", "x", "true"],
    "a long ttl": ["run", *URL, "--ttl", "1e9", "x", "true"],
    "an endless kill": ["run", *URL, "--kill-after", "60", "x", "true"],
    "too many permits": ["run", *URL, "--permits", "1/99999999", "x", "true"],
    "a namespace": ["run", *URL, "--namespace", "a b", "x", "true"],
    "a label": ["run", *URL, "--label", "a\nb", "x", "true"],
    "a scheme": ["run", "--url", "ftp://:hunter2@host", "x", "true"],
    "no URL": ["ls", "--url", "nonsense"],
    "a parameter": ["ls", "--url", "redis://:hunter2@127.0.0.1:1/0?colour=red"],
    "memory": ["run", "--url", "memory://", "x", "true"],
    "a server that is in each process": ["verify", "--url", "memory://"],
    "keys of other programs": ["verify", "--url", "redis://:hunter2@127.0.0.1:1/0?dialect=plain"],
    "a namespace that is too long to add to": ["verify", *URL, "--namespace", "x" * 50],
    "a table": ["schema", "mysql", "--table", "a`; DROP TABLE x"],
    "a table of PostgreSQL": ["schema", "postgresql", "--table", 'a"; DROP TABLE x'],
    "a purge of what a table of PostgreSQL needs": [
        "purge",
        "--url",
        "postgresql://u:hunter2@127.0.0.1:1/d",
        "--idle",
        "60",
    ],
    "an inspected name": ["inspect", *URL, ""],
    "a purge of what forgets by itself": ["purge", *URL, "--idle", "86400"],
    "a purge of items that expire": ["purge", "--url", "memcached://127.0.0.1:1", "--idle", "86400"],
    "a purge of keys with leases": ["purge", "--url", "etcd://u:hunter2@127.0.0.1:1", "--idle", "86400"],
    "a purge of what has no rows": [
        "purge",
        "--url",
        "mysql://u:hunter2@127.0.0.1:1/d?mode=session",
        "--idle",
        "86400",
    ],
    "a purge of what was used just now": [
        "purge",
        "--url",
        "mysql://u:hunter2@127.0.0.1:1/d",
        "--idle",
        "60",
    ],
}
"""What the commands refuse, before they say anything to a server."""


@pytest.fixture(autouse=True)
def no_server(monkeypatch):
    for name in ("AIOLOCK_URL", "AIOLOCK_NAMESPACE", "AIOLOCK_HELD"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_wrong_usage(capsys, words):
    with pytest.raises(SystemExit) as caught:
        main(words)
    out, err = capsys.readouterr()
    assert (caught.value.code, out) == (64, "")
    assert err.startswith("usage: aiolock")
    assert "aiolock" in err.splitlines()[-1]


@pytest.mark.parametrize("words", [words for words in WRONG if words], ids=" ".join)
def test_wrong_usage_as_json(capsys, words):
    with pytest.raises(SystemExit) as caught:
        main([words[0], "--json", *words[1:]])
    out, err = capsys.readouterr()
    assert (caught.value.code, out) == (64, "")
    trouble = json.loads(err)
    assert (trouble["error"], trouble["status"]) == ("Usage", 64)
    assert trouble["message"]


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["insepct", "x"], "inspect"),
        (["--url", "memory://", "lss"], "ls"),
        (["--uri", "memory://", "ls"], "--url"),
        (["-v", "--name-space=a", "ls"], "--namespace"),
        (["run", "--non-block", "x", "true"], "--nonblock"),
        (["run", "--name-space=a", "x", "true"], "--namespace"),
        (["ls", "--jsn"], "--json"),
        (["purge", "--idel", "86400", "--idle", "86400"], "--idle"),
    ],
    ids=" ".join,
)
def test_a_slip_of_the_keyboard_is_answered_with_what_was_meant(capsys, words, meant):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 64
    assert capsys.readouterr().err.endswith(f"; did you mean {meant}?\n")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--url", "memory://"], "the command is missing after --url memory://"),
        (["--url", "ls"], "the command is missing after --url ls"),
        (["-v"], "the command is missing after -v"),
        (["-n", "run", "x", "true"], "-n belongs behind its command: aiolock run -n"),
        (
            ["--url=memory://", "--ttl=5", "run", "x", "true"],
            "--ttl belongs behind its command: aiolock run --ttl",
        ),
        (["--xyz", "ls"], "there is no option --xyz"),
    ],
)
def test_a_wrong_option_before_the_command_is_named(capsys, words, why):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 64
    assert capsys.readouterr().err.endswith(f"aiolock: {why}\n")


@pytest.mark.parametrize(
    "words",
    [
        ["ADDRESS", "ls"],
        ["--uri", "ADDRESS", "ls"],
        ["--uri=ADDRESS", "ls"],
        ["--url", "ADDRESS"],
        ["ls", "--uri=ADDRESS"],
        ["ls", "*", "ADDRESS"],
        ["run", "-w", "ADDRESS", "x", "true"],
        ["run", "--uri=ADDRESS", "x", "true"],
        ["schema", "ADDRESS"],
        ["schema", "mysql", "--url", "ADDRESS"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize(
    "address", ["redis://me:s3cret@h/0", "redis://h/0?password=s3cret", "redis://me:s3'cret@h"]
)
def test_wrong_usage_shows_no_password(capsys, words, address):
    with pytest.raises(SystemExit) as caught:
        main([word.replace("ADDRESS", address) for word in words])
    out, err = capsys.readouterr()
    assert (caught.value.code, out) == (64, "")
    assert "cret" not in err


@pytest.mark.parametrize("word", ["nonsense", "xyz"])
def test_what_is_like_nothing_gets_no_guess(capsys, word):
    with pytest.raises(SystemExit):
        main([word])
    assert capsys.readouterr().err.endswith(f"there is no command {word!r}\n")


@pytest.mark.parametrize(
    "words",
    [
        ["--url", "redis://h", "--json", "ls", "a*"],
        ["--url=redis://h", "ls", "--json", "a*"],
        ["ls", "--url", "redis://h", "a*", "--json"],
    ],
    ids=" ".join,
)
def test_common_options_stand_on_either_side_of_the_command(words):
    options = parse(words)
    assert (options.verb, options.url, options.json, options.pattern) == ("ls", "redis://h", True, "a*")


def test_common_options_stand_before_run_as_well():
    options = parse(["-v", "--namespace", "run", "run", "-n", "x", "ls", "--url", "y"])
    assert (options.verbose, options.namespace, options.url) == (True, "run", None)
    assert (options.name, options.command) == ("x", ["ls", "--url", "y"])


def test_options_of_one_command_do_not_stand_before_it(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["-n", "run", "x", "true"])
    assert caught.value.code == 64
    assert capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("aiolock ins", "inspect"),
        ("aiolock run --perm", "--permits"),
        ("aiolock run --on-loss k", "kill"),
        ("aiolock --js", "--json"),
        ("aiolock --json --ur", "--url"),
        ("aiolock --url redis://h --json ins", "inspect"),
    ],
)
def test_the_shell_completes_words(tmp_path, line, word):
    """As a shell asks, by argcomplete's protocol."""
    answer = tmp_path / "answer"
    asked = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    subprocess.run(
        [sys.executable, "-m", "aiolock"],
        env={**os.environ, **asked},
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert [found.strip() for found in answer.read_text().split("\n")] == [word]


@pytest.mark.parametrize("what", REFUSED)
def test_refused_with_a_sentence(capsys, what):
    assert main(REFUSED[what]) == 64
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("aiolock: ")
    assert len(err.splitlines()) == 1
    assert "hunter2" not in err


def test_refused_with_a_sentence_as_json(capsys):
    assert main(["run", *URL, "--json", "", "true"]) == 64
    trouble = json.loads(capsys.readouterr().err)
    assert (trouble["error"], trouble["event"], trouble["status"]) == ("InvalidName", "error", 64)


@pytest.mark.parametrize(
    ("module", "url", "status", "says"),
    [
        (
            "redis",
            "redis://127.0.0.1:1",
            64,
            'redis is not installed; run: pip install "python-aiolock[redis]"',
        ),
        ("anyio", "sqlite:///{}/locks.db", 0, ""),
    ],
)
def test_what_is_missing_is_named_with_the_command_that_helps(module, url, status, says, tmp_path):
    """A run needs the driver of its server, and no other package."""
    words = ["run", "--url", url.format(tmp_path), "x", "true"]
    program = f"import sys; sys.modules[{module!r}] = None; from aiolock.cli.main import main; sys.exit(main({words!r}))"
    # asyncio's debug mode writes to stderr.
    quiet = {name: value for name, value in os.environ.items() if name != "PYTHONASYNCIODEBUG"}
    words = [sys.executable, "-c", program]
    ended = subprocess.run(words, capture_output=True, text=True, check=False, env=quiet)
    assert (ended.returncode, ended.stderr) == (status, f"aiolock: {says}\n" if says else "")


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (OSError(errno.EMFILE, "Too many open files"), 71, "this machine gives no more of what is needed: Too many"),
        (BlockingIOError(errno.EAGAIN, "No more processes"), 71, "gives no more of what is needed: No more processes"),
        (OSError(errno.EIO, "broken"), 70, "this is a defect in aiolock"),
        (KeyError("x"), 70, "this is a defect in aiolock"),
    ],
)  # fmt: skip
def test_a_machine_that_gives_no_more_is_no_defect(capsys, monkeypatch, error, status, words):
    async def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr("aiolock.cli.main._command", lambda _: fail)
    assert main(["ls"]) == status
    err = capsys.readouterr().err
    assert words in err.splitlines()[-1]
    assert ("Traceback" in err) is (status == 70)
