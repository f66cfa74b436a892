"""The version of the data format: each namespace has one, and a client of another version refuses to work there.

It is in a key of its own whose name never changes. Every connection asks for it before its first command, because the
server may be another one, or have lost its data.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ResponseError

from aiolock.backends.redis.commands import Script
from aiolock.backends.redis.scripts import source
from aiolock.errors import UnsafeBackend, shorten

__all__ = ["FORMAT", "SCRIPT", "Format", "Verify"]

FORMAT = 2
"""The version of keys, fields, scripts and channels. The first, without a version of its own, was never released."""

SCRIPT = Script(source("format"))

Verify = Callable[[AbstractConnection], Awaitable[None]]
"""Look at a server before a connection to it is used; raises :class:`UnsafeBackend`."""


class Format:
    """What a client expects of its namespace."""

    __slots__ = ("_namespace", "key", "verified")

    def __init__(
        self, namespace: str, verified: Callable[[UnsafeBackend | None], object] | None = None
    ) -> None:
        self._namespace = namespace
        self.verified = verified
        """Called with the outcome whenever a server has told its version."""
        self.key: str = f"{namespace}:format"

    @property
    def words(self) -> tuple[str, str]:
        """The key and the argument of :data:`SCRIPT`."""
        return self.key, str(FORMAT)

    def refusal(self, version: object) -> UnsafeBackend | None:
        """Return why a namespace with data of ``version`` cannot be used, if it cannot."""
        text = version.decode("utf-8", "replace") if isinstance(version, bytes) else str(version)
        if text == str(FORMAT):
            return None
        if not text.isdigit():
            text = shorten(text)
        return UnsafeBackend(
            f"the data of namespace {shorten(self._namespace)} have format {text}, and this version of aiolock "
            f"writes format {FORMAT}: use one version everywhere, or another namespace=; when no client of the other "
            f"version is left, delete the keys {self._namespace}:*"
        )

    def check(self, version: object) -> None:
        """Raise :class:`UnsafeBackend` if ``version`` is another one."""
        error = self.refusal(version)
        if self.verified is not None:
            self.verified(error)
        if error is not None:
            raise error

    async def verify(self, driver: AbstractConnection) -> None:
        """Ask on a connection that was just made; raises :class:`UnsafeBackend`.

        A server that refuses the question (a replica, a missing right, another node's slot) refuses every lock as well.
        """
        await driver.send_command("EVAL", SCRIPT.source, 1, *self.words)
        try:
            version: Any = await driver.read_response()
        except ResponseError:
            return
        self.check(version)
