"""The part of the helpers for SQL servers that is the same for each: conflicts, checks of what is to be written, purging."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from random import Random
from typing import Any, TypeVar

from aiolock.client import Client
from aiolock.core.capabilities import Purging
from aiolock.core.tasks import Backoff
from aiolock.errors import ConfigError, LockError, shorten

__all__ = ["Conflict", "check_key", "check_purge", "check_values", "parts_of", "purge", "purging", "retry"]

T = TypeVar("T")


class Conflict(LockError):
    """The row was changed in the meantime: read it again and decide anew.

    Raised by the work that is given to ``retry_on_conflict``.
    """


async def retry(
    work: Callable[[], Awaitable[T]],
    is_conflict: Callable[[Exception], bool],
    attempts: int,
    pause: float,
    longest: float,
    random: Random | None,
) -> T:
    """Await ``work()`` until it ends without a conflict, at most ``attempts`` times; the last conflict is raised.

    Cancelling it is cancelling ``work()``, or ends the pause before the next attempt.
    """
    if type(attempts) is not int or attempts < 1:
        raise ConfigError(f"attempts must be a whole number from 1, not {shorten(attempts)}")
    backoff = Backoff(random or Random(), pause, longest)
    for _ in range(attempts - 1):
        try:
            return await work()
        except Exception as error:
            if not isinstance(error, Conflict) and not is_conflict(error):
                raise
        await backoff.pause()
    return await work()


def check_key(key: object) -> Mapping[Any, Any]:
    """Return ``key`` if it may name one row, else raise :class:`ConfigError`."""
    if not isinstance(key, Mapping) or not key:
        raise ConfigError(f"key must name the row, as {{'id': 42}}, not {shorten(key)}")
    for name, value in key.items():
        if value is None:
            raise ConfigError(f"key must name one row: {shorten(name)} is None, and NULL is equal to nothing")
    return key


def check_values(values: object, column: object, why: str) -> Mapping[Any, Any]:
    """Return ``values`` if they leave ``column`` alone, else raise :class:`ConfigError`, which says ``why``."""
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"values must be columns and what to set them to, as {{'state': 'paid'}}, not {shorten(values)}"
        )
    # Some servers are blind to their case.
    if any(str(name).lower() == str(column).lower() for name in values):
        raise ConfigError(f"values must not name the column {shorten(column)}: {why}")
    return values


def parts_of(table: object, form: str) -> list[str]:
    """Return the parts of the name of a table, which may be of the ``form`` with a dot, else raise :class:`ConfigError`."""
    if not isinstance(table, str) or table.count(".") > 1:
        raise ConfigError(f"table must be the name of a table, or {form}, not {shorten(table)}")
    return table.split(".")


async def purge(client: Client, *, idle: float) -> int:
    """Delete what was not needed for long; return the number of locks (MySQL, MariaDB) or of rows
    (PostgreSQL, SQLite, MongoDB).

    :param client: an open client of ``mysql://`` in the lease or the row mode, of ``postgresql://``, ``sqlite://`` or
        ``mongodb://``.
    :param idle: the seconds for which they were not needed; at least 3600.

    These are the rows of the client's namespace. May be called at any time, by any client, while locks are taken and left:
    holders and waiters are not disturbed, and locks that come back continue with greater tokens, as long as the server's
    clock is not set back by more than ``idle`` seconds. Rows of MySQL's row mode do not say when they were used: of these, those
    that were made so long ago and are free now. Needs the right to DELETE on the tables.

    Cancelling it leaves the rest of the rows. Raises :class:`ConfigError` for an invalid number and
    :class:`UnsupportedKind` if the client's server or mode has no rows, before any I/O; :class:`BackendRefused` without the
    right, :class:`BackendUnavailable`.
    """
    check_purge(client, idle=idle)
    runtime = client._runtime  # noqa: SLF001 - what only some servers have is no part of a client
    runtime.guard()
    await runtime.reach()
    return await purging(client).purge(idle)


def check_purge(client: Client, *, idle: float) -> None:
    """Raise the errors that :func:`purge` raises before any I/O; the client need not be open."""
    purging(client).check_purge(idle)


def purging(client: Client) -> Purging:
    """Return the backend of a client, if it has rows to purge."""
    if not isinstance(client, Client):
        raise ConfigError(f"a client is needed, not {shorten(client)}")
    backend = client._backend  # noqa: SLF001 - as above
    return Purging.of(backend, "rows to purge", Purging.elsewhere)
