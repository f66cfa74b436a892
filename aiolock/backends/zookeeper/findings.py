"""What an ensemble is like, for people: what its servers say of themselves, and what that means for locks.

The four-letter words need no session and no rights, only a server that was told to answer them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from aiolock.backends.zookeeper.address import Address, Host
from aiolock.backends.zookeeper.resolving import Resolver
from aiolock.contract import Finding
from aiolock.info import Level

__all__ = ["Server", "ask", "judge", "judge_rights", "judge_session"]

OLDEST = (3, 5, 1)
MOST_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Server:
    """What one server answered; empty where it did not."""

    host: Host
    status: dict[str, str]
    """To ``srvr``."""
    settings: dict[str, str]
    """To ``conf``."""
    error: str = ""

    def number(self, name: str) -> int | None:
        """A setting that is a number."""
        text = self.settings.get(name, "")
        return int(text) if text.isdecimal() else None


async def ask(address: Address, within: float) -> list[Server]:
    """Ask every server of an address at once, for so many seconds each."""
    return list(await asyncio.gather(*(_ask_one(address, host, within) for host in address.hosts)))


async def _ask_one(address: Address, host: Host, within: float) -> Server:
    try:
        async with asyncio.timeout(within):
            where = (await Resolver(Random()).resolve(host))[0]  # noqa: S311 - which address does not matter
            status, settings = [await _word(where, host, address.tls, word) for word in (b"srvr", b"conf")]
    except (OSError, TimeoutError, EOFError, ValueError) as error:
        return Server(host, {}, {}, str(error) or f"no answer within {within:g} s")
    return Server(host, _read(status, ": "), _read(settings, "="))


async def _word(where: str, host: Host, tls: Any, word: bytes) -> str:
    reader, writer = await asyncio.open_connection(
        where, host.port, ssl=tls, server_hostname=None if tls is None else host.name
    )
    try:
        writer.write(word)
        return (await reader.read(MOST_BYTES)).decode("utf-8", "replace")
    finally:
        writer.transport.abort()


def _read(text: str, between: str) -> dict[str, str]:
    pairs = (line.partition(between) for line in text.splitlines())
    return {name.strip(): value.strip() for name, mark, value in pairs if mark}


def judge(address: Address, servers: Sequence[Server]) -> list[Finding]:
    """What the answers of the servers mean."""
    findings = [
        Finding(
            Level.WARNING,
            str(server.host),
            f"this server cannot be reached: {server.error}",
            "start it, or take it out of the address",
        )
        for server in servers
        if server.error
    ]
    talking = [server for server in servers if not server.error]
    silent = [server for server in talking if "Mode" not in server.status]
    if silent:
        findings.append(
            Finding(
                Level.NOTE,
                "4lw.commands.whitelist",
                f"{', '.join(str(server.host) for server in silent)}: no answer to srvr, so version, role and limits "
                "are not known",
                "add srvr and conf to 4lw.commands.whitelist to see more here; locks do not need it",
            )
        )
    for server in talking:
        findings += _judge_version(server)
    findings += _judge_size(address, [server for server in talking if "Mode" in server.status])
    findings += _judge_limits(address, talking)
    if address.credentials is not None and address.tls is None:
        findings.append(
            Finding(
                Level.WARNING,
                "tls",
                "the password travels in the clear",
                "use tls=true, or a network of your own",
            )
        )
    return findings


def _judge_version(server: Server) -> Iterable[Finding]:
    # Zookeeper version: 3.8.0-..., built on ...
    text = server.status.get("Zookeeper version", "").partition("-")[0]
    numbers = tuple(int(part) for part in text.split(".") if part.isdecimal())
    if numbers and numbers < OLDEST:
        yield Finding(
            Level.ERROR,
            str(server.host),
            f"version {text} lacks containers and creates that answer with a zxid",
            "use 3.5.1 or later",
        )
    elif numbers:
        yield Finding(
            Level.OK, str(server.host), f"version {text}, {server.status.get('Mode', 'unknown role')}"
        )


def _judge_size(address: Address, servers: Sequence[Server]) -> Iterable[Finding]:
    modes = [server.status["Mode"] for server in servers]
    if "standalone" in modes:
        yield Finding(
            Level.WARNING,
            "ensemble",
            "this is a single server: while it is away nobody gets a lock, and holders lose theirs",
            "run three servers or more",
        )
        return
    if "read-only" in modes:
        yield Finding(
            Level.ERROR, "ensemble", "a server is read-only: it has lost its quorum", "bring the others back"
        )
    voters = len([mode for mode in modes if mode in ("leader", "follower")])
    if voters and voters == len(address.hosts) and voters % 2 == 0:
        yield Finding(
            Level.NOTE,
            "ensemble",
            f"{voters} servers survive no more failures than {voters - 1} would",
            "run an odd number",
        )
    if voters and not modes.count("leader") and voters == len(address.hosts):
        yield Finding(
            Level.NOTE,
            "ensemble",
            "the leader is not in the address",
            "name all servers, so that clients spread",
        )
    elif voters > 2:
        yield Finding(Level.OK, "ensemble", f"{voters} of its servers vote")


def _judge_limits(address: Address, servers: Sequence[Server]) -> Iterable[Finding]:
    for server in servers:
        tick, least = server.number("tickTime"), server.number("minSessionTimeout")
        if tick is None:
            yield Finding(
                Level.NOTE,
                "conf",
                f"{server.host} does not tell its settings",
                "add conf to 4lw.commands.whitelist to see more here",
            )
            continue
        told = address.options.tick_time
        if least is not None and least < 2 * tick and (told is None or told * 1000 < tick):
            yield Finding(
                Level.ERROR,
                "minSessionTimeout",
                f"{server.host} grants sessions of {least} ms, less than two ticks of {tick} ms: a holder may then "
                "believe for too long",
                f"connect with tick_time={tick / 1000:g}",
            )
        most = server.number("maxClientCnxns")
        if most is not None and 0 < most < 10:
            yield Finding(
                Level.NOTE,
                "maxClientCnxns",
                f"{server.host} takes {most} connections from one address; each client needs one",
                "raise it if many clients run on one machine",
            )


def judge_session(
    granted: float, wanted: float, servers: Sequence[Server], *, forgets: bool
) -> list[Finding]:
    """What the present session means: how long it lives beside what was asked for, in seconds."""
    findings = []
    if abs(granted - wanted) > 0.001:
        findings.append(
            Finding(
                Level.NOTE,
                "session timeout",
                f"the servers grant {granted:g} s instead of {wanted:g} s; that is the ttl of every lease",
                "ask for what minSessionTimeout and maxSessionTimeout allow, or change them",
            )
        )
    else:
        findings.append(Finding(Level.OK, "session timeout", f"{granted:g} s, as asked for"))
    for server in servers:
        tick, limit = server.number("tickTime"), server.number("syncLimit")
        if tick is not None and limit is not None and granted * 1000 <= tick * limit:
            findings.append(
                Finding(
                    Level.NOTE,
                    "syncLimit",
                    f"a server that is cut off serves its clients for up to {tick * limit / 1000:g} s, which is not "
                    f"shorter than a session of {granted:g} s; holders know in time, waiters wait longer",
                    "ask for longer sessions, or lower syncLimit",
                )
            )
            break
    if not forgets:
        findings.append(
            Finding(
                Level.WARNING,
                "extendedTypesEnabled",
                "this server has no nodes with a time to live: latches and barriers stay until somebody deletes them",
                "start the servers with -Dzookeeper.extendedTypesEnabled=true",
            )
        )
    return findings


def judge_rights(path: str, acl: Sequence[Any]) -> Finding:
    """What the rights on a node under which all locks stand mean."""
    if any(entry.id.scheme == "world" and entry.perms & ~1 for entry in acl):
        return Finding(
            Level.NOTE,
            "acl",
            f"anybody who reaches the ensemble may change what is below {path}",
            "use user:password@ in the address and acl=creator, or a network of your own",
        )
    return Finding(Level.OK, "acl", f"only some may change what is below {path}")
