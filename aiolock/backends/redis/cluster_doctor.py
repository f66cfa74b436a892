"""What a cluster is like: every primary is examined as one server is, and what they say is summed up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from aiolock.backends.redis.chart import Chart
from aiolock.backends.redis.commands import Script
from aiolock.backends.redis.doctor import examine as examine_one
from aiolock.backends.redis.seeds import Seeds
from aiolock.backends.redis.slots import SLOTS, Layout, Place, key_in, shown
from aiolock.contract import Finding, Settings
from aiolock.errors import BackendError
from aiolock.info import Level

__all__ = ["examine", "summed_up"]

SHARE = 0.5
"""Of the command timeout, for finding out who the nodes are."""
WORST = (Level.ERROR, Level.WARNING, Level.NOTE, Level.OK)


async def examine(seeds: Seeds, probe: Script, settings: Settings) -> list[Finding]:
    """Ask every primary, within the command timeout; raises :class:`BackendError` if no node tells who they are."""
    limit = settings.command_timeout
    layout = await Chart(seeds, SHARE * limit).ask(())
    settings = replace(settings, command_timeout=(1 - SHARE) * limit)
    asked: list[asyncio.Future[list[Finding]]] = [
        asyncio.ensure_future(
            examine_one(
                seeds.at(place),
                probe,
                settings,
                key_in(_slots(layout, place), f"{settings.namespace}:1:probe:"),
                cluster=True,
            )
        )
        for place in layout.primaries
    ]
    try:
        await asyncio.wait(asked)
    finally:
        for one in asked:
            one.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    found: dict[Place, list[Finding]] = {}
    silent: dict[Place, BackendError] = {}
    for place, one in zip(layout.primaries, asked, strict=True):
        error = one.exception()
        if error is None:
            found[place] = one.result()
        elif isinstance(error, BackendError):
            silent[place] = error
        else:
            raise error
    return [*_nodes(layout, silent), *_slots_of(layout), *_replicas(layout), *summed_up(found)]


def _slots(layout: Layout, place: Place) -> list[int]:
    return [slot for first, last, owner in layout.ranges if owner == place for slot in range(first, last + 1)]


def _nodes(layout: Layout, silent: dict[Place, BackendError]) -> list[Finding]:
    count = len(layout.primaries)
    if silent:
        [place, error], *_ = silent.items()
        text = f"{len(silent)} of {count} primaries cannot be asked, so their locks cannot be had: {shown(place)}: {error}"
        return [Finding(Level.ERROR, "nodes", text, "bring it back, or have a replica take over")]
    return [
        Finding(
            Level.OK, "nodes", f"all {count} primaries answer" if count > 1 else "the one primary answers"
        )
    ]


def _slots_of(layout: Layout) -> list[Finding]:
    missing = SLOTS - layout.covered
    if missing:
        text = f"nobody serves {missing} of the {SLOTS} slots, and locks whose names are there cannot be had"
        return [Finding(Level.ERROR, "slots", text, "see CLUSTER SLOTS, and redis-cli --cluster fix")]
    return [Finding(Level.OK, "slots", f"all {SLOTS} are served")]


def _replicas(layout: Layout) -> list[Finding]:
    alone = [place for place, count in layout.replicas if not count]
    if alone:
        who = "no primary" if len(alone) == len(layout.primaries) else f"{', '.join(map(shown, alone))}"
        has = "has" if who == "no primary" else "have no" if len(alone) > 1 else "has no"
        text = f"{who} {has} replica: when it is away, so are the locks of its slots"
        return [Finding(Level.NOTE, "failover", text, "give each primary a replica")]
    return [Finding(Level.OK, "failover", "every primary has a replica that can take over")]


def summed_up(found: dict[Place, list[Finding]]) -> list[Finding]:
    """One finding for each subject: the worst, with those whom it is about if it is not about all."""
    subjects = dict.fromkeys(finding.subject for findings in found.values() for finding in findings)
    return [finding for subject in subjects for finding in _summed_up(subject, found)]


def _summed_up(subject: str, found: dict[Place, list[Finding]]) -> Sequence[Finding]:
    said = [
        (place, finding)
        for place, findings in found.items()
        for finding in findings
        if finding.subject == subject
    ]
    level = min((finding.level for _, finding in said), key=WORST.index)
    worst = [(place, finding) for place, finding in said if finding.level is level]
    _, first = worst[0]
    if len(worst) == len(found):
        return [first]
    places = ", ".join(shown(place) for place, _ in worst)
    return [Finding(level, subject, f"at {places}: {first.text}", first.advice)]
