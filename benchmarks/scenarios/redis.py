"""Who competes in what on Redis, by the name that ``--scenario`` takes, in the order of the report."""

from __future__ import annotations

from benchmarks.scenarios.contending import commands, handover, hot, pair, places, waiters
from benchmarks.scenarios.failing import safety
from benchmarks.scenarios.holding import connections, importing, leases, memory, waiting
from benchmarks.scenarios.turning import free, inprocess, local, loops, many, shared

__all__ = ["SCENARIOS"]

SCENARIOS = {
    "free": free,
    "shared": shared,
    "many": many,
    "hot": hot,
    "pair": pair,
    "waiters": waiters,
    "places": places,
    "local": local,
    "handover": handover,
    "commands": commands,
    "safety": safety,
    "waiting": waiting,
    "leases": leases,
    "memory": memory,
    "connections": connections,
    "import": importing,
    "inprocess": inprocess,
    "loops": loops,
}
