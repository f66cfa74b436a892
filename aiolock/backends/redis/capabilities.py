"""What a deployment can promise: asked at open, never assumed.

What may not be asked (an account without INFO) is unknown, and unknown is not promised. :func:`judge` is pure; the
questions are :func:`probe`'s.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aiolock.errors import BackendError, BackendRefused

__all__ = ["Verdict", "judge", "parse_info", "probe"]

OLDEST = (6, 2)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is promised, and what people should know."""

    capabilities: frozenset[str]
    warnings: tuple[str, ...]


def parse_info(text: str) -> dict[str, str]:
    """The lines of INFO as a dictionary."""
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line and not line.startswith("#"))


def judge(info: Mapping[str, str], *, pushed: bool) -> Verdict:
    """What a server with this INFO promises; raises :class:`BackendRefused` for one that is too old or read-only."""
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
    if info.get("cluster_enabled") == "1":
        raise BackendRefused("this server is part of a Redis Cluster, which this version does not support")
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


async def probe(call: Callable[..., Awaitable[Any]]) -> dict[str, str]:
    """Ask for what :func:`judge` wants to know. Raises :class:`BackendRefused` if scripts are not allowed."""
    try:
        await call("EVAL", "return 1", "0")
    except BackendRefused as error:
        raise BackendRefused(
            f"this account may not run scripts, and every step of a lock is one: {error}"
        ) from error.__cause__
    info: dict[str, str] = {}
    for section in ("server", "memory", "persistence", "replication", "cluster"):
        try:
            reply = await call("INFO", section)
        except BackendRefused:
            return {}
        except BackendError:
            raise
        info.update(parse_info(reply.decode("utf-8", "replace") if isinstance(reply, bytes) else str(reply)))
    return info
