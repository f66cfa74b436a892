"""Locks in a table of a PostgreSQL server."""

from __future__ import annotations

from aiolock.backends.postgresql.backend import PostgreSQLBackend

__all__ = ["PostgreSQLBackend"]
