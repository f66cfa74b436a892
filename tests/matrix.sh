#!/usr/bin/env bash
# Runs the tests with other Pythons, dependencies and servers than the installed ones: tests/matrix.sh PART...
#
# pythons       the contract with the other Pythons of this machine, the newest of them with eager tasks (tests/pythons.sh)
# oldest newest the tests that touch a dependency, with the oldest and the newest versions (tests/dependencies.sh)
# mysql9.7 mariadb11.8   the contract in every mode and all tests of the MySQL backend on this server, which is
#               downloaded unless it is there (tests/sid.sh)
# postgresql15  the contract and all tests of the PostgreSQL backend on Debian's version 15, which is installed by apt
# model         python -m tests.model redis, with longer bounds than `make test` has
# interop       python -m tests.interop: locks that are shared with real libraries of Go
# gate          python -m benchmarks --gate
#
# Every part runs, also after one has failed; the last lines say what passed in each and how long it took.
# PYTHON names the Python to use, PYTHONS the other ones.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
python=${PYTHON:-python3} status=0 counts=()

count() { # TITLE COMMAND...
    local title=$1 output counted started=$SECONDS
    shift
    output=$(mktemp)
    echo "== $title"
    "$@" 2>&1 | tee "$output" || status=1
    counted=$(sed 's/\x1b\[[0-9;]*m//g' "$output" | grep -E '[0-9]+ (passed|failed|error)|^Other Pythons|^gate: |^interop: |unexpected results' | tail -n 1)
    counts+=("$title: ${counted:-no test ran} [$((SECONDS - started)) s]")
    rm -f "$output"
}

for part in "$@"; do
    case $part in
        pythons)
            # shellcheck disable=SC2086 # several words
            count pythons tests/pythons.sh ${PYTHONS:-}
            continue
            ;;
        oldest | newest)
            count "$part dependencies" tests/dependencies.sh "$part"
            continue
            ;;
        postgresql15)
            tests/install.sh postgresql postgresql15 || status=1
            export AIOLOCK_WHOLE_CONTRACT=1 AIOLOCK_SERVERS=postgresql AIOLOCK_POSTGRES=/usr/lib/postgresql/15/bin/postgres
            count "$part, tests/contract" "$python" -m pytest -q -n 4 --dist worksteal tests/contract -k "$part"
            count "$part, tests/backends/postgresql" \
                "$python" -m pytest -q -n 2 --dist worksteal tests/backends/postgresql
            unset AIOLOCK_SERVERS AIOLOCK_POSTGRES AIOLOCK_WHOLE_CONTRACT
            continue
            ;;
        model)
            count "model of the Redis hand-off" "$python" -m tests.model redis dialects --states 400000 --seconds 12
            continue
            ;;
        interop)
            count "libraries of other languages" "$python" -m tests.interop
            continue
            ;;
        gate)
            count "benchmarks" "$python" -m benchmarks --gate --calm 60
            continue
            ;;
    esac
    if ! root=$(tests/sid.sh "$part"); then
        status=1 counts+=("$part: could not be had, see above")
        continue
    fi
    server=("$root"/bin/{mysqld,mariadbd})
    [ -x "${server[0]}" ] || server=("${server[1]}")
    export AIOLOCK_SERVERS=mariadb AIOLOCK_MYSQLD=${server[0]}
    count "$part, tests/contract" \
        "$python" -m pytest -q -n 4 --dist worksteal tests/contract -k "$part"
    AIOLOCK_DEPLOYMENTS="$part-engine" count "$part over rows, tests/contract" \
        "$python" -m pytest -q -n 4 --dist worksteal tests/contract
    count "$part, tests/backends/mysql" \
        "$python" -m pytest -q -n 2 --dist worksteal tests/backends/mysql
    unset AIOLOCK_SERVERS AIOLOCK_MYSQLD
done
printf '%s\n' "== counts" "${counts[@]}"
exit $status
