"""Every exception that aiolock raises of its own.

::

    LockError
    ├── AcquireTimeout      (also TimeoutError)   the lock was not free in time
    │   └── WaitTimeout                           a latch did not open, or a barrier was not complete, in time
    ├── LockLost                                  a hold ended before its block did
    ├── BarrierBroken                             a party of this round of a barrier gave up or died
    ├── DeadlockDetected                          the server broke a cycle of waiting holders
    ├── BackendError                              the server, or the way to it
    │   ├── BackendUnavailable                    cannot be reached
    │   ├── BackendRefused                        reached, and it said no
    │   └── UnsafeBackend                         does not promise what `require` asks, or has data of another format
    ├── UnsupportedKind                           this backend has no such lock
    ├── InvalidName         (also ValueError)
    ├── ConfigError         (also ValueError)
    └── MissingDriver       (also ImportError)

One class per remedy. Arguments stay readable as fields; the message is a sentence made from them. All of
them pickle. Misuse (a closed client, another event loop, a lease entered twice, a handle used in a forked
child) is :class:`RuntimeError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import wraps
from traceback import walk_tb
from types import TracebackType
from typing import Any, Literal, ParamSpec, TypeVar

__all__ = [
    "AcquireTimeout",
    "BackendError",
    "BackendRefused",
    "BackendUnavailable",
    "BarrierBroken",
    "ConfigError",
    "DeadlockDetected",
    "ExperimentalWarning",
    "InvalidName",
    "LockError",
    "LockLost",
    "LossReason",
    "MissingDriver",
    "UnsafeBackend",
    "UnsupportedKind",
    "WaitTimeout",
]


P = ParamSpec("P")
R = TypeVar("R")


class ExperimentalWarning(UserWarning):
    """The backend that was connected to was not tested with its server: :func:`warnings.filterwarnings` hides it."""


LossReason = Literal["expired", "revoked", "session", "max_hold", "force-released", "closed", "transaction"]


def shorten(name: object) -> str:
    """Return a value as it may stand in a message: quoted, without line breaks, of bounded length."""
    try:
        text = repr(name)
    except Exception:  # noqa: BLE001 - a message about a wrong argument must not fail on its repr
        text = f"<{type(name).__name__}>"
    return text if len(text) <= 120 else f"{text[:100]}…{text[-10:]}"


def closed_error() -> RuntimeError:
    """Return the error of tasks that wait while their client is closed."""
    return RuntimeError("the client was closed while this task waited")


def copy_of(error: Exception) -> BackendError:
    """Return the same error for another task: an exception collects tracebacks, so tasks must not share one."""
    if isinstance(error, BackendError):
        copy = type(error)(str(error), retryable=error.retryable)
        copy.__cause__ = error.__cause__
    else:
        copy = BackendError(f"the backend failed unexpectedly: {error!r}")
        copy.__cause__ = error
    return copy


def meant(word: str, known: Iterable[str], end: str = "") -> str:
    """Return the end of a message about an unknown word: the known one that it resembles, or nothing."""
    # Imported only for a mistake.
    from difflib import get_close_matches  # noqa: PLC0415

    close = get_close_matches(word, list(known), 1)
    return f"; did you mean {close[0]}{end}?" if close else ""


def redact(url: str) -> str:
    """Return a URL as it may be shown: without its password and its query."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        scheme, rest = "", url
    # A password may contain what would end it in a correct URL: everything up to the last @ may belong to it.
    user, at, address = rest.rpartition("@")
    if at and (":" in user or "?" in user):
        user = user.partition("?")[0].partition(":")[0] + ":***"
    address, question, query = address.partition("?")
    return scheme + mark + user + at + address + (question + "…" if query else "")


class Redacted(str):
    """A URL whose ``repr`` shows no password, because reports of errors show the ``repr`` of local variables."""

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(redact(self))


def clear_locals(trace: TracebackType | None, module: str) -> None:
    """Clear the local variables of functions in a traceback, those of the package of ``module`` alone.

    Other functions there may be the caller's, and a generator among them would be ended.
    """
    package = module.partition(".")[0]
    for frame, _ in walk_tb(trace):
        if str(frame.f_globals.get("__name__")).partition(".")[0] == package:
            with suppress(RuntimeError):  # it is being executed
                frame.clear()


def forgets_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Clear the local variables of ``function`` and of the functions of this library in its traceback if it raises.

    Reports of errors show local variables, and a URL among them may contain a password.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            del args, kwargs
            clear_locals(error.__traceback__, __name__)
            raise

    return call


def name_of(function: object) -> str:
    """Return the name of a function for a message; the repr of callables without a name, such as ``functools.partial``."""
    return getattr(function, "__qualname__", None) or shorten(function)


class LockError(Exception):
    """The base of every error of this library."""


