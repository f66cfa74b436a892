"""A model of the Redis hand-off protocol: the library's own Lua scripts, the decisions of the clients, and the promises about them.

The state contains the lock at one server or at two, the clients with what each of them knows, and what is under way: commands,
answers and messages, in order on each connection. The scripts are the library's (:mod:`tests.model.redis_server`), and so is the
arithmetic of ages and ends; the client is written anew here, after claim.py, waiting.py, pubsub.py, same_server.py, and the local
queue and renewal scheduler of the core.

* *Time* is counted in ticks of a second. A ttl is three ticks, a position lives as long, a heartbeat is due every tick, a
  confirmation window is one tick: windows, lives and ends fall on ticks.
* *Grain*: with 0 each command, answer and message is a step of its own. With 1 a command is executed when it is sent, with 2
  its answer is read then as well, with 3 so are messages, each unless a fault makes that channel of the client slow.
* *Faults* have a budget each: ``slow`` (one channel of a client), ``cut`` (its connection; what was not executed comes late or
  never), ``late`` (a caller gives up and repeats), ``lose`` (a message), ``subscription`` (it ends, and the server notices or
  not), ``crash``, ``stop``, ``cancel``, ``keep`` (a release that keeps the lock for a tick), ``force``, ``ask`` (request_release),
  ``back`` (the server's clock is set back), ``restart`` (with old data). With two servers: ``switch`` (the replica is promoted and
  the primary becomes its replica), ``split`` (the primary goes on writing instead), ``astray`` (a new subscription is at
  the other server).
* *Replication* is immediate, and carries the messages that are published at a primary to the subscribers at its replica.
* *Promises*: EXCLUSION, one client believes to hold the lock; TOLD, none is granted it while another believes to hold it;
  TAKEN, none ends a hold that is believed in; TOKEN, every grant has tokens above all earlier ones; LATE, a request that was given up
  is not granted; ORDER, none overtakes a waiter that can be reached; KEEP, none is granted a lock that is kept; UNHEARD, a
  holder that has heard of a request to release tells its task; STUCK, a fair schedule without further faults serves all clients
  that run and leaves nothing behind. Exceptions, as on the page about Redis: after ``force`` until the message or the next renewal is
  heard, after ``restart`` for a ttl, and what a server grants to its own client while another is the primary.

``removed`` names the rules of the client that are left out; changes of the scripts are given to ``Scripts``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

from aiolock.backends.redis.commands import WHOLE
from aiolock.backends.redis.connection import Pairing
from aiolock.core.backend import expires_at, margin
from tests.model.redis_server import FREE, Change, Data, Scripts

__all__ = [
    "ANSWERS",
    "COMMANDS",
    "HELD",
    "HOLDING",
    "MESSAGES",
    "NAMES",
    "RUNNING",
    "TTL",
    "Barrier",
    "Broken",
    "Client",
    "Command",
    "Cover",
    "Grant",
    "Handoff",
    "Lock",
    "Move",
    "World",
]

TTL, LIFE, PERIOD, BLOCK = 3.0, 3000, 1.0, 3
"""Seconds of a hold, ms of a position, seconds between heartbeats, tokens of a grant."""
BASE = 1_700_000_000
"""The server's time, in seconds, when a run begins."""
STEP_BACK = 40
NAMES = "abc"
EXCUSED = 3
"""Ticks for which a hold may be believed in that was forced or forgotten."""
PATIENCE = 24
"""Ticks of a fair schedule."""

RUNNING, STOPPED, DEAD = "running", "stopped", "dead"
IDLE, REQUESTING, WAITING, HOLDING = "idle", "requesting", "waiting", "holding"
NEW, ASKED, QUEUED, HELD = "new", "asked", "queued", "held"
COMMANDS, ANSWERS, MESSAGES, LOSES = 1, 2, 4, 8
"""What is slow, and that the next message will be lost."""
CHANNELS = {COMMANDS: "commands", ANSWERS: "answers", MESSAGES: "messages"}
FAULTS = (
    *("slow", "cut", "late", "lose", "subscription", "crash", "stop", "cancel", "keep", "force", "ask"),
    *("back", "restart", "switch", "split", "astray", "few"),
)
UNREAD = {"until", "since", "provisional", "ttl", "label", "token"}
"""Fields that nothing reads of a lock without a holder."""


class Broken(Exception):
    """A promise was broken."""


class Command(NamedTuple):
    name: str
    number: int
    """Of the claim that it is about."""
    mark: int
    """The attempt of an enter, the generation of a count, and 1 for a renewal that confirms."""
    sent: float
    arguments: tuple = ()


class Message(NamedTuple):
    server: int
    """Where it was published."""
    text: str


class Grant(NamedTuple):
    token: int
    count: int
    until: float
    server: int


class Cover(NamedTuple):
    """What counts once the replicas have it: a grant, or a renewal, whose token is 0."""

    number: int
    token: int
    count: int
    until: float
    server: int


class Barrier(NamedTuple):
    """A write on the connection of the barriers, and the ``WAIT`` behind it."""

    server: int
    covers: tuple[Cover, ...]
    written: bool = False
    confirmed: bool = False
    """The replica has the write, and all before it."""


class Left(NamedTuple):
    """A claim whose release is under way."""

    number: int
    doubts: int
    keep: int


