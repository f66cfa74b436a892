"""Trace and measure the locks of clients with OpenTelemetry: spans ``lock wait`` and ``lock hold``, and metrics.

::

    from aiolock.opentelemetry import instrument

    async with aiolock.connect("redis://127.0.0.1:6379/0") as client:
        instrument(client)

Both spans belong to the span in which the lock was acquired, and have its name and token. The metrics distinguish lock family and
name template apart, and no names, because there may be millions of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import time_ns
from weakref import WeakKeyDictionary, WeakSet

from aiolock import __version__
from aiolock.client import Client
from aiolock.errors import ConfigError, MissingDriver, shorten
from aiolock.metrics import (
    COUNTERS,
    COUNTERS_BY_TEMPLATE,
    GAUGES,
    SECONDS,
    ByTemplate,
    Number,
    sum_by_template,
)
from aiolock.portal import SyncClient
from aiolock.types import LockEvent

try:
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation, get_meter_provider
    from opentelemetry.trace import Status, StatusCode, TracerProvider, get_tracer
except ImportError as _missing:
    raise MissingDriver("opentelemetry", "opentelemetry") from _missing

__all__ = ["instrument"]


def instrument(
    client: Client | SyncClient,
    *,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
) -> None:
    """Trace and measure the locks of a client, from now on; the page on metrics lists what there is.

    :param client: a client, open or not. Several clients with one meter provider are counted together.
    :param tracer_provider: makes the spans; by default the global one.
    :param meter_provider: makes the metrics; by default the global one, as it is set at this call.

    Instrumenting a client for the same meter provider again changes nothing. Does no I/O. Raises :class:`ConfigError` for
    anything but a client.
    """
    if not isinstance(client, Client | SyncClient):
        raise ConfigError(f"instrument() must be given a client, not {shorten(client)}")
    provider = get_meter_provider() if meter_provider is None else meter_provider
    metrics = _metrics.get(provider)
    if metrics is None:
        metrics = _metrics[provider] = _Metrics(provider)
    if client not in metrics.clients:
        metrics.clients.add(client)
        _trace(client, tracer_provider)
        client.on_acquired(metrics.acquired)
        client.on_released(metrics.ended)
        client.on_lost(metrics.was_lost)


def _trace(client: Client | SyncClient, provider: TracerProvider | None) -> None:
    tracer = get_tracer("aiolock", __version__, provider)

    def record(name: str, seconds: float, event: LockEvent) -> None:
        # The parent is that of the acquire: every callback runs in its context.
        now = time_ns()
        attributes = {**_labels(event), "aiolock.name": event.name}
        if event.token:
            attributes["aiolock.token"] = event.token
        span = tracer.start_span(name, start_time=now - int(seconds * 1e9), attributes=attributes)
        if event.reason is not None:
            span.set_attribute("aiolock.reason", event.reason)
            span.set_status(Status(StatusCode.ERROR, f"lost ({event.reason})"))
        span.end(now)

    client.on_acquired(lambda event: record("lock wait", event.waited, event))
    client.on_released(lambda event: record("lock hold", event.held, event))
    client.on_lost(lambda event: None if event.released else record("lock hold", event.held, event))


class _Metrics:
    """The metrics of one meter provider: those that callbacks write, and those that are read from ``stats()``."""

    def __init__(self, provider: MeterProvider) -> None:
        self.clients: WeakSet[Client | SyncClient] = WeakSet()
        meter = provider.get_meter("aiolock", __version__)
        self._waits, self._holds = (
            meter.create_histogram(name, "s", text, explicit_bucket_boundaries_advisory=SECONDS)
            for name, text in (
                ("aiolock.wait.duration", "Time from a request to its grant"),
                ("aiolock.hold.duration", "Time from a grant to the release or the loss"),
            )
        )
        self._lost = meter.create_counter("aiolock.lost", "{lease}", "Leases lost")
        for key, (unit, text) in GAUGES.items():
            meter.create_observable_gauge(f"aiolock.{key}", [self._read(key)], unit, text)
        for key, (unit, text) in COUNTERS.items():
            meter.create_observable_counter(f"aiolock.{key}", [self._read(key)], unit, text)

        for templates, (name, unit, text) in COUNTERS_BY_TEMPLATE.items():
            meter.create_observable_counter(
                f"aiolock.{name}", [self._read_by_template(templates)], unit, text
            )

    def _read(self, key: Number) -> Callable[[CallbackOptions], Iterable[Observation]]:
        return lambda _: [Observation(sum(client.stats()[key] for client in list(self.clients)))]

    def _read_by_template(self, key: ByTemplate) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def read(_: CallbackOptions) -> Iterable[Observation]:
            counts = sum_by_template(client.stats()[key] for client in list(self.clients))
            return [Observation(count, {"aiolock.template": name}) for name, count in counts.items()]

        return read

    def acquired(self, event: LockEvent) -> None:
        """Record the wait."""
        self._waits.record(event.waited, _labels(event))

    def ended(self, event: LockEvent) -> None:
        """Record the hold."""
        self._holds.record(event.held, _labels(event))

    def was_lost(self, event: LockEvent) -> None:
        """Count the loss, and record the hold unless that was done at its release."""
        self._lost.add(1, {**_labels(event), "aiolock.reason": event.reason or ""})
        if not event.released:
            self.ended(event)


def _labels(event: LockEvent) -> dict[str, str | int]:
    return {"aiolock.family": event.kind.family.value, "aiolock.template": event.template}


_metrics: WeakKeyDictionary[MeterProvider, _Metrics] = WeakKeyDictionary()
"""The metrics by meter provider: several clients share one."""
