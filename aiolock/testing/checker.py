"""The judge of a history: pure functions, each of which returns the violations of one promise as sentences.

A *belief* is the time in which a running holder believes in its hold: from the return of acquire to the first of release's call, loss and
death, minus the windows in which its process was stopped. `grace` (seconds) lengthens those windows, for the one pass of the event loop in
which a woken process learns what it missed. Intervals are closed and equal stamps are concurrent, hence never an overlap.

The sweeps are exact for successful operations. Negative, reading and unknown answers need the search of Wing and Gong with the memory that
Lowe added: `linearizable(operations(history, name), MUTEX)`, one name at a time. Every unknown operation doubles its work at worst.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from aiolock.testing.history import NEVER, History, Hold, Window

__all__ = [
    "FENCED",
    "MUTEX",
    "READ_WRITE",
    "REENTRANT",
    "Belief",
    "Model",
    "Op",
    "beliefs",
    "check",
    "exclusion",
    "linearizable",
    "margins",
    "nested",
    "operations",
    "overlaps",
    "ownership",
    "progress",
    "punctual",
    "semaphore",
    "stale_writes",
    "tokens",
    "told",
    "without",
]

GRACE = 0.05
FAMILIES = {"mutex": "lock", "reentrant": "lock", "read": "rwlock", "write": "rwlock", "permits": "semaphore"}


def check(history: History, *, capacity: Mapping[str, int] | None = None, grace: float = GRACE) -> list[str]:
    """All invariants that hold without a time limit; `progress` and `punctual` need one."""
    return [
        *exclusion(history, capacity, grace=grace),
        *tokens(history, grace=grace),
        *told(history, grace=grace),
        *stale_writes(history),
        *ownership(history),
    ]


# 1. Exclusion


class Belief(NamedTuple):
    start: float
    end: float
    hold: Hold


T = TypeVar("T", bound="Hold | Belief")


def beliefs(history: History, grace: float = GRACE) -> list[Belief]:
    return [
        Belief(start, end, part)
        for hold in history.holds
        for whole, part in _stages(hold, _end(history, hold))
        for start, end in without(whole, _blind(history, hold.process, grace))
    ]


def _stages(hold: Hold, end: float) -> Iterator[tuple[Window, Hold]]:
    """A hold as what it was believed to be, one after the other: a downgrade makes it one for reading."""
    weak = min(hold.weak_call, end)
    yield (hold.ret, weak), hold
    if weak < end:
        yield (weak, end), replace(hold, mode="read")


def exclusion(
    history: History, capacity: Mapping[str, int] | None = None, *, grace: float = GRACE
) -> list[str]:
    """Return two holds that exclude each other and that were believed in at once. `capacity`: permits by name, else 1."""
    found = [
        f"exclusion: {other.hold} and {belief.hold} at {_at(history, belief.start)}"
        for other, belief in overlaps(history, grace=grace)
    ]
    for belief, inside in _entries(history, grace):
        if belief.hold.mode == "permits":
            used = sum(other.hold.permits for other in inside) + belief.hold.permits
            room = (capacity or {}).get(belief.hold.name, 1)
            if used > room:
                found.append(
                    f"exclusion: {belief.hold} makes {used} of {room} permits at {_at(history, belief.start)}"
                )
    return found


def overlaps(history: History, *, grace: float = GRACE) -> list[tuple[Belief, Belief]]:
    """Return the beliefs that exclude each other and overlap, the earlier one first."""
    return [
        (other, belief)
        for belief, inside in _entries(history, grace)
        for other in inside
        if _exclude(other.hold, belief.hold)
    ]


def _entries(history: History, grace: float) -> Iterator[tuple[Belief, list[Belief]]]:
    """Yield each belief with those of the same lock that had not ended when it began."""
    for beliefs_of_name in _by_lock(beliefs(history, grace)).values():
        inside: list[Belief] = []
        for belief in sorted(beliefs_of_name, key=attrgetter("start")):
            inside = [other for other in inside if other.end > belief.start]
            yield belief, inside
            inside.append(belief)


# 2. Tokens


def tokens(history: History, *, grace: float = GRACE) -> list[str]:
    """Tokens are unique per name and rise in the order of grants.

    The order in which two acquires return is the order of their grants if the holds exclude each other and both returned awake: the later
    one cannot have been granted while the earlier one was held. In all other cases only a return before a call orders the grants.
    """
    found = []
    for holds in _by_lock(hold for hold in history.holds if hold.token is not None).values():
        by_call, finished = sorted(holds, key=attrgetter("call")), sorted(holds, key=attrgetter("ret"))
        seen: dict[int, Hold] = {}
        before = _Highest(finished)
        for hold in by_call:
            twin = seen.setdefault(_token(hold), hold)
            if twin is not hold and not nested(twin, hold):
                found.append(f"tokens: {twin} and {hold} share a token")
            found += _risen(before.until(hold.call), hold)
        awake = [hold for hold in finished if _awake(history, hold.process, hold.ret, grace) == hold.ret]
        exclusive = _Highest([hold for hold in awake if hold.mode in {"mutex", "reentrant", "write"}])
        any_mode = _Highest(awake)
        for hold in awake:
            if hold.mode in {"mutex", "reentrant", "write"}:
                found += _risen(any_mode.until(hold.ret), hold)
            elif hold.mode == "read":
                found += _risen(exclusive.until(hold.ret), hold)
    return list(dict.fromkeys(found))


class _Highest:
    """The hold with the highest token among those that had returned by some time, asked in the order of time."""

    def __init__(self, holds: list[Hold]) -> None:
        self._holds, self._at = holds, 0
        self._top: Hold | None = None

    def until(self, time: float) -> Hold | None:
        while self._at < len(self._holds) and self._holds[self._at].ret < time:
            if self._top is None or _token(self._holds[self._at]) > _token(self._top):
                self._top = self._holds[self._at]
            self._at += 1
        return self._top


def _token(hold: Hold) -> int:
    """Return the token of a hold that has one."""
    return hold.token or 0


def _risen(earlier: Hold | None, hold: Hold) -> list[str]:
    if (
        earlier is None
        or _token(hold) > _token(earlier)
        or (hold.token == earlier.token and nested(earlier, hold))
    ):
        return []
    return [f"tokens: {hold} was granted after {earlier}"]


# 3. Told in time


def told(history: History, *, grace: float = GRACE) -> list[str]:
    """Return losses that were told after the next grant (to a process that was stopped: after its waking), or acted on later."""
    found = []
    for hold, successor in _losses(history):
        if successor and hold.lost > _awake(history, hold.process, successor.ret, grace):
            found.append(f"told: {hold} was told {_ms(hold.lost - successor.ret)} after {successor} got it")
        found += [
            f"told: {hold} acted {_ms(act - hold.lost)} after it was told"
            for act in hold.wrote
            if act > hold.lost
        ]
    return found


def margins(history: History) -> list[float]:
    """Return the seconds between each loss told to a process that was not stopped meanwhile, and the next grant to another."""
    return [
        (successor.ret - hold.lost) / 1e9
        for hold, successor in _losses(history)
        if successor
        and not any(stop < successor.ret and cont > hold.ret for stop, cont in history.stops[hold.process])
    ]


def _losses(history: History) -> Iterator[tuple[Hold, Hold | None]]:
    """Every loss, and the next grant that excluded the lost hold."""
    for holds in _by_lock(history.holds).values():
        holds.sort(key=attrgetter("ret"))
        for hold in holds:
            if hold.lost < min(hold.release_call, history.killed(hold.process)):
                # After a downgrade it was a read hold that was lost, and other readers were right to come in.
                last = replace(hold, mode="read") if hold.weak_call < hold.lost else hold
                later = bisect_right(holds, hold.ret, key=attrgetter("ret"))
                yield hold, next((other for other in holds[later:] if _exclude(last, other)), None)


# 4. The store and 5. ownership, in the order of the store's and the server's own files


def stale_writes(history: History) -> list[str]:
    """The fenced store accepted no token below the highest accepted one, and every token from one owner only."""
    found: list[str] = []
    highest: dict[str, int] = {}
    owners: dict[tuple[str, int], str] = {}
    for event in history.store:
        name, token, owner = event["name"], event["token"], event["owner"]
        if not (event["fenced"] and event["accepted"]):
            continue
        if token < highest.get(name, token):
            found.append(f"store: accepted token {token} of {owner} for {name!r} after {highest[name]}")
        if owners.setdefault((name, token), owner) != owner:
            found.append(
                f"store: token {token} for {name!r} came from {owners[name, token]} and from {owner}"
            )
        highest[name] = max(token, highest.get(name, token))
    return found


def ownership(history: History) -> list[str]:
    """The server renewed and released holds for their owners only (semaphores and readers included)."""
    found: list[str] = []
    inside: dict[str, set[str]] = defaultdict(set)
    for event in history.server:
        name, action, owner = event["name"], event["action"], event["owner"]
        if action == "grant":
            inside[name].add(owner)
        elif owner not in inside[name]:
            found.append(
                f"ownership: {action} of {name!r} by {owner}, who does not hold it, at {_at(history, event['t'])}"
            )
        elif action in {"release", "expire"}:
            inside[name].discard(owner)
    return found


# 6. Progress


def progress(
    history: History,
    bound: float,
    slowness: Callable[[Window, set[str]], float] = lambda _window, _waiting: 1.0,
) -> list[str]:
    """Return healthy times longer than `bound` seconds in which a process that runs waits for a lock that has no holder.

    Where holders are killed, `bound` is the ttl and a little. `slowness` tells how much longer it is in a window, for the processes
    that wait in it.
    """
    found: list[str] = []
    outages = [(time, +1, "out") for time, _ in history.outages] + [
        (time, -1, "out") for _, time in history.outages
    ]
    for (name, _), attempts in _by_lock(history.attempts).items():
        edges, waits = list(outages), []
        for attempt in attempts:
            call = (attempt.call, min(attempt.ret, history.killed(attempt.process), history.end))
            for start, end in without(call, _blind(history, attempt.process, 0)):
                edges += [(start, +1, "wait"), (end, -1, "wait")]
                waits.append((start, end, attempt.process))
            if attempt.result == "ok":
                edges += [(attempt.ret, +1, "hold"), (max(attempt.ret, _end(history, attempt)), -1, "hold")]
        count, since = {"wait": 0, "hold": 0, "out": 0}, None
        for time, step, what in sorted(edges, key=lambda edge: (edge[0], -edge[1])):
            count[what] += step
            stuck = count["wait"] > 0 and not count["hold"] and not count["out"]
            if since is not None and not stuck and time - since > bound * 1e9:
                waiting = {process for start, end, process in waits if start < time and end > since}
                if time - since > bound * 1e9 * slowness((since, time), waiting):
                    found.append(
                        f"progress: {name!r} was free and waited for, {_ms(time - since)} from {_at(history, since)}"
                    )
            since = (time if since is None else since) if stuck else None
    return found


def punctual(history: History, *, grace: float = 0.1, release: float | None = None) -> list[str]:
    """Every acquire ended by its timeout, and every release within `release` seconds; time in which its process stood still is not counted."""
    found = []
    for attempt in history.attempts:
        calls = [("acquire", attempt.timeout, attempt.call, attempt.ret)]
        if attempt.release_call < NEVER:
            calls.append(("release", release, attempt.release_call, attempt.release_ret))
        for what, limit, call, ret in calls:
            end = min(ret, history.killed(attempt.process), history.end)
            awake = sum(b - a for a, b in without((call, end), _blind(history, attempt.process, grace)))
            if limit is not None and awake > (limit + grace) * 1e9:
                found.append(f"punctual: {what} of {attempt} took {_ms(awake)} of {limit} s")
    return found


# The search


class Op(NamedTuple):
    """An operation with its answer; `ret` is NEVER for one that may or may not have happened."""

    call: float
    ret: float
    action: str  # acquire, release, downgrade, expire, ask
    owner: str = ""
    result: str | bool | None = "ok"
    token: int | None = None
    mode: str = "mutex"
    permits: int = 1


def operations(history: History, name: str) -> list[Op]:
    """Return the operations on one name. A hold may end at the server from its loss, or from any stop or death, on."""
    ops = [Op(ask.call, ask.ret, "ask", result=ask.locked) for ask in history.questions if ask.name == name]
    for hold in history.attempts:
        if hold.name != name:
            continue
        what: dict[str, Any] = {"owner": hold.owner, "mode": hold.mode, "permits": hold.permits}
        certain = hold.result != "info"
        ops.append(
            Op(
                hold.call,
                hold.ret if certain else NEVER,
                "acquire",
                result=hold.result,
                token=hold.token,
                **what,
            )
        )
        if hold.weak_call < NEVER:
            ops.append(Op(hold.weak_call, hold.weak_ret, "downgrade", **what))
            what["mode"] = "read"
        released = hold.release_result != "info"
        if hold.release_call < NEVER:
            ops.append(
                Op(
                    hold.release_call,
                    hold.release_ret if released else NEVER,
                    "release",
                    result=hold.release_result,
                    **what,
                )
            )
        stops = [stop for stop, cont in history.stops[hold.process] if cont > hold.call]
        dying = min([hold.lost, history.killed(hold.process), *stops] if certain else [hold.call])
        if (
            hold.result != "fail"
            and dying < NEVER
            and not (hold.release_call < NEVER and hold.release_result == "ok")
        ):
            ops.append(Op(max(dying, hold.call), NEVER, "expire", **what))
    return [op for op in ops if op.action != "ask" or op.result is not None]


Inside = tuple[tuple[str, str, int], ...]  # (owner, mode, permits), sorted
State = tuple[int, Inside]  # with the last token


@dataclass(frozen=True)
class Model:
    """A kind of lock: whether it admits an operation's owner beside those inside, and whether its tokens must rise."""

    admits: Callable[[Inside, Op], bool]
    fenced: bool = False

    def step(self, state: State, op: Op) -> State | None:
        """The state after `op`, or None if the lock could not have answered like this."""
        last, inside = state
        me = (op.owner, op.mode, op.permits)
        match op.action, op.result:
            case "ask", answer:
                return state if answer is bool(inside) else None
            case "acquire", "fail":
                return None if self.admits(inside, op) else state
            case "acquire", _:
                if not self.admits(inside, op) or (self.fenced and op.token is not None and op.token <= last):
                    return None
                return max(last, op.token or 0) if self.fenced else 0, tuple(sorted((*inside, me)))
            case "release", "fail":
                return None if me in inside else state
        if me not in inside:
            return None
        at = inside.index(me)
        others = inside[:at] + inside[at + 1 :]
        if op.action == "downgrade":
            return last, tuple(sorted((*others, (op.owner, "read", op.permits))))
        return last, others


