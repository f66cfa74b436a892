"""What the tests of this folder need: a connection of root's, and looks at the server's own lists."""

from __future__ import annotations

import aiomysql

from tests import servers


async def as_root(server: servers.MariaDB, statement: str) -> tuple:
    """Run one statement as root; its rows."""
    connection = await aiomysql.connect(**{**server.admin, "db": "test"}, autocommit=True)
    try:
        async with connection.cursor() as cursor:
            await cursor.execute(statement)
            return tuple(await cursor.fetchall())
    finally:
        await connection.ensure_closed()


async def sessions(server: servers.MariaDB, user: str = "app") -> list[tuple]:
    """The sessions of an account: id, state and statement."""
    rows = await as_root(
        server, f"SELECT ID, STATE, INFO FROM information_schema.processlist WHERE USER = '{user}'"
    )
    return list(rows)
