"""Locks in an etcd cluster."""

from __future__ import annotations

from aiolock.backends.etcd.backend import EtcdBackend

__all__ = ["EtcdBackend"]
