"""One Sentinel: what it is asked, on a connection for one command, and what its answers mean."""

from __future__ import annotations

from typing import Any

from aiolock.backends.redis.endpoint import Endpoint
from aiolock.backends.redis.question import asked
from aiolock.errors import BackendError, BackendRefused, shorten

__all__ = ["CHANNEL", "RIGHTS", "Place", "hears", "named"]

CHANNEL = "+switch-master"
"""Where they say that another server has become the primary."""
RIGHTS = f"+ping +sentinel|get-master-addr-by-name +subscribe &{CHANNEL}"
"""What an account needs at a Sentinel."""

Place = tuple[str, int]
"""A host and a port."""

_LOGIN = "Sentinels have passwords of their own, sentinel_password= and perhaps sentinel_username="
_NO_SENTINEL = "is no Sentinel: the address names those, which tell where the servers are"


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
    try:
        return await asked(sentinel, timeout, *words)
    except BackendError as error:
        raise _of_sentinels(error, sentinel) from error.__cause__


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
