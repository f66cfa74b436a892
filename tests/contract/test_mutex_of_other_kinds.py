"""Whatever can act as a mutex keeps the promises of the mutex: its tests, run on other kinds of locks.

The tests are those of the other modules. `client` and `rival` are stand-ins whose `lock(name)` makes something else:
one permit of one, the fifth of five permits of which four are taken, a write lock, several locks of which there is one.
"""

# ruff: noqa: F401, F811 - what is imported is what is run, with other fixtures of the same names
from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, Self

import pytest

from aiolock import Client, JointLease, LockInfo, lock_all
from tests.contract.deployments import Deployment
from tests.contract.test_exclusion import (
    test_a_block_left_in_another_task_releases_and_says_so,
    test_a_lock_object_is_not_a_hold_and_can_be_reused,
    test_a_lock_that_is_held_is_not_granted_to_another_client,
    test_another_task_may_wait_for_my_block,
    test_leaving_a_block_that_is_not_open_is_refused,
)
from tests.contract.test_leases import (
    test_a_bare_acquire_signals_and_cancels_nobody,
    test_a_lost_lease_says_so_everywhere,
    test_async_with_lease_is_cancelled_on_loss,
    test_max_hold_ends_a_lease_that_is_kept_too_long,
    test_release_keep_holds_the_lock_for_nobody,
    test_releasing_from_two_tasks_at_once_is_releasing_once,
    test_releasing_twice_is_releasing_once,
)
from tests.contract.test_loss import (
    test_an_async_generator_is_not_cancelled_from_outside,
    test_an_exception_of_the_block_wins_and_carries_the_loss_as_a_note,
    test_an_outer_cancellation_in_the_same_step_wins,
    test_local_waiters_go_on_after_a_loss,
    test_losing_it_while_the_block_awaits_cancels_the_block,
    test_the_next_holder_has_a_greater_token,
    test_with_signal_the_block_goes_on_and_learns_it_at_its_end,
)
from tests.contract.test_queueing import (
    test_a_newcomer_takes_the_place_that_a_cancelled_waiter_leaves_in_the_same_step,
    test_a_wait_that_times_out_leaves_nothing_behind,
    test_clients_are_served_in_the_order_of_their_arrival,
    test_fair_tasks_of_two_clients_are_served_strictly_in_order,
    test_timeout_zero_asks_once_and_leaves_no_place,
    test_when_all_waiters_are_cancelled_the_place_is_given_up,
)

NAMES = ("x", "y", "z")
"""Those that the tests use."""
TAKER = "takes four"


class LeaseOfOne(JointLease):
    """The lease of several locks of which there is one: it has the token of that one."""

    @property
    def token(self) -> int:
        return self.parts[0].token


class Others:
    """A lock that does what it is asked with another one; who looks at it does not see who took four permits."""

    def __init__(self, lock: Any, plain: Any) -> None:
        self._lock = lock
        self._plain = plain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name) if hasattr(self._lock, name) else getattr(self._plain, name)

    def __aenter__(self) -> Any:
        # No coroutine of its own: a lock looks who enters it.
        return self._lock.__aenter__()

    def __aexit__(self, *args: Any) -> Any:
        return self._lock.__aexit__(*args)

    async def inspect(self) -> LockInfo:
        info = await self._plain.inspect()
        return replace(info, holders=tuple(holder for holder in info.holders if holder.label != TAKER))


class Acting:
    """A client whose locks are of another kind."""

    def __init__(self, client: Client, act: str) -> None:
        self._client = client
        self._act = ACTS[act]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def open(self) -> Self:
        await self._client.open()
        return self

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *args: object) -> None:
        await self._client.__aexit__(*args)

    def lock(self, name: str, **options: Any) -> Others:
        return Others(*self._act(self._client, name, **options))


def one_permit(client: Client, name: str, **options: Any) -> tuple[Any, Any]:
    lock = client.semaphore(name, 1, **options)
    return lock, lock


def fifth_permit(client: Client, name: str, **options: Any) -> tuple[Any, Any]:
    lock = client.semaphore(name, 5, **options)
    return lock, lock


def writing(client: Client, name: str, **options: Any) -> tuple[Any, Any]:
    lock = client.rwlock(name).write(**options)
    return lock, lock


def all_of_one(client: Client, name: str, **options: Any) -> tuple[Any, Any]:
    lock = client.lock(name, **options)
    return lock_all(lock), lock


ACTS: dict[str, Callable[..., tuple[Any, Any]]] = {
    "one permit of one": one_permit,
    "the fifth permit": fifth_permit,
    "write lock": writing,
    "all of one": all_of_one,
}
NEEDS = {
    "one permit of one": {"semaphore", "push"},
    "the fifth permit": {"semaphore", "push"},
    "write lock": {"read-write", "push"},
    "all of one": {"push"},
}
"""Where nothing is pushed, each of these tests takes its time, and finds nothing that the kinds' own tests do not."""


class Stage:
    """A deployment whose clients have locks of another kind."""

    def __init__(self, deployment: Deployment, act: str) -> None:
        self._deployment = deployment
        self._act = act

    def __getattr__(self, name: str) -> Any:
        return getattr(self._deployment, name)

    def connect(self, **options: Any) -> Acting:
        return Acting(self._deployment.connect(**options), self._act)


@pytest.fixture(params=ACTS)
def act(request) -> str:
    return request.param


@pytest.fixture
async def deployment(server: Deployment, act: str, monkeypatch) -> AsyncIterator[Stage]:
    """One deployment with a fresh namespace, in which another client has four of five permits if that is the act."""
    server.begin()
    monkeypatch.setattr("aiolock.kinds.multi.JointLease", LeaseOfOne)
    async with AsyncExitStack() as stack:
        if act == "the fifth permit":
            taker = await stack.enter_async_context(server.connect(label=TAKER))
            for name in NAMES:
                lease = await taker.semaphore(name, 5).acquire(permits=4)
                stack.push_async_callback(lease.release)
        yield Stage(server, act)


@pytest.fixture
async def client(deployment):
    async with deployment.connect(label="client") as opened:
        yield opened


@pytest.fixture
async def rival(deployment):
    async with deployment.connect(label="rival") as opened:
        yield opened
