"""Command `doctor`: explain the capabilities and findings of a server."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Collection
from dataclasses import asdict
from typing import NamedTuple

import aiolock
from aiolock.cli import settings
from aiolock.cli.output import Output, clean
from aiolock.client import Client
from aiolock.clock import system_clock
from aiolock.errors import BackendError, BackendUnavailable
from aiolock.types import Finding, Level

__all__ = ["BY_SERVER", "CAPABILITIES", "CapabilityText", "Sentence", "doctor", "in_words"]

# --- capabilities


class CapabilityText(NamedTuple):
    """The sentences about one capability: its meaning, and where it is missing the risk and the advice."""

    meaning: str
    risk: str
    advice: str


class _OnServer(NamedTuple):
    advice: str
    risk: str = ""


class Sentence(NamedTuple):
    """A sentence about one capability of one server."""

    capability: str
    promised: bool
    text: str
    advice: str = ""


_WITH_IT = "use a server that promises it: Redis, ZooKeeper, etcd, PostgreSQL, or MySQL with mode=lease"
_DISK = "appendonly yes, and appendfsync always where its machine may go down"

CAPABILITIES = {
    "exclusion": CapabilityText(
        "at most one holder at a time, as each holder's own clock sees it",
        "two holders can be inside at once",
        "use a server that promises it; do not rely on this one",
    ),
    "fencing": CapabilityText(
        "every grant has a token greater than all before it, so that a late write can be refused",
        "tokens may repeat or fall, so a resource cannot tell a late write from a good one",
        _WITH_IT,
    ),
    "fifo": CapabilityText(
        "clients are served in the order of their requests",
        "clients may overtake each other while they wait",
        _WITH_IT,
    ),
    "keep": CapabilityText(
        "a released lock can stay taken for a while, for jobs that must not run again at once",
        "release(keep=...) and once(at_least=...) are refused",
        "use a server that promises it: Redis, etcd, PostgreSQL, SQLite, or MySQL with mode=lease",
    ),
    "push": CapabilityText(
        "a waiter is notified when its turn comes, without polling",
        "waiters poll, which costs time and requests",
        "use a server that promises it: ZooKeeper, etcd, PostgreSQL, MySQL, or Redis with pub/sub",
    ),
    "no-eviction": CapabilityText(
        "a full server refuses new locks rather than forget one that is held",
        "a full server may forget a lock that is held, and grant it to another client",
        "use a server that promises it, or give locks a server of their own",
    ),
    "survives-restart": CapabilityText(
        "locks that are held stay held when the server restarts",
        "a restart of the server forgets every lock: the next client gets it while the old holder still believes in it",
        "use a server that writes locks to disk",
    ),
    "survives-failover": CapabilityText(
        "locks that are held stay held when a server dies and another takes over",
        "a failover may forget the last locks: the next client gets one while the old holder still believes in it",
        "use an ensemble of ZooKeeper or a cluster of etcd for what must not happen, and fencing tokens for the rest",
    ),
}

BY_SERVER = {
    ("memory", "survives-restart"): _OnServer(
        "use a server of its own for locks that must outlive this process",
        "the server is this process: its locks end with it",
    ),
    ("memory", "survives-failover"): _OnServer(
        "use an ensemble of ZooKeeper or a cluster of etcd for locks that must outlive a server",
        "the server is this process: no other takes over when it dies",
    ),
    ("sqlite", "push"): _OnServer(
        "use a server if a hand-over has to take less than a few milliseconds",
        "waiters poll for changes of the file, after a millisecond at first and every 20 ms later",
    ),
    ("sqlite", "survives-restart"): _OnServer(
        "put the file on a disk",
        "the file is in memory: when the machine starts again, locks that were to stay taken are free",
    ),
    ("sqlite", "survives-failover"): _OnServer(
        "use a server for locks that several machines share",
        "there is no other server: the file is on this machine",
    ),
    ("memcached", "no-eviction"): _OnServer(
        "use another server for what must not happen twice; else give locks a memcached of their own, which never fills"
    ),
    ("memcached", "survives-failover"): _OnServer(
        "use an ensemble of ZooKeeper or a cluster of etcd for what must not happen twice",
        "no server takes over the locks of another one: while it is away its locks cannot be acquired",
    ),
    ("etcd", "survives-failover"): _OnServer(
        "give the cluster three members or more",
        "there are no other members that could take over: while one is away no lock can be acquired, and holders lose theirs",
    ),
    ("mongodb", "exclusion"): _OnServer(
        "use another server for what must not happen twice, until this one was tested with a MongoDB",
        "locks on MongoDB were tested with a stand-in only: what they promise there, a MongoDB need not keep",
    ),
    ("mongodb", "push"): _OnServer(
        "use another server if a hand-over has to take less than some hundredths of a second",
        "waiters poll for changes, after 10 ms at first and up to 2 s later the longer nothing changes",
    ),
    ("mongodb", "survives-failover"): _OnServer(
        "use a ZooKeeper ensemble or etcd for what must not happen twice, until this was tested with a MongoDB",
        "a failover of a MongoDB was never tested, although each grant waits for a majority",
    ),
    ("redis", "push"): _OnServer("give the account the right to publish and to subscribe"),
    ("redis", "no-eviction"): _OnServer(
        "set maxmemory-policy to noeviction, or give locks a server of their own; let the account use INFO, or it is "
        "not known"
    ),
    ("redis", "survives-restart"): _OnServer(
        f"make the server write to disk: {_DISK}; let the account use INFO, or it is not known"
    ),
    ("quorum", "fencing"): _OnServer(
        "use one server, or ZooKeeper: several that know nothing of each other cannot"
    ),
    ("quorum", "fifo"): _OnServer(
        "use one server, or ZooKeeper",
        "the waiters at a server that goes away queue at the next one, in any order",
    ),
    ("quorum", "survives-restart"): _OnServer(f"make every server write to disk: {_DISK}"),
    ("quorum", "survives-failover"): _OnServer(
        f"make every server write to disk: {_DISK}",
        "a server that dies and comes back has forgotten its votes: with its vote and that of a server that was away, the next "
        "client may have a majority while the old holder still believes in it",
    ),
    ("zookeeper", "survives-failover"): _OnServer(
        "run an ensemble of three servers or more; name them all in the address if clients may not read "
        "/zookeeper/config",
        "there are no other servers that could take over, or none that are known: while this one is away no lock can be "
        "acquired, and holders lose theirs",
    ),
    ("postgresql", "survives-restart"): _OnServer("set fsync = on and full_page_writes = on"),
    ("postgresql", "survives-failover"): _OnServer(
        "list in synchronous_standby_names by name every standby that may take over, and wait for all of them; or say by "
        "?failover=furthest that the one which has most takes over",
        "a failover may forget the last grants: the next client gets the lock while the old holder still believes in it",
    ),
    ("mysql", "fencing"): _OnServer("use mode=lease"),
    ("mysql", "fifo"): _OnServer("use mode=lease or mode=session"),
    ("mysql", "keep"): _OnServer("use mode=lease"),
    ("mysql", "survives-restart"): _OnServer(
        "use mode=lease, and innodb_flush_log_at_trx_commit=1 on the server",
        "a restart of the server may forget locks, the last ones or all: the next client gets one while the old holder may "
        "still believe in it",
    ),
}
"""Sentences about one server, by the name of its backend and the capability."""


def in_words(capabilities: Collection[str], server: str = "") -> list[Sentence]:
    """Explain the capabilities that a deployment has, and those that it lacks.

    ``server`` is the name of its backend, for advice about that one.
    """
    unknown = sorted(set(capabilities) - set(CAPABILITIES))
    sentences = [
        Sentence(capability, promised=True, text=text.meaning)
        for capability, text in CAPABILITIES.items()
        if capability in capabilities
    ]
    sentences += [
        Sentence(capability, promised=True, text="see the page of the server") for capability in unknown
    ]
    for capability, text in CAPABILITIES.items():
        if capability not in capabilities:
            there = BY_SERVER.get((server.lower(), capability), _OnServer(text.advice))
            risk = there.risk or text.risk
            sentences.append(Sentence(capability, promised=False, text=risk, advice=there.advice))
    return sentences


# --- doctor


TRIPS = 5
"""Round trips that are measured."""

UNHEALTHY = 1
"""The exit status if something is wrong."""

COLOURS = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.ERROR: "red"}


async def doctor(options: argparse.Namespace, output: Output) -> int:
    """Diagnose the server, and print the result. Cancelling it closes the client, and changes nothing."""
    client = settings.connect(options)
    sentences: list[Sentence] = []
    trip = None
    try:
        await client.open()
    except BackendUnavailable:
        raise
    except BackendError as error:
        # The server refuses; the diagnosis may say why.
        findings = await _after(client, error)
    else:
        try:
            trip = await _round_trip(client)
            sentences = in_words(client.capabilities, client._backend.name)  # noqa: SLF001 - not for programs
            findings = await client.diagnose()
        finally:
            await client.aclose()
    bad = [finding for finding in findings if finding.level is Level.ERROR]
    if output.json:
        output.document(
            {
                "server": settings.server(options),
                "version": aiolock.__version__,
                "healthy": not bad,
                "round_trip_ms": trip,
                "promises": [sentence.capability for sentence in sentences if sentence.promised],
                "missing": [sentence.capability for sentence in sentences if not sentence.promised],
                "findings": [asdict(finding) for finding in findings],
            }
        )
    else:
        _say(options, output, trip, sentences, findings)
    return UNHEALTHY if bad else 0


async def _after(client: Client, error: BackendError) -> list[Finding]:
    """Diagnose a server that refused a client; raises ``error`` if that finds nothing."""
    try:
        findings = await client.diagnose()
    except aiolock.LockError:
        raise error from None
    if not findings:
        raise error
    return [Finding(Level.ERROR, "connection", str(error)), *findings]


async def _round_trip(client: Client) -> float:
    """Return the median round trip in milliseconds."""
    lock = client.lock(f"doctor-{secrets.token_hex(4)}")
    took = []
    for _ in range(TRIPS):
        start = system_clock()
        await lock.inspect()
        took.append(system_clock() - start)
    return round(1000 * sorted(took)[TRIPS // 2], 3)


def _say(
    options: argparse.Namespace,
    output: Output,
    trip: float | None,
    sentences: list[Sentence],
    findings: list[Finding],
) -> None:
    title = f"{settings.server(options)}, seen from here by aiolock {aiolock.__version__}"
    output.line(output.style(title, "bold"))
    if trip is not None:
        output.line(f"A round trip takes {trip:g} ms (median of {TRIPS}).")
    for promised, title in ((True, "Promised"), (False, "Not promised")):
        some = [sentence for sentence in sentences if sentence.promised is promised]
        if some:
            output.line(f"\n{output.style(title, 'bold')}")
        for sentence in some:
            capability = output.style(sentence.capability, "green" if promised else "yellow")
            output.line(f"  {capability}: {sentence.text}")
            if sentence.advice:
                output.line(f"      to get it: {sentence.advice}")
    if findings:
        output.line(f"\n{output.style('Found', 'bold')}")
    for finding in findings:
        level = output.style(finding.level.value, COLOURS[finding.level])
        output.line(f"  {level}  {clean(finding.subject)}: {clean(finding.text)}")
        if finding.advice:
            output.line(f"      better: {clean(finding.advice)}")
    output.line(f"\n{_verdict(findings)}")


def _verdict(findings: list[Finding]) -> str:
    errors = sum(finding.level is Level.ERROR for finding in findings)
    warnings = sum(finding.level is Level.WARNING for finding in findings)
    if errors:
        return f"Not healthy: {errors} error(s), {warnings} warning(s)."
    if warnings:
        return f"Usable, with {warnings} warning(s)."
    return "Healthy."
