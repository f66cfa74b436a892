"""Optional capabilities: what only some servers can do, each found by ``isinstance``.

The code above asks for one by :meth:`Capability.of`, which refuses with the same text wherever a server lacks it. A backend
whose capability depends on its options has it, and raises :class:`UnsupportedKind` itself. All of them keep the rules of the
contract: only errors of :mod:`aiolock.errors` leave them, and each call ends within the command timeout.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Self, TypeVar

from aiolock.core.backend import Backend, Claim, Grant, Request
from aiolock.errors import UnsafeBackend, UnsupportedKind
from aiolock.types import Family, Finding, LockInfo

__all__ = [
    "ABSENT",
    "MOST_BYTES",
    "Administration",
    "CallerLock",
    "Capability",
    "Confirmation",
    "Content",
    "Diagnosis",
    "Downgrade",
    "Entry",
    "Extension",
    "FencedNode",
    "FencedPut",
    "Purging",
    "Register",
    "RegisterStore",
    "TransactionLocks",
    "UnreadableLock",
    "decode_register",
    "diagnose",
    "encode_register",
]

C = TypeVar("C", bound=Claim)
"""The claims of a backend."""


class Capability(Backend):
    """A backend with something that others lack."""

    @classmethod
    def of(cls, backend: Backend, what: str, advice: str = "") -> Self:
        """Return the backend if it has this capability, else raise :class:`UnsupportedKind` for ``what``."""
        if not isinstance(backend, cls):
            raise UnsupportedKind(what, backend.name, advice)
        return backend


class Downgrade(Claim):
    """A claim whose write hold can become a read hold."""

    __slots__ = ()

    @abstractmethod
    async def downgrade(self) -> Grant:
        """Turn this write hold into a read hold in one step; ``request.kind`` is READ then.

        The grant has the token of the write hold. Readers who are next in the queue enter. After a cancellation or an error
        the claim is one of the two: its holder relies on the weaker one, and ``release`` is correct for both, as is another
        call. Raises :class:`LockLost` if the server answers that the hold is gone.
        """


class Extension(Claim):
    """A claim whose hold can be given another life, if it is not renewed."""

    __slots__ = ()

    @abstractmethod
    async def extend(self, seconds: float, number: int) -> Grant:
        """Have the hold end ``seconds`` after the request arrives at the server.

        The requests of a claim are numbered from 1. The server ignores one with a number that is not above those it has carried out,
        and every renewal from the first of them on: a copy of either that arrives late changes nothing. The answer to one that
        was ignored is the same. After a cancellation or an error the server may have received it. Raises :class:`LockLost`
        if the server answers that the hold is gone.
        """


class UnreadableLock(UnsafeBackend):
    """The entry of a lock at the server was written by another version of the library, or is damaged."""


class Administration(Capability):
    """A backend whose locks can be inspected, listed and changed by others than their holders.

    Cancelling :meth:`inspect` or :meth:`names` changes nothing. After cancelling one of the other calls the server may have
    received it, and it may be called again.
    """

    shows_tokens: bool = True
    """True if :meth:`inspect` returns the fencing tokens of the holders; known without I/O."""
    keeps_values: bool = False
    """True if :meth:`inspect` returns :attr:`Request.value` of the holders; known without I/O."""

    def check_tokens(self, what: str, advice: str) -> None:
        """Raise :class:`UnsupportedKind` for ``what`` if the server does not know the tokens of holders. No I/O."""
        if not self.shows_tokens:
            raise UnsupportedKind(
                what, self.name, f"the server does not know the tokens of holders; {advice}"
            )

    @abstractmethod
    async def inspect(self, name: str, family: Family) -> LockInfo:
        """Return the holders of a lock and its waiters."""

    @abstractmethod
    async def force_release(self, name: str, family: Family, token: int | None = None) -> bool:
        """Take a lock from its holders and give it to the next in the queue; return whether there was a holder.

        With ``token``, only from the hold that has it, by :func:`~aiolock.core.present.has_token`: what ends is decided by
        the server in one atomic step, or named by an id that no other hold ever has. It is called with one only if
        :attr:`shows_tokens`.
        """

    @abstractmethod
    async def request_release(self, name: str, family: Family, reason: str) -> bool:
        """Ask the holders of a lock to release it; return whether there is one.

        Each holder learns of it by :attr:`Backend.events` (:attr:`EventKind.REQUESTED`), with its next renewal at the latest.
        """

    @abstractmethod
    async def set_limit(self, name: str, limit: int) -> None:
        """Give a semaphore another number of permits, for 24 hours after its last use.

        Fewer than are held, or 0: no holder loses one, requests wait. More: the next in the queue enter at once.
        """

    @abstractmethod
    async def names(self, pattern: str) -> list[tuple[str, Family]]:
        """Return the locks of the namespace that are held or waited for and whose name matches a glob pattern, sorted.

        Others may be among them: the caller inspects each.
        """

    async def empty(self) -> None:
        """Delete all that the namespace has at the server. No other client may use the namespace, now or later.

        Nothing where it all ends with the server or with its clients. Cancelling it leaves the rest.
        """


class Diagnosis(Capability):
    """A backend whose deployment can be examined."""

    @abstractmethod
    async def diagnose(self) -> list[Finding]:
        """Return findings about this deployment for ``aiolock doctor``: reads settings, changes nothing.

        A setting that may not be read is a finding as well. Works also before ``open`` has succeeded, if the server can be
        reached. Cancelling it changes nothing.
        """


async def diagnose(backend: Backend) -> list[Finding]:
    """Return the findings of a backend; none of one that cannot be examined. Cancelling it changes nothing."""
    return await backend.diagnose() if isinstance(backend, Diagnosis) else []


# --- registers
# Latches, barriers and observers are pure functions over a register; a server needs only compare-and-set.


MOST_BYTES = 65_536
"""Limit of the length of a register."""


class Entry(NamedTuple):
    """The value of a register, and the stamp of this version."""

    value: bytes
    stamp: str


class Content(NamedTuple):
    """The content of a register of this library."""

    body: dict[str, Any]
    """The latch or barrier; empty if the register does not exist."""
    writes: list[str]
    """The ids of the latest writes."""
    number: int
    """The number of writes so far."""


def decode_register(value: bytes) -> Content | None:
    """Return the content of a register; ``None`` for an unknown format."""
    if not value:
        return Content({}, [], 0)
    try:
        whole = json.loads(value)
        content = Content(whole["body"], whole["writes"], whole["n"])
        if whole["v"] != 2 or [type(part) for part in content] != [dict, list, int]:
            return None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return content


def encode_register(content: Content) -> bytes:
    """Return the value of a register."""
    whole = {"v": 2, "n": content.number, "writes": content.writes, "body": content.body}
    return json.dumps(whole, separators=(",", ":")).encode()


ABSENT = Entry(b"", "")
"""Stands for a register that does not exist."""


class Register(ABC):
    """A small value at the server, changed by compare-and-set. No I/O before the first verb; used by one task at a time.

    Only errors of :mod:`aiolock.errors` leave it; each verb but ``changed`` ends within the command timeout. Cancelling
    :meth:`read` or :meth:`changed` changes nothing.
    """

    @abstractmethod
    async def read(self) -> Entry:
        """Return the present version, or :data:`ABSENT`. Linearizable: it sees every write that was answered before."""

    @abstractmethod
    async def write(self, value: bytes, stamp: str, keep: float) -> str | None:
        """Replace the version with that ``stamp`` (``""`` if there must be none); return the new stamp.

        Return ``None`` if another version is there. No two writes have the same stamp, also not across the end of a register.
        The server may forget the register ``keep`` seconds after its last write, and not earlier. After an error or a
        cancellation the value may have been written, or will be: read again.
        """

    @abstractmethod
    async def changed(self, stamp: str) -> None:
        """Wait until the register may have another stamp: may be early, is never infinitely late."""

    @abstractmethod
    async def aclose(self) -> None:
        """End the watches. Never raises; idempotent. Cancelling it may leave one at the server, where it does no harm."""


class RegisterStore(Capability):
    """A backend whose server keeps registers."""

    @abstractmethod
    def register(self, name: str, family: Family) -> Register:
        """Return the register of that name, apart from the lock of the same name and family; no I/O."""


# --- locks in the caller's transaction


class CallerLock(ABC):
    """A lock inside a transaction on the caller's connection, which ends it."""

    @abstractmethod
    async def take(self, timeout: float | None, mark: str = "") -> bool:
        """Wait for the lock for at most ``timeout`` seconds (``None``: for ever, 0: try once); return whether it was granted.

        A ``mark`` is the name of what is left in the transaction, for :meth:`keeps`. Nothing else is sent on the connection
        afterwards. Cancelling it ends the wait at the server as well.
        """

    @abstractmethod
    async def keeps(self, mark: str) -> bool:
        """Return whether the transaction has had the lock since it was marked; remove the mark.

        Cancelling it leaves the connection in step.
        """

    @abstractmethod
    async def inspect(self) -> LockInfo:
        """Return the transactions that have the lock, and those that wait for it; asked on a connection of the client.

        Cancelling it changes nothing.
        """


