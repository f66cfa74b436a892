"""The SQLite backend: locks in a file, for the processes of one machine."""

from __future__ import annotations

from pathlib import Path

from aiolock.backends.rows.backend import RowBackend
from aiolock.backends.rows.claim import RowClaim
from aiolock.backends.sqlite.confirmation import confirm
from aiolock.backends.sqlite.store import SqliteStore
from aiolock.backends.sqlite.url import path_of
from aiolock.core.capabilities import Confirmation
from aiolock.errors import BackendError, forgets_arguments

__all__ = ["SqliteBackend"]


class SqliteBackend(RowBackend, Confirmation[RowClaim]):
    """The locks in one file of a local disk.

    :param url: ``sqlite:///path`` with the absolute path of the file, which is created if it is missing; it has no options.
    """

    name = "SQLite"

    @forgets_arguments
    def __init__(self, url: str) -> None:
        self._path = path_of(url)
        self.address = f"sqlite://{self._path}"

    def make_store(self) -> SqliteStore:
        """Return a store in the file."""
        return SqliteStore(self._path)

    async def confirm(self, claim: RowClaim, connection: object) -> bool:
        """Search for a hold in the caller's own transaction, which is one that writes from then on."""
        return await confirm(
            Path(self._path), claim, connection, self.settings.command_timeout, self._shows_session
        )

    async def _shows_session(self, claim: RowClaim) -> bool:
        """Read the file, which shows whether another one has taken its place; return whether the claim's session lives."""
        member = claim.member
        try:
            await self.store.versions([claim.key])
        except BackendError:
            if member is None or not member.session.dead:
                raise
        return member is not None and not member.session.dead
