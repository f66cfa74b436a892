"""Explore the models: ``python -m tests.model [rows] [redis] [dialects]``.

First one rule is removed at a time, and each removal has to break a promise; then the design with all its rules, which must
break none. Prints the states of each run. The exit status is 1 if a rule was not missed or a promise was broken."""

from __future__ import annotations

import argparse
import sys

from tests.model import dialects, redis_runs, runs
from tests.model.explore import Run

MODELS = {"rows": runs, "redis": redis_runs, "dialects": dialects}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{' or '.join(MODELS)}; all without any")
    parser.add_argument("--states", type=int, default=1_000_000, help="states after which a run ends")
    parser.add_argument("--seconds", type=float, default=300.0, help="processor time after which a run ends")
    parser.add_argument("--run", help="only the runs whose name contains this text")
    parser.add_argument("--traces", action="store_true", help="print the trace of each removed rule")
    arguments = parser.parse_args()
    if unknown := set(arguments.models) - MODELS.keys():
        parser.error(f"there is no model of {', '.join(sorted(unknown))}, but of {', '.join(MODELS)}")
    total, failed = 0, 0
    for name in arguments.models or MODELS:
        model = MODELS[name]
        for title, which in (("one rule removed at a time", model.REMOVALS), ("the design", model.DESIGN)):
            print(f"{name}: {title}")
            for run in which:
                if arguments.run and arguments.run not in run.name:
                    continue
                states, right = play(run, arguments.states, arguments.seconds, traces=arguments.traces)
                total += states
                failed += not right
    print(f"{total:,} states, {failed} unexpected results")
    return 1 if failed else 0


def play(run: Run, states: int, seconds: float, *, traces: bool) -> tuple[int, bool]:
    outcome = run.play(states, seconds)
    right = outcome.violation.startswith(run.breaks) if run.breaks else not outcome.violation
    print(f"{run.name:48.48} {outcome}{'' if right else '   <-- UNEXPECTED'}", flush=True)
    if run.breaks:
        print(f"    {run.rule}")
    if outcome.trace and (traces or not right):
        print("\n".join(f"      {line}" for line in outcome.trace))
    return outcome.states, right


if __name__ == "__main__":
    sys.exit(main())
