"""Checking what callers pass in: the same sentences for the same mistakes, before anything happens."""

from __future__ import annotations

from typing import Literal

from aiolock.errors import ConfigError, shorten

__all__ = [
    "MIN_TTL",
    "OnLoss",
    "check_count",
    "check_flag",
    "check_max_hold",
    "check_on_loss",
    "check_reason",
    "check_request_id",
    "check_seconds",
    "check_timeout",
    "check_ttl",
]

OnLoss = Literal["cancel", "signal"]

MIN_TTL = 0.1
MAX_SECONDS = 365 * 86_400.0
MAX_COUNT = 1_000_000
MAX_REQUEST_ID = 1024


def check_seconds(what: str, value: object, low: float, advice: str = "") -> float:
    """A finite number of seconds from ``low`` to a year, as a float."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= MAX_SECONDS:
        tail = f"; {advice}" if advice else ""
        raise ConfigError(
            f"{what} must be a number of seconds from {low:g} to {MAX_SECONDS:.0f}, not {shorten(value)}{tail}"
        )
    return float(value)


def check_ttl(ttl: object) -> float:
    """How long the server keeps a hold that is not renewed."""
    return check_seconds("ttl", ttl, MIN_TTL)


def check_timeout(timeout: object) -> float | None:
    """How long a caller waits."""
    if timeout is None:
        return None
    return check_seconds("timeout", timeout, 0, "None waits for ever, 0 tries once")


def check_max_hold(max_hold: object) -> float | None:
    """After how many seconds a lease is no longer renewed."""
    if max_hold is None:
        return None
    return check_seconds("max_hold", max_hold, 0.001, "None renews for as long as it is held")


def check_on_loss(on_loss: object) -> OnLoss:
    """What the loss of a lease does to the block that was entered with it."""
    if isinstance(on_loss, str):
        if on_loss == "cancel":
            return "cancel"
        if on_loss == "signal":
            return "signal"
    raise ConfigError(f'on_loss must be "cancel" or "signal", not {shorten(on_loss)}')


def check_flag(what: str, value: object) -> bool:
    """``True`` or ``False``, and nothing that merely looks like it."""
    if not isinstance(value, bool):
        raise ConfigError(f"{what} must be True or False, not {shorten(value)}")
    return value


def check_count(what: str, value: object, high: int = MAX_COUNT) -> int:
    """A whole number from 1 to ``high``."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
        raise ConfigError(f"{what} must be a whole number from 1 to {high}, not {shorten(value)}")
    return int(value)


def check_reason(reason: object) -> str:
    """Why a holder is asked to let go, in text that fits on one line."""
    if not isinstance(reason, str) or not reason.isprintable() or len(reason.encode()) > 256:
        raise ConfigError(f"reason must be at most 256 bytes of printable text, not {shorten(reason)}")
    return str.__str__(reason)


def check_request_id(request_id: object) -> str:
    """What a caller calls one of its requests, so that it counts once however often it is made."""
    if isinstance(request_id, str) and request_id:
        try:
            size = len(request_id.encode())
        except UnicodeEncodeError:
            size = MAX_REQUEST_ID + 1
        if size <= MAX_REQUEST_ID:
            return str.__str__(request_id)
    raise ConfigError(
        f"request_id must be 1 to {MAX_REQUEST_ID} UTF-8 bytes of text without lone surrogates, such as the number of "
        f"the job, not {shorten(request_id)}"
    )
