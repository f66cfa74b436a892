"""When a command that works under a lock has to be stopped: pure functions over seconds.

It gets TERM so early that it has ``kill_after`` seconds to end in good order, and KILL a moment before the server may
give the lock to somebody else. A renewal that succeeds in between does not call TERM back: the command is on its way out.
"""

from __future__ import annotations

from enum import Enum

from aiolock.errors import ConfigError

__all__ = [
    "Deed",
    "check_kill_after",
    "default_kill_after",
    "fitting",
    "guarded",
    "moment",
    "next_look",
    "what_to_do",
]

MOST_OF_TTL = 3.0
"""``kill_after`` is at most a third of the ttl: an undisturbed lease is always longer than that."""

LOOK = 0.25
"""Seconds between looks at the clock: timers stand still while the machine is suspended, the clock does not."""


class Deed(Enum):
    """What has to happen to the command now."""

    NOTHING = "nothing"
    TERM = "term"
    KILL = "kill"


def moment(ttl: float) -> float:
    """How many seconds before the end of the term a command is killed: processes need a little time to die."""
    return min(max(0.02 * ttl, 0.02), 0.5)


def guarded(remaining: float, ttl: float) -> float:
    """In how many seconds the guard kills it, which acts only if we do not, and so a little later than we."""
    return max(0.0, remaining - moment(ttl) / 2)


def default_kill_after(ttl: float) -> float:
    """How long a command has after TERM, unless somebody says otherwise."""
    return min(5.0, ttl / 4)


def check_kill_after(kill_after: float, ttl: float) -> float:
    """``kill_after`` if a lease of that ttl leaves room for it, else :class:`ConfigError`."""
    if kill_after > ttl / MOST_OF_TTL:
        raise ConfigError(
            f"--kill-after {kill_after:g} needs a --ttl of at least {kill_after * MOST_OF_TTL:g}, not {ttl:g}: "
            "renewals must have time to be tried again before the command is stopped"
        )
    return kill_after


def fitting(kill_after: float, remaining: float) -> float:
    """``kill_after`` as the server allows it, that may grant a shorter ttl than it was asked for."""
    return min(kill_after, remaining / 2)


def what_to_do(
    remaining: float, ttl: float, kill_after: float, since_term: float | None, policy: str
) -> Deed:
    """The next step.

    :param remaining: seconds for which the hold is certain; 0 if it is gone.
    :param since_term: seconds since TERM was sent, or ``None``.
    :param policy: ``term``, ``kill`` or ``warn``.
    """
    if policy == "warn":
        return Deed.NOTHING
    if remaining <= moment(ttl) or (since_term is not None and since_term >= kill_after):
        return Deed.KILL
    if policy == "term" and since_term is None and remaining <= max(kill_after, moment(ttl)):
        return Deed.TERM
    return Deed.NOTHING


def next_look(
    remaining: float, ttl: float, kill_after: float, since_term: float | None, policy: str
) -> float:
    """In how many seconds to decide again."""
    if policy == "warn":
        return LOOK
    waits = [LOOK, remaining - moment(ttl)]
    if since_term is not None:
        waits.append(kill_after - since_term)
    elif policy == "term":
        waits.append(remaining - kill_after)
    return max(0.001, min(waits))
