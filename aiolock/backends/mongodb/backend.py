"""The MongoDB backend: the engine over rows, on a collection of a replica set."""

from __future__ import annotations

from typing import Any

from aiolock.backends.experimental import UNTRIED, warn_experimental
from aiolock.backends.mongodb.diagnosis import diagnose
from aiolock.backends.mongodb.store import MongoDBStore
from aiolock.backends.mongodb.url import parameters
from aiolock.backends.rows.backend import RowBackend
from aiolock.errors import UnsafeBackend, forgets_arguments
from aiolock.types import Finding

__all__ = ["MongoDBBackend"]


class MongoDBBackend(RowBackend):
    """One MongoDB (4.4 or later) replica set. Experimental: it warns with :class:`aiolock.errors.ExperimentalWarning`.

    :param url: ``mongodb://user:password@h1:27017,h2:27017,h3:27017/database?replicaSet=rs0``: some or all members. The query
        may also have ``authSource``, ``directConnection`` and the other options.
    :param collection: the name of the collection; ``aiolock``.
    :param tls: ``True`` verifies the members by the authorities of the system or of ``tls_ca``.
    :param tls_ca: a file with the authorities that certificates are verified with.
    :param tls_cert: a file with the certificate of the client and its key.
    """

    name = "MongoDB"

    store: MongoDBStore

    @forgets_arguments
    def __init__(
        self,
        url: str,
        *,
        collection: str | None = None,
        tls: bool | None = None,
        tls_ca: Any = None,
        tls_cert: Any = None,
    ) -> None:
        self._members = parameters(
            url, {"collection": collection, "tls": tls, "tls_ca": tls_ca, "tls_cert": tls_cert}
        )
        self.address = self._members.text
        warn_experimental(
            "locks on MongoDB are experimental: they were tested with a stand-in, and never with a MongoDB"
        )

    def make_store(self) -> MongoDBStore:
        """Return the store of this opening."""
        return MongoDBStore(self._members)

    async def open(self) -> None:
        """Open the store, unless more is required than is promised."""
        if missing := self.settings.require & UNTRIED:
            raise UnsafeBackend(
                f"{self.name} does not promise {', '.join(sorted(missing))} while it is experimental: it was tested with a "
                "stand-in, and never with a MongoDB"
            )
        await super().open()

    async def examine(self) -> list[Finding]:
        """Diagnose the replica set over new connections."""
        return await diagnose(self._members, self.settings)
