"""What is written beforehand is byte for byte what would be written each time."""

from __future__ import annotations

import pytest

from aiolock.backends.redis.commands import encode
from aiolock.backends.redis.forms import ENTER, KEPT, RELEASE, Forms, request
from aiolock.contract import MUTEX, Bid

PROCESS = "0123456789abcdef" * 2


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
def test_the_commands_are_those_that_are_encoded_anew(name, label, fair):
    forms = Forms("n:1:", PROCESS)
    bid = Bid(name, MUTEX, 12.5, label, fair)
    form = forms.form(bid, "6000 s")
    for number, floor in [(1, 0), (0xABCDEF, 1_700_000_000_000_000), (16**12 - 1, 2**63 - 1)]:
        who, seen, key = request(PROCESS, number), f"{floor:020d}", forms.key(bid)
        most = 1 if fair else 1024
        assert form.enter % (number, floor) == encode(
            "EVALSHA", ENTER.sha, 1, key, who, 12_500, most, seen, label, "6000 s -1"
        )
        assert form.release % (number, floor) == encode("EVALSHA", RELEASE.sha, 1, key, who, seen)
        assert parts(form.enter % (number, floor))[4] == who.encode()


def test_equal_bids_may_have_forms_of_their_own_and_new_terms_make_new_ones():
    forms = Forms("n:1:", PROCESS)
    bid, twin = Bid("x", MUTEX, 30.0, "me"), Bid("x", MUTEX, 30.0, "me")
    terms = "6000 s"
    assert forms.form(bid, terms) is forms.form(bid, terms)
    assert forms.form(twin, terms).enter == forms.form(bid, terms).enter
    assert b"3000 n -1" in forms.form(bid, "3000 n").enter


def test_only_so_many_are_kept():
    forms = Forms("n:1:", PROCESS)
    bids = [Bid(f"lock {number}", MUTEX, 30.0, "me") for number in range(3 * KEPT)]
    for bid in bids:
        assert forms.form(bid, "6000 s").bid is bid
    assert len(forms._forms) <= KEPT
