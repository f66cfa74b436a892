"""Reports as text: tables of medians and spreads, goals beside them, the same in Markdown and JSON."""

from __future__ import annotations

import json
import os
import platform
import sqlite3
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from benchmarks import peers
from benchmarks.measure import Goal, Report, Series
from tests.processes import program
from tests.servers import MYSQLD, postgres

__all__ = [
    "Run",
    "as_json",
    "as_markdown",
    "as_text",
    "conditions",
    "goals",
    "loaded",
    "merged",
    "number",
    "surroundings",
    "table",
]


PACKAGES = {
    "redis": ("redis", "hiredis", "coredis", "uvloop"),
    "replicas": ("redis", "hiredis"),
    "zookeeper": ("aiozk", "kazoo"),
    "mysql": ("aiomysql", "PyMySQL"),
    "compare": ("redis", "hiredis", "aiozk", "aiomysql", "PyMySQL", "asyncpg", "h2"),
    "methods": ("redis", "hiredis", "aiozk", "aiomysql", "PyMySQL", "asyncpg", "h2", "pymongo"),
    "postgresql": ("asyncpg",),
    "sqlite": (),
    "memcached": (),
    "etcd": ("h2",),
    "kinds": ("redis", "hiredis", "aiozk", "kazoo", "aiomysql", "PyMySQL"),
}
"""By suite, what its figures depend on beside aiolock."""


def surroundings(argv: Sequence[str], suites: Sequence[str], rounds: int) -> dict[str, Any]:
    """What a figure means nothing without."""
    packages = dict.fromkeys(name for suite in suites for name in ("python-aiolock", *PACKAGES[suite]))
    return {
        "command": " ".join(("python -m benchmarks", *argv)),
        "rounds": rounds,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "packages": {name: _version(name) for name in packages},
        "servers": _servers(suites),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }


def _servers(suites: Sequence[str]) -> list[str]:
    """What the servers say of themselves, and the peers in other languages."""
    found = []
    asked = set(suites)
    if asked & {"redis", "replicas", "compare", "kinds", "methods"}:
        redis = program("redis-server", package="redis-server", server="redis")
        found.append(subprocess.check_output([redis, "--version"], text=True).split(" sha=")[0])
    if asked & {"zookeeper", "compare", "kinds", "methods"}:
        found.append(f"ZooKeeper {_jar('zookeeper')}")
        java = program("java", package="default-jre-headless", server="zookeeper")
        said = subprocess.run([java, "-version"], capture_output=True, text=True, check=True).stderr
        found.append(said.partition("\n")[0])
    if asked & {"mysql", "compare", "kinds", "methods"}:
        mariadb = MYSQLD or program("mariadbd", package="mariadb-server-core", server="mariadb")
        found.append(subprocess.check_output([mariadb, "--version"], text=True).partition("  ")[2].strip())
    if asked & {"postgresql", "compare", "methods"}:
        found.append(subprocess.check_output([postgres()[0], "--version"], text=True).strip())
    if asked & {"memcached", "compare", "methods"}:
        memcached = program("memcached", package="memcached", server="memcached")
        found.append(subprocess.check_output([memcached, "--version"], text=True).strip())
    if asked & {"etcd", "compare", "methods"}:
        etcd = program("etcd", package="etcd-server", server="etcd")
        found.append(subprocess.check_output([etcd, "--version"], text=True).partition("\n")[0])
    if asked & {"redis", "zookeeper"}:
        found += [f"{who} {its}" for who, its in peers.versions().items() if peers.built(who)]
    if asked & {"sqlite", "compare"}:
        found.append(f"SQLite {sqlite3.sqlite_version}")
    return found


def _jar(name: str) -> str:
    """The version that Maven has written into a file of Debian's."""
    with ZipFile(f"/usr/share/java/{name}.jar") as jar:
        [properties] = [each for each in jar.namelist() if each.endswith(f"/{name}/pom.properties")]
        lines = jar.read(properties).decode().splitlines()
    return next(line.partition("=")[2] for line in lines if line.startswith("version="))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


# --- figures


def number(value: float) -> str:
    """Three digits that matter, and thousands apart."""
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.1e}"


def spread(series: Series) -> str:
    """The median, and between what it lies."""
    low, median, high = number(series.low), number(series.median), number(series.high)
    return median if low == high else f"{median} ({low}-{high})"


def _must(goal: Goal) -> str:
    sign = "≤" if goal.at_most else "≥"
    return f"{sign} {number(goal.must)} {goal.unit}"


def _verdict(goal: Goal) -> str:
    return "yes" if goal.reached else "NO"


def _table(report: Report, only: Sequence[str] = ()) -> list[list[str]]:
    columns = only or list(report.columns)
    rows = [["", *(report.columns[column] for column in columns)]]
    for who, figures in report.rows.items():
        rows.append([who, *(spread(figures[column]) if column in figures else "" for column in columns)])
    return rows


