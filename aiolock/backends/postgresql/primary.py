"""The primary of several hosts: which of them takes writes, asked whenever connections are made."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from aiolock.backends.postgresql.url import Address
from aiolock.backends.survey import answers, survey, why_none
from aiolock.errors import BackendRefused, BackendUnavailable

__all__ = ["Role", "choose", "find"]


class Role(NamedTuple):
    """The answer of one host."""

    address: Address
    recovering: bool
    """True for a standby."""
    run: str
    """The time at which the server started: two hosts may be two ways to one server."""


def choose(roles: Sequence[Role]) -> Address | None:
    """Return the address of the primary, ``None`` if no host is one.

    Raises :class:`BackendRefused` if two are, as when an earlier primary goes on after a failover: clients that choose
    differently would not exclude each other.
    """
    found = [role for role in roles if not role.recovering]
    if len({role.run for role in found}) > 1:
        hosts = " and ".join(role.address.text for role in found)
        raise BackendRefused(
            f"{hosts} both take writes, so locks at one do not exclude clients of the other: stop the one that was replaced",
            retryable=True,
        )
    return found[0].address if found else None


async def find(address: Address, ask: Callable[[Address], Coroutine[Any, Any, Role]]) -> Address:
    """Return the address of the primary, which ``ask`` finds among the hosts of ``address``; of one host, that one, unasked.

    Raises :class:`BackendError`. Cancelling it leaves no socket behind.
    """
    if not address.hosts:
        return address
    tasks = await survey(
        (ask(address.at(host)) for host in address.hosts),
        enough=lambda roles: None if all(role.recovering for role in roles) else False,
    )
    roles = answers(tasks)
    if (found := choose(roles)) is not None:
        return found
    if not roles:
        raise why_none(tasks, f"{address.text}: no host answers")
    kind = BackendRefused if len(roles) == len(tasks) else BackendUnavailable
    raise kind(
        f"{address.text}: every host that answers is a standby or recovers, and locks taken there do not exclude clients of "
        "its primary: name the primary too",
        retryable=True,
    )
