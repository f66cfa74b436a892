"""Locks on a Redis or Valkey server; docs/internals/redis.md is the protocol."""

from __future__ import annotations

from aiolock.backends.redis.backend import RedisBackend

__all__ = ["RedisBackend"]
