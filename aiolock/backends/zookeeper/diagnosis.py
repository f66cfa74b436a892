"""Diagnose a ZooKeeper ensemble."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from aiolock.backends.diagnosis import failure, note, numbers, ok, warning
from aiolock.backends.dial import open_socket
from aiolock.backends.zookeeper.url import Address, Host
from aiolock.types import Finding

__all__ = [
    "ALWAYS",
    "CONFIG",
    "Server",
    "ask",
    "capabilities",
    "judge",
    "judge_rights",
    "judge_session",
    "voters",
]

ALWAYS = frozenset({"exclusion", "fencing", "fifo", "no-eviction", "push", "survives-restart"})
"""The capabilities of a single server: it has every change in its log before it answers."""

CONFIG = "/zookeeper/config"
"""The node in which servers since 3.5 list the members of the ensemble; empty on a standalone server."""

ENOUGH = 3
"""Voting servers of which one can die and leave a majority."""

OLDEST = (3, 5, 1)
MOST_BYTES = 65_536

# --- capabilities


def capabilities(config: bytes | None, named: int) -> frozenset[str]:
    """Return the capabilities of an ensemble: ``survives-failover`` takes :data:`ENOUGH` voting servers.

    :param config: its list of members, or ``None`` if the account may not read it.
    :param named: servers in the address, which count in that case.
    """
    found = set(ALWAYS)
    if (named if config is None else voters(config)) >= ENOUGH:
        found.add("survives-failover")
    return frozenset(found)


def voters(config: bytes) -> int:
    """Count the voting servers of an ensemble; 0 for a standalone server."""
    # server.1=host:2888:3888:participant;0.0.0.0:2181, without a role: it votes
    members = [line for line in config.decode("utf-8", "replace").splitlines() if line.startswith("server.")]
    return sum(":observer" not in member.partition(";")[0] for member in members)


# --- facts
# By four-letter words, which need no session and no rights, but a server that is configured to answer them.


@dataclass(frozen=True, slots=True)
class Server:
    """The answers of one server; empty where it gave none."""

    host: Host
    status: dict[str, str]
    """The answer to ``srvr``."""
    settings: dict[str, str]
    """The answer to ``conf``."""
    error: str = ""

    def number(self, name: str) -> int | None:
        """A setting that is a number."""
        text = self.settings.get(name, "")
        return int(text) if text.isdecimal() else None


async def ask(address: Address, within: float) -> list[Server]:
    """Ask every server of an address at once, for so many seconds each. Cancelling it leaves no connection open."""
    return list(await asyncio.gather(*(_ask_one(address, host, within) for host in address.hosts)))


async def _ask_one(address: Address, host: Host, within: float) -> Server:
    try:
        async with asyncio.timeout(within):
            status, settings = [await _word(host, address.tls, word) for word in (b"srvr", b"conf")]
    except (OSError, TimeoutError, EOFError, ValueError) as error:
        return Server(host, {}, {}, str(error) or f"no answer within {within:g} s")
    return Server(host, _read(status, ": "), _read(settings, "="))


async def _word(host: Host, tls: Any, word: bytes) -> str:
    name = None if tls is None else host.name
    reader, writer = await asyncio.open_connection(
        sock=await open_socket(host.name, host.port), ssl=tls, server_hostname=name
    )
    try:
        writer.write(word)
        return (await reader.read(MOST_BYTES)).decode("utf-8", "replace")
    finally:
        writer.transport.abort()


def _read(text: str, between: str) -> dict[str, str]:
    pairs = (line.partition(between) for line in text.splitlines())
    return {name.strip(): value.strip() for name, mark, value in pairs if mark}


# --- findings


def judge(address: Address, servers: Sequence[Server]) -> list[Finding]:
    """Judge the answers of the servers."""
    talking = [server for server in servers if not server.error]
    found = [
        warning(
            str(server.host),
            f"this server cannot be reached: {server.error}",
            "start it, or take it out of the address",
        )
        for server in servers
        if server.error
    ]
    silent = ", ".join(str(server.host) for server in talking if "Mode" not in server.status)
    if silent:
        found.append(
            note(
                "4lw.commands.whitelist",
                f"{silent}: no answer to srvr, so version, role and limits are not known",
                "add srvr and conf to 4lw.commands.whitelist to see more here; locks do not need it",
            )
        )
    for server in talking:
        found += _version(server)
    found += _size(address, [server.status["Mode"] for server in talking if "Mode" in server.status])
    for server in talking:
        found += _limits(address, server)
    if address.credentials is not None and address.tls is None:
        found.append(
            warning("tls", "the password travels in the clear", "use tls=true, or a network of your own")
        )
    return found


def _version(server: Server) -> Iterator[Finding]:
    # Zookeeper version: 3.8.0-..., built on ...
    text = server.status.get("Zookeeper version", "").partition("-")[0]
    if text and numbers(text) < OLDEST:
        lacks = "containers and creates that answer with a zxid"
        yield failure(str(server.host), f"version {text} lacks {lacks}", "use 3.5.1 or later")
    elif text:
        yield ok(str(server.host), f"version {text}, {server.status.get('Mode', 'unknown role')}")


def _size(address: Address, modes: Sequence[str]) -> Iterator[Finding]:
    subject = "ensemble"
    if "standalone" in modes:
        yield warning(
            subject,
            "this is a single server: while it is away no lock can be acquired, and holders lose theirs",
            "run three servers or more",
        )
        return
    if "read-only" in modes:
        yield failure(subject, "a server is read-only: it has lost its quorum", "bring the others back")
    voters = len([mode for mode in modes if mode in ("leader", "follower")])
    complete = voters > 0 and voters == len(address.hosts)
    if complete and voters % 2 == 0:
        text = f"{voters} servers survive no more failures than {voters - 1} would"
        yield note(subject, text, "run an odd number")
    if complete and "leader" not in modes:
        yield note(subject, "the leader is not in the address", "name all servers, so that clients spread")
    elif voters > 2:
        yield ok(subject, f"{voters} of its servers vote")


def _limits(address: Address, server: Server) -> Iterator[Finding]:
    tick, least, most = map(server.number, ("tickTime", "minSessionTimeout", "maxClientCnxns"))
    if tick is None:
        text = f"{server.host} does not show its settings"
        yield note("conf", text, "add conf to 4lw.commands.whitelist to see more here")
        return
    given = address.options.tick_time
    if least is not None and least < 2 * tick and (given is None or given * 1000 < tick):
        yield failure(
            "minSessionTimeout",
            f"{server.host} grants sessions of {least} ms, less than two ticks of {tick} ms: a holder may then believe for "
            "too long",
            f"connect with tick_time={tick / 1000:g}",
        )
    if most is not None and 0 < most < 10:
        yield note(
            "maxClientCnxns",
            f"{server.host} takes {most} connections from one address; each client needs one",
            "raise it if many clients run on one machine",
        )


def judge_session(
    granted: float, wanted: float, servers: Sequence[Server], *, forgets: bool
) -> Iterator[Finding]:
    """Judge the seconds for which the servers keep the session, and those that it asked for."""
    if abs(granted - wanted) > 0.001:
        yield note(
            "session timeout",
            f"the servers grant {granted:g} s instead of {wanted:g} s; that is the ttl of every lease",
            "ask for what minSessionTimeout and maxSessionTimeout allow, or change them",
        )
    else:
        yield ok("session timeout", f"{granted:g} s, as asked for")
    limits = [
        (server.number("tickTime") or 0) * (server.number("syncLimit") or 0) / 1000 for server in servers
    ]
    if (cut := max(limits, default=0)) >= granted:
        yield note(
            "syncLimit",
            f"a server that is cut off serves its clients for up to {cut:g} s, which is not shorter than a session of "
            f"{granted:g} s; holders know in time, waiters wait longer",
            "ask for longer sessions, or lower syncLimit",
        )
    if not forgets:
        yield warning(
            "extendedTypesEnabled",
            "this server has no nodes with a time to live: latches and barriers stay until they are deleted",
            "start the servers with -Dzookeeper.extendedTypesEnabled=true",
        )


def judge_rights(path: str, acl: Sequence[Any]) -> Finding:
    """Judge the rights on the node above all locks."""
    if any(entry.id.scheme == "world" and entry.perms & ~1 for entry in acl):
        return note(
            "acl",
            f"every client that reaches the ensemble may change what is below {path}",
            "use user:password@ in the address and acl=creator, or a network of your own",
        )
    return ok("acl", f"only some accounts may change what is below {path}")
