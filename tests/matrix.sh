#!/usr/bin/env bash
# Runs the tests with other Pythons and servers than the installed ones: tests/matrix.sh [pythons] [mysql9.7] [mariadb11.8]
#
# A server is downloaded unless it is there (tests/sid.sh), and the contract runs on it in every mode, and all tests of
# the MySQL backend. Every part runs, also after one has failed; the last lines count what passed in each.
# PYTHON names the Python to use, PYTHONS the other ones.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python3} status=0 counts=()

count() { # TITLE COMMAND...
    local title=$1 output counted
    shift
    output=$(mktemp)
    echo "== $title"
    "$@" 2>&1 | tee "$output" || status=1
    counted=$(sed 's/\x1b\[[0-9;]*m//g' "$output" | grep -E '[0-9]+ (passed|failed|error)|^Other Pythons' | tail -n 1)
    counts+=("$title: ${counted:-no test ran}")
    rm -f "$output"
}

for part in "$@"; do
    if [ "$part" = pythons ]; then
        # shellcheck disable=SC2086 # several words
        count pythons tests/pythons.sh ${PYTHONS:-}
        continue
    fi
    if ! root=$(tests/sid.sh "$part"); then
        status=1 counts+=("$part: could not be had, see above")
        continue
    fi
    server=("$root"/bin/{mysqld,mariadbd})
    [ -x "${server[0]}" ] || server=("${server[1]}")
    export AIOLOCK_SERVERS=mariadb AIOLOCK_MYSQLD=${server[0]}
    count "$part, tests/contract" \
        "$python" -m pytest -q -n 4 --dist worksteal tests/contract -k "$part"
    count "$part, tests/backends/mysql" \
        "$python" -m pytest -q -n 2 --dist worksteal tests/backends/mysql
    unset AIOLOCK_SERVERS AIOLOCK_MYSQLD
done
printf '%s\n' "== counts" "${counts[@]}"
exit $status
