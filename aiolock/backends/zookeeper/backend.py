"""ZooKeeper backend: one session, the context of its claims, and the contract's verbs."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from aiozk import exc

from aiolock.backends.zookeeper import diagnosis, protocol
from aiolock.backends.zookeeper.claim import QueueClaim
from aiolock.backends.zookeeper.context import BLOCK, Cleanup, Context, Nodes, SharedTimer
from aiolock.backends.zookeeper.format import FORMAT, REVOKE, Note, Record, agree
from aiolock.backends.zookeeper.kinds import PermitsClaim, ReadWriteClaim
from aiolock.backends.zookeeper.protocol import Operation
from aiolock.backends.zookeeper.queue import Position, component, inside, name_of, parents, queue
from aiolock.backends.zookeeper.register import NodeRegister
from aiolock.backends.zookeeper.session import Session
from aiolock.backends.zookeeper.url import parse
from aiolock.core.backend import Claim, Event, EventKind, Grant, Renewal, Request, Settings
from aiolock.core.capabilities import Administration, Diagnosis, RegisterStore
from aiolock.core.present import has_token
from aiolock.errors import BackendUnavailable, ConfigError, forgets_arguments
from aiolock.types import LOCK_FAMILIES, Family, Finding, Holder, LockInfo, Waiting

__all__ = ["ZooKeeperBackend"]

REGISTERS = "register"
"""The folder of registers, beside those of the families of locks."""
AT_ONCE = 200
"""Requests that are sent together where there may be thousands."""


class _View(NamedTuple):
    """The queue of a lock, and the record of the lock's own node."""

    queue: list[Position]
    record: Record
    version: int
    """The version of the record; -1 if there is no such lock."""

    @property
    def holders(self) -> list[Position]:
        return self.queue[: inside(self.queue, self.record.limit, self.record.inside)]


