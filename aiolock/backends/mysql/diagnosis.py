"""Diagnose a MySQL server: capabilities and findings."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping

from aiolock.backends.diagnosis import encryption, failure, note, numbers, ok, round_trip, warning
from aiolock.backends.experimental import UNTRIED
from aiolock.backends.mysql.context import quote
from aiolock.backends.mysql.errors import translate
from aiolock.backends.mysql.protocol import Driver, Result
from aiolock.backends.mysql.schema import TableStatements, examine
from aiolock.backends.mysql.url import Address
from aiolock.core.backend import Settings
from aiolock.errors import BackendRefused, LockError, UnsafeBackend, shorten
from aiolock.types import Finding

__all__ = [
    "GALERA",
    "capabilities",
    "cluster",
    "diagnose",
    "experimental",
    "findings",
    "processlist",
    "refuse",
    "refuse_product",
    "variables",
]

GALERA = "Galera"

DURABLE = ("lease", "rows")
"""The modes whose locks are rows that outlive connections and the server."""

REFUSED = ("Vitess", "PlanetScale", "OceanBase")
"""Servers that speak MySQL's protocol and keep user locks, sessions or row locks in another way."""
UNTRIED_PRODUCTS = ("TiDB",)
"""Servers of which it is not known whether all that locks rely on is as on MySQL."""
ADVICE = "connect to a MySQL or MariaDB"

SETTINGS = [
    "version",
    "version_comment",
    "ob_query_timeout",
    "read_only",
    "super_read_only",
    "innodb_flush_log_at_trx_commit",
    "log_bin",
    "sync_binlog",
    "binlog_format",
    "wsrep_on",
    "group_replication_single_primary_mode",
    "rpl_semi_sync_master_enabled",
    "rpl_semi_sync_source_enabled",
    "max_connections",
    "init_connect",
    "autocommit",
    "completion_type",
    "sql_safe_updates",
    "tx_isolation",
    "transaction_isolation",
    "tx_read_only",
    "transaction_read_only",
    "max_statement_time",
    "max_execution_time",
    "innodb_rollback_on_timeout",
    "innodb_snapshot_isolation",
]
"""The variables that are judged."""

OLDEST = {"MariaDB": (10, 6), "MySQL": (8, 0)}

USUAL = {
    "autocommit": {"ON", "1"},
    "completion_type": {"NO_CHAIN", "0"},
    "sql_safe_updates": {"OFF", "0"},
    "tx_isolation": {"REPEATABLE-READ", "READ-COMMITTED"},
    "transaction_isolation": {"REPEATABLE-READ", "READ-COMMITTED"},
    "tx_read_only": {"OFF", "0"},
    "transaction_read_only": {"OFF", "0"},
    "max_statement_time": {"0", "0.000000"},
    "max_execution_time": {"0"},
}
"""The default values of session settings that affect the statements of locks."""

FEW = 50
"""Connections below which clients that wait for many locks may run out of them."""

# --- products
# Named by their version as the greeting of the server and its variables have it, either of which an administrator may have
# set to another product's.


def _product(names: Iterable[str], *texts: str) -> str:
    """Return the one of the ``names`` that a text contains, or an empty string."""
    text = " ".join(texts).lower()
    return next((name for name in names if name.lower() in text), "")


def refuse_product(greeting: str, address: str) -> None:
    """Raise :class:`BackendRefused` for the version of a server that is only spoken to as a MySQL."""
    if product := _product(REFUSED, greeting):
        raise BackendRefused(f"{address}: {_stranger(product)}: {ADVICE}")


def _stranger(product: str) -> str:
    return (
        f"this is {product}, which speaks MySQL's protocol, and whose sessions, user locks and rows are not those that locks "
        "here rely on"
    )


def _facts_of_product(facts: Mapping[str, str]) -> tuple[str, ...]:
    ocean = "OceanBase" if "ob_query_timeout" in facts else ""
    return facts.get("version", ""), facts.get("version_comment", ""), ocean


