"""Several independent servers as one: a claim that a majority of them granted is held (Redlock)."""

from aiolock.backends.quorum.backend import QuorumBackend

__all__ = ["QuorumBackend"]
