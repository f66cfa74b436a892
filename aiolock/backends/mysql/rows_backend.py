"""The MySQL backend over rows: not for users before it has passed what the other one does."""

from __future__ import annotations

from typing import Any

from aiolock.backends.experimental import warn_experimental
from aiolock.backends.mysql.store import MySQLStore
from aiolock.backends.mysql.url import parameters
from aiolock.backends.rows.backend import RowBackend
from aiolock.errors import ConfigError, forgets_arguments

__all__ = ["MySQLRowsBackend"]


class MySQLRowsBackend(RowBackend):
    """One MySQL or MariaDB server, or a node of Galera; the options are those of :class:`MySQLBackend` without its modes."""

    name = "MySQL"
    store: MySQLStore

    @forgets_arguments
    def __init__(
        self,
        url: str,
        *,
        schema: str | None = None,
        table: str | None = None,
        tls: Any = None,
        tls_ca: Any = None,
        unix_socket: str | None = None,
    ) -> None:
        options = {
            "schema": schema,
            "table": table,
            "tls": tls,
            "tls_ca": tls_ca,
            "unix_socket": unix_socket,
        }
        self._address, given = parameters("mysql" + url[url.index(":") :], options)
        if other := {"mode", "connections"} & given.keys():
            raise ConfigError(f"there is no option {', '.join(sorted(other))} here")
        self.address = self._address.text
        self._create = given.get("schema", "auto") == "auto"
        self._table = given.get("table", "aiolock")

    def make_store(self) -> MySQLStore:
        """Return the store of this opening."""
        return MySQLStore(self._address, self._table, create=self._create, promises=self._promise)

    def _promise(self, capabilities: frozenset[str]) -> None:
        self.capabilities = capabilities

    async def open(self) -> None:
        """Open the store."""
        await super().open()
        if self.store.product:
            warn_experimental(
                f"locks on {self.store.product} are experimental: they were never run on it, and do not promise exclusion"
            )
