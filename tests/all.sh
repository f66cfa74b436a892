#!/usr/bin/env bash
# Runs every test: PYTHON=.venv/bin/python tests/all.sh [more arguments for pytest]
#
# Most of a test is waiting, so three times as many run at once as a small machine has cores. Those that are marked `slow` let
# many processes work for a minute, and would disturb each other and the rest: they come afterwards, two at a time. What
# failed in the first part does not keep the second from running. With COVERAGE=1 the branches are counted, which costs
# half as much processor time again.
#
# What is printed is short (tests/quiet.py): progress, the failures, the counts, and the names of all failures as the last lines.
# The whole output is in build/test.log and build/test-slow.log; LOGS names another folder.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
export PYTHONASYNCIODEBUG=1
python=${PYTHON:-python3} logs=${LOGS:-build}
status=0
first=() second=()
if [ -n "${COVERAGE:-}" ]; then
    first=(--cov=aiolock --cov-report=)
    second=(--cov=aiolock --cov-append --cov-report=term)
fi

names=$(mktemp)
trap 'rm -f "$names"' EXIT

part() { # LOG TITLE ARGUMENTS FOR PYTEST...
    local log=$logs/$1
    echo "== $2, in full: $log"
    shift 2
    "$python" -m pytest -q --dist worksteal "$@" 2>&1 | "$python" tests/quiet.py "$log" "$names" || status=1
}

part test.log "all tests but the slow ones" -m "not slow" --numprocesses 6 "${first[@]}" "$@"
part test-slow.log "slow tests" -m slow --numprocesses 2 "${second[@]}" "$@"
if [ -s "$names" ]; then
    echo "== failed: $(wc -l <"$names")"
    cat "$names"
fi
exit $status
