"""Scenarios on PostgreSQL, SQLite, memcached and etcd, which share an engine, with what people write by hand."""

from __future__ import annotations

from collections import Counter

from benchmarks.measure import Report
from benchmarks.scenarios.common import (
    DRAIN,
    INTERVALS,
    Found,
    beats,
    free,
    handover,
    hot,
    kept,
    one_read,
    quickest,
    renewal,
    spread,
)
from benchmarks.scenarios.context import (
    Context,
    EtcdContext,
    MemcachedContext,
    PostgreSQLContext,
    Scenario,
)

__all__ = ["ETCD", "MEMCACHED", "POSTGRESQL", "SQLITE"]

# --- PostgreSQL


def _postgresql_free(context: Context) -> Report:
    """A free lock, taken and left by one task, one turn after the other."""
    peers = ["upsert + update", "upsert + lazy update", "pg_advisory_lock", "polling row 0.1"]
    report = free(context, "PostgreSQL", ["aiolock", *peers])
    report.notes.append(
        "“upsert + update” is no lock, only the two statements, each flushed. aiolock waits for the flush of an acquisition, "
        "and not for that of a release while no client waits; nor does the “lazy update”."
    )
    report.compare("rate, aiolock / one bare upsert and one bare update", "aiolock", peers[0], "rate", 0.9)
    for peer in peers[1:]:
        report.mention("aiolock", peer, "rate")
    return report


POLLING = "pg_try_advisory_lock", "polling row"


def _postgresql_hot(context: Context) -> Report:
    """One lock that a hundred tasks of four processes want, drained."""
    polling = [f"{peer} {interval}" for peer in POLLING for interval in INTERVALS]
    columns = {**DRAIN, "connections": "connections"}
    report = hot(context, "PostgreSQL", "upsert + update", ["pg_advisory_lock", *polling], columns)
    beats(report, "pg_advisory_lock", 3)
    for peer in POLLING:
        beats(report, peer, 1)
    report.limit("connections, aiolock", "aiolock", "connections", 12, "connections")
    return report


def _postgresql_spread(context: Context) -> Report:
    """A hundred locks, each wanted by one task of each of four processes, and held for 5 ms."""
    columns = {**DRAIN, "connections": "connections"}
    report = spread(context, "PostgreSQL", "upsert + update", ["pg_advisory_lock"], POLLING, columns)
    report.limit("connections, aiolock", "aiolock", "connections", 12, "connections")
    report.notes.append(
        "pg_advisory_lock and the statements of the floor have a connection for each task, those that poll ten in each process."
    )
    return report


def _postgresql_handover(context: Context) -> Report:
    """From the release in one process to the entry in another."""
    pauses = {"notify": 0.002, "aiolock": 0.002, "pg_advisory_lock": 0.002}
    report = handover(
        context, "PostgreSQL", pauses | {f"polling row {interval}": interval for interval in INTERVALS}
    )
    report.notes.append("notify: a bare NOTIFY and its arrival at a bare listener, driven in the same way.")
    report.compare("p50, aiolock / a bare NOTIFY", "aiolock", "notify", "p50", 2, at_most=True)
    for peer in ("pg_advisory_lock", quickest(report, "polling row")):
        report.mention("aiolock", peer, "p50")
    return report


def _postgresql_renewal(context: PostgreSQLContext) -> Report:
    """A thousand locks that one client holds."""

    def play(who: str, count: int, ttl: float, seconds: float) -> Found:
        with context.logging() as statements:
            return kept(context, statements, who, count, ttl, seconds)

    report = renewal(context, "PostgreSQL", ["expiring rows"], "update + select", play)
    one_read(report)
    report.notes.append("The statements are from the log of the server, which is on for all of them.")
    return report


POSTGRESQL: dict[str, Scenario] = {
    "free": _postgresql_free,
    "hot": _postgresql_hot,
    "spread": _postgresql_spread,
    "handover": _postgresql_handover,
    "renewal": _postgresql_renewal,
}


# --- SQLite


def _sqlite_free(context: Context) -> Report:
    """A free lock, taken and left by one task, one turn after the other."""
    others = ["bare sqlite", "bare sqlite, lazy", "flock 0.05"]
    report = free(context, "SQLite", ["aiolock", *others])
    report.notes.append(
        "“bare sqlite” is no lock, only one upsert and one update, each flushed; “lazy” and aiolock flush the first one only."
    )
    for other in others:
        report.mention("aiolock", other, "rate")
    return report


def _sqlite_hot(context: Context) -> Report:
    """One lock that a hundred tasks of four processes want, drained."""
    report = hot(context, "SQLite", "bare sqlite", [f"flock {interval}" for interval in INTERVALS], DRAIN)
    beats(report, "flock", 2)
    report.notes.append("flock: a lock of a file, tried again and again, as filelock does.")
    return report


def _sqlite_handover(context: Context) -> Report:
    """From the release in one process to the entry in another."""
    report = handover(context, "SQLite", {"aiolock": 0.01} | {f"flock {each}": each for each in INTERVALS})
    report.mention("aiolock", quickest(report, "flock"), "p50")
    return report


def _sqlite_renewal(context: Context) -> Report:
    """A thousand locks that one client holds."""

    def play(who: str, count: int, ttl: float, seconds: float) -> Found:
        found = context.workers.one("kept", who=who, url=context.url, count=count, ttl=ttl, seconds=seconds)
        return Counter(found["statements"]), found["processor"]

    report = renewal(context, "SQLite", [], "bare sqlite", play)
    one_read(report)
    report.notes.append("There is no server: the processor time is that of the whole client.")
    return report


