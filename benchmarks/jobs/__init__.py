"""What a worker can be told to do; each is a coroutine that gets a stage and its parameters."""

from __future__ import annotations

from benchmarks.jobs.contending import drain, giver, line, places, taker
from benchmarks.jobs.dying import heir, victim
from benchmarks.jobs.failing import cancelled, overlong
from benchmarks.jobs.holding import connections, held, holder, kept, leases, waiter, waiting
from benchmarks.jobs.selling import buyers, doomed, followers, prepared, sold, stocked
from benchmarks.jobs.turning import crowd, many, single

__all__ = [
    "buyers",
    "cancelled",
    "connections",
    "crowd",
    "doomed",
    "drain",
    "followers",
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
    "prepared",
    "single",
    "sold",
    "stocked",
    "taker",
    "victim",
    "waiter",
    "waiting",
]
