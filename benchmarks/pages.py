"""Figures on pages: what stands between two markers is written by this program, from the results of a run.

    <!-- figures: redis/free rate each -->       the table of a scenario, or some columns of it
    <!-- goals: redis/free redis/many -->        what must be reached, and what was; without names: all of it
    <!-- conditions -->                          machine, versions, and how calm it was
    <!-- end -->

``python -m benchmarks.pages`` writes them, and draws the plots anew; with ``--check`` it only says which pages do not say
what the results say.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.measure import Report
from benchmarks.plots import draw
from benchmarks.report import command, conditions, goals, loaded, table

__all__ = ["PAGES", "RESULTS", "render"]

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results/results.json"
PAGES = [ROOT / "docs/topics/performance.md", ROOT / "docs/how-to/choose-a-backend.md"]

_PART = re.compile(r"(<!-- (figures|goals|conditions)(?:: ([^\n]*?))? -->\n).*?(<!-- end -->)", re.DOTALL)


def render(page: str, results: str) -> str:
    """The page with the figures of these results."""
    reports, about = loaded(results)

    def one(name: str) -> Report:
        if name not in reports:
            raise KeyError(f"the results have no scenario {name!r}; they have {', '.join(reports)}")
        return reports[name]

    def figures(names: list[str]) -> list[str]:
        report = one(names[0])
        lines = [*table(report, names[1:]), "", f"`{command(report)}`"]
        return [*lines, *(f"\n{note}" for note in report.notes)]

    parts: dict[str, Callable[[list[str]], list[str]]] = {
        "figures": figures,
        "goals": lambda names: goals([one(name) for name in names or reports]),
        "conditions": lambda _: conditions(about),
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
        draw([*loaded(results)[0].values()], RESULTS.parent)
    return 1 if wrong and "--check" in argv else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
