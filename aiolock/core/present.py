"""Reports about holders for those who inspect a lock: who it is, the present lease under a hold, and the value of a campaign, as text."""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import NamedTuple, TypeVar

from aiolock.types import Holder, Kept, LockInfo, Waiting

__all__ = [
    "PresentLease",
    "caller_of",
    "decode_present",
    "decode_value",
    "encode_value",
    "has_token",
    "labelled_by",
    "named",
    "presented",
    "told_apart",
]

HOST = 64
"""Bytes of the name of a machine that go to the server; Linux has no longer ones."""

# --- who it is
# Servers keep one text for each request, which they show to people: host and process of the client, and behind them the label, if
# there is one. What another version or another program has written is a label.

_CALLER = re.compile(r"(\S{1,64}):(\d{1,10})(?: (.*))?", re.DOTALL)

Named = TypeVar("Named", Holder, Waiting)


def caller_of(host: str, pid: int) -> str:
    """Return host and process of a client as servers keep them, without a label."""
    short = host.encode("ascii", "replace")[:HOST].decode()
    return f"{''.join(char if char.isprintable() and char != ' ' else '?' for char in short) or '?'}:{pid}"


def labelled_by(caller: str, label: str) -> str:
    """Return the text by which servers show a request of this client with a label, which may be empty."""
    return f"{caller} {label}" if label else caller


def _parts(text: str) -> tuple[str, str, int | None]:
    """Return label, host and process of such a text."""
    found = _CALLER.fullmatch(text)
    return (text, "", None) if found is None else (found[3] or "", found[1], int(found[2]))


def _split(one: Named) -> Named:
    label, host, pid = _parts(one.label)
    return replace(one, label=label, host=host, pid=pid)


def told_apart(info: LockInfo) -> LockInfo:
    """Return what a backend has found, with label, host and process apart."""
    kept = []
    for one in info.kept:
        label, host, pid = _parts(one.last_holder)
        kept.append(replace(one, last_holder=label, host=host, pid=pid))
    holders, waiters = tuple(map(_split, info.holders)), tuple(map(_split, info.waiters))
    return replace(info, holders=holders, waiters=waiters, kept=tuple(kept))


def named(one: Holder | Waiting | Kept) -> str:
    """Name a process to people: its label and where it runs, or what is known of that."""
    label = one.last_holder if isinstance(one, Kept) else one.label
    process = f"{one.host}:{one.pid}" if one.host else ""
    return " at ".join(filter(None, (label, process)))


# --- the present lease


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
