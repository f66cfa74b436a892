"""Translate errors of SQLite, by their number, to errors of this library."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from aiolock.errors import BackendError, BackendRefused, BackendUnavailable

__all__ = ["FAILED", "LOCKED", "code", "late", "readers", "translate", "writer"]

LOCKED = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
FAILED = {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CANTOPEN}
"""The connection is of no more use; another one may be."""
_RIGHTS = {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM}
_WRITE_LOCK = 120
"""The byte of the -shm file that a process has locked while it writes (``WAL_WRITE_LOCK`` in SQLite's source)."""
_READ_LOCKS = range(123, 128)
"""One of these it has locked while it reads (``WAL_READ_LOCK``)."""


def code(error: BaseException | None) -> int:
    """Return the primary number of SQLite's error, 0 if it has none."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def translate(error: sqlite3.Error | OSError, path: Path) -> BackendError:
    """Return the error of this library for one of SQLite or of the system; the caller chains it."""
    number, text = code(error), f"{path}: {error}"
    if number in LOCKED:
        return BackendUnavailable(f"{text}: {_blocker(writer(path))}")
    if number == sqlite3.SQLITE_FULL:
        return BackendRefused(f"{text}: free some space on its file system", retryable=True)
    if number in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM, sqlite3.SQLITE_PROTOCOL):
        return BackendUnavailable(f"{text}: a full quota, a limit of file sizes, or a disk that fails")
    if number in _RIGHTS:
        text += f": user {os.geteuid()} must be able to write it, {path}-wal, {path}-shm and the directory {path.parent}"
    if number == sqlite3.SQLITE_NOTADB:
        text += ": another program wrote it, or it is encrypted; give locks a file of their own"
    if number == sqlite3.SQLITE_CORRUPT:
        text += ": it is damaged; end all programs that use it, move it, its -wal and its -shm away, and begin with a new one"
    return BackendRefused(text)


def late(path: Path, timeout: float) -> BackendUnavailable:
    """Return the error of a request without an answer in time: another process has the file locked, or the disk is slow."""
    text = f"{path}: no answer within {timeout:g} s"
    pid = writer(path)
    # This process has the lock while it waits for its own disk.
    return BackendUnavailable(
        f"{text}: {_blocker(pid)}" if pid not in (0, os.getpid()) else f"{text} of the disk"
    )


def _blocker(pid: int) -> str:
    which = f"process {pid}" if pid else "another process"
    return f"{which} is in the middle of a write; continue it or end it"


def writer(path: Path) -> int:
    """Return the process that is in the middle of a write; 0 if there is none or it is not known (Linux alone tells)."""
    return next((pid for kind, byte, pid in _locks(path) if (kind, byte) == ("WRITE", _WRITE_LOCK)), 0)


def readers(path: Path) -> list[int]:
    """Return the processes that are in a transaction that reads, as far as Linux tells."""
    return sorted({pid for _, byte, pid in _locks(path) if byte in _READ_LOCKS})


def _locks(path: Path) -> Iterator[tuple[str, int, int]]:
    """Yield kind, byte and process of each lock of the -shm file."""
    try:
        file = Path(f"{path}-shm").stat()
        lines = Path("/proc/locks").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    name = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    for words in map(str.split, lines):
        # 1: POSIX ADVISORY WRITE 4711 fe:00:1234 120 120
        if words[1:3] == ["POSIX", "ADVISORY"] and words[5] == name and words[6] == words[7]:
            yield words[3], int(words[6]), int(words[4])
