"""Exceptions: one sentence each, fields that stay readable, and a way through pickle."""

from __future__ import annotations

import copy
import pickle

import pytest

import aiolock
from aiolock import errors
from aiolock.backends.memory import MemoryBackend, MemoryServer

EXAMPLES = {
    "LockError": (errors.LockError("something"), {}),
    "AcquireTimeout": (
        errors.AcquireTimeout("a", 2.5, "held by w1"),
        {"name": "a", "timeout": 2.5, "detail": "held by w1"},
    ),
    "WaitTimeout": (
        errors.WaitTimeout("latch", "a", 2.5, "1 of 3 are left"),
        {"what": "latch", "name": "a", "timeout": 2.5, "detail": "1 of 3 are left"},
    ),
    "BarrierBroken": (errors.BarrierBroken("a", "w1 died"), {"name": "a", "reason": "w1 died"}),
    "LockLost": (errors.LockLost("a", "expired"), {"name": "a", "reason": "expired"}),
    "DeadlockDetected": (errors.DeadlockDetected(["a", "b", "a"]), {"cycle": ("a", "b", "a")}),
    "BackendError": (errors.BackendError("it broke", retryable=False), {"retryable": False}),
    "BackendUnavailable": (errors.BackendUnavailable("no route"), {"retryable": True}),
    "BackendRefused": (errors.BackendRefused("loading", retryable=True), {"retryable": True}),
    "UnsafeBackend": (errors.UnsafeBackend("no fencing"), {"retryable": False}),
    "UnsupportedKind": (
        errors.UnsupportedKind("latch", "quorum", "use x"),
        {"kind": "latch", "backend": "quorum", "advice": "use x"},
    ),
    "InvalidName": (errors.InvalidName("a name must"), {}),
    "ConfigError": (errors.ConfigError("ttl must"), {}),
    "MissingDriver": (errors.MissingDriver("redis", "redis"), {"driver": "redis", "extra": "redis"}),
}
each = pytest.mark.parametrize("name", EXAMPLES)


def test_a_kind_that_is_missing_is_called_by_a_word():
    for kind, word in (("rw", "read-write lock"), ("sem", "semaphore"), ("latch", "latch")):
        error = errors.UnsupportedKind(kind, "MySQL", "use x")
        assert str(error) == f"MySQL has no {word}; use x"
        assert error.kind == kind


def test_every_public_exception_is_here():
    public = {
        name
        for name in aiolock.__all__
        if isinstance(getattr(aiolock, name), type) and issubclass(getattr(aiolock, name), BaseException)
    }
    # Neither a type of text nor a warning is raised.
    assert set(EXAMPLES) == public == set(errors.__all__) - {"LossReason", "ExperimentalWarning"}


@each
def test_it_pickles(name):
    error, fields = EXAMPLES[name]
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(error, protocol))
        assert type(again) is type(error)
        assert str(again) == str(error)
        for field, value in fields.items():
            assert getattr(error, field) == getattr(again, field) == value


@each
def test_it_copies(name):
    error, fields = EXAMPLES[name]
    again = copy.copy(error)
    assert again is not error
    assert str(again) == str(error)
    assert {field: getattr(again, field) for field in fields} == fields


@each
def test_it_is_a_lock_error_and_says_something(name):
    error, _ = EXAMPLES[name]
    assert isinstance(error, errors.LockError)
    assert str(error)
    assert name in repr(error)


def test_the_tree():
    parents = {
        errors.LockError: Exception,
        errors.AcquireTimeout: TimeoutError,
        errors.WaitTimeout: errors.AcquireTimeout,
        errors.InvalidName: ValueError,
        errors.ConfigError: ValueError,
        errors.MissingDriver: ImportError,
        errors.BackendUnavailable: errors.BackendError,
        errors.BackendRefused: errors.BackendError,
        errors.UnsafeBackend: errors.BackendError,
    }
    for child, parent in parents.items():
        assert issubclass(child, parent)
    assert not issubclass(errors.LockLost, errors.BackendError)


def test_a_timeout_looks_like_no_operating_system_error():
    error = errors.AcquireTimeout("a", 2.0)
    assert error.errno is error.strerror is error.filename is None


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            errors.AcquireTimeout("a", 2.0),
            "lock 'a' was not free within 2 s; wait longer with timeout=, or see who holds it with inspect()",
        ),
        (
            errors.LockLost("a", "force-released"),
            "lock 'a' was lost (force-released): it was released by force; stop working under it, and let the fencing token decide about writes on their way",
        ),
        (errors.UnsupportedKind("latch", "quorum"), "quorum has no latch"),
        (
            errors.DeadlockDetected(["a", "b"]),
            "deadlock between 'a' → 'b'; take these locks in one order, for example with lock_all()",
        ),
        (
            errors.MissingDriver("redis", "redis"),
            'redis is not installed; run: pip install "python-aiolock[redis]"',
        ),
    ],
)
def test_sentences(error, sentence):
    assert str(error) == sentence


@pytest.mark.parametrize("reason", ["expired", "revoked", "session", "max_hold", "force-released", "closed"])
def test_every_reason_is_explained(reason):
    assert f"({reason}): " in str(errors.LockLost("a", reason))
    assert f"({reason}): {reason};" not in str(errors.LockLost("a", reason))


def test_long_names_are_shortened_and_stay_on_one_line():
    for error in (errors.LockLost("x\n" * 5000, "expired"), errors.AcquireTimeout("x\n" * 5000, 1)):
        assert len(str(error)) < 400
        assert "\n" not in str(error)
        assert error.name == "x\n" * 5000


async def test_handles_are_not_copied_or_pickled():
    async with aiolock.Client(MemoryBackend(server=MemoryServer())) as client:
        lock = client.lock("a")
        again = client.reentrant_lock("b")
        async with lock as lease, again as level:
            for handle, sentence in (
                (lease, "a lease cannot be copied or pickled: it is one hold of one process"),
                (level, "a lease cannot be copied or pickled"),
                (lock, "a lock cannot be copied or pickled: pass its name"),
                (again, "a lock cannot be copied or pickled"),
                (client, "a client cannot be copied or pickled: connect anew"),
            ):
                for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
                    with pytest.raises(TypeError, match=sentence):
                        attempt(handle)
            assert lease.held


async def test_what_inspect_answers_pickles():
    async with aiolock.Client(MemoryBackend(server=MemoryServer())) as client, client.lock("a"):
        info = await client.lock("a").inspect()
        assert pickle.loads(pickle.dumps(info)) == info
