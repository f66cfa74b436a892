"""What a server is like that locks stand on: settings that decide what survives, and what would be better."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from aiolock.backends.mysql.address import Address
from aiolock.backends.mysql.driver import Driver
from aiolock.backends.mysql.failures import translate
from aiolock.backends.mysql.probe import cluster, statements_logged
from aiolock.backends.mysql.statements import Statements, quote
from aiolock.backends.mysql.tables import examine
from aiolock.contract import Finding, Settings
from aiolock.errors import LockError, UnsafeBackend, shorten
from aiolock.info import Level

__all__ = ["SETTINGS", "diagnose", "findings"]

SETTINGS = (
    "version",
    "version_comment",
    "read_only",
    "super_read_only",
    "innodb_flush_log_at_trx_commit",
    "log_bin",
    "sync_binlog",
    "wsrep_on",
    "group_replication_single_primary_mode",
    "max_connections",
    "wait_timeout",
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
    "binlog_format",
    "innodb_rollback_on_timeout",
    "innodb_snapshot_isolation",
    "rpl_semi_sync_master_enabled",
    "rpl_semi_sync_source_enabled",
)

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
"""What sessions begin with where nobody has changed it; by a setting that statements of locks mind."""
FEW = 50
"""Connections below which clients that wait for many locks may find none."""


async def diagnose(address: Address, statements: Statements, settings: Settings, mode: str) -> list[Finding]:
    """Ask a server on a connection of its own, so that one can be asked that clients refuse to use."""
    try:
        async with asyncio.timeout(settings.command_timeout):
            driver = await address.connect(lambda: None)
            try:
                return await _ask(driver, address, statements, settings, mode)
            finally:
                driver.quit()
    except LockError:
        raise
    except Exception as error:
        raise translate(error, address.text) from error


async def _ask(
    driver: Driver, address: Address, statements: Statements, settings: Settings, mode: str
) -> list[Finding]:
    await driver.execute(statements("settings"))
    names = ", ".join(map(quote, SETTINGS))
    sent = settings.clock()
    [variables] = await driver.execute(f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({names})")
    trip = settings.clock() - sent
    found = findings({str(name): str(value) for name, value in variables.rows}, mode)
    [cipher] = await driver.execute("SHOW SESSION STATUS LIKE 'Ssl_cipher'")
    found.append(_link(str(cipher.rows[0][1]) if cipher.rows else "", local=address.local))
    found.append(_distance(trip, settings.ttl))
    if mode != "session":
        found.append(await _tables(driver, statements, address.text))
    return found


def findings(facts: Mapping[str, str], mode: str) -> list[Finding]:
    """What the settings of a server mean for locks of a mode; a setting that is not to be seen is said so."""
    return [
        _version(facts),
        _writes(facts),
        *_durability(facts, mode),
        _nodes(facts, mode),
        *_sessions(facts, mode),
        *_binary_log(facts, mode),
        *_transactions(facts, mode),
        _limits(facts),
    ]


def _on(facts: Mapping[str, str], name: str) -> bool:
    return facts.get(name, "OFF").upper() not in {"OFF", "0", ""}


def _version(facts: Mapping[str, str]) -> Finding:
    text = facts.get("version")
    if text is None:
        return Finding(Level.NOTE, "version", "the server does not say which version it is")
    product = "MariaDB" if "MariaDB" in text else "MySQL"
    digits = text.split("-")[0].split(".")
    oldest = OLDEST[product]
    number = tuple(int(part) for part in digits[:2] if part.isdigit())
    if number < oldest:
        return Finding(
            Level.ERROR,
            "version",
            f"{product} {text} is older than {'.'.join(map(str, oldest))}, and lacks statements that locks need",
            f"use {product} {'.'.join(map(str, oldest))} or later",
        )
    return Finding(Level.OK, "version", f"{product} {text}")


def _writes(facts: Mapping[str, str]) -> Finding:
    on = [name for name in ("read_only", "super_read_only") if _on(facts, name)]
    if on:
        return Finding(
            Level.ERROR,
            on[0],
            "the server takes no writes: it is a replica, or on its way to be one, and clients refuse to open here",
            "connect to the server that takes writes",
        )
    if "read_only" not in facts:
        return Finding(Level.NOTE, "read_only", "whether the server takes writes may not be read")
    return Finding(Level.OK, "read_only", "the server takes writes")


def _durability(facts: Mapping[str, str], mode: str) -> list[Finding]:
    if mode != "lease":
        return [
            Finding(
                Level.NOTE,
                "mode",
                f"in ?mode={mode} a restart, a failover and the end of a connection free locks at once, and tokens rise "
                "only while the server's clock is not set back",
                "use ?mode=lease where that matters",
            )
        ]
    flush = facts.get("innodb_flush_log_at_trx_commit")
    found = []
    if flush is None:
        found.append(Finding(Level.NOTE, "innodb_flush_log_at_trx_commit", "may not be read"))
    elif flush != "1":
        found.append(
            Finding(
                Level.WARNING,
                "innodb_flush_log_at_trx_commit",
                f"it is {flush}: a server that dies forgets the grants of about the last second, and may grant the "
                "same lock again",
                "set it to 1",
            )
        )
    else:
        found.append(
            Finding(Level.OK, "innodb_flush_log_at_trx_commit", "every grant is on disk before it is told")
        )
    semi = _on(facts, "rpl_semi_sync_master_enabled") or _on(facts, "rpl_semi_sync_source_enabled")
    if _on(facts, "log_bin"):
        if facts.get("sync_binlog") != "1":
            found.append(
                Finding(
                    Level.WARNING,
                    "sync_binlog",
                    f"it is {facts.get('sync_binlog', 'not to be read')}: after a crash replicas may not know the last grants",
                    "set it to 1",
                )
            )
        if not semi and not cluster(facts):
            found.append(
                Finding(
                    Level.NOTE,
                    "replication",
                    "the binary log is on and replicas, if there are any, get grants after they were told: a failover may "
                    "lose the last ones, and two may believe to hold a lock until the next renewal",
                    "use semi-synchronous replication (AFTER_SYNC), or Galera",
                )
            )
    return found


def _nodes(facts: Mapping[str, str], mode: str) -> Finding:
    many = cluster(facts)
    if not many:
        return Finding(Level.OK, "cluster", "one server takes the writes")
    if mode != "lease":
        return Finding(
            Level.ERROR,
            "cluster",
            f"this is {many}, where user locks and row locks are each node's own",
            "use ?mode=lease",
        )
    return Finding(
        Level.NOTE,
        "cluster",
        f"this is {many}: one lock has one holder on all nodes, but waiters are in order and woken at once only on the "
        "holder's node; on others they look, every 5 to 250 ms",
        "have all clients of a namespace write to one node",
    )


def _sessions(facts: Mapping[str, str], mode: str) -> list[Finding]:
    """Settings that sessions begin with. Ours set them for themselves; those of the caller's connections stay."""
    theirs = ", but not on a connection of yours, as with connection=" if mode == "row" else ""
    found = {
        name: facts[name] for name, usual in USUAL.items() if facts.get(name, "").upper() not in usual | {""}
    }
    if init := facts.get("init_connect", ""):
        found["init_connect"] = shorten(init)
    return [
        Finding(
            Level.OK,
            name,
            f"it is {value}: overridden by the settings that every connection for locks begins with{theirs}",
        )
        for name, value in found.items()
    ] or [
        Finding(
            Level.OK, "session settings", "nothing is set that every connection for locks has to override"
        )
    ]


