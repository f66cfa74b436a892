"""Reports as text: tables of medians and spreads, goals beside them, the same in Markdown and JSON."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.measure import Goal, Report, Series
from tests.processes import program

__all__ = ["as_json", "as_markdown", "as_text", "surroundings"]


def surroundings(argv: Sequence[str], rounds: int) -> dict[str, Any]:
    """What a figure means nothing without."""
    packages = ("python-aiolock", "redis", "hiredis", "coredis", "uvloop")
    redis = program("redis-server", package="redis-server", server="redis")
    return {
        "command": " ".join(("python -m benchmarks", *argv)),
        "rounds": rounds,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "packages": {name: _version(name) for name in packages},
        "server": subprocess.check_output([redis, "--version"], text=True).split(" sha=")[0],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }


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


def _table(report: Report) -> list[list[str]]:
    rows = [["", *report.columns.values()]]
    for who, figures in report.rows.items():
        rows.append(
            [who, *(spread(figures[column]) if column in figures else "" for column in report.columns)]
        )
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


def as_markdown(reports: Sequence[Report], about: dict[str, Any]) -> str:
    """One page."""
    packages = ", ".join(f"{name} {number}" for name, number in about["packages"].items())
    calm = about["calm"]
    goals = [[report.name, *row] for report in reports for row in _goals(report)[1:]]
    lines = [
        "# Benchmark results",
        "",
        f"`{about['command']}`: {about['rounds']} rounds that alternate between the contestants; median (lowest-highest).",
        f"Ratios are taken round by round. {about['python']}, {packages}; {about['server']};",
        f"{about['system']}, {about['cores']} cores of {about['processor']}, load {about['load']:.1f} at the start.",
        f"Others used the machine as well: of {calm['rounds']} rounds {calm['repeated']} were disturbed by them and run",
        f"again, and {calm['disturbed']} count although they were disturbed.",
        "",
        "## Goals",
        "",
        *_piped([["scenario", "goal", "found", "must", "reached"], *goals]),
    ]
    for report in reports:
        lines += ["", f"## {report.title}", "", f"`--scenario {report.name}`", "", *_piped(_table(report))]
        lines += ["", *report.notes] if report.notes else []
    return "\n".join(lines) + "\n"


def as_json(reports: Sequence[Report], about: dict[str, Any]) -> str:
    """Everything, with the figures of every round."""
    scenarios = {report.name: asdict(report) for report in reports}
    for report in reports:
        for goal, found in zip(report.goals, scenarios[report.name]["goals"], strict=True):
            found["reached"] = goal.reached
    return json.dumps({"about": about, "scenarios": scenarios}, indent=1, ensure_ascii=False) + "\n"
