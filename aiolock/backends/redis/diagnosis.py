"""Diagnose a Redis server: collect facts and judge them. The file is long because each judgement has sentences of its own."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from typing import Any

from hiredis import ReplyError

from aiolock.backends.diagnosis import failure, note, numbers, ok, round_trip, warning
from aiolock.backends.redis import commands
from aiolock.backends.redis.commands import PROBE, PUBLISH, Format, Script
from aiolock.backends.redis.connection import Connection
from aiolock.backends.redis.errors import from_reply
from aiolock.backends.redis.pubsub import Subscriber
from aiolock.backends.redis.replicas import BARRIER, SOON
from aiolock.backends.redis.run_id import RunId, agree
from aiolock.backends.redis.url import Endpoint
from aiolock.backends.transport import Options
from aiolock.core.backend import Settings
from aiolock.errors import BackendError, BackendRefused, BackendUnavailable, shorten
from aiolock.types import Finding, Level

__all__ = [
    "SETTINGS",
    "Facts",
    "Pushing",
    "Verdict",
    "assess",
    "examine",
    "judge",
    "may_publish",
    "parse_info",
    "probe",
]

OLDEST = (6, 2)
TRIPS = 5
"""Round trips that are measured."""
MANY = 10_000
"""More replicas than there are."""
GRACE = 0.05
"""Seconds by which the deadline of a diagnosis exceeds that of its steps, whose errors say more."""
SETTINGS = ("appendfsync", "save", "min-replicas-to-write", "min-replicas-max-lag")
"""Settings that CONFIG GET shows and INFO does not."""
UNKNOWN = "this account may not use INFO, so it is not known"
GRANT_INFO = "grant it +info"
FENCE = "let the resource check fencing tokens"

# --- capabilities
# Probed when a client opens. A fact that the account may not read is unknown, and an unknown fact promises nothing.


@dataclass(frozen=True, slots=True)
class Verdict:
    """The capabilities of a deployment, and warnings about it."""

    capabilities: frozenset[str]
    warnings: tuple[str, ...]


def parse_info(text: str) -> dict[str, str]:
    """The lines of INFO as a dictionary."""
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line and not line.startswith("#"))


def assess(info: Mapping[str, str], *, pushed: bool, mute: bool = False, cluster: bool = False) -> Verdict:
    """Return what a server, or a node of a ``cluster``, promises and is to be warned of, by its INFO.

    ``mute`` if it takes no script that sends messages.
    Raises :class:`BackendRefused` for a server that is too old, read-only, or addressed as what it is not.
    """
    pushing = Pushing.PUSHED if pushed else Pushing.REFUSED if mute else Pushing.DENIED
    facts = Facts(dict(info), pushing=pushing, cluster=cluster)
    for finding in (*_version(facts), *_role(facts)):
        if finding.level is Level.ERROR:
            # A replica may become a primary.
            raise BackendRefused(f"{finding.text}: {finding.advice}", retryable=info.get("role") == "slave")
    has = {
        "push": pushed,
        "no-eviction": info.get("maxmemory_policy") == "noeviction",
        "survives-restart": info.get("aof_enabled") == "1",
    }
    bad = [finding for finding in (*_pushes(facts), *_eviction(facts)) if finding.level is not Level.OK]
    return Verdict(
        frozenset({"exclusion", "fencing", "fifo", "keep", *(word for word, true in has.items() if true)}),
        tuple(f"{finding.subject}: {finding.text}: {finding.advice}" for finding in bad),
    )


async def probe(call: Callable[..., Awaitable[Any]], key: str, script: Script = PROBE) -> dict[str, str]:
    """Ask for INFO in one round trip, for :func:`assess`; empty if the account may not use it.

    Raises :class:`BackendRefused` if the account may not use on ``key`` a command that every lock needs.
    Cancelling it leaves nothing behind.
    """
    rights = call("EVAL", script.source, "1", key), call("EVALSHA", script.sha, "1", key)
    sections = [
        call("INFO", section) for section in ("server", "memory", "persistence", "replication", "cluster")
    ]
    for answer in rights:
        _check_rights(await answer, key)
    info: dict[str, str] = {}
    for section in sections:
        try:
            info |= parse_info(_text(await section))
        except BackendRefused:
            return {}
    return info


def _check_rights(refused: Sequence[bytes], key: str) -> None:
    """Raise one error about all commands that the probe was refused."""
    words = [word.decode("utf-8", "replace") for word in refused]
    if not words:
        return
    error = from_reply(words[1].removeprefix("-"))
    if str(error).startswith("READONLY"):
        # Awaited later, when a primary has become one.
        raise BackendRefused(str(error), retryable=True) from error
    if error.retryable:
        # A full disk, too few replicas: not a matter of rights.
        raise error
    commands = ", ".join(dict.fromkeys(words[::2]))
    raise BackendRefused(
        f"this account may not use {commands} on keys such as {key}, which every lock needs: "
        "the documentation of the Redis backend has the ACL line with the least rights"
    ) from error


async def may_publish(answer: Awaitable[Sequence[int]]) -> bool | None:
    """Return whether scripts may publish, by the answer to the script ``publish``; ``None`` if the server takes no such script.

    It is asked where ``probe`` succeeds, so what is refused is the text of the script, as a proxy does that reads it. Raises
    :class:`BackendError` if the server cannot be asked. Cancelling it leaves nothing behind.
    """
    try:
        return (await answer)[1] >= 0
    except BackendRefused as error:
        if error.retryable:
            raise
        return None


# --- findings
# Pure judgements about the facts of a deployment, in the order in which they are best read.


class Pushing(Enum):
    """The ways in which a waiter learns that it was granted the lock."""

    PUSHED = "by a message"
    UNCOUNTED = "by a message that has it ask, because scripts may not count subscribers"
    APART = "by asking, because messages come from another server"
    DENIED = "by asking, because the account may not use the channels"
    REFUSED = "by asking, because the server takes no script that sends messages"


@dataclass
class Facts:
    """The collected facts; those that may not be read are missing."""

    info: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str | None] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    """Commands that scripts may not use."""
    trouble: str = ""
    """Why scripts cannot be used at all."""
    lists: bool = True
    """True if SCAN may be used."""
    pushing: Pushing = Pushing.PUSHED
    format: str | None = None
    """The version of the data of the namespace, if there are any."""
    cluster: bool = False
    """True if the server is addressed as a node of a cluster."""
    replicas: int = 0
    """The number of replicas that have to confirm a grant."""
    confirmed: int | None = None
    """The number of replicas that have confirmed a write; ``None`` if the server may not be asked."""
    ahead: float | None = None
    """Seconds by which the server's clock is ahead of the local one."""
    trips: list[float] = field(default_factory=list)
    """Seconds of the measured round trips."""

    @property
    def unknown(self) -> str:
        """The reason why a line of INFO is missing."""
        return "the server does not report it" if self.info else UNKNOWN


