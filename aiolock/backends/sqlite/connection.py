"""One connection to a SQLite file, used by one thread: check the file, and carry out each request once."""

from __future__ import annotations

import json
import os
import re
import sqlite3
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from aiolock.backends.rows.store import Edit, Row, StoreClock
from aiolock.backends.sql import read_schema, read_statements
from aiolock.backends.sqlite.errors import LOCKED, code
from aiolock.clock import system_clock, wall_clock
from aiolock.core.forks import call_in_child
from aiolock.errors import BackendRefused, UnsafeBackend, shorten

__all__ = ["FORMAT", "MEMORY", "MOST_LOG", "Connection", "machine", "mount_of"]

APPLICATION = 0x61694C6B
"""Marks a file of locks (``PRAGMA application_id``): the letters aiLk."""
FORMAT = 1
"""The version of the table (``PRAGMA user_version``)."""

MOST_LOG = 16_000_000
"""Bytes that the -wal file keeps when it begins anew; SQLite does so after some 4,000,000 where nothing keeps it from it."""

_COLUMNS = [
    ("key", "TEXT", 1, 1),
    ("version", "TEXT", 1, 0),
    ("value", "BLOB", 1, 0),
    ("expires", "REAL", 0, 0),
]
"""Names, types, whether NULL is refused, and the primary key."""

_STATEMENTS = read_statements("sqlite", "queries.sql")

# --- the place of the file

_MOUNTS = Path("/proc/self/mountinfo")
_BOOT = Path("/proc/sys/kernel/random/boot_id")

_SHARED = re.compile(
    r"nfs4?|cifs|smb.*|ncpfs|9p|virtiofs|vboxsf|prl_fs|afs|coda|ceph|lustre|gpfs|beegfs.*|orangefs|pvfs2|ocfs2|gfs2|"
    r"glusterfs|fakeowner|fuse|fuse\..*"
)
"""Types of file systems that other machines can use as well, or that a program provides which may let them."""

MEMORY = {"tmpfs", "ramfs", "devtmpfs"}
"""Types of file systems that are empty when the machine starts again."""


def mount_of(path: Path) -> tuple[str, str]:
    """Return mount point and type of the file system of a path without symbolic links; empty if they are not known."""
    above, found = {str(path), *map(str, path.parents)}, ("", "")
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return found
    for line in lines:
        # 36 35 98:0 /root /mnt/point rw,noatime master:1 - ext3 /dev/root rw
        mount, _, filesystem = line.partition(" - ")
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), mount.split(" ")[4])
        # Of two at the same point, the later one covers the earlier.
        if point in above and len(point) >= len(found[0]):
            found = point, filesystem.partition(" ")[0]
    return found


def machine() -> tuple[str, str] | None:
    """Return the run of this machine and the time namespace of this process, by which expiry is judged; or ``None``.

    Some containers mount an id of their own over the boot id of the kernel. Such an id proves nothing.
    """
    try:
        boot = _BOOT.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    zone = Path("/proc/self/ns/time")
    return (
        None
        if mount_of(_BOOT)[0] == str(_BOOT)
        else (boot, str(zone.readlink()) if zone.is_symlink() else "")
    )


def check_path(path: Path) -> None:
    """Refuse a path at which no file of locks can be."""
    point, kind = mount_of(path)
    problem = ""
    if _SHARED.fullmatch(kind):
        problem = (
            f"its file system ({kind}) may be shared by several machines, and SQLite keeps out processes of one machine only; "
            "choose a local disk, or a lock server"
        )
    elif not path.parent.is_dir():
        problem = f"there is no directory {path.parent}; create it"
    elif path.is_symlink():
        problem = "it is one of several symbolic links that lead to each other"
    elif point == str(path):
        problem = "it is mounted without the two files that SQLite keeps beside it; mount its directory"
    elif path.exists() and not path.is_file():
        problem = "it is a directory, pipe, socket or device, not a file"
    elif path.exists() and path.stat().st_nlink > 1:
        problem = "it has several names (hard links), whose users would not see each other's locks; remove all but one"
    if problem:
        raise BackendRefused(f"{path}: {problem}")


def _identity(names: Iterable[str | Path]) -> list[tuple[int, int]]:
    """Return device and inode of each file; empty if one of them is missing."""
    try:
        found = [os.stat(name) for name in names]  # noqa: PTH116 - half the time
    except OSError:
        return []
    return [(each.st_dev, each.st_ino) for each in found]


