"""The version of the data format: clients of two versions refuse each other, because their locks would not exclude each other.

The comments of the tables say it, for the modes that have tables. The session mode has none: there each connection that
can have a lock takes one of the *slots* of its namespace, a user lock that is the same in all versions, and with it the
slot's *mark*, whose name has the version. A slot that is used by a session without the mark of our version is that of a
client of another one. Marks are taken before slots, and slots before looking, so of two clients that open at the same
moment one refuses, or both. A connection that finds no free slot is not used: there is none that others cannot see.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from aiolock.backends.mysql.asking import UNDONE
from aiolock.backends.mysql.statements import Statements, quote
from aiolock.errors import BackendUnavailable, UnsafeBackend
from aiolock.names import digest

if TYPE_CHECKING:
    from aiolock.backends.mysql.backend import MySQLBackend
    from aiolock.backends.mysql.connection import Session

__all__ = ["announce", "check_comments"]

SLOTS = 4096
"""The number of connections of one namespace that can have locks; `slots_in_use` counts as far. All versions look at all of them."""
TRIES = 16
"""The number of slots that one statement tries."""
LOOKS = 3
"""After so many looks, a slot without its mark is not that of a client that is just leaving."""
NEWEST = 99
"""The highest version that is looked for, to name it."""

_COMMENT = re.compile(r"aiolock data format (\d+)")


def check_comments(comments: Mapping[str, str], statements: Statements, address: str) -> None:
    """Raise :class:`UnsafeBackend` if tables are those of another version, given their comments; no comment is version 1."""
    for table, comment in comments.items():
        said = _COMMENT.search(comment)
        found = int(said[1]) if said else 1
        if found != statements.format:
            raise UnsafeBackend(
                f"{address}: the table {table} has data format {found}, and this client has format {statements.format}: locks "
                "of the two would not exclude each other. Give this client tables of its own, by table=; or, when no "
                "program uses these any more, have an administrator drop them and make them anew:\n"
                f"DROP TABLE {', '.join(f'`{one}`' for one in comments)};\n{statements.schema}"
            )


async def announce(backend: MySQLBackend, session: Session) -> None:
    """Have ``session`` say the version for its client, before it has any lock.

    Raises :class:`UnsafeBackend` if another version is there, :class:`BackendUnavailable` if there is no free slot. Cancelling
    it leaves the slot with the session.
    """
    assert backend.scope is not None  # noqa: S101 - it is known when a session has been opened
    version, timeout = backend.statements.format, backend.settings.command_timeout
    place = f"aiolock:f:{digest(chr(0).join((*backend.scope, backend.settings.namespace)))}"
    look = backend.statements("slots_in_use", place=place, version=version)

    def take(free: Sequence[int]) -> str:
        takes = (
            backend.statements(
                "take_slot", slot=quote(f"{place}:{number}"), mark=quote(f"{place}:{number}:{version}")
            )
            for number in backend.random.sample(free, min(TRIES, len(free)))
        )
        return f"SELECT COALESCE({', '.join(takes)}, 0); {look}"

    packet, strangers, looks = take(range(SLOTS)), dict[int, int](), 0
    give_up = backend.settings.clock() + timeout
    while True:
        answers = await backend.undisturbed(session, packet, timeout)
        users = {int(number): int(user) for number, user, _ in answers[-1].rows if user is not None}
        if session.id in users.values():
            # Once is enough: a session can take several.
            packet = look
            found = {
                int(number): users[int(number)]
                for number, user, marked in answers[-1].rows
                if user is not None and user != marked
            }
            strangers = dict(strangers.items() & found.items()) if looks else found
            looks += 1
            if not strangers:
                return
            if looks == LOOKS:
                break
        else:
            free = [number for number in range(SLOTS) if number not in users]
            if not free or backend.settings.clock() >= give_up:
                raise BackendUnavailable(
                    f"{backend.address}: {len(users)} connections use the namespace {backend.settings.namespace} in the session "
                    f"mode, and there may be {SLOTS}: give some of the programs another namespace="
                )
            packet = take(free)
        await backend.pause(UNDONE)
    number, user = next(iter(strangers.items()))
    others = [other for other in range(1, NEWEST + 1) if other != version]
    names = ", ".join(f"IS_USED_LOCK({quote(f'{place}:{number}:{other}')})" for other in others)
    [answer] = await backend.undisturbed(session, f"SELECT {names}", timeout)
    other = next(
        (str(o) for o, marked in zip(others, answer.rows[0], strict=True) if marked and int(marked) == user),
        "unknown",
    )
    raise UnsafeBackend(
        f"{backend.address}: a client of data format {other} uses the namespace {backend.settings.namespace}, and this client has "
        f"format {version}: locks of the two would not exclude each other. Stop the programs of one of the two versions "
        "first, or give this client another namespace="
    )