def experimental(facts: Mapping[str, str]) -> str:
    """Return the name of a server on which locks were never run, or an empty string."""
    return _product(UNTRIED_PRODUCTS, *_facts_of_product(facts))


# --- capabilities


def variables(answers: list[Result]) -> dict[str, str]:
    """Return the global variables from the answers to the set-up of a session."""
    return {str(name): str(value) for name, value in answers[-2].rows}


def _on(facts: Mapping[str, str], name: str, default: str = "OFF") -> bool:
    # MariaDB 12 and some services use more values than ON and OFF.
    return (facts.get(name) or default).upper() not in {"OFF", "0"}


def refuse(facts: Mapping[str, str], mode: str, address: str) -> None:
    """Raise :class:`BackendRefused` on a replica and another product, :class:`UnsafeBackend` where locks of this mode do not exclude."""
    refuse_product(" ".join(_facts_of_product(facts)), address)
    for name in ("read_only", "super_read_only", "innodb_read_only"):
        if _on(facts, name):
            raise BackendRefused(
                f"{address}: {name} is on, so this is a replica or on its way to be one, and locks taken here do not "
                "exclude clients of other servers: connect to the server that takes writes",
                # It may be promoted.
                retryable=True,
            )
    if _statements_logged(facts, mode):
        raise UnsafeBackend(
            f"{address}: binlog_format is STATEMENT, with which the server refuses every write of these locks, and with which "
            "replicas would make other ends of leases of them: set binlog_format=ROW or MIXED, or use ?mode=session"
        )
    many = cluster(facts)
    if many and mode not in DURABLE:
        raise UnsafeBackend(
            f"{address}: this server is part of {many}, where user locks and row locks are each node's own: "
            "use ?mode=lease"
        )


def _statements_logged(facts: Mapping[str, str], mode: str) -> bool:
    """Return True if the binary log would have the statements that write locks, and not their rows."""
    logged = facts.get("binlog_format", "").upper()
    return mode != "session" and _on(facts, "log_bin") and logged == "STATEMENT"


def cluster(facts: Mapping[str, str]) -> str:
    """Return the kind of cluster whose nodes all take writes, or an empty string."""
    if _on(facts, "wsrep_on"):
        return GALERA
    primary = _on(facts, "group_replication_single_primary_mode", "ON")
    return "" if primary else "group replication with several primaries"


def capabilities(facts: Mapping[str, str], mode: str) -> frozenset[str]:
    """Return the capabilities of this deployment."""
    found = {"exclusion", "no-eviction", "push"}
    if mode != "row" or "MariaDB" in facts.get("version", ""):
        # MySQL 8 prefers the transaction that blocks most others.
        found.add("fifo")
    if mode in DURABLE:
        found |= {"fencing", "keep"}
        if facts.get("innodb_flush_log_at_trx_commit") == "1":
            found.add("survives-restart")
    return frozenset(found - UNTRIED if experimental(facts) else found)


def processlist(facts: Mapping[str, str]) -> str:
    """Return the table with the server's sessions that can be read whatever their statements contain.

    The one in `information_schema` is utf8mb3 on MySQL, and refuses itself while a statement with an emoji runs (error
    3854); the other one came with MySQL 8.0.22.
    """
    version = facts.get("version", "")
    if "MariaDB" in version or numbers(version) < (8, 0, 22) or not _on(facts, "performance_schema"):
        return "information_schema.processlist"
    return "performance_schema.processlist"


# --- findings


