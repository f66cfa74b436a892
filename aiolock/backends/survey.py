"""Survey: one question to several servers at the same time, and what their answers are good for."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from aiolock.core.tasks import start
from aiolock.errors import BackendError, BackendRefused, BackendUnavailable

__all__ = ["answers", "survey", "why_none"]

T = TypeVar("T")

GRACE = 0.25
"""Seconds that the other servers have to answer once one has."""


async def survey(
    questions: Iterable[Coroutine[Any, Any, T]],
    timeout: float = math.inf,
    enough: Callable[[list[T]], bool | None] = lambda _: None,
) -> list[asyncio.Task[T]]:
    """Ask at the same time, and return the tasks, all of which are done.

    It ends when all have ended, after ``timeout`` seconds, or when ``enough`` of the answers so far returns true; when it
    returns false, an answer of use is there, and the others have :data:`GRACE` seconds more. Tasks that have not ended are
    then cancelled. Cancelling it cancels all of them, and leaves no socket behind.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout
    tasks = [start(question, "aiolock-question") for question in questions]
    left = set(tasks)
    try:
        while left and not (verdict := enough(answers(tasks))):
            rest = max(0.0, end - loop.time())
            wait = min(rest, math.inf if verdict is None else GRACE)
            done, left = await asyncio.wait(
                left, timeout=None if wait == math.inf else wait, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                break
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return tasks


def answers(tasks: Iterable[asyncio.Task[T]]) -> list[T]:
    """Return the results of the tasks that have one."""
    return [
        task.result() for task in tasks if task.done() and not task.cancelled() and task.exception() is None
    ]


def why_none(tasks: Sequence[asyncio.Task[T]], text: str) -> BackendError:
    """Return the error for a question that no server answered: a refusal only if all of them refuse."""
    found = [task.exception() for task in tasks if not task.cancelled()]
    errors = [error for error in found if isinstance(error, BackendError)]
    refusals = [error for error in errors if isinstance(error, BackendRefused)]
    if not errors:
        return BackendUnavailable(f"{text} in time")
    first = (refusals or errors)[0]
    kind = type(first) if len(refusals) in {0, len(tasks)} else BackendUnavailable
    error = kind(f"{text}: {first}")
    error.__cause__ = first.__cause__
    return error
