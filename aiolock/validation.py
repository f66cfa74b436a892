"""Validate names and options before any I/O, and encode names for keys and paths."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Literal, TypedDict, cast

from aiolock.errors import ConfigError, InvalidName, shorten

__all__ = [
    "GRACE",
    "MIN_TTL",
    "CampaignOptions",
    "LockOptions",
    "OnError",
    "OnLoss",
    "SyncCampaignOptions",
    "SyncLockOptions",
    "check_count",
    "check_flag",
    "check_grace",
    "check_idle",
    "check_label",
    "check_max_hold",
    "check_name",
    "check_namespace",
    "check_on_error",
    "check_on_loss",
    "check_options",
    "check_pattern",
    "check_reason",
    "check_request_id",
    "check_require",
    "check_seconds",
    "check_timeout",
    "check_token",
    "check_ttl",
    "check_value",
    "digest",
    "escape",
    "unescape",
]

# --- names: validity, and injective encodings for keys, paths and rows

MAX_BYTES = 1024

# Braces would end the hash tag of a Redis key, a key must print on one line, and `%` is the escape itself.
_UNSAFE = re.compile(r"[%{}\x00-\x1f\x7f-\x9f\u2028\u2029]")
_ESCAPED = re.compile(r"%([0-9a-f]{2,4});")
_NAMESPACE = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


def check_name(name: object) -> str:
    """Return ``name`` if it may name a lock, else raise :class:`InvalidName`.

    A name is a non-empty ``str`` of at most 1,024 UTF-8 bytes without lone surrogates.
    """
    if not isinstance(name, str):
        raise InvalidName(f"a lock's name must be a str, not {type(name).__name__}: {shorten(name)}")
    if not name:
        raise InvalidName("a lock's name must not be empty")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise InvalidName(
            f"a lock's name must be valid Unicode without lone surrogates: {shorten(name)}"
        ) from None
    if size > MAX_BYTES:
        raise InvalidName(
            f"a lock's name must have at most {MAX_BYTES} UTF-8 bytes, this one has {size}: {shorten(name)}"
        )
    # Exactly a str: a subclass may format itself differently, as members of `class Name(str, Enum)` do.
    return str.__str__(name)


def check_namespace(namespace: object) -> str:
    """Return ``namespace`` if it may prefix every key, path and row, else raise :class:`ConfigError`."""
    if not isinstance(namespace, str) or not _NAMESPACE.fullmatch(namespace):
        raise ConfigError(
            f"namespace must be 1 to 64 characters of A-Z a-z 0-9 _ . : -, not {shorten(namespace)}"
        )
    return str.__str__(namespace)


def check_label(label: object) -> str:
    """Return ``label`` if people can read it on one line, else raise :class:`ConfigError`."""
    if not isinstance(label, str) or not label or not label.isprintable() or len(label.encode()) > 256:
        raise ConfigError(
            f"label must be 1 to 256 bytes of printable text that tells people who holds, not {shorten(label)}"
        )
    return str.__str__(label)


@lru_cache(maxsize=4096)
def escape(name: str) -> str:
    """Encode a name as part of a key: readable, injective, without braces, percent signs and control characters."""
    return _UNSAFE.sub(lambda match: f"%{ord(match[0]):02x};", name)


def unescape(text: str) -> str:
    """Decode a name that :func:`escape` encoded."""
    return _ESCAPED.sub(lambda match: chr(int(match[1], 16)), text)


def digest(name: str) -> str:
    """Return 40 lower-case hexadecimal digits for a name, for servers with short or case-blind names."""
    return hashlib.blake2b(name.encode(), digest_size=20).hexdigest()


# --- options: the same sentences for the same mistakes, before anything happens

OnLoss = Literal["cancel", "signal"]
OnError = Literal["keep", "release"]

LEAST_IDLE = 3600
"""Seconds; far more than a clock is set back unnoticed, and than any hold of a dead process lasts."""
MOST_IDLE = 315_360_000
"""Seconds; ten years, which a server can subtract from its clock."""


class _Options(TypedDict, total=False):
    ttl: float | None
    timeout: float | None
    renew: bool
    grace: float | None
    max_hold: float | None
    label: str | None


class SyncCampaignOptions(_Options, total=False):
    """The options of an election for synchronous code."""


class SyncLockOptions(_Options, total=False):
    """The options of a lock for synchronous code: a thread cannot be cancelled, so it has no ``on_loss``."""

    fair: bool


class CampaignOptions(_Options, total=False):
    """The options of :meth:`Client.election`, which is always fair."""

    on_loss: OnLoss | None


class LockOptions(SyncLockOptions, CampaignOptions, total=False):
    """The options of :meth:`Client.lock`."""


MIN_TTL = 0.1
GRACE = 3
"""A hold of so many times its ``grace`` is renewed well before it counts as lost: after a third of what is left."""
MAX_SECONDS = 365 * 86_400.0
MAX_COUNT = 1_000_000
MAX_REQUEST_ID = 1024


def check_seconds(what: str, value: object, low: float, advice: str = "") -> float:
    """Return a number of seconds from ``low`` to a year as a float, else raise :class:`ConfigError`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= MAX_SECONDS:
        tail = f"; {advice}" if advice else ""
        raise ConfigError(
            f"{what} must be a number of seconds from {low:g} to {MAX_SECONDS:.0f}, not {shorten(value)}{tail}"
        )
    return float(value)