def _binary_log(facts: Mapping[str, str], mode: str) -> list[Finding]:
    name = "binlog_format"
    if statements_logged(facts, mode):
        return [
            Finding(
                Level.ERROR,
                name,
                "it is STATEMENT, with which the server refuses every write of these locks, and clients refuse to open here",
                "set binlog_format=ROW or MIXED, or use ?mode=session",
            )
        ]
    if _on(facts, "log_bin") and name in facts:
        return [Finding(Level.OK, name, f"it is {facts[name]}")]
    return []


def _transactions(facts: Mapping[str, str], mode: str) -> list[Finding]:
    """Of the row mode, whose transactions may be the caller's; those of ours have nothing to lose, and begin anew."""
    if mode != "row":
        return []
    return [_rollback(facts), *_snapshots(facts)]


def _rollback(facts: Mapping[str, str]) -> Finding:
    name = "innodb_rollback_on_timeout"
    if not _on(facts, name):
        return Finding(
            Level.OK, name, "a lock that is not to be had leaves the rest of a transaction as it was"
        )
    return Finding(
        Level.NOTE,
        name,
        "it is on: a lock that is not to be had would end your whole transaction, so connection= is refused; other locks "
        "do not mind",
        "switch it off, which needs a restart of the server, or lock without connection=",
    )


