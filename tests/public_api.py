"""The public names, as tests/typing/public_api.txt records them: `python -m tests.public_api` compares, `--write` records.

Public is `aiolock.__all__`, `__all__` of the modules from which the documentation imports, and the classes that it names
with their module. A name that comes or goes has to stand in CHANGELOG.md before it is recorded.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from pathlib import Path

__all__ = ["RECORD", "documented", "missing_from", "public"]

ROOT = Path(__file__).parent.parent
RECORD = Path(__file__).parent / "typing" / "public_api.txt"
CHANGELOG = ROOT / "CHANGELOG.md"

IMPORT = re.compile(r"^\s*(?:from (aiolock(?:\.\w+)*) import|import (aiolock(?:\.\w+)*))", re.MULTILINE)
NAMED = re.compile(r"\baiolock(?:\.[a-z_]+)+\.[A-Z]\w+")
"""A class that the text names with its module, such as `aiolock.backends.redis.RedisBackend`."""

ALWAYS = {"aiolock", "aiolock.errors", "aiolock.metrics"}
"""Modules from which programs import, whether the pages show it or not."""
BACKENDS = {
    "aiolock.backends.etcd.EtcdBackend",
    "aiolock.backends.memcached.MemcachedBackend",
    "aiolock.backends.memory.MemoryBackend",
    "aiolock.backends.memory.MemoryServer",
    "aiolock.backends.mongodb.MongoDBBackend",
    "aiolock.backends.mysql.MySQLBackend",
    "aiolock.backends.postgresql.PostgreSQLBackend",
    "aiolock.backends.quorum.QuorumBackend",
    "aiolock.backends.redis.RedisBackend",
    "aiolock.backends.redis.cluster.ClusterBackend",
    "aiolock.backends.sqlite.SqliteBackend",
    "aiolock.backends.zookeeper.ZooKeeperBackend",
}
"""Classes to construct a client from: `Client(RedisBackend(client=my_redis))`."""
PROVISIONAL = ROOT / "docs" / "how-to" / "write-a-backend.md"
"""The page whose imports may change until 1.0, as it says at its beginning."""


def documented() -> tuple[set[str], set[str]]:
    """Return the modules from which pages and examples import, and the classes that they name with their module."""
    modules, classes = set(ALWAYS), set(BACKENDS)
    pages = (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py"))
    for page in set(pages) - {PROVISIONAL}:
        text = page.read_text(encoding="utf-8")
        modules |= {first or second for first, second in IMPORT.findall(text)}
        classes |= set(NAMED.findall(text))
    return modules, classes


def public() -> set[str]:
    """Return the public names, each with its module."""
    modules, classes = documented()
    for name in classes:
        module, _, attribute = name.rpartition(".")
        getattr(importlib.import_module(module), attribute)
    return classes | {
        f"{module}.{name}" for module in modules for name in importlib.import_module(module).__all__
    }


def missing_from(changelog: str, names: set[str]) -> list[str]:
    """Return the names of which a changelog does not have the last part as a word."""
    return sorted(name for name in names if not re.search(rf"\b{name.rpartition('.')[2]}\b", changelog))


def main() -> int:
    """Print what came and what went since the record; 1 if there is a difference that is not recorded."""
    parser = argparse.ArgumentParser(prog="python -m tests.public_api", description=__doc__)
    parser.add_argument("--write", action="store_true", help="record the names")
    options = parser.parse_args()
    names, recorded = public(), set(RECORD.read_text().split()) if RECORD.exists() else set()
    for sign, some in (("+", names - recorded), ("-", recorded - names)):
        print("".join(f"{sign} {name}\n" for name in sorted(some)), end="")
    if names == recorded:
        return 0
    if not options.write:
        return 1
    if RECORD.exists() and (untold := missing_from(CHANGELOG.read_text(), names ^ recorded)):
        print(f"CHANGELOG.md has no line about {', '.join(untold)}")
        return 1
    RECORD.write_text("".join(f"{name}\n" for name in sorted(names)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
