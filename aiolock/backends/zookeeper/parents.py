"""The nodes on the way to a lock's own: made when they are missing, as containers, which the server removes unused."""

from __future__ import annotations

from aiozk import exc

from aiolock.backends.zookeeper import wire
from aiolock.backends.zookeeper.paths import parents
from aiolock.backends.zookeeper.session import Session

__all__ = ["Parents"]


class Parents:
    """Those of one client, which anybody with these rights may use. Raises what aiozk raises."""

    def __init__(self, session: Session, acl: bytes) -> None:
        self._session = session
        self._acl = acl

    async def make(self, path: str, data: bytes = b"") -> None:
        """Make whatever is missing on the way to ``path``, and itself with this data."""
        try:
            await self._session.ask(wire.container(path, self._acl, data))
        except exc.NodeExists:
            return
        except exc.NoNode:
            await self._make_all(parents(path), data)

    async def _make_all(self, path: list[str], data: bytes) -> None:
        steps = [wire.container(step, self._acl) for step in path[:-1]]
        answers = await self._session.ask_all(*steps, wire.container(path[-1], self._acl, data))
        # Where we may not create, an administrator has: only the last answer counts, and the first refusal says why.
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        if isinstance(answers[-1], exc.NodeExists) or not isinstance(answers[-1], BaseException):
            return
        raise next(error for error in errors if not isinstance(error, exc.NodeExists))
