"""Three plots as SVG, each for light and for dark pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import Report

__all__ = ["draw"]

INK = {"light": "#24292f", "dark": "#e6edf3"}
COLOURS = {
    "aiolock": "#2f81f7",
    "aiolock fair": "#39a0a8",
    "publish": "#8b949e",
    "redis-py": "#db6d28",
}
POLLING = "#d4a72c"
"""Of redis-py at a short interval."""
NAMES = {
    "publish": "bare publish → receive",
    "redis-py": "redis-py, default",
    "aiolock fair": "aiolock, fair=True",
}


def _name(who: str) -> str:
    name, _, interval = who.rpartition(" ")
    return (
        f"{name}, polling every {float(interval) * 1000:g} ms" if name == "redis-py" else NAMES.get(who, who)
    )


def _colour(who: str) -> str:
    return COLOURS.get(who, POLLING)


def _latency(report: Report, axes: Any) -> None:
    for who, found in report.plot["latencies"].items():
        if who == "script floor":
            continue
        heights = [number / (len(found) - 1) for number in range(len(found))]
        axes.plot(found, heights, label=_name(who), color=_colour(who))
    axes.set_xscale("log")
    axes.set_xlabel("µs from the release in one process to the entry in another")
    axes.set_ylabel("share of hand-overs")
    axes.set_title("Hand-over latency")
    axes.legend(frameon=False, loc="center", bbox_to_anchor=(0.68, 0.5))


def _throughput(report: Report, axes: Any) -> None:
    for who, figures in report.rows.items():
        contenders = [int(column) for column in figures]
        medians = [series.median for series in figures.values()]
        axes.plot(contenders, medians, marker="o", label=_name(who), color=_colour(who))
        low = [series.low for series in figures.values()]
        high = [series.high for series in figures.values()]
        axes.fill_between(contenders, low, high, alpha=0.2, color=_colour(who), linewidth=0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks([int(column) for column in report.columns], labels=list(report.columns))
    axes.minorticks_off()
    axes.set_xlabel("contenders for one lock, in 2 to 8 processes")
    axes.set_ylabel("turns per second")
    axes.set_title("Throughput of a hot lock, drained")
    axes.legend(frameon=False, loc="best")


def _commands(report: Report, axes: Any) -> None:
    whos = list(report.rows)[::-1]
    medians = [report.rows[who]["commands"].median for who in whos]
    bars = axes.barh([_name(who) for who in whos], medians, color=[_colour(who) for who in whos])
    axes.bar_label(bars, labels=[f"{median:.3g}" for median in medians], padding=4)
    axes.margins(x=0.15)
    axes.set_xlabel("commands that the server gets per turn")
    axes.set_title("Commands per turn of a hot lock, 2 processes x 10 tasks")


PLOTS: dict[str, tuple[str, Callable[[Report, Any], None]]] = {
    "handover": ("handover-latency", _latency),
    "waiters": ("throughput", _throughput),
    "commands": ("commands-per-turn", _commands),
}


def draw(reports: Sequence[Report], folder: Path) -> list[Path]:
    """Draw what there is, and return the files."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    files = []
    for report in reports:
        if report.name not in PLOTS:
            continue
        stem, plot = PLOTS[report.name]
        for theme, ink in INK.items():
            style = {"text.color": ink, "axes.labelcolor": ink, "axes.edgecolor": ink, "xtick.color": ink}
            style |= {
                "ytick.color": ink,
                "svg.fonttype": "none",
                "svg.hashsalt": stem,
                "font.family": "sans-serif",
            }
            style |= {"axes.spines.top": False, "axes.spines.right": False}
            with mpl.rc_context(style):
                figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
                axes.grid(alpha=0.25)
                axes.set_axisbelow(True)
                plot(report, axes)
                file = folder / f"{stem}-{theme}.svg"
                figure.savefig(file, transparent=True, metadata={"Date": None})
                pyplot.close(figure)
            files.append(file)
    return files
