"""Scenarios on PostgreSQL, SQLite and memcached, which share an engine, with what people write by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from benchmarks.measure import Report, percentile, ratio
from benchmarks.scenarios.context import Context, MemcachedContext, PostgreSQLContext, Scenario
from benchmarks.scenarios.draining import baton, drained

__all__ = ["MEMCACHED", "POSTGRESQL", "SQLITE"]

INTERVALS = (0.001, 0.005, 0.02, 0.1)
"""Seconds between two tries of a peer that polls; the goals count against its best one."""

Found = tuple[Counter[str], float]
"""Statements by their first word, and processor seconds."""

DRAIN = {
    "rate": "turns/s",
    "p50": "wait p50, s",
    "p99": "wait p99, s",
    "worst": "longest wait, s",
    "double": "two inside",
}


HOLDS = 1_000
"""Of the client whose renewals are counted."""
WRITES = {"INSERT", "UPDATE", "DELETE", "WITH"}
"""First words of statements that write; a compare-and-set of several rows begins with the rows that it is given."""


def _free(context: Context, server: str, whos: list[str]) -> Report:
    title = f"{server}: free lock, one after the other"
    report = Report("free", title, {"rate": "turns/s", "each": "µs each"})
    turns = context.count(400, 50)

    def play(who: str) -> float:
        rate: float = context.workers.one("single", who=who, url=context.url, turns=turns)[0]
        return rate

    for who, rates in context.alternate(context.rounds, whos, play).items():
        report.add(who, rate=rates, each=[1e6 / rate for rate in rates])
    return report


def _hot(context: Context, server: str, floor: str, peers: list[str], columns: dict[str, str]) -> Report:
    """Drain one lock; everybody has as many turns as they are fast."""
    title = f"{server}: one hot lock, drain of 4 processes x 25 tasks"
    report = Report("hot", title, columns)
    whos = ["aiolock", "aiolock fair", *peers, floor]

    def play(who: str) -> dict[str, float]:
        turns = {"aiolock": context.count(40, 4), "aiolock fair": context.count(5, 1)}.get(
            who, context.count(5, 1)
        )
        return drained(context, who, 4, 25, turns)

    for who, rounds in context.alternate(min(context.rounds, 2), whos, play).items():
        report.add(who, **{column: [found[column] for found in rounds] for column in columns})
    report.notes.append(
        f"Contenders have different numbers of turns, by how fast they are. “{floor}” is no lock, only the statements."
    )
    report.mention("aiolock", floor, "rate")
    return report


def _spread(
    context: Context,
    server: str,
    floor: str,
    peers: list[str],
    polling: Sequence[str],
    columns: dict[str, str],
) -> Report:
    """A hundred locks, each wanted by one task of each of four processes, and held for 5 ms."""
    turns = context.count(5, 2)
    title = f"{server}: 100 locks, drain of 4 processes x 100 tasks x {turns} turns of 5 ms"
    report = Report("spread", title, columns)
    intervals = [f"{peer} {interval}" for peer in polling for interval in INTERVALS]
    played = context.alternate(
        min(context.rounds, 2),
        ["aiolock", "aiolock fair", *peers, *intervals, floor],
        lambda who: drained(context, who, 4, 100, turns, locks=100, hold=0.005),
    )
    for who, rounds in played.items():
        report.add(who, **{column: [found[column] for found in rounds] for column in columns})
    for peer in (*peers, *polling):
        _beats(report, peer, 1)
    report.mention("aiolock", floor, "rate")
    return report


def _best(report: Report, peer: str) -> str:
    """The row of a peer that polls, at the interval at which it is fastest."""
    rates = {f"{peer} {interval}": 0.0 for interval in INTERVALS}
    for who, found in report.rows.items():
        if who in rates:
            rates[who] = found["rate"].median
    return max(rates, key=lambda who: rates[who])


def _quickest(report: Report, peer: str) -> str:
    """The same by the hand-over of half of them."""
    return min(
        (who for who in report.rows if who.startswith(peer)), key=lambda who: report.rows[who]["p50"].median
    )


def _beats(report: Report, peer: str, must: float) -> None:
    """The goals against a peer: so many times its rate, at no worse p99."""
    name = f"{peer} at its best interval" if f"{peer} {INTERVALS[0]}" in report.rows else peer
    best = peer if peer in report.rows else _best(report, peer)
    report.compare(f"rate, aiolock / {name}", "aiolock", best, "rate", must)
    report.compare(f"wait p99, aiolock / {name}", "aiolock", best, "p99", 1, at_most=True)


def _handover(
    context: Context,
    server: str,
    pauses: dict[str, float],
    *,
    settle: float = 0.012,
    count: tuple[int, int] = (40, 6),
) -> Report:
    """Hand over when the next one has waited for ``settle`` seconds and up to a pause of its own longer."""
    report = Report(
        "handover",
        f"{server}: hand-over latency between two processes",
        {"p50": "p50, ms", "p90": "p90, ms", "p99": "p99, ms"},
    )

    def play(who: str) -> list[float]:
        # The first ones open connections.
        found = baton(context, who, context.count(*count) + 3, pauses[who], settle=settle)
        return [took / 1000 for took in found[3:]]

    for who, rounds in context.alternate(min(context.rounds, 3), list(pauses), play).items():
        report.add(who, **{f"p{p}": [percentile(found, p) for found in rounds] for p in (50, 90, 99)})
    return report


def _one_read(report: Report) -> None:
    """The goal that all locks of a client are verified by one statement."""
    ours = report.rows["aiolock"]
    report.limit_of("reads for each write", ratio(ours["reads"], ours["writes"]), 1.2, "reads")


def _renewal(
    context: Context,
    server: str,
    peers: list[str],
    floor: str,
    play: Callable[[str, int, float, float], Found],
) -> Report:
    """What it costs to keep a thousand locks."""
    ttl = context.count(10, 6)
    seconds = float(context.count(3, 1) * ttl)
    columns = {"writes": "writes per ttl", "reads": "reads per ttl", "processor": f"ms of {server} per ttl"}
    report = Report("renewal", f"{server}: {HOLDS:,} locks held by one client, ttl {ttl} s", columns)
    whos = ["aiolock", "aiolock, one hold", *peers, floor]

    def one(who: str) -> Found:
        return play(who.partition(",")[0], 1 if who.endswith("one hold") else HOLDS, ttl, seconds)

    for who, found in context.alternate(1, whos, one).items():
        report.add(
            who,
            writes=[sum(statements[word] for word in WRITES) * ttl / seconds for statements, _ in found],
            reads=[statements["SELECT"] * ttl / seconds for statements, _ in found],
            processor=[processor * 1000 * ttl / seconds for _, processor in found],
        )
    # Not exactly the same: a renewal may fall out of the time in which they are counted.
    report.compare(
        f"writes per ttl, {HOLDS:,} holds / one hold",
        "aiolock",
        "aiolock, one hold",
        "writes",
        1.2,
        at_most=True,
    )
    report.notes.append(
        f"“{floor}” is no lock, only the statements, three times in a ttl. The locks are acquired fifty at a time, "
        "over a third of a ttl."
    )
    for other in (floor, *peers):
        report.mention("aiolock", other, "processor")
    return report


# --- PostgreSQL


def _postgresql_free(context: Context) -> Report:
    """A free lock, taken and left by one task, one turn after the other."""
    peers = ["upsert + update", "upsert + lazy update", "pg_advisory_lock", "polling row 0.1"]
    report = _free(context, "PostgreSQL", ["aiolock", *peers])
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
    report = _hot(context, "PostgreSQL", "upsert + update", ["pg_advisory_lock", *polling], columns)
    _beats(report, "pg_advisory_lock", 3)
    for peer in POLLING:
        _beats(report, peer, 1)
    report.limit("connections, aiolock", "aiolock", "connections", 12, "connections")
    return report


def _postgresql_spread(context: Context) -> Report:
    """A hundred locks, each wanted by one task of each of four processes, and held for 5 ms."""
    columns = {**DRAIN, "connections": "connections"}
    report = _spread(context, "PostgreSQL", "upsert + update", ["pg_advisory_lock"], POLLING, columns)
    report.limit("connections, aiolock", "aiolock", "connections", 12, "connections")
    report.notes.append(
        "pg_advisory_lock and the statements of the floor have a connection for each task, those that poll ten in each process."
    )
    return report


def _postgresql_handover(context: Context) -> Report:
    """From the release in one process to the entry in another."""
    pauses = {"notify": 0.002, "aiolock": 0.002, "pg_advisory_lock": 0.002}
    report = _handover(
        context, "PostgreSQL", pauses | {f"polling row {interval}": interval for interval in INTERVALS}
    )
    report.notes.append("notify: a bare NOTIFY and its arrival at a bare listener, driven in the same way.")
    report.compare("p50, aiolock / a bare NOTIFY", "aiolock", "notify", "p50", 2, at_most=True)
    for peer in ("pg_advisory_lock", _quickest(report, "polling row")):
        report.mention("aiolock", peer, "p50")
    return report


def _postgresql_renewal(context: PostgreSQLContext) -> Report:
    """A thousand locks that one client holds."""

    def play(who: str, count: int, ttl: float, seconds: float) -> Found:
        seen: list[tuple[Counter[str], float]] = []
        with context.logging() as statements:
            context.workers.one(
                "kept",
                who=who,
                url=context.url,
                count=count,
                ttl=ttl,
                seconds=seconds,
                between=lambda _: seen.append((statements(), context.processor_seconds())),
            )
        (before, start), (after, end) = seen
        return after - before, end - start

    report = _renewal(context, "PostgreSQL", ["expiring rows"], "update + select", play)
    _one_read(report)
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
    report = _free(context, "SQLite", ["aiolock", *others])
    report.notes.append(
        "“bare sqlite” is no lock, only one upsert and one update, each flushed; “lazy” and aiolock flush the first one only."
    )
    for other in others:
        report.mention("aiolock", other, "rate")
    return report


def _sqlite_hot(context: Context) -> Report:
    """One lock that a hundred tasks of four processes want, drained."""
    report = _hot(context, "SQLite", "bare sqlite", [f"flock {interval}" for interval in INTERVALS], DRAIN)
    _beats(report, "flock", 2)
    report.notes.append("flock: a lock of a file, tried again and again, as filelock does.")
    return report


def _sqlite_handover(context: Context) -> Report:
    """From the release in one process to the entry in another."""
    report = _handover(context, "SQLite", {"aiolock": 0.01} | {f"flock {each}": each for each in INTERVALS})
    report.mention("aiolock", _quickest(report, "flock"), "p50")
    return report


def _sqlite_renewal(context: Context) -> Report:
    """A thousand locks that one client holds."""

    def play(who: str, count: int, ttl: float, seconds: float) -> Found:
        found = context.workers.one("kept", who=who, url=context.url, count=count, ttl=ttl, seconds=seconds)
        return Counter(found["statements"]), found["processor"]

    report = _renewal(context, "SQLite", [], "bare sqlite", play)
    _one_read(report)
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
    report = _free(context, "memcached", ["aiolock", "add + delete", "polling add 0.1"])
    report.notes.append("“add + delete” is no lock, only the two commands.")
    for other in ("add + delete", "polling add 0.1"):
        report.mention("aiolock", other, "rate")
    return report


def _memcached_hot(context: Context) -> Report:
    """One lock that a hundred tasks of four processes want, drained."""
    polling = [f"polling add {interval}" for interval in INTERVALS]
    report = _hot(context, "memcached", "add + delete", polling, DRAIN)
    _beats(report, "polling add", 2)
    return report


def _memcached_spread(context: Context) -> Report:
    """A hundred locks, each wanted by one task of each of four processes, and held for 5 ms."""
    return _spread(context, "memcached", "add + delete", [], ["polling add"], DRAIN)


def _memcached_handover(context: Context) -> Report:
    """From the release in one process to the entry in another."""
    pauses = {"aiolock": 0.01} | {f"polling add {each}": each for each in INTERVALS}
    report = _handover(context, "memcached", pauses)
    report.mention("aiolock", _quickest(report, "polling add"), "p50")
    return report


def _memcached_late(context: Context) -> Report:
    """The same after a long wait, in which our clients poll less and less often."""
    waited = context.count(5, 2)
    pauses = {"aiolock": 1.0, "polling add 0.1": 0.1}
    report = _handover(context, "memcached", pauses, settle=waited, count=(6, 2))
    report.name, report.title = "late", f"{report.title}, after a wait of {waited} s or more"
    return report


def _memcached_renewal(context: MemcachedContext) -> Report:
    """A thousand locks that one client holds."""

    def play(who: str, count: int, ttl: float, seconds: float) -> Found:
        context.flush()
        seen: list[Found] = []
        context.workers.one(
            "kept",
            who=who,
            url=context.url,
            count=count,
            ttl=ttl,
            seconds=seconds,
            between=lambda _: seen.append((context.commands(), context.processor_seconds())),
        )
        (before, start), (after, end) = seen
        return after - before, end - start

    report = _renewal(context, "memcached", [], "touch", play)
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