MUTEX = Model(lambda inside, _op: not inside)
FENCED = Model(lambda inside, _op: not inside, fenced=True)
REENTRANT = Model(lambda inside, op: all(owner == op.owner for owner, _, _ in inside))
READ_WRITE = Model(lambda inside, op: all(mode == op.mode == "read" for _, mode, _ in inside))


def semaphore(limit: int) -> Model:
    return Model(lambda inside, op: sum(permits for *_, permits in inside) + op.permits <= limit)


class _TimelineEntry:
    """A call (`answer` is its return's entry, if it has one) or a return, in a doubly linked list in the order of time."""

    __slots__ = ("after", "answer", "before", "bit", "op")

    def __init__(self, op: Op | None = None, bit: int = 0) -> None:
        self.op, self.bit = op, bit
        self.before = self
        self.after: _TimelineEntry | None = None
        self.answer: _TimelineEntry | None = None

    def lift(self) -> None:
        for entry in filter(None, (self, self.answer)):
            entry.before.after = entry.after
            if entry.after is not None:
                entry.after.before = entry.before

    def put_back(self) -> None:
        for entry in filter(None, (self.answer, self)):
            entry.before.after = entry
            if entry.after is not None:
                entry.after.before = entry


def _listed(ops: list[Op]) -> _TimelineEntry:
    edges = []
    for number, op in enumerate(ops):
        call = _TimelineEntry(op, 1 << number)
        edges.append((op.call, 0, number, call))  # at equal stamps calls come first: they are concurrent
        if op.ret < NEVER:
            call.answer = _TimelineEntry()
            edges.append((op.ret, 1, number, call.answer))
    head = last = _TimelineEntry()
    for *_, entry in sorted(edges, key=lambda edge: edge[:3]):
        last.after, entry.before, last = entry, last, entry
    return head


