"""What becomes of a session whose answer is late: its statement is ended, and only if that does not help, the session.

A statement may wait for a row that somebody has locked, or for a gap between rows, for as long as he likes. The session has other
things to do, and the locks of others live in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiolock.backends.mysql.connection import Session
from aiolock.errors import LockError

__all__ = ["end_late_statement"]

AGAIN = 0.1
"""Seconds after which a statement that did not end is killed once more."""


async def end_late_statement(
    session: Session, control: Callable[[], Awaitable[Session]], timeout: float
) -> None:
    """Have the server end what it is at for ``session``, on another session, in at most ``timeout`` seconds; else end the session.

    Nothing is sent on the session meanwhile, so nothing else is hit. Cancelling it leaves the session as it is.
    """
    try:
        async with asyncio.timeout(timeout):
            other = await control()
            while session.busy:
                await other.run(f"KILL QUERY {session.id}", timeout)
                if session.busy:
                    await asyncio.sleep(AGAIN)
    except (LockError, TimeoutError):
        # The server does not answer at all, or there is no other connection to be had.
        session.abort()
    else:
        session.go_on()