class TransactionLocks(Capability):
    """A backend whose locks can be taken inside a transaction of the caller."""

    @abstractmethod
    def caller_lock(self, request: Request, connection: object) -> CallerLock:
        """Return the lock of ``request`` inside the transaction that is open on ``connection``; no I/O.

        Raises :class:`ConfigError` if ``connection`` is none.
        """


# --- a hold that is confirmed in the caller's transaction


class Confirmation(Capability, Generic[C]):
    """A backend whose holders can have a transaction of their own committed only if no other client enters before."""

    @abstractmethod
    async def confirm(self, claim: C, connection: object) -> bool:
        """Return whether the hold of ``claim`` is there, inside the transaction that is open on ``connection``.

        If it is, no other client enters before that transaction has ended. Cancelling it leaves the connection in step, or
        closes it. Raises :class:`ConfigError` if ``connection`` is none to this server, :class:`RuntimeError` if no transaction
        is open on it, before anything is locked; :class:`DeadlockDetected`, and :class:`BackendError` if it cannot be found out.
        """


# --- writes that the server makes only for the present holder


class FencedNode(Claim):
    """A claim with a node of its own at the server, for whose presence a transaction can check."""

    __slots__ = ()

    @property
    @abstractmethod
    def own(self) -> str:
        """The absolute path of the node."""

    @abstractmethod
    async def fenced_set(self, path: str, data: bytes, version: int | None) -> int | None:
        """Write to a node elsewhere if the own one is there; see :func:`aiolock.zookeeper.fenced_set`.

        Cancelling it leaves open whether it was written.
        """


