"""ZooKeeper ensembles and single servers, on aiozk."""

from __future__ import annotations

from aiolock.backends.zookeeper.backend import ZooKeeperBackend

__all__ = ["ZooKeeperBackend"]
