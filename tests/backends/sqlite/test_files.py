"""What may be wrong with a file, or happen to it: each has its error, in time, and nothing is damaged."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sqlite3
from pathlib import Path

import pytest

import aiolock
from aiolock.backends.rows.store import Edit
from aiolock.backends.sqlite import connection
from aiolock.backends.sqlite import store as store_module
from aiolock.clock import system_clock
from aiolock.errors import BackendRefused, BackendUnavailable, UnsafeBackend
from aiolock.types import Level
from tests.backends.sqlite.conftest import Opened, until

ROOT = os.geteuid() == 0


def beside(directory: Path) -> list[str]:
    """The names of what is in a directory."""
    return sorted(each.name for each in directory.iterdir())


def inodes(path: Path) -> list[int]:
    return [Path(f"{path}{suffix}").stat().st_ino for suffix in ("", "-shm", "-wal")]


async def run(*words: str) -> int:
    """Run a program and return its status."""
    process = await asyncio.create_subprocess_exec(*words)
    return await process.wait()


# --- files that are no file of locks


@pytest.mark.parametrize(
    "content",
    [b"just a text that is long enough to be a header of a database, and more\n" * 40, b"short text\n"],
)
async def test_a_file_of_another_kind_is_refused_and_left_alone(make, path, content):
    path.write_bytes(content)
    with pytest.raises(BackendRefused, match=r"not a database.*another program wrote it, or it is encrypted"):
        await make()
    assert path.read_bytes() == content
    assert beside(path.parent) == [path.name]


@pytest.mark.parametrize("what", ["TABLE bookmarks (name TEXT)", "VIEW bookmarks AS SELECT 1"])
async def test_a_database_of_another_program_is_refused_and_left_alone(make, path, what):
    other = sqlite3.connect(path)
    other.execute(f"CREATE {what}")
    other.commit()
    other.close()
    content = path.read_bytes()
    with pytest.raises(BackendRefused, match=r"another program.*bookmarks.*a file of their own"):
        await make()
    assert path.read_bytes() == content
    assert beside(path.parent) == [path.name]


@pytest.mark.parametrize("pragma", ["application_id", "user_version"])
async def test_an_empty_database_with_the_mark_of_another_program_is_refused(make, path, pragma):
    other = sqlite3.connect(path)
    other.execute(f"PRAGMA {pragma} = 77")
    other.close()
    with pytest.raises(BackendRefused, match="another program"):
        await make()


async def test_an_empty_file_becomes_a_file_of_locks_and_keeps_its_permissions(make, path):
    path.touch(mode=0o660)
    path.chmod(0o660)
    store = await make()
    assert await store.insert("test:a")
    assert {name: (path.parent / name).stat().st_mode & 0o777 for name in beside(path.parent)} == {
        "locks.db": 0o660,
        "locks.db-shm": 0o660,
        "locks.db-wal": 0o660,
    }


async def test_another_format_is_refused_with_both_versions_named(make, path):
    store = await make()
    await store.insert("test:a")
    await store.aclose()
    other = sqlite3.connect(path)
    other.execute("PRAGMA user_version = 7")
    other.close()
    with pytest.raises(UnsafeBackend, match=r"format 7,.*format 1"):
        await make()
    with sqlite3.connect(path) as other:
        assert other.execute("SELECT key FROM aiolock").fetchall() == [("test:a",)]
    other.close()


@pytest.mark.parametrize(
    "table",
    [
        "TABLE aiolock (key TEXT, version TEXT NOT NULL, value BLOB NOT NULL, expires REAL)",
        "TABLE aiolock (key TEXT NOT NULL PRIMARY KEY, version TEXT NOT NULL)",
        "VIEW aiolock AS SELECT '' AS key, '' AS version, x'' AS value, 1.5 AS expires",
        "TABLE other (key TEXT)",
    ],
)
async def test_a_marked_file_with_another_table_is_refused(make, path, table):
    await (await make()).aclose()
    with sqlite3.connect(path) as other:
        other.execute("DROP TABLE aiolock")
        other.execute(f"CREATE {table}")
    other.close()
    with pytest.raises(UnsafeBackend, match="table of format 1"):
        await make()
    with sqlite3.connect(path) as other:
        [[name]] = other.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
    other.close()
    assert name == table.split()[1]


async def test_tables_of_others_in_the_file_disturb_nothing(make, path):
    await (await make()).aclose()
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE orders (key TEXT PRIMARY KEY)")
    other.close()
    assert await (await make()).insert("test:a")


async def test_a_damaged_file_is_named_by_calls_and_by_doctor(make, path):
    store = await make()
    await store.compare_and_set([Edit(f"test:{number}", "", "v", bytes(3_000)) for number in range(200)])
    await store.aclose()
    content = bytearray(path.read_bytes())
    content[4096 : 4096 * 60] = b"\xee" * (4096 * 59)
    path.write_bytes(content)
    store = await make()
    with pytest.raises(BackendRefused, match="damaged; end all programs"):
        await store.get([f"test:{number}" for number in range(200)])
    [finding] = [finding for finding in await store.diagnose() if finding.subject == "content"]
    assert finding.level is Level.ERROR


@pytest.mark.parametrize("kind", ["directory", "pipe"])
async def test_what_is_no_file_is_refused_at_once(make, path, kind):
    path.mkdir() if kind == "directory" else os.mkfifo(path)
    with pytest.raises(BackendRefused, match="directory, pipe, socket or device"):
        await make()


async def test_a_missing_directory_is_named(make, tmp_path):
    with pytest.raises(BackendRefused, match=f"there is no directory {tmp_path}/no/where; create it"):
        await make(tmp_path / "no" / "where" / "locks.db")
    assert beside(tmp_path) == []


async def test_a_file_with_two_names_is_refused(make, path):
    store = await make()
    await store.aclose()
    path.with_name("other.db").hardlink_to(path)
    with pytest.raises(BackendRefused, match="several names"):
        await make()


async def test_symbolic_links_lead_to_one_file(make, path, tmp_path):
    (tmp_path / "real").mkdir()
    path.symlink_to(tmp_path / "real" / "locks.db")
    through, direct = await make(), await make(tmp_path / "real" / "locks.db")
    await through.insert("test:a", b"one")
    assert await direct.read("test:a") == (b"one", "v1")
    assert beside(tmp_path / "real") == ["locks.db", "locks.db-shm", "locks.db-wal"]


async def test_a_loop_of_symbolic_links_is_refused(make, path, tmp_path):
    path.symlink_to(tmp_path / "back")
    (tmp_path / "back").symlink_to(path)
    with pytest.raises(BackendRefused, match="symbolic link"):
        await make()
    with pytest.raises(BackendRefused, match="there is no directory"):
        await make(path / "locks.db")


# --- file systems


def mounted(monkeypatch, tmp_path: Path, *mounts: tuple[str, str]) -> None:
    lines = ["27 1 254:0 / / rw,relatime - ext4 /dev/vda rw"]
    lines += [f"36 27 0:99 / {point} rw master:1 - {kind} host:/export rw" for point, kind in mounts]
    file = tmp_path / "mountinfo"
    file.write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(connection, "_MOUNTS", file)


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "9p", "virtiofs", "fuse.sshfs", "glusterfs"])
async def test_file_systems_of_several_machines_are_refused(make, tmp_path, monkeypatch, kind):
    place = tmp_path / "on the net"
    place.mkdir()
    mounted(monkeypatch, tmp_path, (str(place).replace(" ", "\\040"), kind))
    with pytest.raises(BackendRefused, match=rf"file system \({kind}\) may be shared by several machines"):
        await make(place / "locks.db")
    assert beside(place) == []
    await make(tmp_path / "locks.db")


@pytest.mark.parametrize("kind", ["tmpfs", "ramfs"])
async def test_a_file_in_memory_does_not_survive_a_restart_of_the_machine(make, tmp_path, monkeypatch, kind):
    place = tmp_path / "run"
    place.mkdir()
    mounted(monkeypatch, tmp_path, (str(place), kind), (str(tmp_path), "ext4"))
    store = await make(place / "locks.db")
    assert "survives-restart" not in store.capabilities
    [finding] = [finding for finding in await store.diagnose() if finding.subject == "file system"]
    assert finding.level is Level.NOTE
    assert kind in finding.text
    assert "survives-restart" in (await make()).capabilities


async def test_the_latest_mount_at_a_place_counts(make, tmp_path, monkeypatch):
    mounted(monkeypatch, tmp_path, (str(tmp_path), "nfs"), (str(tmp_path), "tmpfs"))
    await make()


async def test_a_file_that_is_mounted_alone_is_refused(make, path, tmp_path, monkeypatch):
    mounted(monkeypatch, tmp_path, (str(path), "ext4"))
    with pytest.raises(BackendRefused, match="mount its directory"):
        await make()


async def test_a_boot_id_that_is_mounted_over_proves_nothing(make, tmp_path, monkeypatch):
    mounted(monkeypatch, tmp_path, ("/proc/sys/kernel/random/boot_id", "tmpfs"))
    store = await make()
    [row] = await store.get(["test:a"])
    assert row.clock is None
    assert "clock" in {finding.subject for finding in await store.diagnose()}


ZONE = """
import asyncio, sys
from pathlib import Path
from tests.backends.sqlite.conftest import Opened
async def main():
    store = await Opened(Path(sys.argv[1])).begin()
    [row] = await store.get(["test:a"])
    print(row.clock.boot, row.clock.zone)
    await store.aclose()
