"""Foreign parameters: what addresses say that were written for other programs, by hosting providers, ORMs and other drivers.

Each parameter of another program's URLs has one meaning here: it becomes options or parts of the address, or it is ignored
because it changes nothing, or it is refused because it cannot be obeyed and ignoring it would be unsafe. Pure, and without
imports that take long: the registry of backends reads :data:`ALIASES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aiolock.errors import ConfigError, shorten

__all__ = [
    "ALIASES",
    "MONGODB",
    "MYSQL",
    "PARTS",
    "POSTGRESQL",
    "PRISMA",
    "REDIS",
    "REDISS",
    "SQLITE",
    "ZOOKEEPER",
    "ForeignParameters",
    "Meaning",
    "meaning_of",
    "plain_name",
    "scheme_of",
]

Meaning = Callable[[str, str], Mapping[str, str]]
"""Return the options and parts of the address that a parameter becomes, by its name and value; nothing if it is ignored.

Raises :class:`ConfigError` if it is refused; the value is quoted only where it is no credential."""
ForeignParameters = Mapping[str, Meaning]
"""Parameters by their names in lower case, without ``-`` and ``_``, which programs write differently."""

PRISMA = "schema", "public"
"""The one parameter, with its value, that foreign addresses have under a name of an option of the library: where Prisma's own tables are."""

PARTS = frozenset({"host", "port", "user", "password", "database"})
"""Parts of an address that a parameter may become."""

_DRIVERS = {
    "postgresql": ("asyncpg", "psycopg", "psycopg_async", "psycopg2", "psycopg2cffi", "pg8000", "aiopg"),
    "mysql": ("aiomysql", "asyncmy", "pymysql", "cymysql", "mysqldb", "mysqlconnector", "mariadbconnector"),
    "sqlite": ("aiosqlite", "pysqlite"),
}
_MARIADB = ("mariadb", *(f"mariadb+{driver}" for driver in _DRIVERS["mysql"]))

ALIASES: Mapping[str, str] = {
    **{f"{name}+{driver}": name for name, drivers in _DRIVERS.items() for driver in drivers},
    **dict.fromkeys(("postgres", "pgsql", "psql", "postgis", "asyncpg", "psycopg"), "postgresql"),
    **dict.fromkeys((*_MARIADB, "mysql2"), "mysql"),
    **{
        f"valkey{tls}{kind}": f"redis{tls}{kind}"
        for tls in ("", "s")
        for kind in ("", "+sentinel", "+cluster")
    },
    **dict.fromkeys(("redis+unix", "redis+socket", "valkey+unix", "valkey+socket"), "unix"),
}
"""Schemes that mean another one, as ORMs and other clients write them."""


def scheme_of(url: str) -> str:
    """Return the scheme of a URL, or the one that it is an alias of; in lower case, and empty if there is none."""
    scheme, mark, _ = url.partition("://")
    return ALIASES.get(scheme.lower(), scheme.lower()) if mark else ""


def plain_name(name: str) -> str:
    """Return the name of a parameter in lower case, without ``-`` and ``_``."""
    return name.lower().replace("-", "").replace("_", "")


def meaning_of(known: ForeignParameters, name: str, *, own_tls: object = None) -> Meaning | None:
    """Return what a parameter means; ``None`` if it is not known.

    :param own_tls: the option ``tls``, if it is given by its own name, or ``"off"`` where the server is reached by a socket in the
        file system: then foreign parameters only name the authority, and that only for ``"verify"``.
    """
    plain = plain_name(name)
    meaning = known.get(plain)
    if own_tls and meaning is not None and _TLS.keys() <= known.keys():
        # Where TLS is said in other words than those of the option, as not by MongoDB's `tls` and `tlsCAFile`.
        if own_tls == "verify" and plain in ("sslrootcert", "sslca"):
            return lambda _, value: {} if value == "system" else {"tls_ca": value}
        return _ignored if plain.startswith(("ssl", "requiressl", "channelbinding")) else meaning
    return meaning


# --- meanings


def _ignored(name: str, value: str) -> Mapping[str, str]:
    del name, value
    return {}


def _renamed(option: str) -> Meaning:
    return lambda _, value: {option: value}


def _sets(option: str, setting: str, also: str | None = None) -> Meaning:
    """Return the meaning of a parameter that implies ``option`` to be ``setting``; ``also`` is an option that gets its value."""
    return lambda _, value: {option: setting} | ({} if also is None else {also: value})


