"""kazoo as a contender: `hold`, `read`, `write` until a line comes in, or `loop` through a section that nobody else may be in."""

from __future__ import annotations

import os
import sys
import time

from kazoo.client import KazooClient
from kazoo.recipe.lock import Lock, ReadLock, WriteLock


def main(what: str, hosts: str, path: str, *rest: str) -> None:
    patterns = [] if "default" in rest else ["-lock-"]
    client = KazooClient(hosts, timeout=4)
    client.start()
    if what == "read":
        lock = ReadLock(client, path, "kazoo", extra_lock_patterns=["__WRIT__"])
    elif what == "write":
        lock = WriteLock(client, path, "kazoo", extra_lock_patterns=["__WRIT__", "__READ__"])
    else:
        lock = Lock(client, path, "kazoo", extra_lock_patterns=patterns)
    print("ready", flush=True)
    if what != "loop":
        lock.acquire()
        print("held", flush=True)
        sys.stdin.readline()
        lock.release()
        print("released", flush=True)
    else:
        section, turns = rest[0], int(rest[1])
        for _ in range(turns):
            lock.acquire()
            try:
                os.close(os.open(section, os.O_CREAT | os.O_EXCL))
                time.sleep(0.002)
                os.unlink(section)  # noqa: PTH108 - as it was made
            except FileExistsError:
                print("together", flush=True)
            finally:
                lock.release()
        print("done", flush=True)
    client.stop()
    client.close()


main(*sys.argv[1:])
