"""What a server must not be, and what it promises."""

from __future__ import annotations

import re
from collections.abc import Mapping

from aiolock.backends.mysql.driver import Result
from aiolock.errors import BackendRefused, UnsafeBackend

__all__ = ["GALERA", "cluster", "processlist", "promises", "refuse", "statements_logged", "variables"]

GALERA = "Galera"


def variables(answers: list[Result]) -> dict[str, str]:
    """The global variables in the answers to the set-up of a session."""
    return {str(name): str(value) for name, value in answers[-2].rows}


def refuse(facts: Mapping[str, str], mode: str, address: str) -> None:
    """Raise if no lock may be taken here: on a replica, or by session where sessions are local to one of several nodes."""
    for name in ("read_only", "super_read_only", "innodb_read_only"):
        # MariaDB 12 and some services say more than ON and OFF.
        if facts.get(name, "OFF").upper() not in {"OFF", "0"}:
            raise BackendRefused(
                f"{address}: {name} is on, so this is a replica or on its way to be one, and locks taken here exclude "
                "nobody elsewhere: connect to the server that takes writes"
            )
    if statements_logged(facts, mode):
        raise UnsafeBackend(
            f"{address}: binlog_format is STATEMENT, with which the server refuses every write of these locks, and with which "
            "replicas would make other ends of leases of them: set binlog_format=ROW or MIXED, or use ?mode=session"
        )
    many = cluster(facts)
    if many and mode != "lease":
        raise UnsafeBackend(
            f"{address}: this server is part of {many}, where user locks and row locks are each node's own: "
            "use ?mode=lease"
        )


def statements_logged(facts: Mapping[str, str], mode: str) -> bool:
    """Whether rows of locks would be written by a server whose binary log has the statements and not the rows."""
    return (
        mode != "session"
        and facts.get("log_bin", "OFF").upper() in {"ON", "1"}
        and facts.get("binlog_format", "").upper() == "STATEMENT"
    )


def cluster(facts: Mapping[str, str]) -> str:
    """Which kind of cluster with several nodes that take writes this server is a part of; empty if of none."""
    if facts.get("wsrep_on", "OFF").upper() in {"ON", "1"}:
        return GALERA
    if facts.get("group_replication_single_primary_mode", "ON").upper() in {"OFF", "0"}:
        return "group replication with several primaries"
    return ""


def promises(facts: Mapping[str, str], mode: str) -> frozenset[str]:
    """What this deployment promises, in the words of ``require=``."""
    words = {"exclusion", "no-eviction", "push"}
    if mode != "row" or "MariaDB" in facts.get("version", ""):
        # MySQL 8 prefers the transaction that blocks most others.
        words.add("fifo")
    if mode == "lease":
        words |= {"fencing", "keep"}
        if facts.get("innodb_flush_log_at_trx_commit") == "1":
            words.add("survives-restart")
    return frozenset(words)


def processlist(facts: Mapping[str, str]) -> str:
    """Return the table with the server's sessions that can be read whatever their statements contain.

    The one in `information_schema` is utf8mb3 on MySQL, and refuses itself while a statement with an emoji runs (error
    3854); the other one came with MySQL 8.0.22.
    """
    version = facts.get("version", "")
    numbers = tuple(map(int, re.findall(r"\d+", version)[:3]))
    if (
        "MariaDB" in version
        or numbers < (8, 0, 22)
        or facts.get("performance_schema", "OFF") not in {"ON", "1"}
    ):
        return "information_schema.processlist"
    return "performance_schema.processlist"
