"""Whether two addresses lead to one server, which would then have two votes."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from aiolock.contract import MUTEX, Backend, Bid, Claim, Family
from aiolock.errors import ConfigError

__all__ = ["check_twins"]

SOON = 0.1
"""Seconds that giving back may take, before it goes on in the background."""


async def check_twins(
    backends: Sequence[Backend],
    *,
    ttl: float,
    limit: float,
    later: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
) -> None:
    """Raise :class:`ConfigError` if two of these open backends know the same locks.

    A lock of a random name is asked for at all of them at once: a server that says no has given it to another one of
    us. It is given back at once by ``later``, or ends by its ttl. Several databases of one server are several servers
    here. Whether somebody is silent for ``limit`` seconds is not its business.
    """
    name = f"aiolock-quorum-{secrets.token_hex(16)}"
    claims = [
        backend.claim(Bid(name, MUTEX, ttl, label=str(number), fair=True))
        for number, backend in enumerate(backends)
    ]
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit):
                await _look(name, backends, claims)
    finally:
        leaving = [later(_give_back(claim)) for claim in claims]
        await asyncio.wait(leaving, timeout=SOON)


async def _look(name: str, backends: Sequence[Backend], claims: Sequence[Claim]) -> None:
    questions = [claim.attempt(wait=False) for claim in claims]
    answers = await asyncio.gather(*questions, return_exceptions=True)
    for number, answer in enumerate(answers):
        if answer is None:
            info = await backends[number].inspect(name, Family.LOCK)
            for holder in info.holders:
                raise ConfigError(
                    "a quorum is made of independent servers, but "
                    f"{_place(backends[int(holder.label)])} and {_place(backends[number])} are the same one"
                )


async def _give_back(claim: Claim) -> None:
    await asyncio.gather(claim.release(), return_exceptions=True)


def _place(backend: Backend) -> str:
    return backend.address or repr(backend)
