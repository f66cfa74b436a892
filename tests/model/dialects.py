"""A lock in the format of another library: two clients of ours and a foreign one, with the Lua scripts of the dialect themselves.

Requests of ours arrive late, twice or never, and their answers may be lost; the foreign client takes what is free, and lets go
by comparing. Ours rely on a grant from the sending of its request, for a ttl less a margin of one tick; the foreign client for
as long as the server keeps its key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from lupa.lua51 import LuaRuntime

from aiolock.backends.redis.commands import source
from tests.model.explore import Run
from tests.model.redis_server import Change, plain, text

__all__ = ["DESIGN", "REMOVALS", "Formats", "Sharing"]

TTL = 4
"""Ticks, of a second each."""
LOCK = "lock"
OVERLAP, ORPHAN = "TWO HOLDERS", "HELD BY NOBODY"
Value = str | tuple[tuple[str, str], ...]


class Formats:
    """The scripts of one dialect over a lock and its note, with texts replaced: planted bugs."""

    def __init__(self, dialect: str, changes: tuple[Change, ...] = ()) -> None:
        texts = {name: source(f"dialects/{dialect}_{name}") for name in ("enter", "renew", "leave")}
        for script, old, new in changes:
            if old not in texts[script]:
                raise ValueError(f"the text {old!r} is not in {script}")
            texts[script] = texts[script].replace(old, new)
        self.dialect = dialect
        self._known: dict[tuple, tuple[Any, frozenset, Any]] = {}
        self._now = 0
        self._keys: dict[str, tuple[Value, int]] = {}
        lua = LuaRuntime(encoding="latin-1", unpack_returned_tuples=False)
        self._table = lua.table_from
        lua.globals().redis = lua.table_from({"call": self._call, "pcall": self._call})
        self._functions = {
            name: lua.execute(f"return function(KEYS, ARGV)\n{code}\nend") for name, code in texts.items()
        }

    def run(
        self, lock: Any, dead: frozenset, now: int, name: str, arguments: tuple
    ) -> tuple[Any, frozenset, Any]:
        """Execute a script at ``now``; ``lock`` is its value and end, ``dead`` the owners with a tombstone. Times of the note are not kept."""
        question = lock, dead, now, name, arguments
        if question not in self._known:
            self._now = now * 1_000_000
            self._keys = {} if lock is None else {LOCK: lock}
            if dead:
                self._keys["note"] = (tuple((f"x:{who}", str(now * 1000)) for who in sorted(dead)), 10**9)
            keys = [LOCK] if name == "renew" else [LOCK, "note"]
            reply = plain(self._functions[name](self._table(keys), self._table(list(map(text, arguments)))))
            left = dict(self._keys.get("note", ((), 0))[0])
            self._known[question] = (
                self._keys.get(LOCK),
                frozenset(key[2:] for key in left if key.startswith("x:")),
                reply,
            )
        return self._known[question]

    def _call(self, command: str, *arguments: Any) -> Any:
        answer = getattr(self, f"_{command.lower()}")(*map(text, arguments))
        return self._table(answer) if isinstance(answer, list) else answer

    # --- commands

    def _hash(self, key: str) -> dict[str, str]:
        value = self._keys.get(key, ((), 0))[0]
        assert not isinstance(value, str), "WRONGTYPE"
        return dict(value)

    def _store(self, key: str, fields: Mapping[str, str]) -> None:
        if fields:
            self._keys[key] = tuple(sorted(fields.items())), self._keys.get(key, ((), 10**9))[1]
        else:
            self._keys.pop(key, None)

    def _get(self, key: str) -> Any:
        value = self._keys.get(key, (False, 0))[0]
        assert not isinstance(value, tuple), "WRONGTYPE"
        return value

    def _set(self, key: str, value: str, _: str, ms: str) -> str:
        self._keys[key] = value, self._now // 1_000_000 + int(ms) // 1000
        return "OK"

    def _del(self, key: str) -> int:
        return int(self._keys.pop(key, None) is not None)

    def _exists(self, key: str) -> int:
        return int(key in self._keys)

    def _pexpire(self, key: str, ms: str) -> int:
        if key not in self._keys:
            return 0
        self._keys[key] = self._keys[key][0], self._now // 1_000_000 + int(ms) // 1000
        return 1

    def _pttl(self, key: str) -> int:
        return (self._keys[key][1] * 1000 - self._now // 1000) if key in self._keys else -2

    def _time(self) -> list:
        return [str(self._now // 1_000_000), "0"]

    def _hget(self, key: str, field: str) -> Any:
        return self._hash(key).get(field, False)

    def _hmget(self, key: str, *fields: str) -> list:
        return [self._hash(key).get(field, False) for field in fields]

    def _hexists(self, key: str, field: str) -> int:
        return int(field in self._hash(key))

    def _hlen(self, key: str) -> int:
        return len(self._hash(key))

    def _hset(self, key: str, *pairs: str) -> int:
        self._store(key, self._hash(key) | dict(zip(pairs[::2], pairs[1::2], strict=True)))
        return 1

    def _hdel(self, key: str, *fields: str) -> int:
        found = self._hash(key)
        self._store(key, {field: value for field, value in found.items() if field not in fields})
        return sum(field in found for field in fields)

    def _publish(self, *_: str) -> int:
        return 0

    def _pubsub(self, _: str, channel: str) -> list:
        return [channel, 0]


# --- the model


class Client(NamedTuple):
    """A client of ours: its phase, and until when it relies on the lock."""

    phase: str = "idle"
    until: int = -1


class State(NamedTuple):
    """Everything at one moment."""

    now: int = 0
    lock: Any = None
    dead: frozenset = frozenset()
    ours: tuple[Client, ...] = (Client(), Client())
    foreign: bool = False
    """The foreign client believes that it holds the lock."""
    flight: frozenset = frozenset()
    """Requests and answers on their way: who, what, when the request was sent."""


class Sharing:
    """Two clients of ours (or one) and a foreign one, on one name.

    :param claims: how many requests each client may have on their way.
    """

    def __init__(
        self,
        claims: tuple[int, ...],
        *,
        dialect: str,
        ticks: int,
        changes: tuple[Change, ...] = (),
        removed: str = "",
    ) -> None:
        self._claims, self._ticks, self._removed = claims, ticks, removed
        self._server = Formats(dialect, changes)
        self._owners = [
            f"aiolock:{who} label" if dialect == "plain" else f"ours:{who}" for who in range(len(claims))
        ]
        self._foreign: Value = "theirs" if dialect == "plain" else (("theirs:1", "1"),)

    def initial(self) -> State:
        return State(ours=tuple(Client() for _ in self._claims))

    def key(self, state: State) -> int:
        return hash(state)

    def check(self, state: State) -> str:
        holders = [
            f"client {who}"
            for who, one in enumerate(state.ours)
            if one.phase == "holds" and one.until > state.now
        ]
        if state.foreign and state.lock is not None and state.lock[0] == self._foreign:
            holders.append("the foreign client")
        if len(holders) > 1:
            return f"{OVERLAP}: {' and '.join(holders)}"
        for who, one in enumerate(state.ours):
            if (
                one.phase == "left"
                and self._holds(state, who)
                and not any(sent[0] == who for sent in state.flight)
            ):
                return f"{ORPHAN}: a late copy took the lock for client {who}, which has given up"
        return ""

    def _holds(self, state: State, who: int) -> bool:
        if state.lock is None:
            return False
        value, owner = state.lock[0], self._owners[who]
        return value == owner if isinstance(value, str) else owner in dict(value)

    def _arguments(self, name: str, who: int, *, tombstone: bool = False) -> tuple:
        owner, ms = self._owners[who], TTL * 1000
        if name == "renew":
            return owner, ms
        if self._server.dialect == "plain":
            return (
                (owner, ms, 0, "p", 1000, 5, 0, 10_000)
                if name == "enter"
                else (owner, int(tombstone), 0, "ch", "p", "kept")
            )
        return (owner, ms, 0, "p", "ch", 0) if name == "enter" else (owner, int(tombstone), "p", "ch", 0, 20)

    def _run(self, state: State, name: str, who: int, *, tombstone: bool = False) -> tuple[State, bool]:
        lock, dead, reply = self._server.run(
            state.lock, state.dead, state.now, name, self._arguments(name, who, tombstone=tombstone)
        )
        granted = bool(reply if isinstance(reply, int) else reply[0])
        return state._replace(lock=lock, dead=dead), granted

    def steps(self, state: State) -> Iterator[tuple[str, State, str]]:
        for label, after in self._steps(state):
            yield label, after, ""

    def _with(self, state: State, who: int, **changed: Any) -> State:
        ours = list(state.ours)
        ours[who] = ours[who]._replace(**changed)
        return state._replace(ours=tuple(ours))

    def _steps(self, state: State) -> Iterator[tuple[str, State]]:
        now = state.now
        if now < self._ticks:
            later = state._replace(now=now + 1)
            if later.lock is not None and later.lock[1] <= later.now:
                later = later._replace(lock=None)
            yield f"{now + 1} s", later
        for who, one in enumerate(state.ours):
            yield from self._client(state, who, one)
        for message in state.flight:
            yield from self._arrives(state._replace(flight=state.flight - {message}), message)
        if state.foreign:
            held = state.lock is not None and state.lock[0] == self._foreign
            yield (
                "the foreign client releases",
                state._replace(foreign=False, lock=None if held else state.lock),
            )
        elif state.lock is None:
            yield (
                "the foreign client enters",
                state._replace(foreign=True, lock=(self._foreign, now + TTL - 1)),
            )

    def _client(self, state: State, who: int, one: Client) -> Iterator[tuple[str, State]]:
        now, mine = state.now, sum(message[0] == who for message in state.flight)
        if one.phase in ("idle", "asked") and mine < self._claims[who]:
            sent = self._with(state, who, phase="asked")
            yield f"client {who} sends enter", sent._replace(flight=state.flight | {(who, "enter", now)})
        if one.phase == "holds" and one.until > now and not mine:
            yield f"client {who} sends renew", state._replace(flight=state.flight | {(who, "renew", now)})
        if one.phase == "holds" and one.until <= now:
            yield f"client {who} counts its hold as lost", self._with(state, who, phase="lost", until=-1)
        if one.phase in ("asked", "holds", "lost"):
            # It arrives before the earlier requests that are still on their way on a connection that broke.
            after, _ = self._run(state, "leave", who, tombstone=bool(mine))
            yield f"client {who} releases", self._with(after, who, phase="left", until=-1)

    def _arrives(self, state: State, message: tuple) -> Iterator[tuple[str, State]]:
        who, what, sent = message
        one = state.ours[who]
        if what in ("yes", "no"):
            if what == "yes" and one.phase in ("asked", "holds"):
                begun = state.now if self._removed == "sending" else sent
                until = max(one.until, begun + TTL - 1)
                state = self._with(state, who, phase="holds", until=until)
            yield f"client {who} gets the answer {what}", state
            return
        yield f"{what} of client {who} never arrives", state
        after, granted = self._run(state, what, who)
        yield f"{what} of client {who} arrives, its answer does not", after
        if what == "renew" and not granted and one.phase == "holds":
            yield (
                f"client {who} is told that it lost the lock",
                self._with(after, who, phase="lost", until=-1),
            )
            return
        answer = (who, "yes" if granted else "no", sent)
        yield f"{what} of client {who} arrives: {answer[1]}", after._replace(flight=after.flight | {answer})


# --- the runs


ALONE, BOTH = (2,), (1, 1)


def without(
    name: str,
    rule: str,
    breaks: str,
    dialect: str,
    *changes: Change,
    claims: tuple[int, ...] = BOTH,
    removed: str = "",
) -> Run:
    """Return a run with these changes of the scripts, or without a rule of the client."""
    options = {"dialect": dialect, "ticks": 6, "changes": changes, "removed": removed}
    return Run(f"{dialect}: {name}", rule, breaks, claims, Sharing, options=options)


PLAIN = (
    without(
        "only what is free",
        "enter sets the key only where there is none",
        OVERLAP,
        "plain",
        ("enter", "if owner then\n", "if false then\n"),
    ),
    without(
        "release: owner",
        "leave deletes the own value alone",
        OVERLAP,
        "plain",
        ("leave", "redis.pcall('GET', KEYS[1]) == me", "redis.pcall('GET', KEYS[1]) ~= false"),
    ),
    without(
        "renewal: owner",
        "renew prolongs the own value alone",
        OVERLAP,
        "plain",
        ("renew", "redis.pcall('GET', KEYS[i]) == ARGV[2 * i - 1]", "redis.pcall('GET', KEYS[i])"),
    ),
    without(
        "from the sending",
        "a hold is certain from the sending of its request on",
        OVERLAP,
        "plain",
        removed="sending",
    ),
    without(
        "tombstone",
        "a request that may still arrive leaves a tombstone",
        ORPHAN,
        "plain",
        ("enter", "if n[1] then return {0, 60000, ''} end", ""),
        claims=ALONE,
    ),
)
REMOVALS = PLAIN


def design(dialect: str, name: str, claims: tuple[int, ...], ticks: int) -> Run:
    """Return a run with all rules."""
    return Run(f"{dialect}: {name}", "", "", claims, Sharing, options={"dialect": dialect, "ticks": ticks})


DESIGN = (
    design("plain", "one of ours, two requests on their way", ALONE, 9),
    design("plain", "two of ours", BOTH, 6),
)
