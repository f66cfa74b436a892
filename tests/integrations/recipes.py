"""Programs of docs/how-to/frameworks.md and of other pages as they stand there, run by the frameworks.

The page's files are written to a folder, with the address of a private Redis, beside a `shop` that records what it does.
arq has an environment of its own: it admits no newer redis-py than 5, and Celery no older one than is in the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import aiolock
from tests.faults.staging import PATIENCE, until
from tests.processes import Child
from tests.unit.test_docs import REDIS, ROOT, blocks

__all__ = ["ARQ", "PAGE", "Recipe", "files"]

PAGE = ROOT / "docs" / "how-to" / "frameworks.md"
ARQ = ROOT / ".venv-arq" / "bin" / "python"
"""The environment of arq."""

SHOP = """
import asyncio, json, os, pathlib, time

def note(**event):
    with open("events", "a") as file:
        file.write(json.dumps({"pid": os.getpid(), **event}) + "\\n")

def charge(order_id):
    note(begin=order_id)
    while not os.path.exists("go"):
        time.sleep(0.01)
    note(end=order_id)

def send_reminders():
    note(done="reminders")
"""
"""The application's own code: an order is being charged until there is a file named `go`."""


def asynchronous(shop: str) -> str:
    """Return the same module with coroutine functions."""
    shop = re.sub(r"def (charge|send_reminders)", r"async def \1", shop).replace(
        "time.sleep", "await asyncio.sleep"
    )
    return shop + '\nasync def migrate():\n    note(done="migration")\n'


def files(page: Path = PAGE) -> dict[str, str]:
    """The files of the page, by the names in their first lines."""
    found = {}
    for _, text in blocks(page):
        first, _, rest = text.partition("\n")
        if re.fullmatch(r"# [\w/.]+\.py", first):
            found[first.removeprefix("# ")] = rest
    return found


class Recipe:
    """A folder with programs of the page, the processes that run them, and what these did."""

    def __init__(
        self,
        folder: Path,
        url: str,
        names: Sequence[str],
        *,
        sync: bool,
        changes: dict[str, str],
        page: Path = PAGE,
    ) -> None:
        self.folder = folder
        self.url = url
        self.python = Path(sys.executable)
        self._children: list[Child] = []
        self._sending: asyncio.Future[None] | None = None
        (folder / "shop.py").write_text(SHOP if sync else asynchronous(SHOP))
        program = "".join(files(page)[name] for name in names)
        for old in changes:
            assert old in program, f"the page has no {old} any more"
        for name in names:
            # On a busy machine a test may take longer than the pause that the page asks for.
            text = files(page)[name].replace(REDIS, url).replace("at_least=50", "at_least=280")
            for old, new in changes.items():
                text = text.replace(old, new)
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        (self.folder / "go").touch()
        try:
            for child in self._children:
                child.stop()
        finally:
            for child in self._children:
                # Workers that outlived the process that started them.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
        if error[1] is not None:
            print(self.log(), file=sys.stderr)

    def start(self, *command: str) -> Child:
        """Run ``python -m command`` in the folder."""
        assert self.python.exists(), f"{self.python} is missing: run `make .venv-arq/arq.stamp`"
        log = self.folder / f"log-{len(self._children)}"
        child = Child(
            [
                "env",
                f"PYTHONPATH={self.folder}",
                f"HOME={self.folder}",
                "PYTHONUNBUFFERED=1",
                str(self.python),
                "-m",
                *command,
            ],
            log,
        )
        child.start()
        self._children.append(child)
        return child

    async def run(self, *command: str) -> None:
        """Run a command to its end."""
        process = await asyncio.create_subprocess_exec(
            str(self.python),
            *command,
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(self.folder)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(PATIENCE):
                output, _ = await process.communicate()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise
        assert process.returncode == 0, output.decode()

    def send(self, program: str) -> None:
        """Run a program that sends tasks, beside the test, unless the one before still runs."""
        if self._sending is None or self._sending.done():
            self._sending = asyncio.ensure_future(self.run("-c", program))

    async def sent(self) -> None:
        """Wait for the program that sends tasks."""
        assert self._sending is not None
        await self._sending

    def log(self) -> str:
        """What the processes have printed."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("log-*")))

    def events(self, key: str) -> list[dict[str, Any]]:
        """What the shop did, in order."""
        path = self.folder / "events"
        found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [each for each in found if key in each]

    def healthy(self) -> None:
        """Fail with the log if a process has ended."""
        assert all(child.running for child in self._children), self.log()

    async def ready(self, count: int, text: str) -> None:
        """Wait until the processes have printed ``text`` so many times."""

        def printed() -> bool:
            self.healthy()
            return self.log().count(text) >= count

        await until(printed, f"{count} times {text!r}:\n{self.log()}")

    async def the_lock_passes_on(self, ask: Callable[[int], Any]) -> None:
        """Ask for an order from several sides, kill the process that charges it, and see another one do it.

        ``ask(1)`` starts one more attempt, and does not wait for it.
        """
        async with aiolock.connect(self.url) as client:
            lock = client.lock("order:1")

            async def waited_for() -> bool:
                """Is there a waiter at the server, and so in another process?"""
                ask(1)
                for _ in range(100):
                    self.healthy()
                    if (await lock.inspect()).waiters:
                        return True
                    await asyncio.sleep(0.01)
                return False

            await until(waited_for, "two processes want the lock")
            # On a machine that is too busy to renew a lease, the first holder may have lost it already.
            first = (await lock.inspect()).holders[0].pid
            assert first is not None
            before = len(self.events("begin"))
            os.kill(first, signal.SIGKILL)

            async def another() -> bool:
                if len(self.events("begin")) == before:
                    await asyncio.sleep(0.2)
                    if not (await lock.inspect()).waiters:
                        ask(1)
                return len(self.events("begin")) > before

            await until(another, "another process has the lock")
            second = self.events("begin")[before]
            assert second["pid"] != first
            assert not self.events("end")
            (self.folder / "go").touch()
            await until(lambda: self.events("end"), "the order is charged")
            assert first not in {event["pid"] for event in self.events("end")}