SQLITE: dict[str, Scenario] = {
    "free": _sqlite_free,
    "hot": _sqlite_hot,
    "handover": _sqlite_handover,
    "renewal": _sqlite_renewal,
}


# --- memcached


def _memcached_free(context: Context) -> Report:
    """A free lock, taken and left by one task, one turn after the other."""
    report = free(context, "memcached", ["aiolock", "add + delete", "polling add 0.1"])
    report.notes.append("“add + delete” is no lock, only the two commands.")
    for other in ("add + delete", "polling add 0.1"):
        report.mention("aiolock", other, "rate")
    return report


def _memcached_hot(context: Context) -> Report:
    """One lock that a hundred tasks of four processes want, drained."""
    polling = [f"polling add {interval}" for interval in INTERVALS]
    report = hot(context, "memcached", "add + delete", polling, DRAIN)
    beats(report, "polling add", 2)
    return report


def _memcached_spread(context: Context) -> Report:
    """A hundred locks, each wanted by one task of each of four processes, and held for 5 ms."""
    return spread(context, "memcached", "add + delete", [], ["polling add"], DRAIN)


def _memcached_handover(context: Context) -> Report:
    """From the release in one process to the entry in another."""
    pauses = {"aiolock": 0.01} | {f"polling add {each}": each for each in INTERVALS}
    report = handover(context, "memcached", pauses)
    report.mention("aiolock", quickest(report, "polling add"), "p50")
    return report


def _memcached_late(context: Context) -> Report:
    """The same after a long wait, in which our clients poll less and less often."""
    waited = context.count(5, 2)
    pauses = {"aiolock": 1.0, "polling add 0.1": 0.1}
    report = handover(context, "memcached", pauses, settle=waited, count=(6, 2))
    report.name, report.title = "late", f"{report.title}, after a wait of {waited} s or more"
    return report


def _memcached_renewal(context: MemcachedContext) -> Report:
    """A thousand locks that one client holds."""

    def play(who: str, count: int, ttl: float, seconds: float) -> Found:
        context.flush()
        return kept(context, context.commands, who, count, ttl, seconds)

    report = renewal(context, "memcached", [], "touch", play)
    report.notes.append("Written and read are items: aiolock verifies all its locks by one batch of reads.")
    return report


MEMCACHED: dict[str, Scenario] = {
    "free": _memcached_free,
    "hot": _memcached_hot,
    "spread": _memcached_spread,
    "handover": _memcached_handover,
    "late": _memcached_late,
    "renewal": _memcached_renewal,
}


# --- etcd

KEYS = [f"polling key {interval}" for interval in INTERVALS]


def _etcd_free(context: Context) -> Report:
    """A free lock, taken and left by one task, one turn after the other."""
    others = ["put + delete", "v3lock", "polling key 0.1"]
    report = free(context, "etcd", ["aiolock", *others])
    report.notes.append(
        "“put + delete” is no lock, only the two requests. v3lock is the lock service of etcd itself."
    )
    for other in others:
        report.mention("aiolock", other, "rate")
    return report


def _etcd_hot(context: Context) -> Report:
    """One lock that a hundred tasks of four processes want, drained."""
    report = hot(context, "etcd", "put + delete", ["v3lock", *KEYS], DRAIN)
    beats(report, "v3lock", 1.2)
    beats(report, "polling key", 1)
    return report


def _etcd_spread(context: Context) -> Report:
    """A hundred locks, each wanted by one task of each of four processes, and held for 5 ms."""
    report = spread(context, "etcd", "put + delete", [], ["polling key"], DRAIN)
    report.notes.append(
        "v3lock has no row: with 400 waiters the lock service of etcd 3.4.23 stopped answering in most runs, whatever was asked of it "
        "(its figure mvcc_pending_events stayed above 100, and the first in each queue got no answer)."
    )
    return report


def _etcd_handover(context: Context) -> Report:
    """From the release in one process to the entry in another."""
    pauses = {"aiolock": 0.01, "v3lock": 0.01, "etcdctl lock": 0.01}
    pauses |= {f"polling key {each}": each for each in INTERVALS}
    # etcdctl is started by its waiter, and has to be there.
    report = handover(context, "etcd", pauses, settle=0.15, count=(20, 4))
    report.notes.append(
        "etcdctl lock: a process for each holder and waiter, which frees the lock when it is told to end."
    )
    report.compare("p50, aiolock / the lock service", "aiolock", "v3lock", "p50", 0.1, at_most=True)
    for peer in ("etcdctl lock", quickest(report, "polling key")):
        report.mention("aiolock", peer, "p50")
    return report


def _etcd_renewal(context: EtcdContext) -> Report:
    """A thousand locks that one client holds."""

    def play(who: str, count: int, ttl: float, seconds: float) -> Found:
        return kept(context, context.requests, who, count, ttl, seconds)

    report = renewal(context, "etcd", ["a lease each"], "put + get", play)
    report.notes.append(
        "Written are keys and leases; a read is a transaction of a hundred keys. “a lease each” is how the lock service is used: the "
        "lease of each lock is prolonged by itself."
    )
    return report


ETCD: dict[str, Scenario] = {
    "free": _etcd_free,
    "hot": _etcd_hot,
    "spread": _etcd_spread,
    "handover": _etcd_handover,
    "renewal": _etcd_renewal,
}