def judge(facts: Facts, ttl: float) -> list[Finding]:
    """Judge all facts."""
    parts = (_version, _role, _format, _rights, _eviction, _persistence, _replicas, _clients, _clock)
    found = [finding for part in parts for finding in part(facts)]
    return [*found, round_trip(facts.trips, ttl)] if facts.trips else found


def _version(facts: Facts) -> Iterator[Finding]:
    name = "Valkey" if "valkey_version" in facts.info else "Redis"
    version = facts.info.get("valkey_version") or facts.info.get("redis_version")
    if version is None:
        yield note("version", UNKNOWN, GRANT_INFO)
    elif name == "Redis" and numbers(version)[:2] < OLDEST:
        yield failure(
            "version",
            f"this is {name} {version}, which is too old for locks",
            "use Redis 6.2 or later, or Valkey",
        )
    else:
        yield ok("version", f"this is {name} {version}")


def _role(facts: Facts) -> Iterator[Finding]:
    info = facts.info
    # Valkey calls it server_mode.
    if "sentinel" in (info.get("redis_mode"), info.get("server_mode")):
        yield failure(
            "role",
            "this is a Sentinel, which keeps no data",
            "use redis+sentinel://host:26379/service, or give the address of the primary",
        )
    elif info.get("cluster_enabled") == "1" and not facts.cluster:
        yield failure(
            "role",
            "this server is a node of a Redis Cluster, and locks are on all its nodes",
            "use redis+cluster:// with the addresses of its nodes",
        )
    elif info.get("role") == "active-replica":
        yield failure(
            "role",
            "this is a KeyDB in active-active replication: each server takes writes of its own, so two clients can hold a lock",
            "use one KeyDB without active-replica, or Redis or Valkey",
        )
    elif info.get("role") == "slave":
        yield failure(
            "role",
            "this server is a read-only replica, and locks are written",
            "give the address of the primary",
        )
    elif info:
        yield ok("role", f"this is a {'primary of a cluster' if facts.cluster else 'standalone primary'}")