asyncio.run(main())
"""


@pytest.mark.skipif(
    not ROOT or not Path("/proc/self/ns/time").is_symlink(), reason="needs root, and time namespaces"
)
async def test_another_time_namespace_shows_in_the_clock(make, path, child):
    store = await make()
    [here] = await store.get(["test:a"])
    program = ["unshare", "--time", "--boottime", "100000", "--fork", "true"]
    if await run(*program):
        pytest.skip("time namespaces cannot be made here")
    there = child(
        f"import os; os.execvp('unshare', {['unshare', *program[1:-1]]!r} + {[os.sys.executable, '-c', ZONE, str(path)]!r})"
    )
    boot, zone = (await there.end()).split()
    assert boot == here.clock.boot
    assert zone != here.clock.zone


# --- rights

OPEN = """
import asyncio, os, sys
from pathlib import Path
from aiolock.errors import BackendError
from tests.backends.sqlite.conftest import Opened
if len(sys.argv) > 3 and os.geteuid() == 0:
    # Other users may not start this interpreter.
    os.setgroups([4321])
    os.setgid(int(sys.argv[3]))
    os.setuid(int(sys.argv[3]))
async def main():
    store = Opened(Path(sys.argv[1]))
    try:
        await store.begin()
        print("inserted", await store.insert("test:" + sys.argv[2]))
    except BackendError as error:
        print(type(error).__name__, error)
    await store.aclose()
