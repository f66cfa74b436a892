"""Cancelling any call at any await point leaves nothing behind, and no cancellation is ever swallowed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator

import pytest

from aiolock import Client, Lease, UnsupportedKind
from tests.contract.deployments import Deployment
from tests.contract.primitives import BRIEF, PRIMITIVES, Primitive, Stage
from tests.faults.staging import left_at_the_server, left_in_the_loop, passes
from tests.sweep import MODES, Attempt, Ledger, Mode, attempt, sweep

LANDING = 20
"""After so many passes of the loop, everything that was on its way has arrived."""
SHIFTS: dict[Mode, int] = {"before": 6, "double": 3, "timeout": 3, "scope": 3}
"""How many passes of the loop later the interruption comes, at most: others make progress meanwhile."""

TTL = 100
"""So long that nothing is left behind but by mistake: neither a hold nor a pushed grant ends while we look."""

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def ledger() -> Iterator[Ledger]:
    """The account of this run, printed at its end."""
    kept = Ledger()
    yield kept
    print(f"\n{kept}")


@pytest.fixture
async def swept(deployment: Deployment) -> AsyncIterator[Client]:
    """The client whose operations are interrupted."""
    async with deployment.connect(label="swept", ttl=TTL) as client:
        yield client


@pytest.fixture
async def other(deployment: Deployment) -> AsyncIterator[Client]:
    """A client that looks at what is left, and gets in its way."""
    async with deployment.connect(label="other", ttl=TTL) as client:
        yield client


async def one_attempt(
    primitive: Primitive, stage: Stage, mode: Mode, at: int, shift: int
) -> tuple[Attempt, list[tuple[str, str]]]:
    """Prepare, interrupt, and look at what is left: at the server, at other clients, at the tasks of the loop."""
    violations: list[tuple[str, str]] = []
    before = asyncio.all_tasks()
    async with primitive(stage) as operation:
        result = await attempt(operation(), mode, at, shift)
        await passes(LANDING)
        won = [result.value] if isinstance(result.value, Lease) else []
        held = [lease for lease in (*won, *stage.kept) if lease.held]
        if len(held) < len(won) + len(stage.kept):
            violations.append(("wrong", "a lease that should be held is not"))
        if held:
            intruder = await stage.rival.lock(stage.name).try_acquire()
            if intruder is not None:
                violations.append(("double", f"{intruder!r} beside {held!r}"))
                await intruder.release()
        for lease in won:
            await lease.release()
    violations += await left_at_the_server(stage.rival, stage.name)
    # A task that the operation left behind may still wait by right, behind the rival: first it gets its turn.
    violations += await left_in_the_loop(before)
    for client in (stage.client, stage.rival):
        gauges = client.stats()
        if gauges["held"] or gauges["waiting"]:
            violations.append(("left", f"in a client: {gauges}"))
    return result, violations


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("operation", PRIMITIVES)
async def test_an_operation_interrupted_anywhere_leaves_nothing_behind(
    deployment: Deployment, swept, other, operation, mode, ledger, no_error_is_logged
):
    if operation == "force_release" and not deployment.forces:
        async with other.lock("x"):
            with pytest.raises(UnsupportedKind):
                await swept.lock("x").force_release()
        return

    async def run(at: int, shift: int) -> tuple[Attempt, list[tuple[str, str]]]:
        stage = Stage(deployment, swept, other, f"swept {next(_numbers)}", [])
        return await one_attempt(PRIMITIVES[operation], stage, mode, at, shift)

    if operation not in BRIEF:
        account = await sweep(mode, run, SHIFTS.get(mode, 1))
    elif "push" in deployment.promises:
        # What other kinds have in common with the mutex is swept there at all its steps.
        account = await sweep(mode, run, min(2, SHIFTS.get(mode, 1)))
    else:
        # Each attempt waits for somebody's next look: every step is interrupted once, in one of the modes.
        account = await sweep(mode, run, first=MODES.index(mode) + 1, step=len(MODES))
    ledger.enter(deployment.name, operation, mode, account)
    assert account.faults == []