def _refused(why: str) -> Meaning:
    def refuse(name: str, value: str) -> Mapping[str, str]:
        del value
        raise ConfigError(f"{name} in the address is not obeyed here, and not ignored: {why}")

    return refuse


def _by_value(meanings: Mapping[str, Meaning]) -> Meaning:
    """Return a meaning that depends on the value, which is compared without regard to case and spaces."""

    def read(name: str, value: str) -> Mapping[str, str]:
        if (meaning := meanings.get("".join(value.lower().split()))) is None:
            known = [each for each in meanings if each]
            raise ConfigError(
                f"{name} in the address must be one of {', '.join(known)}, not {shorten(value)}"
            )
        return meaning(name, value)

    return read


def _switch(on: Meaning, off: Meaning = _ignored) -> Meaning:
    """Return the meaning of a parameter that is true or false."""
    return _by_value({**dict.fromkeys(("true", "1", "yes"), on), **dict.fromkeys(("false", "0", "no"), off)})


def _all(meaning: Meaning, *names: str) -> ForeignParameters:
    return dict.fromkeys(names, meaning)


# --- TLS of servers whose connections begin without it
# Programs disagree about what `require` verifies, from nothing to everything. Here it is everything, and the way out is said.

_OFF, _VERIFY = _sets("tls", "off"), _sets("tls", "verify")
_CONTEXT = "hand over a certificate, a list or a rule of TLS as tls=, an ssl.SSLContext"
_PERHAPS = _refused(
    "TLS that is given up when the server does not offer it protects against no attacker: write require (TLS, and the server is "
    "verified) or disable"
)
_UNVERIFIED = _refused(
    "it asks for TLS that verifies nothing: write tls=encrypt instead, or tls=verify with the authority in tls_ca"
)

_TLS: ForeignParameters = {
    "sslmode": _by_value(
        {
            **_all(_OFF, "disable", "disabled"),
            **_all(_PERHAPS, "allow", "prefer", "preferred"),
            **_all(_VERIFY, "require", "required", "verify-ca", "verify_ca"),
            **_all(_VERIFY, "verify-full", "verify_identity"),
            **_all(_UNVERIFIED, "no-verify"),
        }
    ),
    "sslaccept": _by_value({"strict": _VERIFY, "accept_invalid_certs": _UNVERIFIED}),
    **_all(
        _refused(_CONTEXT),
        *("sslcert", "sslkey", "sslpassword", "sslidentity", "sslcrl", "sslcrldir", "sslcapath", "sslcipher"),
    ),
}

_LOGIN: ForeignParameters = {part: _renamed(part) for part in ("host", "port", "user", "password")}

_POOLS: ForeignParameters = _all(
    _ignored,
    *("autocommit", "charset", "clientencoding", "connecttimeout", "connectionlimit", "connectionname"),
    *(
        "connhealthchecks",
        "connmaxage",
        "echo",
        "encoding",
        "maxconnections",
        "maxoverflow",
        "maxsize",
        "minsize",
    ),
    *("pool", "poolpreping", "poolrecycle", "poolsize", "pooltimeout", "preparedstatements", "programname"),
    *("reconnect", "sockettimeout", "statementcachesize", "timeout"),
)
"""Encodings, pools and time limits: the library has its own."""


# --- PostgreSQL

_HARMLESS = frozenset(
    {
        *("application_name", "bytea_output", "client_encoding", "client_min_messages", "datestyle"),
        *(
            "extra_float_digits",
            "idle_in_transaction_session_timeout",
            "intervalstyle",
            "jit",
            "lock_timeout",
        ),
        *("search_path", "statement_timeout", "timezone"),
    }
)
"""Settings of a session that change no statement of the library, which sets its own."""


def _options(name: str, value: str) -> Mapping[str, str]:
    """Ignore settings that change nothing, and the name of the branch, which TLS transmits; refuse all others."""
    words = value.replace("-c ", "-c").split()
    for word in words:
        setting, _, _ = word.removeprefix("-c").removeprefix("--").partition("=")
        if setting.lower().replace("-", "_") not in {*_HARMLESS, "endpoint"}:
            raise ConfigError(
                f"{name} in the address sets {shorten(setting)}, which is not obeyed here, and not ignored: leave it away, "
                "or set it for the role by ALTER ROLE"
            )
    return {}


