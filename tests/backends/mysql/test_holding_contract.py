"""The modes in which a hold is a session's are held against the contract; what the server does not know about them is not asked for."""

# ruff: noqa: F811 - fixtures are imported, and asked for by name
from __future__ import annotations

from contextlib import contextmanager

import pytest

import aiolock
from aiolock import UnsupportedKind
from tests import servers
from tests.backends.mysql.tools import as_root
from tests.contract import (
    test_exclusion,
    test_leases,
    test_names,
    test_queueing,
    test_reentrant,
    test_sweep,
)
from tests.contract.conftest import client, deployment, rival  # noqa: F401 - fixtures
from tests.contract.deployments import WORDS, Deployment
from tests.contract.primitives import PRIMITIVES
from tests.contract.test_sweep import ledger, no_error_is_logged, other, swept  # noqa: F401 - fixtures
from tests.sweep import MODES


class MariaDBSessions(Deployment):
    """Locks that are user locks of sessions."""

    name = "mariadb-session"
    promises = WORDS - {"fencing", "keep"}
    slow = 2.0

    @contextmanager
    def running(self):
        with servers.MariaDB(extra=["--max-connections=400"]) as server:
            self._server = server
            yield self

    def make(self, **options):
        return aiolock.connect(f"{self._server.url}?mode=session", **options)


class MariaDBRows(MariaDBSessions):
    """Locks that are row locks of open transactions."""

    name = "mariadb-row"

    def make(self, **options):
        return aiolock.connect(f"{self._server.url}?mode=row&connections=100", **options)

    async def lose(self, lease):
        """Which transaction has a row only administrators may see: one of them ends its connection."""
        await as_root(self._server, f"KILL {lease._term.claim.session.id}")


@pytest.fixture(scope="session", params=[MariaDBSessions, MariaDBRows], ids=lambda cls: cls.name)
def server(request):
    with request.param().running() as running:
        yield running


TOLD_OTHERWISE = {
    # A foreign session that is ended says nothing about who did it: the reason is "session".
    "test_a_lost_lease_says_so_everywhere",
    "test_wait_lost_tells_every_watcher_why",
    # The server knows neither labels nor tokens of user locks.
    "test_different_names_are_different_locks",
    # A connection for each hold is the point of the row mode, so 10,000 are asked of the lease mode.
    "test_ten_thousand_leases_are_held_and_renewed_by_one_client",
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("operation", PRIMITIVES)
async def test_an_operation_interrupted_anywhere_leaves_nothing_behind(
    deployment,
    swept,
    other,
    operation,
    mode,
    ledger,
    no_error_is_logged,
):
    if (deployment.name, operation) == ("mariadb-row", "force_release"):
        async with other.lock("x"):
            with pytest.raises(UnsupportedKind):
                await swept.lock("x").force_release()
        return
    await test_sweep.test_an_operation_interrupted_anywhere_leaves_nothing_behind(
        deployment, swept, other, operation, mode, ledger, no_error_is_logged
    )


for module in (test_exclusion, test_leases, test_names, test_queueing, test_reentrant):
    for name, thing in vars(module).items():
        if name.startswith("test_") and callable(thing) and name not in TOLD_OTHERWISE:
            globals()[name] = thing
