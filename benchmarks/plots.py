"""The plots as SVG, each for light and for dark pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import Report
from benchmarks.report import number

__all__ = ["PLOTS", "draw"]

INK = {"light": "#24292f", "dark": "#e6edf3"}
OURS = "#2f81f7"
COLOURS = {
    "aiolock": OURS,
    "aiolock fair": "#39a0a8",
    "aiolock simple, fair": "#8250df",
    "publish": "#8b949e",
    "redis-py": "#db6d28",
    "kazoo": "#db6d28",
    "curator": "#d4a72c",
}
POLLING = "#d4a72c"
"""Of redis-py at a short interval."""
PEER = "#8b949e"
NAMES = {
    "publish": "bare publish → receive",
    "redis-py": "redis-py, default",
    "aiolock fair": "aiolock, fair=True",
    "aiolock simple, fair": "aiolock, recipe=simple",
    "for update": "FOR UPDATE, a connection for each",
    "get_lock": "GET_LOCK, a connection for each",
    "curator": "Curator",
}


def _name(who: str) -> str:
    name, _, interval = who.rpartition(" ")
    if name in {"redis-py", "polling"} and interval.replace(".", "").isdigit():
        return f"{name}{', polling' if name == 'redis-py' else ''} every {float(interval) * 1000:g} ms"
    return NAMES.get(who, who)


def _colour(who: str) -> str:
    return COLOURS.get(who, POLLING)


def _latency(report: Report, figure: Any) -> None:
    axes = _axes(figure)
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


def _against_waiters(report: Report, axes: Any) -> None:
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
    axes.xaxis.minorticks_off()
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.legend(frameon=False, loc="best")


def _throughput(report: Report, figure: Any) -> None:
    axes = _axes(figure)
    _against_waiters(report, axes)
    axes.set_xlabel("contenders for one lock, in 2 to 8 processes")
    axes.set_ylabel("turns per second")
    axes.set_title("Throughput of a hot lock, drained")


def _line(report: Report, figure: Any) -> None:
    axes = _axes(figure)
    _against_waiters(report, axes)
    axes.set_xlabel("waiting in line")
    axes.set_ylabel("µs per hand-over")
    axes.set_title("ZooKeeper: cost of a hand-over")


def _bars(
    axes: Any,
    figures: dict[str, float],
    labels: list[str],
    ours: Callable[[str], bool] = lambda who: "aiolock" in who,
) -> None:
    """Horizontal, the first one on top, each with its figure."""
    whos = list(figures)[::-1]
    colours = [OURS if ours(who) else PEER for who in whos]
    bars = axes.barh([_name(who) for who in whos], [figures[who] for who in whos], color=colours)
    axes.bar_label(bars, labels=labels[::-1], padding=4)
    axes.set_ylim(-0.6, len(whos) - 0.4)


def _logarithmic(axes: Any, figures: dict[str, float], room: float) -> None:
    """From a bit below the least to what leaves room for words behind the longest bar."""
    there = [figure for figure in figures.values() if figure > 0]
    low, high = min(there) / 2, max(there)
    axes.set_xscale("log")
    axes.set_xlim(low, high * (high / low) ** room)


def _commands(report: Report, figure: Any) -> None:
    axes = _axes(figure)
    medians = {who: figures["commands"].median for who, figures in report.rows.items()}
    _bars(axes, medians, [f"{median:.3g}" for median in medians.values()])
    axes.margins(x=0.15)
    axes.set_xlabel("commands that the server gets per turn")
    axes.set_title("Commands per turn of a hot lock, 2 processes x 10 tasks")


def _safety(report: Report, figure: Any) -> None:
    grid = figure.subplots(1, len(report.columns))
    figure.suptitle("What goes wrong, of a hundred")
    for axes, (column, title) in zip(grid, report.columns.items(), strict=True):
        medians = {who: figures[column].median for who, figures in report.rows.items()}
        _bars(axes, medians, [f" {median:.0f}" for median in medians.values()])
        axes.set_xlim(0, 120)
        axes.set_xticks([])
        axes.set_title(title, fontsize=10)
        if axes is not grid[0]:
            axes.set_yticklabels([])


def _mysql(report: Report, figure: Any) -> None:
    axes = _axes(figure)
    rates = {who: figures["rate"].median for who, figures in report.rows.items()}
    connections = [figures["connections"].median for figures in report.rows.values()]
    labels = [
        f"{rate:,.0f}/s on {number:.0f} connections"
        for rate, number in zip(rates.values(), connections, strict=True)
    ]
    _bars(axes, rates, labels)
    _logarithmic(axes, rates, 0.45)
    axes.set_xlabel("turns per second")
    axes.set_title("MySQL: one hot lock, 4 processes x 25 tasks")


def _servers(report: Report, figure: Any) -> None:
    """One small plot for each question."""
    grid = figure.subplots(2, 3)
    figure.suptitle("The same scenarios on every server")
    for axes, column in zip(grid.flat, ("free", "many", "hot", "fair", "p50", "recovery"), strict=True):
        # A gap where there is nothing to say, so that rows stand side by side.
        figures = {
            who: found[column].median if column in found else math.nan for who, found in report.rows.items()
        }
        _bars(
            axes,
            figures,
            ["" if math.isnan(value) else f" {number(value)}" for value in figures.values()],
            lambda _: True,
        )
        _logarithmic(axes, figures, 0.45)
        axes.grid(visible=False)
        axes.tick_params(labelsize=8)
        axes.set_title(report.columns[column], fontsize=9)
        if axes not in grid[:, 0]:
            axes.set_yticklabels([])


PLOTS: dict[str, tuple[str, Callable[[Report, Any], None]]] = {
    "redis/handover": ("handover-latency", _latency),
    "redis/waiters": ("throughput", _throughput),
    "redis/commands": ("commands-per-turn", _commands),
    "redis/safety": ("safety", _safety),
    "zookeeper/line": ("zookeeper-hand-over", _line),
    "mysql/hot": ("mysql-hot-lock", _mysql),
    "compare/servers": ("servers", _servers),
}
"""By scenario: the file, without theme and ending, and who draws it."""


def draw(reports: Sequence[Report], folder: Path) -> list[Path]:
    """Draw what there is, and return the files."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    files = []
    for report in reports:
        if report.name not in PLOTS or report.failed:
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
                figure = pyplot.figure(figsize=(9, 4.5), layout="constrained")
                plot(report, figure)
                file = folder / f"{stem}-{theme}.svg"
                # A light one also stands on pages whose colour it does not know.
                figure.savefig(file, transparent=theme == "dark", metadata={"Date": None})
                pyplot.close(figure)
            files.append(file)
    return files


def _axes(figure: Any) -> Any:
    axes = figure.subplots()
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    return axes
