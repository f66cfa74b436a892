"""Servers that speak MySQL's protocol and are another product: a MariaDB says that it is one of them."""

from __future__ import annotations

import contextlib
import inspect
import warnings

import pytest

from aiolock.backends.mysql.diagnosis import capabilities, findings, refuse
from aiolock.errors import BackendRefused, ExperimentalWarning, UnsafeBackend
from aiolock.types import Level
from tests import servers
from tests.backends.mysql.conftest import ACCOUNT, Deployment

pytestmark = pytest.mark.skipif(servers.is_mysql(), reason="only a MariaDB can be told its version")


@pytest.mark.parametrize(
    ("version", "name"),
    [("8.0.40-Vitess", "Vitess"), ("5.7.9-vitess-10.0.0", "Vitess"), ("5.7.25-OceanBase-v4.2.1.2", "OceanBase")],
)  # fmt: skip
async def test_another_product_is_refused_by_name(version, name):
    with servers.MariaDB(init=ACCOUNT, extra=[f"--version={version}"]) as server:
        for mode in ("lease", "session", "row"):
            with pytest.raises(BackendRefused, match=f"this is {name}") as caught:
                await Deployment(server).connect(mode).open()
            assert not caught.value.retryable
        [finding] = await Deployment(server).connect().diagnose()
    assert (finding.subject, finding.level) == ("version", Level.ERROR)
    assert name in finding.text


async def test_an_experimental_product_is_used_with_a_warning_and_promises_less():
    with servers.MariaDB(init=ACCOUNT, extra=["--version=8.0.11-TiDB-v7.5.1"]) as server:
        deployment = Deployment(server)
        client, line = deployment.connect(), inspect.currentframe().f_lineno + 2
        with pytest.warns(ExperimentalWarning, match="TiDB") as told:
            await client.open()
        async with contextlib.aclosing(client):
            assert "exclusion" not in client.capabilities
            async with client.lock("x"):
                pass
            found = {finding.subject: finding for finding in await client.diagnose()}
        assert [(warning.filename, warning.lineno) for warning in told] == [(__file__, line)]
        assert found["version"].level is Level.WARNING
        assert "TiDB" in found["version"].text
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            with pytest.raises(UnsafeBackend, match="does not promise exclusion"):
                await deployment.connect(require={"exclusion"}).open()


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ({"version": "8.0.30", "version_comment": "OceanBase_CE 4.2.1.2 (r102)"}, "OceanBase"),
        ({"version": "5.6.25", "ob_query_timeout": "10000000"}, "OceanBase"),
        ({"version": "8.0.21-Vitess"}, "Vitess"),
    ],
)
def test_variables_tell_what_a_proxy_hides_in_its_greeting(facts, name):
    with pytest.raises(BackendRefused, match=name):
        refuse(facts, "lease", "here")
    [finding] = [finding for finding in findings(facts, "lease") if finding.subject == "version"]
    assert finding.level is Level.ERROR
    assert name in finding.text


def test_a_product_that_hides_its_version_is_known_by_its_comment():
    facts = {"version": "8.0.11", "version_comment": "TiDB Server (Apache License 2.0), MySQL 8.0 compatible"}
    assert "exclusion" not in capabilities(facts, "lease")
    assert "exclusion" in capabilities({"version": "8.0.46", "version_comment": "MySQL Community"}, "lease")


@pytest.mark.parametrize(
    "version", ["8.0.mysql_aurora.3.04.0", "10.11.9-MariaDB-log", "8.0.36-28 Percona Server"]
)
def test_relatives_of_mysql_are_used(version):
    facts = {"version": version}
    refuse(facts, "lease", "here")
    assert "exclusion" in capabilities(facts, "lease")