class ZooKeeperBackend(Administration, RegisterStore, Diagnosis):
    """``zookeeper://h1:2181,h2:2181,h3:2181/chroot``, with ``user:password@`` for digest authentication.

    :param session_timeout: seconds to ask for, instead of the client's ttl; the server has the last word.
    :param tick_time: seconds of the server's ``tickTime``, where its ``minSessionTimeout`` is below two ticks.
    :param acl: ``"open"``: all users have all rights; ``"creator"``: the authenticated user alone.
    :param heartbeat: ``"sync"``, which the leader answers alone; ``"write"``: a quorum has to.
    :param tls: ``True``, or a context; ``tls_ca``, ``tls_cert`` and ``tls_key`` name files in PEM.
    """

    name = "zookeeper"
    keeps_values = True
    capabilities = diagnosis.ALWAYS
    format = FORMAT

    session: Session
    context: Context

    @forgets_arguments
    def __init__(
        self,
        url: str,
        *,
        session_timeout: float | None = None,
        tick_time: float | None = None,
        acl: str | None = None,
        heartbeat: str | None = None,
        tls: bool | ssl.SSLContext | None = None,
        tls_ca: str | None = None,
        tls_cert: str | None = None,
        tls_key: str | None = None,
    ) -> None:
        self._address = parse(
            url,
            session_timeout=session_timeout,
            tick_time=tick_time,
            acl=acl,
            heartbeat=heartbeat,
            tls=tls,
            tls_ca=tls_ca,
            tls_cert=tls_cert,
            tls_key=tls_key,
        )
        self.address = self._address.text
        self._opened = False
        self._connected = False

    def bind(self, settings: Settings) -> None:
        """Take over what the client decides."""
        super().bind(settings)
        self._base = f"{self._address.chroot}/{component(settings.namespace)}"

    async def open(self) -> None:
        """Begin a session, check the version of the data format, and read the members of the ensemble."""
        settings, random = self.settings, self.settings.random
        acl = protocol.CREATOR if self._address.options.acl == "creator" else protocol.OPEN
        self.session = session = Session(
            self._address,
            self._address.options.session_timeout or settings.ttl,
            command_timeout=settings.command_timeout,
            clock=settings.clock,
            random=random,
            on_change=self._session_changed,
            on_begin=lambda send: agree(send, self._base, acl, self.format),
        )
        self.context = context = Context(
            session=session,
            nodes=Nodes(session, acl, settings.clock),
            cleanup=Cleanup(session),
            timer=SharedTimer(),
            events=self.events,
            clock=settings.clock,
            random=random,
            address=self._address,
            command_timeout=settings.command_timeout,
        )
        self._opened = True
        async with context.bounded():
            await session.start()
            members = await self._members()
        self.capabilities = diagnosis.capabilities(members, len(self._address.hosts))

    async def _members(self) -> bytes | None:
        """Read the members of the ensemble; ``None`` without the right to."""
        config = protocol.get(diagnosis.CONFIG, watch=False)
        try:
            reply = await self.session.persist(lambda: self.session.ask(config))
        except (exc.NoAuth, exc.NoNode):
            return None
        return bytes(reply.data or b"")

    async def aclose(self) -> None:
        """End the session, and with it every node that is left."""
        if self._opened:
            await self.context.cleanup.aclose()
            await self.session.close()
            self.session.listeners.clear()

    def _path(self, name: str, family: Family) -> str:
        return f"{self._base}/{family.value}/{component(name)}"

    def _session_changed(self) -> None:
        outages, session = self.settings.outages, self.session
        if outages is not None and session.connected is not self._connected:
            self._connected = session.connected
            if self._connected:
                outages.up(self, self.address)
            elif not session.closing:
                outages.down(self, self.address, "the connection broke")
        if session.connected:
            self.events.put(Event(EventKind.DOUBT))

    # --- locks

    def claim(self, request: Request) -> QueueClaim:
        """Return a claim with a uuid of its own."""
        kind = request.kind
        if request.grace > (most := self.session.timeout / 6):
            raise ConfigError(
                f"grace must be at most a sixth of the session timeout here, {most:g}, not {request.grace:g}: between two "
                "heartbeats a hold is certain for little more than a third of it"
            )
        recipe = QueueClaim
        if kind.counted:
            recipe = PermitsClaim
        elif kind.shareable:
            recipe = ReadWriteClaim
        return recipe(self.context, request, self._path(request.name, kind.family))

    async def renew(self, claims: Sequence[Claim]) -> list[Renewal]:
        """Answer from what the heartbeats of the session have proved; no request."""
        return [self._renewed(claim) for claim in claims if isinstance(claim, QueueClaim)]

    def _renewed(self, claim: QueueClaim) -> Renewal:
        if claim.owner != self.session.session_id:
            return "session"
        if not claim.held:
            return "force-released"
        claim.check(own=True)
        if not self.session.connected:
            return BackendUnavailable("there is no connection; the session lasts until its deadline")
        return Grant(0, 0, self.session.deadline, claim.contended_since is not None)

    def register(self, name: str, family: Family) -> NodeRegister:
        """Return a register, beside the locks."""
        return NodeRegister(self.context, name, f"{self._base}/{REGISTERS}/{family.value}/{component(name)}")

    # --- administration
    # Each begins with a ``sync``, so that the answer is what the leader knew when the question came.

    async def inspect(self, name: str, family: Family) -> LockInfo:
        """Return the queue with the data of each node."""
        path = self._path(name, family)
        async with self.context.bounded():
            view = await self._view(path, family)
            replies = await self._each(
                [protocol.get(f"{path}/{position.name}", watch=False) for position in view.queue]
            )
        present = [
            (position, reply)
            for position, reply in zip(view.queue, replies, strict=True)
            if reply is not None
        ]
        entered = inside([position for position, _ in present], view.record.limit, view.record.inside)
        holders = tuple(self._holder(position, reply) for position, reply in present[:entered])
        waiters = tuple(
            Waiting(Note.decode(reply.data).label, position.mode.value, position.permits)
            for position, reply in present[entered:]
        )
        limit = view.record.limit if view.record.limit >= 0 else None
        return LockInfo(name, holders, waiters, family, limit)

    def _holder(self, position: Position, reply: Any) -> Holder:
        note = Note.decode(reply.data)
        return Holder(
            label=note.label,
            token=(note.token or reply.stat.created_zxid) * BLOCK,
            since=datetime.fromtimestamp(reply.stat.created / 1000, UTC),
            remaining=self.session.timeout,
            permits=position.permits,
            mode=position.mode.value,
            tokens=BLOCK,
            value=note.value,
        )

    async def force_release(self, name: str, family: Family, token: int | None = None) -> bool:
        """Delete the nodes of the holders, or of the one that has a token, who watch them: no other node ever has such a name."""
        path = self._path(name, family)
        async with self.context.bounded():
            while nodes := await self._of_holders(path, family, token):
                replies = await self._each([protocol.delete(node) for node in nodes])
                if any(reply is not None for reply in replies):
                    return True
        return False

    async def _of_holders(self, path: str, family: Family, token: int | None) -> list[str]:
        """Return the nodes of the holders, or of the one that has a token."""
        holders = (await self._view(path, family)).holders
        nodes = [f"{path}/{position.name}" for position in holders]
        if token is None:
            return nodes
        replies = await self._each([protocol.get(node, watch=False) for node in nodes])
        return [
            node
            for node, position, reply in zip(nodes, holders, replies, strict=True)
            if reply is not None and has_token(self._holder(position, reply), token)
        ]

    async def request_release(self, name: str, family: Family, reason: str) -> bool:
        """Write the reason into the nodes of the holders, who watch them."""
        path = self._path(name, family)
        async with self.context.bounded():
            holders = (await self._view(path, family)).holders
            return any([await self._request(f"{path}/{position.name}", reason) for position in holders])

    async def _request(self, node: str, reason: str) -> bool:
        while True:
            try:
                reply = await self.session.ask(protocol.get(node, watch=False))
                # An empty node belongs to a user of Curator, whose form it understands.
                data = replace(Note.decode(reply.data), asked=reason).encode() if reply.data else REVOKE
                await self.session.ask(protocol.put(node, data, reply.stat.version))
                return True
            except exc.BadVersion:
                continue
            except exc.NoNode:
                return False

    async def set_limit(self, name: str, limit: int) -> None:
        """Write the limit into the semaphore's node, and keep that for a day."""
        path, nodes = self._path(name, Family.SEMAPHORE), self.context.nodes
        async with self.context.bounded():
            while True:
                while not await self._write_limit(path, limit):
                    await nodes.make(path, Record(limit=limit).encode())
                if await nodes.keep(path):
                    return
                # The server has removed the unused node after the write.

    async def _write_limit(self, path: str, limit: int) -> bool:
        while True:
            view = await self._view(path, Family.SEMAPHORE)
            if view.version < 0:
                return False
            # Holders under the old limit stay holders, and inspection has to show them.
            upto = max((position.sequence for position in view.holders), default=-1)
            record = replace(view.record, limit=limit, inside=max(view.record.inside, upto))
            try:
                await self.session.ask(protocol.put(path, record.encode(), view.version))
                return True
            except exc.BadVersion:
                continue
            except exc.NoNode:
                return False

    async def names(self, pattern: str) -> list[tuple[str, Family]]:
        """Return every lock that has a node and matches the pattern; the server removes that some time after its last child."""
        folders = [f"{self._base}/{family.value}" for family in LOCK_FAMILIES]
        async with self.context.bounded():
            await self.session.ready()
            replies = await self._each([protocol.listing(folder, watch=False) for folder in folders])
        return sorted(
            (name_of(child), family)
            for family, reply in zip(LOCK_FAMILIES, replies, strict=True)
            for child in (reply.children if reply is not None else ())
            # Another program may have made a node whose name does not come from a lock's name.
            if child == component(name_of(child)) and fnmatchcase(name_of(child), pattern)
        )

    async def empty(self) -> None:
        """Delete the node of the namespace, with all below it."""
        async with self.context.bounded():
            await self.session.ready()
            await self._delete(self._base)

    async def _delete(self, path: str) -> None:
        [listed] = await self._each([protocol.listing(path, watch=False)])
        for child in listed.children if listed is not None else ():
            await self._delete(f"{path}/{child}")
        await self._each([protocol.delete(path)])

    async def _view(self, path: str, family: Family) -> _View:
        await self.session.ready()
        listed, known = await self.session.read(
            protocol.listing(path, watch=False), protocol.get(path, watch=False)
        )
        if listed is None or known is None:
            return _View([], Record(), -1)
        return _View(queue(path, family, listed.children), Record.decode(known.data), known.stat.version)

    async def _each(self, requests: Sequence[Operation]) -> list[Any]:
        """Return the replies to many requests; ``None`` where there is no such node."""
        replies: list[Any] = []
        for begin in range(0, len(requests), AT_ONCE):
            replies += await self.session.read(*requests[begin : begin + AT_ONCE])
        return replies

    async def diagnose(self) -> list[Finding]:
        """Judge the servers, and if there is a session, its timeout and the rights on the nodes of locks."""
        servers = await diagnosis.ask(self._address, self.settings.command_timeout)
        found = diagnosis.judge(self._address, servers)
        if self._opened and self.session.connected:
            wanted = self._address.options.session_timeout or self.settings.ttl
            found += diagnosis.judge_session(
                self.session.timeout, wanted, servers, forgets=self.context.nodes.expire
            )
            async with self.context.bounded():
                for step in reversed(parents(self._base)):
                    try:
                        reply = await self.session.ask(protocol.rights(step))
                    except (exc.NoNode, exc.NoAuth):
                        continue
                    found.append(diagnosis.judge_rights(step, reply.acl))
                    break
        return found