class FencedPut(Capability, Generic[C]):
    """A backend that sets a key of the application in the transaction that checks for a hold."""

    @abstractmethod
    async def fenced_put(self, claim: C, key: str, value: bytes, check: Callable[[], None]) -> int:
        """Set the key if the server shows the hold of ``claim``; see :func:`aiolock.etcd.fenced_put`.

        ``check`` raises if the lease was lost or released meanwhile; it is called after each read. Cancelling it leaves
        open whether the key was set.
        """


# --- rows that are not needed any more


class Purging(Capability):
    """A backend whose unused rows can be deleted."""

    elsewhere = "only mysql://, postgresql://, sqlite:// and mongodb:// have: all others delete by themselves what is not needed any more"
    """The reason that a user gets on a server that has nothing to purge."""

    purges: str = "lock"
    """The word for what :meth:`purge` counts."""

    @abstractmethod
    def check_purge(self, idle: object) -> float:
        """Return ``idle`` as seconds; raise what :meth:`purge` raises before any I/O, also before ``open``."""

    @abstractmethod
    async def purge(self, idle: float) -> int:
        """Delete what was not needed for ``idle`` seconds, beside clients at work; return the number.

        Works page by page, each within the command timeout. Cancelling it leaves the rest. Raises :class:`ConfigError`
        for an invalid number, :class:`UnsupportedKind` if there is nothing to purge.
        """
