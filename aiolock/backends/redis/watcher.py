"""One Sentinel: what it is asked, on a connection for one command, and what its answers mean."""

from __future__ import annotations

import asyncio
from typing import Any

from hiredis import ProtocolError, Reader, ReplyError

from aiolock.backends.redis.commands import encode
from aiolock.backends.redis.endpoint import Endpoint
from aiolock.backends.redis.replies import from_reply
from aiolock.errors import BackendError, BackendRefused, BackendUnavailable, shorten

__all__ = ["CHANNEL", "RIGHTS", "Place", "hears", "named"]

CHANNEL = "+switch-master"
"""Where they say that another server has become the primary."""
RIGHTS = f"+ping +sentinel|get-master-addr-by-name +subscribe &{CHANNEL}"
"""What an account needs at a Sentinel."""

Place = tuple[str, int]
"""A host and a port."""

_LOGIN = "Sentinels have passwords of their own, sentinel_password= and perhaps sentinel_username="
_NO_SENTINEL = "is no Sentinel: the address names those, which tell where the servers are"

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


async def named(sentinel: Endpoint, service: str, timeout: float) -> Place:
    """Where one Sentinel says that the primary is, within ``timeout`` seconds; raises :class:`BackendError`.

    Cancelling it leaves no socket behind.
    """
    reply = await _asked(sentinel, timeout, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", service)
    if reply is None:
        raise BackendRefused(f"{sentinel} watches no service that is called {shorten(service)}")
    try:
        host, port = (part.decode() for part in reply)
        return host, int(port)
    except (AttributeError, TypeError, ValueError) as error:
        raise BackendRefused(f"{sentinel} {_NO_SENTINEL}") from error


async def hears(sentinel: Endpoint, timeout: float) -> bool:
    """Whether one Sentinel would tell us that another server has become the primary; raises :class:`BackendUnavailable`."""
    try:
        await _asked(sentinel, timeout, "SUBSCRIBE", CHANNEL)
    except BackendRefused:
        return False
    return True


async def _asked(sentinel: Endpoint, timeout: float, *words: str) -> Any:
    """The answer to one command, within ``timeout`` seconds; raises :class:`BackendError`."""
    end = asyncio.get_running_loop().time() + timeout
    question = _Question()
    try:
        transport = await sentinel.connect(timeout, question)
        try:
            async with asyncio.timeout_at(end):
                transport.write(encode(*words))
                return await question.answer
        finally:
            transport.abort()
    except BackendError as error:
        raise _of_sentinels(error, sentinel) from error.__cause__
    except TimeoutError as error:
        raise BackendUnavailable(f"{sentinel} did not answer within {timeout:g} s") from error
    except Exception as error:
        raise BackendUnavailable(
            f"{sentinel} did not answer: {str(error) or type(error).__name__}"
        ) from error


def _of_sentinels(error: BackendError, sentinel: Endpoint) -> BackendError:
    """What is said of any server, as it is right for a Sentinel."""
    text = str(error)
    if "unknown command" in text:
        text = f"{sentinel} {_NO_SENTINEL}"
    elif "NOAUTH: " in text:
        text = f"{sentinel}: NOAUTH: it asks for a password: {_LOGIN}"
    elif "WRONGPASS: " in text:
        text = f"{sentinel}: WRONGPASS: it knows no enabled user with this name and password: {_LOGIN}"
    elif "NOPERM: " in text:
        text = f"{sentinel}: NOPERM: this account may not ask it: grant it {RIGHTS}"
    return type(error)(text, retryable=error.retryable)
