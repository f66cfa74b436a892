"""Addresses that were written for other programs: what each parameter becomes, what is ignored, and what is refused."""

from __future__ import annotations

import logging
import re
import ssl
from pathlib import Path

import pytest

import aiolock
from aiolock import ConfigError
from aiolock.backends import SCHEMES, foreign_parameters
from aiolock.backends.foreign_parameters import ALIASES, PARTS
from aiolock.backends.mongodb.url import parameters as mongodb
from aiolock.backends.mysql.url import parameters as mysql
from aiolock.backends.postgresql.url import parameters as postgresql
from aiolock.backends.redis.url import Endpoint
from tests.certificates import Certificates

SECRET = "s3cret-and-more"
POSTGRESQL = f"postgresql://app:{SECRET}@db.example/base"
MYSQL = f"mysql://app:{SECRET}@db.example/base"


def tls_of(parameters, url, **given):
    """Whether an address verifies, only encrypts, or neither."""
    context = parameters(url, given)[0].arguments["ssl"]
    if not context:
        return "off"
    return "verify" if context.check_hostname and context.verify_mode == ssl.CERT_REQUIRED else "encrypt"


# --- schemes


@pytest.mark.parametrize("alias", ALIASES)
def test_every_alias_means_the_same_server_as_its_scheme(alias):
    kind = ALIASES[alias]
    places = {
        "unix": "/run/server.sock",
        "sqlite": "/run/locks.db",
        "mysql": "h1/base",
        "postgresql": "app@h1/base",
    }
    place = places.get(kind, "h1/service" if "sentinel" in kind else "h1")
    other, named = (aiolock.connect(f"{scheme}://{place}") for scheme in (alias.upper(), kind))
    assert kind in SCHEMES
    assert alias not in SCHEMES
    assert type(other._backend) is type(named._backend)
    assert other._backend.address == named._backend.address


def test_two_spellings_of_one_server_are_no_quorum():
    with pytest.raises(ConfigError, match="named twice"):
        aiolock.connect(["redis://h1", "valkey://h1:6379", "valkeys://h3"])


# --- TLS


@pytest.mark.parametrize("scheme", [POSTGRESQL, MYSQL])
@pytest.mark.parametrize(
    ("query", "means"),
    [
        ("sslmode=disable", "off"),
        ("sslmode=require", "verify"),
        ("sslmode=verify-ca", "verify"),
        ("sslmode=verify-full", "verify"),
        ("ssl-mode=DISABLED", "off"),
        ("ssl-mode=REQUIRED", "verify"),
        ("ssl_mode=VERIFY_CA", "verify"),
        ("sslMode=VERIFY_IDENTITY", "verify"),
        ("ssl=true", "verify"),
        ("ssl=false", "off"),
        ("sslaccept=strict", "verify"),
        ("sslmode=require&tls=encrypt", "encrypt"),
        ("tls=encrypt&sslmode=require", "encrypt"),
    ],
)
def test_tls_that_is_asked_for_is_verified(scheme, query, means):
    parameters = postgresql if scheme is POSTGRESQL else mysql
    assert tls_of(parameters, f"{scheme}?{query}") == means


def test_an_option_beside_the_address_counts_whatever_the_address_says():
    assert tls_of(postgresql, f"{POSTGRESQL}?sslmode=require", tls="encrypt") == "encrypt"
    own = ssl.create_default_context()
    assert mysql(f"{MYSQL}?ssl-mode=REQUIRED", {"tls": own})[0].arguments["ssl"] is own


@pytest.mark.parametrize(
    ("query", "means"),
    [
        ("channel_binding=require", "verify"),
        ("channel_binding=prefer", "off"),
        ("sslmode=require&channel_binding=require", "verify"),
        ("ssl=require", "verify"),
        ("sslrootcert=system", "verify"),
        ("requiressl=1", "verify"),
        ("ssl=1", "verify"),
        ("ssl=true", "verify"),
        ("ssl=0", "off"),
    ],
)
def test_tls_of_postgresql(query, means):
    assert tls_of(postgresql, f"{POSTGRESQL}?{query}") == means


