"""What a deployment can promise: asked at open, never assumed.

What may not be asked (an account without INFO) is unknown, and unknown is not promised. :func:`judge` is pure; the
questions are :func:`probe`'s.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiolock.backends.redis.commands import Script
from aiolock.backends.redis.replies import from_reply
from aiolock.errors import BackendRefused

__all__ = ["Verdict", "is_allowed", "judge", "parse_info", "probe"]

OLDEST = (6, 2)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is promised, and what people should know."""

    capabilities: frozenset[str]
    warnings: tuple[str, ...]


def parse_info(text: str) -> dict[str, str]:
    """The lines of INFO as a dictionary."""
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line and not line.startswith("#"))


def judge(info: Mapping[str, str], *, pushed: bool, cluster: bool = False) -> Verdict:
    """What a server with this INFO promises, or a node of a ``cluster``; raises :class:`BackendRefused` for one that is too
    old or read-only, or that is addressed as what it is not."""
    promises = {"exclusion", "fencing", "fifo", "keep"}
    warnings = []
    if pushed:
        promises.add("push")
    else:
        warnings.append(
            "this account may not use pub/sub, so waiting is by asking every 100 ms; "
            "grant it the channels of the namespace (see the documentation of the Redis backend)"
        )
    if not info:
        warnings.append("this account may not use INFO, so eviction and persistence are unknown")
    version = tuple(int(part) for part in re.findall(r"\d+", info.get("redis_version", ""))[:2])
    if version and version < OLDEST:
        raise BackendRefused(
            f"this server is version {info['redis_version']}; aiolock needs Redis or Valkey 6.2 or later"
        )
    if info.get("role") == "slave":
        raise BackendRefused("this server is a read-only replica; locks need the primary", retryable=True)
    if info.get("cluster_enabled") == "1" and not cluster:
        raise BackendRefused(
            "this server is a node of a Redis Cluster: use redis+cluster:// with the addresses of its nodes"
        )
    policy = info.get("maxmemory_policy")
    if policy == "noeviction":
        promises.add("no-eviction")
    elif policy is not None:
        warnings.append(
            f"maxmemory-policy is {policy}: a full server may evict a lock that is held, and hand it out twice; "
            "use noeviction"
        )
    if info.get("aof_enabled") == "1":
        promises.add("survives-restart")
    return Verdict(frozenset(promises), tuple(warnings))


async def probe(call: Callable[..., Awaitable[Any]], script: Script, key: str) -> dict[str, str]:
    """Ask for what :func:`judge` wants to know, in one round trip.

    Raises :class:`BackendRefused` if an account may not do with ``key`` what every step of a lock does.
    """
    rights = call("EVAL", script.source, "1", key), call("EVALSHA", script.sha, "1", key)
    sections = [
        call("INFO", section) for section in ("server", "memory", "persistence", "replication", "cluster")
    ]
    for answer in rights:
        _check_rights(await answer, key)
    info: dict[str, str] = {}
    for section in sections:
        try:
            reply = await section
        except BackendRefused:
            return {}
        info.update(parse_info(reply.decode("utf-8", "replace") if isinstance(reply, bytes) else str(reply)))
    return info


def _check_rights(refused: Sequence[bytes], key: str) -> None:
    """What the probe was refused, as one error."""
    words = [word.decode("utf-8", "replace") for word in refused]
    if not words:
        return
    error = from_reply(words[1].removeprefix("-"))
    if error.retryable:
        # Not about rights: a replica, a disk that is full, too few replicas.
        raise error
    commands = ", ".join(dict.fromkeys(words[::2]))
    raise BackendRefused(
        f"this account may not use {commands} on keys such as {key}, which every lock needs: "
        "the documentation of the Redis backend has the ACL line with the least rights"
    ) from error


async def is_allowed(reply: Awaitable[Any]) -> bool:
    """Whether a command was answered rather than refused."""
    try:
        await reply
    except BackendRefused:
        return False
    return True