class AcquireTimeout(LockError, TimeoutError):
    """The lock was not acquired within ``timeout`` seconds; nothing is held and nothing is left behind."""

    def __init__(self, name: str, timeout: float, detail: str = "") -> None:
        # One argument: TimeoutError would take several for an errno, its text and a file name.
        super().__init__(name)
        self.name = name
        self.timeout = timeout
        self.detail = detail

    def __str__(self) -> str:
        why = f" ({self.detail})" if self.detail else ""
        return (
            f"lock {shorten(self.name)} was not free within {self.timeout:g} s{why}; "
            f"wait longer with timeout=, or see who holds it with inspect()"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.timeout, self.detail)


class WaitTimeout(AcquireTimeout):
    """A latch did not open, or a barrier was not complete, within ``timeout`` seconds."""

    def __init__(self, what: str, name: str, timeout: float, detail: str) -> None:
        super().__init__(name, timeout, detail)
        self.what = what

    def __str__(self) -> str:
        ended = "did not open" if self.what == "latch" else "was not complete"
        return (
            f"{self.what} {shorten(self.name)} {ended} within {self.timeout:g} s: {self.detail}; "
            f"wait longer with timeout=, or find out which are missing"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.what, self.name, self.timeout, self.detail)


class BarrierBroken(LockError):
    """A party of this round of a barrier gave up, died or was cut off (``reason``): the round is over for all parties."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"barrier {shorten(self.name)} was broken: {self.reason}; no party passed in this round, "
            f"and the next wait() is part of a new one"
        )


_WHY: dict[str, str] = {
    "expired": "its ttl ended without a successful renewal",
    "revoked": "the server says that it is no longer this client's",
    "session": "the server ended the session that it lived in",
    "max_hold": "it was held for longer than its max_hold",
    "force-released": "it was released by force",
    "closed": "its client was closed",
    "transaction": "your transaction was committed or rolled back inside the block (also by a statement that commits "
    "implicitly, such as DDL), or a savepoint from before the block was rolled back to or released",
}


class LockLost(LockError):
    """A lease ended before the work under it did.

    ``reason`` is one of ``"expired"``, ``"revoked"``, ``"session"``, ``"max_hold"``, ``"force-released"``,
    ``"closed"`` and ``"transaction"``. Work after that moment may have overlapped with another holder's.
    """

    def __init__(self, name: str, reason: LossReason) -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason: LossReason = reason

    def __str__(self) -> str:
        why = _WHY.get(self.reason, self.reason)
        return (
            f"lock {shorten(self.name)} was lost ({self.reason}): {why}; "
            f"stop working under it, and let the fencing token decide about writes on their way"
        )


class DeadlockDetected(LockError):
    """The server found a cycle of holders that wait for each other, and chose this one to give up."""

    def __init__(self, cycle: Sequence[str]) -> None:
        super().__init__(tuple(cycle))
        self.cycle: tuple[str, ...] = tuple(cycle)

    def __str__(self) -> str:
        names = " → ".join(shorten(name) for name in self.cycle)
        return f"deadlock between {names}; take these locks in one order, for example with lock_all()"


class BackendError(LockError):
    """The server, or the connection to it, failed. ``__cause__`` is the driver's error.

    ``retryable`` is True if the same call may succeed later by itself.
    """

    retryable: bool = True

    def __init__(self, message: str, *, retryable: bool | None = None) -> None:
        super().__init__(message)
        if retryable is not None:
            self.retryable = retryable


class BackendUnavailable(BackendError):
    """The server cannot be reached, or did not answer in time."""


class BackendRefused(BackendError):
    """The server refused: rights, authentication, read-only, out of memory."""

    retryable: bool = False


class UnsafeBackend(BackendError):
    """The deployment does not promise what ``require=`` asks for, or its data has another format than this program's."""

    retryable: bool = False


_KINDS: dict[str, str] = {"rw": "read-write lock", "sem": "semaphore"}
"""The words for families whose name is an abbreviation."""


class UnsupportedKind(LockError):
    """The backend does not have this kind of lock or operation; raised before any I/O."""

    def __init__(self, kind: str, backend: str, advice: str = "") -> None:
        super().__init__(kind, backend, advice)
        self.kind = kind
        self.backend = backend
        self.advice = advice

    def __str__(self) -> str:
        tail = f"; {self.advice}" if self.advice else ""
        return f"{self.backend} has no {_KINDS.get(self.kind, self.kind)}{tail}"


class InvalidName(LockError, ValueError):
    """An invalid name of a lock; raised before any I/O."""


class ConfigError(LockError, ValueError):
    """An invalid option, URL or combination; the message lists the valid ones."""


class MissingDriver(LockError, ImportError):
    """The package that talks to this server is not installed; the message is the command that helps."""

    def __init__(self, driver: str, extra: str) -> None:
        super().__init__(driver, extra)
        self.driver = driver
        self.extra = extra

    def __str__(self) -> str:
        return f'{self.driver} is not installed; run: pip install "python-aiolock[{self.extra}]"'

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.driver, self.extra)
