"""The exports to Prometheus and OpenTelemetry, read by their own libraries."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import aiolock
from aiolock.metrics import COUNTERS, COUNTERS_BY_TEMPLATE, GAUGES, SECONDS, Figures
from aiolock.opentelemetry import instrument
from aiolock.prometheus import export
from aiolock.testing import lose
from tests.faults.staging import until


async def something_happens(client: aiolock.Client) -> None:
    """Two turns of one template, of which one waits; a read lock; a renewal, a loss, two waits in vain, and a skip."""

    @client.locked("order:{number}")
    async def turn(number: int) -> None:
        # The time of the first counts once the second waits, which may be late on a busy machine.
        await until(lambda: client.stats()["waiting"] or client.stats()["passed"])
        await asyncio.sleep(0.01)

    await asyncio.gather(turn(42), turn(42))
    async with client.rwlock("page").read():
        pass
    lease = await client.lock("order:7").acquire()
    with pytest.raises(aiolock.AcquireTimeout):
        await asyncio.create_task(client.lock("order:7").acquire(timeout=0))
    with pytest.raises(aiolock.AcquireTimeout):
        await client.locked("order:{number}", timeout=0)(never)(7)
    assert await client.once("order:{number}")(never)(7) is None
    await lease.renew()
    lose(lease, "revoked")


async def never(number: int) -> None:
    pytest.fail("the lock was taken")


def samples(registry: CollectorRegistry) -> dict[tuple, float]:
    text = generate_latest(registry).decode()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def labels(family: str, template: str = "", **more: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted({"family": family, "template": template, **more}.items()))


async def test_prometheus_has_waits_and_holds_by_family_and_template():
    registry = CollectorRegistry()
    async with aiolock.connect("memory://prometheus") as client:
        export(client, registry)
        await something_happens(client)
        found = samples(registry)
    order = labels("lock", "order:{number}")
    assert found["aiolock_wait_seconds_count", *order] == 2
    assert found["aiolock_wait_seconds_sum", *order] >= 0.01
    assert found["aiolock_hold_seconds_count", *order] == 2
    assert found["aiolock_hold_seconds_sum", *order] >= 0.02
    assert found["aiolock_hold_seconds_bucket", *labels("lock", "order:{number}", le="0.005")] == 0
    assert found["aiolock_wait_seconds_count", *labels("rw")] == 1
    assert found["aiolock_lost_total", *labels("lock", reason="revoked")] == 1
    assert found["aiolock_hold_seconds_count", *labels("lock")] == 1
    for reason in ("expired", "revoked", "session", "max_hold", "force-released", "closed"):
        assert found["aiolock_lost_total", *labels("lock", "order:{number}", reason=reason)] == 0
    assert found["aiolock_passed_total",] == 1
    assert found["aiolock_timeouts_total", ("template", "")] == 1
    assert found["aiolock_timeouts_total", ("template", "order:{number}")] == 1
    assert found["aiolock_skipped_total", ("template", "order:{number}")] == 1
    assert found["aiolock_renewals_total",] == 0  # those of the client itself
    assert found["aiolock_renewal_slack_ratio_count",] == 1
    assert found["aiolock_renewal_slack_ratio_bucket", ("le", "+Inf")] == 1
    assert "order:42" not in generate_latest(registry).decode()


def test_metrics_of_the_same_name_from_elsewhere_are_refused_and_nothing_is_kept():
    registry = CollectorRegistry()
    other = Counter("aiolock_lost", "Of another program", registry=registry)
    client = aiolock.connect("memory://prometheus")
    with pytest.raises(ValueError, match="aiolock_lost"):
        export(client, registry)
    registry.unregister(other)
    export(client, registry)


async def test_prometheus_has_what_is_held_and_waits_at_this_moment():
    registry = CollectorRegistry()
    async with aiolock.connect("memory://prometheus") as client:
        export(client, registry)
        async with client.lock("a"):
            waiter = asyncio.create_task(client.lock("a").acquire())
            await until(lambda: client.stats()["waiting"] == 1)
            found = samples(registry)
            assert (found["aiolock_held",], found["aiolock_waiting",]) == (1, 1)
        await (await waiter).release()
    found = samples(registry)
    assert (found["aiolock_held",], found["aiolock_waiting",]) == (0, 0)


async def test_clients_in_one_registry_are_counted_together_and_each_once():
    registry = CollectorRegistry()
    async with aiolock.connect("memory://one") as one, aiolock.connect("memory://two") as two:
        for client in (one, two, one):
            export(client, registry)
        async with one.lock("a") as first, two.lock("a") as second:
            await first.renew()
            await second.renew()
            assert samples(registry)["aiolock_held",] == 2
        found = samples(registry)
    assert found["aiolock_wait_seconds_count", *labels("lock")] == 2
    assert found["aiolock_renewal_slack_ratio_count",] == 2


def test_threads_have_the_same_exports():
    import aiolock.portal

    registry, spans = CollectorRegistry(), InMemorySpanExporter()
    with aiolock.portal.connect("memory://prometheus") as client:
        export(client, registry)
        instrument(client, tracer_provider=tracing(spans), meter_provider=MeterProvider())
        with client.lock("a"):
            assert samples(registry)["aiolock_held",] == 1
    assert samples(registry)["aiolock_hold_seconds_count", *labels("lock")] == 1
    assert [span.name for span in spans.get_finished_spans()] == ["lock wait", "lock hold"]


def tracing(spans: InMemorySpanExporter) -> TracerProvider:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return provider


async def test_opentelemetry_has_the_same_metrics():
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    async with aiolock.connect("memory://opentelemetry") as client:
        instrument(client, meter_provider=provider)
        instrument(client, meter_provider=provider)
        await something_happens(client)
        data = reader.get_metrics_data()
    provider.shutdown()
    points = {
        (metric.name, *sorted(point.attributes.items())): point
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    }
    order = (("aiolock.family", "lock"), ("aiolock.template", "order:{number}"))
    plain = (("aiolock.family", "lock"), ("aiolock.template", ""))
    assert points["aiolock.wait.duration", *order].count == 2
    assert points["aiolock.wait.duration", *order].explicit_bounds == SECONDS
    assert points["aiolock.hold.duration", *order].sum >= 0.02
    assert points["aiolock.hold.duration", *plain].count == 1
    assert points["aiolock.lost", plain[0], ("aiolock.reason", "revoked"), plain[1]].value == 1
    template = ("aiolock.template", "order:{number}")
    assert points["aiolock.timeouts", template].value == 1
    assert points["aiolock.timeouts", ("aiolock.template", "")].value == 1
    assert points["aiolock.skipped", template].value == 1
    values = {name: point.value for (name, *rest), point in points.items() if not rest}
    assert values == {
        "aiolock.held": 0,
        "aiolock.waiting": 0,
        "aiolock.passed": 1,
        "aiolock.renewals": 0,
        "aiolock.renewal_failures": 0,
        "aiolock.cleanups": values["aiolock.cleanups"],
    }


def test_every_figure_is_exported():
    """By its name, or as what callbacks count by family and template."""
    counted = {"acquired", "released", "waited", "waits", "holds", "lost", "losses", "timeouts", "skipped"}
    exported = {*GAUGES, *COUNTERS, *COUNTERS_BY_TEMPLATE, "slack"}
    assert exported | counted == set(Figures.__annotations__)


async def test_spans_belong_to_the_span_in_which_the_lock_was_acquired():
    spans = InMemorySpanExporter()
    provider = tracing(spans)
    tracer = provider.get_tracer("test")
    async with aiolock.connect("memory://opentelemetry") as client:
        instrument(client, tracer_provider=provider, meter_provider=MeterProvider())
        with tracer.start_as_current_span("pay"):
            async with client.lock("order:42") as lease:
                await asyncio.sleep(0.01)
        with tracer.start_as_current_span("lose"):
            lost = await client.lock("order:43").acquire()
        await asyncio.create_task(client.lock("order:43").force_release())
        assert await lost.wait_lost() == "force-released"
    found = {span.name if span.parent is None else f"{span.name} {span.attributes['aiolock.name']}": span
             for span in spans.get_finished_spans()}  # fmt: skip
    assert set(found) == {
        "pay",
        "lose",
        "lock wait order:42",
        "lock hold order:42",
        "lock wait order:43",
        "lock hold order:43",
    }
    for name, outer in (("order:42", "pay"), ("order:43", "lose")):
        wait, hold, parent = found[f"lock wait {name}"], found[f"lock hold {name}"], found[outer]
        assert wait.parent.span_id == hold.parent.span_id == parent.context.span_id
        assert wait.start_time <= wait.end_time
        assert hold.start_time <= hold.end_time
    hold = found["lock hold order:42"]
    assert hold.end_time - hold.start_time >= 10_000_000
    assert dict(hold.attributes) == {
        "aiolock.name": "order:42",
        "aiolock.token": lease.token,
        "aiolock.family": "lock",
        "aiolock.template": "",
    }
    assert hold.status.is_unset
    gone = found["lock hold order:43"]
    assert gone.attributes["aiolock.reason"] == "force-released"
    assert not gone.status.is_ok
    assert gone.status.description == "lost (force-released)"


async def test_a_loss_that_the_answer_to_the_release_tells_is_one_hold():
    registry, spans = CollectorRegistry(), InMemorySpanExporter()
    async with aiolock.connect("memory://both") as client:
        export(client, registry)
        instrument(client, tracer_provider=tracing(spans), meter_provider=MeterProvider())
        lease = await client.lock("a").acquire()
        await lease.release()
        assert lease._hold.disown()
        found = samples(registry)
    assert found["aiolock_hold_seconds_count", *labels("lock")] == 1
    assert found["aiolock_lost_total", *labels("lock", reason="revoked")] == 1
    assert [span.name for span in spans.get_finished_spans()] == ["lock wait", "lock hold"]


@pytest.mark.parametrize("make", [export, instrument])
def test_what_is_no_client_is_refused(make):
    with pytest.raises(aiolock.ConfigError, match="must be given a client, not 'redis://'"):
        make("redis://")


def test_what_is_no_registry_is_refused():
    with pytest.raises(aiolock.ConfigError, match="registry must be a CollectorRegistry, not 3"):
        export(aiolock.connect("memory://"), 3)


@pytest.mark.parametrize(
    ("module", "package"), [("prometheus", "prometheus_client"), ("opentelemetry", "opentelemetry")]
)
def test_a_missing_library_is_named_with_the_command_that_helps(module, package):
    program = (
        f"import sys; sys.modules['{package}'] = None\n"
        "import aiolock\n"
        f"try: import aiolock.{module}\n"
        "except aiolock.MissingDriver as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == f'{package} is not installed; run: pip install "python-aiolock[{module}]"\n'
