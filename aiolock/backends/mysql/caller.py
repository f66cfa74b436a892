"""Connections of callers to a MySQL server: see where one leads, end a statement on it by KILL QUERY, confirm holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple

from aiomysql.cursors import Cursor

from aiolock.backends.callers import CLOSED, CallerConnection, Callers, until_done
from aiolock.backends.mysql.connection import MySQLSession
from aiolock.backends.mysql.context import Context, quote
from aiolock.backends.mysql.errors import (
    DEADLOCK,
    DENIED,
    INTERRUPTED,
    NO_SUCH_VARIABLE,
    NOT_NOW,
    OUTDATED,
    Outdated,
    code,
    translate,
)
from aiolock.backends.mysql.listener import ListeningClaim
from aiolock.backends.mysql.renewal import RowClaim
from aiolock.clock import Deadline
from aiolock.core.backend import Claim, Renewal
from aiolock.errors import (
    BackendRefused,
    BackendUnavailable,
    ConfigError,
    DeadlockDetected,
    LockError,
    UnsafeBackend,
    copy_of,
    shorten,
)

__all__ = ["MySQLConnection", "ServerIdentity", "ask_identity", "check_connection", "confirm"]

NEEDED = ("cursor", "close", "thread_id", "get_autocommit", "get_transaction_status")


class ServerIdentity(NamedTuple):
    """A server."""

    identity: str = ""
    name: str = ""


def check_connection(connection: object) -> None:
    """Raise :class:`ConfigError` unless it may be a connection of aiomysql's."""
    if not all(callable(getattr(connection, name, None)) for name in NEEDED):
        raise ConfigError(
            "connection must be a connection of aiomysql's on which you began a transaction, "
            f"not {shorten(connection)}"
        )


async def ask_identity(
    context: Context, statement: str, **values: str
) -> tuple[ServerIdentity, list[Sequence[tuple[Any, ...]]]]:
    """Send a packet on the main session whose last answer is about the client's server; return who that is, and the other rows.

    Nothing is written on the main session, so it asks whether its server still takes writes; if not, it connects again.
    Cancelling it is cancelling :meth:`Context.execute`.
    """
    name: object = ""
    for _ in range(2):
        packet = context.statements(statement, server=context.facts.server, **values)
        try:
            *found, last = await context.execute(packet)
        except BackendRefused as error:
            if code(error.__cause__) not in NO_SUCH_VARIABLE:
                raise
            again = f"{context.address}: this is another server than before: try again"
            raise BackendUnavailable(again) from error
        [(identity, name, writable)] = last.rows
        if int(writable):
            return ServerIdentity(str(identity), str(name)), [answer.rows for answer in found]
        if (session := context.sessions.main_now) is not None:
            session.demote()
    raise BackendUnavailable(f"{context.address}: the server {name} takes no writes any more")


