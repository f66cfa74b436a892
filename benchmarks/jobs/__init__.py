"""What a worker can be told to do; each is a coroutine that gets a stage and its parameters."""

from __future__ import annotations

from benchmarks.jobs.contending import drain, giver, places, taker
from benchmarks.jobs.holding import connections, held, holder, leases, waiter, waiting
from benchmarks.jobs.turning import crowd, many, single

__all__ = [
    "connections",
    "crowd",
    "drain",
    "giver",
    "held",
    "holder",
    "leases",
    "many",
    "places",
    "single",
    "taker",
    "waiter",
    "waiting",
]
