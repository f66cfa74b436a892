"""Reports about holders for those who inspect a lock: the present lease under a hold, and the value of a campaign, as text."""

from __future__ import annotations

from base64 import b64decode, b64encode
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from aiolock.types import Holder

__all__ = ["PresentLease", "decode_present", "decode_value", "encode_value", "has_token", "presented"]


class PresentLease(NamedTuple):
    """The lease that a client has given out under a hold, as its renewals report it to those who inspect the lock."""

    token: int
    age: float
    """Seconds since it was given out."""
    label: str
    waiting: int
    """The tasks of the client that wait behind it."""

    def encode(self) -> str:
        """Return a text, to which the server adds the time in µs at which it arrives, and a space, in front."""
        return f"{self.token} {round(self.age * 1e6)} {self.waiting} {self.label}"


def decode_present(text: str) -> tuple[PresentLease, datetime] | None:
    """Return what :meth:`PresentLease.encode` and the server have written, and when; ``None`` for anything else."""
    try:
        now, token, age, waiting, label = text.split(" ", 4)
        moment = datetime.fromtimestamp(int(now) / 1e6, UTC)
        return PresentLease(int(token), int(age) / 1e6, label, int(waiting)), moment
    except (ValueError, OverflowError):
        return None


def presented(holder: Holder, report: tuple[PresentLease, datetime] | None) -> Holder:
    """Return a holder as its renewal has reported it: the present lease instead of the first one under its hold."""
    if report is None or not holder.token <= report[0].token < holder.token + holder.tokens:
        # Nothing was reported of this hold: no task waits, and none has handed it over.
        return replace(holder, local_waiters=0)
    present, moment = report
    return replace(
        holder,
        label=present.label,
        token=present.token,
        tokens=holder.token + holder.tokens - present.token,
        since=moment - timedelta(seconds=present.age),
        local_waiters=present.waiting,
    )


def has_token(holder: Holder, token: int) -> bool:
    """Test whether a hold has a token: from that of the lease which its last renewal has reported, all that its client may give out."""
    return holder.token <= token < holder.token + holder.tokens


def encode_value(value: bytes) -> str:
    """Return the value of a campaign as text, in base64, for servers and formats that keep text."""
    return b64encode(value).decode() if value else ""


def decode_value(text: str) -> bytes:
    """Return the value that :func:`encode_value` has encoded; empty for anything else."""
    try:
        return b64decode(text, validate=True)
    except ValueError:
        return b""
