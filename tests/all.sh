#!/usr/bin/env bash
# Runs every test: PYTHON=.venv/bin/python tests/all.sh [more arguments for pytest]
#
# Most of a test is waiting, so four times as many run at once as a small machine has cores. Those that are marked `slow` let
# many processes work for a minute, and would disturb each other and the rest: they come afterwards, two at a time. What
# failed in the first part does not keep the second from running. With COVERAGE=1 the branches are counted, which costs
# half as much processor time again.
#
# What runs on a stand-in for MongoDB is a part of its own, and is not counted among the tests that passed: it agreed with a program
# that is no MongoDB. MongoDB's driver leaves a socket open when it is closed while it connects, as the clients of tests are: that the
# library's own clients leave none is tested by counting them.
#
# What is printed is short (tests/quiet.py): progress, the failures, the counts, and the names of all failures as the last lines.
# The whole output is in build/test.log, build/test-slow.log and build/test-mongodb.log; LOGS names another folder.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1
export PYTHONASYNCIODEBUG=1
python=${PYTHON:-python3} logs=${LOGS:-build}
status=0
first=() between=() second=()
if [ -n "${COVERAGE:-}" ]; then
    first=(--cov=aiolock --cov-report=)
    between=(--cov=aiolock --cov-append --cov-report=)
    second=(--cov=aiolock --cov-append --cov-report=term)
fi

names=$(mktemp)
trap 'rm -f "$names"' EXIT

part() { # LOG TITLE ARGUMENTS FOR PYTEST...
    local log=$logs/$1
    echo "== $2, in full: $log"
    shift 2
    "$python" -m pytest -q --dist worksteal "$@" 2>&1 | "$python" tests/quiet.py "$log" "$names" "$passed"
    case "${PIPESTATUS[*]}" in
        "0 0") ran=yes ;;
        "5 0") [ -n "$chosen" ] || status=1 ;; # what the arguments name has no tests of this part
        *) status=1 ;;
    esac
}

# Arguments that name files choose the tests of all parts.
chosen='' ran='' standin=(tests/contract tests/backends/mongodb)
for word in "$@"; do
    [ ! -e "${word%%::*}" ] || chosen=yes standin=()
done

servers=" ${AIOLOCK_SERVERS:-redis} " passed=passed
export AIOLOCK_SERVERS=${servers/ mongodb-standin / }

part test.log "all tests but the slow ones" -m "not slow" --numprocesses 8 "${first[@]}" "$@"
if [[ $servers == *" mongodb-standin "* ]]; then
    AIOLOCK_SERVERS=mongodb-standin AIOLOCK_DEPLOYMENTS=mongodb-standin passed="agreed with a stand-in for MongoDB, which is no mongod" \
        part test-mongodb.log "MongoDB, on a stand-in" -k mongodb -W 'ignore:unclosed :ResourceWarning' --numprocesses 8 "${between[@]}" "${standin[@]}" "$@"
fi
part test-slow.log "slow tests" -m slow --numprocesses 2 "${second[@]}" "$@"
if [ -s "$names" ]; then
    echo "== failed: $(wc -l <"$names")"
    cat "$names"
fi
[ -n "$ran" ] || status=1
exit $status