def check_ttl(ttl: object) -> float:
    """Return the ttl if it is a number of seconds from :data:`MIN_TTL` to a year, else raise :class:`ConfigError`."""
    return check_seconds("ttl", ttl, MIN_TTL)


def check_timeout(timeout: object) -> float | None:
    """Return the seconds that a caller waits; ``None`` waits for ever."""
    if timeout is None:
        return None
    return check_seconds("timeout", timeout, 0, "None waits for ever, 0 tries once")


def check_max_hold(max_hold: object) -> float | None:
    """Return the seconds after which a lease is no longer renewed."""
    if max_hold is None:
        return None
    return check_seconds("max_hold", max_hold, 0.001, "None renews for as long as it is held")


def check_grace(grace: float, ttl: float) -> float:
    """Return ``grace`` if it leaves a hold of ``ttl`` seconds time enough to be renewed, else raise :class:`ConfigError`."""
    if grace > ttl / GRACE * (1 + 1e-9):
        raise ConfigError(
            f"grace must be at most a third of the seconds that a hold stands, {ttl / GRACE:g} of {ttl:g}, not {grace:g}: "
            "the rest is for renewals and for work"
        )
    return grace


def check_on_loss(on_loss: object) -> OnLoss:
    """Return the effect that the loss of a lease has on its block."""
    if isinstance(on_loss, str):
        if on_loss == "cancel":
            return "cancel"
        if on_loss == "signal":
            return "signal"
    raise ConfigError(f'on_loss must be "cancel" or "signal", not {shorten(on_loss)}')


def check_on_error(on_error: object) -> OnError:
    """Return whether a run of a job that raised an exception counts."""
    if isinstance(on_error, str):
        if on_error == "keep":
            return "keep"
        if on_error == "release":
            return "release"
    raise ConfigError(f'on_error must be "keep" or "release", not {shorten(on_error)}')


def check_require(require: object) -> frozenset[str]:
    """Return the capabilities that a deployment must have."""
    capabilities = list(require) if isinstance(require, Iterable) and not isinstance(require, str) else None
    if capabilities is None or not all(isinstance(one, str) for one in capabilities):
        raise ConfigError(
            f"require must be a set of capabilities such as {{'fencing'}}, not {shorten(require)}"
        )
    return frozenset(capabilities)


