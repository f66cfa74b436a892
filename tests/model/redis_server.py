"""One lock at a Redis server that exists as a value: the library's own Lua scripts run over a hash, with a clock that stands still.

Only the commands that the scripts call are there. A call is a function of the hash, its expiry, the time, the subscribers that
this server counts, the script and its arguments, so outcomes are kept and looked up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from lupa.lua51 import LuaRuntime

from aiolock.backends.redis.commands import source

__all__ = ["FREE", "Change", "Data", "Outcome", "Scripts"]

KEY = "ns:1:mutex:{x}"
CHANNEL = "ns:1:to:"
NAMES = ("enter", "release", "leave", "renew", "heartbeat", "force", "request_release")
Change = tuple[str, str, str]
KEPT = 400_000
"""Most outcomes that are kept."""


class Data(NamedTuple):
    """The hash of a lock, and the time in ms at which it expires."""

    fields: tuple[tuple[str, str], ...] = ()
    expires: int | None = None


FREE = Data()


class Outcome(NamedTuple):
    """What a script has left behind, its reply, and what it has published: for each message, the client and the text."""

    data: Data
    reply: Any
    published: tuple[tuple[str, str], ...]


class Scripts:
    """The scripts of one family of locks, with texts replaced: planted bugs.

    :param changes: the script (all if empty), an old text, which must be there, and the new one.
    :param counts: scripts may use ``PUBSUB NUMSUB``.
    """

    def __init__(self, changes: tuple[Change, ...] = (), *, family: str = "", counts: bool = True) -> None:
        texts = {name: source(family + name) for name in NAMES}
        for script, old, new in changes:
            changed = {name: text for name, text in texts.items() if script in ("", name) and old in text}
            if not changed:
                raise ValueError(f"the text {old!r} is not in {script or 'any script'}")
            texts |= {name: text.replace(old, new) for name, text in changed.items()}
        self.family = family
        self._counts = counts
        self._kept: dict[tuple, Outcome] = {}
        self._now = 0
        self._hash: dict[str, str] = {}
        self._expires: int | None = None
        self._subscribed: Mapping[str, int] = {}
        self._published: list[tuple[str, str]] = []
        lua = LuaRuntime(encoding="latin-1", unpack_returned_tuples=False)
        self._table = lua.table_from
        lua.globals().redis = lua.table_from({"call": self._call, "pcall": self._call})
        self._functions = {
            name: lua.execute(f"return function(KEYS, ARGV)\n{text}\nend") for name, text in texts.items()
        }

    def run(
        self, data: Data, now: int, subscribed: tuple[tuple[str, int], ...], name: str, arguments: tuple
    ) -> Outcome:
        """Execute a script at ``now`` (µs) where so many are subscribed to the channel of each client."""
        question = data, now, subscribed, name, arguments
        known = self._kept.get(question)
        if known is not None:
            return known
        if data.expires is not None and now // 1000 >= data.expires:
            data = FREE
        self._hash, self._expires, self._now = dict(data.fields), data.expires, now
        self._subscribed, self._published = dict(subscribed), []
        reply = self._functions[name](self._table([KEY]), self._table([text(each) for each in arguments]))
        left = Data(tuple(sorted(self._hash.items())), self._expires) if self._hash else FREE
        outcome = Outcome(left, plain(reply), tuple(self._published))
        if len(self._kept) > KEPT:
            self._kept.clear()
        self._kept[question] = outcome
        return outcome

    def _call(self, command: str, *arguments: Any) -> Any:
        answer = getattr(self, f"_{command.lower()}")(*map(text, arguments))
        return self._table(answer) if isinstance(answer, (list, dict)) else answer

    # --- commands

    def _hget(self, _: str, field: str) -> Any:
        return self._hash.get(field, False)

    def _hmget(self, _: str, *fields: str) -> list:
        return [self._hash.get(field, False) for field in fields]

    def _hexists(self, _: str, field: str) -> int:
        return int(field in self._hash)

    def _hgetall(self, _: str) -> list:
        return [part for field in sorted(self._hash.items()) for part in field]

    def _hset(self, _: str, *pairs: str) -> int:
        self._hash.update(zip(pairs[::2], pairs[1::2], strict=True))
        return len(pairs) // 2

    def _hdel(self, _: str, *fields: str) -> int:
        found = [self._hash.pop(field) for field in fields if field in self._hash]
        if not self._hash:
            self._expires = None
        return len(found)

    def _pexpire(self, _: str, milliseconds: str) -> int:
        if self._hash:
            self._expires = self._now // 1000 + int(milliseconds)
        return int(bool(self._hash))

    def _pttl(self, _: str) -> int:
        if not self._hash:
            return -2
        return -1 if self._expires is None else self._expires - self._now // 1000

    def _time(self) -> list:
        return [str(self._now // 1_000_000), str(self._now % 1_000_000)]

    def _publish(self, channel: str, message: str) -> int:
        client = channel.removeprefix(CHANNEL)
        self._published.append((client, message))
        return self._subscribed.get(client, 0)

    def _pubsub(self, _: str, channel: str) -> Any:
        if not self._counts:
            return {"err": "NOPERM"}
        return [channel, self._subscribed.get(channel.removeprefix(CHANNEL), 0)]


def text(value: Any) -> str:
    """Return an argument as the server gets it."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"a script passes {value!r} to a command")
    return str(int(value)) if value == int(value) else repr(value)


def plain(value: Any) -> Any:
    """Return a reply as a client gets it."""
    if isinstance(value, float):
        return int(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return tuple(plain(each) for _, each in sorted(value.items()))