def _snapshots(facts: Mapping[str, str]) -> list[Finding]:
    """Only where the server has it; our own transactions are READ COMMITTED, and do not mind."""
    name = "innodb_snapshot_isolation"
    if name not in facts:
        return []
    if not _on(facts, name):
        return [Finding(Level.OK, name, "a transaction may lock what is younger than what it has read")]
    return [
        Finding(
            Level.NOTE,
            name,
            "it is on: with connection=, the first lock of a name that nobody has used before rolls back a transaction of "
            "yours that has read something already (DeadlockDetected)",
            "take locks before anything else, use READ COMMITTED, or begin again with aiolock.mysql.retry_on_conflict()",
        )
    ]


def _limits(facts: Mapping[str, str]) -> Finding:
    most = facts.get("max_connections")
    if most is None:
        return Finding(Level.NOTE, "max_connections", "may not be read")
    if int(most) < FEW:
        return Finding(
            Level.NOTE,
            "max_connections",
            f"it is {most}: clients need two or three connections each, and one for each lock that they wait for",
            "raise it, or give clients a small connections=",
        )
    return Finding(Level.OK, "max_connections", f"there may be {most}")


def _link(cipher: str, *, local: bool) -> Finding:
    if cipher:
        return Finding(Level.OK, "tls", f"the connection is encrypted ({cipher})")
    if local:
        return Finding(Level.OK, "tls", "the connection does not leave this machine")
    return Finding(
        Level.WARNING,
        "tls",
        "the connection is not encrypted: whoever can listen learns labels and names",
        "use tls=verify",
    )


def _distance(trip: float, ttl: float) -> Finding:
    if trip < ttl / 30:
        return Finding(Level.OK, "round trip", f"one question and its answer take {trip * 1000:.1f} ms")
    return Finding(
        Level.WARNING,
        "round trip",
        f"one question and its answer take {trip * 1000:.0f} ms, which is long for a ttl of {ttl:g} s",
        "use a longer ttl, or a server that is nearer",
    )


async def _tables(driver: Driver, statements: Statements, address: str) -> Finding:
    try:
        await driver.execute(statements("schema_there"))
        await examine(driver.execute, statements, address)
    except UnsafeBackend as error:
        return Finding(
            Level.ERROR,
            "tables",
            f"the tables for locks cannot be used, and clients refuse to open here ({error})",
            "do what the message says",
        )
    except Exception as error:  # noqa: BLE001 - whatever the driver raises is what there is to tell
        return Finding(
            Level.ERROR,
            "tables",
            f"the tables for locks cannot be used ({error})",
            "open a client with schema=auto once, or run what aiolock.mysql.ddl() returns",
        )
    return Finding(Level.OK, "tables", f"the tables for locks are there, in data format {statements.format}")