def linearizable(ops: list[Op], model: Model) -> list[str]:
    """Look for one order of the operations, within their times, in which a single correct lock gives all their answers."""
    head, done = _listed(ops), 0
    state: State = (0, ())
    chosen: list[tuple[_TimelineEntry, State]] = []
    best: list[_TimelineEntry] = []
    seen: set[tuple[int, State]] = set()
    entry = head.after
    while entry is not None:  # past the end no return is unexplained: what is left may not have happened
        after = model.step(state, entry.op) if entry.op is not None else None
        if after is not None and (done | entry.bit, after) not in seen:
            seen.add((done | entry.bit, after))
            chosen.append((entry, state))
            state, done = after, done | entry.bit
            entry.lift()
            entry = head.after
        elif entry.op is not None:
            entry = entry.after
        else:  # an operation that has returned has no position in this order
            if len(chosen) > len(best):
                best = [each for each, _ in chosen]
            if not chosen:
                return [_unexplained(ops, best)]
            entry, state = chosen.pop()
            done &= ~entry.bit
            entry.put_back()
            entry = entry.after
    return []


def _unexplained(ops: list[Op], best: list[_TimelineEntry]) -> str:
    chosen = sum(entry.bit for entry in best)
    left = [op for number, op in enumerate(ops) if op.ret < NEVER and not chosen >> number & 1]
    return f"search: no order explains {min(left, key=attrgetter('ret'))} after {[entry.op for entry in best[-3:]]}"


