"""The SQLite backend: locks in a file, for the processes of one machine."""

from __future__ import annotations

from aiolock.backends.rows.backend import RowBackend
from aiolock.backends.sqlite.store import SqliteStore
from aiolock.backends.sqlite.url import path_of

__all__ = ["SqliteBackend"]


class SqliteBackend(RowBackend):
    """The locks in one file of a local disk.

    :param url: ``sqlite:///path`` with the absolute path of the file, which is created if it is missing; it has no options.
    """

    name = "SQLite"

    def __init__(self, url: str) -> None:
        self._path = path_of(url)
        self.address = f"sqlite://{self._path}"

    def make_store(self) -> SqliteStore:
        """Return a store in the file."""
        return SqliteStore(self._path)
