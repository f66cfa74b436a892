#!/usr/bin/env bash
# Runs the tests that touch a driver or a framework with the oldest versions of them: tests/oldest.sh [arguments for pytest]
#
# Makes .venv-oldest with the versions in tests/oldest.txt, prints what was installed, and runs the web integrations, the
# portal, the connections of Redis and the contract on memory and one server of each. One test is left out: it declares
# parameters with several aliases, which that FastAPI cannot read itself.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-oldest

[ -x $venv/bin/python ] || tests/venv.sh $venv "${PYTHON:-python3}"
if [ pyproject.toml -nt $venv/oldest.stamp ] || [ tests/oldest.txt -nt $venv/oldest.stamp ]; then
    $venv/bin/python -m pip install --quiet --constraint tests/oldest.txt --editable '.[all]' httpx hypothesis kazoo \
        opentelemetry-sdk prometheus-client 'pytest<9' pytest-asyncio pytest-cov pytest-timeout pytest-xdist pyyaml uvicorn uvloop
    touch $venv/oldest.stamp
fi
$venv/bin/python -m pip list 2>/dev/null | grep -iE '^(aiohttp|aiomysql|aiozk|anyio|fastapi|hiredis|pymysql|redis|starlette) '
export AIOLOCK_SERVERS="redis mariadb zookeeper" AIOLOCK_DEPLOYMENTS="memory redis zookeeper mariadb"
$venv/bin/python -m pytest -q -n "${WORKERS:-2}" --dist worksteal tests/integrations tests/unit/test_portal.py tests/cli \
    tests/backends/redis/test_endpoint.py tests/backends/redis/test_connection.py tests/contract \
    --deselect "tests/integrations/test_fastapi.py::test_a_name_in_braces_is_found_as_the_url_or_the_function_calls_it" \
    "$@"
