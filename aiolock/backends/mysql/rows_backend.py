"""The MySQL backend over rows: not for users before it has passed what the other one does."""

from __future__ import annotations

from typing import Any

from aiolock.backends.callers import Callers
from aiolock.backends.experimental import warn_experimental
from aiolock.backends.mysql.confirmation import confirm
from aiolock.backends.mysql.diagnosis import diagnose
from aiolock.backends.mysql.rows_schema import RowStatements
from aiolock.backends.mysql.store import MySQLStore
from aiolock.backends.mysql.url import parameters
from aiolock.backends.rows.backend import RowBackend
from aiolock.backends.rows.claim import RowClaim
from aiolock.core.capabilities import Confirmation
from aiolock.errors import ConfigError, forgets_arguments
from aiolock.types import Finding

__all__ = ["MySQLRowsBackend"]


class MySQLRowsBackend(RowBackend, Confirmation[RowClaim]):
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
        self._callers = Callers()

    def make_store(self) -> MySQLStore:
        """Return the store of this opening."""
        return MySQLStore(self._address, self._table, create=self._create, promises=self._promise)

    def _promise(self, capabilities: frozenset[str]) -> None:
        self.capabilities = capabilities

    async def examine(self) -> list[Finding]:
        """Diagnose the server over a new connection."""
        return await diagnose(
            self._address, RowStatements(self._table, self._address.database), self.settings, "rows"
        )

    async def open(self) -> None:
        """Open the store."""
        self._callers.closed = False
        await super().open()
        if self.store.product:
            warn_experimental(
                f"locks on {self.store.product} are experimental: they were never run on it, and do not promise exclusion"
            )

    async def aclose(self) -> None:
        """Give callers their connections back, and end sessions, tasks and the store."""
        if hasattr(self, "settings"):
            await self._callers.aclose(self.settings.command_timeout)
        await super().aclose()

    async def confirm(self, claim: RowClaim, connection: object) -> bool:
        """Lock the row of a hold in the caller's own transaction, and return whether it is there."""
        timeout = self.settings.command_timeout
        return await confirm(self.store, self._callers, claim, connection, self.address, timeout, self.renew)
