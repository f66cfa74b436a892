"""Export the metrics of clients to Prometheus: waits, holds and losses by lock family and name template.

::

    from aiolock.prometheus import export

    async with aiolock.connect("redis://127.0.0.1:6379/0") as client:
        export(client)

Names of locks are no labels, because there may be millions of them. The label ``template`` is the text in
``@client.locked("order:{order_id}")``, in ``once()`` or in ``locked()`` of the web integrations, and empty for other locks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args
from weakref import WeakKeyDictionary, WeakSet

from aiolock.client import Client
from aiolock.errors import ConfigError, LossReason, MissingDriver, shorten
from aiolock.metrics import COUNTERS, GAUGES, SECONDS
from aiolock.portal import SyncClient
from aiolock.types import LockEvent

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector
except ImportError as _missing:
    raise MissingDriver("prometheus_client", "prometheus") from _missing

__all__ = ["export"]

LABELS = ("family", "template")


def export(client: Client | SyncClient, registry: CollectorRegistry = REGISTRY) -> None:
    """Export the metrics of a client, from now on; the page on metrics lists them.

    :param client: a client, open or not. Several clients in one registry are counted together.
    :param registry: the registry to which the metrics are added; by default that of ``prometheus_client``.

    Exporting a client to the same registry again changes nothing. Does no I/O. Raises :class:`ConfigError` for anything but
    a client and a registry, and ``ValueError`` if the registry has metrics of the same names from elsewhere; it keeps none of these then.
    """
    if not isinstance(client, Client | SyncClient):
        raise ConfigError(f"export() must be given a client, not {shorten(client)}")
    if not isinstance(registry, CollectorRegistry):
        raise ConfigError(f"registry must be a CollectorRegistry, not {shorten(registry)}")
    metrics = _metrics.get(registry)
    if metrics is None:
        metrics = _Metrics(registry)
        _metrics[registry] = metrics
    metrics.add(client)


class _Metrics(Collector):
    """The metrics in one registry: those that callbacks write, and those that are read from ``stats()`` when asked for."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._clients: WeakSet[Client | SyncClient] = WeakSet()
        self._seen: set[tuple[str, str]] = set()
        # Without `registry=`, so that the metrics do not keep it alive.
        self._waits = Histogram(
            "aiolock_wait_seconds",
            "Seconds from a request to its grant",
            LABELS,
            buckets=SECONDS,
            registry=None,
        )
        self._holds = Histogram(
            "aiolock_hold_seconds",
            "Seconds from a grant to the release or the loss",
            LABELS,
            buckets=SECONDS,
            registry=None,
        )
        self._lost = Counter("aiolock_lost", "Leases lost", (*LABELS, "reason"), registry=None)
        registered: list[Collector] = []
        try:
            for collector in (self._waits, self._holds, self._lost, self):
                registry.register(collector)
                registered.append(collector)
        except ValueError:
            for known in registered:
                registry.unregister(known)
            raise

    def add(self, client: Client | SyncClient) -> None:
        """Count the leases of a client."""
        if client not in self._clients:
            self._clients.add(client)
            client.on_acquired(self._acquired)
            client.on_released(self._ended)
            client.on_lost(self._was_lost)

    def _acquired(self, event: LockEvent) -> None:
        labels = _labels(event)
        if labels not in self._seen:
            # A rate needs the zero before the first loss.
            self._seen.add(labels)
            for reason in get_args(LossReason):
                self._lost.labels(*labels, reason)
        self._waits.labels(*labels).observe(event.waited)

    def _ended(self, event: LockEvent) -> None:
        self._holds.labels(*_labels(event)).observe(event.held)

    def _was_lost(self, event: LockEvent) -> None:
        self._lost.labels(*_labels(event), event.reason).inc()
        if not event.released:
            self._ended(event)

    def collect(self) -> Iterator[Metric]:
        """Return the metrics that nothing but ``stats()`` knows."""
        figures = [client.stats() for client in list(self._clients)]
        for key, (_, text) in GAUGES.items():
            yield GaugeMetricFamily(f"aiolock_{key}", text, sum(each[key] for each in figures))
        for key, (_, text) in COUNTERS.items():
            yield CounterMetricFamily(f"aiolock_{key}", text, sum(each[key] for each in figures))
        slack = HistogramMetricFamily(
            "aiolock_renewal_slack_ratio", "The rest of the validity at a renewal, as a share of the ttl"
        )
        if shown := [each["slack"] for each in figures]:
            bounds = [str(bound) for bound in shown[0].bounds] + ["+Inf"]
            sums = [
                sum(counts)
                for counts in zip(*(dict(each.cumulative).values() for each in shown), strict=True)
            ]
            slack.add_metric([], list(zip(bounds, sums, strict=True)), sum(each.total for each in shown))
        yield slack


def _labels(event: LockEvent) -> tuple[str, str]:
    return event.kind.family.value, event.template


_metrics: WeakKeyDictionary[CollectorRegistry, _Metrics] = WeakKeyDictionary()
"""The metrics by registry: several clients share one."""