def _format(facts: Facts) -> Iterator[Finding]:
    mine, found = str(commands.FORMAT), facts.format
    if found == mine:
        yield ok("data format", f"the data of this namespace have format {mine}")
    elif found is not None:
        yield failure(
            "data format",
            f"the data of this namespace have format {found if found.isdigit() else shorten(found)}, and this version of "
            f"aiolock writes format {mine}",
            "use one version of aiolock everywhere, or another namespace",
        )


def _rights(facts: Facts) -> Iterator[Finding]:
    line = "use the ACL line of the documentation, which is the least that is needed"
    if facts.trouble:
        yield failure("scripts", f"every lock needs scripts, and they fail: {facts.trouble}", line)
    elif facts.refused:
        refused = ", ".join(facts.refused)
        yield failure(
            "rights", f"this account may not use {refused} in scripts, which every lock needs", line
        )
    else:
        yield ok("rights", "this account may do what every lock needs")
    if not facts.trouble:
        yield from _pushes(facts)
    if not facts.lists:
        yield note("scan", "this account may not use SCAN, so locks cannot be listed", "grant it +scan")


def _pushes(facts: Facts) -> Iterator[Finding]:
    subject = "pub/sub"
    match facts.pushing:
        case Pushing.PUSHED:
            yield ok(subject, "grants are pushed to waiters")
        case Pushing.UNCOUNTED:
            yield note(
                subject,
                "this account may not use PUBSUB NUMSUB in scripts, so a waiter that gets a message asks before it enters",
                "grant it +pubsub|numsub",
            )
        case Pushing.APART:
            yield warning(
                subject,
                "a subscription is at another server than the commands, such as a replica, so no grant is pushed, and a waiter "
                "asks every 100 ms",
                "give an address that leads every connection to the primary",
            )
        case Pushing.DENIED:
            yield warning(
                subject,
                "this account may not use the channels of the namespace, so a waiter asks every 100 ms",
                "grant it +publish, +subscribe and the channels of the namespace",
            )
        case Pushing.REFUSED:
            yield warning(
                subject,
                "this server takes no script that sends messages, as a proxy that checks scripts does, so a waiter asks every 100 ms",
                "give an address that leads to the server itself, if it has one",
            )


def _eviction(facts: Facts) -> Iterator[Finding]:
    subject, policy = "maxmemory-policy", facts.info.get("maxmemory_policy")
    most, used = _number(facts, "maxmemory"), _number(facts, "used_memory")
    if policy is None:
        yield warning(
            subject,
            f"{facts.unknown}: a full server may evict a lock that is held",
            f"{GRANT_INFO}, or make sure that it is noeviction",
        )
    elif policy == "noeviction":
        yield ok(subject, "it is noeviction: no lock that is held is evicted")
    else:
        when = "when it is full" if most else "once it has a maxmemory and is full"
        yield (failure if most else warning)(
            subject,
            f"it is {policy}: {when}, the server evicts locks that are held, and hands them out twice",
            f"set maxmemory-policy to noeviction, or give locks a server of their own; {FENCE}",
        )
    if most and used > 0.9 * most:
        yield warning(
            "memory",
            f"{used / most:.0%} of maxmemory are used: a full server refuses new locks (those held go on)",
            "raise maxmemory, or remove what needs no lock server",
        )


def _persistence(facts: Facts) -> Iterator[Finding]:
    subject, on, policy = "persistence", facts.info.get("aof_enabled"), facts.settings.get("appendfsync")
    if on is None:
        yield note(subject, f"{facts.unknown} whether locks survive a restart", GRANT_INFO)
    elif on == "0":
        saves = facts.settings.get("save")
        some = "goes back to its latest snapshot" if saves else "forgets all locks"
        if saves is None:
            some = "forgets all locks, or those after its latest snapshot"
        yield warning(
            subject,
            f"there is no append-only file: a server that restarts {some}, and hands out what is still held",
            f"set appendonly yes; {FENCE}",
        )
    elif policy is None:
        yield note(
            subject,
            "there is an append-only file; how often it reaches the disk may not be read (CONFIG GET)",
            "appendfsync always loses nothing, everysec up to two seconds if the machine fails",
        )
    elif policy == "always":
        yield ok(subject, "appendfsync is always: a restart forgets no lock")
    else:
        lost = "about two seconds" if policy == "everysec" else "half a minute or more"
        yield (note if policy == "everysec" else warning)(
            subject,
            f"appendfsync is {policy}: a restart of the server forgets no lock, a failure of its machine those of the last "
            f"{lost}",
            f"set appendfsync to always if that matters; {FENCE}",
        )
    if any(
        facts.info.get(name, "ok") != "ok" for name in ("aof_last_write_status", "rdb_last_bgsave_status")
    ):
        yield failure(
            "disk", "the server cannot write to its disk, and may refuse every write", "see its log"
        )


