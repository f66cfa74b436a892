"""Start tasks of the library."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["start"]

T = TypeVar("T")


def start(work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
    """Create a task of the running loop, whose first step comes after the present one of the caller.

    The application's task factory takes no part: ``asyncio.eager_task_factory`` would run ``work`` before the caller has
    stored the task, or what the task looks for.
    """
    return asyncio.Task(work, loop=asyncio.get_running_loop(), name=name)
