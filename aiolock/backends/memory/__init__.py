"""A server inside this process: for tests, examples and programs of one process."""

from __future__ import annotations

from aiolock.backends.memory.backend import MemoryBackend, MemoryServer

__all__ = ["MemoryBackend", "MemoryServer"]
