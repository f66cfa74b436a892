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
from threading import Lock
from time import monotonic
from typing import get_args
from weakref import WeakKeyDictionary, WeakSet

from aiolock.client import Client, report_figures
from aiolock.core.forks import call_in_child
from aiolock.core.runtime import REPORT_EVERY, Runtime
from aiolock.errors import ConfigError, LossReason, MissingDriver, shorten
from aiolock.metrics import COUNTERS, COUNTERS_BY_TEMPLATE, GAUGES, SECONDS, SHARES, Figures, sum_by_template
from aiolock.portal import SyncClient, inner_client
from aiolock.types import LockEvent

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, values
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector
except ImportError as _missing:
    raise MissingDriver("prometheus_client", "prometheus") from _missing

__all__ = ["export"]

LABELS = ("family", "template")
SLACK = ("aiolock_renewal_slack_ratio", "The rest of the validity at a renewal, as a share of the ttl")


def export(client: Client | SyncClient, registry: CollectorRegistry = REGISTRY) -> None:
    """Export the metrics of a client, from now on; the page on metrics lists them.

    :param client: a client, open or not. Several clients in one registry are counted together.
    :param registry: the registry to which the metrics are added; by default that of ``prometheus_client``.

    Exporting a client to the same registry again changes nothing. With ``PROMETHEUS_MULTIPROC_DIR``, by which several processes
    share their metrics, a process has one registry, and its metrics are written to the files of ``prometheus_client`` at most once
    a second and when a client is closed. Otherwise this does no I/O. Raises :class:`ConfigError` for anything but a client and a
    registry, and for a second registry with ``PROMETHEUS_MULTIPROC_DIR``, and ``ValueError`` if the registry has metrics of the
    same names from elsewhere; it keeps none of these then.
    """
    if not isinstance(client, Client | SyncClient):
        raise ConfigError(f"export() must be given a client, not {shorten(client)}")
    if not isinstance(registry, CollectorRegistry):
        raise ConfigError(f"registry must be a CollectorRegistry, not {shorten(registry)}")
    metrics = _metrics.get(registry)
    if metrics is None:
        if _several_processes() and _metrics:
            raise ConfigError(
                "with PROMETHEUS_MULTIPROC_DIR a process has one set of metrics, which is in another registry already: "
                "give export() that registry, and MultiProcessCollector one of its own"
            )
        metrics = _Written(registry) if _several_processes() else _Collected(registry)
        _metrics[registry] = metrics
    metrics.add(client)


def _several_processes() -> bool:
    """Test whether prometheus_client writes what it measures to files, for all processes that share a directory."""
    return values.ValueClass is not values.MutexValue


class _Metrics:
    """The metrics in one registry: those that callbacks write, by family and template."""

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
            for collector in (self._waits, self._holds, self._lost, *self._others()):
                registry.register(collector)
                registered.append(collector)
        except ValueError:
            for known in registered:
                registry.unregister(known)
            raise

    def _others(self) -> list[Collector]:
        """Make the metrics of the figures that nothing but ``stats()`` knows."""
        raise NotImplementedError

    def add(self, client: Client | SyncClient) -> bool:
        """Count the leases of a client; return whether it is new."""
        if client in self._clients:
            return False
        self._clients.add(client)
        client.on_acquired(self._acquired)
        client.on_released(self._ended)
        client.on_lost(self._was_lost)
        return True

    def _acquired(self, event: LockEvent) -> None:
        labels = _labels(event)
        if labels not in self._seen:
            # A rate needs the zero before the first loss.
            self._seen.add(labels)
            for reason in get_args(LossReason):
                self._lost.labels(*labels, reason)
            self._begin(event.template)
        self._waits.labels(*labels).observe(event.waited)

    def _begin(self, template: str) -> None:
        """Have a zero for a template, before its first timeout."""

    def _ended(self, event: LockEvent) -> None:
        self._holds.labels(*_labels(event)).observe(event.held)

    def _was_lost(self, event: LockEvent) -> None:
        self._lost.labels(*_labels(event), event.reason).inc()
        if not event.released:
            self._ended(event)


