"""The interface of a row store: small rows, read with their versions and changed by compare-and-set.

Everything else about locks is written once, in the engine above it. An adapter contains no lock rule, no retry, no cache and
no clock arithmetic: it carries out each call once and translates the errors of its driver.

The promises of exclusion, order and tokens rest on these rules; each of them has a counterexample where it is missing.

1. **Linearizable.** A read sees every write that was answered before the read was sent, also writes of other clients.
2. **The writer chooses the version** (:attr:`Edit.version`), a text that is new for each attempt; the server stores it and
   compares it as bytes. A store whose server makes the versions ignores it and returns those, and they are good
   only on the connection that read them.
3. **Absence is the version** ``""``. Nothing distinguishes one absence of a row from the next one; the engine allows for it.
4. **Each edit counts at most once.** The store never repeats a write, whatever became of its answer.
5. **A lost answer is an error.** A call that raises leaves open which of its edits were made, are made later, or never. The
   engine reads, and recognises its own versions. ``None`` in the answer of :meth:`RowStore.compare_and_set` says only that
   another version was there: the answer of a copy that the network repeated says so too.
6. **No call crosses a reconnect.** When a connection is lost, the store calls :attr:`Listener.interrupted` before it sends
   anything on the next one. Every call whose request may have been sent on the lost connection raises, and so does a
   write that was waiting for its turn there: its versions belong to what was read before.
7. **A driver call is never cancelled** once its request may have been sent: the store ends the connection instead, and the
   call raises. Each call ends within ``settings.command_timeout``.
8. **Keys and addresses are data**: compared byte by byte, never normalised, cut or read as a pattern (``_`` and ``%`` occur).

Calls come from one event loop and may overlap; "in one flight" means that neither waits for the other's answer. Errors are
those of :mod:`aiolock.errors` with the driver's as their cause: :class:`BackendUnavailable` if another try may succeed,
:class:`BackendRefused` if not. No message contains a password or a value."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from typing import NamedTuple

from aiolock.core.backend import Settings
from aiolock.types import Finding

__all__ = ["ALL", "MOST_KEY", "MOST_VALUE", "Edit", "Entry", "Listener", "Row", "RowStore", "StoreClock"]

MOST_VALUE = 65_536
"""Bytes; the engine writes no longer value."""

MOST_KEY = 250
"""Characters; keys are printable ASCII without spaces, and begin with the namespace and a slash."""

ALL = "*"
"""Address of all clients of the store in this namespace."""


class StoreClock(NamedTuple):
    """A reading of a clock that all clients of the store share, by which they judge when a session has expired.

    The clock counts at the rate of real time, also while machines are suspended. PostgreSQL, MongoDB: the server's clock.
    SQLite: ``CLOCK_BOOTTIME`` of the machine.
    """

    seconds: float
    boot: str = ""
    """Identifies the run of the machine, where the store is usable on one machine only: another run proves that every
    process of the earlier one has ended. Empty for the clock of a server."""
    zone: str = ""
    """Identifies whose clock it is, where another one may take its place: readings of different zones are never compared. SQLite: the
    time namespace. PostgreSQL: the timeline, since a standby that is promoted has a clock of its own."""


class Row(NamedTuple):
    """One version of a row, or its absence: empty value, empty version."""

    value: bytes
    version: str
    tick: int = 0
    """The time of the store in µs, taken **at or after** the moment at which the row was read or written and before the
    answer was sent; 0 if this answer does not show it. Tokens are counted from it: it need not run evenly, but a row that was
    deleted begins again with tokens from it. The wall clock of the server where there is one (not the start of the
    statement or transaction); in memory, a counter of the store."""
    clock: StoreClock | None = None
    """The shared clock at this answer; ``None`` if the store has none, or if this answer does not show it."""


class Edit(NamedTuple):
    """One change of one row; it is made only if the row has the version ``expected`` at that moment."""

    key: str
    expected: str
    """The version to replace; ``""``: insert, there must be no row."""
    version: str
    """The new version, chosen by the writer; ``""`` for a deletion."""
    value: bytes | None
    """The new value, at most :data:`MOST_VALUE` bytes; ``None``: delete the row. A deletion always names a version."""
    ttl: float | None = None
    """Seconds after this write from which on the server or :meth:`RowStore.purge` may delete the row, and not earlier;
    ``None``: never. Replaces the row's earlier ttl. A row without ttl is deleted by an :class:`Edit` only."""
    flush: bool = True
    """True: answered only when the write survives a crash of the server, as far as the deployment promises that at all.
    False: visible at once, but a crash may undo it. A write with ``flush`` that was answered makes all writes durable that
    were answered before it was sent, on this connection or another one. A store that always flushes ignores False."""
    notify: frozenset[str] = frozenset()
    """Addresses whose clients learn that this row changed, if the edit is made: see :attr:`Listener.changed`."""