asyncio.run(main())
"""


@pytest.fixture
def open_path():
    """A directory that every user can reach, as those of pytest are not."""
    place = Path("/tmp") / f"aiolock-test-{os.getpid()}"
    place.mkdir(mode=0o755)
    place.chmod(0o755)
    yield place / "locks.db"
    place.chmod(0o755)
    shutil.rmtree(place)


@pytest.mark.skipif(not ROOT, reason="needs root to be two users")
async def test_another_user_is_told_what_it_may_not_write(make, open_path, child):
    store = await make(open_path)
    await store.insert("test:a")
    output = await child(OPEN, open_path, "b", 12345).end()
    assert output.startswith("BackendRefused"), output
    assert f"user 12345 must be able to write it, {open_path}-wal" in output


@pytest.mark.skipif(not ROOT, reason="needs root to be two users")
async def test_two_users_share_a_file_and_directory_of_their_group(make, open_path, child):
    os.chown(open_path.parent, 0, 4321)
    open_path.parent.chmod(0o2770)
    open_path.touch()
    os.chown(open_path, 0, 4321)
    open_path.chmod(0o660)
    for user in (12345, 12346):
        assert await child(OPEN, open_path, user, user).end() == "inserted True\n"
    store = await make(open_path)
    assert await store.insert("test:root")
    assert await child(OPEN, open_path, "again", 12345).end() == "inserted True\n"
    assert {key async for key, _ in store.scan("")} == {"test:12345", "test:12346", "test:root", "test:again"}


async def test_a_read_only_directory_is_named(open_path, child):
    open_path.touch(mode=0o666)
    open_path.chmod(0o666)
    open_path.parent.chmod(0o555)
    output = await child(OPEN, open_path, "a", 12345).end()
    assert output.startswith("BackendRefused"), output
    assert f"and the directory {open_path.parent}" in output


async def test_a_read_only_file_is_named(open_path, child):
    open_path.parent.chmod(0o777)
    sqlite3.connect(open_path).close()
    open_path.touch(mode=0o444)
    open_path.chmod(0o444)
    output = await child(OPEN, open_path, "a", 12345).end()
    assert output.startswith("BackendRefused"), output
    assert "must be able to write it" in output


# --- space


@pytest.mark.skipif(not ROOT, reason="needs root to mount a small file system")
async def test_a_full_disk_refuses_new_rows_keeps_the_old_and_goes_on_when_there_is_space(make, tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    if await run("mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(place)):
        pytest.skip("nothing can be mounted here")
    try:
        store = await make(place / "locks.db")
        await store.insert("test:first", b"kept")
        ballast = place / "ballast"
        with ballast.open("wb") as file, pytest.raises(OSError):
            file.write(bytes(1_000_000))
        with pytest.raises(BackendRefused, match="full: free some space") as refusal:
            for number in range(100):
                await store.insert(f"test:{number}", bytes(4_000))
        assert refusal.value.retryable
        assert await store.read("test:first") == (b"kept", "v1")
        assert "space" in {finding.subject for finding in await store.diagnose()}
        ballast.unlink()
        assert await store.insert("test:later", bytes(4_000))
        assert await store.update("test:first", "v1", "v2", b"changed")
        await store.aclose()
    finally:
        assert await run("umount", "-l", str(place)) == 0


LIMITED = """
import asyncio, resource, sys
from pathlib import Path
from aiolock.errors import BackendError
from tests.backends.sqlite.conftest import Opened
async def main():
    store = await Opened(Path(sys.argv[1])).begin()
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
    for number in range(100):
        try:
            await store.insert(f"test:{number}", bytes(4_000))
        except BackendError as error:
            print(type(error).__name__, error)
            break
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(await store.insert("test:later", bytes(4_000)))
    await store.aclose()