class _Collected(_Metrics, Collector):
    """The metrics of the one process that is asked for them: ``stats()`` is read then."""

    def _others(self) -> list[Collector]:
        return [self]

    def collect(self) -> Iterator[Metric]:
        """Return the metrics that nothing but ``stats()`` knows."""
        figures = [client.stats() for client in list(self._clients)]
        for key, (_, text) in GAUGES.items():
            yield GaugeMetricFamily(f"aiolock_{key}", text, sum(each[key] for each in figures))
        for key, (_, text) in COUNTERS.items():
            yield CounterMetricFamily(f"aiolock_{key}", text, sum(each[key] for each in figures))
        for templates, (name, _, text) in COUNTERS_BY_TEMPLATE.items():
            family = CounterMetricFamily(f"aiolock_{name}", text, labels=["template"])
            known = {template for _, template in self._seen} if name == "timeouts" else ()
            counts = sum_by_template([dict.fromkeys(known, 0), *(each[templates] for each in figures)])
            for template, count in counts.items():
                family.add_metric([template], count)
            yield family
        slack = HistogramMetricFamily(*SLACK)
        if shown := [each["slack"] for each in figures]:
            bounds = [str(bound) for bound in shown[0].bounds] + ["+Inf"]
            sums = [
                sum(counts)
                for counts in zip(*(dict(each.cumulative).values() for each in shown), strict=True)
            ]
            slack.add_metric([], list(zip(bounds, sums, strict=True)), sum(each.total for each in shown))
        yield slack


class _Written(_Metrics):
    """The metrics of one of several processes, in files that any of them reads: what ``stats()`` has more than before is added."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        # Another registry later would have metrics that overwrite those of this one in the files.
        self._registry = registry

    def _others(self) -> list[Collector]:
        self._gauges = {
            # The file of a process that is gone does not count, once it was removed.
            key: Gauge(f"aiolock_{key}", text, registry=None, multiprocess_mode="livesum")
            for key, (_, text) in GAUGES.items()
        }
        self._counters = {
            key: Counter(f"aiolock_{key}", text, registry=None) for key, (_, text) in COUNTERS.items()
        }
        self._by_template = {
            key: Counter(f"aiolock_{name}", text, ["template"], registry=None)
            for key, (name, _, text) in COUNTERS_BY_TEMPLATE.items()
        }
        self._slack = Histogram(*SLACK, buckets=SHARES, registry=None)
        self._forget()
        call_in_child(self._forget)
        return [
            *(*self._gauges.values(), *self._counters.values(), *self._by_template.values()),
            self._slack,
        ]

    def _forget(self) -> None:
        """Begin anew: nothing of what a process has counted is its child's."""
        self._writing = Lock()
        """Clients may be on loops of different threads."""
        self._written = 0.0
        """The time of the latest writing."""
        self._before: WeakKeyDictionary[Runtime, Figures] = WeakKeyDictionary()
        """The latest figures of each opening."""
        self._new: list[tuple[Figures | None, Figures]] = []
        """Figures that are to be written, each with those before it of the same opening."""

    def add(self, client: Client | SyncClient) -> bool:
        """Count the leases of a client, and write its figures."""
        new = super().add(client)
        if new:
            report_figures(inner_client(client) if isinstance(client, SyncClient) else client, self._report)
        return new

    def _begin(self, template: str) -> None:
        self._by_template["timeouts_by_template"].labels(template)

    def _report(self, opening: Runtime) -> None:
        """Take the figures of an opening, and write those of all unless that was done a moment ago."""
        figures = opening.figures()
        with self._writing:
            self._new.append((self._before.get(opening), figures))
            self._before[opening] = figures
            now = monotonic()
            # A timer of the loop may be early by its resolution.
            if opening.over or now - self._written >= 0.9 * REPORT_EVERY:
                self._written = now
                new, self._new = self._new, []
                self._write(new)

    def _write(self, new: list[tuple[Figures | None, Figures]]) -> None:
        for gauge, metric in self._gauges.items():
            metric.set(sum(each[gauge] for opening, each in self._before.items() if not opening.over))
        for before, after in new:
            for key, counter in self._counters.items():
                counter.inc(after[key] - (before[key] if before else 0))
            for templates, by_template in self._by_template.items():
                for template, count in after[templates].items():
                    by_template.labels(template).inc(
                        count - (before[templates].get(template, 0) if before else 0)
                    )
            self._add_slack(before, after)

    def _add_slack(self, before: Figures | None, after: Figures) -> None:
        # The library has no way to observe several values at once, nor one without its sum.
        counts, total = after["slack"].counts, after["slack"].total
        if before is not None:
            counts = tuple(now - then for now, then in zip(counts, before["slack"].counts, strict=True))
            total -= before["slack"].total
        if any(counts):
            for bucket, count in zip(self._slack._buckets, counts, strict=True):  # noqa: SLF001 - see above
                bucket.inc(count)
            self._slack._sum.inc(total)  # noqa: SLF001 - see above


def _labels(event: LockEvent) -> tuple[str, str]:
    return event.kind.family.value, event.template


_metrics: WeakKeyDictionary[CollectorRegistry, _Metrics] = WeakKeyDictionary()
"""The metrics by registry: several clients share one."""
