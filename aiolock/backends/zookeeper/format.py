"""The version of the data format: one persistent node per namespace, which the first client creates and no client changes.

The node is read in each new session before the session is used. Creating it is what decides between clients of two
versions that open at the same time: one create succeeds, and the other client reads what it says. A client that finds
another version stops there, so it never creates a second lock beside the first. The node is persistent, and so keeps the
containers above it, which the server would remove with the last lock: a version stays for as long as the node does.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

from aiozk import exc, protocol

from aiolock.backends.zookeeper import wire
from aiolock.backends.zookeeper.frames import Request
from aiolock.backends.zookeeper.outcomes import translate
from aiolock.backends.zookeeper.paths import parents
from aiolock.errors import UnsafeBackend, shorten

__all__ = ["FORMAT", "agree"]

FORMAT = 2
"""The version that this program reads and writes. Raise it with each change of names, payloads or their meaning."""

NODE = "format"
"""Beside the folders of the kinds of locks; this name and the form of the data never change."""

_MARK = re.compile(rb"aiolock format=([0-9]{1,9})")

_READABLE = wire.acl(protocol.AUTHED_UNRESTRICTED, protocol.WORLD_READABLE)
"""Clients with other credentials may have locks of their own in the same namespace."""


async def agree(send: Callable[[Request], Awaitable[Any]], base: str, acl: bytes, version: int) -> None:
    """Read the version of the namespace at ``base``, or set it if there is none; one round trip, or a few the first time.

    Raises :class:`UnsafeBackend` if it is another one, and :class:`BackendRefused` without the rights. Cancelling it leaves
    open whether the version was set.
    """
    path = f"{base}/{NODE}"
    create = wire.persistent(
        path, f"aiolock format={version}".encode(), _READABLE if acl == wire.CREATOR else acl
    )
    refused: exc.ResponseError | None = None
    try:
        while True:
            try:
                found = bytes((await send(wire.get(path, watch=False))).data or b"")
                break
            except exc.NoNode:
                pass
            try:
                await send(create)
            except exc.NodeExists:
                continue
            except exc.NoNode:
                if refused is not None:
                    raise refused from None
                refused = await _make(send, parents(base), acl)
                continue
            return
    except (exc.NoAuth, exc.InvalidACL, exc.Unimplemented) as error:
        raise translate(error) from error
    match = _MARK.fullmatch(found)
    if match is None or int(match[1]) != version:
        other = f"format {int(match[1])}" if match is not None else f"an unknown format, {shorten(found)}"
        raise UnsafeBackend(
            f"{shorten(base)} holds data of {other}, and this program uses format {version}: use versions of aiolock with one "
            f"format, or another namespace; once every program that uses this one has stopped, delete {shorten(base)} to begin anew"
        )


async def _make(
    send: Callable[[Request], Awaitable[Any]], steps: list[str], acl: bytes
) -> exc.ResponseError | None:
    """Create what is missing on the way; the first refusal, which matters only if the last node is not there."""
    refused: exc.ResponseError | None = None
    for step in steps:
        try:
            await send(wire.container(step, acl))
        except exc.NodeExists:
            continue
        except (exc.NoAuth, exc.NoNode, exc.InvalidACL, exc.Unimplemented) as error:
            refused = refused or error
    return refused
