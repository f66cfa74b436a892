"""Build the findings of a diagnosis: a function for each level, and what is judged alike on every server."""

from __future__ import annotations

import re
from collections.abc import Sequence

from aiolock.types import Finding, Level

__all__ = ["encryption", "failure", "note", "numbers", "ok", "round_trip", "warning"]


def ok(subject: str, text: str) -> Finding:
    """Return a finding of level OK: the property is as it should be."""
    return Finding(Level.OK, subject, text)


def note(subject: str, text: str, advice: str = "") -> Finding:
    """Return a finding of level NOTE: a property that changes no promise."""
    return Finding(Level.NOTE, subject, text, advice)


def warning(subject: str, text: str, advice: str) -> Finding:
    """Return a finding of level WARNING: two callers may both believe that they hold a lock, or locks are slow."""
    return Finding(Level.WARNING, subject, text, advice)


def failure(subject: str, text: str, advice: str) -> Finding:
    """Return a finding of level ERROR: a cause for which locks do not work."""
    return Finding(Level.ERROR, subject, text, advice)


def numbers(version: str) -> tuple[int, ...]:
    """The first three numbers of a version: ``(10, 11, 9)`` of ``10.11.9-MariaDB``."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def encryption(*, encrypted: bool, local: bool, advice: str, readable: str = "names and labels") -> Finding:
    """Judge whether others can read what goes over the network."""
    if encrypted or local:
        return ok("tls", f"connections {'are encrypted' if encrypted else 'do not leave this machine'}")
    return warning("tls", f"connections are not encrypted: {readable} can be read on the network", advice)


def round_trip(trips: Sequence[float], ttl: float) -> Finding:
    """Judge the median of some round trips, in seconds."""
    usual = sorted(trips)[len(trips) // 2]
    text = f"{usual * 1000:.1f} ms, at worst {max(trips) * 1000:.1f} ms of {len(trips)}"
    if usual > ttl / 30:
        return warning(
            "round trip",
            f"{text}: much for a ttl of {ttl:g} s, which is renewed every third of it",
            "use a longer ttl, or a server that is nearer",
        )
    return ok("round trip", text)
