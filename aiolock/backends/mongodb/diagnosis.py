"""Diagnose a MongoDB replica set: findings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from aiolock.backends.diagnosis import encryption, failure, note, ok, round_trip
from aiolock.backends.mongodb.connection import Connection
from aiolock.backends.mongodb.store import OLDEST
from aiolock.backends.mongodb.url import Address
from aiolock.core.backend import Settings
from aiolock.types import Finding

__all__ = ["diagnose", "findings"]


async def diagnose(address: Address, settings: Settings) -> list[Finding]:
    """Return findings about a replica set, also about one that clients refuse to use.

    Raises :class:`BackendError` if it cannot be asked. Cancelling it changes nothing.
    """
    connection = Connection(address, settings, lambda: None)
    try:
        build, hello, trips = await connection.ask({"buildInfo": 1}), await connection.ask({"hello": 1}), []
        for _ in range(3):
            sent = settings.clock()
            await connection.ask({"ping": 1})
            trips.append(settings.clock() - sent)
        found = findings(address, hello, build)
        listed = await connection.ask({"listCollections": 1, "filter": {"name": address.collection}})
        found.append(_collection(address, listed["cursor"]["firstBatch"]))
    finally:
        await connection.aclose()
    return [*found, round_trip(trips, settings.ttl)]


def findings(address: Address, hello: Mapping[str, Any], build: Mapping[str, Any]) -> list[Finding]:
    """Judge what a server says of itself."""
    tls = encryption(
        encrypted=bool(address.arguments.get("tls")),
        local=all(host.local for host in address.hosts),
        advice="use tls=true",
    )
    return [*_server(hello, build), *_members(address, hello), tls]


def _server(hello: Mapping[str, Any], build: Mapping[str, Any]) -> Iterator[Finding]:
    version = f"MongoDB {build['version']}"
    if hello["maxWireVersion"] < OLDEST:
        yield failure("version", f"{version} is older than 4.4", "use MongoDB 4.4 or later")
    else:
        yield ok("version", version)
    yield note("experimental", "locks on MongoDB were tested with a stand-in only", "tell us how it goes")


def _members(address: Address, hello: Mapping[str, Any]) -> Iterator[Finding]:
    if "setName" not in hello:
        yield failure(
            "replica set",
            "this server is no member of one, and clients refuse to open here",
            "start it with --replSet, and call rs.initiate() once; or connect to the members of a set",
        )
        return
    text = f"{hello['setName']} has {len(hello['hosts'])} members with data"
    if not hello["isWritablePrimary"]:
        yield failure(
            "primary", "this member is not the primary, and takes no writes", "leave directConnection out"
        )
    if len(hello["hosts"]) < 3:
        yield note("replica set", f"{text}: locks stop when one is away", "use three members")
    elif address.arguments.get("directConnection"):
        yield note("replica set", f"{text}, and directConnection keeps to one", "leave it out")
    else:
        yield ok("replica set", text)


def _collection(address: Address, listed: list[dict[str, Any]]) -> Finding:
    name = f"{address.database}.{address.collection}"
    if not listed:
        return note("collection", f"{name} is not there yet", "the first client makes it")
    [found] = listed
    if found["type"] != "collection" or found["options"]:
        return failure(
            "collection",
            f"{name} is a {found['type']} with the options {', '.join(found['options']) or 'of a view'}",
            "name another one with collection=, and let the first client make it",
        )
    return ok("collection", f"{name} is as clients make it")
