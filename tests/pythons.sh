#!/usr/bin/env bash
# Runs what every backend promises under the other Pythons of this machine: tests/pythons.sh [3.12 3.13 ...]
#
# The last of them runs on loops with `asyncio.eager_task_factory` (AIOLOCK_EAGER_TASKS=1; Python 3.12 or newer).
#
# Looks on the PATH, among pyenv's versions, and in Debian's sid (tests/sid.sh python3.14), and says which it found.
# One that is absent is no failure; one that fails is. On one server of each: a quorum and a cluster are made of the same
# parts.
set -euo pipefail
cd "$(dirname "$0")/.."
absent=() passed=() failed=()

find_python() {
    local candidate root
    for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
        # A name on the PATH may be a shim that leads nowhere, so the version is asked for.
        if [ "$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$1" ]; then
            echo "$candidate"
            return
        fi
    done
    [ "$1" = 3.14 ] && root=$(tests/sid.sh "python$1") && echo "$root/bin/python$1"
}

check() {
    local venv=.venv-$1
    [ -x "$venv/bin/python" ] || tests/venv.sh "$venv" "$2" || return
    if [ ! pyproject.toml -ot "$venv/test.stamp" ]; then
        "$venv/bin/python" -m pip install --quiet --editable '.[redis,fastapi,aiohttp]' --group test || return
        touch "$venv/test.stamp"
    fi
    "$venv/bin/python" -m pytest -q -n 4 --dist worksteal tests/contract tests/unit/test_stops.py \
        -k "test_stops or (memory or redis) and not far and not without-pubsub and not least-rights and not quorum and not cluster"
}

for version in "$@"; do
    if ! python=$(find_python "$version"); then
        absent+=("$version")
        continue
    fi
    echo "== Python $version ($python): tests/contract"
    # Instead of an ordinary run, not beside it: time is short, and the loop makes the difference, not the version.
    if [ "$version" = "${!#}" ] && [ "$version" != 3.11 ]; then eager=1; else eager=0; fi
    if AIOLOCK_EAGER_TASKS=$eager check "$version" "$python"; then passed+=("$version"); else failed+=("$version"); fi
done
echo "Other Pythons: passed ${passed[*]:-none}; failed ${failed[*]:-none}; not on this machine ${absent[*]:-none}"
[ ${#failed[@]} -eq 0 ]
