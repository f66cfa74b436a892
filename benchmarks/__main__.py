"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks.calm import Calm
from benchmarks.crew import Crew
from benchmarks.plots import draw
from benchmarks.report import as_json, as_markdown, as_text, surroundings
from benchmarks.scenarios import SCENARIOS, Context
from tests.servers import Redis


def main(argv: list[str]) -> int:
    """Run, print, write; the status is 0 also where a goal was missed, because a busy machine is no defect."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less of everything: under a minute in all")
    parser.add_argument("--scenario", nargs="+", choices=SCENARIOS, default=list(SCENARIOS), metavar="NAME")
    parser.add_argument("--rounds", type=int, help="rounds that alternate between contestants (5; quick: 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write results.json, README.md and the plots")
    parser.add_argument(
        "--calm",
        type=float,
        default=0,
        metavar="SECONDS",
        help="spend so much on running again what other programs disturbed",
    )
    options = parser.parse_args(argv)
    rounds = options.rounds or (2 if options.quick else 5)
    about = surroundings(argv, rounds)
    reports = []
    calm = Calm(options.calm)
    start = time.monotonic()
    with Redis() as server, Crew() as crew:
        context = Context(server, crew, options.quick, rounds, calm)
        for name in options.scenario:
            context.flush()
            began = time.monotonic()
            reports.append(SCENARIOS[name](context))
            reports[-1].seconds = round(time.monotonic() - began, 1)
            print(as_text(reports[-1]), flush=True)
    goals = [goal for report in reports for goal in report.goals]
    about["seconds"] = round(time.monotonic() - start)
    about["calm"] = {"rounds": calm.rounds, "repeated": calm.repeated, "disturbed": calm.disturbed}
    print(
        f"\n{sum(goal.reached for goal in goals)} of {len(goals)} goals reached, in {about['seconds']} s;",
        f"others disturbed {calm.disturbed} of {calm.rounds} rounds, after {calm.repeated} had been repeated",
    )
    if options.json:
        options.json.write_text(as_json(reports, about))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "results.json").write_text(as_json(reports, about))
        (options.out / "README.md").write_text(as_markdown(reports, about))
        draw(reports, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