@dataclass(slots=True)
class Client:
    """A client: one local queue for the lock, its claim, and its connections."""

    turns: int
    """How often its program still locks."""
    feed: int | None = 0
    """The server of its subscription."""
    life: str = RUNNING
    # The local queue.
    phase: str = IDLE
    known: bool = False
    """The server has answered: from then on an outage is survived."""
    others: int = 0
    """Further tasks of this client that wait."""
    trying: bool = False
    """The request joins no queue."""
    # The claim.
    number: int = 0
    state: str = NEW
    doubts: int = 0
    ticket: int = -1
    attempt: int = 0
    """The request whose answer is awaited."""
    inbox: Grant | None = None
    woken: bool = False
    lost: bool = False
    """Since the request was sent, a loss was reported."""
    # Its position.
    waits: bool = False
    queued: bool = False
    """It is confirmed, and no request is under way."""
    # Its hold.
    token: int = 0
    left: int = 0
    until: float = 0
    due: float = 0
    renewing: bool = False
    asked: bool = False
    """The holder was asked to release."""
    foreign: bool = False
    """Bookkeeping of the promises: granted by a server that was not the primary, to a client whose commands were there."""
    excuse: tuple[int, int] | None = None
    """Bookkeeping of the promises: the claim may be believed in until this tick, although its hold is gone."""
    # What it knows.
    leaving: tuple[Left, ...] = ()
    floor: int = 0
    pair: tuple[int, float, float] | None = None
    """Server time, and when its request was sent and its answer arrived."""
    beating: bool = False
    beat: float | None = None
    """When the next heartbeat is due."""
    check: float | None = None
    """When the lock is to be checked before that."""
    # The connections.
    home: int = 0
    """The server of its commands."""
    same: bool = True
    """Both connections are known to be at the same server."""
    generation: int = 0
    pushed: bool = True
    sent: tuple[Command, ...] = ()
    answers: tuple[tuple[Command, Any], ...] = ()
    subscription: int = 0
    """The number of its subscription, which has a channel of its own."""
    ghosts: tuple[tuple[int, int], ...] = ()
    """Earlier subscriptions that a server still counts: the server, and the number."""
    messages: tuple[Message, ...] = ()
    slow: int = 0
    # With replicas.
    line: int = 0
    """The server of the connection of its barriers."""
    joined: tuple[Cover, ...] = ()
    """Waits for the next barrier."""
    barrier: Barrier | None = None


values = attrgetter(*[field.name for field in fields(Client)])


class World:
    """A state that is being changed."""

    __slots__ = (
        *("servers", "primary", "time", "offset", "clients", "late", "budget"),
        *("top", "saved", "given_up", "kept", "copy"),
    )

    def __init__(self, state: tuple) -> None:
        self.servers: tuple[Data | None, ...]
        """The lock at each server; ``None`` for a replica of the primary."""
        self.late: tuple[tuple[int, int, tuple[Command, ...]], ...]
        """What closed connections may still bring: client, server, commands."""
        (self.servers, self.primary, self.time, self.offset, clients, self.late, self.budget) = state[:7]
        (self.top, self.saved, self.given_up, self.kept, self.copy) = state[7:]
        self.clients = [Client(*each) for each in clients]

    def freeze(self) -> tuple:
        clients = tuple([values(client) for client in self.clients])
        return (
            *(self.servers, self.primary, self.time, self.offset, clients, self.late, self.budget),
            *(self.top, self.saved, self.given_up, self.kept, self.copy),
        )

    @property
    def now(self) -> int:
        """The servers' time in ms."""
        return (BASE + self.time + self.offset) * 1000


class Lock(NamedTuple):
    """What the promises read of a lock."""

    owner: str | None
    until: int
    token: int
    top: int
    requests: dict[str, int]
    """Tickets of the requests in the queue."""
    reachable: dict[str, tuple[int, int]]
    """Until when (µs) the positions of clients that want messages live, and the subscription by which they do."""


@lru_cache(200_000)
def view(data: Data) -> Lock:
    found = dict(data.fields)
    owner, until, token = found.get("owner"), int(found.get("until", 0)), int(found.get("token", 0))
    holds = {name[2:]: value.split(" ") for name, value in found.items() if name.startswith("h:")}
    if holds:
        owner = max(holds, key=lambda request: int(holds[request][3]))
        until, token = int(holds[owner][0]), int(holds[owner][3])
    requests = {name[2:]: int(value) for name, value in found.items() if name.startswith("r:")}
    presences = {name[2:]: value.split(" ") for name, value in found.items() if name.startswith("p:")}
    reachable = {
        client: (int(life), int(notified[2:]))
        for client, (life, notified, _) in presences.items()
        if notified[0] == "s"
    }
    return Lock(owner, until, token, int(found.get("top", 0)), requests, reachable)


def channel(i: int, number: int) -> str:
    """Return the channel of one subscription of a client."""
    return f"{NAMES[i]}:{number}"


Move = tuple[str, Callable[[World], Any], str]
"""A step: its label, what it does, and the fault that it costs."""