def _goals(report: Report) -> list[list[str]]:
    rows = [["goal", "found", "must", "reached"]]
    rows += [
        [goal.what, f"{spread(goal.value)} {goal.unit}", _must(goal), _verdict(goal)] for goal in report.goals
    ]
    return rows


# --- text, Markdown, JSON


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def _piped(rows: list[list[str]]) -> list[str]:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]


def as_text(report: Report) -> str:
    """For a terminal."""
    lines = [f"\n== {report.name}: {report.title} [{report.seconds:g} s]", "", *_aligned(_table(report))]
    if report.goals:
        lines += ["", *_aligned(_goals(report))]
    lines += ["", *report.notes] if report.notes else []
    return "\n".join(lines)


def command(scenario: str) -> str:
    """What runs the scenario of this name."""
    return f"python -m benchmarks {scenario.replace('/', ' --scenario ')}"


def table(report: Report, only: Sequence[str] = ()) -> list[str]:
    """The figures, or some columns of them, as a table in Markdown."""
    return _piped(_table(report, only))


def goals(reports: Sequence[Report]) -> list[str]:
    """What must be reached and what was, as a table in Markdown."""
    rows = [[report.name, *row] for report in reports for row in _goals(report)[1:]]
    return _piped([["scenario", "goal", "found", "must", "reached"], *rows])


def _calmness(rounds: int, repeated: int, disturbed: int) -> str:
    """How many rounds others disturbed, and what became of these rounds."""
    others = f"{disturbed} of {rounds} rounds were disturbed: others used more than a tenth of the processors meanwhile."
    if disturbed and not repeated:
        return f"{others} None was run again, so all of them count."
    if disturbed:
        return f"{others} They count, because the time for running rounds again was over, after {repeated} of them."
    return others + (f" {repeated} more were, and were run again." if repeated else "")


def conditions(about: dict[str, Any]) -> list[str]:
    """Under which the figures were taken."""
    packages = ", ".join(f"{name} {number}" for name, number in about["packages"].items())
    calm = about["calm"]
    return [
        f"`{about['command']}`: {about['rounds']} rounds that alternate between the contestants, in",
        f"{about['seconds'] / 60:.0f} minutes; median (lowest-highest). Ratios are taken round by round.",
        f"{about['python']}, {packages}; {'; '.join(about['servers'])};",
        f"{about['system']}, {about['cores']} cores of {about['processor']}, load {about['load']:.1f} at the start.",
        _calmness(**calm),
    ]


@dataclass(slots=True)
class Run:
    """One run of the benchmarks: its surroundings, and its reports."""

    about: dict[str, Any]
    reports: list[Report]


def merged(earlier: Sequence[Run], latest: Run) -> list[Run]:
    """Return all runs without those reports of the earlier ones that the latest has anew."""
    new = {report.name for report in latest.reports}
    kept = [Run(run.about, [each for each in run.reports if each.name not in new]) for run in earlier]
    return [*(run for run in kept if run.reports), latest]


def as_markdown(runs: Sequence[Run]) -> str:
    """One page."""
    lines = [
        "# Benchmark results",
        "",
        "[How they are measured, and why some goals are missed](../../docs/internals/benchmarks.md)",
    ]
    for run in runs:
        lines += ["", *conditions(run.about)]
    lines += ["", "## Goals", "", *goals([report for run in runs for report in run.reports])]
    for report in (report for run in runs for report in run.reports):
        lines += ["", f"## {report.title}", "", f"`{command(report.name)}`", "", *table(report)]
        for note in report.notes:
            lines += ["", note]
    return "\n".join(lines) + "\n"


def as_json(runs: Sequence[Run]) -> str:
    """Everything, with the figures of every round."""
    saved = [{"about": run.about, "scenarios": _saved(run.reports)} for run in runs]
    return json.dumps({"runs": saved}, indent=1, ensure_ascii=False) + "\n"


def _saved(reports: Sequence[Report]) -> dict[str, Any]:
    scenarios = {report.name: asdict(report) for report in reports}
    for report in reports:
        for goal, found in zip(report.goals, scenarios[report.name]["goals"], strict=True):
            found["reached"] = goal.reached
    return scenarios


def loaded(text: str) -> list[Run]:
    """Return the runs that :func:`as_json` wrote."""
    return [Run(run["about"], _loaded(run["scenarios"])) for run in json.loads(text)["runs"]]


def _loaded(scenarios: dict[str, Any]) -> list[Report]:
    reports = []
    for name, saved in scenarios.items():
        report = Report(name, saved["title"], saved["columns"], notes=saved["notes"], plot=saved["plot"])
        report.seconds, report.failed = saved["seconds"], saved["failed"]
        for who, figures in saved["rows"].items():
            report.add(who, **{column: series["values"] for column, series in figures.items()})
        for goal in saved["goals"]:
            value = Series.of(goal["value"]["values"])
            report.goals.append(Goal(goal["what"], value, goal["must"], goal["at_most"], goal["unit"]))
        reports.append(report)
    return reports
