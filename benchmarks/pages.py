"""Figures on pages: what stands between two markers is written by this program, from the results of a run.

    <!-- figures: redis/free rate each -->       the table of a scenario, or some columns of it
    <!-- plot: methods/sale -->                  the plot of a scenario
    <!-- goals: redis/free redis/many -->        what must be reached, and what was; without names: all of it
    <!-- conditions: redis/free -->              machine, versions, and how calm it was, for the run of each of these scenarios
    <!-- end -->

``python -m benchmarks.pages`` writes them, and draws the plots anew; with ``--check`` it only says which pages do not say
what the results say.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.measure import Report
from benchmarks.plots import PLOTS, draw
from benchmarks.report import command, conditions, goals, loaded, table
from benchmarks.suites import SUITES

__all__ = ["PAGES", "RESULTS", "SCENARIOS", "render"]

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/results.json"
SCENARIOS = [f"{suite}/{scenario}" for suite, its in SUITES.items() for scenario in its.scenarios]
PAGES = [
    ROOT / page
    for page in (
        "docs/topics/performance.md",
        "docs/topics/methods.md",
        "docs/how-to/choose-a-backend.md",
        "docs/internals/benchmarks.md",
        "docs/backends/redis.md",
    )
]

_PART = re.compile(
    r"(<!-- (figures|plot|goals|conditions)(?:: ([^\n]*?))? -->\n).*?(<!-- end -->)", re.DOTALL
)


def render(page: str, results: str) -> str:
    """The page with the figures of these results; a scenario that they lack is said to be not measured yet."""
    runs = loaded(results)
    reports = {report.name: report for run in runs for report in run.reports}

    def some(names: Sequence[str]) -> list[Report]:
        if unknown := [name for name in names if name not in SCENARIOS]:
            raise KeyError(f"there is no scenario {unknown[0]!r}; there are {', '.join(SCENARIOS)}")
        return [reports[name] for name in names if name in reports]

    def figures(names: list[str]) -> list[str]:
        lines = [f"Not measured yet: `{command(names[0])}`"]
        for report in some(names[:1]):
            lines = [*table(report, names[1:]), "", f"`{command(report.name)}`"]
            lines += [f"\n{note}" for note in report.notes]
        return lines

    def plots(names: list[str]) -> list[str]:
        stems = [(each, plot.stem) for each in some(names) for plot in PLOTS if plot.scenario == each.name]
        return [f"![{each.title}](../../benchmarks/results/{stem}-light.svg)" for each, stem in stems]

    def surroundings(names: list[str]) -> list[str]:
        wanted = some(names)
        about = [conditions(run.about) for run in runs if any(each in run.reports for each in wanted)]
        return "\n\n".join("\n".join(lines) for lines in about).split("\n")

    parts: dict[str, Callable[[list[str]], list[str]]] = {
        "figures": figures,
        "plot": plots,
        "goals": lambda names: goals(some(names or list(reports))),
        "conditions": surroundings,
    }

    def written(match: re.Match[str]) -> str:
        begin, what, names, end = match.groups()
        return "\n".join([begin, *parts[what]((names or "").split()), "", end])

    return _PART.sub(written, page)


def main(argv: list[str]) -> int:
    """Write the pages, or look at them."""
    results = RESULTS.read_text()
    wrong = 0
    for page in PAGES:
        text = page.read_text()
        if (new := render(text, results)) != text:
            wrong += 1
            print(
                f"{page.relative_to(ROOT)}: {'differs from the results' if '--check' in argv else 'written'}"
            )
            if "--check" not in argv:
                page.write_text(new)
    if "--check" not in argv:
        draw([report for run in loaded(results) for report in run.reports], RESULTS.parent)
    return 1 if wrong and "--check" in argv else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
