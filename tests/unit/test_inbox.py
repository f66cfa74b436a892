"""Inbox and Deadline: each wake-up reaches one waiter, says why, and survives a cancellation."""

from __future__ import annotations

import asyncio
import logging
import math

import pytest

from aiolock.clock import Deadline
from aiolock.core.backend import Claim, Grant, Request
from aiolock.core.inbox import Inbox, WakeReason, log_wake
from aiolock.errors import BackendRefused, BackendUnavailable
from aiolock.types import BARRIER, ELECTION, LATCH, MUTEX, READ, WRITE, permits

GRANT = Grant(7, 1, 10.0, demand=False)


@pytest.fixture
def inbox():
    return Inbox("orders", MUTEX)


async def test_a_wake_up_ends_the_wait_with_its_reason(inbox):
    waiting = asyncio.create_task(inbox.wait())
    await asyncio.sleep(0)
    inbox.wake(WakeReason.NOTIFIED)
    assert await waiting is WakeReason.NOTIFIED
    assert not inbox.woken


async def test_a_wake_up_without_a_waiter_ends_the_next_wait_and_the_first_reason_counts(inbox):
    inbox.wake(WakeReason.RECONNECTED)
    inbox.wake(WakeReason.POLL)
    assert await inbox.wait() is WakeReason.RECONNECTED


async def test_a_pushed_grant_is_taken_once(inbox):
    inbox.put(GRANT)
    assert await inbox.wait() is WakeReason.GRANTED
    assert await inbox.wait() is WakeReason.GRANTED
    assert inbox.take() is GRANT
    assert inbox.take() is None
    assert not inbox.woken


async def test_take_forgets_the_wake_ups_before_it(inbox):
    inbox.wake(WakeReason.NOTIFIED)
    assert inbox.take() is None
    assert not inbox.woken


async def test_cancelling_a_wait_that_was_woken_keeps_the_wake_up(inbox):
    waiting = asyncio.create_task(inbox.wait())
    await asyncio.sleep(0)
    inbox.wake(WakeReason.NOTIFIED)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await inbox.wait() is WakeReason.NOTIFIED


async def test_a_callback_is_called_once_and_not_if_something_is_there(inbox):
    calls = []
    assert inbox.on_ready(lambda _: calls.append(inbox.take()))
    inbox.put(GRANT)
    assert calls == [GRANT]
    inbox.wake(WakeReason.POLL)
    assert calls == [GRANT]
    assert not inbox.on_ready(lambda _: calls.append(None))
    assert inbox.woken


async def test_a_callback_may_register_the_next_one(inbox):
    reasons = []

    def again(_):
        reasons.append(len(reasons))
        assert inbox.on_ready(again)

    assert inbox.on_ready(again)
    inbox.wake(WakeReason.POLL)
    inbox.wake(WakeReason.POLL)
    assert reasons == [0, 1]


async def test_a_wake_up_after_take_is_kept_and_does_not_go_to_an_earlier_callback(inbox):
    calls = []
    assert inbox.on_ready(lambda _: calls.append(1))
    assert inbox.take() is None
    inbox.wake(WakeReason.NOTIFIED)
    assert not calls
    assert await inbox.wait() is WakeReason.NOTIFIED


async def test_the_deadline_of_a_wait_is_a_poll(inbox):
    clock = asyncio.get_running_loop().time
    assert await inbox.wait(Deadline.after(0.01, clock)) is WakeReason.POLL
    waiting = asyncio.create_task(inbox.wait(Deadline.after(0.01, clock)))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.sleep(0.02)
    assert not inbox.woken


async def test_a_timer_wakes_with_its_reason_unless_something_else_comes_first(inbox):
    inbox.wake_after(60, WakeReason.POLL)
    inbox.wake_after(0.01, WakeReason.EXPIRED)
    assert await inbox.wait() is WakeReason.EXPIRED
    inbox.wake_after(0.01, WakeReason.EXPIRED)
    inbox.wake(WakeReason.NOTIFIED)
    assert await inbox.wait() is WakeReason.NOTIFIED
    await asyncio.sleep(0.02)
    assert not inbox.woken