class Entry(NamedTuple):
    """A hold for a lock that may be free: the server composes the value of the row, see :meth:`RowStore.enter`."""

    key: str
    version: str
    """The new version, chosen by the writer."""
    head: str
    """The value of the row, up to its token."""
    hold: str
    """The hold in the value, up to the number of its tokens."""
    block: int
    """Most tokens of the hold."""
    floor: int
    """The token that those of the hold are above, besides that of the row."""
    session: str
    """The key of the session row that the hold names."""
    heartbeat: str
    """The version that the session row has to have."""


class Listener(NamedTuple):
    """The functions by which the store reports to the engine: plain functions, called on the engine's event loop."""

    address: str
    """The address of this client in :attr:`Edit.notify`: up to 32 letters and digits."""
    changed: Callable[[str | None], None]
    """Called with a key: the row may have changed. With ``None``: any row may have. A hint, never proof: it may be early,
    late, repeated or lost; the engine reads."""
    interrupted: Callable[[], None]
    """Called when a connection was lost, for commands or for notifications, or when notifications were dropped. The engine
    forgets all rows and versions that it knows, and reads again. Harmless if it comes once too often."""
    replaced: Callable[[], None]
    """Called before :attr:`interrupted` when other rows have taken the place of all those that were there, whatever they are
    like: the sessions of this client are over, and their holds lost. For a file, whose place another one can take."""


