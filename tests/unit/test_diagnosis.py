"""Findings that several servers share."""

from __future__ import annotations

import pytest

from aiolock.backends.diagnosis import encryption
from aiolock.backends.urls import Host
from aiolock.types import Level


@pytest.mark.parametrize(
    ("encrypted", "host", "level", "text"),
    [
        (True, "db.example", Level.OK, "connections are encrypted"),
        (False, "127.0.0.1", Level.OK, "connections do not leave this machine"),
        (False, "::1", Level.OK, "connections do not leave this machine"),
        (False, "localhost", Level.OK, "connections do not leave this machine"),
        (
            False,
            "db.example",
            Level.WARNING,
            "connections are not encrypted: labels can be read on the network",
        ),
    ],
)
def test_a_connection_that_others_can_read_is_a_warning(encrypted, host, level, text):
    found = encryption(encrypted=encrypted, local=Host(host, 1).local, advice="use TLS", readable="labels")
    assert (found.subject, found.level, found.text) == ("tls", level, text)
    assert found.advice == ("use TLS" if level is Level.WARNING else "")
