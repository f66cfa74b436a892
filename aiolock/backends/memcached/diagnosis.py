"""Diagnose a memcached server: whether it forgets locks."""

from __future__ import annotations

from aiolock.backends.diagnosis import note, ok, warning
from aiolock.backends.memcached.connection import new_connection
from aiolock.backends.urls import Host
from aiolock.types import Finding

__all__ = ["diagnose"]


async def diagnose(host: Host, timeout: float) -> list[Finding]:
    """Return findings about one server. Raises :class:`BackendError` if it cannot be asked. Cancelling it changes nothing."""
    async with new_connection(host, timeout) as connection:
        figures, settings = await connection.stats(), await connection.stats("settings")
    found = [ok("version", f"memcached {connection.version}")]
    text = f"{int(figures['uptime']):,} s; it forgot every lock when it started"
    found.append(ok("uptime", text))
    megabytes = int(figures["limit_maxbytes"]) / 2**20
    text = f"{int(figures['bytes']) / 2**20:.1f} of {megabytes:.0f} MiB are in use"
    advice = "give locks a memcached of their own, or this one more memory (-m)"
    if settings.get("evictions") == "off":
        text += "; when it is full, each write that it refuses deletes what was to be replaced, such as a lock that is held"
        found.append(warning("memory", text, "start it without -M, with enough memory (-m)"))
    elif count := int(figures["evictions"]):
        text += f", and {count:,} items were evicted since its start to make room: locks may be among them"
        found.append(warning("memory", text, advice))
    else:
        found.append(note("memory", f"{text}; when it is full it forgets items, and locks with them", advice))
    if settings.get("lru_crawler") == "no":
        text = "it lists no keys, as it was started with -o no_lru_crawler: `aiolock ls` does not work"
        found.append(note("list", text, "leave that option out"))
    return found
