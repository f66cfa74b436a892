"""What an ensemble promises, judged by the list of its members that every server shows."""

from __future__ import annotations

__all__ = ["ALWAYS", "CONFIG", "promises", "voters"]

ALWAYS = frozenset({"exclusion", "fencing", "fifo", "no-eviction", "push", "survives-restart"})
"""What a single server promises as well: it has every change in its log before it answers, and forgets none."""

CONFIG = "/zookeeper/config"
"""Where servers since 3.5 show who belongs to the ensemble; the node of a server that stands alone is empty."""

ENOUGH = 3
"""Servers that vote, of which one can die and leave a majority."""


def promises(config: bytes | None, named: int, *, simple: bool) -> frozenset[str]:
    """What is promised, in the words of ``require=``.

    ``config`` is what the servers say of their members, ``None`` if we may not read it: then the number of servers that
    the address names counts.
    """
    words = set(ALWAYS)
    if simple:
        words.remove("fifo")
    if (named if config is None else voters(config)) >= ENOUGH:
        words.add("survives-failover")
    return frozenset(words)


def voters(config: bytes) -> int:
    """How many servers of an ensemble vote; 0 for a server that stands alone."""
    # server.1=host:2888:3888:participant;0.0.0.0:2181, without a role: it votes
    members = [line for line in config.decode("utf-8", "replace").splitlines() if line.startswith("server.")]
    return sum(":observer" not in member.partition(";")[0] for member in members)
