"""A history: the events of all processes with their times, from one append-only file per process.

A line is one event and one `os.write`, so all that a killed process did before its death is in its file. Times are `time.monotonic_ns()`,
which all processes of one machine share (not across time namespaces). To be fair to a holder, a program that hurts it stamps `stop` and `kill`
before the signal and `cont` after it; `down` comes before a server is hurt and `up` after it was healed; `broken` comes before
a connection of a process is ended by others.

Answers have three values. `acquired` and `released` mean yes. `refused` means a definite no (`try_acquire` gave None): another must
have held the lock. Everything else, a timeout, a cancellation or a lost connection, is `unknown`: it may have happened.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["NEVER", "TICK", "Event", "History", "Hold", "Question", "Recorder", "Window", "load"]

Event = dict[str, Any]
NEVER = math.inf

TICK = 0.005
LAG = 0.01
"""Seconds by which a tick is late when the machine, or a fault, kept a process from running."""


class Recorder:
    """The recorder of one process. `process` is unique per process, also per restart: "worker3.1"."""

    def __init__(self, path: Path | str, process: str) -> None:
        self.process = process
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._numbers = itertools.count(1)

    def close(self) -> None:
        os.close(self._file)

    def note(self, kind: str, **fields: object) -> None:
        event = {"t": time.monotonic_ns(), "process": self.process, "kind": kind, **fields}
        os.write(self._file, json.dumps(event).encode() + b"\n")

    def _begin(self, kind: str, **fields: object) -> str:
        number = f"{self.process}#{next(self._numbers)}"
        self.note(kind, id=number, **fields)
        return number

    # One attempt to get a lock, and the hold that it becomes; all go by the number that `acquiring` gave.

    def acquiring(
        self,
        name: str,
        task: str = "main",
        *,
        owner: str | None = None,
        mode: str = "mutex",
        permits: int = 1,
        timeout: float | None = None,
    ) -> str:
        """Before the call. `mode`: mutex, reentrant, read, write or permits. `owner` is who may hold twice; default the task."""
        owner = owner or f"{self.process}/{task}"
        return self._begin(
            "acquire", name=name, task=task, owner=owner, mode=mode, permits=permits, timeout=timeout
        )

    def acquired(self, hold: str, token: int | None) -> None:
        self.note("acquire.ret", id=hold, result="ok", token=token)

    def refused(self, hold: str) -> None:
        self.note("acquire.ret", id=hold, result="fail")

    def unknown(self, hold: str) -> None:
        self.note("acquire.ret", id=hold, result="info")

    def releasing(self, hold: str) -> None:
        self.note("release", id=hold)

    def released(self, hold: str, result: str = "ok") -> None:
        """`result`: ok, fail (it was no longer held) or info."""
        self.note("release.ret", id=hold, result=result)

    def downgrading(self, hold: str) -> None:
        """Before the call: from now on the holder believes in a read hold."""
        self.note("downgrade", id=hold)

    def downgraded(self, hold: str) -> None:
        self.note("downgrade.ret", id=hold)

    def lost(self, hold: str) -> None:
        """The moment at which the holder is told."""
        self.note("lost", id=hold)

    def wrote(self, hold: str) -> None:
        """The holder is about to act on what the lock protects."""
        self.note("wrote", id=hold)

    # A question, `locked()`, and its answer.

    def asking(self, name: str) -> str:
        return self._begin("ask", name=name)

    def answered(self, question: str, locked: bool) -> None:
        self.note("ask.ret", id=question, locked=locked)

    # What the store and the server did, in their own order.

    def stored(self, name: str, owner: str, token: int, *, accepted: bool, fenced: bool) -> None:
        self.note("store", name=name, owner=owner, token=token, accepted=accepted, fenced=fenced)

    def served(self, action: str, name: str, owner: str) -> None:
        """A successful grant, renew, release or expire, as the server's own log tells it."""
        self.note("server", action=action, name=name, owner=owner)

    # What the injector does. A process whose event loop is blocked is stopped as well: it stamps itself.

    def stop(self, process: str) -> None:
        self.note("stop", target=process)

    def cont(self, process: str) -> None:
        self.note("cont", target=process)

    def kill(self, process: str) -> None:
        self.note("kill", target=process)

    async def note_lags(self) -> None:
        """Note when the event loop of this process did not get to run, until cancelled."""
        while True:
            due = time.monotonic_ns() + int(TICK * 1e9)
            await asyncio.sleep(TICK)
            now = time.monotonic_ns()
            if now - due > LAG * 1e9:
                self.note("stop", target=self.process, t=due, why="lag")
                self.note("cont", target=self.process, t=now, why="lag")

    def broken(self, process: str) -> None:
        """Before one of its connections is ended by others."""
        self.note("broken", target=process)

    def down(self, server: str = "server") -> None:
        self.note("down", target=server)

    def up(self, server: str = "server") -> None:
        self.note("up", target=server)


