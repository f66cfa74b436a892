"""The command line of the benchmarks."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks import gate
from benchmarks.calm import Calm
from benchmarks.measure import Report
from benchmarks.pages import RESULTS
from benchmarks.plots import draw
from benchmarks.report import Run, as_json, as_markdown, as_text, loaded, merged, surroundings
from benchmarks.suites import SUITES, Options
from benchmarks.workers import JobFailed


def parsed(argv: list[str]) -> argparse.Namespace:
    """What was asked for; a mistake ends the program with a sentence."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "suite", nargs="*", metavar="SUITE", help=f"{', '.join(SUITES)}, or all; without any: redis"
    )
    parser.add_argument("--quick", action="store_true", help="less of everything: each suite under a minute")
    parser.add_argument("--scenario", nargs="+", metavar="NAME", help="only these of the suites")
    parser.add_argument("--rounds", type=int, help="rounds that alternate between contestants (3; quick: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="write results.json, README.md and the plots; what a results.json there has of other scenarios stays",
    )
    parser.add_argument(
        "--calm",
        type=float,
        default=0,
        metavar="SECONDS",
        help="spend so much on running again what other programs disturbed",
    )
    parser.add_argument(
        "--gate",
        action="store_true",
        help=f"a short run of {len(gate.ROWS)} scenarios; status 1 if one is more than {gate.TOLERANCE:.0%}% worse than its "
        f"goal and the committed results in {gate.ATTEMPTS} runs",
    )
    options = parser.parse_args(argv)
    options.suite = options.suite or ["redis"]
    if "all" in options.suite:
        options.suite = list(SUITES)
    if unknown := [name for name in options.suite if name not in SUITES]:
        parser.error(f"there is no suite {unknown[0]!r}; there are {', '.join(SUITES)}, all")
    there = dict.fromkeys(name for suite in options.suite for name in SUITES[suite].scenarios)
    options.scenario = options.scenario or list(there)
    if unknown := [name for name in options.scenario if name not in there]:
        parser.error(f"there is no scenario {unknown[0]!r} in these suites; there are {', '.join(there)}")
    return options


def run(suite: str, names: list[str], options: Options) -> list[Report]:
    """The scenarios of one suite that were asked for."""
    reports: list[Report] = []
    chosen = {name: play for name, play in SUITES[suite].scenarios.items() if name in names}
    if not chosen:
        return reports
    with SUITES[suite].opened(options) as context:
        for name, play in chosen.items():
            began = time.monotonic()
            try:
                report = play(context)
            except (JobFailed, RuntimeError):
                # The others are still worth their time.
                traceback.print_exc()
                said = traceback.format_exc().strip().splitlines()[-1]
                report = Report(name, f"{suite} {name}: failed", {}, notes=[said], failed=True)
            report.name = f"{suite}/{name}"
            report.seconds = round(time.monotonic() - began, 1)
            print(as_text(report), flush=True)
            reports.append(report)
    return reports


def main(argv: list[str]) -> int:
    """Run, print, write; the status tells whether all scenarios ran.

    A goal that was missed does not count for it, because a busy machine is no defect.
    """
    asked = parsed(argv)
    if asked.gate:
        return _gate(Calm(asked.calm))
    rounds = asked.rounds or (1 if asked.quick else 3)
    about = surroundings(argv, asked.suite, rounds)
    calm = Calm(asked.calm)
    start = time.monotonic()
    reports = [
        report
        for suite in asked.suite
        for report in run(suite, asked.scenario, Options(asked.quick, rounds, calm))
    ]
    goals = [goal for report in reports for goal in report.goals]
    about["seconds"] = round(time.monotonic() - start)
    about["calm"] = {"rounds": calm.rounds, "repeated": calm.repeated, "disturbed": calm.disturbed}
    print(
        f"\n{sum(goal.reached for goal in goals)} of {len(goals)} goals reached, in {about['seconds']} s;",
        f"others disturbed {calm.disturbed} of {calm.rounds} rounds, after {calm.repeated} had been repeated",
    )
    this = Run(about, reports)
    if asked.json:
        asked.json.write_text(as_json([this]))
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
        results = asked.out / "results.json"
        runs = merged(loaded(results.read_text()) if results.exists() else [], this)
        results.write_text(as_json(runs))
        (asked.out / "README.md").write_text(as_markdown(runs))
        draw([report for run in runs for report in run.reports], asked.out)
    return int(any(report.failed for report in reports))


def _gate(calm: Calm) -> int:
    """Compare a short run with the committed results."""
    start = time.monotonic()
    options = Options(quick=True, rounds=gate.ROUNDS, calm=calm, peers=False)

    def play(scenarios: Mapping[str, Sequence[str]]) -> Iterator[Report]:
        for suite, names in scenarios.items():
            yield from run(suite, list(names), options)

    committed = {each.name: each for run in loaded(RESULTS.read_text()) for each in run.reports}
    failed = gate.check(play, committed)
    print(f"gate: {', '.join(failed) or 'nothing'} became worse, in {time.monotonic() - start:.0f} s")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
