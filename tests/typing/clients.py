# pyright: strict, reportUnnecessaryTypeIgnoreComment=true
"""What a type checker says of the ways to make a client. Read, and never run.

``verify.py`` gives it to mypy and to pyright. A line with ``type: ignore`` is a mistake that both of them must find: an
ignore that is not needed is an error as well.
"""

from __future__ import annotations

from typing import assert_type

import redis.asyncio

from aiolock import Client, connect, portal


def addresses() -> None:
    """A URL, several, or a client of redis-py."""
    assert_type(connect("memory://", wait_for_server=30, require={"fencing"}), Client)
    assert_type(connect(["redis://a", "redis://b", "redis://c"], lazy=True), Client)
    assert_type(connect(redis.asyncio.Redis(host="h"), label="web-1"), Client)
    assert_type(portal.connect("memory://", wait_for_server=1.5), portal.SyncClient)
    assert_type(portal.connect(redis.asyncio.Redis(host="h")), portal.SyncClient)
    connect(7)  # type: ignore[arg-type]
    connect("memory://", lazy="yes")  # type: ignore[arg-type]
    connect("memory://", wait_for_server=None)  # type: ignore[arg-type]
