"""The same promises on uvloop: tests of every kind, as they stand in their own files, on the other loop."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from tests.contract import test_closing as closing
from tests.contract import test_exclusion as exclusion
from tests.contract import test_guards as guards
from tests.contract import test_leases as leases
from tests.contract import test_loss as loss
from tests.contract import test_queueing as queueing
from tests.contract.deployments import Deployment

Promise = Callable[..., Coroutine[Any, Any, None]]

PROMISES: tuple[tuple[Promise, dict[str, Any]], ...] = (
    (exclusion.test_many_tasks_of_two_clients_are_never_inside_together, {"fair": False}),
    (exclusion.test_many_tasks_of_two_clients_are_never_inside_together, {"fair": True}),
    (exclusion.test_waiting_for_ones_own_block_is_refused_instead_of_hanging, {}),
    (queueing.test_clients_are_served_in_the_order_of_their_arrival, {}),
    (queueing.test_local_passing_ends_when_others_wait, {}),
    (queueing.test_a_wait_that_times_out_leaves_nothing_behind, {}),
    (queueing.test_when_all_waiters_are_cancelled_the_place_is_given_up, {"fair": False}),
    (queueing.test_when_all_waiters_are_cancelled_the_place_is_given_up, {"fair": True}),
    (leases.test_a_lease_is_renewed_for_as_long_as_it_is_held, {}),
    (loss.test_losing_it_while_the_block_awaits_cancels_the_block, {}),
    (loss.test_the_running_task_is_not_cancelled_under_its_own_feet, {}),
    (loss.test_an_outer_cancellation_in_the_same_step_wins, {"order": "lost first"}),
    (loss.test_an_outer_cancellation_in_the_same_step_wins, {"order": "cancelled first"}),
    (loss.test_after_a_blocked_loop_every_look_is_right_at_once, {}),
    (loss.test_a_task_group_inside_the_block_is_ended, {}),
    (guards.test_another_event_loop_is_refused, {}),
    (closing.test_closing_ends_waiting_with_a_runtime_error, {}),
    (closing.test_closing_in_the_middle_of_an_attempt_leaves_nothing_behind, {"steps": 3}),
    (closing.test_no_task_of_a_closed_client_is_left, {}),
)


async def kept(promise: Promise, deployment: Deployment, arguments: dict[str, Any]) -> None:
    """Run a test with the fixtures that it names."""
    names = inspect.signature(promise).parameters
    fixtures: dict[str, Any] = {"deployment": deployment} if "deployment" in names else {}
    async with contextlib.AsyncExitStack() as stack:
        for name in ("client", "rival"):
            if name in names:
                fixtures[name] = await stack.enter_async_context(deployment.connect(label=name))
        await promise(**fixtures, **arguments)


def test_a_look_at_leases_that_is_due_at_once_does_not_end_their_renewal(deployment):
    async def due_at_once() -> None:
        async with deployment.connect() as client, client.lock("x") as lease:
            await asyncio.sleep(0.01)
            scheduler = client._runtime.scheduler
            scheduler._set_timer(scheduler._clock())
            await asyncio.sleep(0.05)
            lease.check()

    uvloop.run(due_at_once())


@pytest.mark.parametrize(
    ("promise", "arguments"),
    PROMISES,
    ids=[
        "-".join((promise.__name__.removeprefix("test_"), *map(str, arguments.values())))
        for promise, arguments in PROMISES
    ],
)
def test_uvloop_keeps_it_as_well(deployment, promise, arguments):
    uvloop.run(kept(promise, deployment, arguments))
