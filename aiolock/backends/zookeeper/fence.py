"""A write to data in the same ensemble, in one transaction with the question whether the hold is still there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiozk import exc

from aiolock.backends.zookeeper import wire
from aiolock.backends.zookeeper.address import acceptable
from aiolock.backends.zookeeper.outcomes import SessionChanged
from aiolock.errors import BackendRefused, BackendUnavailable, ConfigError, LockLost, shorten

if TYPE_CHECKING:
    from aiolock.backends.zookeeper.backend import ZooKeeperBackend
    from aiolock.backends.zookeeper.claim import QueueClaim

__all__ = ["fenced_set"]


async def fenced_set(
    backend: ZooKeeperBackend, claim: QueueClaim, path: str, data: bytes, version: int | None
) -> int | None:
    """The new version, or ``None`` if it was not the one that was named; sent once."""
    name = claim.bid.name
    if not acceptable(path):
        raise ConfigError(f"path must be one that ZooKeeper accepts, as /app/config, not {shorten(path)}")
    if not claim.held:
        raise LockLost(name, "revoked")
    if not claim.settled:
        raise BackendUnavailable(
            f"it is not known whether {shorten(name)} was downgraded: do that again first"
        )
    put = wire.put(backend.path(path), data, -1 if version is None else version)
    async with backend.bounded():
        await backend.session.ready()
        try:
            reply = await backend.session.ask(wire.together(wire.check(claim.own), put), claim.owner)
        except SessionChanged as error:
            raise LockLost(name, "session") from error
        ours, theirs = reply.responses
        if isinstance(ours, exc.NoNode):
            raise LockLost(name, "force-released") from ours
        if isinstance(theirs, exc.BadVersion):
            return None
        if isinstance(theirs, exc.NoNode):
            raise BackendRefused(f"there is no node {shorten(path)} to write to: create it first") from theirs
        if (failure := wire.failure(reply)) is not None:
            raise failure
        written: int = theirs.stat.version
        return written
