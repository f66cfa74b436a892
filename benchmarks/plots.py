"""The plots as SVG, each for light and for dark pages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import Report
from benchmarks.report import number

__all__ = ["PLOTS", "draw"]

INK = {"light": "#24292f", "dark": "#e6edf3"}
OURS = "#2f81f7"
STYLES = {
    "aiolock": (OURS, "-"),
    "aiolock fair": ("#39a0a8", "--"),
    "plain node": ("#8250df", "-."),
    "publish": ("#8b949e", ":"),
    "redis-py": ("#db6d28", "-"),
    "polling": ("#db6d28", ":"),
    "redisson": ("#a371f7", "-"),
    "rueidislock": ("#2da44e", "--"),
    "redsync": ("#d6409f", "-."),
    "redislock": ("#b08800", "--"),
    "kazoo": ("#db6d28", "-"),
    "curator": ("#b08800", "--"),
}
"""Colour and dashes of a line, told apart on light and on dark; polling is redis-py's at a short interval."""
PEER = "#8b949e"
NAMES = {
    "publish": "bare publish → receive",
    "redis-py": "redis-py, default",
    "aiolock fair": "aiolock, fair=True",
    "plain node": "plain node, which all watch",
    "for update": "FOR UPDATE, a connection for each",
    "get_lock": "GET_LOCK, a connection for each",
    "curator": "Curator",
}


def _name(who: str) -> str:
    name, _, interval = who.rpartition(" ")
    if name in {"redis-py", "polling"} and interval.replace(".", "").isdigit():
        return f"{name}{', polling' if name == 'redis-py' else ''} every {float(interval) * 1000:g} ms"
    return NAMES.get(who, who)


def _style(who: str) -> dict[str, Any]:
    """What a line looks like; one that is not listed has the next colour of the library."""
    known = STYLES.get("polling" if who.startswith("redis-py ") else who)
    if known is None:
        return {}
    colour, dashes = known
    return {"color": colour, "linestyle": dashes, "linewidth": 2.5 if who == "aiolock" else 1.8}


def _latency(report: Report, figure: Any) -> None:
    axes = _axes(figure)
    for who, found in report.plot["latencies"].items():
        if who == "script floor":
            continue
        heights = [number / (len(found) - 1) for number in range(len(found))]
        axes.plot(found, heights, label=_name(who), **_style(who))
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:g} ms")
    axes.xaxis.minorticks_off()
    axes.set_xlabel("from the release in one process to the entry in another")
    axes.set_ylabel("share of hand-overs")
    axes.set_title("Hand-over latency")
    _legend(figure)


def _legend(figure: Any) -> None:
    """Below the axes: with so many lines there is no place on them without one."""
    figure.legend(frameon=False, loc="outside lower center", ncols=2)


def _three(report: Report, figure: Any) -> None:
    """How long a hand-over takes, for redis-py as it is by default and when it asks every millisecond, and for aiolock."""
    axes = figure.subplots()
    whos = ("redis-py", "redis-py 0.001", "aiolock")
    medians = {who: report.rows[who]["p50"].median / 1000 for who in whos}
    _bars(axes, medians, [f"{median:.2g} ms" for median in medians.values()])
    axes.margins(x=0.1)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(left=False)
    axes.set_title("Hand-over between processes, median", loc="left")


