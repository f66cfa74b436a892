"""What a worker can be told to do; each is a coroutine that gets a stage and its parameters."""

from __future__ import annotations

from benchmarks.jobs.contending import drain, giver, line, places, taker
from benchmarks.jobs.dying import heir, victim
from benchmarks.jobs.failing import cancelled, overlong
from benchmarks.jobs.holding import connections, held, holder, kept, leases, waiter, waiting
from benchmarks.jobs.turning import crowd, many, single

__all__ = [
    "cancelled",
    "connections",
    "crowd",
    "drain",
    "giver",
    "heir",
    "held",
    "holder",
    "kept",
    "leases",
    "line",
    "many",
    "overlong",
    "places",
    "single",
    "taker",
    "victim",
    "waiter",
    "waiting",
]
