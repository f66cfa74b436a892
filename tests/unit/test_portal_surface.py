"""The synchronous surface is the asynchronous one: what a class of either side has, by introspection."""

from __future__ import annotations

import inspect
import re
import typing

import pytest

import aiolock
from aiolock import decorators, portal
from aiolock.kinds.election import Campaign

COUNTERPARTS = {
    aiolock.Client: portal.SyncClient,
    aiolock.Lock: portal.SyncLock,
    aiolock.ReentrantLock: portal.SyncLock,
    aiolock.ReadLock: portal.SyncLock,
    aiolock.WriteLock: portal.SyncLock,
    aiolock.RWLock: portal.SyncRWLock,
    aiolock.Semaphore: portal.SyncSemaphore,
    aiolock.Latch: portal.SyncLatch,
    aiolock.Barrier: portal.SyncBarrier,
    aiolock.Election: portal.SyncElection,
    Campaign: portal.SyncCampaign,
    aiolock.LockAll: portal.SyncLockAll,
    aiolock.Lease: portal.SyncLease,
    aiolock.JointLease: portal.SyncJointLease,
    aiolock.ReleaseRequest: portal.SyncReleaseRequest,
    decorators.Locked: portal.SyncLocked,
    decorators.Once: portal.SyncOnce,
}

RENAMED = {"aclose": "close", "__aenter__": "__enter__", "__aexit__": "__exit__", "__await__": "wait"}
DUNDERS = {"__aenter__", "__aexit__", "__await__", "__bool__", "__call__", "__reduce__"}

LEFT_OUT = {
    "LockAll.locks": "the asynchronous locks",
    "Locked.make": "makes an asynchronous lock, internal",
    "Locked.template": "internal",
    **dict.fromkeys(
        ("Once.generations", "Once.make", "Once.template", "Once.at_least", "Once.on_error"), "internal"
    ),
    "Campaign.terms": "of the election, internal",
    "Campaign.with_value": "of the election, internal",
}
"""Members that threads do not have, and why."""

LEFT_OUT_PARAMETERS = {
    "Client.lock": {"connection"},  # of an asynchronous driver, on its loop
    "lock_all": {"on_loss"},  # a thread cannot be cancelled
}
ADDED_PARAMETERS = {"Lease.wait_lost": {"timeout"}, "ReleaseRequest.__await__": {"timeout"}}
"""A task is cancelled by `asyncio.timeout`; a thread cannot be."""


def members(cls: type) -> dict[str, object]:
    return {
        name: inspect.getattr_static(cls, name)
        for name in dir(cls)
        if (name in DUNDERS or not name.startswith("_"))
        and getattr(object, name, None) is not getattr(cls, name)
    }


PAIRS = [
    pytest.param(cls, name, id=f"{cls.__name__}.{name}")
    for cls in COUNTERPARTS
    for name in members(cls)
    if f"{cls.__name__}.{name}" not in LEFT_OUT and f"Lease.{name}" not in LEFT_OUT
]


def test_every_public_class_has_a_counterpart():
    """A class that threads need no counterpart of is a value, an error, or named here."""
    values = {
        aiolock.Holder,
        aiolock.Kept,
        aiolock.Leader,
        aiolock.LockEvent,
        aiolock.LockInfo,
        aiolock.SkipEvent,
        aiolock.Waiting,
        aiolock.TransactionLock,
    }
    public = {getattr(aiolock, name) for name in aiolock.__all__}
    classes = {each for each in public if inspect.isclass(each) and not issubclass(each, BaseException)}
    assert classes - values == {cls for cls in COUNTERPARTS if cls.__name__ in aiolock.__all__}
    functions = {each.__name__ for each in public if inspect.isfunction(each)}
    # Signals reach the main thread by themselves.
    assert functions - {"run_until_signal"} == {"connect", "lock_all"}
    assert functions - {"run_until_signal"} <= set(portal.__all__)


def test_what_is_left_out_is_there():
    for name in LEFT_OUT:
        cls = next(each for each in COUNTERPARTS if each.__name__ == name.partition(".")[0])
        assert hasattr(cls, name.partition(".")[2]), name


def translated(annotation: str) -> str:
    """The annotation of a result as the synchronous side has it."""
    names = {cls.__name__: sync.__name__ for cls, sync in COUNTERPARTS.items()}
    names |= {
        "LockOptions": "SyncLockOptions",
        "CampaignOptions": "SyncCampaignOptions",
        "AsyncIterator": "Iterator",
    }
    # What an `acquire()` returns is awaited or entered; a thread gets the lease, which it can enter.
    annotation = re.sub(r"Acquisition\[(\w+)\]", r"\1", annotation)
    return re.sub(r"\w+", lambda match: names.get(match[0], match[0]), annotation)


def signature(function: object) -> inspect.Signature:
    overloads = typing.get_overloads(function)
    return inspect.signature(overloads[0] if overloads else function)


@pytest.mark.parametrize(("cls", "name"), PAIRS)
def test_a_member_is_the_same_on_both_sides(cls, name):
    ours = members(cls)[name]
    theirs = inspect.getattr_static(COUNTERPARTS[cls], RENAMED.get(name, name), None)
    assert theirs is not None, f"{COUNTERPARTS[cls].__name__} has no {RENAMED.get(name, name)}"
    if not inspect.isfunction(ours):
        assert isinstance(theirs, property)
        if isinstance(ours, property):
            ours, theirs = ours.fget, theirs.fget
            assert translated(inspect.signature(ours).return_annotation) in (
                inspect.signature(theirs).return_annotation,
                "NoReturn",  # the token of several locks
            )
        return
    assert not inspect.iscoroutinefunction(theirs)
    assert inspect.isfunction(theirs)
    key = f"{cls.__name__}.{name}"
    before, after = signature(ours), signature(theirs)
    expected = {
        each.name: (each.kind, each.default, translated(str(each.annotation)))
        for each in before.parameters.values()
        if each.name not in LEFT_OUT_PARAMETERS.get(key, set())
    }
    found = {
        each.name: (each.kind, each.default, str(each.annotation))
        for each in after.parameters.values()
        if each.name not in ADDED_PARAMETERS.get(key.replace("JointLease", "Lease"), set())
    }
    if name in DUNDERS:
        # The protocols of Python say what they take.
        return
    assert list(found.items()) == list(expected.items())
    assert translated(before.return_annotation).replace(
        "LossReason | None", ""
    ) == after.return_annotation.replace("LossReason | None", "")


def test_several_locks_take_the_same():
    ours = inspect.signature(aiolock.lock_all).parameters
    theirs = inspect.signature(portal.lock_all).parameters
    assert set(ours) - set(theirs) == LEFT_OUT_PARAMETERS["lock_all"]
    assert [translated(str(ours[name].annotation)) for name in theirs] == [
        str(each.annotation) for each in theirs.values()
    ]


def test_a_member_that_is_forgotten_is_noticed(monkeypatch):
    monkeypatch.delattr(portal.SyncLatch, "count_down")
    with pytest.raises(AssertionError, match="SyncLatch has no count_down"):
        test_a_member_is_the_same_on_both_sides(aiolock.Latch, "count_down")


def test_a_parameter_that_is_forgotten_is_noticed(monkeypatch):
    monkeypatch.setattr(portal.SyncLatch, "count_down", lambda self, n=1: n)
    with pytest.raises(AssertionError):
        test_a_member_is_the_same_on_both_sides(aiolock.Latch, "count_down")