@pytest.mark.parametrize(
    "query",
    [
        "ssl_verify_cert=true",
        "ssl_verify_identity=true",
        "ssl_check_hostname=true",
        'ssl={"rejectUnauthorized":true}',
        'ssl={"rejectUnauthorized": true}',
        "ssl=%7B%22rejectUnauthorized%22%3A+true%7D",
    ],
)
def test_tls_of_mysql(query):
    assert tls_of(mysql, f"{MYSQL}?{query}") == "verify"
    assert tls_of(mysql, f"{MYSQL}?ssl_disabled=true") == "off"


def test_the_file_of_an_authority_asks_for_tls(tmp_path):
    ca = Certificates(tmp_path).ca
    for parameters, url in (
        (postgresql, f"{POSTGRESQL}?sslmode=require&sslrootcert={ca}"),
        (postgresql, f"{POSTGRESQL}?sslrootcert={ca}"),
        (mysql, f"{MYSQL}?ssl_ca={ca}"),
        (mysql, f"{MYSQL}?ssl-ca={ca}&ssl-mode=VERIFY_CA"),
    ):
        context = parameters(url, {})[0].arguments["ssl"]
        assert context.check_hostname
        assert len(context.get_ca_certs()) == 1
    mongo = mongodb(f"mongodb://app:{SECRET}@h1/base?tlsCAFile={ca}&replicaset=rs0", {}).arguments
    assert (mongo["tls"], mongo["tlsCAFile"], mongo["replicaSet"]) == (True, str(ca), "rs0")


# --- where the server is


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("postgresql:///base?host=/cloudsql/p:eu:i&user=app", "/cloudsql/p:eu:i", 5432),
        ("postgresql://app@/base?host=/cloudsql/p:eu:i&port=5433", "/cloudsql/p:eu:i", 5433),
        ("postgresql+pg8000://app@/base?unix_sock=/cloudsql/p:eu:i/.s.PGSQL.5434", "/cloudsql/p:eu:i", 5434),
        ("postgresql://?host=db.example&port=5433&user=app&dbname=base", "db.example", 5433),
        ("postgresql://app@db.example/base?port=5433", "db.example", 5433),
        ("postgresql:///base?user=app&port=5433", "localhost", 5433),
        ("postgresql://app@%2Fcloudsql%2Fp%3Aeu%3Ai/base", "/cloudsql/p:eu:i", 5432),
        ("postgresql://app:pw@%2fcloudsql%2Fp:eu:i/base?sslmode=require", "/cloudsql/p:eu:i", 5432),
        ("postgresql://app@%2Frun%2Fpostgresql:5433/base", "/run/postgresql", 5433),
        ("postgresql://app@%2Fa%26tls=off/base", "/a&tls=off", 5432),
    ],
)
def test_a_place_that_stands_in_the_query(url, host, port):
    address, _ = postgresql(url, {})
    arguments = address.arguments
    assert (arguments["host"], arguments["port"]) == (host, port)
    assert (arguments["user"], arguments["database"]) == ("app", "base")
    assert address.hosts == ()


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://app@h1:5433,h2/base?target_session_attrs=read-write",
        "postgresql+psycopg://app@/base?host=h1:5433&host=h2",
        "postgresql://app@/base?host=h1,h2&port=5433,5432&load_balance_hosts=random",
    ],
)
def test_several_hosts(url):
    address, _ = postgresql(url, {})
    assert [str(host) for host in address.hosts] == ["h1:5433", "h2:5432"]
    assert address.text == "postgresql://app@h1:5433,h2:5432/base"
    assert not address.local
    one = address.at(address.hosts[1])
    assert (one.arguments["host"], one.arguments["port"], one.hosts) == ("h2", 5432, ())
    assert one.text == "postgresql://app@h2:5432/base"


