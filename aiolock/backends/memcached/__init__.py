"""Locks on memcached: fast and easy to lose, so for efficiency only."""

from __future__ import annotations

from aiolock.backends.memcached.backend import MemcachedBackend

__all__ = ["MemcachedBackend"]
