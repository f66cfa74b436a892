"""Several independent servers as one: a lock is held by whoever has it on most of them (Redlock)."""

from aiolock.backends.quorum.backend import QuorumBackend

__all__ = ["QuorumBackend"]
