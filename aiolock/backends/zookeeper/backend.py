"""Claims on a ZooKeeper ensemble: one session for all of them, and what its state means for each."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from aiozk import exc

from aiolock.backends.zookeeper import findings, wire
from aiolock.backends.zookeeper.address import parse
from aiolock.backends.zookeeper.administration import Desk
from aiolock.backends.zookeeper.audience import Audience
from aiolock.backends.zookeeper.bounded import Bounded
from aiolock.backends.zookeeper.claim import QueueClaim
from aiolock.backends.zookeeper.document import NodeDocument
from aiolock.backends.zookeeper.format import FORMAT, agree
from aiolock.backends.zookeeper.janitor import Janitor
from aiolock.backends.zookeeper.limits import Limits
from aiolock.backends.zookeeper.node import BLOCK
from aiolock.backends.zookeeper.outcomes import InDoubt, NotSent, translate
from aiolock.backends.zookeeper.parents import Parents
from aiolock.backends.zookeeper.paths import component, parents
from aiolock.backends.zookeeper.permits import PermitsClaim
from aiolock.backends.zookeeper.promises import ALWAYS, CONFIG, promises
from aiolock.backends.zookeeper.rules import RULES
from aiolock.backends.zookeeper.session import Session
from aiolock.backends.zookeeper.shared import ReadWriteClaim
from aiolock.backends.zookeeper.simple import SimpleClaim
from aiolock.backends.zookeeper.vigil import Vigil
from aiolock.contract import (
    Backend,
    Bid,
    Claim,
    Family,
    Finding,
    Grant,
    LockInfo,
    Mode,
    Notice,
    Renewal,
    Settings,
)
from aiolock.errors import BackendUnavailable, UnsupportedKind

__all__ = ["ZooKeeperBackend"]

FEW = 1000
"""Bids that are remembered."""
DOCUMENTS = "document"
"""Beside the families of locks."""


class ZooKeeperBackend(Backend):
    """``zookeeper://h1:2181,h2:2181,h3:2181/chroot``, with ``user:password@`` for digest authentication.

    :param session_timeout: seconds to ask for, instead of the client's ttl; the server has the last word.
    :param tick_time: seconds of the server's ``tickTime``, where its ``minSessionTimeout`` is below two ticks.
    :param acl: ``"open"``: anybody; ``"creator"``: the authenticated user alone.
    :param recipe: ``"queue"``, or ``"simple"``: one node that all wait for, in no order.
    :param on_suspend: ``"hold"``: without a connection a hold lasts until it might end; ``"lost"``: it ends at once.
    :param heartbeat: ``"sync"``, which the leader answers alone; ``"write"``: a quorum has to.
    :param tls: ``True``, or a context; ``tls_ca``, ``tls_cert`` and ``tls_key`` name files in PEM.
    """

    name = "zookeeper"
    capabilities = ALWAYS
    format = FORMAT

    session: Session
    janitor: Janitor
    desk: Desk
    limits: Limits
    parents: Parents

    def __init__(
        self,
        url: str,
        *,
        session_timeout: float | None = None,
        tick_time: float | None = None,
        acl: str | None = None,
        recipe: str | None = None,
        on_suspend: str | None = None,
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
            recipe=recipe,
            on_suspend=on_suspend,
            heartbeat=heartbeat,
            tls=tls,
            tls_ca=tls_ca,
            tls_cert=tls_cert,
            tls_key=tls_key,
        )
        self.acl = wire.CREATOR if self._address.options.acl == "creator" else wire.OPEN
        self._simple = self._address.options.recipe == "simple"
        self.random = Random()
        self.vigil = Vigil()
        self.audience = Audience(cautious=self._address.options.on_suspend == "lost")
        self._lasting: dict[Bid, Bid] = {}
        """What bids have become lately: a lock asks with the same one again and again."""
        self._opened = False
        self._connected = False
        self.may_write = True
        """Whether we may write to the nodes of locks, for all that we know."""
        self.forgets = True
        """Whether the servers have nodes with a time to live, for all that we know."""

    def __repr__(self) -> str:
        return f"<ZooKeeperBackend {self._address}>"

    def bind(self, settings: Settings) -> None:
        """Take over what the client decides."""
        super().bind(settings)
        self._base = f"{self._address.chroot}/{component(settings.namespace)}"

    async def open(self) -> None:
        """Begin a session, check the version of the data format, and ask who belongs to the ensemble."""
        self.session = Session(
            self._address,
            self._address.options.session_timeout or self.settings.ttl,
            patience=self.settings.command_timeout,
            clock=self.settings.clock,
            random=self.random,
            on_change=self._changed,
            on_begin=lambda send: agree(send, self._base, self.acl, self.format),
        )
        self.janitor = Janitor(self.session)
        self.desk = Desk(self.session, simple=self._simple, block=BLOCK)
        self.limits = Limits(self)
        self.parents = Parents(self.session, self.acl)
        self._opened = True
        try:
            async with asyncio.timeout(self.settings.command_timeout):
                await self.session.start()
                config = await self._config()
        except exc.ZKError as error:
            raise translate(error) from error
        except TimeoutError:
            cause = self.session.why()
            raise BackendUnavailable(
                f"no server of {self._address} gave a session within {self.settings.command_timeout:g} s: "
                f"{cause or 'no answer'!r}"
            ) from cause
        self.capabilities = promises(config, len(self._address.hosts), simple=self._simple)

    async def _config(self) -> bytes | None:
        """The members of the ensemble, as its servers show them; ``None`` if we may not know."""
        while True:
            await self.session.ready()
            try:
                reply = await self.session.ask(wire.get(CONFIG, watch=False))
            except (exc.NoAuth, exc.NoNode):
                return None
            except (InDoubt, NotSent):
                # Over another connection, another server answers as well.
                if self.session.closing:
                    raise
                continue
            return bytes(reply.data or b"")

    async def aclose(self) -> None:
        """End the session, and with it every node that is left."""
        self.vigil.close()
        if self._opened:
            await self.janitor.aclose()
            await self.session.close()
        self.audience.claims.clear()

    def bounded(self) -> Bounded:
        """Within the command timeout, with errors of ours instead of aiozk's."""
        return Bounded(self._address, self.settings.command_timeout)

    # --- claims

    def claim(self, bid: Bid) -> QueueClaim:
        """A claim with a uuid of its own."""
        mode = bid.kind.mode
        if self._simple and mode is not Mode.MUTEX:
            raise UnsupportedKind(f"{mode.value} lock", self.name, "recipe=simple has the mutex only")
        recipe = SimpleClaim if self._simple else _RECIPES[mode]
        return recipe(self, bid, self._path(bid.name, bid.kind.family), RULES[mode])

    def _path(self, name: str, family: Family) -> str:
        return f"{self._base}/{family.value}/{component(name)}"

    def path(self, name: str) -> str:
        """Where something that does not belong to locks is, below what the address says."""
        return self._address.chroot + name

    def lasting(self, bid: Bid) -> Bid:
        """The same bid, with the time for which the session keeps what it is granted."""
        known = self._lasting.get(bid)
        if known is None or known.ttl != self.session.timeout:
            if len(self._lasting) > FEW:
                self._lasting.clear()
            known = self._lasting[bid] = replace(bid, ttl=self.session.timeout)
        return known

    async def renew(self, claims: Sequence[Claim]) -> list[Renewal]:
        """From what the heartbeats of the session have proved; no request."""
        return [self._renewed(claim) for claim in claims if isinstance(claim, QueueClaim)]

    def _renewed(self, claim: QueueClaim) -> Renewal:
        if claim.owner != self.session.session_id:
            return "session"
        if claim.hold is None:
            return "force-released"
        claim.hold.look(own=True)
        if not self.session.connected:
            return BackendUnavailable("there is no connection; the session lasts until its deadline")
        return Grant(0, 0, self.session.deadline, claim.demanded_at is not None)

    async def notice(self) -> Notice:
        """The end of the session or of a node, or a session that is certain again."""
        return await self.audience.notice()

    def _changed(self) -> None:
        outages, session = self.settings.outages, self.session
        if outages is not None and session.connected is not self._connected:
            self._connected = session.connected
            if self._connected:
                outages.up(self, str(self._address))
            elif not session.closing:
                outages.down(self, str(self._address), "the connection broke")
        self.audience.changed(self.session)

    # --- what people ask

    async def inspect(self, name: str, family: Family) -> LockInfo:
        """The queue, as the leader knows it, with the data of each node."""
        async with self.bounded():
            return await self.desk.inspect(self._path(name, family), name, family)

    async def force_release(self, name: str, family: Family) -> bool:
        """Delete the nodes of whoever is inside."""
        async with self.bounded():
            return await self.desk.force_release(self._path(name, family), family)

    async def request_release(self, name: str, family: Family, reason: str) -> bool:
        """Write it into the nodes of whoever is inside."""
        async with self.bounded():
            return await self.desk.request_release(self._path(name, family), family, reason)

    async def set_limit(self, name: str, limit: int) -> None:
        """Write it into the semaphore's node, and keep that for a day."""
        if self._simple:
            raise UnsupportedKind("semaphore", self.name, "recipe=simple has the mutex only")
        path = self._path(name, Family.SEMAPHORE)
        async with self.bounded():
            await self.limits.set(path, limit)

    def keep(self, path: str) -> None:
        """A semaphore whose number of permits was set is used."""
        self.limits.used(path)

    def document(self, name: str, family: Family) -> NodeDocument:
        """A node beside those of the locks."""
        return NodeDocument(self, f"{self._base}/{DOCUMENTS}/{family.value}/{component(name)}")

    async def names(self, pattern: str) -> list[tuple[str, Family]]:
        """Every node with a queue."""
        async with self.bounded():
            return await self.desk.names(self._base, pattern)

    async def diagnose(self) -> list[Finding]:
        """What the servers say of themselves, and what the session and the rights are."""
        servers = await findings.ask(self._address, self.settings.command_timeout)
        found = findings.judge(self._address, servers)
        if self._opened and self.session.connected:
            wanted = self._address.options.session_timeout or self.settings.ttl
            found += findings.judge_session(self.session.timeout, wanted, servers, forgets=self.forgets)
            async with self.bounded():
                for step in reversed(parents(self._base)):
                    try:
                        reply = await self.session.ask(wire.rights(step))
                    except (exc.NoNode, exc.NoAuth):
                        continue
                    found.append(findings.judge_rights(step, reply.acl))
                    break
        return found


_RECIPES: dict[Mode, type[QueueClaim]] = {
    Mode.MUTEX: QueueClaim,
    Mode.READ: ReadWriteClaim,
    Mode.WRITE: ReadWriteClaim,
    Mode.PERMITS: PermitsClaim,
}
