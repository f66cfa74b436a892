"""What the facts about a deployment mean for locks, in sentences with advice; pure.

An error keeps locks from working, a warning names a case in which two holders may believe, a note is good to know.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median

from aiolock.backends.redis import format as data_format
from aiolock.backends.redis.capabilities import OLDEST
from aiolock.contract import Finding
from aiolock.errors import shorten
from aiolock.info import Level

__all__ = ["SETTINGS", "Facts", "judge"]

SETTINGS = ("appendfsync", "save", "min-replicas-to-write", "min-replicas-max-lag")
"""What INFO does not tell and CONFIG GET does."""

UNKNOWN_INFO = "this account may not use INFO, so it is not known"
GRANT_INFO = "grant it +info"
FENCE = "let the resource check fencing tokens"


@dataclass
class Facts:
    """What was found out; what may not be read is missing."""

    info: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str | None] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    """Commands that scripts may not use."""
    trouble: str = ""
    """Why scripts cannot be used at all."""
    lists: bool = True
    """Whether SCAN may be used."""
    pushed: bool = True
    format: str | None = None
    """The version of the data of the namespace, if there are any."""
    cluster: bool = False
    """Whether it is asked as a node of a cluster."""
    ahead: float | None = None
    """Seconds by which the server's clock is ahead of ours."""
    trips: list[float] = field(default_factory=list)
    """Seconds that round trips took."""


def judge(facts: Facts, ttl: float) -> list[Finding]:
    """Everything there is to say, in the order in which it is best read."""
    info, settings = facts.info, facts.settings
    return [
        *_version(info),
        *_role(info, cluster=facts.cluster),
        *_format(facts),
        *_rights(facts),
        *_eviction(info),
        *_persistence(info, settings),
        *_replicas(info, settings, cluster=facts.cluster),
        *_clients(info),
        *_clock(facts),
        *_round_trip(facts, ttl),
    ]


def _version(info: Mapping[str, str]) -> Iterator[Finding]:
    known = info.get("valkey_version") or info.get("redis_version")
    if known is None:
        yield Finding(Level.NOTE, "version", UNKNOWN_INFO, GRANT_INFO)
        return
    name = "Valkey" if "valkey_version" in info else "Redis"
    numbers = tuple(int(part) for part in re.findall(r"\d+", known)[:2])
    if name == "Redis" and numbers < OLDEST:
        yield Finding(
            Level.ERROR,
            "version",
            f"this is {name} {known}, which is too old for locks",
            "use Redis 6.2 or later, or Valkey",
        )
    else:
        yield Finding(Level.OK, "version", f"this is {name} {known}")


def _role(info: Mapping[str, str], *, cluster: bool) -> Iterator[Finding]:
    # Valkey has another word for it.
    if "sentinel" in (info.get("redis_mode"), info.get("server_mode")):
        yield Finding(
            Level.ERROR,
            "role",
            "this is a Sentinel, which keeps no data",
            "use redis+sentinel://host:26379/service, or give the address of the primary",
        )
    elif info.get("cluster_enabled") == "1" and not cluster:
        yield Finding(
            Level.ERROR,
            "role",
            "this server is a node of a Redis Cluster, and locks are on all its nodes",
            "use redis+cluster:// with the addresses of its nodes",
        )
    elif info.get("role") == "slave":
        yield Finding(
            Level.ERROR,
            "role",
            "this server is a read-only replica, and locks are written",
            "give the address of the primary",
        )
    elif info:
        what = "a primary of a cluster" if cluster else "a standalone primary"
        yield Finding(Level.OK, "role", f"this is {what}")


def _format(facts: Facts) -> Iterator[Finding]:
    if facts.format == str(data_format.FORMAT):
        yield Finding(Level.OK, "data format", f"the data of this namespace have format {data_format.FORMAT}")
    elif facts.format is not None:
        yield Finding(
            Level.ERROR,
            "data format",
            f"the data of this namespace have format {facts.format if facts.format.isdigit() else shorten(facts.format)}, and this version of aiolock writes format {data_format.FORMAT}",
            "use one version of aiolock everywhere, or another namespace",
        )


def _rights(facts: Facts) -> Iterator[Finding]:
    line = "use the ACL line of the documentation, which is the least that is needed"
    if facts.trouble:
        yield Finding(
            Level.ERROR, "scripts", f"every lock needs scripts, and they fail: {facts.trouble}", line
        )
    elif facts.refused:
        yield Finding(
            Level.ERROR,
            "rights",
            f"this account may not use {', '.join(facts.refused)} in scripts, which every lock needs",
            line,
        )
    else:
        yield Finding(Level.OK, "rights", "this account may do what every lock needs")
    if facts.pushed:
        yield Finding(Level.OK, "pub/sub", "grants are pushed to whoever waits")
    else:
        yield Finding(
            Level.WARNING,
            "pub/sub",
            "this account may not use the channels of the namespace, so whoever waits asks every 100 ms",
            "grant it +publish, +subscribe and the channels of the namespace",
        )
    if not facts.lists:
        yield Finding(
            Level.NOTE, "scan", "this account may not use SCAN, so locks cannot be listed", "grant it +scan"
        )