def _confirming(facts: Facts) -> Iterator[Finding]:
    subject, needed, count = "replicas", facts.replicas, facts.confirmed
    meanwhile = "no lock is granted, and those that are held are lost after one ttl"
    if count is None or not facts.info:
        yield failure(
            subject,
            "this account may not use WAIT and INFO, so no grant can be confirmed, and no client opens",
            "grant it +wait and +info, or leave replicas= out",
        )
    elif count < needed:
        yield failure(
            subject,
            f"replicas={needed} have to confirm each grant, and {count} answer: until {needed} do, {meanwhile}",
            f"have {needed + 1} replicas",
        )
    elif count == needed:
        yield warning(
            subject,
            f"replicas={needed} have to confirm each grant, and {count} answer: while one of them is away, {meanwhile}",
            f"have {needed + 1} replicas",
        )
    else:
        yield ok(subject, f"replicas={needed} have to confirm each grant, and {count} answer")


def _replicas(facts: Facts) -> Iterator[Finding]:
    if facts.replicas:
        yield from _confirming(facts)
        return
    count = facts.info.get("connected_slaves")
    if count is None:
        yield note("replicas", f"{facts.unknown} whether there are any", GRANT_INFO)
    elif count != "0":
        least, lag = (facts.settings.get(f"min-replicas-{name}") for name in ("to-write", "max-lag"))
        bounded = least != "0" and lag != "0"
        if least is None or lag is None:
            bounded = "min_slaves_good_slaves" in facts.info
        seconds = f"{lag} s" if lag else "min-replicas-max-lag"
        yield (note if bounded else warning)(
            "replicas",
            f"there are {count}, which follow with a delay: a failover can lose the last writes, so two holders may believe"
            + (f"; a primary that is cut off stops within {seconds}" if bounded else ""),
            FENCE if bounded else f"set min-replicas-to-write 1 and min-replicas-max-lag 10; {FENCE}",
        )
    elif not facts.cluster:
        # The diagnosis of a cluster has a finding of its own for this.
        yield note(
            "replicas",
            "there are none: nothing is lost by a failover, and without this server there are no locks",
        )


def _clients(facts: Facts) -> Iterator[Finding]:
    most, now = _number(facts, "maxclients"), _number(facts, "connected_clients")
    if most and now > 0.8 * most:
        yield warning(
            "maxclients",
            f"{now} of {most} connections are in use, and each aiolock client needs {3 if facts.replicas else 2}",
            "raise maxclients, or share clients: one serves any number of locks and tasks",
        )


def _clock(facts: Facts) -> Iterator[Finding]:
    if facts.ahead is None:
        yield note("clock", "this account may not use TIME, so the clock is not known", "grant it +time")
        return
    apart, error = abs(facts.ahead), min(facts.trips) / 2
    if apart > 1.0 + error:
        yield warning(
            "clock",
            f"the server's clock is {apart:.1f} s {'ahead of' if facts.ahead > 0 else 'behind'} the local one; locks go by the server's "
            "alone, and are handed out early if it is set forward",
            "have NTP keep both right in small steps",
        )
    else:
        yield ok("clock", f"it agrees with the local one within {max(apart, error) * 1000:.0f} ms")


def _number(facts: Facts, name: str) -> int:
    return int(facts.info.get(name) or 0)


# --- facts
# Collected over connections of their own, without changes at the server, and also where no client can be opened.


