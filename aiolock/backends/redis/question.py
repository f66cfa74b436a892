"""One command to one server, on a connection for it alone: who is asked where the others are need not be one that is used."""

from __future__ import annotations

import asyncio
from typing import Any

from hiredis import ProtocolError, Reader, ReplyError

from aiolock.backends.redis.commands import encode
from aiolock.backends.redis.endpoint import Endpoint
from aiolock.backends.redis.replies import from_reply
from aiolock.errors import BackendError, BackendUnavailable

__all__ = ["asked"]

_NOTHING = object()


class _Question(asyncio.Protocol):
    """One command and its answer."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._reader = Reader(notEnoughData=_NOTHING)

    def data_received(self, data: bytes) -> None:
        """Take in what came."""
        try:
            self._reader.feed(data)
            reply = self._reader.gets()
        except ProtocolError as error:
            reply = error
        if reply is _NOTHING or self.answer.done():
            return
        if isinstance(reply, ReplyError):
            refused = from_reply(str(reply))
            refused.__cause__ = reply
            self.answer.set_exception(refused)
        elif isinstance(reply, Exception):
            self.answer.set_exception(reply)
        else:
            self.answer.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        """No answer comes any more."""
        if not self.answer.done():
            self.answer.set_exception(exc or ConnectionResetError("the connection broke"))


async def asked(server: Endpoint, timeout: float, *words: str) -> Any:
    """The answer to one command, within ``timeout`` seconds; raises :class:`BackendError`.

    Cancelling it leaves no socket behind.
    """
    end = asyncio.get_running_loop().time() + timeout
    question = _Question()
    try:
        transport = await server.connect(timeout, question)
        try:
            async with asyncio.timeout_at(end):
                transport.write(encode(*words))
                return await question.answer
        finally:
            transport.abort()
    except BackendError:
        raise
    except TimeoutError as error:
        raise BackendUnavailable(f"{server} did not answer within {timeout:g} s") from error
    except Exception as error:
        raise BackendUnavailable(f"{server} did not answer: {str(error) or type(error).__name__}") from error
