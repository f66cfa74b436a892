"""A model of the rows engine: lock rows, session rows, clients that lose them, and the promises about them.

The state contains one row for each lock, the session rows, the clients with what each of them knows, and the messages that
are late. A request that nothing happens to is sent, executed and heard in one step; one that a fault hits is executed and
heard at any later time, or never.

* *Time* is counted in ticks, and only as ages, so that the number of states is finite. A heartbeat is due every tick, the
  ttl of a session is three ticks unless a run says otherwise.
* *Faults* have a budget each: ``late`` (request and answer take any time while the client waits), ``broken`` (the client
  gives up and reconnects, the request is executed at any later time or never), ``stop`` (at any point, also between a
  request and its answer; the client resumes at any time or never), ``crash`` (the store loses all writes since the last
  flushed one), ``delete`` (a lock row), ``delete session``, ``force``, ``purge``, ``cancel``, ``clock`` (a forward step of
  the store's clock), ``mute`` (a notification is lost), ``reboot`` (of the machine of a store that only its processes use: they
  die, unflushed writes are lost, and their programs begin again with what is left of them), ``warned`` (a flushed write is made,
  shown to others and not on the standby, and its answer says so: a crash, after which the standby takes over, undoes it unless a
  later flushed write was answered), ``shown`` (others see a flushed write before it is flushed: a crash undoes it until it is
  answered; in a store that flushes every write, as InnoDB does), ``undone`` (the server has undone the transaction of a write, or says so
  after it has counted; the store has repeated it, and the answer is that of the repetition).
* *Promises*: EXCLUSION, what clients believe to hold is compatible (after a deletion or a forced release for one ttl more);
  TOKEN, every grant has a token above all earlier ones of its lock; KEEP, no grant while a lock is kept; LEAK, no entry
  of a living session that its client has forgotten; FALSE LOSS, no client reports a loss while its hold stands under a
  living session; STUCK, a fair schedule without further faults grants a lock that is waited for.

``removed`` names the rules that are left out; :mod:`tests.model.runs` lists them with the sentences of the design."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from aiolock.backends.rows.liveness import (
    EndedClaims,
    Series,
    SessionRow,
    Verdict,
    judge,
    observe,
    relied_until,
)
from aiolock.backends.rows.lockrow import (
    Batch,
    Enter,
    Force,
    Leave,
    Liveness,
    LockRow,
    RowHold,
    RowRequest,
    Serve,
    TokenSource,
    apply,
)
from aiolock.backends.rows.store import StoreClock

__all__ = ["Claim", "Model"]

IDLE, NEW, WAIT, GOT, HELD, KEEP, REL = range(7)

NONE, OPENING, OPEN, CHECK = range(4)
FIRST = 1000
"""Versions are numbers from here on; the key of a state renames them in the order in which they are found."""
ABSENT: tuple = ()
FIELDS = 5
"""Of an enter statement that has not begun: claim, new version, version of the session, tick, sessions that are judged."""
ENTER, CHORE, BEAT, POLL, TICK, FAULT = range(6)
"""Kinds of steps, in the order in which a fair schedule takes them."""
WRITES = frozenset("WHDCOKE")

UNKNOWN, EXPIRED, REBOOTED, LATER = range(4)
"""What the clocks prove of a session: nothing; that its ttl has passed; that an earlier run of the machine wrote it; and that its ttl
has passed since then by the wall clock."""

Id = tuple[int, ...]
"""Claim: client, generation of its session, lock, number. A kept hold has a fifth element, and is its own session."""


class Claim(NamedTuple):
    """A claim of a client's program; ``keep`` is the number of ticks for which its release keeps the lock."""

    mode: str = "mutex"
    permits: int = 1
    keep: int = 0
    block: int = 1


class Row(NamedTuple):
    version: int
    token: int
    holds: tuple[Id, ...]
    queue: tuple[Id, ...]
    first: int = 0
    """The lowest token of the grants that made this version."""


class Session(NamedTuple):
    version: int
    ended: tuple[Id, ...]
    dead: bool
    age: int
    """Ticks since its last write, by the store's clock."""
    boot: int = 0
    """The run of the machine that wrote it."""


class Slot(NamedTuple):
    """A client's claim of one lock and what the client knows of the row."""

    phase: int = IDLE
    number: int = 0
    cache: Any = None
    """The row as known, ``ABSENT``, or ``None``."""
    tick: int = 0
    dirty: bool = False
    """A write was given up without an answer."""
    doubt: int = 0
    """The version of the session row that an enter statement names which was given up without an answer."""
    read: bool = False
    """The row has to be read before a renewal counts."""
    shown: int = 0
    """Ticks since the sending of the newest request whose answer showed the hold in the row."""
    call: int = 0
    """Ticks since the release that keeps the lock was called."""
    opened: bool = False
    """The session row of the kept hold exists."""
    noted: bool = False
    """A notification has arrived."""
    seen: bool = False
    """A read alone has shown the grant, in a store with a standby."""
    gone: int | None = None
    """Bookkeeping of the promise: ticks since the hold was deleted or forced."""


class Client(NamedTuple):
    stopped: bool
    generation: int
    session: int
    version: int
    age: int
    """Ticks since the sending of the last heartbeat that was answered."""
    beat: int
    """Ticks since the last heartbeat was sent."""
    sent: tuple[tuple[int, int], ...]
    """Heartbeats without an answer: version and age."""
    ended: tuple[Id, ...]
    undurable: tuple[Id, ...]
    """Ended claims whose removal was answered, but may be undone by a crash."""
    series: tuple[tuple[Id, int, int, int], ...]
    """Observed sessions: id, version, ticks since its first answer, and what the clocks prove."""
    dead: tuple[Id, ...]
    over: tuple[Id, ...]
    """Foreign claims that were read in the ``ended`` of their session."""
    distrust: bool
    epoch: int
    slots: tuple[Slot, ...]


class Message(NamedTuple):
    client: int
    kind: str
    lock: int
    payload: tuple
    result: tuple | None = None
    age: int = 0
    orphan: bool = False
    """The client has given it up."""
    fresh: bool = True
    """Sent after the newest answer about its row arrived."""
    flushing: bool = False
    """Executed and shown, and neither durable nor answered."""


class World(NamedTuple):
    locks: tuple
    durable: tuple | None
    """Locks and sessions as of the last flushed write; ``None`` if that is what there is."""
    sessions: tuple[tuple[Id, Session], ...]
    clients: tuple[Client, ...]
    messages: tuple[Message, ...]
    budget: tuple[int, ...]
    top: tuple[int, ...]
    """The highest token given of each lock."""
    kept: tuple[int, ...]
    """Ticks for which each lock is promised to be kept."""
    epoch: int
    """Number of steps of the store's clock."""
    boot: int
    """Number of reboots."""
    serial: int
    """The next version; no part of the state."""


NAMES = {
    "R": "reads the lock row",
    "W": "writes the lock row",
    "H": "sends a heartbeat and reads the versions",
    "S": "reads its session row",
    "O": "opens a session",
    "Q": "reads the sessions",
    "D": "marks a session dead",
    "C": "writes a kept session for this run of the machine",
    "K": "inserts the session of the kept hold",
    "E": "sends the enter statement",
    "P": "purges",
}

FAULTS = (
    "late",
    "broken",
    "stop",
    "crash",
    "delete",
    "delete session",
    "force",
    "purge",
    "cancel",
    "clock",
    "mute",
    "reboot",
    "warned",
    "shown",
    "undone",
)


def fit(claims: list[Claim], limit: int) -> bool:
    """Tell whether claims may be held at the same time: the promise, written without the engine."""
    modes = {claim.mode for claim in claims}
    if len(claims) < 2 or modes == {"read"}:
        return True
    return modes == {"permits"} and sum(claim.permits for claim in claims) <= limit


def settled(ended: tuple[Id, ...], undurable: tuple[Id, ...]) -> tuple[Id, ...]:
    """Ask the engine's rule which ended claims stay after a flushed write that was sent when these removals were answered."""
    claims = EndedClaims()
    for entry in ended:
        claims.begin(str(entry), "", "")
    for entry in undurable:
        claims.removed(str(entry), flushed=False, connection=1, order=1)
    claims.flushed(2, 1)
    return tuple(entry for entry in ended if str(entry) in claims)