def _against_waiters(report: Report, axes: Any) -> None:
    for who, figures in report.rows.items():
        contenders = [int(column) for column in figures]
        medians = [series.median for series in figures.values()]
        (line,) = axes.plot(contenders, medians, marker="o", label=_name(who), **_style(who))
        low = [series.low for series in figures.values()]
        high = [series.high for series in figures.values()]
        axes.fill_between(contenders, low, high, alpha=0.2, color=line.get_color(), linewidth=0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks([int(column) for column in report.columns], labels=list(report.columns))
    axes.xaxis.minorticks_off()
    _plain(axes.yaxis)
    _legend(axes.figure)


def _plain(axis: Any) -> None:
    """Label a logarithmic axis with whole numbers, also where it spans less than a power of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0,) if high > 100 * low else (1.0, 2.0, 5.0)))
    axis.set_major_formatter("{x:,.0f}")
    axis.set_minor_formatter(NullFormatter())


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


def _bars(axes: Any, figures: dict[str, float], labels: list[str]) -> None:
    """Horizontal, the first one on top, each with its figure."""
    whos = list(figures)[::-1]
    colours = [OURS if "aiolock" in who else PEER for who in whos]
    bars = axes.barh([_name(who) for who in whos], [figures[who] for who in whos], color=colours)
    axes.bar_label(bars, labels=labels[::-1], padding=4)
    axes.set_ylim(-0.6, len(whos) - 0.4)


def _points(
    axes: Any, figures: dict[str, float], labels: list[str], ours: Callable[[str], bool], room: float
) -> None:
    """Points on a logarithmic axis, which has no zero that a bar could begin at; the first one on top, each with its figure."""
    whos = list(figures)
    places = range(len(whos) - 1, -1, -1)
    there = [figure for figure in figures.values() if figure > 0]
    low, high = min(there) / 2, max(there)
    axes.set_xscale("log")
    axes.set_xlim(low, high * (high / low) ** room)
    axes.set_ylim(-0.6, len(whos) - 0.4)
    axes.set_yticks(list(places), labels=[_name(who) for who in whos])
    for who, place, label in zip(whos, places, labels, strict=True):
        if not math.isnan(figures[who]):
            colour = OURS if ours(who) else PEER
            axes.hlines(place, low, figures[who], color=colour, alpha=0.35, linewidth=1.5)
            axes.plot(figures[who], place, "o", color=colour, markersize=7)
            axes.annotate(label, (figures[who], place), (9, 0), textcoords="offset points", va="center")


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
    _points(axes, rates, labels, lambda who: "aiolock" in who, 0.45)
    _plain(axes.xaxis)
    axes.set_xlabel("turns per second, logarithmic")
    axes.set_title("MySQL: one hot lock, 4 processes x 25 tasks")


def _methods(report: Report, figure: Any) -> None:
    figure.set_size_inches(9, 0.32 * len(report.rows) + 1.2)
    axes = _axes(figure)
    rates = {who: figures["rate"].median for who, figures in report.rows.items()}
    labels = [
        f"{rate:,.0f}/s{', OVERSOLD' if report.rows[who]['over'].median else ''}"
        for who, rate in rates.items()
    ]
    _points(axes, rates, labels, lambda who: "aiolock" in who, 0.45)
    _plain(axes.xaxis)
    axes.set_xlabel("sales per second, logarithmic")
    axes.set_title("The same goods, 20 buyers in two processes, by each method")


BESIDE = {"free": "trip", "p50": "p99"}
"""What is marked on the bars of a column."""
MARK = "#db6d28"


def _servers(report: Report, figure: Any) -> None:
    """One small plot for each question."""
    figure.set_size_inches(10, 0.5 * len(report.rows) + 2)
    grid = figure.subplots(2, 3)
    figure.suptitle("The same scenarios on every server, logarithmic")
    for axes, column in zip(grid.flat, ("free", "hot", "fair", "spread", "p50", "recovery"), strict=True):
        # A gap where there is nothing to say, so that rows stand side by side.
        figures = {
            who: found[column].median if column in found else math.nan for who, found in report.rows.items()
        }
        labels = ["" if math.isnan(value) else number(value) for value in figures.values()]
        _points(axes, figures, labels, lambda _: True, 0.6)
        axes.set_xticks([])
        axes.xaxis.minorticks_off()
        other = BESIDE.get(column, "")
        for place, found in enumerate(reversed(report.rows.values())):
            if other in found:
                axes.plot(found[other].median, place, "|", color=MARK, markersize=9, markeredgewidth=2)
                axes.set_xlabel(f"mark: {report.columns[other]}", fontsize=8)
        axes.tick_params(labelsize=9)
        axes.set_title(report.columns[column], fontsize=10)
        if axes not in grid[:, 0]:
            axes.set_yticklabels([])


@dataclass(frozen=True)
class Plot:
    """One picture of a scenario: its file without theme and ending, its function, its height and width in inches.

    One with many lines is as narrow as its text allows, so that a telephone has to shrink it little.
    """

    scenario: str
    stem: str
    function: Callable[[Report, Any], None]
    height: float = 4.5
    width: float = 9


PLOTS = [
    Plot("redis/handover", "handover", _three, 1.9, 5.5),
    Plot("redis/handover", "handover-latency", _latency, 5, 5.5),
    Plot("redis/waiters", "throughput", _throughput, 4.5, 5.5),
    Plot("redis/commands", "commands-per-turn", _commands),
    Plot("redis/safety", "safety", _safety, 2.5),
    Plot("zookeeper/line", "zookeeper-hand-over", _line, 4.5, 5.5),
    Plot("mysql/hot", "mysql-hot-lock", _mysql),
    Plot("compare/servers", "servers", _servers, 5),
    Plot("methods/sale", "methods", _methods, 7),
]


def draw(reports: Sequence[Report], folder: Path) -> list[Path]:
    """Draw what there is, and return the files."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    files = []
    drawn = {report.name: report for report in reports if not report.failed}
    for plot in PLOTS:
        if plot.scenario not in drawn:
            continue
        for theme, ink in INK.items():
            style = {"text.color": ink, "axes.labelcolor": ink, "axes.edgecolor": ink, "xtick.color": ink}
            style |= {
                "ytick.color": ink,
                "svg.fonttype": "none",
                "svg.hashsalt": plot.stem,
                "font.family": "sans-serif",
            }
            style |= {"axes.spines.top": False, "axes.spines.right": False}
            with mpl.rc_context(style):
                figure = pyplot.figure(figsize=(plot.width, plot.height), layout="constrained")
                plot.function(drawn[plot.scenario], figure)
                file = folder / f"{plot.stem}-{theme}.svg"
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
