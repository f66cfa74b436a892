"""Find out, from the frames of the running task, whether a block belongs to an async generator."""

from __future__ import annotations

import contextlib
import dis
from types import FrameType

__all__ = ["in_async_generator"]

_ASYNC_GENERATOR = 0x200  # inspect.CO_ASYNC_GENERATOR
_COROUTINE = 0x80  # inspect.CO_COROUTINE
_GET_AWAITABLE = dis.opmap["GET_AWAITABLE"]
_BEFORE_WITH = dis.opmap.get("BEFORE_WITH")
_CONTEXTLIB = vars(contextlib)
_ENTER_STACK = ("enter_async_context", "enter_context")


def in_async_generator(frame: FrameType | None, *, sync: bool = False) -> bool:
    """Test whether the block that begins in ``frame``, or in a caller of it, is one of an async generator.

    While such a generator is suspended at a ``yield``, its task runs the code of the consumer, which a cancellation must
    not hit. The block belongs to the first frame upwards that

    * is an async generator: functions between it and the lock (an ``__aenter__``, a helper) return before the block ends;
    * is a coroutine that executes ``async with``, or with ``sync`` a ``with``, at this moment: it ends the block before it
      returns;
    * is a coroutine with a local exit stack that the lock is entered on.
    """
    stack: object = None
    while frame is not None:
        flags = frame.f_code.co_flags
        if flags & _COROUTINE:
            if (
                _enters(frame)
                or (sync and _enters_sync(frame))
                or (stack is not None and _owns(frame, stack))
            ):
                return False
        elif flags & _ASYNC_GENERATOR:
            return True
        if frame.f_globals is _CONTEXTLIB:
            if frame.f_code.co_name in _ENTER_STACK:
                stack = frame.f_locals.get("self")
        elif not flags & _COROUTINE and str(frame.f_globals.get("__name__")).startswith("asyncio."):
            # The loop that runs the task, or what starts a task eagerly in the middle of another.
            return False
        frame = frame.f_back
    return False


def _enters(frame: FrameType) -> bool:
    """Test whether a coroutine executes ``async with`` and awaits the ``__aenter__``.

    The compiler marks the await of an ``__aenter__`` by the argument 1 (CPython 3.11 and newer). Between that mark and the
    instruction that waits is the constant that is sent; CPython 3.12 may stand one cache entry behind that instruction.
    """
    code, at = frame.f_code.co_code, frame.f_lasti - 4
    if code[at] != _GET_AWAITABLE:
        at -= 2
    return code[at] == _GET_AWAITABLE and code[at + 1] == 1


def _enters_sync(frame: FrameType) -> bool:
    """Test whether a coroutine executes ``with``: certain up to CPython 3.13, and assumed where it is not known."""
    return _BEFORE_WITH is None or frame.f_code.co_code[frame.f_lasti] == _BEFORE_WITH


def _owns(frame: FrameType, stack: object) -> bool:
    """Test whether ``stack`` is a local variable of ``frame``, and not an argument that it was given."""
    code = frame.f_code
    given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return any(value is stack and name not in given for name, value in frame.f_locals.items())
