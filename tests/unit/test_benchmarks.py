"""The benchmarks count right, and the pages say what the committed results say."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import re
import sys

import pytest

from benchmarks import gate, pages
from benchmarks.__main__ import parsed
from benchmarks.calm import Calm
from benchmarks.contestants import contestant, peers
from benchmarks.contestants.base import Contestant, Span
from benchmarks.measure import Goal, Report, Series, alternate, percentile, ratio
from benchmarks.peers import LIBRARIES, PROGRAMS, absent, built, versions
from benchmarks.plots import INK, PLOTS, STYLES, draw
from benchmarks.report import Run, as_json, as_markdown, as_text, goals, loaded, merged, number, table
from benchmarks.scenarios import methods
from benchmarks.scenarios.compare import COLUMNS
from benchmarks.scenarios.context import EXECUTED, Context
from benchmarks.scenarios.draining import figures
from benchmarks.scenarios.methods import offered
from benchmarks.suites import COMPARED, SHOPS, SUITES, LockFile
from benchmarks.workers import JobFailed, Workers

ABOUT = {
    "command": "python -m benchmarks",
    "rounds": 2,
    "seconds": 60,
    "python": "CPython",
    "packages": {"redis": "8"},
    "servers": ["Redis 7"],
    "system": "Linux",
    "processor": "one",
    "cores": 2,
    "load": 0.1,
    "calm": {"rounds": 4, "repeated": 1, "disturbed": 0},
}


@pytest.fixture
def report() -> Report:
    report = Report("redis/free", "A free lock", {"rate": "turns/s", "each": "µs each"})
    report.add("ours", rate=[300.0, 500.0, 400.0], each=[3.0, 5.0, 4.0])
    report.add("theirs", rate=[100.0, 250.0, 100.0])
    report.compare("rate, ours / theirs", "ours", "theirs", "rate", 3)
    report.limit("each", "ours", "each", 3.9, "µs")
    report.notes.append("A note.")
    return report


def test_ratios_are_taken_round_by_round(report):
    [compared, limited] = report.goals
    assert compared.value == Series((3.0, 2.0, 4.0))
    assert compared.reached
    assert not limited.reached
    assert ratio(Series((1.0,)), Series((0.0,))).median == math.inf
    with pytest.raises(ValueError, match="shorter"):
        ratio(Series((1.0, 2.0)), Series((1.0,)))


def test_a_ratio_without_a_goal_is_mentioned(report):
    report.mention("theirs", "ours", "rate")
    assert report.notes[-1] == "turns/s, theirs / ours: 0.25 - 0.333 - 0.5."
    report.mention("ours", "ours", "each")
    assert report.notes[-1] == "µs each, ours / ours: 1."
    assert len(report.goals) == 2


def test_a_missed_goal_is_shown_as_missed(report):
    assert [line.split("|")[-2].strip() for line in goals([report])[2:]] == ["yes", "NO"]
    assert "NO" in as_text(report)


def test_rounds_alternate_and_another_one_begins_each_time():
    order = []
    played = alternate(3, ["a", "b", "c"], lambda who: order.append(who) or len(order))
    assert "".join(order) == "abcbcacab"
    assert played == {"a": [1, 6, 8], "b": [2, 4, 9], "c": [3, 5, 7]}


def test_percentiles_and_digits():
    assert percentile([3, 1, 2], 50) == 2
    assert percentile([1, 2], 100) == 2
    assert [number(value) for value in (0, 0.00012, 1.2345, 12345.6)] == ["0", "1.2e-04", "1.23", "12,346"]


def test_two_inside_one_lock_are_seen_and_two_inside_two_locks_are_not():
    together = [(0.0, 1.0, 3.0, 0), (0.0, 2.0, 4.0, 1)]
    assert figures(together, 1, 1)["double"] == 1
    assert figures(together, 1, 2)["double"] == 0
    assert figures([(0.0, 1.0, 2.0, 0), (0.0, 2.0, 4.0, 1)], 1, 1)["double"] == 0


def test_a_drain_is_timed_from_the_first_request_to_the_last_exit():
    found = figures([(10.0, 10.0, 11.0, 0), (10.5, 11.0, 12.0, 1)], 1, 1)
    assert found["rate"] == 1
    assert found["worst"] == 0.5


def test_figures_survive_their_file(report):
    runs = loaded(as_json([Run(ABOUT, [report])]))
    [run] = runs
    [found] = run.reports
    assert run.about == ABOUT
    assert table(found) == table(report)
    assert goals(run.reports) == goals([report])
    assert as_markdown(runs) == as_markdown([Run(ABOUT, [report])])


def test_a_run_takes_the_place_of_the_same_scenarios_of_earlier_ones(report):
    others = [Report(name, name, {}) for name in ("redis/many", "etcd/free")]
    earlier = [Run({"command": "first"}, [report, others[0]]), Run({"command": "second"}, [others[1]])]
    latest = Run({"command": "third"}, [Report("redis/free", "again", {}), Report("etcd/free", "again", {})])
    runs = merged(earlier, latest)
    assert [(run.about["command"], [each.name for each in run.reports]) for run in runs] == [
        ("first", ["redis/many"]),
        ("third", ["redis/free", "etcd/free"]),
    ]


def test_pages_are_written_between_their_markers(report):
    page = "Before\n<!-- figures: redis/free rate -->\nold\n<!-- end -->\nbetween\n<!-- goals -->\n<!-- end -->\nafter"
    results = as_json([Run(ABOUT, [report])])
    new = pages.render(page, results)
    assert new.startswith("Before\n<!-- figures: redis/free rate -->\n\n|  | turns/s |\n")
    assert "old" not in new
    assert "µs each" not in new
    assert "\nbetween\n" in new
    assert "| redis/free | each |" in new
    assert new.endswith("<!-- end -->\nafter")
    assert pages.render(new, results) == new
    with pytest.raises(KeyError, match="no scenario 'redis/other'"):
        pages.render(page.replace("redis/free", "redis/other"), results)


def test_a_page_has_the_conditions_of_the_runs_of_its_scenarios_and_says_what_was_not_measured(report):
    results = as_json([Run(ABOUT, [report]), Run({**ABOUT, "cores": 77}, [Report("etcd/free", "t", {})])])
    page = "<!-- conditions: {} -->\n<!-- end -->\n<!-- figures: etcd/hot -->\n<!-- end -->"
    one = pages.render(page.format("redis/free etcd/hot"), results)
    assert "2 cores of one" in one
    assert "77 cores" not in one
    assert "\nNot measured yet: `python -m benchmarks etcd --scenario hot`\n" in one
    plot = "<!-- plot: methods/sale -->\n<!-- end -->"
    assert "![" not in pages.render(plot, results)
    sale = as_json([Run(ABOUT, [Report("methods/sale", "The sale", {})])])
    assert "\n![The sale](../../benchmarks/results/methods-light.svg)\n" in pages.render(plot, sale)
    two = pages.render(page.format("redis/free etcd/free"), results)
    assert "2 cores of one" in two
    assert "77 cores of one" in two


def test_the_pages_say_what_the_committed_results_say():
    results = pages.RESULTS.read_text()
    for page in pages.PAGES:
        text = page.read_text()
        assert re.search("<!-- (figures|conditions): ", text), page
        assert pages.render(text, results) == text, f"{page.name}: run python -m benchmarks.pages"
    assert pages.main(["--check"]) == 0


def test_what_stands_beside_the_chart_is_what_was_measured():
    """Who cannot see the picture reads its figures; they are those of the committed run."""
    found = {r.name: r for run in loaded(pages.RESULTS.read_text()) for r in run.reports}["redis/handover"]
    whos = ("redis-py", "redis-py 0.001", "aiolock")
    default, often, ours = (f"{found.rows[who]['p50'].median / 1000:.2g} ms" for who in whos)
    told = f"redis-py as it comes {default}, redis-py asking every millisecond {often}, aiolock {ours}"
    for page in ("README.md", "docs/topics/performance.md"):
        assert told in (pages.ROOT / page).read_text(), page


def test_the_committed_runs_are_complete():
    """All suites, and all scenarios of a suite in one run; nothing was left out because it looked bad."""
    runs = loaded(pages.RESULTS.read_text())
    assert {report.name.partition("/")[0] for run in runs for report in run.reports} == set(SUITES)
    for run in runs:
        found = [report.name for report in run.reports]
        suites = dict.fromkeys(name.partition("/")[0] for name in found)
        assert sorted(found) == sorted(
            f"{suite}/{name}" for suite in suites for name in SUITES[suite].scenarios
        )
        assert [report.name for report in run.reports if report.failed or not report.rows] == []
        assert "--quick" not in run.about["command"]
    assert (pages.RESULTS.parent / "README.md").read_text() == as_markdown(runs)
    drawn = {report.name for run in runs for report in run.reports}
    for stem in [plot.stem for plot in PLOTS if plot.scenario in drawn]:
        for theme in INK:
            assert (pages.RESULTS.parent / f"{stem}-{theme}.svg").is_file()


def test_what_is_unknown_is_refused_with_what_there_is(capsys):
    with pytest.raises(SystemExit):
        parsed(["oracle"])
    assert "redis, zookeeper, mysql" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parsed(["mysql", "--scenario", "leases"])
    assert "there are free, hot" in capsys.readouterr().err
    assert parsed([]).suite == ["redis"]
    assert parsed(["all"]).suite == list(SUITES)
    assert parsed(["postgresql", "--scenario", "handover"]).scenario == ["handover"]
    assert parsed(["memcached", "--scenario", "late"]).scenario == ["late"]


def test_contestants_are_known_by_name_and_interval():
    assert contestant("polling row 0.005", "postgresql://h/db")._interval == 0.005
    assert contestant("flock 0.1", "sqlite:///f")._interval == 0.1
    assert contestant("polling add 0.001", "memcached://h:1")._interval == 0.001
    assert contestant("polling key 0.02", "etcd://h:1")._interval == 0.02
    assert isinstance(contestant("kazoo", "zookeeper://h"), Contestant)
    assert contestant("redis-py 0.01", "redis://h")._sleep == 0.01
    assert contestant("aiolock session", "mysql://h/db").url == "mysql://h/db?mode=session"
    with pytest.raises(KeyError):
        contestant("nobody", "")


def test_statements_are_counted_in_the_log_of_postgresql():
    log = (
        "2026-01-01 UTC [7] LOG:  duration: 0.05 ms  parse __asyncpg_stmt_1__: SELECT 1\n"
        "2026-01-01 UTC [7] LOG:  duration: 0.01 ms  bind __asyncpg_stmt_1__: SELECT 1\n"
        "2026-01-01 UTC [7] LOG:  duration: 12.3 ms  execute __asyncpg_stmt_1__: SELECT 1\n"
        "2026-01-01 UTC [7] LOG:  duration: 4 ms  statement: UPDATE t SET n = 1\n\tWHERE n = 2\n"
    )
    assert EXECUTED.findall(log) == ["SELECT", "UPDATE"]


async def a_small_memcached(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, items: set[bytes]
) -> None:
    """As much of it as the peers ask for."""
    while line := await reader.readline():
        verb, key, *_ = [*line.split(), b""]
        if verb == b"add":
            await reader.readline()
            answer, _ = (b"NOT_STORED" if key in items else b"STORED"), items.add(key)
        elif verb == b"delete":
            answer, _ = (b"DELETED" if key in items else b"NOT_FOUND"), items.discard(key)
        else:
            answer = {b"touch": b"TOUCHED", b"mn": b"MN"}[verb]
        writer.write(answer + b"\r\n")
    writer.close()


async def test_peers_on_memcached_add_and_delete_items():
    items: set[bytes] = set()
    server = await asyncio.start_server(lambda *streams: a_small_memcached(*streams, items), "127.0.0.1")
    url = "memcached://{}:{}".format(*server.sockets[0].getsockname())
    async with server, contestant("polling add 0.001", url) as it, contestant("touch", url) as keeper:
        spans: list[Span] = []
        await it.drain(["a"] * 5, 3, 0.0, spans)
        assert len(spans) == 15
        assert figures(spans, 3, 1)["double"] == 0
        async with keeper.keep(["b", "c"]):
            assert items == {b"by-hand:b", b"by-hand:c"}
            waiting = asyncio.create_task(it.turns("b", 1))
            await asyncio.sleep(0.01)
            assert not waiting.done()
        await waiting
        async with contestant("add + delete", url) as floor, contestant("round trip", url) as trip:
            await floor.turns("d", 2)
            await trip.turns("anything", 2)
    assert items == set()


A_PROGRAM = """
import sys, time
for line in sys.stdin:
    verb, *words = line.split()
    if verb == "drain":
        turns, _, *names = words
        for _ in range(int(turns)):
            for number, _ in enumerate(names):
                now = time.monotonic()
                print(now, now, time.monotonic(), number)
    elif verb in {"take", "leave"}:
        print(time.monotonic())
    elif verb == "line":
        time.sleep(600)
    elif verb not in {"open", "close", "turns"}:
        print("unknown:", verb)
        sys.exit(1)
    print("ok", flush=True)