class MySQLConnection(CallerConnection):
    """A connection of a caller, whose statement is ended by KILL QUERY on a connection of the client."""

    def __init__(self, context: Context, callers: Callers, connection: Any, kill: str = "") -> None:
        super().__init__(callers, connection, context.address)
        self.kill = kill
        """Ends the statement under way by KILL QUERY; empty until the server and the number of the session are known."""
        self._context = context

    async def check(self, cursor: Any, there: ServerIdentity) -> None:
        """Check that a transaction is open on the server of the client, and set :attr:`kill`.

        Raises :class:`RuntimeError` if none is open, :class:`ConfigError` for another server, :class:`UnsafeBackend` if a proxy
        stands in between or the character set would change the name of the database, and errors of the driver. To be called by a
        task of the client only: cancelling it may close the connection.
        """
        context, connection = self._context, self.connection
        try:
            await cursor.execute(context.statements("caller_server", server=context.facts.server))
        except Exception as error:
            if code(error) in NO_SUCH_VARIABLE:
                raise self._elsewhere(there, "one of another version") from error
            raise
        number, identity, name, charset = map(_decoded, await cursor.fetchone())
        if identity != there.identity:
            raise self._elsewhere(there, name)
        if number != connection.thread_id():
            raise UnsafeBackend(
                f"{context.address}: a proxy that has its own connection numbers stands between your connection "
                "and the server, and may swap the session that the transaction lives in: connect to the server itself"
            )
        encoding = str(getattr(connection, "encoding", "")).lower().replace("-", "")
        if not context.statements.ascii and not (charset.startswith("utf8") and encoding == "utf8"):
            raise UnsafeBackend(
                f"{context.address}: the name of the database has letters beyond ASCII, which your connection would "
                f"not send as they are (its character set is {charset}): use charset='utf8mb4' and SET NAMES utf8mb4"
            )
        if connection.get_autocommit() and not connection.get_transaction_status():
            raise RuntimeError(
                "no transaction is open on this connection: begin one first (await connection.begin())"
            )
        self.kill = context.statements(
            "caller_end", server=context.facts.server, there=identity, number=number
        )

    def _elsewhere(self, there: ServerIdentity, name: str) -> ConfigError:
        return ConfigError(
            f"connection must be to the server that the client is connected to: that is {there.name} "
            f"({self._context.address}), and this one is to {name}, where a lock would exclude no other client"
        )

    async def interrupt(self, left: float) -> None:
        """Send KILL QUERY on the control session."""
        async with asyncio.timeout(left):
            if self.kill:
                await self._end_statement(await self._context.sessions.control())

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    async def _end_statement(self, control: MySQLSession) -> None:
        await control.run(self.kill)

    def translated(self, error: Exception, name: str) -> LockError:
        """Return the error of this library for one of the driver's, about the lock ``name``."""
        number = code(error)
        if number in DEADLOCK:
            return DeadlockDetected([name])
        if number in OUTDATED:
            return Outdated([name])
        return translate(error, self._address)

    async def ready(self, deadline: Deadline) -> None:
        """Check that a wait on this connection could be ended, by a KILL QUERY while no statement is under way.

        Raises :class:`BackendRefused` if the account has no right to it, :class:`BackendUnavailable` if it fails otherwise,
        :class:`RuntimeError` if the client was closed, :class:`TimeoutError` at the deadline. Cancelling it takes until the KILL QUERY
        is answered.
        """
        context = self._context
        unable = f"{context.address}: the lock is not free, and the wait for it could not be ended, because "
        try:
            async with asyncio.timeout(deadline.left()):
                control = await context.within(context.sessions.control())
        except LockError as error:
            raise BackendUnavailable(f"{unable}the client has no connection for that: {error}") from error
        trial = context.sessions.tasks.spawn(
            context.within(self._end_statement(control)), "aiolock-mysql-caller-trial"
        )
        if (interruption := await until_done(trial)) is not None:
            raise interruption
        if trial.cancelled():
            raise RuntimeError(CLOSED)
        try:
            trial.result()
        except LockError as error:
            if code(error.__cause__) in DENIED:
                raise BackendRefused(
                    f"{unable}your connection has another account than the client: let both have the same one, or only try, "
                    "with try_acquire()"
                ) from error
            raise BackendUnavailable(f"{unable}{error}") from error


def _decoded(value: Any) -> Any:
    """Return a value of an answer; in the character set `binary` its texts are bytes."""
    return value.decode() if isinstance(value, bytes) else value


# --- the confirmation of a hold in the caller's transaction
# Its row shows the hold, and is locked until the commit. A client that enters changes the row of the lock, in the first
# statement of its decision. None does before the end of a transaction that has it locked, not even if the ttl of the hold
# ends in the meantime. So what the transaction writes is committed before a later holder can do anything. Until then this
# hold is not renewed either.
#
# Plain reads of a transaction of REPEATABLE READ answer from the snapshot of its first one. A plain read of the row tells whether
# that is as young as the hold, and so shows what the holders before have committed. A hand-over between tasks of the client
# writes nothing; so a renewal before reports the present lease, and the snapshot has to show that report.


