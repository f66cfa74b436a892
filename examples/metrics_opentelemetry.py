"""Instruments for OpenTelemetry: the figures of a client, read whenever a reader collects.

    pip install "python-aiolock[redis]" opentelemetry-sdk
    python examples/metrics_opentelemetry.py

OpenTelemetry has no histogram that is read instead of written, so the buckets are counters with an attribute `le`, as
Prometheus has them. The names of locks are no attributes: there may be millions of them.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from opentelemetry.metrics import CallbackOptions, Meter, Observation

import aiolock
from aiolock.metrics import Figures

Read = Callable[[Figures], Iterable[tuple[int | float, dict[str, str | float]]]]

Number = Literal[
    "held",
    "waiting",
    "acquired",
    "released",
    "passed",
    "waited",
    "timeouts",
    "renewals",
    "renewal_failures",
    "cleanups",
]
Spread = Literal["waits", "holds", "slack"]

GAUGES: dict[Number, str] = {"held": "{lease}", "waiting": "{task}"}
COUNTERS: dict[Number, str] = {
    "acquired": "{lease}",
    "released": "{lease}",
    "passed": "{lease}",
    "waited": "{task}",
    "timeouts": "{wait}",
    "renewals": "{renewal}",
    "renewal_failures": "{renewal}",
    "cleanups": "{claim}",
}
HISTOGRAMS: tuple[Spread, ...] = ("waits", "holds", "slack")


def instrument(meter: Meter, clients: Mapping[str, aiolock.Client]) -> None:
    """Make the instruments; ``clients`` are told apart by the attribute ``client``."""

    def callback(read: Read) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            for name, client in clients.items():
                for value, attributes in read(client.stats()):
                    yield Observation(value, {"client": name, **attributes})

        return observe

    def single(key: Number) -> Read:
        return lambda figures: [(figures[key], {})]

    def buckets(key: Spread) -> Read:
        return lambda figures: [(count, {"le": bound}) for bound, count in figures[key].cumulative]

    def total(key: Spread) -> Read:
        return lambda figures: [(figures[key].total, {})]

    for key, unit in GAUGES.items():
        meter.create_observable_gauge(f"aiolock.{key}", [callback(single(key))], unit)
    for key, unit in COUNTERS.items():
        meter.create_observable_counter(f"aiolock.{key}", [callback(single(key))], unit)
    meter.create_observable_counter(
        "aiolock.lost",
        [callback(lambda figures: [(count, {"reason": why}) for why, count in figures["losses"].items()])],
        "{lease}",
    )
    for spread in HISTOGRAMS:
        meter.create_observable_counter(f"aiolock.{spread}.bucket", [callback(buckets(spread))])
        # What was left may be less than nothing, so its sum may shrink.
        make = (
            meter.create_observable_up_down_counter if spread == "slack" else meter.create_observable_counter
        )
        make(f"aiolock.{spread}.sum", [callback(total(spread))])


async def main(seconds: float = 3600) -> None:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, PeriodicExportingMetricReader

    provider = MeterProvider([PeriodicExportingMetricReader(ConsoleMetricExporter(sys.stdout), 10_000)])
    async with aiolock.connect(os.environ.get("AIOLOCK_URL", "memory://")) as client:
        instrument(provider.get_meter("aiolock"), {"example": client})
        try:
            async with asyncio.timeout(seconds):
                while True:
                    async with client.lock("example"):
                        await asyncio.sleep(0.1)
        except TimeoutError:
            pass
        finally:
            provider.shutdown()


if __name__ == "__main__":
    asyncio.run(aiolock.run_until_signal(main()))
