"""Diagnose a PostgreSQL server: findings."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

from aiolock.backends.diagnosis import encryption, failure, note, numbers, ok, round_trip, warning
from aiolock.backends.postgresql import schema
from aiolock.backends.postgresql.connection import (
    OLDEST,
    UNTRIED_VERSION,
    Driver,
    Facts,
    explain,
    login,
    primary,
    swaps_sessions,
)
from aiolock.backends.postgresql.errors import translate
from aiolock.backends.postgresql.replication import Replication, gap
from aiolock.backends.postgresql.schema import Statements
from aiolock.backends.postgresql.url import Address
from aiolock.core.backend import Settings
from aiolock.errors import BackendError, shorten
from aiolock.types import Finding

__all__ = ["diagnose", "findings"]

OLD = 600.0
"""Seconds after which an open transaction is worth a word."""
FEW = 50
"""Connections below which clients, of which each needs two, may run out of them."""


async def diagnose(
    address: Address, statements: Statements, settings: Settings, *, furthest: bool = False
) -> list[Finding]:
    """Return findings about a server, over two new connections, also about one that clients refuse to use.

    Raises :class:`BackendError` if it cannot be asked. Cancelling it changes nothing.
    """
    address = await primary(address, statements, settings)
    driver, facts = await login(address, statements, settings)
    drivers = [driver]
    try:
        try:
            other, _ = await login(address, statements, settings)
        except BackendError as error:
            raise explain(error, drivers) from error
        drivers.append(other)
        # No call is cancelled: the connections end when the time is over.
        timer = asyncio.get_running_loop().call_later(settings.command_timeout, _terminate, drivers)
        try:
            return await _ask(drivers, facts, address, statements, settings, furthest=furthest)
        except BackendError:
            raise
        except Exception as error:
            raise translate(error, address.text) from error
        finally:
            timer.cancel()
    finally:
        _terminate(drivers)


def _terminate(drivers: list[Driver]) -> None:
    for driver in drivers:
        driver.terminate()


async def _ask(
    drivers: list[Driver],
    facts: Facts,
    address: Address,
    statements: Statements,
    settings: Settings,
    *,
    furthest: bool,
) -> list[Finding]:
    driver, other = drivers
    sent = settings.clock()
    rows = await driver.fetch(statements("server_settings"))
    trip = settings.clock() - sent
    found = findings(facts, {str(name): str(value) for name, value in rows}, furthest=furthest)
    swaps = await swaps_sessions(driver, other, statements)
    found.append(_pooler(pooled=driver.pooled, swaps=swaps))
    encrypted = bool(await driver.fetchval(statements("encrypted")))
    found.append(encryption(encrypted=encrypted, local=address.local, advice="use tls=verify"))
    found.append(round_trip([trip], settings.ttl))
    found.append(_transactions(await driver.fetchrow(statements("oldest_transaction"))))
    found.append(await _table(driver, statements, address.text))
    return found


def findings(facts: Facts, variables: Mapping[str, str], *, furthest: bool = False) -> list[Finding]:
    """Judge a server's facts and settings; for ``furthest`` see :func:`gap`."""
    return [
        *_version(facts),
        *_server(facts),
        *_durability(facts),
        _failover(facts.replication, furthest=furthest),
        *_limits(variables),
    ]


def _version(facts: Facts) -> Iterator[Finding]:
    product = facts.version.split(" (")[0].split(",")[0]
    if not facts.version.startswith("PostgreSQL "):
        yield failure(
            "version",
            f"this is no PostgreSQL, but {product}",
            "connect to a PostgreSQL of version 15 or later",
        )
    elif numbers(facts.version)[0] < OLDEST:
        yield failure("version", f"{product} is older than {OLDEST}", f"use PostgreSQL {OLDEST} or later")
    elif UNTRIED_VERSION in facts.version:
        yield warning(
            "version",
            f"this is YugabyteDB ({product}), on which locks are experimental: they were never run on it, and clients do not "
            "promise exclusion",
            "connect to a PostgreSQL",
        )
    else:
        yield ok("version", product)


def _pooler(*, pooled: bool, swaps: bool) -> Finding:
    if swaps:
        return failure(
            "pooler",
            "a pooler such as PgBouncer stands in between and swaps sessions, and clients refuse to open here",
            "have it pool sessions (pool_mode = session), or connect to the server itself",
        )
    if pooled:
        return ok("pooler", "a pooler stands in between, which gives each connection a session of its own")
    return ok("pooler", "the connection is one to the server itself")


def _server(facts: Facts) -> Iterator[Finding]:
    if facts.recovering:
        yield failure(
            "recovery",
            "the server is a standby or recovers, takes no writes, and clients refuse to open here",
            "connect to the primary",
        )
    else:
        yield ok("recovery", "the server takes writes")


def _durability(facts: Facts) -> Iterator[Finding]:
    off = [name for name in ("fsync", "full_page_writes") if getattr(facts, name) != "on"]
    for name in off:
        yield warning(
            name,
            "it is off: a machine that dies may forget grants that clients have, and grant the same locks again",
            f"set {name} = on",
        )
    if not off:
        yield ok("durability", "every grant is on disk before the client has it")


def _failover(replication: Replication, *, furthest: bool) -> Finding:
    setting = "synchronous_standby_names"
    if why := gap(replication, furthest=furthest):
        return note(
            setting,
            f"{why}; a failover may lose the last grants, and two clients may believe to hold a lock until the next renewal",
            "list in it by name every standby that may take over, and wait for all of them, as in FIRST 2 (a, b); or, where your "
            "failover promotes the standby that has most, say so by ?failover=furthest",
        )
    if furthest:
        return ok(
            setting, "a grant is on a standby before the client has it, and the one that has most takes over"
        )
    return ok(setting, "every grant is on each standby that may take over before the client has it")


def _limits(variables: Mapping[str, str]) -> Iterator[Finding]:
    most = int(variables.get("max_connections", 0))
    if most < FEW:
        yield note("max_connections", f"it is {most}, and each client needs two", "raise it")
    else:
        yield ok("max_connections", f"there may be {most}")


def _transactions(oldest: Mapping[str, Any] | None) -> Finding:
    if oldest is None or oldest["age"] < OLD:
        return ok("transactions", f"none that this role may see is open for longer than {OLD / 60:g} minutes")
    return warning(
        "transactions",
        f"one is open for {oldest['age'] / 60:.0f} minutes ({shorten(oldest['what'])}): until it ends, the server keeps every version of "
        "every row, and the table for locks grows with each turn of a lock",
        "end it, or have it commit in portions; take backups and reports from a standby",
    )


async def _table(driver: Driver, statements: Statements, address: str) -> Finding:
    try:
        there = await schema.examine(driver, statements, address)
    except BackendError as error:
        return failure(
            "table", f"clients refuse to open with this table ({error})", "do what the message says"
        )
    if there:
        return ok("table", f"{statements.table} is as it must be, and this role may use it")
    return note(
        "table",
        f"{statements.table} is not there yet",
        "open a client with schema=auto once, or have an administrator run the statements of the documentation",
    )