def _eviction(info: Mapping[str, str]) -> Iterator[Finding]:
    policy = info.get("maxmemory_policy")
    most = int(info.get("maxmemory", "0") or 0)
    if policy is None:
        yield Finding(
            Level.WARNING,
            "maxmemory-policy",
            f"{UNKNOWN_INFO if not info else 'the server does not tell it'}: a full server may evict a lock that is held",
            f"{GRANT_INFO}, or make sure that it is noeviction",
        )
    elif policy == "noeviction":
        yield Finding(Level.OK, "maxmemory-policy", "it is noeviction: no lock that is held is evicted")
    else:
        when = "when it is full" if most else "once it has a maxmemory and is full"
        yield Finding(
            Level.ERROR if most else Level.WARNING,
            "maxmemory-policy",
            f"it is {policy}: {when}, the server evicts locks that are held, and hands them out twice",
            f"set maxmemory-policy to noeviction, or give locks a server of their own; {FENCE}",
        )
    used = int(info.get("used_memory", "0") or 0)
    if most and used > 0.9 * most:
        yield Finding(
            Level.WARNING,
            "memory",
            f"{used / most:.0%} of maxmemory are used: a full server refuses new locks (those held go on)",
            "raise maxmemory, or remove what needs no lock server",
        )


def _persistence(info: Mapping[str, str], settings: Mapping[str, str | None]) -> Iterator[Finding]:
    on = info.get("aof_enabled")
    if on is None:
        text = UNKNOWN_INFO if not info else "the server does not tell it"
        yield Finding(Level.NOTE, "persistence", f"{text} whether locks survive a restart", GRANT_INFO)
    elif on == "0":
        saves = settings.get("save")
        some = "goes back to its latest snapshot" if saves else "forgets all locks"
        if saves is None:
            some = "forgets all locks, or those after its latest snapshot"
        yield Finding(
            Level.WARNING,
            "persistence",
            f"there is no append-only file: a server that restarts {some}, and hands out what is still held",
            f"set appendonly yes; {FENCE}",
        )
    else:
        yield from _sync(settings.get("appendfsync"))
    if info.get("aof_last_write_status", "ok") != "ok" or info.get("rdb_last_bgsave_status", "ok") != "ok":
        yield Finding(
            Level.ERROR,
            "disk",
            "the server cannot write to its disk, and may refuse every write",
            "see its log",
        )


def _sync(policy: str | None) -> Iterator[Finding]:
    if policy is None:
        yield Finding(
            Level.NOTE,
            "persistence",
            "there is an append-only file; how often it reaches the disk may not be read (CONFIG GET)",
            "appendfsync always loses nothing, everysec up to two seconds if the machine fails",
        )
    elif policy == "always":
        yield Finding(Level.OK, "persistence", "appendfsync is always: a restart forgets no lock")
    else:
        lost = "about two seconds" if policy == "everysec" else "half a minute or more"
        yield Finding(
            Level.NOTE if policy == "everysec" else Level.WARNING,
            "persistence",
            f"appendfsync is {policy}: a restart of the server forgets no lock, a failure of its machine those of the last "
            f"{lost}",
            f"set appendfsync to always if that matters; {FENCE}",
        )


def _replicas(
    info: Mapping[str, str], settings: Mapping[str, str | None], *, cluster: bool
) -> Iterator[Finding]:
    count = info.get("connected_slaves")
    if count is None:
        text = UNKNOWN_INFO if not info else "the server does not tell it"
        yield Finding(Level.NOTE, "replicas", f"{text} whether there are any", GRANT_INFO)
        return
    if count == "0" and cluster:
        # Of a cluster that is said once, with what follows from it.
        return
    if count == "0":
        yield Finding(
            Level.NOTE,
            "replicas",
            "there are none: nothing is lost by a failover, and without this server there are no locks",
        )
        return
    least, lag = settings.get("min-replicas-to-write"), settings.get("min-replicas-max-lag")
    bounded = (
        "min_slaves_good_slaves" in info if least is None or lag is None else least != "0" and lag != "0"
    )
    seconds = f"{lag} s" if lag else "min-replicas-max-lag"
    yield Finding(
        Level.NOTE if bounded else Level.WARNING,
        "replicas",
        f"there are {count}, which follow with a delay: a failover can lose the last writes, so two holders may believe"
        + (f"; a primary that is cut off stops within {seconds}" if bounded else ""),
        FENCE if bounded else f"set min-replicas-to-write 1 and min-replicas-max-lag 10; {FENCE}",
    )


def _clients(info: Mapping[str, str]) -> Iterator[Finding]:
    most, now = int(info.get("maxclients", "0") or 0), int(info.get("connected_clients", "0") or 0)
    if most and now > 0.8 * most:
        yield Finding(
            Level.WARNING,
            "maxclients",
            f"{now} of {most} connections are in use, and each client of ours needs two",
            "raise maxclients, or share clients: one serves any number of locks and tasks",
        )


def _clock(facts: Facts) -> Iterator[Finding]:
    if facts.ahead is None:
        yield Finding(
            Level.NOTE, "clock", "this account may not use TIME, so the clock is not known", "grant it +time"
        )
        return
    error = min(facts.trips) / 2
    if abs(facts.ahead) > 1.0 + error:
        way = "ahead of" if facts.ahead > 0 else "behind"
        yield Finding(
            Level.WARNING,
            "clock",
            f"the server's clock is {abs(facts.ahead):.1f} s {way} ours; locks go by the server's alone, and are handed "
            "out early if it is set forward",
            "have NTP keep both right in small steps",
        )
    else:
        yield Finding(
            Level.OK, "clock", f"it agrees with ours within {max(abs(facts.ahead), error) * 1000:.0f} ms"
        )


def _round_trip(facts: Facts, ttl: float) -> Iterator[Finding]:
    if not facts.trips:
        return
    usual, worst = median(facts.trips), max(facts.trips)
    text = f"{usual * 1000:.1f} ms, at worst {worst * 1000:.1f} ms of {len(facts.trips)}"
    if usual > ttl / 20:
        yield Finding(
            Level.WARNING,
            "round trip",
            f"{text}: much for a ttl of {ttl:g} s, which is renewed every third of it",
            "use a longer ttl, or a server that is nearer",
        )
    else:
        yield Finding(Level.OK, "round trip", text)
