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

# The files of servers and of tests live in memory where there is room for all: no test asks what a disk keeps when the power
# fails, and a slow disk makes each of them slower.
if [ -z "${TMPDIR:-}" ] && [ "$(df --output=avail -k /dev/shm 2>/dev/null | tail -n 1)" -ge $((8 << 20)) ] 2>/dev/null; then
    TMPDIR=$(mktemp -d /dev/shm/aiolock-XXXXXX)
    export TMPDIR
    trap 'rm -rf "$TMPDIR"' EXIT
fi
first=() second=()
if [ -n "${COVERAGE:-}" ]; then
    first=(--cov=aiolock --cov-report=)
    second=(--cov=aiolock --cov-append --cov-report=term)
fi

"$python" -m pytest -m "not slow" --numprocesses 6 --dist worksteal "${first[@]}" "$@" || status=1
"$python" -m pytest -m slow --numprocesses 2 --dist worksteal "${second[@]}" "$@" || status=1
exit $status