asyncio.run(main())
"""


async def test_a_limit_of_file_sizes_is_an_error_and_no_end(path, child, make):
    first, second = (await child(LIMITED, path).end()).splitlines()
    assert first.startswith("BackendUnavailable"), first
    assert "a limit of file sizes" in first
    assert second == "True"
    store = await make()
    assert (await store.read("test:later"))[1] == "v1"


# --- other processes in the way

HOLD = """
import sqlite3, sys, time
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("BEGIN IMMEDIATE")
print("holding", flush=True)
sys.stdin.readline()
db.execute("COMMIT")
print("done", flush=True)
"""


async def test_a_process_that_is_stopped_inside_a_write_is_named_in_time(make, path, child):
    store = await make(timeout=1.0)
    await store.insert("test:a")
    holder = child(HOLD, path)
    assert await holder.line() == "holding"
    os.kill(holder.pid, signal.SIGSTOP)
    start = system_clock()
    with pytest.raises(BackendUnavailable, match=f"process {holder.pid} is in the middle of a write"):
        await store.update("test:a", "v1", "v2")
    assert system_clock() - start < 1 + 10
    # Reads go on.
    assert await store.read("test:a") == (b"", "v1")
    assert str(holder.pid) in str(
        [finding for finding in await store.diagnose() if finding.subject == "writer"]
    )
    os.kill(holder.pid, signal.SIGCONT)
    holder.process.stdin.write("\n")
    holder.process.stdin.flush()
    assert await holder.line() == "done"
    assert await store.update("test:a", "v1", "v3")


READ = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("BEGIN")
print(db.execute("SELECT count(*) FROM aiolock").fetchone(), flush=True)
sys.stdin.readline()
"""


