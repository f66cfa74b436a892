"""A job that cron starts on every machine, and one of them does.

    */5 * * * *  AIOLOCK_URL=redis://cache/0 python /srv/examples/cron_once.py

`at_most`: a machine that dies in the middle blocks the job for so long. `at_least`: machines whose clocks differ by less
than that do not do it one after the other. For a command instead of a function, see `aiolock run`.
"""

from __future__ import annotations

import asyncio
import os
import socket

import aiolock


async def main(name: str = "nightly report") -> str | None:
    async with aiolock.connect(os.environ.get("AIOLOCK_URL", "memory://")) as client:

        @client.once(name, at_most=240, at_least=60)
        async def report() -> str:
            await asyncio.sleep(0.01)  # the work
            return f"done by {socket.gethostname()}"

        return await report()


if __name__ == "__main__":
    print(asyncio.run(aiolock.run_until_signal(main())) or "somebody else does it, or did it a moment ago")
