# pyright: strict, reportUnnecessaryTypeIgnoreComment=true
"""What a type checker says of decorated functions: what it says of the functions themselves. Read, and never run.

``verify.py`` gives it to mypy and to pyright. A line with ``type: ignore`` is a mistake that both of them must find: an
ignore that is not needed is an error as well.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import assert_type

from aiolock import Client


async def functions(client: Client) -> None:
    """Arguments and results are as before."""

    @client.locked("order:{order_id}", timeout=2)
    async def pay(order_id: int, amount: float = 1.5, *, note: str = "") -> str:
        return f"{order_id} {amount} {note}"

    assert_type(await pay(7), str)
    assert_type(await pay(order_id=7, amount=2.5, note="x"), str)
    await pay()  # type: ignore[call-arg]
    await pay("7")  # type: ignore[arg-type]
    await pay(7, memo="x")  # type: ignore[call-arg]


async def generators(client: Client) -> None:
    """What is yielded is as before."""

    @client.locked("export")
    async def rows(count: int) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield b""

    async for row in rows(3):
        assert_type(row, bytes)
    rows("3")  # type: ignore[arg-type]


async def jobs(client: Client) -> None:
    """A job may have been skipped."""

    @client.once("nightly", at_most=60)
    async def report(day: str, *, full: bool = False) -> int:
        return len(day) + full

    assert_type(await report("today", full=True), int | None)
    await report(1)  # type: ignore[arg-type]
    await report("today", whole=True)  # type: ignore[call-arg]


def mistakes(client: Client) -> None:
    """What cannot be decorated, and options that there are not."""

    def plain() -> int:
        return 1

    client.locked("x")(plain)  # type: ignore[type-var]
    client.once("x", at_most=1)(plain)  # type: ignore[arg-type]
    client.locked("x", tll=3)  # type: ignore[call-arg]
    client.semaphore("x", 3, limits=4)  # type: ignore[call-arg]
    client.rwlock("x").read(timeout="soon")  # type: ignore[arg-type]
