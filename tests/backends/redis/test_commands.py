"""Commands that are encoded once per request are byte for byte what would be encoded each time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aiolock.backends.redis.commands import KEPT, SCRIPTS, MutexCommands, Tokens, encode
from aiolock.core.backend import Request
from aiolock.types import MUTEX

PROCESS = "0123456789abcdef" * 2


class Tape:
    """A wire that keeps what is issued."""

    def __init__(self) -> None:
        self.issued: list[bytes] = []

    def issue(self, command: bytes) -> asyncio.Future[Any]:
        self.issued.append(command)
        return None  # type: ignore[return-value]  # no test waits for an answer


@pytest.fixture
def tape():
    return Tape()


@pytest.fixture
def commands(tape):
    return MutexCommands(tape.issue, SCRIPTS, Tokens(), "n:1:", PROCESS)


def parts(command: bytes) -> list[bytes]:
    """The words of a command; its lengths have to be right for that."""
    count, _, rest = command.partition(b"\r\n")
    found = []
    for _ in range(int(count[1:])):
        size, _, rest = rest.partition(b"\r\n")
        assert size.startswith(b"$")
        length = int(size[1:])
        found.append(rest[:length])
        assert rest[length : length + 2] == b"\r\n"
        rest = rest[length + 2 :]
    assert rest == b""
    return found


@pytest.mark.parametrize("name", ["x", "50%", "%s %d %%", "a{b}c", "ключ 🔑", "\r\n$3\r\nDEL\r\n", "%012x"])
@pytest.mark.parametrize("label", ["host:1", "100 %d", "é"])
@pytest.mark.parametrize("fair", [False, True])
def test_the_commands_are_those_that_are_encoded_anew(tape, commands, name, label, fair):
    request = Request(name, MUTEX, 12.5, label, fair)
    key = commands.key(name, MUTEX.family)
    for number, floor in [(1, 0), (0xABCDEF, 1_700_000_000_000_000), (16**12 - 1, 2**63 - 1)]:
        commands.tokens.highest = floor
        commands.enter(request, number, True, -1, "6000 s")
        commands.release(request, number)
        enter, release = tape.issued[-2:]
        who, seen, most = commands.request_id(number), f"{floor:020d}", 1 if fair else 1024
        assert enter == encode(
            "EVALSHA", SCRIPTS["enter"].sha, 1, key, who, 12_500, most, seen, label, "6000 s -1"
        )
        assert release == encode("EVALSHA", SCRIPTS["release"].sha, 1, key, who, seen)
        assert parts(enter)[4] == who.encode()


def test_equal_requests_have_equal_commands_and_new_terms_make_new_ones(tape, commands):
    request, twin = Request("x", MUTEX, 30.0, "me"), Request("x", MUTEX, 30.0, "me")
    for each in (request, twin):
        commands.enter(each, 1, True, -1, "6000 s")
    assert tape.issued[0] == tape.issued[1]
    commands.enter(request, 1, True, -1, "3000 n")
    assert b"3000 n -1" in tape.issued[2]


def test_only_so_many_are_kept(tape, commands):
    requests = [Request(f"lock {number}", MUTEX, 30.0, "me") for number in range(3 * KEPT)]
    for request in requests:
        commands.enter(request, 1, True, -1, "6000 s")
        assert f"lock {request.name[5:]}".encode() in tape.issued[-1]
    assert len(commands._encoded) <= KEPT
    # One that is no longer kept is released all the same.
    commands.release(requests[0], 1)
    assert parts(tape.issued[-1])[1:4] == [SCRIPTS["release"].sha.encode(), b"1", b"n:1:lock:{lock 0}"]