async def confirm(
    context: Context,
    callers: Callers,
    claim: RowClaim,
    connection: Any,
    renew: Callable[[Sequence[Claim]], Coroutine[Any, Any, Sequence[Renewal]]],
) -> bool:
    """Return whether the row shows the hold of ``claim``, and lock it in the transaction on ``connection`` if it does.

    Raises as :meth:`Confirmation.confirm` does, and :class:`UnsafeBackend` on a cluster, and with
    ``innodb_rollback_on_timeout``. The wait for the row is ended at the server within the command timeout, and by cancelling
    it, see :class:`CallerConnection`.
    """
    check_connection(connection)
    if context.facts.across:
        raise UnsafeBackend(
            f"{context.address}: a row that is locked here is not locked on the other nodes of this cluster, and a later holder "
            "there could commit first: write with a fencing token instead"
        )
    if context.facts.rolls_back:
        raise UnsafeBackend(
            f"{context.address}: innodb_rollback_on_timeout is on, so the server ends your whole transaction when the row is "
            "not to be had in time: switch it off, or write with a fencing token instead"
        )
    deadline = Deadline.after(context.timeout, context.clock)
    caller = MySQLConnection(context, callers, connection)
    kind = "request" if isinstance(claim, ListeningClaim) else "hold"
    shown = context.statements(f"shown_{kind}", id=quote(claim.key), owner=quote(claim.owner))
    there, [rows] = await context.within(ask_identity(context, "confirm_address", shown=shown))
    present = 0 if claim.present is None else claim.present.token
    handed_over = bool(rows) and present > int(rows[0][0])
    if handed_over and not _shows(rows, present):
        [renewal] = await context.within(renew([claim]))
        if isinstance(renewal, Exception):
            raise copy_of(renewal)
    confirming = _confirm(
        context, caller, claim, there, f"confirm_{kind}", shown, present if handed_over else 0
    )
    try:
        return await caller.within(deadline.left(), confirming)
    except TimeoutError as error:
        raise BackendUnavailable(f"{context.address}: no answer within {context.timeout:g} s") from error


async def _confirm(
    context: Context,
    caller: MySQLConnection,
    claim: RowClaim,
    there: ServerIdentity,
    statement: str,
    shown: str,
    present: int,
) -> bool:
    """Lock the row of the hold on the caller's connection, and return whether the claim still has it; a task of the client runs it.

    ``shown`` is the plain read of the hold, which has to show the token ``present``, if that is not 0.
    """
    try:
        async with caller.connection.cursor(Cursor) as cursor:
            await caller.check(cursor, there)
            caller.blocks = True
            if caller.leaving:
                raise TimeoutError
            await cursor.execute(context.statements(statement, id=quote(claim.key), owner=quote(claim.owner)))
            row = await cursor.fetchone()
            if row is None or _decoded(row[0]) != claim.owner:
                return False
            await cursor.execute(shown)
            rows = await cursor.fetchall()
    except (LockError, RuntimeError, TimeoutError):
        raise
    except Exception as error:
        if code(error) in NOT_NOW | INTERRUPTED:
            raise BackendUnavailable(
                f"{context.address}: another transaction has the row of the lock locked"
            ) from error
        raise caller.translated(error, claim.request.name) from error
    name = shorten(claim.request.name)
    if not rows:
        raise BackendUnavailable(
            f"{context.address}: the transaction read before {name} was acquired, so it sees what was there before: roll it back, "
            "and begin it again; one of READ COMMITTED has no such snapshot"
        )
    if present and not _shows(rows, present):
        raise BackendUnavailable(
            f"{context.address}: a task of this client has handed {name} over, and whether the transaction, which read before "
            "this, sees what that task has committed cannot be found out: roll it back and begin it again, begin it as READ COMMITTED, or "
            "lock with fair=True"
        )
    return True


def _shows(rows: Sequence[tuple[Any, ...]], token: int) -> bool:
    """Return whether a renewal has reported the present lease with this token, by the rows of a plain read."""
    return any(_decoded(report) == str(token) for _, report in rows)
