"""A Galera cluster of two MariaDB nodes that both take writes, on this machine, for the tests that are about several nodes.

    with Galera() as cluster:
        print(cluster.urls)       # one for each node

No state is copied between the nodes: the second begins with a copy of the first's data, and gets the little that it
lacks from the first's cache. So node 0 stays up, and node 1 may be killed and come back.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Self

import pymysql

from tests.processes import READY_WITHIN, Child, Server, ServerFailed, ask, missing, program
from tests.servers import MariaDB

__all__ = ["PROVIDER", "Galera"]

PROVIDER = Path("/usr/lib/galera/libgalera_smm.so")

TRANSFER = """#!/bin/sh
# What the nodes call to copy all data from one to the other: here they have it, and say so.
said="$(dirname "$0")/said"
while [ $# -gt 0 ]; do
    case "$1" in
        --role) role=$2 ;;
        --gtid) gtid=$2 ;;
    esac
    shift
done
if [ "$role" = donor ]; then
    echo "$gtid" >"$said.new" && mv "$said.new" "$said"
    echo "done $gtid"
else
    echo "ready 127.0.0.1"
    while [ ! -e "$said" ]; do sleep 0.05; done
    cat "$said"
fi
"""


class Galera(Server):
    """Two nodes, each with an empty database `test` and a root without password."""

    def __init__(self) -> None:
        binary = program("mariadbd", package="mariadb-server-core", server="mariadb")
        if not PROVIDER.exists():
            raise missing(str(PROVIDER), "galera-4", "mariadb")
        super().__init__("galera")
        self.ports = [self._reserve() for _ in range(2)]
        groups = [self._reserve() for _ in range(2)]
        transfers = [self._reserve() for _ in range(2)]
        script = self.folder / "bin" / "wsrep_sst_same"
        script.parent.mkdir()
        script.write_text(TRANSFER)
        script.chmod(0o755)
        path = f"PATH={script.parent}:{os.environ.get('PATH', os.defpath)}"
        for number in range(2):
            (self.folder / f"tmp{number}").mkdir()
            options = (
                f"base_host=127.0.0.1;base_port={groups[number]};gmcast.listen_addr=tcp://127.0.0.1:{groups[number]};"
                f"ist.recv_addr=127.0.0.1:{transfers[number]};gcache.size=8M"
            )
            argv = ["env", path, binary, "--no-defaults", MariaDB.user(), f"--datadir={self._data(number)}"]
            argv += [f"--tmpdir={self.folder / f'tmp{number}'}", f"--socket={self.sockets[number]}"]
            argv += [f"--port={self.ports[number]}", "--bind-address=127.0.0.1", "--max-connections=300"]
            argv += ["--innodb-buffer-pool-size=16M", "--innodb-flush-log-at-trx-commit=0"]
            argv += ["--binlog-format=ROW", "--wsrep-on=ON", f"--wsrep-provider={PROVIDER}"]
            argv += [
                "--wsrep-sst-method=same",
                "--wsrep-cluster-name=aiolock",
                f"--wsrep-node-name=node{number}",
            ]
            argv += [f"--wsrep-provider-options={options}"]
            if number:
                argv += [f"--wsrep-cluster-address=gcomm://127.0.0.1:{groups[0]}"]
            else:
                argv += ["--wsrep-new-cluster", "--wsrep-cluster-address=gcomm://"]
            self.children.append(Child(argv, self.folder / f"node{number}.log"))

    @property
    def urls(self) -> list[str]:
        """Where the nodes are."""
        return [f"mysql://root@127.0.0.1:{port}/test" for port in self.ports]

    @property
    def sockets(self) -> list[str]:
        """The same for administrators on this machine."""
        return [str(self.folder / f"node{number}.sock") for number in range(2)]

    def _data(self, number: int) -> Path:
        return self.folder / f"data{number}"

    def start(self, index: int | None = None) -> Self:
        if not self._data(0).exists():
            self._make()
        for number, _ in self._chosen(index):
            super().start(number)
        deadline = time.monotonic() + READY_WITHIN
        while any(self.ask(number, "wsrep_cluster_size") != "2" for number in range(2)):
            if time.monotonic() > deadline:
                raise ServerFailed(f"the nodes did not find each other; the log ends:\n{self.log_tail(1)}")
            time.sleep(0.02)
        return self

    def _make(self) -> None:
        """The data of both: those of a cluster of one node that has ended in order."""
        install = program("mariadb-install-db", package="mariadb-server-core", server="mariadb")
        argv = [install, "--no-defaults", MariaDB.user(), f"--datadir={self._data(0)}", "--skip-test-db"]
        argv += ["--auth-root-authentication-method=normal", f"--tmpdir={self.folder / 'tmp0'}"]
        subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=True)
        super().start(0)
        with pymysql.connect(unix_socket=self.sockets[0], user="root") as admin, admin.cursor() as cursor:
            cursor.execute("CREATE DATABASE test")
        self.stop(0)
        shutil.copytree(
            self._data(0), self._data(1), ignore=shutil.ignore_patterns("galera.cache", "gvwstate.dat")
        )
        state = self._data(1) / "grastate.dat"
        state.write_text(re.sub(r"(safe_to_bootstrap:) 1", r"\1 0", state.read_text()))

    def ask(self, number: int, name: str) -> str | None:
        """What a node says about itself."""
        try:
            # The driver leaves its socket open when it cannot connect.
            ask(self.sockets[number], enough=5)
            with (
                pymysql.connect(unix_socket=self.sockets[number], user="root") as admin,
                admin.cursor() as cursor,
            ):
                cursor.execute("SHOW STATUS LIKE %s", (name,))
                return next((str(value) for _, value in cursor.fetchall()), None)
        except (pymysql.err.Error, OSError):
            return None

    def _answers(self, index: int) -> bool:
        return (
            self.ask(index, "wsrep_local_state_comment") == "Synced"
            and self.ask(index, "wsrep_ready") == "ON"
        )
