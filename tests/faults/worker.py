"""One process of a history run: attempts of every sort, on the fenced store; stopped, killed and cut off by injector.py.

Started by run.py with one argument, its settings as JSON, and the path of the store as `store`.
"""

from __future__ import annotations

import asyncio
import json
import sys

from aiolock.testing.worker import Worker, WorkerSettings, draw, serve
from tests.faults.fenced_store import StoreClient


def main() -> None:
    settings = json.loads(sys.argv[1])
    store = settings.pop("store")
    asyncio.run(serve(Worker(WorkerSettings(**settings), draw, lambda: StoreClient(store))).run())


if __name__ == "__main__":
    main()
