"""Locks on a Redis Cluster."""

from __future__ import annotations

from aiolock.backends.redis.cluster.backend import ClusterBackend

__all__ = ["ClusterBackend"]
