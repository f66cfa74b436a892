"""The demonstration: it comes to its end, tells the truth, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import uuid
from pathlib import Path

import pytest

import aiolock
from aiolock.__main__ import main
from tests.processes import STRICT_PYTHON, reserve_port
from tests.servers import Redis


@pytest.fixture
def mark():
    """Something in the environment by which every process of a demonstration can be found."""
    return f"AIOLOCK_TEST_MARK={uuid.uuid4()}"


def alive(mark: str) -> list[str]:
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in environ.read_bytes():
                found.append((environ.parent / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def start(mark: str, *arguments: str, url: str | None = None) -> subprocess.Popen[str]:
    environment = {
        key: value for key, value in os.environ.items() if key not in {"AIOLOCK_URL", "PYTHONASYNCIODEBUG"}
    }
    if url is not None:
        environment["AIOLOCK_URL"] = url
    name, _, value = mark.partition("=")
    return subprocess.Popen(
        [*STRICT_PYTHON, "-m", "aiolock", "demo", *arguments],
        env={**environment, name: value},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def check_story(text: str) -> None:
    lines = text.splitlines()
    assert lines[0].startswith(f"aiolock {aiolock.__version__}, with ")
    entered = [(line.split()[2], int(line.split()[-1])) for line in lines if "has the lock" in line]
    assert len(entered) >= 10
    # Tokens rise with every holder, whoever it is.
    assert [token for _, token in entered] == sorted({token for _, token in entered})
    assert {who for who, _ in entered} == {"worker-1", "worker-2", "worker-3"}
    [lost] = [line for line in lines if "LockLost" in line]
    assert "worker-2  its block is cancelled, and ends with LockLost" in lost
    [late] = [line for line in lines if "REFUSED" in line]
    assert "worker-2  writes with token" in late
    assert "1 late write was refused" in text
    assert text.endswith("On the server, nothing is left.\n")


def test_in_one_process(mark):
    process = start(mark)
    out, err = process.communicate(timeout=90)
    assert (process.returncode, err) == (0, "")
    check_story(out)
    assert out.startswith(f"aiolock {aiolock.__version__}, with a server in this process.")
    assert "is cut off from the server" in out
    # The dead worker's lock came back after its ttl: not at once, not much later than that.
    [waited] = re.findall(r"waited (\S+) s for what was left", out)
    assert float(waited) > 0.5


def test_between_processes(mark):
    with Redis(password="hunter2") as redis:
        process = start(mark, url=redis.url)
        out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    check_story(out)
    assert "and three worker processes." in out.splitlines()[0]
    assert "hunter2" not in out
    assert "is killed with SIGKILL" in out
    assert "is stopped with SIGSTOP" in out
    assert alive(mark) == []


def test_ctrl_c_ends_all_processes(mark):
    with Redis() as redis:
        process = start(mark, "--url", redis.url)
        assert process.stdout is not None
        while "writes with token" not in process.stdout.readline():
            assert process.poll() is None
        assert len(alive(mark)) == 4
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (-signal.SIGINT, "")
        assert alive(mark) == []


def test_a_demonstration_that_is_killed_takes_its_workers_along(mark):
    with Redis() as redis:
        process = start(mark, "--url", redis.url)
        assert process.stdout is not None
        while "writes with token" not in process.stdout.readline():
            assert process.poll() is None
        process.kill()
        process.communicate(timeout=60)
        # They end when their input does; nothing but a defect takes as long as this.
        for _ in range(3000):
            if not alive(mark):
                break
            signal.sigtimedwait([], 0.01)
        assert alive(mark) == []


def test_an_unreachable_server_is_one_sentence(capsys):
    with contextlib.ExitStack() as stack:
        port = reserve_port(stack)
        assert main(["demo", "--url", f"redis://:hunter2@127.0.0.1:{port}/0"]) == 69
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("aiolock: ")
    assert len(err.splitlines()) == 1
    assert "hunter2" not in err


@pytest.mark.parametrize("url", ["nonsense://", "memory://a/b", "memory", "redis://[::1"])
def test_a_wrong_url_is_one_sentence(capsys, url):
    assert main(["demo", "--url", url]) == 64
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("aiolock: ")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("arguments", [[], ["run"], ["demo", "--nonsense"], ["demo", "extra"]])
def test_wrong_usage(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 64
    assert "usage: aiolock" in capsys.readouterr().err


def test_help_names_what_there_is(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert re.search(r"^    demo  ", capsys.readouterr().out, re.MULTILINE)
    with pytest.raises(SystemExit):
        main(["demo", "--help"])
    assert "--worker" not in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"{aiolock.__version__}\n"
