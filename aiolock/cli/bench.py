"""Command `bench`: measure locks on a server, from this machine."""

from __future__ import annotations

import argparse
import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence

import aiolock
from aiolock.cli import settings
from aiolock.cli.output import Output, lay_out
from aiolock.client import Client
from aiolock.clock import system_clock

__all__ = ["bench", "quantile"]

WARM_UP = 20
"""Repetitions that are not counted."""


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def _repeat(turn: Callable[[], Awaitable[object]], seconds: float) -> list[float]:
    for _ in range(WARM_UP):
        await turn()
    took: list[float] = []
    end = system_clock() + seconds
    while not took or system_clock() < end:
        start = system_clock()
        await turn()
        took.append(system_clock() - start)
    return took


async def _free(client: Client) -> None:
    async with client.lock("free"):
        pass


async def _contend(options: argparse.Namespace, namespace: str) -> list[float]:
    """Return the waiting times of tasks that contend, each with a client of its own, as if it were a process."""
    waits: list[float] = []
    clients = [settings.connect(options, namespace=namespace) for _ in range(options.tasks)]

    async def work(number: int, client: Client, end: float) -> None:
        lock = client.lock(f"hot-{number % options.locks}")
        while not waits or system_clock() < end:
            start = system_clock()
            async with lock:
                waits.append(system_clock() - start)

    try:
        for client in clients:
            await client.open()
        end = system_clock() + options.seconds
        async with asyncio.TaskGroup() as group:
            for number, client in enumerate(clients):
                group.create_task(work(number, client, end))
    finally:
        for client in clients:
            await client.aclose()
    return waits


def _figures(what: str, took: Sequence[float], seconds: float) -> dict[str, float | str | int]:
    return {
        "what": what,
        "count": len(took),
        "per_second": round(len(took) / seconds, 1),
        "p50_ms": round(1000 * quantile(took, 0.5), 3),
        "p99_ms": round(1000 * quantile(took, 0.99), 3),
        "max_ms": round(1000 * max(took), 3),
    }


async def bench(options: argparse.Namespace, output: Output) -> int:
    """Measure, and print a table. Cancelling it releases the locks and closes the clients."""
    namespace = f"aiolock-bench-{secrets.token_hex(4)}"
    seconds = options.seconds
    async with settings.connect(options, namespace=namespace) as client:
        trips = await _repeat(client.lock("free").inspect, seconds)
        free = await _repeat(lambda: _free(client), seconds)
    try:
        waits = await _contend(options, namespace)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    rows = [
        _figures("round trip (inspect)", trips, seconds),
        _figures("free lock, in and out", free, seconds),
        _figures(f"{options.tasks} clients on {options.locks} lock(s): wait for a turn", waits, seconds),
    ]
    if output.json:
        output.document({"server": settings.server(options), "version": aiolock.__version__, "figures": rows})
        return 0
    output.line(f"{settings.server(options)}, {seconds:g} s each, one process, aiolock {aiolock.__version__}")
    head = ("", "PER SECOND", "P50 ms", "P99 ms", "MAX ms")
    cells = [
        (
            str(each["what"]),
            f"{each['per_second']:,}",
            *(f"{each[key]:.3f}" for key in ("p50_ms", "p99_ms", "max_ms")),
        )
        for each in rows
    ]
    head_line, *lines = lay_out([head, *cells], right=(1, 2, 3, 4))
    output.line(output.style(head_line, "bold"))
    for line in lines:
        output.line(line)
    if (trip := quantile(trips, 0.5)) > 0:
        took = quantile(free, 0.5) / trip
        output.line(
            f"A free lock took {took:.1f} round trips: 2 to 3 is good, and more where the server writes to disk."
        )
    return 0