def put(table: tuple, key: Any, value: Any) -> tuple:
    """Set or, with ``None``, remove an entry of a sorted table."""
    rest = [pair for pair in table if pair[0] != key]
    if value is not None:
        rest.append((key, value))
    return tuple(sorted(rest, key=lambda pair: pair[0]))


def find(table: tuple, key: Any) -> Any:
    return next((value for name, value in table if name == key), None)


def at(items: tuple, index: int, item: Any) -> tuple:
    return (*items[:index], item, *items[index + 1 :])


class Model:
    """One run: programs of the clients, faults with their budgets, and the rules that are removed.

    :param claims: for each client and each lock, the claims that it makes one after the other.
    :param ttl: ticks of the sessions, one for all or for each client.
    :param kinds: the kinds of messages that ``late``, ``broken``, ``warned``, ``shown`` and ``undone`` may hit.
    :param stops: the clients that may be stopped.
    :param statements: enter by statements that the server evaluates.
    :param clock: takeover by the store's clock.
    :param busy: clients without claims go on with their heartbeats.
    :param survive: requests under way outlive a crash of the store.
    :param skew: ticks by which the clock of an observer is fast within a ttl, for which ``margin`` has to make up.
    """

    def __init__(
        self,
        claims: tuple,
        *,
        faults: dict[str, int] | None = None,
        removed: tuple[str, ...] = (),
        ttl: int | tuple[int, ...] = 3,
        limit: int = 2,
        kinds: str = "WRHSOQDCKE",
        stops: tuple[int, ...] | None = None,
        statements: bool = False,
        clock: bool = False,
        busy: bool = True,
        survive: bool = False,
        skew: int = 0,
        margin: int = 0,
        tokens: bool = True,
        generations: int = 2,
    ) -> None:
        self.claims = claims
        self.count = len(claims)
        self.locks = range(len(claims[0]))
        self.ttl = ttl if isinstance(ttl, tuple) else (ttl,) * self.count
        self.faults = tuple((faults or {}).get(name, 0) for name in FAULTS)
        self.flushes = bool(self.faults[FAULTS.index("shown")])
        """True if the store flushes every write."""
        self.reads_prove = not (self.flushes or self.faults[FAULTS.index("warned")])
        """False if others see a write before it is durable."""
        self.removed = frozenset(removed)
        self.limit, self.kinds = limit, kinds
        self.stops = range(self.count) if stops is None else stops
        self.statements, self.clock, self.busy, self.survive = statements, clock, busy, survive
        self.skew, self.margin, self.tokens, self.generations = skew, margin, tokens, generations
        keeps = [claim.keep for program in claims for lock in program for claim in lock]
        self.cap = max(*self.ttl, *keeps) + margin + 2
        self._applied: dict[tuple, tuple[Row, bool, bool]] = {}

    # --- states

    def initial(self) -> World:
        slots = tuple(Slot() for _ in self.locks)
        clients = tuple(
            Client(False, 1, OPEN, FIRST + i, 0, 0, (), (), (), (), (), (), False, 0, slots)
            for i in range(self.count)
        )
        sessions = tuple(((i, 1), Session(FIRST + i, (), False, 0)) for i in range(self.count))
        nothing = tuple(0 for _ in self.locks)
        rows = tuple(ABSENT for _ in self.locks)
        return World(
            rows, None, sessions, clients, (), self.faults, nothing, nothing, 0, 0, FIRST + self.count
        )

    def key(self, world: World) -> int:
        names: dict[int, int] = {}
        out: list[Any] = []
        add = out.append

        def walk(items: tuple) -> None:
            for item in items:
                if type(item) is int:
                    add(names.setdefault(item, FIRST + len(names)) if item >= FIRST else item)
                elif not item or item is True or type(item) is str:
                    add(item)
                else:
                    add("(")
                    walk(item)
                    add(")")

        walk(world[:-1])
        return hash(tuple(out))

    def claim(self, entry: Id) -> Claim:
        return self.claims[entry[0]][entry[2]][entry[3] - 1]

    def session_of(self, entry: Id) -> Id:
        return entry if len(entry) == 5 and "session of its own" not in self.removed else entry[:2]

    def ttl_of(self, session: Id) -> int:
        return self.ttl[session[0]] if len(session) == 2 else max(self.claim(session).keep, 1)

    def me(self, i: int, client: Client, lock: int) -> Id:
        return (i, client.generation, lock, client.slots[lock].number)

    def valid(self, i: int, client: Client, slot: Slot) -> bool:
        """Ask the engine's rule whether a hold is relied on now."""
        if "until of the session" in self.removed:
            return slot.shown < self.ttl[i] - self.margin
        return relied_until(-client.age, -slot.shown, self.ttl[i]) > self.margin

    def believes(self, i: int, client: Client, lock: int) -> bool:
        slot = client.slots[lock]
        if slot.phase == KEEP and slot.call >= self.claim(self.me(i, client, lock)).keep:
            # The block has ended, and so has the time for which the lock was to be kept.
            return False
        return slot.phase in (HELD, KEEP) and self.valid(i, client, slot)

    def spend(self, world: World, name: str) -> tuple[int, ...] | None:
        index = FAULTS.index(name)
        left = world.budget[index]
        return at(world.budget, index, left - 1) if left else None

    def check(self, world: World) -> str:
        for lock in self.locks:
            believers = [
                (i, client.slots[lock])
                for i, client in enumerate(world.clients)
                if self.believes(i, client, lock)
            ]
            if len(believers) > 1 and not self._fit(world, lock, [i for i, _ in believers]):
                # A hold that was deleted or forced is told of with the next renewal, within a ttl.
                known = [i for i, slot in believers if slot.gone is None or slot.gone >= self.ttl[i]]
                if not self._fit(world, lock, known):
                    return f"EXCLUSION: clients {', '.join(str(i) for i, _ in believers)} believe to hold lock {lock}"
            if (row := world.locks[lock]) and (leaked := self._leaked(world, row)):
                return (
                    f"LEAK: claim {leaked} stands in the row of a living session, its client has forgotten it"
                )
        return ""

    def _fit(self, world: World, lock: int, clients: list[int]) -> bool:
        return fit([self.claim(self.me(i, world.clients[i], lock)) for i in clients], self.limit)

    def _leaked(self, world: World, row: Row) -> Id | None:
        for entry in row.holds + row.queue:
            client = world.clients[entry[0]]
            session = find(world.sessions, entry[:2])
            if (
                len(entry) == 4
                and entry[1] == client.generation
                and client.session == OPEN
                and not client.stopped
                and session is not None
                and not session.dead
                and entry not in client.ended
                and entry not in client.undurable
                and entry not in session.ended
                and not (
                    entry == self.me(entry[0], client, entry[2]) and client.slots[entry[2]].phase != IDLE
                )
                and not any(slot.read for slot in client.slots)
                and not any(message.client == entry[0] and not message.orphan for message in world.messages)
            ):
                return entry
        return None

    # --- rules of a lock row: the engine's

    def request(self, entry: Id) -> RowRequest:
        claim = self.claim(entry)
        return RowRequest(
            str(entry),
            claim.mode if len(entry) == 4 else "mutex",
            float(self.ttl_of(self.session_of(entry))),
            permits=claim.permits,
            limit=self.limit,
            block=claim.block,
            session=str(self.session_of(entry)),
        )

    def _apply(
        self, row: Any, tick: int, dead: tuple, over: tuple, own: tuple, *steps: tuple, doubt: bool = False
    ) -> tuple[Row, bool, bool]:
        """Apply steps (kind, claim) with the engine's rules; return the row, whether it changed, and whether to flush.

        ``over``: foreign claims that have ended. ``own``: a session of the client and its live claims.
        """
        if "tick" in self.removed:
            tick = 0
        key = (row, tick, dead, over, own, steps, doubt)
        if key not in self._applied:
            self._applied[key] = self._really_apply(*key)
        return self._applied[key]

    def _really_apply(
        self, row: Any, tick: int, dead: tuple, over: tuple, own: tuple, steps: tuple, doubt: bool
    ) -> tuple[Row, bool, bool]:
        names: dict[str, Id] = {}
        token, holds, queue = row[1:4] if row else (0, (), ())
        for entry in (*holds, *queue, *(entry for _, entry in steps)):
            names[str(entry)] = entry
            names[str((*entry[:4], 1))] = (*entry[:4], 1)
        before = LockRow(
            "lock",
            {str(entry): RowHold(self.request(entry), 1, 0.0, kept=len(entry) == 5) for entry in holds},
            {str(entry): self.request(entry) for entry in queue},
            token,
        )
        ended: dict[str, frozenset[str]] = {}
        for entry in over:
            session = str(self.session_of(entry))
            ended[session] = ended.get(session, frozenset()) | {str(entry)}
        live = {str(own[0]): {str(entry): entry for entry in own[1]}} if own else {}
        known = Liveness((str(name) for name in dead), ended, live)
        kinds = {
            "enter": lambda entry: Enter(str(entry), self.request(entry), wait=True),
            "leave": lambda entry: Leave(str(entry)),
            "keep": lambda entry: Leave(str(entry), self.request((*entry, 1))),
            "look": lambda entry: Serve(),
            "force": lambda entry: Force(),
        }
        batch: Batch = apply(
            before,
            [kinds[kind](entry) for kind, entry in steps],
            known,
            TokenSource(0, tick, 0.0),
            doubt=doubt,
        )
        after = batch.row
        granted = [
            hold.token for name, hold in after.holds.items() if name not in before.holds and not hold.kept
        ]
        new = Row(
            0,
            after.token,
            tuple(names[name] for name in after.holds),
            tuple(names[name] for name in after.queue),
            min(granted, default=0),
        )
        return new, batch.changed, batch.flush

    def build(self, i: int, client: Client, lock: int) -> tuple[Row, bool, bool]:
        """Return the row as this client would write it, whether it is to be written, and whether it is to be flushed."""
        slot = client.slots[lock]
        me = self.me(i, client, lock)
        row = slot.cache or ABSENT
        inside = row[2] + row[3] if row else ()
        step = ("look", me)
        if slot.phase in (NEW, WAIT, GOT) and me not in inside:
            step = ("enter", me)
        elif slot.phase == KEEP and slot.opened:
            step = ("keep", me)
        elif slot.phase == REL:
            step = ("leave", me)
        live = (me,) if slot.phase not in (IDLE, REL) else ()
        if "session of its own" in self.removed:
            live = (*live, *(entry for entry in inside if entry[0] == i and len(entry) == 5), (*me, 1))
        # A client removes its own entries of earlier sessions at once.
        dead = tuple(
            sorted(
                {entry[:2] for entry in inside if entry[0] == i and entry[1] != client.generation}
                | set(client.dead)
            )
        )
        doubt = slot.dirty and "leave writes" not in self.removed
        return self._apply(
            row, slot.tick, dead, client.over, ((i, client.generation), live), step, doubt=doubt
        )

    # --- the store

    def _unflushed(self, world: World) -> tuple:
        return world.durable or (world.locks, world.sessions)

    def _grants(self, world: World, lock: int, old: Row | tuple, new: Row) -> tuple[World, str]:
        """Account for the grants of a write; return the violation if one comes too early or with an old token."""
        before = old[2] if old else ()
        granted = [
            entry
            for entry in new.holds
            if entry not in before and not (len(entry) == 5 and entry[:4] in before)
        ]
        if not granted:
            return world, ""
        violation = ""
        if self.tokens and new.first <= world.top[lock]:
            violation = f"TOKEN: {new.first} is granted after {world.top[lock]}"
        if world.kept[lock]:
            violation = f"KEEP: lock {lock} is granted {world.kept[lock]} ticks too early"
        clients = list(world.clients)
        for entry in granted:
            client = clients[entry[0]]
            slot = client.slots[lock]
            if entry == self.me(entry[0], client, lock):
                slot = slot._replace(gone=None, noted="poll" in self.removed)
                clients[entry[0]] = client._replace(slots=at(client.slots, lock, slot))
        return world._replace(
            clients=tuple(clients), top=at(world.top, lock, max(world.top[lock], new.token))
        ), violation

    def execute(self, world: World, message: Message) -> tuple[World, tuple, str]:
        """Execute a request at the store; return the new state, the answer and a violation."""
        kind, lock, payload = message.kind, message.lock, message.payload
        row = world.locks[lock] if lock >= 0 else ABSENT
        tick = world.top[lock] + 1 if lock >= 0 else 0
        if kind == "R":
            return world, (row, tick), ""
        if kind == "Q":
            found = tuple((name, find(world.sessions, name)) for name in payload)
            return world, (found, world.epoch, world.boot), ""
        if kind == "S":
            return world, (find(world.sessions, payload),), ""
        if kind in ("O", "K"):
            name, version = payload
            if find(world.sessions, name) is not None:
                return world, (kind == "K",), ""
            opened = put(world.sessions, name, Session(version, (), False, 0, world.boot))
            return world._replace(sessions=opened, durable=None), (True,), ""
        if kind == "H":
            name, old, new, ended, *_ = payload
            versions = tuple(row[0] if row else 0 for row in world.locks)
            found = find(world.sessions, name)
            if (found is not None and found.version == old and not found.dead) or "heartbeat" in self.removed:
                sessions = put(world.sessions, name, Session(new, ended, False, 0, world.boot))
                return world._replace(sessions=sessions, durable=None), (True, versions), ""
            return world, (False, versions), ""
        if kind == "D":
            name, old, new = payload
            found = find(world.sessions, name)
            if (found.version if found is not None else 0) != old or (found is not None and found.dead):
                return world, (False,), ""
            sessions = put(world.sessions, name, Session(new, (), True, 0, world.boot))
            return world._replace(sessions=sessions, durable=None), (True,), ""
        if kind == "C":
            name, old, new = payload
            found = find(world.sessions, name)
            if found is None or found.version != old or found.dead:
                return world, (False,), ""
            # With what is left of its time: its age stays.
            sessions = put(world.sessions, name, found._replace(version=new, boot=world.boot))
            return world._replace(sessions=sessions, durable=None), (True,), ""
        if kind == "W":
            old, new, flushed, _ = payload
            if (row[0] if row else 0) != old:
                return world, (False, 0), ""
            durable = None if flushed or self.flushes else self._unflushed(world)
            world, violation = self._grants(world, lock, row, new)
            world = world._replace(locks=at(world.locks, lock, new), durable=durable)
            return world, (True, world.top[lock] + 1), violation
        if kind == "P":
            if (row[0] if row else 0) != payload and "purge by version" not in self.removed:
                return world, (), ""
            return world._replace(locks=at(world.locks, lock, ABSENT), durable=None), (), ""
        return self._enter(world, message, row, tick)

    def starts(self, world: World, message: Message) -> Message | None:
        """Return a late statement once it has begun, if its snapshot is older than its write; ``None`` if it is not."""
        rules = {"session is locked", "against what was read", "purge after a minute"} & self.removed
        if message.kind != "E" or not rules or len(message.payload) > FIELDS:
            return None
        seen = (world.locks[message.lock],) if "against what was read" in self.removed else ()
        counts = self._names_its_session(world, message) if "session is locked" in self.removed else None
        tick = world.top[message.lock] + 1 if "purge after a minute" in self.removed else 0
        return message._replace(payload=(*message.payload, counts, seen, tick))

    def _names_its_session(self, world: World, message: Message) -> bool:
        me, heartbeat = message.payload[0], message.payload[2]
        session = find(world.sessions, me[:2])
        if session is None or session.dead:
            return False
        return session.version == heartbeat or "names its heartbeat" in self.removed

    def _enter(self, world: World, message: Message, row: Any, tick: int) -> tuple[World, tuple, str]:
        me, version, _, known, over, *snapshot = message.payload
        counts, seen, begun = snapshot or (None, (), 0)
        # What a statement writes against: the row as it is, or as it was when the statement began.
        against = seen[0] if seen else row
        if not (self._names_its_session(world, message) if counts is None else counts):
            return world, (row, tick), ""
        if against and (me in against.holds + against.queue or (not over and against.holds + against.queue)):
            return world, (row, tick), ""
        given = begun or (tick if "tick at the server" not in self.removed else known)
        # A statement that judged foreign sessions would have read them before it waited for the row.
        new, _, _ = self._apply(against, given, over, (), (), ("enter", me))
        if me not in new.holds:
            return world, (row, tick), ""
        new = new._replace(version=version)
        world, violation = self._grants(world, message.lock, row, new)
        return world._replace(locks=at(world.locks, message.lock, new), durable=None), (new, tick), violation

    # --- what a client learns

    def reconnect(self, client: Client) -> Client:
        """Return the client on its next connection: what it knew is forgotten, what it ended is checked again."""
        slots = []
        again = {entry[2] for entry in client.ended} if "check ended again" not in self.removed else set()
        for lock, slot in enumerate(client.slots):
            if "caches" not in self.removed:
                slot = slot._replace(cache=None)
            if slot.phase in (HELD, GOT, KEEP) or lock in again:
                slot = slot._replace(read=True)
            slots.append(slot)
        series = client.series if "series" in self.removed else ()
        undurable = client.undurable if "check first" in self.removed else ()
        if not self.reads_prove:
            client = client._replace(dead=())
        return client._replace(slots=tuple(slots), series=series, undurable=undurable)

    def broken(self, client: Client, message: Message) -> Client:
        """Return the client after it has given up a request because its connection broke."""
        client = self.reconnect(client)
        lock, kind = message.lock, message.kind
        if kind == "H" and client.session == OPEN:
            return client._replace(session=CHECK)
        if kind == "O":
            return client._replace(session=NONE)
        if kind == "E":
            slot = client.slots[lock]._replace(cache=None, doubt=message.payload[2])
            return client._replace(slots=at(client.slots, lock, slot))
        if kind == "W":
            slot = client.slots[lock]
            if slot.phase == REL and "clean-up" in self.removed:
                return client._replace(slots=at(client.slots, lock, slot._replace(phase=IDLE)), ended=())
            slot = slot._replace(dirty=True, cache=None)
            return client._replace(slots=at(client.slots, lock, slot))
        return client

    def end(self, i: int, client: Client, lock: int) -> Client:
        """End a claim: its belief ends now, its entries are removed from now on."""
        slot = client.slots[lock]._replace(phase=REL, opened=False)
        ended = tuple(sorted({*client.ended, self.me(i, client, lock)}))
        return client._replace(slots=at(client.slots, lock, slot), ended=ended)

    def finish(self, i: int, client: Client, lock: int, *, flushed: bool) -> Client:
        me = self.me(i, client, lock)
        slot = client.slots[lock]._replace(phase=IDLE, dirty=False, doubt=0, opened=False)
        client = client._replace(slots=at(client.slots, lock, slot))
        if flushed or "ended" in self.removed:
            return client._replace(ended=tuple(entry for entry in client.ended if entry != me))
        return client._replace(undurable=tuple(sorted({*client.undurable, me})))

    def lost(self, world: World, i: int, client: Client, lock: int) -> str:
        """Return a violation if the client reports a loss and nothing was lost."""
        me = self.me(i, client, lock)
        row, session = world.locks[lock], find(world.sessions, me[:2])
        if row and me in row.holds and session is not None and not session.dead:
            return f"FALSE LOSS of lock {lock} by client {i}"
        return ""

    def session_over(self, world: World, i: int, client: Client) -> tuple[Client, str, str]:
        note = violation = ""
        slots = []
        for lock, slot in enumerate(client.slots):
            if slot.phase in (HELD, KEEP):
                note, violation = ", LOST with its session", violation or self.lost(world, i, client, lock)
            if slot.phase in (HELD, KEEP, REL):
                slot = slot._replace(phase=IDLE)
            elif slot.phase in (WAIT, GOT):
                slot = slot._replace(phase=NEW)
            slots.append(slot._replace(cache=None, dirty=False, doubt=0, read=False, opened=False))
        client = client._replace(
            session=NONE, sent=(), ended=(), undurable=(), series=(), age=self.cap, slots=tuple(slots)
        )
        return client, note, violation

    def saw(
        self,
        world: World,
        i: int,
        client: Client,
        lock: int,
        row: Any,
        tick: int,
        age: int,
        *,
        written: bool = False,
    ) -> tuple:
        """Take in a row that was read after everything known of it; return client, note and violation.

        ``written``: a flushed write of the client has made it.
        """
        slot = client.slots[lock]._replace(cache=row, tick=tick, read=False, noted=False)
        me = self.me(i, client, lock)
        # Under a dead session nothing counts, not even a hold that the row shows.
        holds, queue = row[2:4] if row and client.session != NONE else ((), ())
        note = violation = ""
        if slot.phase in (NEW, WAIT, GOT):
            if me in holds:
                since = 0 if "until of the answer" in self.removed else age
                shown = since if slot.phase != GOT else min(slot.shown, since)
                unproven = not self.reads_prove and not written and (slot.phase != GOT or slot.seen)
                # In a log of one order, what another client has written is either durable before anything that follows from it
                # or repeated by that client; one's own write is not, once it was given up.
                unproven = unproven and (slot.dirty or not self.flushes)
                seen = unproven and "grants are proved" not in self.removed
                slot = slot._replace(phase=GOT, shown=shown, seen=seen)
            else:
                slot = slot._replace(phase=WAIT if me in queue else NEW)
        if slot.phase in (HELD, KEEP) and me not in holds:
            if slot.phase == KEEP and (*me, 1) in holds:
                if slot.dirty and not written and not self.reads_prove:
                    # The write that keeps it may be undone: it is repeated, as every leave that was given up.
                    return client._replace(slots=at(client.slots, lock, slot)), note, violation
                return self._kept(client._replace(slots=at(client.slots, lock, slot)), lock), ", kept", "kept"
            if "verification" not in self.removed:
                violation = self.lost(world, i, client, lock)
                client = self.end(i, client._replace(slots=at(client.slots, lock, slot)), lock)
                return client, ", LOST: not in the row", violation
        elif slot.phase in (HELD, KEEP):
            since = 0 if "read after the heartbeat" in self.removed else age
            slot = slot._replace(shown=min(slot.shown, since))
        return client._replace(slots=at(client.slots, lock, slot)), note, violation

    def _kept(self, client: Client, lock: int) -> Client:
        slot = client.slots[lock]._replace(phase=IDLE, dirty=False, doubt=0, opened=False)
        return client._replace(slots=at(client.slots, lock, slot))

    def hear(self, world: World, i: int, message: Message) -> tuple[World, str, str]:
        """Let a client hear an answer; return the new state, a note for the trace and a violation."""
        client = world.clients[i]
        kind, lock, payload, result, age = message[1:6]
        newest: int | None = None
        note = violation = ""
        if result == ("lost",):
            client = self.broken(client, message)
        elif kind == "O":
            if client.session == OPENING:
                opened = OPEN if result[0] else NONE
                client = client._replace(
                    session=opened, version=payload[1], age=dict(client.sent)[payload[1]], sent=(), beat=1
                )
        elif kind == "K":
            if client.slots[lock].phase == KEEP:
                client = client._replace(
                    slots=at(client.slots, lock, client.slots[lock]._replace(opened=True))
                )
        elif kind == "H":
            if payload[0] == (i, client.generation) and client.session == OPEN:
                client, note, violation = self._renewed(world, i, client, payload, result, age)
        elif kind == "S":
            if payload == (i, client.generation) and client.session == CHECK:
                client, note, violation = self._checked(world, i, client, result[0])
        elif kind == "R":
            if not message.fresh:
                note = ", older than what is known"
            else:
                newest = lock
                client, note, violation = self.saw(world, i, client, lock, result[0], result[1], age)
                slot = client.slots[lock]
                me = self.me(i, client, lock)
                if (
                    slot.phase == REL
                    and (not result[0] or me not in result[0].holds + result[0].queue)
                    and (not slot.dirty or "leave writes" in self.removed)
                    and not slot.doubt
                ):
                    client = self.finish(i, client, lock, flushed=False)
                inside = result[0].holds + result[0].queue if result[0] else ()
                removed = {entry for entry in client.ended if entry[2] == lock and entry not in inside}
                if client.slots[lock].phase == REL:
                    removed.discard(me)
                client = client._replace(undurable=tuple(sorted({*client.undurable, *removed})))
        elif kind == "Q":
            client = self._observed(client, result, age)
        elif kind == "C":
            pass
        elif kind == "D":
            client = client._replace(series=tuple(seen for seen in client.series if seen[0] != payload[0]))
            if result[0]:
                client = client._replace(dead=tuple(sorted({*client.dead, payload[0]})))
        elif client.session == NONE:
            pass
        elif kind == "W":
            if not result[0]:
                slot = client.slots[lock]._replace(cache=None)
                client = client._replace(
                    slots=at(
                        client.slots,
                        lock,
                        slot._replace(read=slot.read or slot.phase in (HELD, GOT, KEEP)),
                    )
                )
            else:
                newest = lock
                client, note, violation = self._wrote(world, i, client, lock, payload, result[1], age)
        elif kind == "E":
            newest = lock
            written = bool(result[0]) and result[0].version == payload[1]
            client, note, violation = self.saw(
                world, i, client, lock, result[0], result[1], age, written=written
            )
            if "doubt stays" in self.removed:
                client = client._replace(slots=at(client.slots, lock, client.slots[lock]._replace(doubt=0)))
        if violation == "kept":
            violation = ""
            if (promise := self._promise(world, i, lock)) is None:
                violation = f"KEEP: lock {lock} was granted while client {i} released it with keep"
            else:
                world = world._replace(kept=at(world.kept, lock, promise))
        if newest is not None:
            world = self._stale(world, i, [newest])
        return world._replace(clients=at(world.clients, i, client)), note, violation

    def _promise(self, world: World, i: int, lock: int) -> int | None:
        client = world.clients[i]
        row = world.locks[lock]
        me = self.me(i, client, lock)
        if client.slots[lock].gone is not None:
            return 0
        if not (row and (*me, 1) in row.holds):
            # It may be over by now, if the answer was late.
            return 0 if client.slots[lock].call >= self.claim(me).keep else None
        return max(0, self.claim(me).keep - client.slots[lock].call)

    def _stale(self, world: World, i: int, locks: list[int]) -> World:
        if "only later reads" in self.removed or not world.messages:
            return world
        return world._replace(
            messages=tuple(
                message._replace(fresh=False)
                if message.client == i and message.kind == "R" and message.lock in locks
                else message
                for message in world.messages
            )
        )

    def _renewed(
        self, world: World, i: int, client: Client, payload: tuple, result: tuple, age: int
    ) -> tuple:
        done, versions = result
        if not done:
            if "own heartbeats" in self.removed:
                return self.session_over(world, i, client)
            return client._replace(session=CHECK), "", ""
        slots = []
        for lock, slot in enumerate(client.slots):
            known = (slot.cache[0] if slot.cache else 0) if slot.cache is not None else None
            if slot.phase in (HELD, GOT, KEEP):
                unchecked = "verification" in self.removed or (lock and "every row" in self.removed)
                if unchecked or known == versions[lock]:
                    slot = slot._replace(shown=min(slot.shown, age))
                else:
                    slot = slot._replace(read=True)
                    if "until after the read" in self.removed:
                        slot = slot._replace(shown=min(slot.shown, age))
            if (len(slots), slot.number) in payload[5]:
                slot = slot._replace(seen=False)
            slots.append(slot)
        ended = settled(client.ended, payload[4])
        client = client._replace(
            version=payload[2],
            sent=(),
            age=dict(client.sent).get(payload[2], self.cap),
            ended=ended,
            undurable=tuple(entry for entry in client.undurable if entry in ended),
            slots=tuple(slots),
        )
        return self._ruled_out(i, client), "", ""

    def _ruled_out(self, i: int, client: Client) -> Client:
        """Take in that the session row has another version than a statement names: a copy that counts is in the row by now."""
        for lock, slot in enumerate(client.slots):
            if slot.doubt and slot.doubt != client.version:
                after = slot._replace(doubt=0, cache=None)
                if "read after the heartbeat that rules out" in self.removed:
                    after = slot._replace(doubt=0)
                client = client._replace(slots=at(client.slots, lock, after))
                row = after.cache
                if row is not None and slot.phase == REL and not self.build(i, client, lock)[1]:
                    client = self.finish(i, client, lock, flushed=False)
        return client

    def _checked(
        self, world: World, i: int, client: Client, found: Session | None
    ) -> tuple[Client, str, str]:
        if found is None or found.dead:
            return self.session_over(world, i, client)
        sent = dict(client.sent)
        age = min(client.age, sent.get(found.version, self.cap))
        if not self.reads_prove and "heartbeats are proved" not in self.removed:
            # It is repeated at once.
            age, client = client.age, client._replace(beat=1)
        client = client._replace(
            session=OPEN,
            version=found.version,
            age=age,
            sent=tuple(pair for pair in client.sent if pair[0] != found.version),
        )
        return self._ruled_out(i, client), "", ""

    def _observed(self, client: Client, result: tuple, age: int) -> Client:
        rows, epoch, boot = result
        if not any(slot.phase == WAIT for slot in client.slots):
            return client
        distrust = client.distrust or (epoch != client.epoch and "clock in step" not in self.removed)
        series = {name: (name, version, since, proof) for name, version, since, proof in client.series}
        dead, over = set(client.dead), set(client.over)
        for name, row in rows:
            if row is None and "absence is observed" in self.removed:
                dead.add(name)
                continue
            if row is not None and row.dead:
                dead.add(name)
                series.pop(name, None)
                continue
            version = row.version if row is not None else 0
            since = age if "count from the arrival" in self.removed else 0
            if name in series:
                _, known, first, _ = series[name]
                continued = observe(Series(str(known), -first, None), str(version), None, -since)
                since = -int(continued.since)
            proof = UNKNOWN
            if row is not None and row.boot != boot:
                proof = LATER if row.age >= self.ttl_of(name) else REBOOTED
            elif row is not None and self.clock and not distrust and row.age > self.ttl_of(name):
                proof = EXPIRED
            series[name] = (name, version, since, proof)
            if row is not None:
                over.update(row.ended)
        return client._replace(
            series=tuple(sorted(series.values())),
            dead=tuple(sorted(dead)),
            over=tuple(sorted(over)),
            distrust=distrust,
            epoch=epoch,
        )

    def _wrote(
        self, world: World, i: int, client: Client, lock: int, payload: tuple, tick: int, age: int
    ) -> tuple:
        _, row, flushed, forget = payload
        me = self.me(i, client, lock)
        slot = client.slots[lock]
        leaving = slot.phase == REL
        inside = row.holds + row.queue
        gone = {
            entry
            for entry in client.ended
            if entry[2] == lock
            and entry not in inside
            and not (entry == me and leaving)
            and entry not in client.undurable
        }
        if flushed:
            ended = settled(tuple(entry for entry in client.ended if entry not in gone), forget)
            client = client._replace(
                ended=ended, undurable=tuple(entry for entry in client.undurable if entry in ended)
            )
        else:
            client = client._replace(undurable=tuple(sorted({*client.undurable, *gone})))
        client = client._replace(slots=at(client.slots, lock, slot._replace(dirty=False)))
        client, note, violation = self.saw(world, i, client, lock, row, tick, age, written=flushed)
        if leaving and me not in inside:
            client = self.finish(i, client, lock, flushed=flushed)
        return client, note, violation

    # --- what a client may do

    def actions(self, world: World, i: int) -> Iterator[tuple[int, str, Client, Message | None, bool]]:
        """Yield rank, label, client, request, and whether time waits for it."""
        client = world.clients[i]
        own = (i, client.generation)
        flying = {
            (message.kind, message.lock)
            for message in world.messages
            if message.client == i and not message.orphan and not (message.kind == "R" and not message.fresh)
        }
        new = world.serial
        for lock, slot in enumerate(client.slots):

            def change(
                slots: tuple = client.slots, lock: int = lock, slot: Slot = slot, **fields: Any
            ) -> Client:
                return client._replace(slots=at(slots, lock, slot._replace(**fields)))

            claims = self.claims[i][lock]
            parallel = "only later reads" in self.removed
            lane = not any((kind, lock) in flying for kind in ("WEK" if parallel else "WREK"))
            if slot.phase in (HELD, KEEP) and not self.valid(i, client, slot):
                yield CHORE, "its validity is over, LOST", self.end(i, client, lock), None, True
                return
            if slot.phase == IDLE and slot.number < len(claims) and client.session == OPEN and lane:
                yield (
                    FAULT,
                    f"wants lock {lock}",
                    change(phase=NEW, number=slot.number + 1, gone=None),
                    None,
                    False,
                )
            if slot.phase == HELD:
                if claims[slot.number - 1].keep:
                    after = change(phase=KEEP, call=0, opened="session before" in self.removed)
                    if "ended after the keep" in self.removed:
                        after = after._replace(ended=tuple(sorted({*after.ended, self.me(i, client, lock)})))
                    yield CHORE, f"releases lock {lock} and keeps it", after, None, False
                else:
                    yield CHORE, f"releases lock {lock}", self.end(i, client, lock), None, False
            if slot.phase == KEEP and not slot.opened and lane:
                payload = ((*self.me(i, client, lock), 1), new)
                yield CHORE, "", client, Message(i, "K", lock, payload), False
            if not lane:
                continue
            if slot.read or (slot.cache is None and slot.phase in (NEW, REL, KEEP)):
                if slot.read or not self._enters(i, client, lock):
                    yield CHORE, "", client, Message(i, "R", lock, ()), slot.read
            elif (
                (slot.phase == WAIT or (parallel and slot.phase == NEW))
                and ("poll" not in self.removed or slot.noted)
            ) or (slot.phase == GOT and slot.cache is None):
                yield POLL, "", client, Message(i, "R", lock, ()), False
            if client.session != OPEN:
                continue
            free = slot.cache is None or not (slot.cache and slot.cache.holds + slot.cache.queue)
            if self._enters(i, client, lock) and not slot.read and free:
                over = ()
                if "statements end nothing" in self.removed:
                    over = tuple(
                        name
                        for name, row in world.sessions
                        if name != own and (row.dead or row.age >= self.ttl_of(name))
                    )
                payload = (self.me(i, client, lock), new, client.version, slot.tick, over)
                yield CHORE, "", client, Message(i, "E", lock, payload), False
            barred = slot.phase == REL and slot.doubt and "heartbeat before the leave" not in self.removed
            if slot.cache is not None and not barred:
                yield from self._writes(i, client, lock, new)
        yield from self._session_actions(world, i, client, flying, new)

    def _enters(self, i: int, client: Client, lock: int) -> bool:
        """Tell whether a client asks for a lock by a statement: not for permits, whose limit stands in the row."""
        slot = client.slots[lock]
        return (
            self.statements
            and slot.phase == NEW
            and client.session == OPEN
            and self.claim(self.me(i, client, lock)).mode != "permits"
        )

    def _writes(self, i: int, client: Client, lock: int, new: int) -> Iterator[tuple]:
        slot = client.slots[lock]
        row = slot.cache
        written, changed, flushed = self.build(i, client, lock)
        if not changed:
            return
        if "leave is flushed" in self.removed and slot.phase == REL:
            flushed = bool(written.holds or written.queue)
        if "keep is flushed" in self.removed and slot.phase == KEEP:
            flushed = False
        version = new
        if "random versions" in self.removed:
            version = row[0] + 1 if row else 1
        written = written._replace(version=version)
        if not row and (written.holds or written.queue) and "insert first" not in self.removed:
            written, flushed = Row(version, 0, (), ()), True
        # An ended id that has to be checked again is not forgotten by any write before that.
        checked = "check first" in self.removed or not any(other.read for other in client.slots)
        forget = client.undurable if checked else ()
        payload = (row[0] if row else 0, written, flushed, forget)
        yield CHORE, "", client, Message(i, "W", lock, payload), False

    def _session_actions(
        self, world: World, i: int, client: Client, flying: set, new: int
    ) -> Iterator[tuple]:
        own = (i, client.generation)
        free = {kind for kind, _ in flying}
        wants = any(
            slot.phase == NEW or slot.number < len(self.claims[i][n]) for n, slot in enumerate(client.slots)
        )
        if client.session == NONE and "O" not in free and client.generation < self.generations and wants:
            name = (i, client.generation + 1)
            opening = client._replace(generation=name[1], session=OPENING, sent=((new, 0),))
            yield CHORE, "", opening, Message(i, "O", -1, (name, new)), False
        if client.session == CHECK and "S" not in free:
            yield CHORE, "", client, Message(i, "S", -1, own), True
        active = any(slot.phase != IDLE for slot in client.slots) or client.ended
        unproven = tuple(
            (lock, slot.number)
            for lock, slot in enumerate(client.slots)
            if slot.phase == GOT and slot.seen and not slot.read
        )
        due = client.beat or unproven
        if client.session == OPEN and "H" not in free and due and (active or self.busy):
            ended = client.ended if "ended" not in self.removed else ()
            checked = "check first" in self.removed or not any(slot.read for slot in client.slots)
            payload = (own, client.version, new, ended, client.undurable if checked else (), unproven)
            beating = client._replace(beat=0, sent=(*client.sent, (new, 0)))
            yield BEAT, "", beating, Message(i, "H", -1, payload), True
        if {"Q", "D", "C"} & free:
            return
        ahead: set[Id] = set()
        for lock, slot in enumerate(client.slots):
            if slot.phase == WAIT and slot.cache:
                me, queue = self.me(i, client, lock), slot.cache.queue
                before = queue[: queue.index(me)] if me in queue else ()
                ahead |= {self.session_of(entry) for entry in slot.cache.holds + before}
        names = tuple(sorted(name for name in ahead if name != own and name not in client.dead))
        if not names:
            return
        yield POLL, "", client, Message(i, "Q", -1, names), False
        for name, version, since, proof in client.series:
            if name not in names:
                continue
            verdict = self._verdict(i, name, version, since, proof)
            if verdict in (Verdict.OVER, Verdict.KEPT):
                kind = "D" if verdict is Verdict.OVER else "C"
                yield CHORE, "", client, Message(i, kind, -1, (name, version, new)), False

    def _verdict(self, i: int, name: Id, version: int, since: int, proof: int) -> Verdict:
        """Ask the engine's rule what becomes of a session."""
        ttl = self.ttl_of(name)
        row, clock = None, None
        if version:
            ends = StoreClock(0.0, "one run") if proof else None
            kept = float(ttl) if len(name) == 5 and "kept over a reboot" not in self.removed else None
            row = SessionRow(
                ttl if "ttl of the row" not in self.removed else self.ttl[i], expires=ends, kept=kept
            )
            clock = StoreClock(float(ttl), "one run" if proof == EXPIRED else "another") if proof else None
        if "ttl in the entry" in self.removed:
            ttl = self.ttl[i]
        series = Series(str(version) if version else "", -since, row)
        return judge(series, ttl, self.skew, clock, wall=float(ttl) if proof == LATER else 0.0)

    # --- steps

    def steps(self, world: World) -> Iterator[tuple[str, World, str]]:
        for _, label, after, violation in self.moves(world, faults=True):
            yield label, after, violation

    def moves(self, world: World, *, faults: bool) -> Iterator[tuple[int, str, World, str]]:
        """Yield rank, label, next state and violation of each step."""
        names = ("late", "broken", "stop", "cancel", "warned", "shown", "undone")
        late, broken, stop, cancel, warned, shown, undone = (
            self.spend(world, name) if faults else None for name in names
        )
        waits = False
        for index, message in enumerate(world.messages):
            rest = world._replace(messages=world.messages[:index] + world.messages[index + 1 :])
            i = message.client
            if message.result is None and (begun := self.starts(world, message)) is not None:
                label = f"the statement of client {i} begins"
                yield FAULT, label, self.norm(rest._replace(messages=(*rest.messages, begun))), ""
            if message.result is None:
                after, result, violation = self.execute(rest, message)
                if not message.orphan:
                    after = after._replace(messages=(*after.messages, message._replace(result=result)))
                rank = FAULT if message.orphan else ENTER
                yield (
                    rank,
                    f"the store executes late: {self.show(message)}{self.reply(result)}",
                    self.norm(after),
                    violation,
                )
            elif not world.clients[i].stopped:
                # It was flushed by now, and what was written before it.
                durable = None if message.flushing else rest.durable
                after, note, violation = self.hear(rest._replace(durable=durable), i, message)
                yield ENTER, f"client {i} hears late: {self.show(message)}{note}", self.norm(after), violation
            if (
                broken
                and not message.orphan
                and message.kind in self.kinds
                and i >= 0
                and not world.clients[i].stopped
            ):
                yield self._break(rest, message, broken, "FAULT")
        for i, client in enumerate(world.clients):
            if client.stopped:
                resumed = world._replace(clients=at(world.clients, i, client._replace(stopped=False)))
                yield FAULT, f"client {i} resumes", self.norm(resumed), ""
                continue
            if stop and i in self.stops and any(slot.phase for slot in client.slots):
                halted = at(world.clients, i, client._replace(stopped=True))
                yield (
                    FAULT,
                    f"FAULT client {i} is stopped",
                    self.norm(world._replace(clients=halted, budget=stop)),
                    "",
                )
            if cancel and client.session == OPEN:
                for lock, slot in enumerate(client.slots):
                    if slot.phase in (NEW, WAIT, GOT):
                        left = at(world.clients, i, self.end(i, client, lock))
                        label = f"client {i} is cancelled"
                        yield FAULT, label, self.norm(world._replace(clients=left, budget=cancel)), ""
            for rank, label, after, message, must in self.actions(world, i):
                waits = waits or must
                acted = world._replace(clients=at(world.clients, i, after), serial=world.serial + 1)
                if message is None:
                    yield rank, f"client {i} {label}", self.norm(acted), ""
                    continue
                done, result, violation = self.execute(acted, message)
                heard, note, other = self.hear(done, i, message._replace(result=result))
                label = f"client {i} {self.show(message)}"
                yield rank, f"{label}{self.reply(result)}{note}", self.norm(heard), violation or other
                if late and message.kind in self.kinds:
                    flying = acted._replace(messages=(*acted.messages, message), budget=late)
                    yield FAULT, f"{label}: FAULT, late", self.norm(flying), ""
                if broken and message.kind in self.kinds:
                    yield self._break(acted, message, broken, "FAULT")
                if warned and message.kind in WRITES & set(self.kinds) and done.durable is None:
                    # A flushed write; what it has not changed, nobody has to wait for.
                    shows = done._replace(
                        durable=self._unflushed(acted),
                        budget=warned,
                        clients=at(done.clients, i, self.broken(done.clients[i], message)),
                    )
                    label = f"{label}{self.reply(result)}: FAULT, on the primary alone"
                    yield FAULT, label, self.norm(shows), violation
                if shown and message.kind in WRITES & set(self.kinds) and done.durable is None:
                    flushing = message._replace(result=result, flushing=True)
                    shows = done._replace(
                        durable=self._unflushed(acted), budget=shown, messages=(*done.messages, flushing)
                    )
                    yield FAULT, f"{label}: FAULT, shown before it is flushed", self.norm(shows), violation
                    gone = at(done.clients, i, self.broken(done.clients[i], message))
                    shows = shows._replace(messages=done.messages, clients=gone)
                    broke = f"{label}: FAULT, shown before it is flushed, and the connection breaks"
                    yield FAULT, broke, self.norm(shows), violation
                if undone and message.kind in WRITES & set(self.kinds):
                    yield from self._undone(acted, done, message, undone, label)
                if stop and i in self.stops and message.kind in self.kinds and message.kind in WRITES:
                    halted = at(acted.clients, i, after._replace(stopped=True))
                    flying = acted._replace(messages=(*acted.messages, message), clients=halted, budget=stop)
                    yield FAULT, f"{label}: FAULT, stopped before the answer", self.norm(flying), ""
        if not waits:
            yield TICK, "-- tick --", self.norm(self.tick(world)), ""
        if faults:
            yield from self._accidents(world)

    def _undone(
        self, before: World, done: World, message: Message, budget: tuple, label: str
    ) -> Iterator[tuple[int, str, World, str]]:
        """Yield what may follow when the server says that the transaction of a write was undone, with the store's repetition of it.

        ``before`` is the state without the write, ``done`` the one with it.
        """
        i = message.client
        made, answer = (True, 0), (False, 0)
        if message.kind == "H":
            versions = tuple(row[0] if row else 0 for row in before.locks)
            made, answer = (True, versions), (False, versions)
        outcomes = [
            ("it has counted, and the repetition is refused", done, answer),
            ("its row is locked, also for the repetition", before, answer),
        ]
        if "rolled back first" in self.removed:
            # A part of a transaction that stays open is committed with the next one.
            late = before._replace(messages=(*before.messages, message._replace(orphan=True, fresh=False)))
            outcomes.append(("it is committed later", late, answer))
        if "singly" in self.removed:
            # Its place in a transaction was before the statement that found the transaction undone, and began another one.
            outcomes.append(("it was the first half, and the second is answered", before, made))
        for what, world, result in outcomes:
            after, note, violation = self.hear(world, i, message._replace(result=result))
            yield (
                FAULT,
                f"{label}: FAULT, undone: {what}{note}",
                self.norm(after._replace(budget=budget)),
                violation,
            )

    def _break(self, world: World, message: Message, budget: tuple, word: str) -> tuple[int, str, World, str]:
        i = message.client
        client = self.broken(world.clients[i], message)
        orphans = ()
        if message.result is None and message.kind in WRITES:
            orphans = (message._replace(orphan=True, age=0, fresh=False),)
        after = world._replace(
            clients=at(world.clients, i, client), messages=world.messages + orphans, budget=budget
        )
        label = f"client {i} {self.show(message)}: {word}, the connection breaks, the client gives up"
        return FAULT, label, self.norm(after), ""

    def _accidents(self, world: World) -> Iterator[tuple[int, str, World, str]]:
        if (budget := self.spend(world, "crash")) and world.durable is not None:
            yield self._crash(world, budget)
        if budget := self.spend(world, "reboot"):
            yield self._reboot(world, budget)
        for lock, row in enumerate(world.locks):
            if not row:
                continue
            if budget := self.spend(world, "delete"):
                after = self._bereave(world, lock)._replace(
                    locks=at(world.locks, lock, ABSENT),
                    durable=None,
                    budget=budget,
                    kept=at(world.kept, lock, 0),
                )
                yield FAULT, f"FAULT lock row {lock} is deleted", self.norm(after), ""
            if row.holds and (budget := self.spend(world, "force")):
                new, _, _ = self._apply(row, world.top[lock] + 1, (), (), (), ("force", row.holds[0]))
                new = new._replace(version=world.serial)
                after = self._bereave(world, lock)._replace(budget=budget, kept=at(world.kept, lock, 0))
                after, _ = self._grants(after, lock, row, new)
                after = after._replace(
                    locks=at(world.locks, lock, new), durable=None, serial=world.serial + 1
                )
                yield FAULT, f"lock {lock} is released by force", self.norm(after), ""
            free = not row.holds and not row.queue
            if "purge of kept rows" in self.removed:
                free = not any(len(entry) == 4 for entry in row.holds) and not row.queue
            if free and (budget := self.spend(world, "purge")):
                purge = Message(-1, "P", lock, row.version, orphan=True)
                after, _, _ = self.execute(world._replace(budget=budget), purge)
                yield FAULT, f"purge deletes the free row {lock}", self.norm(after), ""
                late = world._replace(messages=(*world.messages, purge), budget=budget)
                yield FAULT, f"purge finds row {lock} free", self.norm(late), ""
        if budget := self.spend(world, "delete session"):
            for name, session in world.sessions:
                if not session.dead:
                    after = world._replace(sessions=put(world.sessions, name, None), budget=budget)
                    yield FAULT, f"FAULT session row {name} is deleted", self.norm(after), ""
        if budget := self.spend(world, "clock"):
            older = tuple((name, row._replace(age=self.cap)) for name, row in world.sessions)
            after = world._replace(sessions=older, epoch=world.epoch + 1, budget=budget)
            yield FAULT, "FAULT the clock of the store steps forward", self.norm(after), ""
        if budget := self.spend(world, "mute"):
            for i, client in enumerate(world.clients):
                for lock, slot in enumerate(client.slots):
                    if slot.noted:
                        deaf = client._replace(slots=at(client.slots, lock, slot._replace(noted=False)))
                        after = world._replace(clients=at(world.clients, i, deaf), budget=budget)
                        yield FAULT, f"FAULT a notification to client {i} is lost", self.norm(after), ""

    def _crash(self, world: World, budget: tuple) -> tuple[int, str, World, str]:
        clients, messages = list(world.clients), []
        for message in world.messages:
            i = message.client
            if message.orphan:
                if self.survive:
                    messages.append(message)
            elif not clients[i].stopped:
                clients[i] = self.broken(clients[i], message)
            elif (message.result is not None and not message.flushing) and (
                message.kind != "W" or "answers of the connection" in self.removed
            ):
                messages.append(message)
            else:
                messages.append(message._replace(result=("lost",)))
            if self.survive and not message.orphan and message.result is None and message.kind in WRITES:
                messages.append(message._replace(orphan=True, fresh=False))
        locks, sessions = world.durable
        after = world._replace(
            locks=locks,
            sessions=sessions,
            durable=None,
            clients=tuple(self.reconnect(client) for client in clients),
            messages=tuple(messages),
            budget=budget,
        )
        return FAULT, f"FAULT the store crashes: lock rows are {locks} again", self.norm(after), ""

    def _reboot(self, world: World, budget: tuple) -> tuple[int, str, World, str]:
        # A claim that was under way has ended with its process; a new process makes those that come after it.
        clients = tuple(
            Client(
                False,
                client.generation,
                NONE,
                0,
                self.cap,
                1,
                (),
                (),
                (),
                (),
                (),
                (),
                False,
                world.epoch,
                tuple(Slot(number=slot.number) for slot in client.slots),
            )
            for client in world.clients
        )
        locks, sessions = self._unflushed(world)
        after = world._replace(
            locks=locks,
            sessions=sessions,
            durable=None,
            clients=clients,
            messages=(),
            budget=budget,
            boot=world.boot + 1,
        )
        return FAULT, f"FAULT the machine reboots: lock rows are {locks}", self.norm(after), ""

    def _bereave(self, world: World, lock: int) -> World:
        clients = list(world.clients)
        for entry in world.locks[lock].holds:
            client = clients[entry[0]]
            slot = client.slots[lock]
            if entry[:4] == self.me(entry[0], client, lock) and slot.phase in (NEW, WAIT, GOT, HELD, KEEP):
                clients[entry[0]] = client._replace(slots=at(client.slots, lock, slot._replace(gone=0)))
        return world._replace(clients=tuple(clients))

    def tick(self, world: World) -> World:
        cap = self.cap

        def older(age: int | None) -> int | None:
            return None if age is None else min(age + 1, cap)

        clients = tuple(
            client._replace(
                age=older(client.age),
                beat=min(client.beat + 1, 1),
                sent=tuple((version, older(age)) for version, age in client.sent),
                series=tuple((name, v, older(since), proof) for name, v, since, proof in client.series),
                slots=tuple(
                    slot._replace(
                        shown=older(slot.shown),
                        gone=older(slot.gone),
                        call=older(slot.call),
                    )
                    for slot in client.slots
                ),
            )
            for client in world.clients
        )
        sessions, durable = world.sessions, world.durable

        def aged(table: tuple) -> tuple:
            return tuple((name, row._replace(age=older(row.age))) for name, row in table)

        if self.clock:
            sessions = aged(sessions)
            durable = durable and (durable[0], aged(durable[1]))
        return world._replace(
            clients=clients,
            sessions=sessions,
            durable=durable,
            kept=tuple(max(0, left - 1) for left in world.kept),
            messages=tuple(message._replace(age=older(message.age)) for message in world.messages),
        )

    def norm(self, world: World) -> World:
        """Forget what can matter no more, so that states which differ in nothing else are the same."""
        clients = tuple(self._norm_client(i, client) for i, client in enumerate(world.clients))
        messages = world.messages
        if messages:
            messages = tuple(sorted((m for m in messages if self._matters(world, m)), key=_order))
        return world._replace(clients=clients, messages=messages)

    def _norm_client(self, i: int, client: Client) -> Client:
        slots = []
        for slot in client.slots:
            if slot.phase == GOT and not slot.seen and self.valid(i, client, slot) and not client.stopped:
                slot = slot._replace(phase=HELD)
            if slot.phase == IDLE:
                slot = slot._replace(gone=None)
            if slot.phase not in (GOT, HELD, KEEP):
                slot = slot._replace(shown=0)
            if slot.phase != GOT:
                slot = slot._replace(seen=False)
            if slot.phase != KEEP:
                slot = slot._replace(call=0)
            if slot.cache is None:
                slot = slot._replace(tick=0)
            slots.append(slot)
        client = client._replace(slots=tuple(slots))
        if not any(slot.phase == WAIT for slot in slots) and "series" not in self.removed:
            client = client._replace(series=())
        if (client.dead or client.over) and all(slot.cache is not None for slot in slots):
            known = {entry for slot in slots if slot.cache for entry in slot.cache.holds + slot.cache.queue}
            client = client._replace(
                dead=tuple(n for n in client.dead if n in {self.session_of(entry) for entry in known}),
                over=tuple(entry for entry in client.over if entry in known),
            )
        return client

    def _matters(self, world: World, message: Message) -> bool:
        """Return False for a request without a listener that can never change anything."""
        if not message.orphan:
            return True
        kind, payload = message.kind, message.payload
        durable = world.durable
        if kind == "W" or kind == "P":
            if kind == "P" and "purge by version" in self.removed:
                return True
            old = payload if kind == "P" else payload[0]
            versions = [world.locks[message.lock]] + ([durable[0][message.lock]] if durable else [])
            return (
                "random versions" in self.removed
                or old in [row[0] if row else 0 for row in versions]
                or old == 0
            )
        if kind in "HDC":
            if kind == "H" and "heartbeat" in self.removed:
                return True
            found = find(world.sessions, payload[0])
            return payload[1] == 0 or (found is not None and found.version == payload[1])
        if kind == "E" and len(payload) == FIELDS and "names its heartbeat" not in self.removed:
            # Versions of session rows are flushed, and never come back.
            found = find(world.sessions, payload[0][:2])
            return found is not None and found.version == payload[2]
        return True

    # --- the fair schedule

    def stuck(self, world: World, live: set[int]) -> list[str] | None:
        """Return the steps of a fair schedule that grants nothing to the clients that wait, or ``None``."""
        waiting = [
            (i, lock)
            for i, client in enumerate(world.clients)
            for lock, slot in enumerate(client.slots)
            if slot.phase in (NEW, WAIT, GOT) and not client.stopped and client.session == OPEN
        ]
        if not waiting:
            return None
        visited, labels = set(), []
        for _ in range(5 * self.cap + 6):
            polled: set[str] = set()
            for _ in range(200):
                if not polled:
                    key = self.key(world)
                    if key in live:
                        live |= visited
                        return None
                    visited.add(key)
                if any(world.clients[i].slots[lock].phase == HELD for i, lock in waiting):
                    live |= visited
                    return None
                steps = [
                    step
                    for step in self.moves(world, faults=False)
                    if step[0] < TICK and not (step[0] == POLL and step[1] in polled)
                ]
                if not steps:
                    break
                rank, label, world, _ = min(steps, key=lambda step: step[0])
                labels.append(label)
                if rank == POLL:
                    polled.add(label)
            ticks = [step for step in self.moves(world, faults=False) if step[0] == TICK]
            if not ticks:
                return [*labels, "time cannot go on"]
            world = ticks[0][2]
            labels.append("-- tick --")
        return labels

    # --- for the reader of a trace

    def show(self, message: Message) -> str:
        if message.kind == "P":
            return NAMES["P"]
        what = {
            "W": message.payload[1:3],
            "D": message.payload[:1],
            "C": message.payload[:1],
            "E": message.payload[:1],
        }
        detail = what.get(message.kind, ()) if message.kind in "WDCE" else ()
        where = f" {message.lock}" if message.lock > 0 else ""
        text = " ".join(str(tuple(part) if isinstance(part, Row) else part) for part in detail)
        return f"{NAMES[message.kind]}{where}{' ' + text if text else ''}"

    def reply(self, result: tuple) -> str:
        return "" if not result else f" -> {result[0] if result[0] != () else 'absent'}"


def _order(message: Message) -> tuple:
    return (
        message.client,
        message.kind,
        message.lock,
        message.orphan,
        message.result is not None,
        message.flushing,
        message.age,
    )
