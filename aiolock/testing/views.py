"""Views of a history: holds that end when their holders were told, or by their own clocks; and how slow the machine was."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping

from aiolock.testing import checker
from aiolock.testing.history import NEVER, History, Hold, Window

__all__ = ["CONTROLLER", "Slowness", "by_clock", "unique_and_rising", "unstopped", "views"]

CONTROLLER = "injector"
"""The process that has the proxies, in the words of the history."""

AWAKE = 1e9
"""Nanoseconds within which a process that goes on has certainly told its holders, on a busy machine."""


def views(history: History, breaking: float) -> tuple[History, History]:
    """A hold ends when its holder was told (who did not get to run, for whatever reason, was blind), or by its clock."""
    told, clock = history, by_clock(history)
    if not breaking:
        return told, clock
    lags = _lags(history)
    return _breaking(told, breaking, lags), _breaking(clock, breaking, lags)


def by_clock(history: History) -> History:
    """A hold ends at the moment at which the holder's own clock said so, whenever its loop came to tell it.

    So no lag of the machine needs an excuse. Only processes that the injector stopped are blind (to their end, if it
    killed them before they were awake), and those that it killed end with the last that they wrote: what their clocks
    would have said after that is not known.
    """
    last = {event["process"]: event["t"] for event in history.events}
    kills = {event["target"]: event["t"] for event in history.events if event["kind"] == "kill"}
    events = []
    for event in history.events:
        kind, t = event["kind"], event["t"]
        if kind == "lost":
            events.append({**event, "t": event["until"]})
        elif kind == "kill":
            events.append({**event, "t": min(t, last.get(event["target"], t))})
        elif event.get("why") != "lag" and not (
            kind == "cont" and kills.get(event["target"], NEVER) < t + AWAKE
        ):
            events.append(event)
    return History(events)


def unstopped(history: History) -> History:
    """Return the history as if no process had been stopped: a clock goes on in a process that does not."""
    awake = copy.copy(history)
    awake.stops = defaultdict(list)
    return awake


def _breaking(history: History, within: float, lags: Mapping[str, list[Window]]) -> History:
    """The same history, in which a process was also stopped from when a connection of its was broken until it could have read that.

    It could when its event loop, and that of the proxies, had run for `within` seconds: `lags` say when they did not.
    """
    broken = copy.copy(history)
    broken.stops = defaultdict(list, {name: list(stops) for name, stops in history.stops.items()})
    for event in history.events:
        if event["kind"] == "broken":
            begun, end = event["t"], event["t"] + within * 1e9
            counted = begun
            for start, stop in sorted([*lags[event["target"]], *lags[event["process"]]]):
                # Both are often late for the same reason, at the same time.
                if start < end and stop > counted:
                    end += stop - max(start, counted)
                    counted = stop
            broken.stops[event["target"]].append((begun, end))
    for stops in broken.stops.values():
        stops.sort()
    return broken


def _lags(history: History) -> dict[str, list[Window]]:
    """The windows in which the event loop of a process did not get to run, by process."""
    lags: dict[str, list[Window]] = defaultdict(list)
    since: dict[str, float] = {}
    for event in history.events:
        if event.get("why") == "lag":
            process, t = event["process"], event["t"]
            if event["kind"] == "stop":
                since[process] = t
            else:
                lags[process].append((since.pop(process, t), t))
    return lags


def unique_and_rising(clock: History) -> list[str]:
    """All tokens differ; those of grants that were still certain when their answers arrived rise."""
    twins: list[str] = []
    seen: dict[tuple[str, int | None], Hold] = {}
    for hold in clock.holds:
        twin = seen.setdefault((hold.name, hold.token), hold)
        if twin is not hold and not checker.nested(twin, hold):
            twins.append(f"tokens: {twin} and {hold} share a token")
    certain = copy.copy(clock)
    certain.attempts = [hold for hold in clock.attempts if hold.lost > hold.ret]
    return [*twins, *(found for found in checker.tokens(certain, grace=0) if "share" not in found)]


class Slowness:
    """The factor by which some processes took longer in a window because the machine let them, or the proxies, wait; 1 on an idle one.

    Time for which the injector had stopped one of them is no slowness of the machine, nor is what was withheld from others.
    """

    def __init__(self, history: History) -> None:
        self._lags = _lags(history)
        self._stops = History([event for event in history.events if event.get("why") != "lag"]).stops
        self._lives: dict[str, Window] = {}
        for event in history.events:
            process, t = event["process"], event["t"]
            self._lives[process] = (self._lives.get(process, (t, t))[0], t)

    def __call__(self, window: Window, processes: Iterable[str]) -> float:
        wanted = ran = 0.0
        for process in processes:
            (first, last), stops = self._lives[process], self._stops[process]
            life = max(window[0], first), min(window[1], last)
            # A request goes through both of them. Both are often late for the same reason, at the same time.
            late = sorted([*stops, *self._lags[process], *self._lags[CONTROLLER]])
            wanted += _length(checker.without(life, stops))
            ran += _length(checker.without(life, late))
        return min(10.0, wanted / max(ran, 1.0)) if wanted else 1.0


def _length(windows: Iterable[Window]) -> float:
    return sum(end - start for start, end in windows)