async def test_a_log_that_grew_beside_a_long_reader_is_named_by_doctor_and_shrinks_afterwards(
    make, path, child
):
    async def log() -> list[str]:
        return [finding.text for finding in await store.diagnose() if finding.subject == "log"]

    store = await make()
    await store.insert("test:a", version="v0")
    reader = child(READ, path)
    assert (await reader.line()).startswith("(")
    assert await log() == []
    wal = path.with_name("locks.db-wal")
    number = 0
    while wal.stat().st_size <= connection.MOST_LOG:
        assert await store.update("test:a", f"v{number}", f"v{number + 1}", bytes(60_000), flush=False)
        number += 1
    [text] = await log()
    assert str(reader.pid) in text
    reader.kill()
    for _ in range(2):
        assert await store.update("test:a", f"v{number}", f"v{number + 1}", bytes(60_000), flush=False)
        number += 1
    assert wal.stat().st_size <= connection.MOST_LOG
    assert await log() == []
    assert await store.read("test:a") == (bytes(60_000), f"v{number}")


async def test_it_is_named_also_when_the_thread_answers_too_late(make, path, child, monkeypatch):
    """On a busy machine the thread may not run when its request should give up."""
    store = await make(timeout=0.5)
    await store.insert("test:a")
    holder = child(HOLD, path)
    assert await holder.line() == "holding"
    os.kill(holder.pid, signal.SIGSTOP)
    monkeypatch.setattr(store_module, "RETRY", (3.0, 3.0))
    with pytest.raises(
        BackendUnavailable, match=rf"within 0\.5 s: process {holder.pid} is in the middle of a write"
    ):
        await store.update("test:a", "v1", "v2")


async def test_a_process_that_is_killed_inside_a_write_keeps_nobody_out(make, path, child):
    store = await make()
    await store.insert("test:a")
    holder = child(HOLD, path)
    assert await holder.line() == "holding"
    write = asyncio.create_task(store.update("test:a", "v1", "v2"))
    await asyncio.sleep(0)
    await until(store._worker.jobs.empty)
    assert not write.done()
    holder.kill()
    assert await write


# --- the file is replaced or deleted


def remove(path: Path) -> None:
    for each in path.parent.glob(f"{path.name}*"):
        each.unlink()


def move(path: Path) -> None:
    for each in path.parent.glob(f"{path.name}*"):
        each.rename(each.with_name("old" + each.name))


def replace(path: Path) -> None:
    other = path.with_name("other.db")
    sqlite3.connect(other).close()
    other.touch()
    other.replace(path)


def remove_beside(path: Path) -> None:
    path.with_name(f"{path.name}-wal").unlink()
    path.with_name(f"{path.name}-shm").unlink()


def move_directory(path: Path) -> None:
    path.parent.rename(path.parent.with_name("elsewhere"))
    path.parent.mkdir()


@pytest.mark.parametrize("change", [remove, move, replace, move_directory, remove_beside])
@pytest.mark.parametrize("call", ["read", "write"])
async def test_no_call_succeeds_on_a_file_that_was_replaced(make, tmp_path, change, call):
    place = tmp_path / "place"
    place.mkdir()
    path = place / "locks.db"
    store = await make(path)
    await store.insert("test:a", b"old", "v1")
    change(path)
    with pytest.raises(BackendUnavailable, match="was replaced or deleted"):
        await (store.read("test:a") if call == "read" else store.update("test:a", "v1", "v2"))
    assert store.interruptions == 1
    if change is not remove_beside:
        # The next call is about what everybody finds there now.
        assert await store.read("test:a") == (b"", "")
        assert await store.insert("test:a", b"new", "v3")
        fresh = await make(path)
        assert await fresh.read("test:a") == (b"new", "v3")
        assert store.interruptions == 1


