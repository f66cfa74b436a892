"""What a renewal reports of the present lease, and how it is shown."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from aiolock.backends.rows.liveness import SessionRow, encode_session
from aiolock.backends.rows.session import MOST_LEASES, RowSession
from aiolock.core.present import PresentLease, decode_present, decode_value, encode_value, presented
from aiolock.types import Holder

NOW = datetime(2026, 11, 24, 7, 0, tzinfo=UTC)
MICROSECONDS = 1_795_503_600_000_000


@pytest.mark.parametrize("label", ["", "web 3", "läbel 😀", " a  b ", "1 2 3"])
def test_a_report_survives_its_encoding(label):
    present = PresentLease(2**62, 1.25, label, 3)
    assert decode_present(f"{MICROSECONDS} {present.encode()}") == (
        present,
        datetime.fromtimestamp(MICROSECONDS / 1e6, UTC),
    )


@pytest.mark.parametrize(
    "text", ["", "1 2 3", "x 1 2 3 label", "1 x 2 3 label", f"{10**30} 1 2 3 label", "nan 1 2 3 x"]
)
def test_what_no_client_has_written_is_no_report(text):
    assert decode_present(text) is None


@pytest.mark.parametrize("value", [b"", b"host:1", bytes(range(256))])
def test_a_value_survives_its_encoding(value):
    assert decode_value(encode_value(value)) == value


@pytest.mark.parametrize("text", ["?", "abc", "é", "a\nb"])
def test_what_is_no_value_is_none(text):
    assert decode_value(text) == b""


def test_the_present_lease_is_shown_instead_of_the_first():
    first = Holder("first", 10, NOW - timedelta(seconds=9), 5.0, tokens=8)
    shown = presented(first, (PresentLease(12, 2.0, "third", 4), NOW))
    assert (shown.label, shown.token, shown.tokens) == ("third", 12, 6)
    assert (shown.since, shown.remaining, shown.local_waiters) == (NOW - timedelta(seconds=2), 5.0, 4)


@pytest.mark.parametrize("token", [0, 9, 18, 2**62])
def test_a_report_of_another_hold_is_not_shown(token):
    first = Holder("first", 10, NOW, 5.0, tokens=8)
    for report in (None, (PresentLease(token, 2.0, "another", 4), NOW)):
        shown = presented(first, report)
        assert (shown.label, shown.token, shown.tokens, shown.local_waiters) == ("first", 10, 8, 0)


def test_a_session_reports_as_many_leases_as_there_is_room_for():
    class Named:
        def __init__(self, present):
            self.present = present

    session = RowSession.__new__(RowSession)
    session.claims = {f"{number:016}": Named(None) for number in range(5_000)}
    assert session._leases() == ({}, False)
    for number in range(40):
        session.claims[f"{number:016}"].present = PresentLease(number, 1.0, "x" * 250, 1)
    leases, more = session._leases()
    assert list(leases) == [f"{number:016}" for number in range(40)]
    assert not more
    for claim in session.claims.values():
        claim.present = PresentLease(2**62, 1.0, "é😀" * 40, 10**6)
    leases, more = session._leases()
    assert more
    assert leases
    assert len(encode_session(SessionRow(3.0, leases=leases, more=more))) < MOST_LEASES + 100