async def test_a_closed_inbox_calls_nothing_and_keeps_its_grant(inbox):
    calls = []
    inbox.on_ready(lambda _: calls.append(1))
    inbox.wake_after(0.01, WakeReason.POLL)
    inbox.close()
    inbox.put(GRANT)
    await asyncio.sleep(0.02)
    assert calls == []
    assert inbox.pushed is GRANT


async def _log_own():
    log_wake("orders", MUTEX, WakeReason.CANCELLED, own=True)


async def test_why_a_waiter_woke_is_logged_when_it_goes_on(inbox, caplog):
    inbox.wake(WakeReason.NOTIFIED)
    with caplog.at_level(logging.DEBUG, "aiolock.wait"):
        await inbox.wait()
        inbox.on_ready(lambda _: None)
        inbox.wake(WakeReason.LAPSED)
        log_wake("orders", READ, WakeReason.TIMEOUT)
        task = asyncio.create_task(_log_own(), name="buyer 7")
        await task
    assert [(each.aiolock_lock, each.aiolock_kind, each.aiolock_reason) for each in caplog.records] == [
        ("orders", "mutex", "NOTIFIED"),
        ("orders", "mutex", "LAPSED"),
        ("orders", "read", "TIMEOUT"),
        ("orders", "mutex", "CANCELLED"),
    ]
    assert caplog.messages[-1] == "task buyer 7 for 'orders' (mutex) wakes: the waiter was cancelled"
    assert WakeReason.LAPSED.value in caplog.text


async def test_the_log_names_the_error_of_a_request_that_failed(inbox, caplog):
    refused, later = BackendRefused("no permission"), BackendUnavailable("away")
    with caplog.at_level(logging.DEBUG, "aiolock.wait"):
        inbox.wake(WakeReason.FAILED, refused)
        inbox.wake(WakeReason.FAILED, later)
        await inbox.wait()
        inbox.wake(WakeReason.POLL)
        await inbox.wait()
        inbox.wake(WakeReason.FAILED, later)
        inbox.take()
        inbox.wake(WakeReason.FAILED, refused)
        inbox.on_ready(lambda _: None)
        inbox.take()
        inbox.on_ready(lambda _: None)
        inbox.wake(WakeReason.FAILED, later)
        inbox.wake_after(0, WakeReason.FAILED, refused)
        await inbox.wait()
    failed = "waiter for 'orders' (mutex) wakes: the request failed:"
    assert caplog.messages == [
        f"{failed} BackendRefused: no permission",
        "waiter for 'orders' (mutex) wakes: fallback poll",
        f"{failed} BackendRefused: no permission",
        f"{failed} BackendUnavailable: away",
        f"{failed} BackendRefused: no permission",
    ]
    errors = [getattr(each, "aiolock_error", None) for each in caplog.records]
    assert errors == ["BackendRefused", None, "BackendRefused", "BackendUnavailable", "BackendRefused"]


async def test_the_log_names_the_kind_of_lock_or_a_register(caplog):
    with caplog.at_level(logging.DEBUG, "aiolock.wait"):
        for kind in (MUTEX, READ, WRITE, permits(2, 5), ELECTION, LATCH, BARRIER, None):
            log_wake("x", kind, WakeReason.TIMEOUT)
    kinds = ["mutex", "read", "write", "2 of 5 permits", "election", "latch", "barrier", "register"]
    assert [each.aiolock_kind for each in caplog.records] == kinds
    assert caplog.messages == [f"waiter for 'x' ({kind}) wakes: the timeout passed" for kind in kinds]


async def test_a_claim_waits_by_its_inbox():
    class Bare(Claim):
        async def acquire(self, wait): ...
        async def release(self, keep=0): ...

    claim = Bare(Request("orders", MUTEX, ttl=10.0, label=""))
    waiting = asyncio.create_task(claim.inbox.wait())
    await asyncio.sleep(0)
    claim.inbox.put(GRANT)
    await waiting
    assert claim.inbox.take() is GRANT


def test_a_deadline_counts_down_to_zero():
    now = 5.0
    deadline = Deadline.after(2.0, lambda: now)
    assert (deadline.when, deadline.left(), deadline.passed()) == (7.0, 2.0, False)
    now = 7.0
    assert (deadline.left(), deadline.passed()) == (0.0, True)
    now = 9.0
    assert (deadline.left(), deadline.passed()) == (0.0, True)
    assert Deadline.after(None, lambda: now).left() == math.inf