def check_flag(what: str, value: object) -> bool:
    """Return the value if it is ``True`` or ``False``, else raise :class:`ConfigError`."""
    if not isinstance(value, bool):
        raise ConfigError(f"{what} must be True or False, not {shorten(value)}")
    return value


def check_idle(idle: object) -> float:
    """Return the seconds for which rows that are purged were not needed, if they are enough; else raise :class:`ConfigError`."""
    number = idle if isinstance(idle, int | float) and not isinstance(idle, bool) else math.nan
    if not LEAST_IDLE <= number <= MOST_IDLE:
        raise ConfigError(
            f"idle must be a number of seconds from {LEAST_IDLE} to {MOST_IDLE}, not {shorten(idle)}"
        )
    return float(number)


def check_count(what: str, value: object, high: int = MAX_COUNT, low: int = 1) -> int:
    """Return a whole number from ``low`` to ``high``, else raise :class:`ConfigError`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{what} must be a whole number from {low} to {high}, not {shorten(value)}")
    return int(value)


def check_token(token: object) -> int:
    """Return the token if it is a whole number that is not negative, else raise :class:`ConfigError`."""
    if isinstance(token, bool) or not isinstance(token, int) or token < 0:
        raise ConfigError(f"token must be a whole number, the token of a lease, not {shorten(token)}")
    return int(token)


def check_pattern(pattern: object) -> str:
    """Return the glob pattern if it is a text that is not empty, else raise :class:`ConfigError`."""
    if not isinstance(pattern, str) or not pattern:
        raise ConfigError(f"pattern must be a text such as '*' or 'order:*', not {shorten(pattern)}")
    return pattern


def check_reason(reason: object) -> str:
    """Return the reason of a release request if it is printable text of at most 256 bytes, else raise :class:`ConfigError`."""
    if not isinstance(reason, str) or not reason.isprintable() or len(reason.encode()) > 256:
        raise ConfigError(f"reason must be at most 256 bytes of printable text, not {shorten(reason)}")
    return str.__str__(reason)


def check_value(value: object) -> bytes:
    """Return the value of a campaign if it has at most 256 bytes, else raise :class:`ConfigError`."""
    if not isinstance(value, bytes) or len(value) > 256:
        raise ConfigError(f"value must be at most 256 bytes, such as b'host:port', not {shorten(value)}")
    return bytes(value)


def check_request_id(request_id: object) -> str:
    """Return the id if it is a text of 1 to :data:`MAX_REQUEST_ID` bytes, else raise :class:`ConfigError`."""
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


_CHECKS: dict[str, Callable[[object], object]] = {
    "ttl": check_ttl,
    "timeout": check_timeout,
    "on_loss": check_on_loss,
    "fair": lambda value: check_flag("fair", value),
    "renew": lambda value: check_flag("renew", value),
    "grace": lambda value: check_seconds("grace", value, 0),
    "max_hold": check_max_hold,
    "label": check_label,
}


def check_options(
    method: str, options: Mapping[str, object], known: type = LockOptions, *, ttl: float = math.inf
) -> LockOptions:
    """Return the options of a lock, without those that are ``None``; ``ttl`` is the client's, if it is known.

    A ``timeout`` of ``None`` stays: it waits for ever, whatever the client's is.


    Raises :class:`TypeError`, as Python does, if ``method`` was given an option that ``known`` does not have, and
    :class:`ConfigError` for a wrong value.
    """
    there = known.__annotations__
    if not options.keys() <= there.keys():
        unknown = next(option for option in options if option not in there)
        raise TypeError(
            f"{method}() got an unexpected keyword argument {unknown!r}: it takes {', '.join(there)}"
        )
    checked = {
        option: _CHECKS[option](value)
        for option, value in options.items()
        if value is not None or option in ("fair", "renew", "timeout")
    }
    options = cast("LockOptions", checked)
    check_grace(options.get("grace") or 0.0, options.get("ttl") or ttl)
    return options
