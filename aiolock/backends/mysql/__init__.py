"""Locks on a MySQL or MariaDB server, in three modes."""

from __future__ import annotations

from aiolock.backends.mysql.backend import MySQLBackend

__all__ = ["MySQLBackend"]