@pytest.mark.parametrize("of", ["directory", "file"])
@pytest.mark.parametrize("there", [True, False])
async def test_a_symbolic_link_that_is_turned_leads_every_client_to_the_same_file(make, tmp_path, of, there):
    for name in ("r1", "r2"):
        (tmp_path / name).mkdir()
    end = "" if of == "directory" else "locks.db"
    (tmp_path / "current").symlink_to(Path("r1", end))
    path = tmp_path / "current" / ("locks.db" if of == "directory" else "")
    store = await make(path)
    await store.insert("test:a", b"old")
    if there:
        await (await make(tmp_path / "r2" / "locks.db")).insert("test:a", b"new")
    # As a deployment does it.
    (tmp_path / "next").symlink_to(Path("r2", end))
    (tmp_path / "next").replace(tmp_path / "current")
    with pytest.raises(BackendUnavailable, match="was replaced or deleted"):
        await store.update("test:a", "v1", "v2")
    assert store.interruptions == 1
    assert await store.read("test:a") == ((b"new", "v1") if there else (b"", ""))
    assert await store.insert("test:b", b"both")
    assert await (await make(path)).read("test:b") == (b"both", "v1")
    assert store.interruptions == 1


async def test_a_write_that_waits_while_the_file_is_replaced_is_not_made_in_the_next(make, path):
    store = await make()
    await store.insert("test:a")
    remove(path)
    # All of them are handed to the thread before the first is answered.
    calls = [
        asyncio.create_task(store.read("test:a")),
        *(asyncio.create_task(store.insert(f"test:{n}")) for n in range(3)),
    ]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, BackendUnavailable) for result in results), results
    assert store.interruptions == 1
    assert [key async for key, _ in store.scan("")] == []


@pytest.mark.parametrize("there", [True, False])
async def test_a_file_that_is_replaced_while_it_is_opened_is_not_used(make, path, monkeypatch, there):
    if there:
        await (await make()).aclose()
    prepare, others = connection.Connection._prepare, []

    def slow(opened: connection.Connection) -> None:
        prepare(opened)
        monkeypatch.undo()
        # Meanwhile it goes away, and another client makes a new one.
        remove(path)
        others.append(other := sqlite3.connect(path, check_same_thread=False))
        other.execute("PRAGMA journal_mode = WAL")
        other.execute("SELECT * FROM sqlite_master")

    monkeypatch.setattr(connection.Connection, "_prepare", slow)
    with pytest.raises(BackendUnavailable, match="was replaced or deleted"):
        await make()
    store = await make()
    assert await store.insert("test:a")
    [other] = others
    assert other.execute("SELECT key FROM aiolock").fetchall() == [("test:a",)]
    other.close()


async def test_a_waiter_learns_of_the_new_file_when_it_looks(make, path):
    store = await make()
    await store.insert("test:a")
    store.watch(frozenset({"test:a"}))
    remove(path)
    await until(lambda: store.interruptions)


async def test_a_file_that_another_process_makes_at_the_same_moment_is_no_other_program_s(
    make, path, monkeypatch
):
    run, made = connection.Connection.run, []

    def beside(self, statement, values=()):
        answer = run(self, statement, values)
        if not made:
            made.append(True)
            connection.Connection(path, str(path), lambda: True).close()
        return answer

    monkeypatch.setattr(connection.Connection, "run", beside)
    store = await make()
    await store.insert("test:a")
    assert made


# --- forks and neighbours