def _socket_file(name: str, value: str) -> Mapping[str, str]:
    """Return the folder and the port of ``/folder/.s.PGSQL.5432``."""
    folder, mark, port = value.rpartition("/.s.PGSQL.")
    if not mark:
        raise ConfigError(f"{name} must end with /.s.PGSQL.5432 or another port")
    return {"unix_socket": folder, "port": port}


_other_schema = _refused(
    "clients with another address would use another table: write table=app.aiolock in all of them, or leave it away"
)
_AT_PRIMARY = _refused("locks are kept by the primary alone: write target_session_attrs=primary, or nothing")
_ELSEWHERE = _refused("nothing is read but the address: write host, user and password into it")

POSTGRESQL: ForeignParameters = {
    **_TLS,
    **_LOGIN,
    **_POOLS,
    "ssl": _by_value(
        {
            **_all(_VERIFY, "true", "1", "require", "verify-ca", "verify-full"),
            **_all(_OFF, "false", "0", "disable"),
            **_all(_PERHAPS, "allow", "prefer"),
            **_all(_UNVERIFIED, "no-verify"),
        }
    ),
    "sslrootcert": lambda name, value: _sets("tls", "verify", None if value == "system" else "tls_ca")(
        name, value
    ),
    "requiressl": _switch(_VERIFY),
    "sslrequire": _switch(_VERIFY),
    "sslminprotocolversion": _by_value(
        {"tlsv1": _ignored, "tlsv1.1": _ignored, "tlsv1.2": _ignored, "tlsv1.3": _refused(_CONTEXT)}
    ),
    # TLS that is verified says who answers as well.
    "channelbinding": _by_value({"disable": _ignored, "prefer": _ignored, "require": _VERIFY}),
    "gssencmode": _by_value(
        {
            "disable": _ignored,
            "prefer": _ignored,
            "require": _refused("connections are encrypted by TLS alone: write sslmode=require"),
        }
    ),
    "requireauth": _refused("TLS that is verified protects the password: write sslmode=require in its place"),
    "requirepeer": _refused("the owner of the server's process is not asked for: leave it away"),
    "targetsessionattrs": _by_value(
        {
            **_all(_ignored, "any", "primary", "read-write"),
            **_all(_AT_PRIMARY, "read-only", "standby", "prefer-standby"),
        }
    ),
    "hostaddr": _refused("write the number into host, or name the host alone"),
    "dbname": _renamed("database"),
    "database": _renamed("database"),
    "unixsock": _socket_file,
    "options": _options,
    "pgbouncer": _switch(
        _refused(
            "it says that a pooler stands in between that swaps sessions: use the address of the server itself, or of a pooler "
            "that pools sessions"
        )
    ),
    **_all(_ELSEWHERE, "service", "servicefile", "passfile"),
    "replication": _by_value(
        {
            **_all(_ignored, "false", "off", "no", "0"),
            **_all(
                _refused("a connection for replication takes no locks: leave it away"),
                *("true", "on", "yes", "1", "database"),
            ),
        }
    ),
    # Prisma's; by its exact name it is an option of the library as well, see `PRISMA`.
    "schema": lambda name, value: _ignored(name, value) if value == "public" else _other_schema(name, value),
    **_all(
        _ignored,
        *("applicationname", "fallbackapplicationname", "asyncfallback", "disableserversidecursors"),
        *("gssdelegation", "gsslib", "krbsrvname", "loadbalancehosts", "maxcachedstatementlifetime"),
        *("keepalives", "keepalivescount", "keepalivesidle", "keepalivesinterval", "tcpusertimeout"),
        *("maxcacheablestatementsize", "maxinactiveconnectionlifetime", "preparedstatementcachesize"),
        *("preparedstatementnamefunc", "sslcompression", "sslmaxprotocolversion", "sslnegotiation", "sslsni"),
        *("supa", "uselibpqcompat"),
    ),
}


# --- MySQL and MariaDB

_CA = _sets("tls", "verify", "tls_ca")