# --- forks

_opened: list[tuple[int, int]] = []
"""Device and inode of each file that a connection of this process has open."""
_inherited: set[tuple[int, int]] = set()
"""The files that the parent had open when it was forked. SQLite keeps the locks and shared memory of a file once per process: a connection
of the child would count the parent's locks as its own, and go on with shared memory that other processes have replaced."""


def _inherit() -> None:
    _inherited.update(_opened)
    _opened.clear()


call_in_child(_inherit)


# --- the connection


class Connection:
    """An open file of locks.

    :param path: the file, without symbolic links: SQLite keeps its other files beside the file itself.
    :param given: the path by which the other processes find it.
    :param pause: waits a moment for a process that has locked the file; returns False if that takes too long.
    """

    def __init__(self, path: Path, given: str, pause: Callable[[], bool]) -> None:
        self.path = path
        self._pause = pause
        self._machine = machine()
        self._known: dict[str, str] = {}
        """The versions in the latest answers, for :meth:`changed`."""
        self._flush: bool | None = None
        check_path(path)
        while not (file := _identity([path])):
            # Made first, so that it is known which file is opened below.
            sqlite3.connect(path).close()
        [self._file] = file
        if self._file in _inherited:
            raise BackendRefused(
                f"{path}: this process was forked while its parent had the file open, and SQLite would take the parent's locks for its own: "
                "close the client before the fork, or start the process by spawn, forkserver or exec"
            )
        _opened.append(self._file)
        try:
            # In autocommit mode, and without the busy handler of SQLite, whose pauses grow to a tenth of a second.
            self._db = sqlite3.connect(path, timeout=0, isolation_level=None)
            try:
                self._prepare()
            except BaseException:
                self._db.close()
                raise
        except BaseException:
            _opened.remove(self._file)
            raise
        beside = [f"{path}{suffix}" for suffix in ("", "-shm", "-wal")]
        # Compared with each request, and the path as it was given as well: a symbolic link may be turned.
        self._names = beside if str(path) == given else [*beside, given]
        self._files = _identity(self._names)
        if self._files[:1] != file or self._files[3:] not in ([], file):
            # Replaced meanwhile: what was opened is not what the path leads to.
            self._files = []
        self._seen = 0

    def _prepare(self) -> None:
        """Check the file, and make the table in a new one."""
        self._is_new()
        [[mode]] = self.run("PRAGMA journal_mode = WAL")
        if mode != "wal":
            raise BackendRefused(f"{self.path}: SQLite cannot keep a -wal file there (journal_mode={mode})")
        # A transaction elsewhere that reads for long lets it grow; SQLite would go on with a file of that length afterwards.
        self.run(f"PRAGMA journal_size_limit = {MOST_LOG}")
        # A write lock, also to find out now whether this user may write.
        self.run("BEGIN IMMEDIATE")
        if self._is_new():
            for statement in (
                read_schema("sqlite"),
                f"PRAGMA application_id = {APPLICATION}",
                f"PRAGMA user_version = {FORMAT}",
            ):
                self.run(statement)
        self.run("COMMIT")
        columns = self.run("PRAGMA table_info(aiolock)")
        if [(name, kind, given, primary) for _, name, kind, given, _, primary in columns] != _COLUMNS:
            raise UnsafeBackend(
                f"{self.path} is marked as a file of locks, and its aiolock is no table of format {FORMAT}: use another file"
            )

    def _is_new(self) -> bool:
        """Return whether the file is empty; refuse one of another program or of another format."""
        # The tables first: another process may be making them, and commits them and its marks together.
        tables = [name for [name] in self.run("SELECT name FROM sqlite_master LIMIT 4")]
        [[application]], [[version]] = self.run("PRAGMA application_id"), self.run("PRAGMA user_version")
        if application == APPLICATION and version != FORMAT:
            raise UnsafeBackend(
                f"{self.path} has format {version}, and this version of aiolock uses format {FORMAT}: use the same version of "
                "aiolock everywhere on this machine, or another file"
            )
        if application != APPLICATION and (application or version or tables):
            raise BackendRefused(
                f"{self.path} is the SQLite database of another program (application id {application}, tables "
                f"{shorten(tables)}): give locks a file of their own"
            )
        return bool(application == 0)

    def run(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        """Execute a statement, as soon as other processes let it, and return its rows; for a DELETE, their number."""
        while True:
            try:
                cursor = self._db.execute(statement, values)
                return cursor.fetchall() if cursor.description else [cursor.rowcount]
            except sqlite3.OperationalError as error:
                if code(error) not in LOCKED or not self._pause():
                    raise

    def close(self) -> None:
        """Close the file."""
        self._db.close()
        _opened.remove(self._file)

    @property
    def in_memory(self) -> bool:
        """True if the file is gone when the machine starts again."""
        return mount_of(self.path)[1] in MEMORY

    def replaced(self) -> bool:
        """Return whether the path leads to another file now, or to none: other processes use that one."""
        return not self._files or _identity(self._names) != self._files

    # --- requests

    def get(self, keys: Sequence[str], *, values: bool = True) -> list[Row]:
        """Return the rows of ``keys``, with or without their values."""
        records = self.run(_STATEMENTS["get"], (json.dumps(list(keys)), values))
        found = {key: (value, version) for key, value, version in records}
        rows = self._rows(found.get(key, (b"", "")) for key in keys)
        self._remember(zip(keys, rows, strict=True))
        return rows

    def _rows(self, found: Iterable[tuple[bytes, str]]) -> list[Row]:
        """Return rows that were read or written just now."""
        clock = None if self._machine is None else StoreClock(system_clock(), *self._machine)
        tick = int(wall_clock() * 1_000_000)
        return [Row(value, version, tick, clock) for value, version in found]

    def compare_and_set(self, edits: Sequence[Edit]) -> list[Row | None]:
        """Make the edits whose rows have the expected version, in one transaction."""
        flush = any(edit.flush for edit in edits)
        if flush is not self._flush:
            # With NORMAL, a commit may be undone if the machine loses its power, and only then. As a script, because SQLite may
            # carry this pragma out when it is prepared, and prepared statements are cached.
            self._db.executescript(f"PRAGMA synchronous = {'FULL' if flush else 'NORMAL'}")
            self._flush = flush
        self.run("BEGIN IMMEDIATE")
        try:
            made = [self._make(edit) for edit in edits]
            self.run("COMMIT")
        except BaseException:
            self._db.rollback()
            raise
        rows = self._rows((b"", edit.version) for edit in edits)
        answer = [row if done else None for row, done in zip(rows, made, strict=True)]
        self._remember((edit.key, row) for edit, row in zip(edits, answer, strict=True) if row)
        return answer

    def _make(self, edit: Edit) -> bool:
        if edit.value is None:
            return self.run(_STATEMENTS["delete"], (edit.key, edit.expected)) == [1]
        expires = None if edit.ttl is None else wall_clock() + edit.ttl
        values = edit.version, edit.value, expires, edit.key
        return (
            self.run(_STATEMENTS["update"], (*values, edit.expected))
            if edit.expected
            else self.run(_STATEMENTS["insert"], values)
        ) == [1]

    def page(self, prefix: str, after: str) -> list[tuple[str, Row]]:
        """Return the next rows whose key begins with ``prefix``, in the order of their keys."""
        found = [row for row in self.run(_STATEMENTS["page"], (prefix, after)) if row[0].startswith(prefix)]
        rows = self._rows((value, version) for _, version, value in found)
        return [(key, row) for (key, _, _), row in zip(found, rows, strict=True)]

    def purge(self, prefix: str, idle: float, spared: Collection[str]) -> int:
        """Delete some of the rows of a prefix whose ttl ended ``idle`` seconds ago; return their number."""
        [count] = self.run(_STATEMENTS["purge"], (prefix, wall_clock() - idle, json.dumps(list(spared))))
        return int(count)

    # --- changes

    def changed(self, keys: Sequence[str], *, anyway: bool) -> list[str]:
        """Return which rows have another version than in the latest answer about them.

        Reads them only if another connection has written since the last time, or ``anyway``.
        """
        [[number]] = self.run("PRAGMA data_version")
        if number == self._seen and not anyway:
            return []
        self._seen = number
        known = [self._known.get(key) for key in keys]
        rows = self.get(keys, values=False)
        return [key for key, row, before in zip(keys, rows, known, strict=True) if row.version != before]

    def _remember(self, rows: Iterable[tuple[str, Row]]) -> None:
        if len(self._known) > 10_000:
            self._known.clear()
        self._known.update((key, row.version) for key, row in rows)
