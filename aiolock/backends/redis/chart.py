"""Asking the nodes of a cluster who serves what: those that we talk to already, or else any that is known."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

from aiolock.backends.redis.node import Node
from aiolock.backends.redis.question import asked
from aiolock.backends.redis.seeds import NodeEndpoint, Seeds
from aiolock.backends.redis.slots import Layout, Place, parse
from aiolock.errors import BackendError, BackendRefused, BackendUnavailable

__all__ = ["Chart"]

SOME = 3
"""So many nodes are asked: one may not have heard yet what has happened."""
GRACE = 0.25
"""Seconds that the others have to answer once one has."""
SOON = 1.0
"""Seconds after which a node that we talk to has answered."""

QUESTION = "CLUSTER", "SLOTS"


class Chart:
    """How the layout of a cluster is found."""

    def __init__(self, seeds: Seeds, command_timeout: float) -> None:
        self._seeds = seeds
        self._timeout = command_timeout
        self._random = Random()

    async def ask(self, nodes: Iterable[Node]) -> Layout:
        """What most say of those who answer; raises :class:`BackendError` if nobody does.

        Cancelling it leaves no socket behind.
        """
        known = list(nodes)
        ready = [node for node in known if node.ready]
        if ready:
            some = self._random.sample(ready, min(SOME, len(ready)))
            answers = [asyncio.ensure_future(self._of(node)) for node in some]
            try:
                return await self._most(answers, min(SOON, self._timeout))
            except BackendError:
                pass
        places = {node.place: self._seeds.at(node.place) for node in known}
        strangers = {(seed.address): seed for seed in (*self._seeds.seeds, *places.values())}
        timeout = self._timeout
        return await self._most(
            [asyncio.ensure_future(_of_stranger(one, timeout)) for one in strangers.values()], timeout
        )

    async def _of(self, node: Node) -> Layout:
        return _layout(await node.connection.call(*QUESTION), node.host, node)

    async def _most(self, answers: Sequence[asyncio.Future[Layout]], timeout: float) -> Layout:
        """Waits for the first that answers, and a little for the others."""
        left: set[asyncio.Future[Layout]] = set(answers)
        end = asyncio.get_running_loop().time() + timeout
        said: list[Layout] = []
        try:
            while left and 2 * max(_voices(said).values(), default=0) <= len(answers):
                rest = max(0.0, end - asyncio.get_running_loop().time())
                done, left = await asyncio.wait(
                    left, timeout=min(GRACE, rest) if said else rest, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    break
                said += [one.result() for one in done if one.exception() is None]
        finally:
            for one in answers:
                one.cancel()
            await asyncio.gather(*answers, return_exceptions=True)
        if said:
            voices = _voices(said)
            return max(said, key=lambda layout: (voices[layout.ranges], layout.covered))
        errors = [
            error
            for one in answers
            if not one.cancelled() and isinstance(error := one.exception(), BackendError)
        ]
        known = [error for error in errors if isinstance(error, BackendRefused)]
        if not errors:
            raise BackendUnavailable(f"{self._seeds}: no node says who serves what within {timeout:g} s")
        first = (known or errors)[0]
        kind = type(first) if len(known) in {0, len(answers)} else BackendUnavailable
        raise kind(f"{self._seeds}: no node says who serves what: {first}") from first.__cause__


def _voices(said: Iterable[Layout]) -> Counter[tuple[tuple[int, int, Place], ...]]:
    """How many say that the slots are so; of replicas one may have heard and another one not."""
    return Counter(layout.ranges for layout in said)


async def _of_stranger(node: NodeEndpoint, timeout: float) -> Layout:
    return _layout(await asked(node, timeout, *QUESTION), node.host, node)


def _layout(answer: Any, host: str, node: object) -> Layout:
    try:
        layout = parse(answer, host)
    except ValueError as error:
        raise BackendRefused(f"{node} gave no answer to CLUSTER SLOTS that could be understood") from error
    if not layout.ranges:
        raise BackendUnavailable(
            f"{node} knows of nobody who serves any slot: it is not, or not yet, in a cluster"
        )
    return layout
