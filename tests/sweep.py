"""Interrupts an operation at each of its suspensions in turn, in six ways, and keeps the account.

A coroutine is wrapped in an object that forwards `send` and `throw`, and counts how often it is suspended. At the
k-th suspension the wrapper interrupts; k grows until an attempt ends without an interruption. The modes:

before  the task is cancelled while what it waits for is still to come
race    the task is cancelled in the step in which the awaited result arrives, before it has seen it
double  as `before`, and again at every later suspension: the clean-up is cancelled too
timeout `asyncio.timeout` fires there
raise   ConnectionResetError is raised there, as a broken connection would
scope   the surrounding anyio scope is cancelled: again and again, until the operation has left it

What an interrupted operation has to leave behind is the caller's to check; here it is judged how it ended.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import anyio

from aiolock.errors import BackendUnavailable

__all__ = ["MODES", "Account", "Attempt", "Ledger", "Mode", "attempt", "sweep"]

Mode = Literal["before", "race", "double", "timeout", "raise", "scope"]
MODES: tuple[Mode, ...] = get_args(Mode)
ENOUGH = 200
"""No operation here has so many suspensions: one that seems to, loops."""


class Steps(Coroutine[Any, Any, Any]):
    """An operation, and what happens at its k-th suspension."""

    def __init__(
        self, work: Coroutine[Any, Any, Any], at: int, fire: Callable[[int, Any], BaseException | None]
    ) -> None:
        self._work = work
        self._at = at
        self._fire = fire
        self.count = 0
        self.where = ""
        self.thrown: list[BaseException] = []
        """What came in instead of a result."""

    def send(self, value: Any) -> Any:
        return self._step(self._work.send, value)

    def throw(self, *args: Any) -> Any:
        self.thrown += [error for error in args if isinstance(error, BaseException)]
        return self._step(self._work.throw, *args)

    def _step(self, resume: Callable[..., Any], *args: Any) -> Any:
        awaited = resume(*args)
        self.count += 1
        if self.count < self._at:
            return awaited
        if self.count == self._at:
            self.where = _innermost(self._work)
        error = self._fire(self.count - self._at, awaited)
        if error is None:
            return awaited
        if awaited is not None:
            # As if what was awaited had failed at once: nobody waits for it any more.
            awaited._asyncio_future_blocking = False
        return self._step(self._work.throw, error)

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Steps:
        return self

    def __iter__(self) -> Steps:
        return self

    def __next__(self) -> Any:
        return self.send(None)


def _innermost(work: Any) -> str:
    """Where the innermost of the coroutines that wait for each other stands."""
    place = "?"
    while (frame := getattr(work, "cr_frame", None)) is not None:
        place = f"{frame.f_code.co_qualname} ({frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno})"
        work = work.cr_await
    return place


class ScopeLeft(Exception):
    """The anyio scope took its cancellation back, as it has to."""


@dataclass
class Attempt:
    """One run of an operation."""

    fired: bool = False
    """Whether an interruption was ordered before it ended."""
    delivered: bool = False
    """Whether that came in time to be felt."""
    value: Any = None
    """What it returned, if it did."""
    error: BaseException | None = None
    returned: bool = False
    where: str = ""
    suspensions: int = 0

    @property
    def swallowed(self) -> bool:
        """It was cancelled, and ended as if it had not been."""
        return self.delivered and self.returned


async def attempt(work: Coroutine[Any, Any, Any], mode: Mode, at: int, shift: int = 0) -> Attempt:
    """Run `work` as a task and interrupt it at its suspension number `at`, `shift` passes of the loop later."""
    result = Attempt()
    loop = asyncio.get_running_loop()
    strikes: list[Callable[[], None]] = []

    def strike(left: int) -> None:
        if task.done():
            return
        if left:
            loop.call_soon(strike, left - 1)
        else:
            result.fired = True
            strikes[0]()

    def fire(later: int, awaited: Any) -> BaseException | None:
        if later and mode != "double":
            return None
        if mode == "raise":
            result.fired = True
            return ConnectionResetError("the connection was reset")
        if mode == "race" and awaited is not None:
            # Registered before the task's own callback, so it runs between the result and the task.
            awaited.add_done_callback(lambda _: strike(0))
        else:
            loop.call_soon(strike, 0 if later else shift)
        return None

    steps = Steps(work, at, fire)

    async def run() -> Any:
        if mode == "timeout":
            async with asyncio.timeout(None) as deadline:
                strikes.append(lambda: deadline.reschedule(loop.time()))
                try:
                    return await steps
                finally:
                    result.delivered = task.cancelling() > 0
        if mode == "scope":
            with anyio.CancelScope() as scope:
                strikes.append(scope.cancel)
                result.value = await steps
                result.returned = True
            result.delivered = any("cancel scope" in str(error) for error in steps.thrown)
            if scope.cancelled_caught:
                raise ScopeLeft
            return result.value
        strikes.append(task.cancel)
        return await steps

    # Not by the loop's task factory: `run` needs its task, which an eager one would not have yet.
    task = asyncio.Task(run(), loop=loop, name="operation")
    await asyncio.wait([task])
    if mode not in ("timeout", "scope"):
        result.delivered = result.fired
    result.where, result.suspensions = steps.where, steps.count
    if task.cancelled():
        result.error = asyncio.CancelledError()
    elif (error := task.exception()) is not None:
        result.error = error
    else:
        result.value, result.returned = task.result(), True
    return result


def rightly_ended(result: Attempt, mode: Mode) -> bool:
    """Whether an operation ended as it was made to: with the interruption itself if it was felt, else as ever."""
    if not result.delivered:
        return result.returned
    if mode == "raise":
        # A broken connection may be survived, and has another name above an adapter that reads from it in the caller's task;
        # what it leaves behind is checked all the same.
        error = result.error.__cause__ if isinstance(result.error, BackendUnavailable) else result.error
        return result.returned or isinstance(error, ConnectionResetError)
    if mode == "timeout":
        return type(result.error) is TimeoutError
    return isinstance(result.error, ScopeLeft if mode == "scope" else asyncio.CancelledError)


@dataclass
class Account:
    """What came of the sweep of one operation in one mode."""

    points: int = 0
    attempts: int = 0
    left: list[str] = field(default_factory=list)
    swallowed: list[str] = field(default_factory=list)
    double: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        """Every violation, in words."""
        kinds = ("left", "swallowed", "double", "wrong")
        return [f"{kind} at {where}" for kind in kinds for where in getattr(self, kind)]


Check = Callable[[Attempt], Awaitable[Iterable[tuple[str, str]]]]


async def sweep(
    mode: Mode,
    run: Callable[[int, int], Awaitable[tuple[Attempt, Iterable[tuple[str, str]]]]],
    shifts: int = 1,
    first: int = 1,
    step: int = 1,
) -> Account:
    """Attempt after attempt, each interrupted `step` suspensions later, until one ends untouched.

    `run(at, shift)` makes one attempt and returns it with its violations, each as ("left" or "double", in words).
    """
    account = Account()
    for shift in range(shifts):
        at = first
        while True:
            assert at < ENOUGH, "the operation does not come to an end"
            result, violations = await run(at, shift)
            account.attempts += 1
            place = f"suspension {at}+{shift} [{mode}] {result.where}"
            for kind, words in violations:
                getattr(account, kind).append(f"{place}: {words}")
            if result.swallowed and mode != "raise":
                account.swallowed.append(place)
            elif not rightly_ended(result, mode):
                account.wrong.append(f"{place}: ended with {result.error!r}")
            if not result.fired:
                break
            account.points = max(account.points, at)
            at += step
    return account


class Ledger:
    """The accounts of a run, as a table."""

    def __init__(self) -> None:
        self._accounts: dict[tuple[str, str], dict[Mode, Account]] = defaultdict(dict)

    def enter(self, deployment: str, operation: str, mode: Mode, account: Account) -> None:
        """Add one account."""
        self._accounts[deployment, operation][mode] = account

    def __str__(self) -> str:
        head = ["deployment", "operation", *MODES, "attempts", "left", "swallowed", "double", "wrong"]
        rows = [head]
        totals = [0] * 5
        for (deployment, operation), modes in self._accounts.items():
            accounts = modes.values()
            numbers = [
                sum(account.attempts for account in accounts),
                *(sum(len(getattr(account, kind)) for account in accounts) for kind in head[-4:]),
            ]
            totals = [total + number for total, number in zip(totals, numbers, strict=True)]
            points = [str(modes[mode].points) if mode in modes else "" for mode in MODES]
            rows.append([deployment, operation, *points, *map(str, numbers)])
        rows.append(["total", "", *[""] * len(MODES), *map(str, totals)])
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        lines = []
        for row in rows:
            cells = [
                cell.ljust(width) if column < 2 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)