class RowStore(ABC):
    """A table of small rows at a server, in a file or in memory; one object for each opened client.

    The constructor takes the store's own options and does no I/O. Cancelling a call that only reads changes nothing.
    """

    push: bool = False
    """True if changes are notified by themselves. The engine polls in any case."""

    poll: float = 2.0
    """Seconds after which the engine reads the rows that it waits for, without a notification. With back-off up to 2 s for a
    store that has no notifications and reads cheaply (memcached: 0.005)."""

    expires: bool = False
    """True if the server itself deletes each row when its ttl has passed, and a row in use never before that: absence of a
    session row proves that it was not renewed for its ttl. The engine gives session rows their ttl only then."""

    reads_prove: bool = True
    """False while others see a write before it is durable wherever it has to be. What a read shows may then be undone, until a
    flushed write was answered that was sent on the same connection after the answer to the read. May change with each connection."""

    in_order: bool = False
    """True if a write is durable whenever a later one is, as in the one log of a server: then what a read shows of other clients
    proves itself, also without ``reads_prove``. What is done on the strength of it is written later, and what a crash undoes is
    repeated by the client that has not received the answer. A write of its own that a client has given up is repeated by no other client."""

    capabilities: frozenset[str] = frozenset()
    """The capabilities, as in ``require=``, that this deployment deserves; complete after :meth:`open`.

    ``exclusion`` needs rules 1 to 7, a batched read and rows that are never evicted; ``fencing`` a row or a ``tick`` that
    survives a restart.
    """

    @property
    def enters(self) -> bool:
        """True if the server evaluates :meth:`enter`, and would do so at once: a write that waits can take others with it."""
        return False

    @abstractmethod
    async def open(self, settings: Settings, listener: Listener) -> None:
        """Connect, check the deployment, create or check the schema, and complete :attr:`capabilities`.

        Refuses what cannot keep the rules above (:class:`BackendRefused`). Cancelling it leaves nothing open. After an attempt
        that failed, or what came after it, :meth:`aclose` is called, and this one again. Afterwards the
        store reconnects by itself; calls meanwhile wait for that within their timeout, writes raise by rule 6.
        """

    @abstractmethod
    async def get(self, keys: Sequence[str]) -> list[Row]:
        """Return the rows of ``keys``, in this order, in one round trip; an absent one as ``Row(b"", "", tick, clock)``.

        Each row is read at one moment; two rows may be read at different moments.
        """

    @abstractmethod
    async def versions(self, keys: Sequence[str]) -> list[Row]:
        """Do the same without transferring the values: each ``value`` is ``b""``, also of a row that exists."""

    @abstractmethod
    async def compare_and_set(self, edits: Sequence[Edit]) -> list[Row | None]:
        """Make each edit whose row has the version ``expected``, all in one round trip; no key occurs twice.

        Return for each the row as it is now (``value`` may be left empty; a deleted row has the version ``""``), or ``None``
        if another version was there. Each edit is atomic and independent: one that fails does not undo the others. If an
        edit cannot be made because its notification cannot be queued, it is made without. Cancelling the call is a lost
        answer.
        """

    async def enter(self, entry: Entry) -> tuple[Row, str]:
        """Read a row and, if its lock is free, write a hold, in one round trip; return the row and its version before.

        The lock is free if its row is absent, or if its value is ``head``, the last token, and the end of the value or the
        list of holds that were ended by force: no holds, no queue, nothing else. The hold is written if, at the same moment,
        the session row has the version ``heartbeat``; no other write counts between the two. The tokens are those of
        :func:`aiolock.backends.rows.lockrow.new_tokens`, by the time of the store at that moment or later. The write is flushed,
        and the row has no ttl. The row that is returned has the version ``entry.version`` if the hold was written.

        The server may decline always. It judges no session but that one, waits for no row, and ends no hold. Cancelling the
        call is a lost answer; a copy of the request may be late then, until a later heartbeat was answered.
        """
        raise NotImplementedError

    @abstractmethod
    def scan(self, prefix: str) -> AsyncIterator[tuple[str, Row]]:
        """Yield each row whose key begins with ``prefix``, in any order, in pages; not at one moment."""

    @abstractmethod
    async def purge(self, prefix: str, idle: float, spared: Collection[str] = ()) -> int:
        """Delete the rows whose key begins with ``prefix`` and whose ttl ended ``idle`` seconds ago or earlier; return their number.

        Those with a key in ``spared`` stay.
        Each row is deleted only if it still has that ttl at that moment (one statement does both). Deletes in portions, so
        that no other call waits for it; after cancelling it no further portion is deleted.
        """

    def watch(self, keys: frozenset[str]) -> None:  # noqa: B027 - most notify by address
        """Record that the engine waits for changes of exactly these rows from now on; a plain function.

        For a store that polls something cheap of its own (``PRAGMA data_version``) while ``keys`` is not empty, and calls
        ``listener.changed``; or that subscribes for each row.
        """

    async def diagnose(self) -> list[Finding]:
        """Return findings about this deployment, for ``aiolock doctor``: reads settings, changes nothing.

        Works also before :meth:`open` has succeeded, if the server can be reached.
        """
        return []

    def abandon(self) -> None:  # noqa: B027 - most have nothing to do
        """Forget this opening, whose event loop was closed without ``aclose``: no use of that loop; ends threads."""

    @abstractmethod
    async def aclose(self) -> None:
        """Close every connection and end every task and thread. Never raises; safe in every state; idempotent.

        Cancelling it may leave some open, for another call.
        """
