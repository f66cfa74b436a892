"""The writes of one client to one document: each has a number, and the document remembers the last one of every client.

So after a lost answer the next look tells whether the write counted, and what its answers were.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from aiolock.document import Entry

__all__ = ["Answers", "Body", "Draft", "Pen", "Step", "carry_out", "settle"]

Body = dict[str, Any]
"""What stands in a document; empty if there is none."""
Step = Callable[[Body], tuple[Body | None, Any]]
"""What shall stand there instead (``None``: leave it), and the answer. May be called several times, for other bodies."""
Answers = dict[asyncio.Future[Any], Any]
"""What whoever wished a step is to be told."""

CLIENTS = 256
"""How many clients a document remembers the last write of; one is asked for only while its client looks for its answer."""


class Draft(NamedTuple):
    """What came of some steps, one after the other, if it is written."""

    body: Body | None
    """``None`` if they change nothing."""
    answers: Answers
    failures: dict[asyncio.Future[Any], Exception]
    """Steps that could not be carried out, which changed nothing."""


def carry_out(steps: Iterable[tuple[asyncio.Future[Any], Step]], body: Body) -> Draft:
    """The steps applied to ``body`` in their order."""
    new, answers, failures = body, {}, {}
    for wish, step in steps:
        try:
            after, answers[wish] = step(new)
        except Exception as error:  # noqa: BLE001 - whatever a step says to this body, who wished it hears of it
            failures[wish] = error
        else:
            new = new if after is None else after
    return Draft(None if new is body else new, answers, failures)


class Pen:
    """What one client has written to one document, as far as it is not known what came of it."""

    def __init__(self) -> None:
        self.id: str = secrets.token_hex(8)
        """Who this is, in the document."""
        self._writes = 0
        self._doubts: dict[int, Answers] = {}
        """The answers of writes of which it is not known whether they counted, by their numbers."""
        self._base = ""
        """The version that these were to replace; as long as it stands, each of them may still arrive."""
        self._stamp = ""
        self._seen: dict[str, int] = {}
        """Of the version that was read last: the last write of each client."""

    def read(self, entry: Entry) -> tuple[Body, Answers] | None:
        """What stands there, and the answers of a write that turned out to have counted; ``None`` if it is not readable."""
        page = _decode(entry)
        if page is None:
            return None
        body, self._seen = page
        self._stamp = entry.stamp
        counted = self._doubts.get(self._seen.get(self.id, 0))
        if counted is not None or entry.stamp != self._base:
            # It was the first for its version, or another one was: the others do not count any more.
            self._doubts.clear()
        return body, counted or {}

    def write(self, body: Body, answers: Answers) -> bytes:
        """The document with that body, to replace what was read last; what comes of it is in doubt until :meth:`counted`."""
        self._writes += 1
        others = [(client, number) for client, number in self._seen.items() if client != self.id]
        seen = {**dict(others[-CLIENTS + 1 :]), self.id: self._writes}
        if self._stamp != self._base:
            self._doubts, self._base = {}, self._stamp
        self._doubts[self._writes] = answers
        return json.dumps({"v": 1, "seen": seen, "body": body}, separators=(",", ":")).encode()

    def counted(self) -> None:
        """The last write was answered: it was the first for its version, so none before it will be."""
        self._doubts.clear()

    def in_doubt(self, wish: asyncio.Future[Any]) -> bool:
        """Whether a step stood in a write that was sent, and that may still count although nobody heard so.

        It cannot any more once another write was the first for the version that it was to replace.
        """
        return any(wish in answers for answers in self._doubts.values())


def _decode(entry: Entry) -> tuple[Body, dict[str, int]] | None:
    if not entry.value:
        return {}, {}
    try:
        whole = json.loads(entry.value)
        if whole["v"] != 1 or type(whole["body"]) is not dict or type(whole["seen"]) is not dict:
            return None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return whole["body"], whole["seen"]


def settle(future: asyncio.Future[Any], answer: Any = None, error: Exception | None = None) -> None:
    """Answer, unless that was done before, or nobody waits any more."""
    if not future.done():
        if error is None:
            future.set_result(answer)
        else:
            future.set_exception(error)
