"""Claims on a ZooKeeper ensemble: one session for all of them, and what its state means for each."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from random import Random
from typing import Any

from aiozk import exc

from aiolock.backends.zookeeper import wire
from aiolock.backends.zookeeper.address import parse
from aiolock.backends.zookeeper.claim import BLOCK, QueueClaim
from aiolock.backends.zookeeper.janitor import Janitor
from aiolock.backends.zookeeper.paths import component, parents
from aiolock.backends.zookeeper.rules import RULES, SIMPLE, queue
from aiolock.backends.zookeeper.session import Session
from aiolock.backends.zookeeper.simple import SimpleClaim
from aiolock.contract import (
    Backend,
    Bid,
    Claim,
    Family,
    Grant,
    Holder,
    LockInfo,
    News,
    Notice,
    Renewal,
    Settings,
    Waiting,
)
from aiolock.errors import BackendUnavailable, LossReason, UnsupportedKind
from aiolock.notices import Notices

__all__ = ["ZooKeeperBackend"]


class ZooKeeperBackend(Backend):
    """``zookeeper://h1:2181,h2:2181,h3:2181/chroot``, with ``user:password@`` for digest authentication.

    :param session_timeout: seconds to ask for, instead of the client's ttl; the server has the last word.
    :param tick_time: seconds of the server's ``tickTime``, where its ``minSessionTimeout`` is below two ticks.
    :param acl: ``"open"``: anybody; ``"creator"``: the authenticated user alone.
    :param recipe: ``"queue"``, or ``"simple"``: one node that all wait for, in no order.
    :param on_suspend: ``"hold"``: without a connection a hold lasts until it might end; ``"lost"``: it ends at once.
    :param tls: ``True``, or a context; ``tls_ca``, ``tls_cert`` and ``tls_key`` name files in PEM.
    """

    name = "zookeeper"
    capabilities = frozenset(
        {"exclusion", "fencing", "fifo", "push", "survives-failover", "survives-restart"}
    )

    session: Session
    janitor: Janitor

    def __init__(
        self,
        url: str,
        *,
        session_timeout: float | None = None,
        tick_time: float | None = None,
        acl: str | None = None,
        recipe: str | None = None,
        on_suspend: str | None = None,
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
            tls=tls,
            tls_ca=tls_ca,
            tls_cert=tls_cert,
            tls_key=tls_key,
        )
        self.acl = wire.CREATOR if self._address.options.acl == "creator" else wire.OPEN
        self._simple = self._address.options.recipe == "simple"
        if self._simple:
            self.capabilities -= {"fifo"}
        self.random = Random()
        self._claims: set[QueueClaim] = set()
        """Those that have, or may have, a node."""
        self._notices = Notices()
        self._opened = False

    def __repr__(self) -> str:
        return f"<ZooKeeperBackend {self._address}>"

    def bind(self, settings: Settings) -> None:
        """Take over what the client decides."""
        super().bind(settings)
        self._base = f"{self._address.chroot}/{component(settings.namespace)}"

    async def open(self) -> None:
        """Begin a session."""
        self.session = Session(
            self._address,
            self._address.options.session_timeout or self.settings.ttl,
            patience=self.settings.command_timeout,
            clock=self.settings.clock,
            random=self.random,
            on_change=self._changed,
        )
        self.janitor = Janitor(self.session)
        self._opened = True
        try:
            async with asyncio.timeout(self.settings.command_timeout):
                await self.session.start()
        except TimeoutError:
            cause = self.session.why()
            raise BackendUnavailable(
                f"no server of {self._address} gave a session within {self.settings.command_timeout:g} s: "
                f"{cause or 'no answer'!r}"
            ) from cause

    async def aclose(self) -> None:
        """End the session, and with it every node that is left."""
        if self._opened:
            await self.janitor.aclose()
            await self.session.close()
        self._claims.clear()

    @asynccontextmanager
    async def bounded(self) -> AsyncIterator[None]:
        """Within the command timeout, with errors of ours instead of aiozk's."""
        try:
            async with asyncio.timeout(self.settings.command_timeout):
                yield
        except exc.ZKError as error:
            raise wire.translate(error) from error
        except TimeoutError as error:
            raise BackendUnavailable(
                f"{self._address} did not answer within {self.settings.command_timeout:g} s"
            ) from error

    # --- claims

    def claim(self, bid: Bid) -> QueueClaim:
        """A claim with a uuid of its own."""
        rule = RULES.get(bid.kind.mode)
        if rule is None:
            raise UnsupportedKind(f"{bid.kind.mode.value} lock", self.name, "this version has the mutex only")
        recipe = SimpleClaim if self._simple else QueueClaim
        return recipe(self, bid, self._path(bid.name, bid.kind.family), rule)

    def _path(self, name: str, family: Family) -> str:
        return f"{self._base}/{family.value}/{component(name)}"

    def register(self, claim: QueueClaim) -> None:
        """From now on the claim hears of changes of the session."""
        self._claims.add(claim)

    def forget(self, claim: QueueClaim) -> None:
        """The claim is over."""
        self._claims.discard(claim)

    def lost(self, claim: QueueClaim, reason: LossReason) -> None:
        """A hold has ended without us."""
        claim.end()
        self._notices.put(Notice(News.LOST, claim, reason))

    async def make_parents(self, path: str) -> None:
        """Make whatever is missing on the way to ``path``, and itself, as containers."""
        try:
            await self.session.ask(wire.container(path, self.acl))
        except exc.NodeExists:
            return
        except exc.NoNode:
            await self._make_all(parents(path))

    async def _make_all(self, path: list[str]) -> None:
        with self.session.asked(*(wire.container(step, self.acl) for step in path)) as replies:
            answers = await asyncio.gather(*replies, return_exceptions=True)
        # Where we may not create, an administrator has: only the last answer counts, and the first refusal says why.
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        if isinstance(answers[-1], exc.NodeExists) or not isinstance(answers[-1], BaseException):
            return
        raise next(error for error in errors if not isinstance(error, exc.NodeExists))

    async def renew(self, claims: Sequence[Claim]) -> list[Renewal]:
        """From what the heartbeats of the session have proved; no request."""
        return [self._renewed(claim) for claim in claims if isinstance(claim, QueueClaim)]

    def _renewed(self, claim: QueueClaim) -> Renewal:
        if claim.owner != self.session.session_id:
            return "session"
        if not claim.held:
            return "force-released"
        if not self.session.connected:
            return BackendUnavailable("there is no connection; the session lasts until its deadline")
        return Grant(0, 0, self.session.deadline, claim.demanded_at is not None)

    async def notice(self) -> Notice:
        """The end of the session or of a node, or a session that is certain again."""
        return await self._notices.get()

    def _changed(self) -> None:
        session = self.session
        if session.connected:
            self._notices.put(Notice(News.DOUBT))
        for claim in list(self._claims):
            cautious = not session.connected and self._address.options.on_suspend == "lost"
            if claim.held and (cautious or claim.owner != session.session_id):
                self.lost(claim, "session")
            elif claim.held:
                claim.look()
            else:
                claim.wake()

    # --- what people ask

    async def inspect(self, name: str, family: Family) -> LockInfo:
        """The queue, as the leader knows it, with the data of each node."""
        path = self._path(name, family)
        async with self.bounded():
            await self.session.ready()
            names = await self._contenders(path)
            with self.session.asked(*(wire.get(f"{path}/{name}", watch=False) for name in names)) as replies:
                answers: list[Any] = await asyncio.gather(*replies, return_exceptions=True)
        present = []
        for answer in answers:
            if isinstance(answer, exc.NoNode):
                continue
            if isinstance(answer, BaseException):
                raise wire.translate(answer) from answer  # type: ignore[arg-type]
            present.append(answer)
        holders = tuple(
            Holder(
                label=_label(reply),
                token=reply.stat.created_zxid * BLOCK,
                since=datetime.fromtimestamp(reply.stat.created / 1000, UTC),
                remaining=self.session.timeout,
            )
            for reply in present[:1]
        )
        waiters = tuple(Waiting(_label(reply)) for reply in present[1:])
        return LockInfo(name, holders, waiters)

    async def _contenders(self, path: str) -> list[str]:
        """Their names in order, as the leader knows them; of the simple recipe, only the holder can be seen."""
        with self.session.asked(wire.sync(), wire.listing(path, watch=False)) as (fresh, listed):
            await fresh
            try:
                children: list[str] = (await listed).children
            except exc.NoNode:
                return []
        if self._simple:
            return [SIMPLE] if SIMPLE in children else []
        return [place.name for place in queue(path, children)]

    async def force_release(self, name: str, family: Family) -> bool:
        """Delete the first node; its owner watches it."""
        path = self._path(name, family)
        async with self.bounded():
            await self.session.ready()
            while names := await self._contenders(path):
                try:
                    await self.session.ask(wire.delete(f"{path}/{names[0]}"))
                except exc.NoNode:
                    continue
                return True
        return False


def _label(reply: Any) -> str:
    # A second line is the mark of the simple recipe.
    return bytes(reply.data or b"").decode("utf-8", "replace").partition("\n")[0]
