"""Server of a Redis Cluster backend: the connections to its nodes, and its diagnosis."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

from aiolock.backends.diagnosis import failure, note, ok
from aiolock.backends.redis.admin import Call
from aiolock.backends.redis.cluster.nodes import Discovery, Node, NodeContext
from aiolock.backends.redis.cluster.router import Router
from aiolock.backends.redis.cluster.slots import SLOTS, Layout, Seeds, key_in, slot_of
from aiolock.backends.redis.commands import PROBE, PUBLISH, Format, Reply, Script, encode
from aiolock.backends.redis.connection import Pairing
from aiolock.backends.redis.diagnosis import Verdict, assess, examine, may_publish, probe
from aiolock.backends.redis.server import Keyed, RedisServer
from aiolock.backends.survey import survey
from aiolock.backends.transport import Transport
from aiolock.backends.urls import Host
from aiolock.core.backend import Settings
from aiolock.core.logs import Log, get_logger
from aiolock.errors import (
    BackendError,
    BackendRefused,
    BackendUnavailable,
    ConfigError,
    UnsafeBackend,
)
from aiolock.types import Finding, Level

__all__ = ["ClusterServer", "diagnose", "summed_up"]

log: Log = get_logger("aiolock")

SHARE = 0.5
"""Share of the time to open that is left to nodes that do not answer while others do."""
SETTLE = 0.05
"""Seconds for which reports of moved slots are collected."""
SETTINGS = frozenset({"no-eviction", "survives-restart", "push"})
"""Capabilities that depend on settings and rights."""


class ClusterServer(RedisServer):
    """A Redis or Valkey Cluster, version 6.2 or later: each command is sent to the node that serves the lock's slot.

    :param url: ``redis+cluster://[user:password@]host:7000,host:7001``, or ``rediss+cluster://…`` (TLS): some of the nodes.
    :param options: those of a connection; :class:`Endpoint` lists them.
    """

    endpoint: Seeds

    def __init__(self, url: str, **options: Any) -> None:
        if "client" in options:
            raise ConfigError("a cluster is addressed by its nodes, not by an application's client")
        super().__init__(self._where(url, options))
        self._moved: set[int] = set()
        self._moving: asyncio.TimerHandle | None = None
        self._publishes, self._opened = True, False

    def _where(self, url: str, options: dict[str, Any]) -> Seeds:
        return Seeds(str(url), **options)

    # --- opening and closing

    def _connect(self) -> None:
        usage = self._usage
        context = NodeContext(
            options=self._options,
            prefix=usage.prefix,
            channel=usage.channel,
            scripts=usage.scripts,
            verify=None if usage.format is None else usage.format.verify,
            on_message=self._message,
            on_up=self._node_up,
            on_moved=self._slots_moved,
            on_change=self._change,
        )
        self.router = Router(self.endpoint, context)
        self.issue = self.router.issue
        self.confirm = self._confirmed if self.endpoint.replicas else None

    async def _open(self) -> None:
        router, limit = self.router, self._limit
        self._publishes = True
        soon = asyncio.get_running_loop().time() + SHARE * limit
        await router.open()
        await _some(router, soon)
        data = self._usage.format
        version = None if data is None else router.issue(encode(*data.question))
        promised, away = await self._probe_capabilities(soon + (1 - SHARE) * limit / 2)
        if data is not None and version is not None:
            await self._check_format(data, version, wait=not away)
        for node, why in away:
            text = "%s: %s cannot be used, and its locks cannot be had until it can: %s"
            log.warning(text, self.endpoint, node.host, why or "it does not answer")
        # Of an unknown node only that is promised which is true of every server.
        self.capabilities = promised - SETTINGS if away else promised
        self._opened = True
        self._change()
        if away:
            router.nodes.discover()

    async def _probe_capabilities(
        self, soon: float
    ) -> tuple[frozenset[str], list[tuple[Node, BackendError | None]]]:
        """Return the common capabilities of all nodes that answer until ``soon``, and the others with the reason."""
        ready = [node for node in self._nodes if node.ready]
        left = soon - asyncio.get_running_loop().time()
        asked = dict(zip(ready, await survey(map(self._judged, ready), left), strict=True))
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
            if (trouble := self.router.trouble) is not None:
                # The nodes do answer: that the cluster is down, for example.
                raise BackendUnavailable(f"{self.endpoint}: {trouble}") from trouble
            why = away[0][1] if away else None
            raise BackendUnavailable(
                f"{self.endpoint}: none of the addresses that its nodes announce can be used: {why or 'none answers'}"
            ) from why
        for warning in dict.fromkeys(warning for verdict in verdicts for warning in verdict.warnings):
            log.warning("%s: %s", self.endpoint, warning)
        return frozenset.intersection(*(verdict.capabilities for verdict in verdicts)), away

    async def _judged(self, node: Node) -> Verdict:
        call = node.connection.call
        key = key_in(node.slots or range(SLOTS), f"{self._usage.prefix}probe:")
        publishing = call("EVAL", PUBLISH.source, "1", key, f"{self._usage.channel}@")
        info = await probe(call, key, self._usage.probe)
        publishes = await may_publish(publishing)
        self._publishes = self._publishes and bool(publishes)
        if publishes is None and not self._opened:
            self._usage.on_mute()
        if node.barriers is not None:
            await node.barriers.check()
        pushed = self._publishes and node.subscriber.denied is None
        if self._usage.format is None:
            # Waiters poll in any case, so this is no loss.
            return assess(info, pushed=True, cluster=True)
        return assess(info, pushed=pushed, mute=publishes is None, cluster=True)

    async def _judge_later(self, node: Node) -> None:
        """Warn if a node that came after the opening lacks a capability that was promised."""
        text = "%s: %s has taken over locks, and %s"
        try:
            missing = self.capabilities - (await self._judged(node)).capabilities
        except BackendRefused as error:
            log.warning(text, self.endpoint, node.host, f"refuses them: {error}")
        except BackendUnavailable:
            pass
        else:
            if missing:
                what = f"does not promise {', '.join(sorted(missing))} as the others do"
                log.warning(text, self.endpoint, node.host, what)

    async def _check_format(self, data: Format, version: asyncio.Future[Any], *, wait: bool) -> None:
        """Refuse a cluster with data of another format; raises :class:`UnsafeBackend`.

        The node that has the key may be away: it is asked when it comes back, before anything else.
        """
        if wait or version.done():
            with contextlib.suppress(*(() if wait else (BackendUnavailable,))):
                data.check(await version)
                return
        log.warning(
            "%s: the node that knows the format of the data of this namespace is away, and is asked when it is back",
            self.endpoint,
        )

    def verified(self, error: UnsafeBackend | None) -> None:
        """Have every command refused."""
        self.router.refusal = error

    @property
    def _nodes(self) -> list[Node]:
        return list(self.router.nodes.all.values())

    def _transports(self) -> list[Transport]:
        return [node.connection for node in self._nodes]

    async def aclose(self) -> None:
        """Close all connections. Cancelling it may leave some open, for another call."""
        self._opened = False
        if self._moving is not None:
            self._moving.cancel()
            self._moving = None
        await self.router.aclose()

    # --- nodes and slots

    def _change(self) -> None:
        """Check all waiters: a connection has come or gone."""
        pushed = self._publishes and all(node.subscriber.subscribed for node in self._nodes if node.ready)
        # The channel of a node has its id: a message by another node's clock is not received.
        self._usage.on_push("" if pushed else None)

    def _message(self, node: Node, payload: bytes) -> None:
        def pairing_of(claim: Keyed) -> Pairing | None:
            # A node that has lost the slot may not know it yet.
            return node.connection.pairing if self.router.node(claim.key) is node else None

        self._usage.on_message(pairing_of, payload)

    def _node_up(self, node: Node) -> None:
        # It may be another server now, or have lost data.
        self._doubt(node.slots)
        if self._opened and node.connection.generation == 1:
            self.router.nodes.spawn(self._judge_later(node))

    def _slots_moved(self, slots: set[int]) -> None:
        # Slots move one after the other, and many commands report it: that is one occasion.
        self._moved |= slots
        if self._moving is None and self._opened:
            self._moving = asyncio.get_running_loop().call_later(SETTLE, self._settle)

    def _settle(self) -> None:
        moved, self._moved, self._moving = self._moved, set(), None
        self._doubt(moved)
        self._usage.on_moved(lambda key: slot_of(key.encode()) in moved)

    def _doubt(self, slots: AbstractSet[int]) -> None:
        """Report slots whose node may not know everything."""
        self._usage.on_up(lambda key: slot_of(key.encode()) in slots)

    def _confirmed(self, reply: Reply, until: float, sent: float) -> asyncio.Future[None]:
        """Wait for a barrier at the primary that has answered."""
        node = None if self.router.sent is None else self.router.sent.get(reply)
        assert node is not None and node.barriers is not None  # noqa: S101, PT018 - every command is sent to a node
        return node.barriers.confirm(until, sent)

    # --- administration

    def calls(self) -> list[Call]:
        """Return for each primary the function that sends it a command."""
        return [node.connection.call for node in self._nodes if node.slots]

    async def diagnose(self, settings: Settings) -> list[Finding]:
        """Examine every primary, and the layout. Cancelling it leaves no connection open."""
        return await diagnose(self.endpoint, settings, self._usage.probe)


async def _some(router: Router, soon: float) -> None:
    """Wait until every node is connected, or until ``soon`` if one is; raises what one of them refuses."""
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


# --- diagnosis

DISCOVERY = 0.5
"""Share of the command timeout for the discovery of the nodes."""
WORST = (Level.ERROR, Level.WARNING, Level.NOTE, Level.OK)


async def diagnose(seeds: Seeds, settings: Settings, rights: Script = PROBE) -> list[Finding]:
    """Examine every primary as a single server, within the command timeout, and sum up the findings.

    Raises :class:`BackendError` if the nodes cannot be discovered. Cancelling it leaves no socket behind.
    """
    limit = settings.command_timeout
    layout = await Discovery(seeds, DISCOVERY * limit).ask(())
    settings = replace(settings, command_timeout=(1 - DISCOVERY) * limit)
    prefix = f"{settings.namespace}:1:probe:"
    asked = await survey(
        examine(seeds.at(host), settings, key_in(layout.slots(host), prefix), cluster=True, probe=rights)
        for host in layout.primaries
    )
    found: dict[Host, list[Finding]] = {}
    silent: dict[Host, BackendError] = {}
    for host, task in zip(layout.primaries, asked, strict=True):
        error = task.exception()
        if error is None:
            found[host] = task.result()
        elif isinstance(error, BackendError):
            silent[host] = error
        else:
            raise error
    return [*_of_layout(layout, silent), *summed_up(found)]


def _of_layout(layout: Layout, silent: dict[Host, BackendError]) -> Iterator[Finding]:
    count = len(layout.primaries)
    if silent:
        [host, error], *_ = silent.items()
        text = f"{len(silent)} of {count} primaries cannot be asked, so their locks cannot be had: {host}: {error}"
        yield failure("nodes", text, "bring it back, or have a replica take over")
    else:
        text = f"all {count} primaries answer" if count > 1 else "the one primary answers"
        yield ok("nodes", text)
    if missing := SLOTS - layout.covered:
        text = f"no node serves {missing} of the {SLOTS} slots, and locks whose names are there cannot be had"
        yield failure("slots", text, "see CLUSTER SLOTS, and redis-cli --cluster fix")
    else:
        yield ok("slots", f"all {SLOTS} are served")
    alone = [host for host, replicas in layout.replicas if not replicas]
    if alone:
        who = "no primary has" if len(alone) == count else f"{', '.join(map(str, alone))} has no"
        if 1 < len(alone) < count:
            who = f"{', '.join(map(str, alone))} have no"
        text = f"{who} replica: when it is away, so are the locks of its slots"
        yield note("failover", text, "give each primary a replica")
    else:
        yield ok("failover", "every primary has a replica that can take over")


def summed_up(found: dict[Host, list[Finding]]) -> list[Finding]:
    """Return one finding per subject: the worst, with the nodes that it is about if it is not about all."""
    summary = []
    for subject in dict.fromkeys(finding.subject for findings in found.values() for finding in findings):
        matching = [
            (host, finding)
            for host, findings in found.items()
            for finding in findings
            if finding.subject == subject
        ]
        level = min((finding.level for _, finding in matching), key=WORST.index)
        worst = [(host, finding) for host, finding in matching if finding.level is level]
        _, first = worst[0]
        if len(worst) < len(found):
            hosts = ", ".join(str(host) for host, _ in worst)
            first = replace(first, text=f"at {hosts}: {first.text}")
        summary.append(first)
    return summary
