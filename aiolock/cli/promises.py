"""The words of ``require=`` in plain sentences: what is promised, what is not, and what would raise it."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

__all__ = ["PROMISES", "Promise", "Sentence", "in_words"]


class Promise(NamedTuple):
    """One word, said in sentences."""

    kept: str
    """What it means where it is promised."""
    missing: str
    """What may happen where it is not."""
    raised: str
    """What would raise it."""


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
        "on MySQL use the lease mode; else another server",
    ),
    "fifo": Promise(
        "clients are served in the order in which they asked",
        "clients may overtake each other while they wait",
        "on MySQL use the lease mode; on ZooKeeper the default recipe",
    ),
    "keep": Promise(
        "a released lock can stay taken for a while, for jobs that must not run again at once",
        "release(keep=...) and once(at_least=...) are refused",
        "on MySQL use the lease mode; Redis has it as well",
    ),
    "push": Promise(
        "who waits is told when its turn comes, without asking again and again",
        "who waits asks again and again, which costs time and requests",
        "on Redis give the account the right to publish and to subscribe",
    ),
    "no-eviction": Promise(
        "a full server refuses new locks rather than forget one that is held",
        "a full server may forget a lock that is held, and give it to somebody else",
        "set maxmemory-policy to noeviction, or give locks a server of their own",
    ),
    "survives-restart": Promise(
        "locks that are held stay held when the server restarts",
        "a restart of the server forgets every lock: the next to ask gets it while the old holder still believes in it",
        "make the server write to disk before it answers (Redis: appendonly yes; MySQL: the lease mode, and "
        "innodb_flush_log_at_trx_commit=1)",
    ),
    "survives-failover": Promise(
        "locks that are held stay held when a server dies and another takes over",
        "a failover may forget the last locks: the next to ask gets one while the old holder still believes in it",
        "use ZooKeeper for what must not happen, and fencing tokens for the rest",
    ),
}


def in_words(capabilities: Collection[str]) -> list[Sentence]:
    """What a deployment promises and does not, in sentences; words that nobody knows here stand for themselves."""
    promised = [
        Sentence(word, promised=True, text=promise.kept)
        for word, promise in PROMISES.items()
        if word in capabilities
    ]
    promised += [
        Sentence(word, promised=True, text="see the page of the server")
        for word in sorted(set(capabilities) - set(PROMISES))
    ]
    missing = [
        Sentence(word, promised=False, text=promise.missing, advice=promise.raised)
        for word, promise in PROMISES.items()
        if word not in capabilities
    ]
    return promised + missing
