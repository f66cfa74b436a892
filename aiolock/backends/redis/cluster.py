"""The Redis backend on a cluster: the same steps, each sent to the node that serves the lock's slot.

What differs from one server is here: there are many connections, what was one call for many locks is one call for each,
and after a slot has moved everybody looks again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from aiolock.backends.redis.backend import PROBE, SCRIPTS, RedisBackend
from aiolock.backends.redis.capabilities import Verdict, is_allowed, judge, probe
from aiolock.backends.redis.claim import RedisClaim
from aiolock.backends.redis.cluster_doctor import examine
from aiolock.backends.redis.endpoint import Endpoint
from aiolock.backends.redis.format import SCRIPT as FORMAT
from aiolock.backends.redis.forms import ENTER, RELEASE, Forms
from aiolock.backends.redis.link import Link
from aiolock.backends.redis.listing import busy
from aiolock.backends.redis.node import Node
from aiolock.backends.redis.pushes import Pushes
from aiolock.backends.redis.recent import Recent
from aiolock.backends.redis.renewals import Renewals
from aiolock.backends.redis.router import Router, in_cluster
from aiolock.backends.redis.seeds import Seeds
from aiolock.backends.redis.slots import SLOTS, key_in, shown, slot_of
from aiolock.contract import Claim, Family, Finding, News, Notice, Renewal, Settings
from aiolock.errors import BackendError, BackendRefused, BackendUnavailable, ConfigError, UnsafeBackend
from aiolock.logs import Log, get_logger
from aiolock.tasks import start

__all__ = ["ClusterBackend"]

log: Log = get_logger("aiolock")

SHARE = 0.5
"""Of the time to open, for nodes that do not answer while others do."""
SETTLE = 0.05
"""Seconds in which what was told of moved slots is put together."""
SETTINGS = frozenset({"no-eviction", "survives-restart", "push"})
"""Promises that are a matter of settings and rights."""
FEW = 16
"""So many holds are asked for one by one when their slots have moved; else all are."""


class ClusterBackend(RedisBackend):
    """A Redis or Valkey Cluster, version 6.2 or later.

    :param url: ``redis+cluster://[user:password@]host:7000,host:7001``, or ``rediss+cluster://…`` (TLS): some of the nodes.
    :param options: those of a connection; :class:`Endpoint` lists them.
    """

    name = "Redis Cluster"

    def __init__(self, url: str, **options: Any) -> None:
        if "client" in options:
            raise ConfigError("a cluster is addressed by its nodes, not by an application's client")
        super().__init__(url, **options)

    def _where(self, url: str | None, options: dict[str, Any]) -> Endpoint:
        self._seeds = Seeds(str(url), **options)
        return self._seeds

    def bind(self, settings: Settings) -> None:
        """Work out the names of keys and channels, and who sends what where."""
        super().bind(settings)
        self._forms = Forms(self._prefix, self._process, (in_cluster(ENTER), in_cluster(RELEASE)))
        # What is in one call has to be in one slot, and two locks seldom are.
        self.wakeups.batch = self._many.wakeups.batch = 1
        self._recent = self.recent = Recent(settings.clock)
        self._moved: set[int] = set()
        self._moving: asyncio.TimerHandle | None = None
        self._router: Router | None = None

    # --- opening and closing

    async def _open(self) -> None:
        settings = self.settings
        limit = settings.command_timeout
        self._publishes, self._opened = True, False
        router = self._router = Router(
            self._seeds,
            clock=settings.clock,
            command_timeout=limit,
            channel=self._channels + self._process,
            scripts=SCRIPTS,
            on_node=self._new,
            on_up=self._node_up,
            on_moved=self._slots_moved,
            on_change=self._change,
            verify=self._format.verify,
        )
        self._format.verified = self._verified
        self._renewals = Renewals(self, router)
        soon = asyncio.get_running_loop().time() + SHARE * limit
        await router.nodes.open()
        self._wire = router
        await _some(router, soon)
        version = router.call("EVAL", FORMAT.source, "1", *self._format.words)
        promised, away = await self._promises(soon + (1 - SHARE) * limit / 2)
        await self._check_format(version, wait=not away)
        for node, why in away:
            text = "%s: %s cannot be used, and its locks cannot be had until it can: %s"
            log.warning(text, self._endpoint, shown(node.place), why or "it does not answer")
        # Of whom nothing is known, nothing is promised that is not true of every server.
        self.capabilities = promised - SETTINGS if away else promised
        self._opened = True
        self._change()
        if away:
            router.nodes.look()

    async def _promises(self, soon: float) -> tuple[frozenset[str], list[tuple[Node, BackendError | None]]]:
        """What all nodes promise that say so until ``soon``, and those that do not, with the reason."""
        loop = asyncio.get_running_loop()
        asked = {
            node: start(self._judged(node), "aiolock-redis-cluster") for node in self._nodes if node.ready
        }
        try:
            if asked:
                await asyncio.wait(asked.values(), timeout=max(0.0, soon - loop.time()))
        finally:
            for task in asked.values():
                task.cancel()
            await asyncio.gather(*asked.values(), return_exceptions=True)
        verdicts: list[Verdict] = []
        away: list[tuple[Node, BackendError | None]] = []
        for node in self._nodes:
            judged = asked.get(node)
            error = node.connection.failure if judged is None else None
            if judged is not None and not judged.cancelled():
                found = judged.exception()
                if found is None:
                    verdicts.append(judged.result())
                    continue
                if not isinstance(found, BackendError) or not found.retryable:
                    raise found
                error = found
            away.append((node, error))
        if not verdicts:
            if self._trouble is not None:
                # They do answer: that the cluster is down, for example.
                raise BackendUnavailable(f"{self._endpoint}: {self._trouble}") from self._trouble
            why = away[0][1] if away else None
            raise BackendUnavailable(
                f"{self._endpoint}: none of the addresses that its nodes announce can be used: {why or 'nobody answers'}"
            ) from why
        for warning in dict.fromkeys(warning for verdict in verdicts for warning in verdict.warnings):
            log.warning("%s: %s", self._endpoint, warning)
        return frozenset.intersection(*(verdict.capabilities for verdict in verdicts)), away

    async def _judged(self, node: Node) -> Verdict:
        call, channel = node.connection.call, f"{self._channels}{self._process}@"
        publishing = call("PUBLISH", channel, "")
        info = await probe(call, PROBE, key_in(node.slots or range(SLOTS), f"{self._prefix}probe:"))
        if not await is_allowed(publishing):
            self._publishes = False
        return judge(info, pushed=self._publishes and node.subscriber.denied is None, cluster=True)

    async def _judge_later(self, node: Node) -> None:
        """What a node does not promise that came when others had promised it."""
        with contextlib.suppress(BackendUnavailable):
            try:
                missing = self.capabilities - (await self._judged(node)).capabilities
            except BackendRefused as error:
                log.warning(
                    "%s: %s has taken over locks, and refuses them: %s",
                    self._endpoint,
                    shown(node.place),
                    error,
                )
                return
            if missing:
                text = "%s: %s has taken over locks, and does not promise %s as the others do"
                log.warning(text, self._endpoint, shown(node.place), ", ".join(sorted(missing)))

    async def _check_format(self, version: asyncio.Future[Any], *, wait: bool) -> None:
        """Refuse a cluster with data of another format; raises :class:`UnsafeBackend`.

        The node that has the key may be away: it is asked when it comes back, before anything else.
        """
        if wait or version.done():
            with contextlib.suppress(*(() if wait else (BackendUnavailable,))):
                self._format.check(await version)
                return
        log.warning(
            "%s: the node that knows the format of the data of this namespace is away, and is asked when it is back",
            self._endpoint,
        )

    def _verified(self, error: UnsafeBackend | None) -> None:
        if self._router is not None:
            self._router.refusal = error

    @property
    def _trouble(self) -> BackendError | None:
        return None if self._router is None else self._router.trouble

    @property
    def _nodes(self) -> list[Node]:
        return [] if self._router is None else list(self._router.nodes.all.values())

    def _links(self) -> list[Link]:
        return [node.connection for node in self._nodes]

    async def aclose(self) -> None:
        """Close all connections."""
        # A timer that is due while the connections are closed has nothing to ask any more.
        self.wakeups.close()
        self._many.wakeups.close()
        if self._moving is not None:
            self._moving.cancel()
            self._moving = None
        router, self._router, self._wire = self._router, None, None
        if router is not None:
            await router.aclose()
        await super().aclose()

    # --- what nodes and slots do

    def _new(self, node: Node) -> None:
        node.connection.outages = node.subscriber.outages = self.settings.outages
        node.on_message = Pushes(self, self._notices, node.pairing, self._documents).heard

    def _change(self) -> None:
        """A connection has come or gone."""
        nodes = self._nodes
        self._hear(pushed=self._publishes and all(node.subscriber.subscribed for node in nodes if node.ready))
        self._look_at_everything()

    def _node_up(self, node: Node) -> None:
        # It may be another server now, or have lost what it knew.
        self._doubt(node.slots)
        router = self._router
        if self._opened and router is not None and node.connection.generation == 1:
            router.nodes.spawn(self._judge_later(node))

    def _slots_moved(self, slots: set[int]) -> None:
        # Slots move one after the other, and everybody's commands tell of it: that is one occasion.
        self._moved |= slots
        if self._moving is None and self._opened:
            self._moving = asyncio.get_running_loop().call_later(SETTLE, self._settle)

    def _settle(self) -> None:
        moved, self._moved, self._moving = self._moved, set(), None
        self._doubt(moved)
        # Not at everything: there may be thousands who wait, and in a resharding there is such an occasion every moment.
        for wakeups in (self.wakeups, self._many.wakeups):
            wakeups.soon(lambda key: slot_of(key.encode()) in moved)
        self._documents.look()

    def _doubt(self, slots: AbstractSet[int]) -> None:
        """Who serves these now may not know of everything."""
        for claim, keep in self._recent.again():
            if slot_of(claim.key.encode()) in slots:
                claim.leave_again(keep)
        held = [claim for claim in self.claims.values() if slot_of(claim.key.encode()) in slots]
        if len(held) > FEW:
            self._notices.put(Notice(News.DOUBT))
        else:
            for claim in held:
                self._notices.put(Notice(News.DOUBT, claim))

    # --- claims

    def learn(self, server: int, sent: float) -> None:
        """Nothing: it may be the time of any node; see ``node.py``."""

    async def renew(self, claims: Sequence[Claim]) -> list[Renewal]:
        """One call for each; who does not answer keeps nobody waiting for the others."""
        return await self._renewals.renew([claim for claim in claims if isinstance(claim, RedisClaim)])

    # --- what people ask

    async def names(self, pattern: str) -> list[tuple[str, Family]]:
        """Every node that has slots is asked."""
        calls = [node.connection.call for node in self._nodes if node.slots]
        return await busy(self, calls, self._prefix, pattern)

    async def diagnose(self) -> list[Finding]:
        """Every node, and who serves what."""
        return await examine(self._seeds, PROBE, self.settings)


async def _some(router: Router, soon: float) -> None:
    """Until every node is connected, or ``soon`` has come and one is; raises what one of them refuses."""
    loop = asyncio.get_running_loop()
    left = {first for node in router.nodes.all.values() for first in node.begun}
    while left:
        some = any(node.settled for node in router.nodes.all.values())
        wait = max(0.0, soon - loop.time()) if some or loop.time() < soon else None
        done, left = await asyncio.wait(left, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
        for one in done:
            one.result()
        if not done and some:
            return