async def diagnose(
    address: Address, statements: TableStatements, settings: Settings, mode: str
) -> list[Finding]:
    """Return findings about a server, over a new connection, also about one that clients refuse to use.

    Raises :class:`BackendError` if it cannot be asked. Cancelling it changes nothing.
    """
    try:
        async with asyncio.timeout(settings.command_timeout):
            driver = await address.connect(lambda: None)
            try:
                if stranger := _product(REFUSED, driver.server_version):
                    # It may not understand what is asked next.
                    return [failure("version", _stranger(stranger), ADVICE)]
                await driver.execute(statements("settings"))
                names = ", ".join(map(quote, SETTINGS))
                sent = settings.clock()
                [rows] = await driver.execute(f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({names})")
                trip = settings.clock() - sent
                [cipher] = await driver.execute("SHOW SESSION STATUS LIKE 'Ssl_cipher'")
                return [
                    *findings({str(name): str(value) for name, value in rows.rows}, mode),
                    encryption(
                        encrypted=bool(cipher.rows and cipher.rows[0][1]),
                        local=address.local,
                        advice="use tls=verify",
                    ),
                    round_trip([trip], settings.ttl),
                    *([await _tables(driver, statements, address.text)] if mode != "session" else ()),
                ]
            finally:
                driver.quit()
    except LockError:
        raise
    except Exception as error:
        raise translate(error, address.text) from error


def findings(facts: Mapping[str, str], mode: str) -> list[Finding]:
    """Judge the settings of a server for locks of a mode."""
    return [*_server(facts, mode), *_durability(facts, mode), *_nodes(facts, mode), *_sessions(facts, mode)]


def _server(facts: Mapping[str, str], mode: str) -> Iterator[Finding]:
    text = facts.get("version")
    product = "MariaDB" if "MariaDB" in (text or "") else "MySQL"
    least = ".".join(map(str, OLDEST[product]))
    if stranger := _product(REFUSED, *_facts_of_product(facts)):
        yield failure("version", _stranger(stranger), ADVICE)
    elif untried := experimental(facts):
        yield warning(
            "version",
            f"this is {untried} {text}, on which locks are experimental: they were never run on it, and clients do not "
            "promise exclusion",
            ADVICE,
        )
    elif text is None:
        yield note("version", "the server does not say which version it is")
    elif numbers(text)[:2] < OLDEST[product]:
        old = f"{product} {text} is older than {least}, and lacks statements that locks need"
        yield failure("version", old, f"use {product} {least} or later")
    else:
        yield ok("version", f"{product} {text}")
    if on := [name for name in ("read_only", "super_read_only") if _on(facts, name)]:
        yield failure(
            on[0],
            "the server takes no writes: it is a replica, or on its way to be one, and clients refuse to open here",
            "connect to the server that takes writes",
        )
    elif "read_only" in facts:
        yield ok("read_only", "the server takes writes")
    else:
        yield note("read_only", "whether the server takes writes may not be read")
    most = facts.get("max_connections")
    if most is None:
        yield note("max_connections", "may not be read")
    elif int(most) < FEW:
        few, advice = f"it is {most}: clients need three connections each", "raise it"
        if mode != "rows":
            few = f"it is {most}: clients need two or three connections each, and one for each lock that they wait for"
            advice = "raise it, or give clients a small connections="
        yield note("max_connections", few, advice)
    else:
        yield ok("max_connections", f"there may be {most}")


def _durability(facts: Mapping[str, str], mode: str) -> Iterator[Finding]:
    if _statements_logged(facts, mode):
        yield failure(
            "binlog_format",
            "it is STATEMENT, with which the server refuses every write of these locks, and clients refuse to open here",
            "set binlog_format=ROW or MIXED, or use ?mode=session",
        )
    elif _on(facts, "log_bin") and "binlog_format" in facts:
        yield ok("binlog_format", f"it is {facts['binlog_format']}")
    if mode not in DURABLE:
        yield note(
            "mode",
            f"in ?mode={mode} a restart, a failover and the end of a connection free locks at once, and tokens rise only "
            "while the server's clock is not set back",
            "use ?mode=lease where that matters",
        )
        return
    flush = facts.get(subject := "innodb_flush_log_at_trx_commit")
    if flush is None:
        yield note(subject, "may not be read")
    elif flush == "1":
        yield ok(subject, "every grant is on disk before the client has it")
    else:
        yield warning(
            subject,
            f"it is {flush}: a server that dies forgets the grants of about the last second, and may grant the same lock again",
            "set it to 1",
        )
    if not _on(facts, "log_bin"):
        return
    if (sync := facts.get("sync_binlog", "not to be read")) != "1":
        yield warning(
            "sync_binlog", f"it is {sync}: after a crash replicas may not know the last grants", "set it to 1"
        )
    semi = _on(facts, "rpl_semi_sync_master_enabled") or _on(facts, "rpl_semi_sync_source_enabled")
    if not semi and not cluster(facts):
        yield note(
            "replication",
            "the binary log is on and replicas, if there are any, get a grant after the client has it: a failover may lose the "
            "last ones, and two clients may believe to hold a lock until the next renewal",
            "use semi-synchronous replication (AFTER_SYNC), or Galera",
        )


def _nodes(facts: Mapping[str, str], mode: str) -> Iterator[Finding]:
    many = cluster(facts)
    if not many:
        yield ok("cluster", "one server takes the writes")
    elif mode == "rows" and many != GALERA:
        primary = "set group_replication_single_primary_mode=ON"
        yield failure("cluster", f"this is {many}, where a read may be older than what others know", primary)
    elif mode in DURABLE:
        yield note(
            "cluster",
            f"this is {many}: one lock has one holder on all nodes, but waiters are in order and woken at once only on the "
            f"holder's node; on others they poll, every {'50' if mode == 'rows' else '5 to 250'} ms",
            "have all clients of a namespace write to one node",
        )
    else:
        own = f"this is {many}, where user locks and row locks are each node's own"
        yield failure("cluster", own, "use ?mode=lease")


def _sessions(facts: Mapping[str, str], mode: str) -> Iterator[Finding]:
    """Judge session defaults, which connections for locks override; the caller's connections, in row mode, keep them."""
    found = {
        name: facts[name] for name, usual in USUAL.items() if facts.get(name, "").upper() not in usual | {""}
    }
    if init := facts.get("init_connect", ""):
        found["init_connect"] = shorten(init)
    theirs = ", but not on a connection of yours, as with connection=" if mode == "row" else ""
    for name, value in found.items():
        text = (
            f"it is {value}: overridden by the settings that every connection for locks begins with{theirs}"
        )
        yield ok(name, text)
    if not found:
        yield ok("session settings", "nothing is set that every connection for locks has to override")
    if mode != "row":
        return
    rollback, snapshot = "innodb_rollback_on_timeout", "innodb_snapshot_isolation"
    if _on(facts, rollback):
        yield note(
            rollback,
            "it is on: a lock that is not to be had would end your whole transaction, so connection= is refused; other locks "
            "do not mind",
            "switch it off, which needs a restart of the server, or lock without connection=",
        )
    else:
        yield ok(rollback, "a lock that is not to be had leaves the rest of a transaction as it was")
    if _on(facts, snapshot):
        yield note(
            snapshot,
            "it is on: with connection=, the first lock of a name that was never used before rolls back a transaction of "
            "yours that has read something already (DeadlockDetected)",
            "take locks before anything else, use READ COMMITTED, or begin again with aiolock.mysql.retry_on_conflict()",
        )
    elif snapshot in facts:
        yield ok(snapshot, "a transaction may lock what is younger than what it has read")


async def _tables(driver: Driver, statements: TableStatements, address: str) -> Finding:
    text = "the tables for locks cannot be used"
    try:
        # Tables of another format may have other names: so they are examined first.
        await examine(driver.execute, statements, address)
        await driver.execute(statements("schema_there"))
    except UnsafeBackend as error:
        refusal = f"{text}, and clients refuse to open here ({error})"
        return failure("tables", refusal, "do what the message says")
    except Exception as error:  # noqa: BLE001 - any error of the driver is a finding
        advice = "open a client with schema=auto once, or run what aiolock.mysql.ddl() returns"
        return failure("tables", f"{text} ({error})", advice)
    return ok("tables", f"the tables for locks are there, in data format {statements.format}")