@pytest.mark.parametrize(
    "query",
    [
        "host=/run&sslmode=require",
        "sslmode=verify-full&sslrootcert=/none&host=/run",
        "unix_socket=/run&sslmode=prefer",
        "Host=/run&sslmode=prefer",
    ],
)
def test_a_socket_in_the_file_system_has_no_tls_whatever_foreign_parameters_say(query, caplog):
    with caplog.at_level(logging.DEBUG, "aiolock"):
        address, _ = postgresql(f"postgresql://app@/base?{query}", {})
    assert (address.arguments["host"], address.arguments["ssl"]) == ("/run", False)
    assert re.search("ssl(mode|rootcert) of a PostgreSQL URL means nothing here, and is ignored", caplog.text)
    with pytest.raises(ConfigError, match="needs no TLS"):
        postgresql(f"postgresql://app@/base?{query}", {"tls": "verify"})


def test_prisma_s_localhost_beside_a_socket_is_no_host():
    address, _ = postgresql("postgresql://app@localhost/base?host=/cloudsql/one", {})
    assert address.arguments["host"] == "/cloudsql/one"


def test_login_and_database_in_the_query_of_mysql():
    address, _ = mysql(f"mysql://db.example?user=app&password={SECRET}&db=a%2Bb", {})
    arguments = address.arguments
    assert (arguments["user"], arguments["password"], arguments["db"]) == ("app", SECRET, "a+b")
    assert SECRET not in repr(address)


def test_celery_s_socket_and_its_words_for_certificates():
    endpoint = Endpoint("redis+socket:///run/redis.sock?virtual_host=3")
    assert endpoint.address == "unix:///run/redis.sock?db=3"
    assert Endpoint("rediss://h1?ssl_cert_reqs=CERT_NONE")._kwargs["ssl_cert_reqs"] == "none"


# --- ignored


@pytest.mark.parametrize(
    ("url", "name"),
    [
        (f"{POSTGRESQL}?application_name=web", "application_name"),
        (f"{POSTGRESQL}?connect_timeout=10", "connect_timeout"),
        (f"{POSTGRESQL}?options=-csearch_path%3Dapp%20-c%20statement_timeout=5s", "options"),
        (f"{POSTGRESQL}?options=endpoint%3Dep-quiet", "options"),
        (f"{POSTGRESQL}?pgbouncer=false", "pgbouncer"),
        (f"{POSTGRESQL}?schema=public", "schema"),
        (f"{POSTGRESQL}?SCHEMA=public", "SCHEMA"),
        ("rediss://h1?ssl=true", "ssl"),
        (f"{POSTGRESQL}?replication=false", "replication"),
        (f"{POSTGRESQL}?target_session_attrs=any", "target_session_attrs"),
        (f"{MYSQL}?charset=utf8mb4", "charset"),
        (f"{MYSQL}?reconnect=true", "reconnect"),
        ("redis://h1?health_check_interval=3", "health_check_interval"),
        ("valkey://h1?family=6", "family"),
        ("redis+cluster://h1?socket_timeout=3", "socket_timeout"),
        ("redis+sentinel://h1/service?decode_responses=1", "decode_responses"),
        ("mongodb://h1/base?retrywrites=true", "retrywrites"),
        ("sqlite+aiosqlite:////locks.db?check_same_thread=false", "check_same_thread"),
    ],
)
@pytest.mark.filterwarnings("ignore::aiolock.errors.ExperimentalWarning")
def test_what_changes_nothing_is_ignored_with_a_line(url, name, caplog):
    with caplog.at_level(logging.DEBUG, "aiolock"):
        aiolock.connect(url)
    [line] = [record for record in caplog.records if "is ignored" in record.message]
    assert line.levelno == logging.DEBUG
    assert line.message.startswith(f"{name} of a ")


# --- refused