"""
"""Answers as those of the peers in other languages do."""


@pytest.fixture
def other_language(monkeypatch):
    monkeypatch.setattr(peers._Process, "running", {})
    program = dataclasses.replace(PROGRAMS["go"], command=(sys.executable, "-c", A_PROGRAM))
    monkeypatch.setitem(PROGRAMS, "go", program)
    yield
    for it in peers._Process.running.values():
        it._process.stdin.close()
        it._process.wait(60)
        it._process.stdout.close()


async def test_a_peer_in_another_language_takes_turns_in_its_own_program(other_language):
    async with contestant("redsync", "redis://127.0.0.1:1/0") as it:
        await it.prepare(["a", "b"])
        spans: list[Span] = []
        await it.drain(["a", "b"], 3, 0.0, spans)
        assert sorted(number for *_, number in spans) == [0, 0, 0, 1, 1, 1]
        lock = it.lock("baton")
        assert await it.take(lock) <= await it.leave(lock)


async def test_a_program_that_ends_is_an_error_with_its_last_words(other_language):
    program = peers._Process.get("go")
    with pytest.raises(RuntimeError, match=r"dance: the program ended with status 1: \['unknown: dance'\]"):
        await program.do("dance")


async def test_cancelling_ends_a_program_that_hangs(other_language):
    program = peers._Process.get("go")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await program.do("line", "queue", 1)
    assert await asyncio.to_thread(program._process.wait, 60) < 0
    assert peers._Process.running == {}
    program._process.stdin.close()
    program._process.stdout.close()


def test_a_peer_that_cannot_be_built_is_left_out_with_one_sentence(monkeypatch, tmp_path, report):
    monkeypatch.setattr("benchmarks.peers.BUILT", tmp_path)
    monkeypatch.setitem(PROGRAMS, "java", dataclasses.replace(PROGRAMS["java"], build=("no-such-tool",)))
    monkeypatch.setitem(PROGRAMS, "go", dataclasses.replace(PROGRAMS["go"], build=("false",)))
    absent.cache_clear()
    try:
        context = Context(None, None, True, 1, Calm(0))
        whos = ["aiolock", "redisson", "redsync", "kazoo"]
        assert context.competing(report, whos) == ["aiolock", "kazoo"]
        assert report.notes[1:] == [
            "redisson is left out: no-such-tool is not installed (Debian: maven).",
            "redsync is left out: false failed: 1.",
        ]
        assert not any(built(who) for who in LIBRARIES)
        monkeypatch.setitem(PROGRAMS, "go", dataclasses.replace(PROGRAMS["go"], build=("true",)))
        absent.cache_clear()
        assert context.competing(report, whos) == ["aiolock", "redsync", "kazoo"]
        assert built("redsync")
    finally:
        absent.cache_clear()


def test_without_peers_nothing_is_built_and_nothing_said(monkeypatch, report):
    monkeypatch.setattr("benchmarks.scenarios.context.absent", None)
    context = Context(None, None, True, 1, Calm(0), peers=False)
    assert context.competing(report, ["aiolock", "curator"]) == ["aiolock"]
    assert report.notes == ["A note."]


def test_the_build_files_name_the_version_of_each_peer():
    assert versions().keys() == LIBRARIES.keys()
    assert all(version[0].isdigit() for version in versions().values())


async def test_a_round_trip_reads_the_file_of_sqlite():
    with LockFile() as file:
        async with contestant("round trip", f"{file.url} sqlite:///another") as it:
            await it.turns("anything", 2)
        with pytest.raises(KeyError):
            await contestant("round trip", "oracle://h").__aenter__()


def test_all_servers_are_in_the_plot_with_their_round_trips_and_without_what_they_lack(tmp_path):
    report = Report("compare/servers", "All", COLUMNS)
    report.add("memory://", free=[10.0], hot=[5e4], fair=[2e4], spread=[3e4])
    report.add("Redis & more", **{column: [number + 0.5] for number, column in enumerate(COLUMNS)})
    for file in draw([report], tmp_path):
        text = file.read_text()
        for word in ("memory://", "Redis &amp; more", "mark: one bare round trip, µs", COLUMNS["spread"]):
            assert text.count(word) >= 1, word
    assert len(list(tmp_path.iterdir())) == len(INK)


def test_each_line_of_a_plot_looks_different_from_the_others():
    drawn = {report.name: report for run in loaded(pages.RESULTS.read_text()) for report in run.reports}
    for scenario in ("redis/handover", "redis/waiters", "zookeeper/line"):
        whos = [who for who in drawn[scenario].rows if who != "script floor"]
        styles = {STYLES.get("polling" if who.startswith("redis-py ") else who) for who in whos}
        assert len(styles) == len(whos) >= 3
        assert None not in styles


def test_the_compared_servers_have_different_titles():
    titles = [title for _, some in COMPARED for title in some]
    assert len(set(titles)) == len(titles) >= 10


def test_every_method_that_articles_name_is_measured_by_its_name():
    names = set(offered(dict.fromkeys(SHOPS, "url"), "a b c"))
    assert names >= {
        "MariaDB: FOR UPDATE",
        "PostgreSQL: FOR UPDATE",
        "MariaDB: unique row",
        "MariaDB: version column",
        "Redis: SET NX PX",
        "Redis: WATCH/MULTI/EXEC",
        "Redis: Redlock of 3 (aiolock)",
        "memcached: add",
        "memcached: cas",
        "ZooKeeper: plain node",
        "stand-in for MongoDB: findAndModify",
        "ZooKeeper: sequential nodes (aiolock)",
    }


def test_methods_are_drawn_with_their_rates_and_what_they_oversold(tmp_path):
    report = Report("methods/sale", "All", methods.COLUMNS)
    report.add("Redis: no lock", rate=[5e3], over=[70.0])
    report.add("Redis: aiolock", rate=[400.0], over=[0.0])
    for file in draw([report], tmp_path):
        assert "OVERSOLD" in (text := file.read_text())
        assert "400/s" in text


async def test_locks_are_kept_for_as_long_as_the_block_lasts():
    async with contestant("aiolock memory://", "") as it:
        async with it.keep(["a", "b"]):
            assert await it.lock("a").locked()
        assert not await it.lock("b").locked()


async def test_contenders_of_a_line_enter_one_after_the_other():
    async def ready() -> None:
        assert it.client.stats()["waiting"] == 5

    async with contestant("aiolock memory://", "") as it:
        entered = await it.line("queue", 5, ready)
    assert len(entered) == 6
    assert entered == sorted(entered)


def test_workers_run_jobs_in_step_and_a_failure_leaves_none_behind():
    drain = {"who": "aiolock memory://", "url": "", "tasks": 3, "turns": 2}
    pauses = []
    with Workers() as workers:
        found = workers.together([("drain", drain)] * 2, between=pauses.append)
        assert [len(spans) for spans in found] == [6, 6]
        assert pauses == [0, 1]
        busy = [worker._process.pid for worker in workers._workers]
        with pytest.raises(JobFailed, match="KeyError: 'nobody'"):
            workers.together([("drain", drain), ("drain", {**drain, "who": "nobody"})])
        assert workers._workers == []
        assert all(not os.path.exists(f"/proc/{pid}") for pid in busy)  # noqa: PTH110 - of a process
        assert len(workers.one("drain", **drain)) == 6


def gated(value: float, *, must: float = 1.0, at_most: bool = True) -> dict[str, Report]:
    """One report for each row of the gate, with that figure."""
    reports = {}
    for name, what in gate.ROWS.items():
        reports[name] = Report(name, name, {})
        reports[name].goals.append(Goal(what, Series((value,)), must, at_most))
    return reports


def test_the_bound_of_a_row_is_its_goal_or_what_was_committed():
    [good] = gated(1.0)["redis/free"].goals
    [missed] = gated(2.0)["redis/free"].goals
    assert gate.bound(good, good) == pytest.approx(1.15)
    assert gate.bound(good, missed) == pytest.approx(2.3)
    [rate] = gated(0.5, at_most=False)["redis/free"].goals
    assert gate.bound(rate, rate) == pytest.approx(0.425)


def test_the_gate_fails_only_what_is_worse_in_every_run():
    said, runs = [], []

    def play(scenarios):
        runs.append(scenarios)
        for suite, names in scenarios.items():
            for name in names:
                # Always worse, worse once, and never.
                slow = name == "free" or (name == "many" and len(runs) == 1)
                yield gated(1.2 if slow else 1.1)[f"{suite}/{name}"]

    assert gate.check(play, gated(1.0), said.append) == ["redis/free"]
    assert runs[1:] == [{"redis": ["free", "many"]}, {"redis": ["free"]}]
    assert len(said) == len(gate.ROWS) + 3


def test_a_scenario_that_ends_with_an_error_fails_the_gate_at_once():
    def play(scenarios):
        for name, report in gated(1.0).items():
            report.failed = name == "redis/many"
            yield report

    assert gate.check(play, gated(1.0), lambda _: None) == ["redis/many"]


def test_the_rows_of_the_gate_are_in_the_committed_results():
    reports = {report.name: report for run in loaded(pages.RESULTS.read_text()) for report in run.reports}
    for name, what in gate.ROWS.items():
        assert what in [goal.what for goal in reports[name].goals]


def test_the_help_can_be_read(capsys):
    with pytest.raises(SystemExit) as end:
        parsed(["--help"])
    assert end.value.code == 0
    assert "--gate" in capsys.readouterr().out