# Small change


def _end(history: History, hold: Hold) -> float:
    return min(hold.release_call, hold.lost, history.killed(hold.process))


def _blind(history: History, process: str, grace: float) -> list[Window]:
    return [(stop, cont + grace * 1e9) for stop, cont in history.stops[process]]


def _awake(history: History, process: str, time: float, grace: float) -> float:
    """The first moment from `time` on at which the process was not stopped."""
    for stop, cont in _blind(history, process, grace):
        if stop <= time < cont:
            time = cont
    return time


def without(whole: Window, windows: list[Window]) -> list[Window]:
    start, end = whole
    parts = []
    for stop, cont in windows:
        if stop < end and cont > start:
            if stop > start:
                parts.append((start, stop))
            start = cont
    return [*parts, (start, end)] if start < end else parts


def _by_lock(items: Iterable[T]) -> dict[tuple[str, str], list[T]]:
    locks: dict[tuple[str, str], list[T]] = defaultdict(list)
    for item in items:
        hold: Hold = item.hold if isinstance(item, Belief) else item
        locks[hold.name, FAMILIES[hold.mode]].append(item)
    return locks


def nested(outer: Hold, inner: Hold) -> bool:
    """Return whether they may be levels of one hold."""
    return outer.mode == inner.mode == "reentrant" and outer.owner == inner.owner


def _exclude(one: Hold, other: Hold) -> bool:
    shared = one.mode == other.mode and one.mode in {"read", "permits"}
    return one.id != other.id and not shared and not nested(one, other)


def _at(history: History, time: float) -> str:
    return f"{(time - history.start) / 1e9:.6f} s"


def _ms(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e6:.1f} ms"
