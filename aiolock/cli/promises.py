"""The words of ``require=`` in plain sentences: what is promised, what is not, and what would raise it there."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

__all__ = ["PROMISES", "THERE", "Promise", "Sentence", "in_words"]


class Promise(NamedTuple):
    """One word, said in sentences."""

    kept: str
    """What it means where it is promised."""
    missing: str
    """What may happen where it is not."""
    raised: str
    """What would raise it, whichever server it is."""


class Otherwise(NamedTuple):
    """What is said instead on one server; empty where that is nothing else."""

    raised: str
    missing: str = ""


class Sentence(NamedTuple):
    """What is said about one word on one server."""

    word: str
    promised: bool
    text: str
    advice: str = ""


PROMISES = {
    "exclusion": Promise(
        "at most one holder at a time, as each holder's own clock sees it",
        "two holders can be inside at once",
        "use a server that promises it; do not rely on this one",
    ),
    "fencing": Promise(
        "every grant has a token greater than all before it, so that a late write can be refused",
        "tokens may repeat or fall, so a resource cannot tell a late write from a good one",
        "use a server that promises it: Redis, ZooKeeper, or MySQL with mode=lease",
    ),
    "fifo": Promise(
        "clients are served in the order in which they asked",
        "clients may overtake each other while they wait",
        "use a server that promises it: Redis, ZooKeeper, or MySQL with mode=lease",
    ),
    "keep": Promise(
        "a released lock can stay taken for a while, for jobs that must not run again at once",
        "release(keep=...) and once(at_least=...) are refused",
        "use a server that promises it: Redis, or MySQL with mode=lease",
    ),
    "push": Promise(
        "who waits is told when its turn comes, without asking again and again",
        "who waits asks again and again, which costs time and requests",
        "use a server that promises it: ZooKeeper, MySQL, or Redis with pub/sub",
    ),
    "no-eviction": Promise(
        "a full server refuses new locks rather than forget one that is held",
        "a full server may forget a lock that is held, and give it to somebody else",
        "use a server that promises it, or give locks a server of their own",
    ),
    "survives-restart": Promise(
        "locks that are held stay held when the server restarts",
        "a restart of the server forgets every lock: the next to ask gets it while the old holder still believes in it",
        "use a server that writes locks to disk",
    ),
    "survives-failover": Promise(
        "locks that are held stay held when a server dies and another takes over",
        "a failover may forget the last locks: the next to ask gets one while the old holder still believes in it",
        "use a ZooKeeper ensemble for what must not happen, and fencing tokens for the rest",
    ),
}

THERE = {
    ("memory", "survives-restart"): Otherwise(
        "use a server of its own for locks that must outlive this process",
        "the server is this process: its locks end with it",
    ),
    ("memory", "survives-failover"): Otherwise(
        "use a ZooKeeper ensemble for locks that must outlive a server",
        "the server is this process: nobody takes over when it dies",
    ),
    ("redis", "push"): Otherwise("give the account the right to publish and to subscribe"),
    ("redis", "no-eviction"): Otherwise(
        "set maxmemory-policy to noeviction, or give locks a server of their own; let the account use INFO, or it is "
        "not known"
    ),
    ("redis", "survives-restart"): Otherwise(
        "make the server write to disk: appendonly yes, and appendfsync always where its machine may go down; let the "
        "account use INFO, or it is not known"
    ),
    ("quorum", "fencing"): Otherwise(
        "use one server, or ZooKeeper: several that know nothing of each other cannot"
    ),
    ("quorum", "fifo"): Otherwise(
        "use one server, or ZooKeeper",
        "whoever waits at a server that goes away lines up at the next one, in any order",
    ),
    ("quorum", "survives-restart"): Otherwise(
        "make every server write to disk: appendonly yes, and appendfsync always where its machine may go down"
    ),
    ("quorum", "survives-failover"): Otherwise(
        "make every server write to disk: appendonly yes, and appendfsync always where its machine may go down",
        "a server that dies and comes back has forgotten whom it gave its vote: with that of a server that was away, the next "
        "to ask may have a majority while the old holder still believes in it",
    ),
    ("zookeeper", "fifo"): Otherwise("leave out recipe=simple"),
    ("zookeeper", "survives-failover"): Otherwise(
        "run an ensemble of three servers or more; name them all in the address if clients may not read "
        "/zookeeper/config",
        "there are no other servers that could take over, or none that are known: while this one is away nobody gets a "
        "lock, and holders lose theirs",
    ),
    ("mysql", "fencing"): Otherwise("use mode=lease"),
    ("mysql", "fifo"): Otherwise("use mode=lease or mode=session"),
    ("mysql", "keep"): Otherwise("use mode=lease"),
    ("mysql", "survives-restart"): Otherwise(
        "use mode=lease, and innodb_flush_log_at_trx_commit=1 on the server",
        "a restart of the server may forget locks, the last ones or all: the next to ask gets one while the old holder "
        "may still believe in it",
    ),
}
"""What is not the same everywhere, by the name of the backend and the word."""


def in_words(capabilities: Collection[str], server: str = "") -> list[Sentence]:
    """What a deployment promises and does not, in sentences; words that nobody knows here stand for themselves.

    ``server`` is the name of its backend: advice is about that one where it is known.
    """
    promised = [
        Sentence(word, promised=True, text=promise.kept)
        for word, promise in PROMISES.items()
        if word in capabilities
    ]
    promised += [
        Sentence(word, promised=True, text="see the page of the server")
        for word in sorted(set(capabilities) - set(PROMISES))
    ]
    missing = [_missing(word, server) for word in PROMISES if word not in capabilities]
    return promised + missing


def _missing(word: str, server: str) -> Sentence:
    everywhere = PROMISES[word]
    there = THERE.get((server.lower(), word), Otherwise(""))
    return Sentence(
        word,
        promised=False,
        text=there.missing or everywhere.missing,
        advice=there.raised or everywhere.raised,
    )
