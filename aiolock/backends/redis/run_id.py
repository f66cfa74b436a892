"""The run id of the server that a connection leads to: the address may come to mean another server."""

from __future__ import annotations

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as DriverConnectionError
from redis.exceptions import ResponseError

from aiolock.errors import BackendRefused

__all__ = ["RunId", "agree"]


class RunId:
    """The run id of the server that one connection leads to; ``None`` where the account may not use ``INFO``."""

    question = "INFO", "server"

    def __init__(self) -> None:
        self.value: str | None = None
        self._closed = 0
        """Times in a row that the connection was closed when ``INFO`` was asked for."""

    def note(self, answer: object) -> None:
        """Take the answer to the question; a refusal, or what has no run id, leaves it unknown."""
        self._closed = 0
        self.value = run_id(answer.decode("utf-8", "replace")) if isinstance(answer, bytes) else None

    async def read(self, driver: AbstractConnection) -> None:
        """Read the answer on a new connection, which answered a PING before.

        Raises :class:`BackendRefused` the second time that the connection is closed instead, as a proxy does with every command
        that it does not know; once, it may be a restart. If it is cancelled, the caller has to close the connection.
        """
        self.value = None
        try:
            self.note(await driver.read_response())
        except ResponseError as error:
            self.note(error)
        except DriverConnectionError as error:
            # Not a subclass, which is an answer.
            self._closed += type(error) is DriverConnectionError
            if self._closed < 2:
                raise
            raise BackendRefused(
                "it closes the connection when it is asked for INFO, as proxies such as twemproxy do, which have neither "
                "scripts nor pub/sub: give the address of the server itself"
            ) from error


def run_id(info: str) -> str | None:
    """Return the run id in the answer to ``INFO server``, if there is one."""
    lines = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    return lines.get("run_id", "").strip() or None


def agree(one: str | None, other: str | None) -> bool | None:
    """Return whether two run ids are of the same server; ``None`` if one is not known."""
    return one == other if one and other else None
