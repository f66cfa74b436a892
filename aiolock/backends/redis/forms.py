"""The two commands of a free lock, prepared: all that is the same each time is written once per bid.

A lock is taken and left with the same name, ttl and label again and again; what changes is the number of the request and
the highest token that was seen. Both have as many digits each time, so the lengths on the wire are constants as well.
"""

from __future__ import annotations

from aiolock.backends.redis.commands import Script
from aiolock.backends.redis.scripts import source
from aiolock.contract import Bid
from aiolock.names import escape

__all__ = ["ENTER", "MOST_TOKENS", "RELEASE", "Form", "Forms", "request"]

ENTER, RELEASE = (Script(source(name)) for name in ("enter", "release"))

MOST_TOKENS = 1024
"""Most tokens of a grant whose hold may be passed on inside this process."""

KEPT = 256
"""Of so many bids the commands are kept."""

_FLOOR = "$20\r\n%020d\r\n"
"""A token is a whole number of 64 bits at most."""


def request(process: str, number: int) -> str:
    """How the server calls one claim of one client."""
    return f"{process}:{number:012x}"


class Form:
    """The commands of one bid; ``%`` with the number of the request and the highest token makes each of them whole."""

    __slots__ = ("bid", "enter", "key", "place", "release")

    def __init__(
        self, bid: Bid, key: str, process: str, place: str, scripts: tuple[Script, Script] = (ENTER, RELEASE)
    ) -> None:
        self.bid: Bid = bid
        self.key: str = key
        self.place: str = place
        """The terms of a place, as they were when this was written."""
        ttl, most = round(bid.ttl * 1000), 1 if bid.fair else MOST_TOKENS
        key_and_request = f"{_literal(key)}${len(request(process, 0))}\r\n{process}:%012x\r\n"
        last = _literal(bid.label, f"{place} -1")
        enter = f"{scripts[0].head(1, 6)}{key_and_request}{_literal(ttl, most)}{_FLOOR}{last}"
        self.enter: bytes = enter.encode()
        self.release: bytes = f"{scripts[1].head(1, 2)}{key_and_request}{_FLOOR}".encode()


class Forms:
    """Those of the bids that were used lately."""

    __slots__ = ("_forms", "_prefix", "_process", "_scripts")

    def __init__(self, prefix: str, process: str, scripts: tuple[Script, Script] = (ENTER, RELEASE)) -> None:
        self._scripts = scripts
        self._prefix = prefix
        self._process = process
        self._forms: dict[int, Form] = {}
        """By identity: bids are values, but to compare them takes longer than to write a command."""

    def form(self, bid: Bid, place: str) -> Form:
        """For ``bid``, with these terms of a place."""
        form = self._forms.get(id(bid))
        if form is None or form.bid is not bid or form.place is not place:
            if len(self._forms) >= KEPT:
                self._forms.clear()
            form = self._forms[id(bid)] = Form(bid, self.key(bid), self._process, place, self._scripts)
        return form

    def key(self, bid: Bid) -> str:
        """Where the lock of ``bid`` is on the server."""
        # Not by its cache, in which every name would stay.
        return f"{self._prefix}{bid.kind.family.value}:{{{escape.__wrapped__(bid.name)}}}"


def _literal(*args: str | int) -> str:
    """Arguments as they stand in a command, and survive ``%``."""
    return "".join([f"${len(str(arg).encode())}\r\n{arg}\r\n" for arg in args]).replace("%", "%%")
