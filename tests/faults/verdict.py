"""What a history run has shown: the faults, the grants, the violations by property, and the table of all that.

Violations are looked for twice: in the history as it is, and in one in which everybody was blind while a listed
exception was under way (docs/backends/redis.md). What the second one still shows is outside of the exceptions.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial

from aiolock.testing import checker, views
from aiolock.testing.history import NEVER, Event, History, Hold, Window
from tests.faults.fenced_store import FencedStore

RESTART, DELETED, FLUSHED, STOPPED = "restart server", "delete rows", "flush_all", "stop server"
"""The faults whose windows are an exception: the server comes back without its data, some or all of them are deleted, or
they may expire at once, because a memcached goes on that was stopped."""


@dataclass
class Verdict:
    """The figures of one run; times in seconds."""

    seed: int
    seconds: float
    processes: int
    slowness: float
    """How much longer everything took because the machine let processes wait."""
    faults: dict[str, int]
    grants: int
    losses: dict[str, int]
    outside: dict[str, list[str]]
    inside: dict[str, int]
    fenced: dict[str, int]
    unfenced: dict[str, int]
    tokens_duplicated: int
    tokens_decreased: int
    told: int
    worst_margin: float | None
    worst_margin_by_clock: float | None
    replayed: int
    attempts: dict[str, int]
    grants_by_mode: dict[str, int]

    @property
    def violations(self) -> int:
        return sum(map(len, self.outside.values()))

    def as_json(self) -> dict[str, object]:
        return asdict(self) | {"violations": self.violations}

    def table(self) -> str:
        """For people; the figures first, then what is wrong."""
        lines = [
            f"seed {self.seed}, {self.seconds:.0f} s, {self.processes} processes, slowness {self.slowness:.1f}"
        ]
        lines += ["", "faults injected"]
        lines += [f"  {name:<28} {count:>7}" for name, count in sorted(self.faults.items())]
        lines += [f"  {'together':<28} {sum(self.faults.values()):>7}", ""]
        lines += [f"  {'violations':<28} {'outside':>7} {'inside the exceptions':>22}"]
        lines += [
            f"  {name:<28} {len(found):>7} {self.inside[name]:>22}" for name, found in self.outside.items()
        ]
        figures = {
            "grants": f"{self.grants} ({_counts(self.grants_by_mode)})",
            "attempts": _counts(self.attempts),
            "losses": _counts(self.losses),
            "writes fenced / unfenced": f"{self.fenced['accepted']} / {self.unfenced['accepted']}",
            "stale writes accepted": f"{self.fenced['stale']} / {self.unfenced['stale']}",
            "updates lost": f"{self.fenced['lost_updates']} / {self.unfenced['lost_updates']}",
            "stale writes rejected": self.fenced["rejected"],
            "tokens duplicated, decreased": f"{self.tokens_duplicated}, {self.tokens_decreased}",
            "losses told before a grant": f"{self.told}, worst margin {_ms(self.worst_margin)}",
            "worst margin by own clock": _ms(self.worst_margin_by_clock),
            "late packets replayed": self.replayed,
        }
        lines += ["", *(f"  {name:<28} {value}" for name, value in figures.items()), ""]
        lines += [violation for found in self.outside.values() for violation in found[:20]]
        return "\n".join(lines)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items())) or "none"


def _ms(seconds: float | None) -> str:
    return "none" if seconds is None else f"{seconds * 1000:.1f} ms"


def judge(
    history: History,
    store: FencedStore,
    *,
    seed: int,
    ttl: float,
    verified: float,
    command_timeout: float,
    others: Iterable[str],
    replayed: int,
    capacity: Mapping[str, int] | None = None,
    breaking: float = 0.0,
    fenced: bool = True,
    place: float = 0.0,
) -> Verdict:
    """`verified`: seconds after a restart in which everybody finds out; `others`: what was found at the server;
    `capacity`: how many permits the semaphores have, by name; `breaking`: where a hold ends with its connection, seconds
    within which a client that runs reads that its own has ended, 0 where it does not; `fenced`: whether tokens are promised to rise;
    `place`: seconds for which the place of a dead waiter stands at least. Three of them may be in front of somebody."""
    look = partial(checker.exclusion, capacity=capacity, grace=0)
    exceptions = _exceptions(history, verified)
    told, clock = views.views(history, breaking)
    history, processes = told, {hold.process for hold in history.attempts}
    everything = {
        "exclusion (by own clock)": (
            look(clock),
            _sighted(clock, exceptions, look),
        ),
        "told in time": (checker.told(told), _sighted(told, exceptions, checker.told)),
        "tokens": (
            views.unique_and_rising(clock),
            views.unique_and_rising(_without_grants(clock, exceptions)) if fenced else [],
        ),
        "store": (_store(history, store),) * 2,
        "ownership": ([each for each in others if each.startswith("ownership")],) * 2,
        "calls in time": (_calls(told, command_timeout),) * 2,
        "progress": (_progress(history, 3 * max(ttl, place) + 2),) * 2,
        "hygiene": ([each for each in others if each.startswith("hygiene")] + _left(history),) * 2,
        "errors": ([f"errors: {e['process']}: {e['what']}" for e in history.events if e["kind"] == "error"],)
        * 2,
    }
    margins = checker.margins(_run_out(told, exceptions))
    by_clocks = checker.margins(views.unstopped(_run_out(clock, exceptions)))
    tokens = everything["tokens"][1 if fenced else 0]
    return Verdict(
        seed=seed,
        seconds=(history.end - history.start) / 1e9,
        processes=len(processes),
        slowness=views.Slowness(history)((history.start, history.end), processes),
        faults=dict(Counter(event["name"] for event in history.events if event["kind"] == "fault")),
        grants=len(history.holds),
        losses=dict(Counter(event["reason"] for event in history.events if event["kind"] == "lost")),
        outside={name: outside for name, (_, outside) in everything.items()},
        inside={name: max(0, len(found) - len(outside)) for name, (found, outside) in everything.items()},
        fenced=asdict(store.fenced),
        unfenced=asdict(store.unfenced),
        tokens_duplicated=sum("share" in found for found in tokens),
        tokens_decreased=sum("granted after" in found for found in tokens),
        told=len(margins),
        worst_margin=min(margins, default=None),
        worst_margin_by_clock=min(by_clocks, default=None),
        replayed=replayed,
        attempts=dict(Counter(attempt.result for attempt in history.attempts)),
        grants_by_mode=dict(Counter(hold.mode for hold in history.holds)),
    )


# Views of a history


def _run_out(history: History, exceptions: list[Window]) -> History:
    """Only those losses that nobody but the clock told of, outside of the exceptions."""
    reasons = {event["id"]: event["reason"] for event in history.events if event["kind"] == "lost"}

    def counts(hold: Hold) -> bool:
        inside = any(start <= hold.lost <= end for start, end in exceptions)
        return reasons.get(hold.id) in {"expired", "seen"} and not inside

    rest = copy.copy(history)
    rest.attempts = [hold if counts(hold) else replace(hold, lost=NEVER) for hold in history.attempts]
    return rest


def _exceptions(history: History, verified: float) -> list[Window]:
    """The windows of exceptions, up to when every holder has looked: on a busy machine later by its slowness."""
    windows, begun, slowness = [], 0.0, views.Slowness(history)
    processes = {hold.process for hold in history.attempts}
    for event in history.events:
        if event.get("target") in (RESTART, DELETED, FLUSHED, STOPPED):
            if event["kind"] == "down":
                begun = event["t"]
            else:
                end, within = event["t"], verified * 1e9
                windows.append((begun, end + within * slowness((end, end + within), processes)))
    return windows


def _blind(history: History, windows: list[Window]) -> History:
    """The same history, in which every process was also stopped in these windows."""
    blind = copy.copy(history)
    blind.stops = copy.copy(history.stops)
    for process in {attempt.process for attempt in history.attempts}:
        blind.stops[process] = sorted([*history.stops[process], *windows])
    return blind


def _sighted(history: History, windows: list[Window], look) -> list[str]:
    return look(_blind(history, windows)) if windows else look(history)


def _without_grants(history: History, windows: list[Window]) -> History:
    """Grants that were heard of inside of the windows say nothing about the order of tokens."""
    rest = copy.copy(history)
    rest.attempts = [
        hold for hold in history.attempts if not any(start <= hold.ret <= end for start, end in windows)
    ]
    return rest


# Properties


def _store(history: History, store: FencedStore) -> list[str]:
    found = checker.stale_writes(history)
    if store.fenced.stale:
        found.append(f"store: {store.fenced.stale} stale writes were accepted")
    if store.fenced.lost_updates:
        found.append(f"store: {store.fenced.lost_updates} updates were lost in spite of fencing")
    return found


def _calls(told: History, command_timeout: float) -> list[str]:
    """Only what took long is looked at closely."""
    slow = copy.copy(told)
    slow.attempts = [
        hold
        for hold in told.attempts
        if (hold.timeout is not None and min(hold.ret, told.end) - hold.call > hold.timeout * 1e9)
        or (hold.release_call < NEVER and hold.release_ret - hold.release_call > command_timeout * 1e9)
    ]
    return checker.punctual(slow, release=command_timeout)


def _progress(history: History, bound: float) -> list[str]:
    """Find locks that stay free although a process that is not cut off waits; on a busy machine later by its slowness."""
    kinds = {"cut": "stop", "mended": "cont"}
    events = [
        {**event, "kind": kinds.get(event["kind"], event["kind"])}
        for event in history.events
        if event.get("why") != "lag"
    ]
    cut_off = History(events)
    ends = {event["process"]: event["t"] for event in history.events if event["kind"] == "end"}
    cut_off.attempts = [
        replace(hold, ret=min(hold.ret, ends.get(hold.process, NEVER))) for hold in cut_off.attempts
    ]
    return checker.progress(cut_off, bound, views.Slowness(history))


def _left(history: History) -> list[str]:
    """What a process still had when its client was closed."""
    ends: list[Event] = [event for event in history.events if event["kind"] == "end"]
    return [
        f"hygiene: {event['process']} ended with tasks {event['tasks']} and {event['sockets']} sockets"
        for event in ends
        if event["tasks"] or event["sockets"] > 0
    ]
