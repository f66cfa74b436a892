"""What the tests of this folder need: a connection of root's, and looks at the server's own lists."""

from __future__ import annotations

import aiomysql

from tests import servers


class Deaf(aiomysql.Cursor):
    """The driver warns of what the server warns of: MySQL does at every look at the list of sessions."""

    async def _show_warnings(self, conn) -> None:
        """Do nothing."""


async def as_root(server: servers.MariaDB, statement: str) -> tuple:
    """Run one statement as root; its rows."""
    connection = await aiomysql.connect(**{**server.admin, "db": "test"}, autocommit=True)
    try:
        async with connection.cursor(Deaf) as cursor:
            await cursor.execute(statement)
            return tuple(await cursor.fetchall())
    finally:
        await connection.ensure_closed()


async def sessions(server: servers.MariaDB, user: str = "app") -> list[tuple]:
    """The sessions of an account: id, state and statement."""
    rows = await as_root(server, "SHOW FULL PROCESSLIST")
    return [(row[0], row[6], row[7]) for row in rows if row[1] == user]