@dataclass(slots=True)
class Hold:
    """One attempt and, if its result is "ok", the hold from `ret` on. Times in ns; NEVER is what has not happened."""

    id: str
    name: str
    process: str
    task: str
    owner: str
    mode: str
    permits: int
    timeout: float | None
    call: float
    ret: float = NEVER
    result: str = "info"
    token: int | None = None
    release_call: float = NEVER
    release_ret: float = NEVER
    release_result: str = "info"
    weak_call: float = NEVER
    """When it became a read hold."""
    weak_ret: float = NEVER
    lost: float = NEVER
    wrote: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        token = "" if self.token is None else f" token {self.token}"
        return f"{self.name!r} by {self.owner} ({self.id}, {self.mode}{token})"


@dataclass(slots=True)
class Question:
    name: str
    process: str
    call: float
    ret: float = NEVER
    locked: bool | None = None


Window = tuple[float, float]


@dataclass
class History:
    """All events in the order of time, and what they mean."""

    events: list[Event]
    attempts: list[Hold] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)
    store: list[Event] = field(default_factory=list)
    server: list[Event] = field(default_factory=list)
    stops: dict[str, list[Window]] = field(default_factory=lambda: defaultdict(list))
    kills: dict[str, float] = field(default_factory=dict)
    outages: list[Window] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.events.sort(key=lambda event: event["t"])
        known: dict[str, Any] = {}
        for event in self.events:
            self._read(event, event["t"], known)

    @property
    def holds(self) -> list[Hold]:
        return [attempt for attempt in self.attempts if attempt.result == "ok"]

    @property
    def start(self) -> float:
        return self.events[0]["t"] if self.events else 0

    @property
    def end(self) -> float:
        return self.events[-1]["t"] if self.events else 0

    def killed(self, process: str) -> float:
        return self.kills.get(process, NEVER)

    def _read(self, event: Event, t: float, known: dict[str, Any]) -> None:
        match event["kind"]:
            case "acquire":
                fields = ("id", "name", "process", "task", "owner", "mode", "permits", "timeout")
                known[event["id"]] = hold = Hold(**{each: event[each] for each in fields}, call=t)
                self.attempts.append(hold)
            case "acquire.ret":
                hold = known[event["id"]]
                hold.ret, hold.result, hold.token = t, event["result"], event.get("token")
            case "release":
                known[event["id"]].release_call = min(t, known[event["id"]].release_call)
            case "release.ret":
                known[event["id"]].release_ret, known[event["id"]].release_result = t, event["result"]
            case "downgrade":
                known[event["id"]].weak_call = t
            case "downgrade.ret":
                known[event["id"]].weak_ret = t
            case "lost":
                known[event["id"]].lost = min(t, known[event["id"]].lost)
            case "wrote":
                known[event["id"]].wrote.append(t)
            case "ask":
                known[event["id"]] = question = Question(event["name"], event["process"], t)
                self.questions.append(question)
            case "ask.ret":
                known[event["id"]].ret, known[event["id"]].locked = t, event["locked"]
            case "store":
                self.store.append(event)
            case "server":
                self.server.append(event)
            case "kill":
                self.kills.setdefault(event["target"], t)
            case "stop":
                self._open(self.stops[event["target"]], event, known)
            case "cont":
                self._close(self.stops[event["target"]], event, known)
            case "down":
                self._open(self.outages, event, known)
            case "up":
                self._close(self.outages, event, known)

    # Windows of one author and reason do not nest (two SIGSTOPs need one SIGCONT), others do: a process whose loop is
    # blocked stamps the block, and its lag, which is a little longer.

    def _open(self, windows: list[Window], event: Event, known: dict[str, Any]) -> None:
        if known.setdefault(_window(event), len(windows)) == len(windows):
            windows.append((event["t"], NEVER))

    def _close(self, windows: list[Window], event: Event, known: dict[str, Any]) -> None:
        at = known.pop(_window(event), None)
        if at is not None:
            windows[at] = (windows[at][0], event["t"])


def _window(event: Event) -> str:
    what = {"stop": "process", "cont": "process", "down": "server", "up": "server"}[event["kind"]]
    return f"{what} {event['target']} by {event['process']}, {event.get('why')}"


def load(paths: Iterable[Path | str]) -> History:
    """Merge the files of all processes. A last line without its end was torn by a kill in the middle of the write: it is left out."""
    events = []
    for path in paths:
        lines = Path(path).read_bytes().split(b"\n")
        events += [json.loads(line) for line in lines[:-1]]
    return History(events)
