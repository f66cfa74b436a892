"""Locks in a MongoDB replica set; experimental."""

from __future__ import annotations

from aiolock.backends.mongodb.backend import MongoDBBackend

__all__ = ["MongoDBBackend"]