@pytest.mark.parametrize(
    ("url", "says"),
    [
        (f"{POSTGRESQL}?sslmode=prefer", "sslmode in the address is not obeyed.*write require"),
        (f"{POSTGRESQL}?sslmode=allow", "or disable"),
        (f"{MYSQL}?ssl-mode=PREFERRED", "ssl-mode in the address is not obeyed.*write require"),
        (f"{POSTGRESQL}?sslmode=no-verify", "write tls=encrypt"),
        (f"{POSTGRESQL}?sslmode=requir", "sslmode in the address must be one of disable, .*, not 'requir'"),
        (
            f"{POSTGRESQL}?sslmode=disable&channel_binding=require",
            "sslmode and channel_binding .* contradict",
        ),
        (f"{POSTGRESQL}?sslcert=/c.pem&sslpassword={SECRET}", "sslcert .*tls=, an ssl.SSLContext"),
        (f"{POSTGRESQL}?sslpassword={SECRET}", "sslpassword .*tls=, an ssl.SSLContext"),
        (f"{POSTGRESQL}?sslcrl=/c.pem", "sslcrl"),
        (f"{POSTGRESQL}?ssl_min_protocol_version=TLSv1.3", "ssl_min_protocol_version"),
        (f"{POSTGRESQL}?target_session_attrs=prefer-standby", "write target_session_attrs=primary"),
        (f"{POSTGRESQL}?require_auth=scram-sha-256", "require_auth .*write sslmode=require"),
        (f"{POSTGRESQL}?gssencmode=require", "gssencmode .*write sslmode=require"),
        (f"{POSTGRESQL}?service=mine", "write host, user and password"),
        (f"{POSTGRESQL}?passfile=/p", "write host, user and password"),
        (f"{POSTGRESQL}?pgbouncer=true", "pooler"),
        (f"{POSTGRESQL}?options=-crole%3Dother", "sets 'role', .*ALTER ROLE"),
        (f"{POSTGRESQL}?replication=database", "replication .*takes no locks: leave it away"),
        (f"{POSTGRESQL}?schema=app", "schema must be .*, not 'app'; .* as in table=app.aiolock"),
        (f"{POSTGRESQL}?schema=public&schema=app", "schema must be "),
        (f"{POSTGRESQL}?Schema=app", "Schema .*write table=app.aiolock"),
        (f"{POSTGRESQL}?host=/run", "host is given twice"),
        (f"{POSTGRESQL}?unix_sock=/run/.s.PGSQL.5433", "host is given twice"),
        (f"{MYSQL}?host=/run/mysqld.sock", "host is given twice"),
        (f"{POSTGRESQL}?tls=verify&sslrootcert=/none/ca.pem", "/none/ca.pem"),
        (f"rediss://app:{SECRET}@h1?tls=false", "write redis:// for one without"),
        (f"{MYSQL}?schema=public", "schema must be "),
        (f"{POSTGRESQL}?ssl=no-verify", "ssl .*write tls=encrypt"),
        (f"{MYSQL}?ssl=%7B%22rejectUnauthorized%22%3A%20false%7D", "ssl .*write tls=encrypt"),
        (f"postgresql://app:{SECRET}@/base?host=/a,/b", "host .* lists several places.*name one socket"),
        (f"postgresql://app:{SECRET}@/base?host=/a,h2", "host .* lists several places.*name one socket"),
        (f"postgresql://app:{SECRET}@%2Fa/base?host=/b", "host .* lists several places"),
        (f"{POSTGRESQL}?host=other", "host is given twice, at its place in the address and as a parameter"),
        (f"{POSTGRESQL}?password={SECRET}", "password is given twice"),
        (f"{POSTGRESQL}?user=other", "user is given twice"),
        (f"{POSTGRESQL}?dbname=other", "database is given twice"),
        (
            f"postgresql://app:{SECRET}@h1:1/base?port=2",
            "port is given twice, at its place in the address and as a param",
        ),
        (f"postgresql://app:{SECRET}@h1,h2/base?port=1,2,3", "port in the address must be"),
        (f"postgresql://app:{SECRET}@h1,h2/base?port=x", "port in the address must be"),
        (f"postgresql://app:{SECRET}@h1,h2/base?unix_socket=/run", "leave one of both away"),
        (f"postgresql://app:{SECRET}@h1,app:{SECRET}@h2/base", "stand once"),
        (f"{MYSQL}?ssl_verify_identity=false", "write tls=encrypt"),
        (f"{MYSQL}?ssl_key=/k.pem", "ssl_key"),
        (f"mysql://app:{SECRET}@h1,h2/base", "lists several hosts: name the server that takes writes"),
        (f"redis://app:{SECRET}@h1:6379,h2:6379/0", r"several hosts: a cluster is redis\+cluster://"),
        (f"redis://app:{SECRET}@h1?ssl=true", "write rediss://"),
        (f"mongodb://app:{SECRET}@h1/base?tlsAllowInvalidCertificates=true", "tls_ca"),
        (f"mongodb://app:{SECRET}@h1/base?authMechanism=MONGODB-X509", "by user and password"),
        (f"mongodb://app:{SECRET}@h1/base?loadBalanced=true", "replicaSet"),
    ],
)
@pytest.mark.filterwarnings("ignore::aiolock.errors.ExperimentalWarning")
def test_what_cannot_be_obeyed_is_refused_by_name(url, says):
    with pytest.raises(ConfigError, match=says) as caught:
        aiolock.connect(url)
    assert SECRET not in str(caught.value)


