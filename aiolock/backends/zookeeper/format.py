"""The data format: its version in one node per namespace, and the data of nodes.

The version node is read in each new session before anything else. Creating it decides between clients of two versions
that open at the same time: one create succeeds, and the other client reads the version. A client that finds another
version stops there, so it never creates a second lock beside the first. The node is persistent, and thereby keeps the
containers above it, which the server would remove with the last lock.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

from aiozk import exc
from aiozk import protocol as aiozk_protocol

from aiolock.backends.zookeeper import protocol
from aiolock.backends.zookeeper.errors import translate
from aiolock.backends.zookeeper.protocol import Operation
from aiolock.backends.zookeeper.queue import parents
from aiolock.core.present import decode_value, encode_value
from aiolock.errors import UnsafeBackend, shorten

__all__ = ["FORMAT", "REVOKE", "Note", "Record", "agree", "make"]

# --- version

FORMAT = 4
"""The version that this program reads and writes. Raise it with each change of names, data or their meaning."""

NODE = "format"
"""The version node, beside the folders of the families; this name and the form of its data never change."""

_MARK = re.compile(rb"aiolock format=([0-9]{1,9})")

_READABLE = protocol.acl(aiozk_protocol.AUTHED_UNRESTRICTED, aiozk_protocol.WORLD_READABLE)
"""Clients with other credentials may have locks of their own in the same namespace."""


Send = Callable[[Operation], Awaitable[Any]]


async def agree(send: Send, base: str, acl: bytes, version: int) -> None:
    """Read the version of the namespace at ``base``, or set it if there is none; one round trip, or a few the first time.

    Raises :class:`UnsafeBackend` if it is another one, and :class:`BackendRefused` without the rights. Cancelling it leaves
    open whether the version was set.
    """
    path, rights = f"{base}/{NODE}", _READABLE if acl == protocol.CREATOR else acl
    create = protocol.persistent(path, f"aiolock format={version}".encode(), rights)
    try:
        while True:
            try:
                found = bytes((await send(protocol.get(path, watch=False))).data or b"")
                break
            except exc.NoNode:
                pass
            try:
                await send(create)
                return
            except exc.NodeExists:
                continue
            except exc.NoNode:
                await make(send, base, acl)
    except (exc.NoAuth, exc.InvalidACL, exc.Unimplemented) as error:
        raise translate(error) from error
    match = _MARK.fullmatch(found)
    if match is None or int(match[1]) != version:
        other = f"format {int(match[1])}" if match is not None else f"an unknown format, {shorten(found)}"
        raise UnsafeBackend(
            f"{shorten(base)} holds data of {other}, and this program uses format {version}: use versions of aiolock with one "
            f"format, or another namespace; once every program that uses this one has stopped, delete {shorten(base)} to begin anew"
        )


async def make(send: Send, path: str, acl: bytes, data: bytes = b"") -> None:
    """Create the container ``path`` with this data and all containers above it, as far as they are missing.

    Cancelling it leaves open which were created; it may be called again.
    """

    async def create(step: str) -> exc.ResponseError | None:
        try:
            await send(protocol.container(step, acl, data if step == path else b""))
        except exc.NodeExists:
            return None
        except exc.ResponseError as error:
            return error
        return None

    errors = [await create(path)]
    if isinstance(errors[0], exc.NoNode):
        errors = [await create(step) for step in parents(path)]
    # Without the right to create a parent, an administrator has made it: a refusal matters only if the last node is missing.
    if errors[-1] is not None:
        raise next(error for error in errors if error is not None)


# --- data of nodes
#
# A contender's data begins with its label; further lines are ``name=value``. The data of a lock's own node is one line,
# ``aiolock floor=7`` or ``aiolock limit=3 declared=2``. Any program may have written either, so decoding never fails.

REVOKE = b"__REVOKE__"
"""The data by which Curator's Revoker asks a holder to release."""


@dataclass(frozen=True, slots=True)
class Note:
    """The data of a contender's node."""

    label: str
    attempt: str = ""
    """The attempt that made the node, where its name does not contain it."""
    token: int = 0
    """The zxid of the hold's token, where the Stat of the node does not have it."""
    asked: str | None = None
    """The reason why the holder was asked to release."""
    value: bytes = b""
    """The value of a campaign."""

    def encode(self) -> bytes:
        lines = [self.label]
        if self.attempt:
            lines.append(f"attempt={self.attempt}")
        if self.token:
            lines.append(f"token={self.token}")
        if self.asked is not None:
            lines.append(f"asked={json.dumps(self.asked)}")
        if self.value:
            lines.append(f"value={encode_value(self.value)}")
        return "\n".join(lines).encode()

    @classmethod
    def decode(cls, data: bytes | None) -> Note:
        if data == REVOKE:
            return cls("", asked="")
        label, *lines = bytes(data or b"").decode("utf-8", "replace").split("\n")
        fields = {name: value for name, _, value in (line.partition("=") for line in lines)}
        token, asked = fields.get("token", ""), fields.get("asked")
        return cls(
            label,
            fields.get("attempt", ""),
            int(token) if re.fullmatch("[0-9]{1,19}", token) else 0,
            None if asked is None else _reason(asked),
            decode_value(fields.get("value", "")),
        )


def _reason(text: str) -> str:
    try:
        # An escape such as \\ud800 makes a lone surrogate, which no stream and no server takes.
        return str(json.loads(text)).encode("utf-8", "replace").decode()
    except (ValueError, RecursionError):
        return ""


_RECORD = re.compile(rb"aiolock((?: [a-z]+=-?\d{1,19})*)")


@dataclass(frozen=True, slots=True)
class Record:
    """The data of a lock's own node, the parent of its queue."""

    floor: int = -1
    """Every contender up to this number has left; written by a holder that leaves."""
    limit: int = -1
    """The number of permits, 0 while the semaphore is paused; -1 if it is not known."""
    declared: int = 0
    """The number of permits that the first user of the semaphore declared."""
    inside: int = -1
    """Every contender up to this number was a holder when the limit was lowered."""

    def encode(self) -> bytes:
        words = [f" {name}={value}" for name, value in asdict(self).items() if value != getattr(_EMPTY, name)]
        return ("aiolock" + "".join(words)).encode()

    @classmethod
    def decode(cls, data: bytes | None) -> Record:
        match = _RECORD.fullmatch(bytes(data or b""))
        words = (word.partition("=") for word in match[1].decode().split()) if match is not None else ()
        return cls(**{name: int(value) for name, _, value in words if name in cls.__dataclass_fields__})


_EMPTY = Record()
