"""A collector for Prometheus: the figures of clients, read when Prometheus asks.

    pip install "python-aiolock[redis]" prometheus-client
    python examples/metrics_prometheus.py        then: curl http://127.0.0.1:9100/metrics

The names of locks are no labels: there may be millions of them. Give a client to each part of an application that you
want to tell apart, and name it here.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from typing import Literal

from prometheus_client import REGISTRY, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

import aiolock

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

GAUGES: dict[Number, str] = {
    "held": "Leases held at this moment",
    "waiting": "Tasks that wait for a lock at this moment",
}
COUNTERS: dict[Number, str] = {
    "acquired": "Leases that were handed out",
    "released": "Leases that were given back",
    "passed": "Leases that went to another task of this client without the server",
    "waited": "Tasks that had to wait",
    "timeouts": "Waits that ended without the lock",
    "renewals": "Renewals that were asked for",
    "renewal_failures": "Renewals that ended with an error",
    "cleanups": "Claims that were released in the background",
}
HISTOGRAMS: dict[Spread, tuple[str, str]] = {
    "waits": ("wait_seconds", "Seconds that tasks waited for a lock that was not free"),
    "holds": ("hold_seconds", "Seconds from a grant to its release"),
    "slack": ("renewal_slack_ratio", "What was left of the ttl when a lease was renewed"),
}


class LockCollector(Collector):
    """``REGISTRY.register(LockCollector({"orders": client}))``"""

    def __init__(self, clients: Mapping[str, aiolock.Client]) -> None:
        self._clients = clients

    def collect(self) -> Iterator[Metric]:
        figures = {name: client.stats() for name, client in self._clients.items()}
        for key, text in GAUGES.items():
            gauge = GaugeMetricFamily(f"aiolock_{key}", text, labels=["client"])
            for name, figure in figures.items():
                gauge.add_metric([name], figure[key])
            yield gauge
        for key, text in COUNTERS.items():
            counter = CounterMetricFamily(f"aiolock_{key}", text, labels=["client"])
            for name, figure in figures.items():
                counter.add_metric([name], figure[key])
            yield counter
        lost = CounterMetricFamily("aiolock_lost", "Leases that were lost", labels=["client", "reason"])
        for name, figure in figures.items():
            for reason, count in figure["losses"].items():
                lost.add_metric([name, reason], count)
        yield lost
        for spread, (metric, text) in HISTOGRAMS.items():
            histogram = HistogramMetricFamily(f"aiolock_{metric}", text, labels=["client"])
            for name, figure in figures.items():
                buckets = [
                    ("+Inf" if bound == float("inf") else str(bound), count)
                    for bound, count in figure[spread].cumulative
                ]
                histogram.add_metric([name], buckets, figure[spread].total)
            yield histogram


async def main(port: int = 9100) -> None:
    async with aiolock.connect(os.environ.get("AIOLOCK_URL", "memory://")) as client:
        collector = LockCollector({"example": client})
        REGISTRY.register(collector)
        server, thread = start_http_server(port, "127.0.0.1")
        print(f"http://127.0.0.1:{server.server_port}/metrics")
        try:
            while True:
                async with client.lock("example"):
                    await asyncio.sleep(0.1)
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
            REGISTRY.unregister(collector)


if __name__ == "__main__":
    asyncio.run(aiolock.run_until_signal(main()))
