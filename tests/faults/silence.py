"""Hosts that swallow what they are sent: an address whose connections are neither accepted nor refused, and names that lead to it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

__all__ = ["NAME", "SILENT", "black_hole", "two_addresses"]

NAME = "db.example"
SILENT = "127.0.0.9"
"""The address at which a black hole is opened."""


@contextmanager
def black_hole(port: int) -> Iterator[None]:
    """Leave connections to ``SILENT`` and this port without an answer: the kernel drops them while the backlog is full."""
    with ExitStack() as opened:
        hole = opened.enter_context(socket.socket())
        hole.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        hole.bind((SILENT, port))
        hole.listen(0)
        for _ in range(4):
            filler = opened.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex((SILENT, port))
        yield


@contextmanager
def two_addresses(*ports: int) -> Iterator[None]:
    """Resolve ``NAME`` to a black hole for these ports, and then to the loopback address."""
    real = socket.getaddrinfo

    def resolve(host: str | bytes | None, *rest: object, **options: object) -> list[object]:
        if host not in {NAME, NAME.encode()}:
            return real(host, *rest, **options)
        return [*real(SILENT, *rest, **options), *real("127.0.0.1", *rest, **options)]

    with ExitStack() as opened, pytest.MonkeyPatch.context() as patch:
        for port in ports:
            opened.enter_context(black_hole(port))
        patch.setattr(socket, "getaddrinfo", resolve)
        yield