MYSQL: ForeignParameters = {
    **_TLS,
    **_LOGIN,
    **_POOLS,
    "ssl": _by_value(
        {
            **_all(_VERIFY, "true", "1", '{"rejectunauthorized":true}'),
            **_all(_OFF, "false", "0"),
            **_all(_UNVERIFIED, '{"rejectunauthorized":false}'),
        }
    ),
    "sslca": _CA,
    "sslrootcert": _CA,
    "ssldisabled": _switch(_OFF),
    "sslcheckhostname": _switch(_VERIFY, _UNVERIFIED),
    "sslverifycert": _switch(_VERIFY, _UNVERIFIED),
    "sslverifyidentity": _switch(_VERIFY, _UNVERIFIED),
    "db": _renamed("database"),
    "database": _renamed("database"),
    **_all(
        _ignored,
        *("applicationname", "binaryprefix", "characterset", "collation", "connectiontimeout", "localinfile"),
        *("readtimeout", "sqlmode", "useunicode", "writetimeout"),
    ),
}


# --- Redis and Valkey

REDIS: ForeignParameters = {
    "virtualhost": _renamed("db"),
    **_all(_switch(_refused("TLS is said by the scheme: write rediss://")), "ssl", "tls"),
    **_all(
        _ignored,
        *(
            "autocloseconnectionpool",
            "decoderesponses",
            "encoding",
            "encodingerrors",
            "family",
            "healthcheckinterval",
        ),
        *("libname", "libversion", "maxconnections", "protocol", "retryonerror", "retryontimeout"),
        *(
            "singleconnectionclient",
            "socketconnecttimeout",
            "socketkeepalive",
            "socketreadsize",
            "sockettimeout",
        ),
        "timeout",
    ),
}


REDISS: ForeignParameters = {
    **REDIS,
    **_all(
        _switch(_ignored, _refused("rediss:// is a connection with TLS: write redis:// for one without")),
        *("ssl", "tls"),
    ),
}


# --- MongoDB

_TRUE = _sets("tls", "true")
_AUTHORITY = _refused("members are verified: name the authority that signed their certificates in tls_ca")
_COMMANDS = "SCRAM-SHA-1", "SCRAM-SHA-256", "DEFAULT"

MONGODB: ForeignParameters = {
    "tls": _renamed("tls"),
    "ssl": _renamed("tls"),
    "tlscafile": _sets("tls", "true", "tls_ca"),
    "sslcacerts": _sets("tls", "true", "tls_ca"),
    "tlscertificatekeyfile": _sets("tls", "true", "tls_cert"),
    "sslcertfile": _sets("tls", "true", "tls_cert"),
    **_all(
        _switch(_AUTHORITY, _TRUE), "tlsallowinvalidcertificates", "tlsallowinvalidhostnames", "tlsinsecure"
    ),
    **_all(
        _refused("name a file without a password, and no list of revocations"),
        *("tlscertificatekeyfilepassword", "tlscrlfile"),
    ),
    "tlsdisableocspendpointcheck": _ignored,
    "replicaset": _renamed("replicaSet"),
    "authsource": _renamed("authSource"),
    "directconnection": _renamed("directConnection"),
    "loadbalanced": _switch(_refused("locks need the members themselves: name them, with replicaSet")),
    "authmechanism": _by_value(
        {
            **_all(_ignored, *(name.lower() for name in _COMMANDS)),
            **_all(
                _refused("log in by user and password: SCRAM is agreed on with the server"),
                *("mongodb-x509", "mongodb-aws", "mongodb-oidc", "gssapi", "plain", "mongodb-cr"),
            ),
        }
    ),
    # What an address for applications says about their own reads, writes and connections.
    **_all(
        _ignored,
        *(
            "appname",
            "compressors",
            "connecttimeoutms",
            "heartbeatfrequencyms",
            "journal",
            "localthresholdms",
        ),
        *("maxconnecting", "maxidletimems", "maxpoolsize", "maxstalenessseconds", "minpoolsize"),
        *("readconcernlevel", "readpreference", "readpreferencetags", "retryreads", "retrywrites"),
        *(
            "servermonitoringmode",
            "serverselectiontimeoutms",
            "sockettimeoutms",
            "timeoutms",
            "unicodedecodeerrorhandler",
        ),
        *("uuidrepresentation", "w", "waitqueuetimeoutms", "wtimeout", "wtimeoutms", "zlibcompressionlevel"),
    ),
}


# --- SQLite

SQLITE: ForeignParameters = _all(_ignored, "checksamethread", "timeout")


# --- ZooKeeper

ZOOKEEPER: ForeignParameters = {
    "recipe": _refused(
        "each lock has a queue of sequential nodes, so leave the parameter out; one plain ephemeral node, recipe=simple, wakes all "
        "waiters at every release, and is no option any more"
    )
}
