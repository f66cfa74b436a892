"""Diagnose a file of locks."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

from aiolock.backends.diagnosis import failure, note, ok, warning
from aiolock.backends.sqlite.connection import MEMORY, MOST_LOG, Connection, machine, mount_of
from aiolock.backends.sqlite.errors import readers, writer
from aiolock.types import Finding

__all__ = ["examine", "examine_path"]

ROOM = 16_000_000
"""Bytes that should be free: the -wal file grows to a fourth of that before it is used again."""
SOUND = (3, 51, 3)
"""Before this version, two checkpoints at the moment of a write could damage a file (the "WAL-reset bug")."""


def examine(connection: Connection) -> list[Finding]:
    """Examine an open file."""
    problems = "; ".join(text for [text] in connection.run("PRAGMA quick_check(3)"))
    if problems == "ok":
        [[count]] = connection.run("SELECT count(*) FROM aiolock")
        found = ok("content", f"{count} rows, and SQLite finds no damage")
    else:
        advice = "end all programs that use the file, move it, its -wal and its -shm away, and begin with a new one"
        found = failure("content", f"SQLite finds damage: {problems}", advice)
    return [found, *examine_path(connection.path)]


def examine_path(path: Path) -> list[Finding]:
    """Examine the path of a file, without opening it."""
    text = f"SQLite {sqlite3.sqlite_version}"
    found = [ok("version", text)]
    if sqlite3.sqlite_version_info < SOUND:
        text += " has a rare defect by which two checkpoints at the moment of a write can damage a file"
        found = [note("version", text, "use SQLite 3.51.3 or later where you can choose")]
    kind = mount_of(path)[1]
    if kind in MEMORY:
        text = f"{kind}, which is empty when the machine starts again: kept locks, limits, latches and tokens are forgotten"
        found.append(note("file system", text, "choose a directory on a disk"))
    elif kind:
        found.append(ok("file system", kind))
    else:
        advice = "make sure that it is a local disk, which no other machine uses"
        found.append(note("file system", "its type is not known here", advice))
    if machine() is None:
        text = "no boot id of the kernel can be read here, so a dead holder is observed for a whole ttl"
        found.append(
            note("clock", text, "let this process read /proc/sys/kernel/random/boot_id as the kernel has it")
        )
    if path.exists() and (free := shutil.disk_usage(path).free) < ROOM:
        advice = "free some: locks cannot be written otherwise"
        found.append(warning("space", f"{free:,} bytes are free on its file system", advice))
    if (log := _size(f"{path}-wal")) > MOST_LOG:
        text = (
            f"{path}-wal has {log:,} bytes: it grows with each write while another transaction reads the file"
        )
        if pids := readers(path):
            text += f"; in one now: process {', '.join(map(str, pids))}"
        found.append(warning("log", text, "end transactions that read for long; locks need none"))
    if pid := writer(path):
        advice = (
            "if the next diagnosis names it again, that process is stopped in a write: continue it or end it"
        )
        found.append(note("writer", f"process {pid} is in the middle of a write", advice))
    return found


def _size(name: str) -> int:
    try:
        return Path(name).stat().st_size
    except OSError:
        return 0
