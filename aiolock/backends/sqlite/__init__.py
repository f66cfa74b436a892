"""Locks in a file, for the processes of one machine."""

from __future__ import annotations

from aiolock.backends.sqlite.backend import SqliteBackend

__all__ = ["SqliteBackend"]