async def test_a_forked_child_that_ends_does_not_disturb_its_parent(make, path, child):
    store = await make()
    await store.insert("test:a", b"one")
    before = inodes(path)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            import gc  # noqa: PLC0415 - in the child

            del store
            gc.collect()
            code = 0
        finally:
            os._exit(code)
    assert (await asyncio.to_thread(os.waitpid, pid, 0))[1] == 0
    # A process that is the last one to close a file removes what lies beside it.
    assert await child(OPEN, path, "b").end() == "inserted True\n"
    assert inodes(path) == before
    assert await store.update("test:a", "v1", "v2", b"two")
    assert store.interruptions == 0


FORK = """
import asyncio, os, sys
from pathlib import Path
from tests.backends.sqlite.conftest import Opened
async def main():
    store = await Opened(Path(sys.argv[1])).begin()
    await store.insert("test:a")
    return store
def count():
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        try:
            found += "locks.db" in str(each.readlink())
        except FileNotFoundError:
            pass  # that of the loop itself
    return found
loop = asyncio.new_event_loop()
store = loop.run_until_complete(main())
before = count()
if os.fork() == 0:
    import gc
    del store
    gc.collect()
    # To the end of the interpreter, as programs end that know nothing of locks.
    sys.exit(0 if count() == before >= 3 else 1)
print(os.waitstatus_to_exitcode(os.wait()[1]))
loop.run_until_complete(store.aclose())
loop.close()
"""


async def test_a_forked_child_never_closes_the_connection(path, child):
    assert await child(FORK, path).end() == "0\n"


FORKED = """
import asyncio, os, sys, aiolock
async def connect():
    client = aiolock.connect(sys.argv[1], ttl=60)
    await client.open()
    return client
async def in_the_child():
    try:
        async with aiolock.connect(sys.argv[1], ttl=60) as client, client.lock("x", timeout=0):
            return 1
    except aiolock.BackendRefused as error:
        return 0 if "forked" in str(error) and not error.retryable else 2
    except aiolock.AcquireTimeout:
        return 3
async def entered():
    async with aiolock.connect(sys.argv[1], ttl=60) as client, client.lock("y", timeout=0):
        pass
loop = asyncio.new_event_loop()
closed = loop.run_until_complete(connect())
loop.run_until_complete(closed.aclose())
# A file that is closed at the fork is the child's as any other process's.
if os.fork() == 0:
    asyncio.run(entered())
    os._exit(0)
assert os.wait()[1] == 0
client = loop.run_until_complete(connect())
go, gone = os.pipe()
if os.fork() == 0:
    os.read(go, 1)
    os._exit(asyncio.run(in_the_child()))
# The last to close a file removes what lies beside it; the next one makes it anew.
loop.run_until_complete(client.aclose())
print("closed", flush=True)
sys.stdin.readline()
os.write(gone, b"!")
print(os.waitstatus_to_exitcode(os.wait()[1]))
loop.close()
"""


async def test_a_forked_child_is_refused_while_it_has_what_its_parent_had_open(path, child):
    """SQLite lets it in beside another process: the shared memory that it has inherited is not that of the file any more."""
    forking = child(FORKED, f"sqlite://{path}")
    assert await forking.line() == "closed"
    async with aiolock.connect(f"sqlite://{path}", ttl=60) as client, client.lock("x", timeout=0):
        assert await forking.end() == "0\n"


async def test_a_client_that_closes_does_not_disturb_its_neighbour_in_the_process(make, path, child):
    store, other = await make(), await make()
    await store.insert("test:a")
    await other.aclose()
    assert await child(OPEN, path, "b").end() == "inserted True\n"
    assert await store.update("test:a", "v1", "v2")
    assert store.interruptions == 0


async def test_nothing_is_left_open(path):
    def open_files() -> int:
        return sum(
            str(path) in str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.exists()
        )

    for _ in range(3):
        store = await Opened(path).begin()
        await store.insert("test:a")
        assert open_files() >= 2
        await store.aclose()
        assert open_files() == 0
    assert beside(path.parent) == [path.name]
