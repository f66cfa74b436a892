"""A transaction that stays open elsewhere in the database keeps every version of every row: no statement looks at all of them."""

from __future__ import annotations

import base64
import re
import secrets

import asyncpg

from tests.backends.postgresql.tools import edit, key, opened, put

TURNS = 400
FEW = 30
"""Pages that a statement may look at: those of the index, the newest version, and what it writes."""


async def pages(driver, statement, *arguments):
    """Return the pages that the server looks at for a statement, whose effect is undone."""
    transaction = driver.transaction()
    await transaction.start()
    try:
        rows = await driver.fetch(f"EXPLAIN (ANALYZE, BUFFERS) {statement}", *arguments)
    finally:
        await transaction.rollback()
    plan = "\n".join(row[0] for row in rows)
    execution = plan.partition("\nPlanning")[0]
    # The first line counts all steps below it.
    return int(re.findall(r"shared hit=(\d+)", execution)[0])


async def test_no_statement_gets_dearer_while_a_transaction_stays_open(own):
    async with opened(own.url) as store, opened(own.url) as other:
        one, session = key(), key()
        for each in (one, session):
            await put(store, each)
        report = await asyncpg.connect(own.url)
        async with report.transaction(isolation="repeatable_read"):
            await report.fetchval("SELECT 1")
            versions = {}
            for each in (one, session):
                [row] = await store.get([each])
                versions[each] = row.version
                for _ in range(TURNS):
                    after = secrets.token_urlsafe(12)
                    value = secrets.token_bytes(1_200)
                    [made] = await store.compare_and_set([edit(each, versions[each], after, value)])
                    versions[each] = made.version
            driver, statements = other._open()._pipelines[0].driver, store._statements
            # The counterexample.
            plain = f"SELECT version FROM {statements.table} WHERE key = $1"
            assert await pages(driver, plain, one) > 2 * FEW
            found = {
                "get": await pages(driver, statements("get"), [one, session], ["value", "version"]),
                "update": await pages(
                    driver,
                    statements("update"),
                    *(one, b"value", "next", None, "on", versions[one], None, "channel"),
                ),
                "enter": await pages(
                    driver,
                    statements("enter"),
                    *(one, "next", "2{", "hold", 1, 0, session, versions[session]),
                ),
                "several": await pages(
                    driver,
                    statements("several").replace("{skip}", ""),
                    [one, session],
                    [versions[one], versions[session]],
                    ["next", ""],
                    [base64.b64encode(b"value").decode(), None],
                    [None, None],
                    [None, None],
                    "on",
                    "channel",
                ),
            }
            assert max(found.values()) < 2 * FEW, found
            assert found["update"] < FEW
        await report.close()
