#!/usr/bin/env bash
# The check before a commit: PYTHON=.venv/bin/python tests/check.sh [more arguments for pytest]
#
# Ruff, mypy with its cache, the unit tests, and the contract on memory and one Redis. Each part runs, also after another
# has failed. The last lines say how long each took and how many tests passed; fewer than 2,000 are a failure.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python3} status=0 took=() at_least=2000
export PYTHONASYNCIODEBUG=1 AIOLOCK_SERVERS=redis AIOLOCK_DEPLOYMENTS="memory redis"

timed() { # TITLE COMMAND...
    local title=$1 started=$SECONDS
    shift
    "$@" || status=1
    took+=("$title $((SECONDS - started)) s")
}

timed ruff bash -c '"$0" -m ruff check --quiet . && "$0" -m ruff format --check --quiet .' "$python"
timed mypy "$python" -m mypy
output=$(mktemp)
trap 'rm -f "$output"' EXIT
started=$SECONDS
# Planting bugs, playing thousands of schedules, exploring models, and running `make test` itself takes minutes: `make test`
# has it.
"$python" -m pytest -q -m "not slow" --numprocesses "${WORKERS:-8}" --dist worksteal tests/unit tests/contract \
    --ignore tests/unit/test_mutants.py --ignore tests/unit/test_schedules.py --ignore tests/unit/test_rows_schedules.py \
    --ignore tests/unit/test_rows_model.py --ignore tests/unit/test_redis_model.py --ignore tests/unit/test_quiet.py "$@" | tee "$output"
[ "${PIPESTATUS[0]}" -eq 0 ] || status=1
took+=("tests $((SECONDS - started)) s")
passed=$(sed 's/\x1b\[[0-9;]*m//g' "$output" | grep -oE '[0-9]+ passed' | tail -n 1 | grep -oE '[0-9]+')
[ "${passed:-0}" -ge $at_least ] || [ $# -gt 0 ] || status=1
echo "== make check: $(IFS=, && echo "${took[*]}"); ${passed:-0} tests passed, at least $at_least have to"
exit $status