class Handoff:
    """One run: the clients with what their programs do, faults with their budgets, and the rules that are removed.

    :param turns: for each client, how often it locks.
    :param ticks: after which a run ends.
    :param others: further tasks of each client that wait when it locks.
    :param tries: clients may also try without waiting.
    :param slow: channels of each client that are slow on its first connection, as a sum of ``COMMANDS``, ``ANSWERS`` and ``MESSAGES``.
    :param feeds: the server of each client's first subscription; two servers if given.
    :param ghosts: the server that still counts an earlier subscription of each client; ``None`` for none.
    :param info: clients may ask for the run id of a server; else they count their own subscription.
    :param rates: seconds of each client's clock in a tick.
    :param changes: planted bugs in the scripts.
    """

    def __init__(
        self,
        turns: tuple[int, ...],
        *,
        ticks: int = 6,
        faults: dict[str, int] | None = None,
        removed: tuple[str, ...] = (),
        changes: tuple[Change, ...] = (),
        grain: int = 3,
        others: int = 0,
        tries: bool = False,
        slow: tuple[int, ...] = (0, 0, 0),
        feeds: tuple[int, ...] = (),
        ghosts: tuple[int | None, ...] = (None, None, None),
        info: bool = True,
        counts: bool = True,
        rates: tuple[float, ...] = (1, 1, 1),
        family: str = "",
    ) -> None:
        self.turns, self.ticks, self.grain, self.others, self.tries = turns, ticks, grain, others, tries
        self.budget = tuple((faults or {}).get(name, 0) for name in FAULTS)
        self.removed = frozenset(removed)
        self.slow, self.feeds, self.info, self.rates = slow, feeds, info, rates
        self.ghosts = ghosts
        self.servers = 2 if feeds or (faults or {}).keys() & {"switch", "split"} else 1
        self.scripts = scripts(changes, family, counts)
        self.count = len(turns)

    def initial(self) -> tuple:
        clients = []
        feeds = self.feeds or (0,) * self.count
        for turns, feed, slow, ghost in zip(self.turns, feeds, self.slow, self.ghosts, strict=False):
            client = Client(turns, feed, slow=slow)
            if ghost is not None:
                client.ghosts = ((ghost, client.subscription),)
                client.subscription = self._next(client)
            if feed and "after subscribing" not in self.removed:
                self._verify(client)
            clients.append(values(client))
        servers = (FREE, None)[: self.servers]
        return (servers, 0, 0, 0, tuple(clients), (), self.budget, 0, None, (), 0, None)

    def key(self, state: tuple) -> int:
        data = state[0][state[1]]
        names = {name for name, _ in data.fields}
        if "owner" not in names and "used" not in names:
            data = data._replace(fields=tuple(pair for pair in data.fields if pair[0] not in UNREAD))
            state = ((data, *state[0][: state[1]], *state[0][state[1] + 1 :]), *state[1:])
        return hash(state)

    # --- small questions

    def local(self, world: World, i: int) -> float:
        """Return the time by the clock of a client."""
        return world.time * self.rates[i]

    def request(self, i: int, number: int) -> str:
        return f"{NAMES[i]}:{number}"

    def believes(self, world: World, i: int) -> bool:
        """Tell whether a client believes to hold the lock, and has no excuse."""
        client = world.clients[i]
        return (
            client.phase == HOLDING
            and client.life != DEAD
            and client.until > self.local(world, i)
            and not client.foreign
            and not (client.excuse and client.excuse[0] == client.number and world.time < client.excuse[1])
        )

    def check(self, state: tuple) -> str:
        world = World(state)
        inside = [i for i in range(self.count) if self.believes(world, i)]
        if len(inside) < 2:
            return ""
        tokens = [world.clients[i].token for i in inside]
        equal = " with equal tokens" if len(set(tokens)) < len(tokens) else ""
        return f"EXCLUSION{equal}: " + " and ".join(self.request(i, world.clients[i].number) for i in inside)

    # --- the local queue

    def _start(self, world: World, i: int, *, trying: bool) -> None:
        client = world.clients[i]
        client.turns -= 1
        client.others, client.known, client.trying = 0 if trying else self.others, False, trying
        self._new_claim(world, i)

    def _new_claim(self, world: World, i: int) -> None:
        client = world.clients[i]
        client.number += 1
        client.state, client.doubts, client.ticket, client.attempt = NEW, 0, -1, 0
        client.inbox, client.woken = None, False
        self._request(world, i)

    def _begin(self, world: World, i: int, grant: Grant) -> None:
        client, now = world.clients[i], self.local(world, i)
        client.phase, client.known, client.trying, client.renewing, client.asked = (
            HOLDING,
            True,
            False,
            False,
            False,
        )
        client.token, client.left, client.until = grant.token, grant.count - 1, grant.until
        self._leave_queue(client)
        # A pushed grant is renewed after a third of its window, which is less than a tick.
        client.due = now if client.until - now < 1 else client.until - TTL * 2 / 3
        primary = world.servers[world.primary]
        assert primary is not None
        lock = view(primary)
        known = lock.owner == self.request(i, client.number) and lock.until / 1_000_000 - BASE >= client.until
        client.foreign = grant.server == client.home != world.primary and not known

    def _hand_over(self, world: World, i: int) -> None:
        client = world.clients[i]
        client.others -= 1
        client.left -= 1
        client.token += 1
        client.asked = False

    def _end(self, world: World, i: int, *, keep: int = 0) -> None:
        """Give the claim up; tasks that wait request with a new one."""
        client = world.clients[i]
        self._give_up(world, i, keep)
        if client.others:
            client.others -= 1
            self._new_claim(world, i)
        else:
            client.known = False

    def _cancel(self, world: World, i: int) -> None:
        world.clients[i].others = 0
        self._end(world, i)

    def _unanswered(self, world: World, i: int) -> None:
        """Repeat a request that was not answered, or fail if the server was never heard."""
        if world.clients[i].known:
            self._request(world, i)
        else:
            self._cancel(world, i)

    def _wake(self, world: World, i: int) -> None:
        client = world.clients[i]
        if client.phase == WAITING:
            self._request(world, i)
        elif client.phase == REQUESTING:
            client.woken = True

    # --- the claim

    def _send(self, world: World, i: int, name: str, number: int, *arguments: Any, mark: int = 0) -> None:
        client = world.clients[i]
        client.sent += (Command(name, number, mark, self.local(world, i), arguments),)

    def _request(self, world: World, i: int) -> None:
        client = world.clients[i]
        client.woken = client.queued = client.lost = False
        pushed, client.inbox = client.inbox, None
        if pushed is not None and pushed.until > self.local(world, i):
            self._begin(world, i, pushed)
            return
        if client.state in (NEW, HELD):
            client.state = ASKED
        client.doubts += 1
        client.attempt += 1
        client.phase = REQUESTING
        position = "" if client.trying else f"{LIFE} {self._notified(client)} {client.ticket}"
        limits = (WHOLE, WHOLE) if self.scripts.family else ()
        request, ttl = self.request(i, client.number), round(TTL * 1000)
        self._send(
            *(world, i, "enter", client.number),
            *(request, ttl, BLOCK, client.floor, "l", position, *limits),
            mark=client.attempt,
        )

    def _leave_queue(self, client: Client) -> None:
        if client.waits:
            client.waits, client.beat = False, None

    def _give_up(self, world: World, i: int, keep: int = 0) -> None:
        client = world.clients[i]
        if client.state == HELD and not client.doubts and not keep:
            request = self.request(i, client.number)
            self._send(world, i, "release", client.number, request, client.floor)
            client.leaving += (Left(client.number, 0, 0),)
        elif client.state != NEW:
            self._send_leave(world, i, Left(client.number, client.doubts, keep))
        self._forget(client)

    def _send_leave(self, world: World, i: int, left: Left) -> None:
        client = world.clients[i]
        tombstone = left.doubts > 0 and "tombstone" not in self.removed
        request = self.request(i, left.number)
        self._send(world, i, "leave", left.number, request, client.floor, int(tombstone), left.keep)
        client.leaving = (*[each for each in client.leaving if each.number != left.number], left)

    def _forget(self, client: Client) -> None:
        client.state, client.phase, client.doubts, client.ticket = NEW, IDLE, 0, -1
        client.inbox, client.woken, client.queued = None, False, False
        client.lost, client.trying = False, False
        client.until, client.due, client.renewing, client.asked, client.foreign = 0, 0, False, False, False
        self._leave_queue(client)

    def _lose(self, world: World, i: int, number: int) -> str:
        """Take in that the hold of a claim is gone, as a message or an answer says."""
        client = world.clients[i]
        if number != client.number:
            return "of an earlier claim"
        if client.phase == HOLDING:
            self._end(world, i)
            return "LOST"
        if "remembers a loss" not in self.removed:
            client.lost, client.inbox = True, None
            self._wake(world, i)
        return "before the grant"

    # --- renewals and heartbeats

    def _renew(self, world: World, i: int, *, confirms: bool = False) -> None:
        client = world.clients[i]
        client.renewing = client.renewing or not confirms
        request, ttl = self.request(i, client.number), round(TTL * 1000)
        self._send(world, i, "renew", client.number, request, ttl, "", mark=int(confirms))

    def _heartbeat(self, world: World, i: int) -> None:
        client, now = world.clients[i], self.local(world, i)
        client.beating = True
        if client.check is not None and client.check <= now:
            client.check = None
        if client.waits and client.beat is not None and client.beat <= now:
            client.beat = self._next_beat(world, i)
        count = int(client.waits and client.queued)
        self._send(world, i, "heartbeat", 0, NAMES[i], LIFE, self._notified(client), client.floor, count)

    def _notified(self, client: Client) -> str:
        return f"s:{client.subscription}" if client.pushed else "n"

    def _next_beat(self, world: World, i: int) -> float:
        return self.local(world, i) + (PERIOD if world.clients[i].pushed else 0.1)

    def _beat_now(self, world: World, i: int) -> None:
        if world.clients[i].waits:
            world.clients[i].beat = self.local(world, i)

    def _handed_over(self, world: World, i: int, window: int) -> None:
        client = world.clients[i]
        if window == -1 or 0 < window <= 6000:
            then = self.local(world, i) + max(0, window) / 1000
            client.check = then if client.check is None else min(client.check, then)

    # --- answers

    def _hear(self, world: World, i: int) -> str:
        client = world.clients[i]
        (command, answer), *_ = client.answers
        client.answers = client.answers[1:]
        heard = getattr(self, f"_heard_{command.name}")(world, i, command, answer)
        return f"{answer} {heard}".rstrip()

    def _until(self, world: World, i: int, sent: float) -> float:
        """Return the end of a hold whose request was sent then."""
        return expires_at(self.local(world, i) if "from the sending" in self.removed else sent, TTL)

    def _heard_enter(self, world: World, i: int, command: Command, answer: tuple) -> str:
        client, now = world.clients[i], self.local(world, i)
        if client.phase != REQUESTING or command[1:3] != (client.number, client.attempt):
            return "(nobody waits for it)"
        client.doubts -= 1
        client.pair = (answer[3 if answer[0] else 2], command.sent, now)
        if answer[0]:
            return self._granted(
                world, i, Grant(*answer[1:3], self._until(world, i, command.sent), client.home)
            )
        lost, client.lost = client.lost, False
        if client.trying:
            self._forget(client)
            return "taken"
        if client.inbox is not None:
            # Pushed while the answer was on its way.
            self._request(world, i)
            return ""
        client.state, client.ticket, client.queued, client.phase, client.known = (
            QUEUED,
            answer[1],
            True,
            WAITING,
            True,
        )
        if not client.waits:
            client.waits, client.beat = True, self._next_beat(world, i)
        client.check = now + answer[3] / 1_000_000
        if client.woken or lost:
            self._request(world, i)
        return ""

    def _granted(self, world: World, i: int, grant: Grant) -> str:
        """Take in an answer that grants the lock."""
        client = world.clients[i]
        self._leave_queue(client)
        client.state, client.floor = HELD, max(client.floor, grant.token + grant.count - 1)
        if "empties the inbox" not in self.removed:
            client.inbox = None
        if client.lost:
            client.lost, client.state = False, ASKED
            if client.trying:
                self._forget(client)
                return "was lost since"
            self._request(world, i)
            return "was lost since, asks anew"
        if grant.until > self.local(world, i):
            self._begin(world, i, grant)
            return ""
        if client.trying:
            self._give_up(world, i)
        else:
            self._request(world, i)
        return "outdated"

    def _heard_release(self, world: World, i: int, command: Command, answer: int) -> str:
        client = world.clients[i]
        found = [left for left in client.leaving if left.number == command.number]
        if not found:
            return ""
        client.leaving = tuple(left for left in client.leaving if left.number != command.number)
        if answer == -2 and command.name == "release" and "leaves after a refusal" not in self.removed:
            # An attempt that arrived late may have left a position.
            self._send_leave(world, i, found[0])
        elif answer:
            self._handed_over(world, i, answer)
        return ""

    _heard_leave = _heard_release

    def _heard_renew(self, world: World, i: int, command: Command, answer: tuple) -> str:
        client = world.clients[i]
        server, state = answer
        asked = isinstance(state, tuple)
        state = state[0] if asked else state
        if command.mark:
            return self._lose(world, i, command.number) if state <= 0 else ""
        client.pair = (server, command.sent, self.local(world, i))
        if client.phase != HOLDING or command.number != client.number:
            return "(nobody waits for it)"
        if asked:
            self._ask(world, i)
        client.renewing = False
        if state <= 0:
            return self._lose(world, i, command.number)
        client.until = max(client.until, self._until(world, i, command.sent))
        client.due = client.until - TTL * 2 / 3
        client.foreign = client.foreign or client.home != world.primary
        return ""

    def _heard_heartbeat(self, world: World, i: int, command: Command, answer: tuple) -> str:
        client = world.clients[i]
        client.beating = False
        left, window, state = answer[1]
        self._handed_over(world, i, window)
        if client.waits and state == 2:
            self._wake(world, i)
        elif client.waits and left:
            client.check = self.local(world, i) + left / 1_000_000
        return ""

    # --- messages

    def _ask(self, world: World, i: int) -> None:
        """Tell the task that uses the hold, if one does, that it is asked to release."""
        client = world.clients[i]
        if client.state == HELD and client.inbox is None:
            client.asked = True
        if client.phase == HOLDING and not client.asked:
            raise Broken(
                f"UNHEARD: the client of {self.request(i, client.number)} was asked to release, and its task is not told"
            )

    def _read(self, world: World, i: int) -> str:
        client, now = world.clients[i], self.local(world, i)
        message, client.messages = client.messages[0], client.messages[1:]
        what, request, *words = message.text.split(" ")
        if request != self.request(i, client.number):
            return "of an earlier claim"
        if what == "a":
            self._ask(world, i)
            return ""
        if what == "f":
            if client.same:
                client.excuse = None
                return self._lose(world, i, client.number)
            if client.phase == HOLDING:
                self._renew(world, i)
                return "doubt"
            return self._lose(world, i, client.number)
        if not self._expects(client):
            return "not expected"
        if what == "n":
            self._wake(world, i)
            return ""
        token, count, server, window = map(int, words[:4])
        until = self._believed(client, server, window / 1000, now)
        if until is None:
            self._wake(world, i)
            return "asks"
        if "confirms" not in self.removed:
            self._renew(world, i, confirms=True)
        self._leave_queue(client)
        client.state, client.floor = HELD, max(client.floor, token + count - 1)
        client.inbox = Grant(token, count, until, message.server)
        if client.phase == WAITING:
            self._request(world, i)
        else:
            client.woken = True
        return ""

    def _expects(self, client: Client) -> bool:
        """Tell whether a pushed grant is of use."""
        states = (ASKED, HELD) if "not while it holds" in self.removed else (ASKED,)
        return client.state == QUEUED or (client.doubts > 0 and client.state in states)

    def _believed(self, client: Client, server: int, window: float, now: float) -> float | None:
        """Return until when a pushed grant is believed; ``None`` if the server has to be asked."""
        if not client.same or client.pair is None:
            return None
        pairing = Pairing()
        pairing.latest, pairing.received = client.pair, client.pair[2]
        age = pairing.age(server / 1_000_000, now)
        assert age is not None
        if "for the window" in self.removed:
            return expires_at(now, TTL)
        if "of a credible age" in self.removed:
            return expires_at(now, window)
        return expires_at(now - age.most, window) if age.credible(window) else None

    # --- connections

    def _cut(self, world: World, i: int) -> None:
        """End the connection of the commands; the next one is at the primary."""
        client = world.clients[i]
        if client.sent:
            world.late += ((i, client.home, client.sent),)
        requesting, leaving = client.phase == REQUESTING, client.leaving
        client.sent, client.answers, client.leaving, client.pair = (), (), (), None
        client.beating, client.renewing, client.slow, client.home = False, False, 0, world.primary
        if "after connecting" not in self.removed:
            self._came_up(world, i)
        if client.phase == HOLDING:
            self._renew(world, i)
        for left in leaving:
            self._send_leave(world, i, left)
        if requesting:
            self._unanswered(world, i)
        self._beat_now(world, i)

    def _unsubscribe(self, world: World, i: int, *, noticed: bool) -> None:
        client = world.clients[i]
        if not noticed and client.feed is not None:
            client.ghosts += ((client.feed, client.subscription),)
        self._unfed(client)
        self._beat_now(world, i)

    def _unfed(self, client: Client) -> None:
        client.feed, client.messages, client.pushed = None, (), False

    def _subscribe(self, world: World, i: int, server: int) -> None:
        client = world.clients[i]
        client.feed, client.messages, client.subscription = server, (), self._next(client)
        if "after subscribing" in self.removed:
            client.same = True
        else:
            self._came_up(world, i)
        client.pushed = client.feed is not None
        self._beat_now(world, i)

    def _next(self, client: Client) -> int:
        """Return the number of a new subscription."""
        return client.subscription + ("a channel for each subscription" not in self.removed)

    def _came_up(self, world: World, i: int) -> None:
        """Find out whether both connections are at the same server: one of them has come up."""
        client = world.clients[i]
        if self.servers == 1:
            return
        client.same = False
        if client.feed is None:
            return
        if self.info:
            self._verify(client)
        else:
            client.generation += 1
            self._send(world, i, "count", 0, channel(i, client.subscription), mark=client.generation)

    def _verify(self, client: Client) -> None:
        client.same = client.home == client.feed
        if not client.same:
            self._unfed(client)

    def _heard_count(self, world: World, i: int, command: Command, answer: int) -> str:
        client = world.clients[i]
        if command.mark == client.generation and client.feed is not None:
            client.same = answer > 0
            if not client.same:
                self._unsubscribe(world, i, noticed=True)
        return ""

    # --- the servers

    def _subscribed(self, world: World, server: int) -> tuple[tuple[str, int], ...]:
        """Return how many are subscribed at a server to the channels of each client: to the one of all subscriptions, and to the one of each."""
        counts: Counter[str] = Counter()
        for i, client in enumerate(world.clients):
            for at, number in ((client.feed, client.subscription), *client.ghosts):
                if at == server:
                    counts.update((NAMES[i], channel(i, number)))
        return tuple(sorted(counts.items()))

    def _execute(self, world: World, i: int, server: int, command: Command) -> Any:
        """Execute a command at a server; return its reply."""
        subscribed = self._subscribed(world, server)
        if command.name == "count":
            return dict(subscribed).get(command.arguments[0], 0)
        before = world.servers[server]
        assert before is not None
        data, reply, published = self.scripts.run(
            before, world.now * 1000, subscribed, command.name, command.arguments
        )
        servers = list(world.servers)
        servers[server] = data
        world.servers = tuple(servers)
        for name, text in published:
            self._deliver(world, server, name, text)
        if server == world.primary:
            self._judge(world, i, command, view(before), view(data))
        return reply

    def _deliver(self, world: World, server: int, name: str, text: str) -> None:
        """Bring a message to the client's subscription, if it is at this server or at its replica."""
        if name not in NAMES[: self.count] or text[0] == "d":
            return
        client = world.clients[NAMES.index(name)]
        if client.feed is None or client.life == DEAD:
            return
        if client.feed != server and (server != world.primary or world.servers[client.feed] is not None):
            return
        if client.slow & LOSES:
            client.slow -= LOSES
        else:
            client.messages += (Message(server, text),)

    def _serve(self, world: World, i: int) -> str:
        """Execute the oldest command of a client; a replica refuses it, which ends the connection."""
        client = world.clients[i]
        command, client.sent = client.sent[0], client.sent[1:]
        if world.servers[client.home] is None and command.name != "count":
            self._cut(world, i)
            return "refused by a replica"
        reply = self._execute(world, i, client.home, command)
        client.answers += ((command, reply),)
        return str(reply)

    def _arrive(self, world: World, k: int) -> str:
        """Execute what is left of a connection that was closed."""
        i, server, commands = world.late[k]
        self._drop(world, k)
        if commands[1:]:
            world.late += ((i, server, commands[1:]),)
        if world.servers[server] is None:
            return "refused by a replica"
        return str(self._execute(world, i, server, commands[0]))

    def _drop(self, world: World, k: int) -> None:
        world.late = world.late[:k] + world.late[k + 1 :]

    def _promote(self, world: World, *, split: bool) -> None:
        data = world.servers[world.primary]
        world.servers = (data if split else None, data)
        world.primary = 1

    def _heal(self, world: World) -> None:
        world.servers = (None, world.servers[1])

    def _restart(self, world: World) -> None:
        world.time += 1
        world.servers = (world.saved,)
        for i, client in enumerate(world.clients):
            client.excuse = client.number, world.time + EXCUSED
            if client.life == RUNNING:
                client.feed, client.messages, client.subscription = 0, (), self._next(client)
                self._cut(world, i)
        world.late = ()

    def _tick(self, world: World) -> None:
        world.time += 1
        world.servers = tuple(
            FREE if data is not None and data.expires is not None and world.now >= data.expires else data
            for data in world.servers
        )
        for i, client in enumerate(world.clients):
            if client.life == RUNNING and client.phase == HOLDING and client.until <= self.local(world, i):
                self._end(world, i)

    # --- promises about what the primary does

    def _judge(self, world: World, i: int, command: Command, before: Lock, after: Lock) -> None:
        owner, previous, name = after.owner, before.owner, command.name
        request = command.arguments[0]
        if name == "leave":
            if command.arguments[3] and previous == request:
                world.kept = world.now + command.arguments[3]
            world.given_up = tuple(sorted({*world.given_up, request}))
        entered = name == "enter" and owner == request != previous
        joined = name == "enter" and request in after.requests and request not in before.requests
        if request in world.given_up and (entered or joined):
            raise Broken(f"LATE: {request} was given up, and a late copy of it changes something")
        if entered and request not in before.requests:
            for other in before.requests:
                j = NAMES.index(other[0])
                client = world.clients[j]
                life, number = before.reachable.get(other[0], (0, 0))
                reached = client.feed == world.primary and client.subscription == number
                if j != i and life >= world.now * 1000 and reached and client.life == RUNNING:
                    raise Broken(f"ORDER: {request} overtakes {other}, which waits and can be reached")
        if owner != previous or after.token != before.token:
            self._judge_grant(world, i, command, before, after)

    def _judge_grant(self, world: World, i: int, command: Command, before: Lock, after: Lock) -> None:
        owner, previous, name = after.owner, before.owner, command.name
        granted = owner is not None and owner[:2] != "0:"
        for j, client in enumerate(world.clients):
            mine = self.request(j, client.number)
            if name == "force" and previous == mine and owner != mine:
                client.excuse = client.number, world.time + EXCUSED
            if not self.believes(world, j):
                continue
            if previous == mine and owner != mine:
                raise Broken(f"TAKEN: {name} of {NAMES[i]} ends the hold of {mine}, which is believed in")
            if granted and owner not in (mine, previous):
                equal = " with equal tokens" if after.token <= client.token <= after.top else ""
                raise Broken(f"TOLD{equal}: {owner} is granted the lock while {mine} is believed in")
        if granted and (owner != previous or after.token != before.token):
            self._judge_token(world, owner, after.token, after.top)
            if world.now < world.kept and name != "force":
                raise Broken(f"KEEP: {owner} is granted the lock before the time for which it was kept")

    def _judge_token(self, world: World, owner: str | None, token: int, top: int) -> None:
        if token <= world.top or top < token:
            raise Broken(f"TOKEN: {owner} gets {token} to {top} after {world.top}")
        world.top = max(world.top, top)

    # --- steps

    def steps(self, state: tuple) -> Iterator[tuple[str, Any, str]]:
        world = World(state)
        for label, act, fault in self._moves(world):
            after = World(state)
            if fault:
                spent = FAULTS.index(fault)
                after.budget = tuple(left - (k == spent) for k, left in enumerate(after.budget))
                label = f"FAULT: {label}"
            try:
                note = act(after)
                self._settle(after)
            except Broken as broken:
                yield label, None, str(broken)
            else:
                yield f"{label} -> {note}" if note else label, after.freeze(), ""

    def _due(self, world: World, i: int) -> Callable[[World, int], None] | None:
        """Return what a timer of a client does now, before anything else of it."""
        client, now = world.clients[i], self.local(world, i)
        if client.phase == HOLDING and client.until <= now:
            return self._end
        if client.phase == HOLDING and not client.renewing and client.due <= now:
            return self._renew
        beat = client.waits and client.beat is not None and client.beat <= now
        if not client.beating and (beat or (client.check is not None and client.check <= now)):
            return self._heartbeat
        return None

    def _settle(self, world: World) -> None:
        """Execute, answer and read what is no step of its own."""
        moved = self.grain > 0
        while moved:
            moved = False
            for i, client in enumerate(world.clients):
                while client.sent and not client.slow & COMMANDS:
                    self._serve(world, i)
                    moved = True
                if client.life != RUNNING:
                    continue
                while self.grain >= 2 and client.answers and not client.slow & ANSWERS:
                    self._hear(world, i)
                    moved = True
                while (
                    self.grain == 3 and client.messages and not client.slow & MESSAGES and not client.answers
                ):
                    self._read(world, i)
                    moved = True

    def _moves(self, world: World) -> Iterator[Move]:
        budget = dict(zip(FAULTS, world.budget, strict=True))
        urgent = False
        for i, client in enumerate(world.clients):
            name = NAMES[i]
            if client.sent and client.life != DEAD:
                yield (
                    f"the server executes {client.sent[0].name} of {name}",
                    lambda w, i=i: self._serve(w, i),
                    "",
                )
            if client.life == STOPPED:
                yield f"{name} resumes", lambda w, i=i: self._resume(w, i), ""
            if client.life != RUNNING:
                continue
            if (timer := self._due(world, i)) is not None:
                urgent = True
                yield f"{name}: timer{timer.__name__}", lambda w, i=i, timer=timer: timer(w, i), ""
            if timer != self._end:
                yield from self._ordinary(world, i)
                for label, act, fault in self._faults(world, i, budget):
                    if budget[fault]:
                        yield label, act, fault
        for k, (i, server, commands) in enumerate(world.late):
            which = f" at server {server}" if self.servers > 1 else ""
            yield f"LATE {commands[0].name} of {NAMES[i]}{which}", lambda w, k=k: self._arrive(w, k), ""
            yield f"the rest of a connection of {NAMES[i]} never arrives", lambda w, k=k: self._drop(w, k), ""
        for label, act, fault in self._server_faults(world, budget):
            if not fault or budget[fault]:
                yield label, act, fault
        if not urgent and world.time < self.ticks:
            yield "--- tick", self._tick, ""

    def _ordinary(self, world: World, i: int) -> Iterator[Move]:
        """Yield what a client and its program do without a fault."""
        client, name = world.clients[i], NAMES[i]
        now = self.local(world, i)
        if client.answers:
            yield f"{name} hears the answer to {client.answers[0][0].name}", lambda w: self._hear(w, i), ""
        if client.messages:
            yield f"{name} reads {client.messages[0].text!r}", lambda w: self._read(w, i), ""
        if client.phase == IDLE and client.turns:
            yield f"{name} acquires", lambda w: self._start(w, i, trying=False), ""
            if self.tries:
                yield f"{name} tries", lambda w: self._start(w, i, trying=True), ""
        if client.phase == HOLDING and client.until > now:
            yield f"{name} releases", lambda w: self._end(w, i), ""
            if client.others and client.left and client.until - now > margin(TTL):
                yield f"{name} hands over inside", lambda w: self._hand_over(w, i), ""
        if client.feed is None:
            yield f"{name} subscribes", lambda w: self._subscribe(w, i, w.primary), ""
        elif client.feed != world.primary:
            yield f"{name}'s subscription breaks", lambda w: self._unsubscribe(w, i, noticed=True), ""
        if client.home != world.primary:
            yield f"{name}'s commands connect anew", lambda w: self._cut(w, i), ""

    def _faults(self, world: World, i: int, budget: dict[str, int]) -> Iterator[Move]:
        client, name = world.clients[i], NAMES[i]
        if client.phase in (REQUESTING, WAITING):
            yield f"{name} cancels", lambda w: self._cancel(w, i), "cancel"
        if client.phase == HOLDING and client.until > self.local(world, i):
            yield (
                f"{name} releases, and keeps the lock for a tick",
                lambda w: self._end(w, i, keep=1000),
                "keep",
            )
        for bit, what in CHANNELS.items():
            if not client.slow & 7 and bit <= 2 ** (self.grain - 1):
                yield f"{what} of {name} become slow", lambda w, bit=bit: self._slow(w, i, bit), "slow"
        yield f"connection of {name} is cut", lambda w: self._cut(w, i), "cut"
        awaited = [*client.sent, *[command for command, _ in client.answers]]
        if client.phase == REQUESTING and any(
            command[:3] == ("enter", client.number, client.attempt) for command in awaited
        ):
            yield f"{name} waits no longer for its answer", lambda w: self._unanswered(w, i), "late"
        for left in client.leaving:
            yield f"{name} repeats a release", lambda w, left=left: self._send_leave(w, i, left), "late"
        if client.messages:
            yield f"message {client.messages[0].text!r} is lost", lambda w: self._lose_message(w, i), "lose"
        elif self.grain == 3 and not client.slow & LOSES and (client.phase == WAITING or budget["force"]):
            yield f"the next message to {name} will be lost", lambda w: self._slow(w, i, LOSES), "lose"
        if client.feed is not None:
            for noticed, how in ((True, "breaks"), (False, "breaks unnoticed by the server")):
                yield (
                    f"{name}'s subscription {how}",
                    lambda w, noticed=noticed: self._unsubscribe(w, i, noticed=noticed),
                    "subscription",
                )
        elif self.servers > 1:
            yield (
                f"{name} subscribes at the other server",
                lambda w: self._subscribe(w, i, 1 - w.primary),
                "astray",
            )
        if client.phase != IDLE or client.leaving:
            for noticed, how in ((False, ""), (True, ", as the server notices")):
                yield (
                    f"{name} dies{how}",
                    lambda w, noticed=noticed: self._die(w, i, noticed=noticed),
                    "crash",
                )
            yield f"{name} is stopped", lambda w: self._stop(w, i), "stop"

    def _server_faults(self, world: World, budget: dict[str, int]) -> Iterator[Move]:
        data = world.servers[world.primary]
        assert data is not None
        if view(data).owner:
            force, ask = (
                Command(name, 0, 0, 0, arguments)
                for name, arguments in (("force", (0, "")), ("request_release", ("please",)))
            )
            yield "force_release", lambda w: self._execute(w, 0, w.primary, force) and None, "force"
            yield "request_release", lambda w: self._execute(w, 0, w.primary, ask) and None, "ask"
        yield (
            f"the clock is set back by {STEP_BACK} ticks",
            lambda w: setattr(w, "offset", -STEP_BACK),
            "back",
        )
        if budget["restart"] == 2:
            yield "the server saves its data", lambda w: setattr(w, "saved", w.servers[0]), "restart"
        else:
            yield "the server restarts with the data that were saved", self._restart, "restart"
        if world.primary == 0:
            yield (
                "the replica is promoted, and the primary is its replica",
                lambda w: self._promote(w, split=False),
                "switch",
            )
            yield (
                "the replica is promoted, and the primary goes on",
                lambda w: self._promote(w, split=True),
                "split",
            )
        elif world.servers[0] is not None:
            yield "the earlier primary becomes a replica", self._heal, ""

    def _slow(self, world: World, i: int, bit: int) -> None:
        world.clients[i].slow |= bit

    def _lose_message(self, world: World, i: int) -> None:
        world.clients[i].messages = world.clients[i].messages[1:]

    def _stop(self, world: World, i: int) -> None:
        world.clients[i].life = STOPPED

    def _resume(self, world: World, i: int) -> None:
        client = world.clients[i]
        client.life = RUNNING
        if client.phase == HOLDING and client.until <= self.local(world, i):
            self._end(world, i)

    def _die(self, world: World, i: int, *, noticed: bool) -> None:
        client = world.clients[i]
        if client.sent:
            world.late += ((i, client.home, client.sent),)
        present = (client.feed, client.subscription)
        ghosts = client.ghosts + (() if noticed or client.feed is None else (present,))
        world.clients[i] = Client(0, None, DEAD, number=client.number, ghosts=ghosts)

    # --- a fair schedule

    def stuck(self, state: tuple, live: set[int]) -> list[str] | None:
        """Run a fair schedule without faults; return its steps if a client that runs is not served, or something stays."""
        world = World(state)
        world.late = ()
        labels: list[str] = []
        if self.servers > 1 and world.primary:
            self._heal(world)
        end = world.time + PATIENCE
        try:
            while True:
                moved = True
                while moved:
                    moved = sum([self._fair(world, i, labels) for i in range(self.count)]) > 0
                running = [client for client in world.clients if client.life == RUNNING]
                if world.time >= state[2] + 4 and all(
                    client.phase == IDLE and not client.leaving for client in running
                ):
                    left = self._left(world)
                    return [*labels, f"left behind: {left}"] if left else None
                if world.time >= end:
                    return [*labels, "not served: " + ", ".join(client.phase for client in running)]
                labels.append("--- tick")
                self._tick(world)
        except Broken as broken:
            return [*labels, str(broken)]

    def _fair(self, world: World, i: int, labels: list[str]) -> bool:
        """Let a client go on as far as it can in this tick; return whether it did anything."""
        client = world.clients[i]

        def note(what: str, result: str = "") -> bool:
            labels.append(f"{NAMES[i]} {what}" + (f" -> {result}" if result else ""))
            return True

        moved = False
        while client.sent and client.life != DEAD:
            moved = note(f"sends {client.sent[0].name}", self._serve(world, i))
        if client.life != RUNNING:
            return moved
        if client.home != world.primary:
            self._cut(world, i)
            moved = note("connects anew")
        if client.feed != world.primary:
            self._subscribe(world, i, world.primary)
            moved = note("subscribes")
        while client.messages:
            moved = note(f"reads {client.messages[0].text!r}", self._read(world, i))
        while client.answers:
            moved = note(f"hears the answer to {client.answers[0][0].name}", self._hear(world, i))
        if (timer := self._due(world, i)) is not None:
            timer(world, i)
            moved = note(f"timer{timer.__name__}")
        elif client.phase == HOLDING and not client.sent:
            self._end(world, i)
            moved = note("releases")
        return moved

    def _left(self, world: World) -> list[str]:
        """Return the fields at the server of clients that run."""
        data = world.servers[world.primary]
        assert data is not None
        lock = view(data)
        running = [NAMES[i] for i, client in enumerate(world.clients) if client.life == RUNNING]
        found = [*lock.requests, *lock.reachable]
        if lock.owner and lock.until > world.now * 1000:
            found.append(lock.owner)
        return [each for each in found if each[0] in running]


@lru_cache(64)
def scripts(changes: tuple[Change, ...], family: str, counts: bool) -> Scripts:
    """Return the scripts; runs with the same ones share what is known of them."""
    return Scripts(changes, family=family, counts=counts)