async def examine(
    endpoint: Endpoint,
    settings: Settings,
    key: str = "",
    *,
    cluster: bool = False,
    probe: Script = PROBE,
) -> list[Finding]:
    """Collect the facts within the command timeout, and judge them; ``key`` is that of the probe where the slot matters.

    Raises :class:`BackendUnavailable` or :class:`BackendRefused` if the server cannot be asked at all. Cancelling it leaves
    no connection open.
    """
    limit = settings.command_timeout
    key = key or f"{settings.namespace}:1:probe:{{{secrets.token_hex(8)}}}"
    options: Options = {"clock": settings.clock, "command_timeout": limit}
    connection = Connection(endpoint, **options)
    try:
        async with asyncio.timeout(limit + GRACE):
            await connection.open()
            facts = await _ask(connection, settings, key, probe)
            facts.cluster = cluster
            if endpoint.replicas:
                facts.replicas, facts.confirmed = endpoint.replicas, await _confirm(connection, key, limit)
            facts.pushing = await _pushing(connection, endpoint, settings.namespace, key, facts, options)
    except TimeoutError as error:
        raise BackendUnavailable(
            f"{endpoint} did not answer everything that it was asked within {limit:g} s"
        ) from error
    finally:
        await connection.aclose()
    return judge(facts, settings.ttl)


async def _ask(connection: Connection, settings: Settings, key: str, probe: Script) -> Facts:
    rights = connection.call("EVAL", probe.source, "1", key)
    sections = ("server", "clients", "memory", "persistence", "replication", "cluster")
    asked = [connection.call("INFO", section) for section in sections]
    # One by one: an old server takes a single name.
    values = {name: connection.call("CONFIG", "GET", name) for name in SETTINGS}
    scan = connection.call("SCAN", "0", "MATCH", key, "COUNT", "1")
    version = connection.call("HGET", Format(settings.namespace).key, "version")
    facts = Facts()
    try:
        facts.refused = tuple(dict.fromkeys(_text(word) for word in (await rights)[::2]))
    except BackendError as error:
        if not _is_answer(error):
            raise
        facts.trouble = str(error)
    if (found := await _or_none(version)) is not None:
        facts.format = _text(found)
    for section in asked:
        facts.info |= parse_info(_text(await _or_none(section) or b""))
    for name, value in values.items():
        pair = await _or_none(value)
        facts.settings[name] = _text(pair[1]) if pair else None
    facts.lists = await _or_none(scan) is not None
    for _ in range(TRIPS):
        sent, wall = settings.clock(), datetime.now(UTC).timestamp()
        answer = await _or_none(connection.call("TIME"))
        took = settings.clock() - sent
        if answer is not None and (not facts.trips or took < min(facts.trips)):
            # The shortest trip has the smallest error.
            facts.ahead = int(answer[0]) + int(answer[1]) / 1_000_000 - (wall + took / 2)
        facts.trips.append(took)
    return facts


async def _confirm(connection: Connection, key: str, limit: float) -> int | None:
    """Write, and return how many replicas have confirmed that; ``None`` if the account may not ask."""
    written = connection.call("EVAL", BARRIER.source, "1", key)
    if await _or_none(written) is None and written.exception() is not None:
        return None
    # More than there are, so that all of them have the time.
    count = await _or_none(connection.call("WAIT", MANY, round(min(SOON, limit / 4) * 1000)))
    return count if isinstance(count, int) else None


async def _pushing(
    connection: Connection, endpoint: Endpoint, namespace: str, key: str, facts: Facts, options: Options
) -> Pushing:
    """Find out whether a message on a channel of the namespace arrives, and from which server."""
    channel, arrived, server = f"{namespace}:1:to:{secrets.token_hex(16)}", asyncio.Event(), RunId()
    subscriber = Subscriber(
        endpoint, lambda: [channel], on_message=lambda _: arrived.set(), server=server, **options
    )
    try:
        await subscriber.open()
        answer = await _or_none(connection.call("EVAL", PUBLISH.source, "1", key, channel))
        if answer is None:
            return Pushing.REFUSED
        counted, may = (number >= 0 for number in answer)
        if subscriber.denied or not may:
            return Pushing.DENIED
        same = answer[0] > 0 if counted else agree(facts.info.get("run_id"), server.value)
        if same is False:
            return Pushing.APART
        await arrived.wait()
    finally:
        await subscriber.aclose()
    return Pushing.PUSHED if counted else Pushing.UNCOUNTED


async def _or_none(reply: Awaitable[Any]) -> Any:
    """Return the answer, or ``None`` if the server refuses it: that is a finding, not a failure."""
    try:
        return await reply
    except BackendError as error:
        if not _is_answer(error):
            raise
        return None


def _is_answer(error: BackendError) -> bool:
    """True if the error is a reply of the server."""
    return isinstance(error.__cause__, ReplyError)


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
