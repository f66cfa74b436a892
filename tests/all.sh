#!/usr/bin/env bash
# Runs every test: PYTHON=.venv/bin/python tests/all.sh [more arguments for pytest]
#
# Most of a test is waiting, so three times as many run at once as a small machine has cores. Those that are marked `slow` let
# many processes work for a minute, and would disturb each other and the rest: they come afterwards, two at a time. What
# failed in the first part does not keep the second from running. With COVERAGE=1 the branches are counted, which costs
# half as much processor time again.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
export PYTHONASYNCIODEBUG=1
python=${PYTHON:-python3}
status=0
if [ -n "${COVERAGE:-}" ]; then
    first=(--cov=aiolock --cov-report=)
    second=(--cov=aiolock --cov-append --cov-report=term)
fi

"$python" -m pytest -m "not slow" --numprocesses 6 --dist worksteal "${first[@]}" "$@" || status=1
"$python" -m pytest -m slow --numprocesses 2 --dist worksteal "${second[@]}" "$@" || status=1
exit $status
