"""A model of grants that count once a replica has them: the hand-off with a replica that lags, barriers, and failovers that lose writes.

The replica is a copy of the lock as it was at some moment; when it catches up, the copy is that of now. A client that gets an
answer which it would believe in waits for a barrier: a write on a connection of its own, and ``WAIT``. The write arrives, the replica
catches up, and the answer to ``WAIT`` is heard, each as a step of its own. A failover promotes the copy; the earlier primary becomes
its replica or goes on.

With one replica, the one that is promoted is the one that has confirmed. The server that was promoted has further replicas, which
confirm at once; the earlier primary has none.

The promises are those of the hand-off, and they hold for whatever server has granted the lock: what an earlier primary grants is no
exception. Tokens are compared when they are given out: one that never was may be granted again by a server that lost it.

*Faults* beside those of the hand-off: ``few`` (``WAIT`` ends before the replica has the write)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.model.handoff import (
    HELD,
    HOLDING,
    NAMES,
    RUNNING,
    TTL,
    Barrier,
    Broken,
    Client,
    Command,
    Cover,
    Grant,
    Handoff,
    Move,
    World,
)
from tests.model.redis_server import FREE

__all__ = ["Replicated"]

COVERING = "covering"
"""The phase of a client that was granted the lock, and waits for a barrier."""


class Replicated(Handoff):
    """One run; see :class:`Handoff`.

    :param replicas: ``False`` for a client that counts what the primary answers.
    """

    def __init__(self, turns: tuple[int, ...], *, replicas: bool = True, **options: Any) -> None:
        super().__init__(turns, **options)
        self.replicas, self.servers = replicas, 2

    def initial(self) -> tuple:
        world = World(super().initial())
        world.servers, world.copy = (FREE, None), FREE
        return world.freeze()

    # --- the client

    def _request(self, world: World, i: int) -> None:
        super()._request(world, i)
        self._too_early(world, i)

    def _renew(self, world: World, i: int, *, confirms: bool = False) -> None:
        super()._renew(world, i, confirms=confirms)
        self._too_early(world, i)

    def _too_early(self, world: World, i: int) -> None:
        client = world.clients[i]
        if "after the answers" in self.removed and client.barrier is None and client.phase != HOLDING:
            client.barrier = Barrier(client.line, ())

    def _granted(self, world: World, i: int, grant: Grant) -> str:
        client = world.clients[i]
        if not self.replicas or client.lost or grant.until <= self.local(world, i):
            return super()._granted(world, i, grant)
        self._leave_queue(client)
        client.state, client.floor = HELD, max(client.floor, grant.token + grant.count - 1)
        client.inbox, client.phase = None, COVERING
        self._join(client, Cover(client.number, *grant))
        return "joins a barrier"

    def _heard_renew(self, world: World, i: int, command: Command, answer: tuple) -> str:
        client = world.clients[i]
        until, due, renewing = client.until, client.due, client.renewing
        heard = super()._heard_renew(world, i, command, answer)
        if self.replicas:
            client.foreign = False
        if heard or command.mark or not self.replicas or "renewals wait" in self.removed:
            return heard
        # It prolongs nothing yet.
        cover = Cover(client.number, 0, 0, client.until, client.home)
        client.until, client.due, client.renewing = until, due, renewing
        self._join(client, cover)
        return "joins a barrier"

    def _begin(self, world: World, i: int, grant: Grant) -> None:
        super()._begin(world, i, grant)
        client = world.clients[i]
        if self.replicas:
            client.foreign = False
        self._judge_given(world, i, grant)

    def _judge_given(self, world: World, i: int, grant: Grant) -> None:
        if not self.replicas:
            return
        if grant.token <= world.top:
            raise Broken(f"TOKEN: {NAMES[i]} gives out {grant.token} after {world.top}")
        world.top = grant.token + grant.count - 1

    def _judge_token(self, world: World, owner: str | None, token: int, top: int) -> None:
        """A token that was granted need not be given out."""

    def _believed(self, client: Client, server: int, window: float, now: float) -> float | None:
        if self.replicas and "pushes only wake" not in self.removed:
            return None
        return super()._believed(client, server, window, now)

    def _cut(self, world: World, i: int) -> None:
        client = world.clients[i]
        covering = client.phase == COVERING
        if "one server" not in self.removed:
            client.joined = ()
            if client.barrier is not None:
                client.barrier = client.barrier._replace(covers=())
        super()._cut(world, i)
        if covering and "one server" not in self.removed:
            self._give_back(world, i)

    # --- barriers

    def _join(self, client: Client, cover: Cover) -> None:
        if "after the answers" in self.removed and client.barrier is not None:
            client.barrier = client.barrier._replace(covers=(*client.barrier.covers, cover))
            return
        client.joined += (cover,)
        self._send_barrier(client)

    def _send_barrier(self, client: Client) -> None:
        if client.joined and client.barrier is None:
            client.barrier, client.joined = Barrier(client.line, client.joined), ()

    def _write(self, world: World, i: int) -> str:
        """Execute the write of a barrier."""
        client = world.clients[i]
        barrier = client.barrier
        assert barrier is not None
        if world.servers[barrier.server] is None:
            self._few(world, i)
            return "refused by a replica"
        client.barrier = barrier._replace(written=True, confirmed=barrier.server == 1)
        return ""

    def _catch_up(self, world: World) -> None:
        world.copy = world.servers[0]
        for client in world.clients:
            if client.barrier is not None and client.barrier.written and client.barrier.server == 0:
                client.barrier = client.barrier._replace(confirmed=True)

    def _hear_barrier(self, world: World, i: int) -> None:
        client = world.clients[i]
        barrier, client.barrier = client.barrier, None
        assert barrier is not None
        for cover in barrier.covers:
            same = cover.server == barrier.server == client.home or "one server" in self.removed
            self._covered(world, i, cover, same=same)
        self._send_barrier(client)

    def _few(self, world: World, i: int) -> None:
        """End a barrier without enough confirmations; the connection is made anew if the server is no primary any more."""
        client = world.clients[i]
        barrier, client.barrier = client.barrier, None
        assert barrier is not None
        if barrier.server != world.primary:
            client.line = world.primary
        for cover in barrier.covers:
            self._covered(world, i, cover, same=False)
        self._send_barrier(client)

    def _covered(self, world: World, i: int, cover: Cover, *, same: bool) -> None:
        client, now = world.clients[i], self.local(world, i)
        if cover.number != client.number:
            return
        if not cover.token:
            if client.phase == HOLDING:
                client.renewing = False
                client.until = max(client.until, cover.until) if same else client.until
                client.due = client.until - TTL * 2 / 3 if same else now + 1
            return
        if client.phase != COVERING:
            return
        if not same:
            self._give_back(world, i)
        elif client.lost and "remembers a loss until then" not in self.removed:
            super()._granted(world, i, Grant(*cover[1:]))
        elif cover.until > now:
            self._begin(world, i, Grant(*cover[1:]))
        else:
            self._request(world, i)

    def _give_back(self, world: World, i: int) -> None:
        """Give a grant back that has too few confirmations; whoever waits asks anew, with another claim."""
        client = world.clients[i]
        if client.known:
            self._give_up(world, i)
            self._new_claim(world, i)
        else:
            self._end(world, i)

    # --- the servers

    def _promote(self, world: World, *, split: bool) -> None:
        world.servers = (world.servers[0] if split else None, world.copy)
        world.primary, world.copy = 1, None

    # --- steps

    def _ordinary(self, world: World, i: int) -> Iterator[Move]:
        yield from super()._ordinary(world, i)
        client, name = world.clients[i], NAMES[i]
        barrier = client.barrier
        if barrier is not None and not barrier.written:
            yield f"server {barrier.server} executes the barrier of {name}", lambda w: self._write(w, i), ""
        elif barrier is not None and barrier.confirmed:
            if barrier.covers or "after the answers" not in self.removed:
                yield f"{name} hears that a replica has it", lambda w: self._hear_barrier(w, i), ""
        elif barrier is not None and barrier.server != world.primary:
            yield f"too few replicas confirm the barrier of {name}", lambda w: self._few(w, i), ""
        elif barrier is None and client.line != world.primary:
            yield f"{name}'s barriers connect anew", lambda w: setattr(w.clients[i], "line", w.primary), ""

    def _faults(self, world: World, i: int, budget: dict[str, int]) -> Iterator[Move]:
        yield from super()._faults(world, i, budget)
        client, name = world.clients[i], NAMES[i]
        if client.phase == COVERING:
            yield f"{name} cancels", lambda w: self._cancel(w, i), "cancel"
        if client.barrier is not None and not client.barrier.confirmed:
            yield f"too few replicas confirm the barrier of {name}", lambda w: self._few(w, i), "few"

    def _server_faults(self, world: World, budget: dict[str, int]) -> Iterator[Move]:
        yield from super()._server_faults(world, budget)
        waits = any(
            client.barrier is not None
            and client.barrier.written
            and not client.barrier.confirmed
            and not client.barrier.server
            for client in world.clients
        )
        if world.primary == 0 and (waits or world.copy != world.servers[0]):
            yield "the replica catches up", self._catch_up, ""

    def _fair(self, world: World, i: int, labels: list[str]) -> bool:
        client = world.clients[i]
        moved = super()._fair(world, i, labels)
        if client.life != RUNNING or client.barrier is None:
            return moved
        labels.append(f"a barrier of {NAMES[i]}")
        if not client.barrier.written:
            self._write(world, i)
        if world.primary == 0:
            self._catch_up(world)
        if client.barrier is not None:
            (self._hear_barrier if client.barrier.confirmed else self._few)(world, i)
        return True
