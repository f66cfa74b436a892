"""Prometheus with several processes: under PROMETHEUS_MULTIPROC_DIR no figure is missing, and the dead hold nothing.

prometheus_client decides when it is imported, so each part is a program of its own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.faults.staging import until
from tests.processes import Child
from tests.unit.test_docs import ROOT, blocks

PAGE = ROOT / "docs/how-to/observe.md"

Samples = dict[str, float]


def samples(text: str) -> Samples:
    """The values by name and labels."""
    return {
        f"{sample.name}{json.dumps(sample.labels, sort_keys=True)}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def page_block(beginning: str) -> str:
    """The example of the page that begins so."""
    [found] = [text for _, text in blocks(PAGE) if text.startswith(beginning)]
    return found


@pytest.fixture
def scrape(tmp_path, monkeypatch) -> Callable[[], Samples]:
    """What the page's `/metrics` answers."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    names: dict[str, Callable[[], bytes]] = {}
    exec(page_block("import os\n"), names)
    return lambda: samples(names["metrics"]().decode())


def run(program: str, folder: Path | None, *arguments: str) -> str:
    """Run a program, which shares its metrics in a folder if there is one; return what it prints."""
    environment = dict(os.environ)
    environment.pop("PROMETHEUS_MULTIPROC_DIR", None)
    if folder is not None:
        environment["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


SOMETHING = """
    import asyncio, aiolock
    from aiolock.prometheus import export
    from prometheus_client import generate_latest

    async def main():
        async with aiolock.connect("memory://", ttl=0.6) as client:
            export(client)
            @client.locked("order:{number}")
            async def turn(number):
                while not (client.stats()["waiting"] or client.stats()["passed"]):
                    await asyncio.sleep(0.01)
            async with client.lock("order:42"):
                pass
            await asyncio.gather(turn(42), turn(42))
            job = client.once("order:{number}")(turn)
            async with client.lock("order:42") as lease:
                try:
                    await asyncio.create_task(client.locked("order:{number}", timeout=0)(turn)(42))
                except aiolock.AcquireTimeout:
                    pass
                await asyncio.create_task(job(42))
                while client.stats()["slack"].count < 2:
                    await asyncio.sleep(0.01)
                renew, client._backend.renew = client._backend.renew, None
                while not client.stats()["renewal_failures"]:
                    await asyncio.sleep(0.01)
                client._backend.renew = renew
                waiter = asyncio.create_task(client.lock("order:42").acquire())
                while not client.stats()["waiting"]:
                    await asyncio.sleep(0.01)
                waiter.cancel()
                await asyncio.wait([waiter])
            lease = await client.lock("lost").acquire()
            await client.lock("lost").force_release()
            await lease.wait_lost()
        print(generate_latest().decode())
        figures = client.stats()
        print("# slack", figures["slack"].count, figures["slack"].total, figures["renewals"])
    asyncio.run(main())
"""


@pytest.fixture(scope="module")
def alone() -> Samples:
    """What one process answers by itself."""
    return samples(run(SOMETHING, None))


def test_no_figure_is_missing(tmp_path, scrape, alone):
    """What one process answers by itself, several answer together: the same series with the same values."""
    told = run(SOMETHING, tmp_path)
    together = scrape()
    ours = {key: value for key, value in alone.items() if key.startswith("aiolock_")}
    # The gauges of a process that has ended do not count; the next test has them.
    ours = {
        key: value for key, value in ours.items() if not re.match(r".*_created|aiolock_(held|waiting)", key)
    }
    assert set(ours) == {key for key in together if key.startswith("aiolock_")}
    # Times differ, and with them how often the lease was renewed.
    exact = {
        key: value
        for key, value in ours.items()
        if not re.match(r"aiolock_\w+_(sum|bucket)|aiolock_renewal|aiolock_cleanups", key)
    }
    assert exact == {key: together[key] for key in exact}
    order = json.dumps({"template": "order:{number}"})
    assert together[f"aiolock_timeouts_total{order}"] == together[f"aiolock_skipped_total{order}"] == 1
    count, total, renewals = map(float, told.partition("# slack")[2].split())
    assert count >= 2
    assert together["aiolock_renewal_slack_ratio_count{}"] == count
    assert together["aiolock_renewal_slack_ratio_sum{}"] == pytest.approx(total)
    assert together["aiolock_renewals_total{}"] == renewals
    assert together["aiolock_renewal_failures_total{}"] >= 1
    assert together["aiolock_passed_total{}"] == 1


WORKER = """
    import asyncio, sys, aiolock
    from aiolock.prometheus import export

    async def main(url, name):
        async with aiolock.connect(url, ttl=30) as client:
            export(client)
            for _ in range(3):
                async with client.lock(name):
                    pass
            try:
                async with client.lock(f"{name}:held"):
                    await asyncio.create_task(client.lock(f"{name}:held").acquire(timeout=0))
            except aiolock.AcquireTimeout:
                pass
            async with client.lock(f"{name}:held"):
                waiter = asyncio.create_task(client.lock(f"{name}:held").acquire())
                await asyncio.sleep(300)
    asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_worker_that_was_killed_holds_nothing_and_no_counter_falls(tmp_path, scrape, redis_url):
    logs = tmp_path / "logs"
    logs.mkdir()
    workers = [
        Child(
            [
                *("env", f"PROMETHEUS_MULTIPROC_DIR={tmp_path}", f"PYTHONPATH={ROOT}"),
                *(sys.executable, "-c", textwrap.dedent(WORKER), redis_url, name),
            ],
            logs / name,
        )
        for name in ("first", "second")
    ]
    try:
        for worker in workers:
            worker.start()

        def gauges() -> tuple[float, float]:
            found = scrape()
            assert all(worker.running for worker in workers), [worker.log_tail(20) for worker in workers]
            return found.get("aiolock_held{}", 0), found.get("aiolock_waiting{}", 0)

        await until(lambda: gauges() == (2, 2), "both hold a lock, for which a task of theirs waits")
        before = scrape()
        assert before['aiolock_timeouts_total{"template": ""}'] == 2
        for worker, left in zip(workers, (1, 0), strict=True):
            os.kill(worker.pid, signal.SIGKILL)
            worker.wait(60)
            after = scrape()
            assert (after["aiolock_held{}"], after["aiolock_waiting{}"]) == (left, left) if left else True
            counters = [key for key in before if not key.startswith(("aiolock_held", "aiolock_waiting"))]
            assert [key for key in counters if after[key] < before[key]] == []
        # Nothing is left of either.
        assert not {"aiolock_held{}", "aiolock_waiting{}"} & set(scrape())
        assert len(counters) > 20
    finally:
        for worker in workers:
            worker.stop()


def test_several_clients_and_openings_of_a_process_are_counted_together(tmp_path, scrape):
    program = """
        import asyncio, aiolock
        from aiolock.prometheus import export

        clients = [aiolock.connect(f"memory://{number}") for number in range(2)]
        for client in (*clients, *clients):
            export(client)

        async def main():
            for _ in range(2):
                async with clients[0], clients[1]:
                    for client in clients:
                        for _ in range(2):
                            async with client.lock("x"):
                                await asyncio.create_task(client.lock("x").try_acquire())
                                try:
                                    await asyncio.create_task(client.lock("x").acquire(timeout=0))
                                except aiolock.AcquireTimeout:
                                    pass
        # The second time on another loop, and the third after a loop that was closed first.
        asyncio.run(main())
        asyncio.run(main())
        async def leave():
            await clients[0].open()
            asyncio.get_running_loop().lease = await clients[0].lock("y").acquire()
        asyncio.run(leave())
        asyncio.run(main())
    """
    run(program, tmp_path)
    found = scrape()
    assert found['aiolock_timeouts_total{"template": ""}'] == 3 * 2 * 2 * 2
    assert found.get("aiolock_held{}", 0) == 0


def test_a_forked_child_counts_what_is_its_own(tmp_path, scrape):
    """Neither what its parent has counted, nor what that holds at the moment of the fork."""
    program = """
        import asyncio, os, sys, time, aiolock, aiolock.portal
        from aiolock import prometheus
        from aiolock.prometheus import export

        client = aiolock.connect("memory://a")
        export(client)
        sync = aiolock.portal.connect("memory://b")
        export(sync)
        [metrics] = prometheus._metrics.values()

        async def wait_in_vain():
            async with client, client.lock("x"):
                try:
                    await asyncio.create_task(client.lock("x").acquire(timeout=0))
                except aiolock.AcquireTimeout:
                    pass

        asyncio.run(wait_in_vain())
        with sync, sync.lock("held"):
            gauge = metrics._gauges["held"]
            while gauge._value.get() != 1:  # until it was written
                time.sleep(0.01)
            pid = os.fork()
            if pid == 0:
                asyncio.run(wait_in_vain())
                print("child", flush=True)
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
            import shutil
            shutil.copytree(os.environ["PROMETHEUS_MULTIPROC_DIR"], sys.argv[1])
    """
    copy = tmp_path.parent / f"{tmp_path.name}-copy"
    assert run(program, tmp_path, str(copy)) == "child\n"
    try:
        assert scrape()['aiolock_timeouts_total{"template": ""}'] == 2
        gauges = sorted(path.name for path in copy.glob("gauge_livesum_*.db"))
        assert len(gauges) == 2
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.multiprocess import MultiProcessCollector

        registry = CollectorRegistry()
        MultiProcessCollector(registry, str(copy))
        assert samples(generate_latest(registry).decode())["aiolock_held{}"] == 1
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def test_files_are_written_at_most_once_a_second_and_not_on_the_way_of_an_acquire(tmp_path):
    program = """
        import asyncio, time, aiolock
        from aiolock import prometheus

        written = []
        write = prometheus._Written._write
        def noted(self, new):
            written.append((time.monotonic(), asyncio.current_task().get_name()))
            write(self, new)
        prometheus._Written._write = noted

        async def main():
            async with aiolock.connect("memory://a") as one, aiolock.connect("memory://b") as two:
                prometheus.export(one)
                prometheus.export(two)
                end = time.monotonic() + 2.5
                while time.monotonic() < end:
                    for client in (one, two):
                        async with client.lock("x"):
                            await asyncio.sleep(0)
        asyncio.run(main())
        while written and written[-1][1] == "aiolock-close":
            written.pop()
        assert len(written) >= 2, written
        assert {name for _, name in written} == {"aiolock-report"}
        gaps = [later - sooner for (sooner, _), (later, _) in zip(written, written[1:])]
        assert min(gaps) >= 0.9, gaps
    """
    run(program, tmp_path)


def test_a_second_registry_is_refused(tmp_path):
    program = """
        import aiolock
        from aiolock.prometheus import export
        from prometheus_client import CollectorRegistry

        client = aiolock.connect("memory://")
        export(client)
        try:
            export(client, CollectorRegistry())
        except aiolock.ConfigError as error:
            print(error)
        export(client)
    """
    assert run(program, tmp_path) == (
        "with PROMETHEUS_MULTIPROC_DIR a process has one set of metrics, which is in another registry already: "
        "give export() that registry, and MultiProcessCollector one of its own\n"
    )


# --- the queries and alert rules of the page


def rules() -> str:
    """The rules of the page, as the file that a reader makes of them."""
    [text] = re.findall(r"^```yaml\n(groups:.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return text


def queries() -> list[str]:
    """The queries of the page."""
    [text] = re.findall(r"^```promql\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return [query for query in re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).split("\n\n") if query.strip()]


def check_rules(path: Path) -> subprocess.CompletedProcess[str]:
    promtool = shutil.which("promtool")
    assert promtool, "promtool is missing: run `make servers`, or install the Debian package prometheus"
    return subprocess.run(
        [promtool, "check", "rules", str(path)], capture_output=True, text=True, check=False, timeout=60
    )


def test_prometheus_accepts_the_queries_and_alert_rules_of_the_page(tmp_path):
    assert len(queries()) == 6
    recorded = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries())]
    (tmp_path / "queries.yml").write_text(json.dumps({"groups": [{"name": "queries", "rules": recorded}]}))
    (tmp_path / "alerts.yml").write_text(rules())
    for name, count in (("queries.yml", 6), ("alerts.yml", rules().count("alert:"))):
        done = check_rules(tmp_path / name)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"SUCCESS: {count} rules found" in done.stdout + done.stderr
    (tmp_path / "wrong.yml").write_text(rules().replace("increase(", "grows("))
    assert check_rules(tmp_path / "wrong.yml").returncode != 0


def test_the_queries_and_alert_rules_ask_for_series_that_are_there(alone):
    there = {key.partition("{")[0] for key in alone}
    named = set(re.findall(r"\baiolock_\w+", rules() + "\n".join(queries())))
    assert len(named) > 6
    assert named <= there
