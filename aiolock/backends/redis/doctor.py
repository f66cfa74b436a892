"""What a deployment is like, asked over connections of its own: settings, rights, clock, round trip. Changes nothing.

It works where a client cannot be opened, since that is when it is wanted. What the answers mean is said in
``findings.py``; here is who is asked what.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable
from datetime import UTC, datetime
from typing import Any

from hiredis import ReplyError

from aiolock.backends.redis.capabilities import parse_info
from aiolock.backends.redis.commands import Script
from aiolock.backends.redis.connection import Connection
from aiolock.backends.redis.endpoint import Endpoint
from aiolock.backends.redis.findings import SETTINGS, Facts, judge
from aiolock.backends.redis.format import Format
from aiolock.backends.redis.pubsub import Subscriber
from aiolock.contract import Finding, Settings
from aiolock.errors import BackendError, BackendUnavailable

__all__ = ["examine"]

TRIPS = 5
"""Round trips that are measured."""
GRACE = 0.05
"""Seconds that all of it may take longer than it should."""


async def examine(
    endpoint: Endpoint, probe: Script, settings: Settings, key: str = "", *, cluster: bool = False
) -> list[Finding]:
    """Ask everything within the command timeout, and say what it means; ``probe`` says which commands are refused, of
    ``key`` where it matters which.

    Raises :class:`BackendUnavailable` or :class:`BackendRefused` if the server cannot be talked to at all.
    """
    limit = settings.command_timeout
    connection = Connection(endpoint, clock=settings.clock, command_timeout=limit)
    try:
        # Each step has the same limit, and a better sentence: this is for their sum.
        async with asyncio.timeout(limit + GRACE):
            await connection.open()
            facts = await _ask(connection, probe, settings, key)
            facts.cluster = cluster
            facts.pushed = await _is_pushed(endpoint, settings)
    except TimeoutError as error:
        raise BackendUnavailable(
            f"{endpoint} did not answer everything that it was asked within {limit:g} s"
        ) from error
    finally:
        await connection.aclose()
    return judge(facts, settings.ttl)


async def _ask(connection: Connection, probe: Script, settings: Settings, key: str) -> Facts:
    key = key or f"{settings.namespace}:1:probe:{{{secrets.token_hex(8)}}}"
    rights = connection.call("EVAL", probe.source, "1", key)
    sections = ("server", "clients", "memory", "persistence", "replication", "cluster")
    asked = [connection.call("INFO", section) for section in sections]
    # One by one, because an old server takes one name only; none of these is a secret.
    values = {name: connection.call("CONFIG", "GET", name) for name in SETTINGS}
    scan = connection.call("SCAN", "0", "MATCH", key, "COUNT", "1")
    # Changes nothing: who looks has no data.
    version = connection.call("HGET", Format(settings.namespace).key, "version")
    facts = Facts()
    try:
        facts.refused = tuple(dict.fromkeys(_text(word) for word in (await rights)[::2]))
    except BackendError as error:
        if not _is_answer(error):
            raise
        facts.trouble = str(error)
    if (found := await _or_none(version)) is not None:
        facts.format = _text(found)
    for section in asked:
        facts.info |= parse_info(_text(await _or_none(section) or b""))
    for name, value in values.items():
        pair = await _or_none(value)
        facts.settings[name] = _text(pair[1]) if pair else None
    facts.lists = await _or_none(scan) is not None
    for _ in range(TRIPS):
        sent, wall = settings.clock(), datetime.now(UTC).timestamp()
        answer = await _or_none(connection.call("TIME"))
        took = settings.clock() - sent
        if answer is not None and (not facts.trips or took < min(facts.trips)):
            # The shortest trip says most exactly how far the clocks are apart.
            facts.ahead = int(answer[0]) + int(answer[1]) / 1_000_000 - (wall + took / 2)
        facts.trips.append(took)
    return facts


async def _is_pushed(endpoint: Endpoint, settings: Settings) -> bool:
    """Whether what is published on a channel of the namespace arrives."""
    channel = f"{settings.namespace}:1:to:{secrets.token_hex(16)}"
    heard = asyncio.get_running_loop().create_future()

    def hear(message: bytes) -> None:
        del message
        if not heard.done():
            heard.set_result(None)

    limit = settings.command_timeout
    subscriber = Subscriber(endpoint, channel, clock=settings.clock, command_timeout=limit, on_message=hear)
    connection = Connection(endpoint, clock=settings.clock, command_timeout=limit)
    try:
        await subscriber.open()
        if subscriber.denied is not None:
            return False
        await connection.open()
        if await _or_none(connection.call("PUBLISH", channel, "")) is None:
            return False
        await heard
    finally:
        await subscriber.aclose()
        await connection.aclose()
    return True


async def _or_none(reply: Awaitable[Any]) -> Any:
    """The answer, or ``None`` if it is refused: that is a finding, not a failure."""
    try:
        return await reply
    except BackendError as error:
        if not _is_answer(error):
            raise
        return None


def _is_answer(error: BackendError) -> bool:
    """Whether the server said so, as opposed to nothing."""
    return isinstance(error.__cause__, ReplyError)


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
