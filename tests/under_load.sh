#!/usr/bin/env bash
# Runs tests beside eight busy processes per core: PYTHON=.venv/bin/python tests/under_load.sh [arguments for pytest]
#
# Without arguments: the unit tests, and the contract on one server of each kind. A test that fails here and passes on
# a quiet machine waits for a time where it should wait for a condition.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
export PYTHONASYNCIODEBUG=1
python=${PYTHON:-python3}
busy=()
trap 'kill "${busy[@]}" 2>/dev/null' EXIT
trap 'exit 130' INT TERM

for ((number = 0; number < 8 * $(nproc); number++)); do
    # Each ends by itself, if we are killed before we can end it.
    timeout 3600 bash -c 'while :; do :; done' &
    busy+=($!)
done
echo "== ${#busy[@]} busy processes on $(nproc) cores"

if [ $# -gt 0 ]; then
    "$python" -m pytest -o timeout=900 "$@"
else
    AIOLOCK_DEPLOYMENTS="memory redis zookeeper mariadb" \
        "$python" -m pytest -o timeout=900 -m "not slow" --numprocesses 8 --dist worksteal tests/unit tests/contract
fi