def test_a_password_in_the_query_is_shown_nowhere(caplog):
    with caplog.at_level(logging.DEBUG, "aiolock"):
        client = aiolock.connect(f"postgresql://db.example/base?user=app&password={SECRET}")
    assert client._backend._address.arguments["password"] == SECRET
    assert SECRET not in repr(client) + str(client._backend.address) + caplog.text


@pytest.mark.parametrize("server", ["POSTGRESQL", "MYSQL", "REDIS", "MONGODB", "SQLITE"])
def test_a_parameter_is_found_however_it_is_written(server):
    known = getattr(foreign_parameters, server)
    for name in known:
        assert name == name.lower().replace("_", "").replace("-", "")
        assert foreign_parameters.meaning_of(known, name.upper()) is known[name]
    assert foreign_parameters.meaning_of(known, "no_such") is None
    assert "unix_socket" not in PARTS


@pytest.mark.parametrize("server", ["POSTGRESQL", "MYSQL", "REDIS", "MONGODB", "SQLITE"])
def test_every_parameter_and_every_scheme_is_on_the_page(server):
    page = (Path(__file__).parents[2] / "docs/how-to/addresses.md").read_text()
    names = re.findall(r"`([\w+-]+)`", page)
    named = {re.sub("[-_]", "", part).lower() for name in names for part in name.split("+")}
    assert set(getattr(foreign_parameters, server)) - named == set()
    written = {re.sub("[-_]", "", part) for alias in ALIASES for part in alias.split("+")}
    assert written - named == set()


@pytest.mark.parametrize(
    ("url", "tls"),
    [
        ("postgresql://u:p@h/d?sslmode=prefer", "encrypt"),
        ("postgresql://u:p@h/d?sslmode=no-verify", "verify"),
        ("postgresql://u:p@h/d?sslcert=/none&sslkey=/none", ssl.create_default_context()),
        ("postgresql://u:p@h/d?sslrootcert=/none&sslmode=verify-full", "encrypt"),
        ("mysql://u:p@h/d?ssl-mode=PREFERRED", "encrypt"),
        ("mysql://u:p@h/d?ssl_ca=/none", ssl.create_default_context()),
    ],
)
def test_the_own_option_of_tls_counts_whatever_other_parameters_say_about_it(url, tls):
    aiolock.connect(url, tls=tls)
    with pytest.raises(ConfigError):
        aiolock.connect(url)


def test_the_tls_of_mongodb_is_said_by_its_own_parameters_together():
    with pytest.raises(ConfigError, match="/none"):
        aiolock.connect("mongodb://h/d?replicaSet=r&tls=true&tlsCAFile=/none")
