"""Diagnose an etcd cluster: each member that the address names, alarms, and the login."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from typing import NamedTuple

from aiolock.backends.diagnosis import encryption, failure, note, ok, round_trip, warning
from aiolock.backends.etcd import messages
from aiolock.backends.etcd.connection import OLDEST, NewConnection, new_connection
from aiolock.backends.etcd.url import Address
from aiolock.backends.urls import Host
from aiolock.core.backend import Settings
from aiolock.errors import BackendError
from aiolock.types import Finding

__all__ = ["Examined", "diagnose", "findings"]

LARGE = 1 << 30
"""Bytes of a database of which etcd admits 2 GiB by default."""


class Examined(NamedTuple):
    """One member that the address names."""

    host: str
    status: messages.Status | None
    """``None`` if it could not be asked."""
    cluster: int
    trouble: str = ""


async def diagnose(address: Address, settings: Settings) -> list[Finding]:
    """Return findings about the members, over new connections.

    Raises :class:`BackendError` if no member can be asked. Cancelling it changes nothing.
    """
    async with AsyncExitStack() as stack:

        async def connect(host: Host) -> NewConnection:
            made = await new_connection(host, address, settings.command_timeout)
            if made.transport is not None:
                # At once: a caller that is cancelled waits for the other members, and gets no results.
                stack.callback(made.transport.abort)
            return made

        results = await asyncio.gather(*map(connect, address.hosts), return_exceptions=True)
        connections = [each for each in results if isinstance(each, NewConnection)]
        if not connections:
            raise next(error for error in results if isinstance(error, BaseException))
        for error in results:
            if isinstance(error, BaseException) and not isinstance(error, BackendError):
                raise error
        try:
            async with asyncio.timeout(settings.command_timeout):
                return await _ask(address, results, connections[0], settings)
        except TimeoutError:
            return [failure("answers", "the cluster does not answer in time", "see whether it has a leader")]


async def _ask(
    address: Address,
    results: Sequence[NewConnection | BaseException],
    first: NewConnection,
    settings: Settings,
) -> list[Finding]:
    examined = []
    for host, result in zip(address.hosts, results, strict=True):
        if not isinstance(result, NewConnection):
            examined.append(Examined(str(host), None, 0, str(result)))
            continue
        answer = await result.ask(messages.STATUS)
        examined.append(Examined(str(host), messages.status(answer), messages.cluster_of(answer)))
    members: dict[int, str] = {}
    alarms: list[tuple[int, str]] = []
    with suppress(BackendError):
        # Not every user may ask.
        members = messages.members(await first.ask(messages.MEMBERS))
        alarms = messages.alarms(await first.ask(messages.ALARM))
    trips = []
    for _ in range(3):
        sent = settings.clock()
        await first.ask(messages.TXN, messages.get([f"{settings.namespace}/format"]))
        trips.append(settings.clock() - sent)
    found = findings(examined, members, alarms)
    found.append(
        encryption(
            encrypted=address.tls is not None,
            local=all(host.local for host in address.hosts),
            advice="use tls=true",
            readable="names, labels and passwords",
        )
    )
    found.append(round_trip(trips, settings.ttl))
    return found


def findings(
    examined: Sequence[Examined], members: dict[int, str], alarms: Sequence[tuple[int, str]]
) -> list[Finding]:
    """Judge the members that were asked, those that the cluster knows, and its alarms."""
    return [*_members(examined), *_cluster(examined, members), *_alarms(alarms, members), *_size(examined)]


def _members(examined: Sequence[Examined]) -> Iterator[Finding]:
    for each in examined:
        if each.status is None:
            yield warning(
                "member", f"{each.host} cannot be used: {each.trouble}", "start it, or leave it out"
            )
        elif each.status.numbers < OLDEST:
            oldest = ".".join(map(str, OLDEST))
            yield failure(
                "version", f"{each.host} is etcd {each.status.version}", f"use etcd {oldest} or later"
            )
        elif not each.status.leader:
            yield failure("leader", f"{each.host} knows of no leader", "start a majority of the members")
        else:
            role = "the leader" if each.status.leader == each.status.member else "a follower"
            yield ok("version", f"{each.host} is etcd {each.status.version}, {role}")
    if len({each.cluster for each in examined if each.status is not None}) > 1:
        yield failure(
            "cluster",
            "the address names members of different clusters: clients of each have locks of their own",
            "name members of one cluster",
        )


def _cluster(examined: Sequence[Examined], members: dict[int, str]) -> Iterator[Finding]:
    if not members:
        return
    if len(members) < 3:
        yield note(
            "members",
            f"the cluster has {len(members)}: locks stop when one is away",
            "use three members, or five",
        )
    elif len(examined) < 2:
        yield note(
            "members",
            f"the cluster has {len(members)}, and the address names one: clients lose it with that member",
            "name all members",
        )
    else:
        yield ok("members", f"the cluster has {len(members)}, and the address names {len(examined)}")


def _alarms(alarms: Sequence[tuple[int, str]], members: dict[int, str]) -> Iterator[Finding]:
    for member, kind in alarms:
        yield failure(
            "alarm",
            f"{members.get(member, 'a member')} has raised {kind}, and the cluster takes no writes",
            "etcdctl compact, defrag, alarm disarm; and have etcd started with --auto-compaction-retention",
        )
    if not alarms:
        yield ok("alarm", "no member has raised one")


def _size(examined: Sequence[Examined]) -> Iterator[Finding]:
    size = max(each.status.size for each in examined if each.status is not None)
    text = f"the database has {size / 2**20:.0f} MiB"
    if size > LARGE:
        advice = "have etcd started with --auto-compaction-retention, and defragment its database"
        yield warning("database", f"{text}, and etcd takes no writes from 2 GiB on by default", advice)
    else:
        yield ok("database", text)
