"""What the user of a web application is told when a lock could not be had, or was lost: status, sentence, headers.

The sentences name no lock: its name may contain what is nobody else's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from aiolock.client import Client, connect
from aiolock.errors import (
    AcquireTimeout,
    BackendUnavailable,
    ConfigError,
    InvalidName,
    LockLost,
    shorten,
)
from aiolock.templates import Template

__all__ = ["ANSWERED", "RETRY_AFTER", "TIMEOUT", "Answer", "Source", "answer", "lacking", "opener"]

TIMEOUT = 5.0
"""Seconds that a request waits for a lock if nothing else is said; a browser's user waits no longer either."""
RETRY_AFTER = 1.0
"""Seconds after which somebody who was refused may try again if nothing else is said."""

ANSWERED: tuple[type[Exception], ...] = (AcquireTimeout, LockLost, BackendUnavailable, InvalidName)
"""The errors that are no defect of the application, and have an answer."""

Source = str | Client | Callable[[], Client]
"""Where an application gets its client: a URL, a client that is not open, or a function that makes one."""


class Answer(NamedTuple):
    """A response to be."""

    status: int
    text: str
    headers: dict[str, str]


def answer(error: BaseException, retry_after: float = RETRY_AFTER) -> Answer | None:
    """What to say about ``error``; ``None`` if it is a defect or a matter for administrators."""
    # The header has whole seconds; 0 would invite a stampede.
    again = {"Retry-After": str(max(1, math.ceil(retry_after)))}
    if isinstance(error, AcquireTimeout):
        return Answer(409, "Somebody else is working on this at the moment; try again later.", again)
    if isinstance(error, LockLost):
        return Answer(503, "The work was interrupted and may be incomplete; try again later.", again)
    if isinstance(error, BackendUnavailable):
        return Answer(503, "The service is not available at the moment; try again later.", again)
    if isinstance(error, InvalidName):
        return Answer(422, "There can be nothing with this name.", {})
    return None


def lacking(template: Template, values: Mapping[str, object]) -> Answer | None:
    """What is said to whoever left out a value that the name of a lock is made of; ``None`` if all are there."""
    left_out = [field for field in template.fields if field not in values]
    return Answer(422, f"The address lacks {', '.join(left_out)}.", {}) if left_out else None


def opener(source: object, options: dict[str, Any]) -> Callable[[], Client]:
    """A function that makes the client of an application each time that it starts.

    Raises :class:`ConfigError` for what is no :data:`Source`, and for options beside a ready client. A URL is looked
    at once here, so that what is wrong with it is said when the application is built.
    """
    if isinstance(source, str):
        url = source
        connect(url, **options)
        return lambda: connect(url, **options)
    if options:
        raise ConfigError(f"{', '.join(sorted(options))}: options go with a URL; a client has its own")
    if isinstance(source, Client):
        client = source
        return lambda: client
    if not callable(source):
        raise ConfigError(
            f"an application needs a URL, a client or a function that makes one, not {shorten(source)}"
        )
    make = source

    def made() -> Client:
        client = make()
        if not isinstance(client, Client):
            raise ConfigError(f"the function that makes the client returned {shorten(client)}")
        return client

    return made
