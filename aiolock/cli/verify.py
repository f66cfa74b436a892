"""Command `verify`: contend for locks on a deployment while its user breaks it, and judge what the holders believed."""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from signal import Signals

import aiolock
from aiolock.cli import settings
from aiolock.cli.doctor import in_words
from aiolock.cli.exit_status import UNAVAILABLE, Ended
from aiolock.cli.output import Output, clean, seconds
from aiolock.core.capabilities import Administration
from aiolock.errors import ConfigError, LockError
from aiolock.testing.history import History, Recorder, load
from aiolock.testing.verification import SURVIVAL, Report, assess
from aiolock.testing.worker import WorkerSettings

__all__ = ["BROKEN", "verify"]

BROKEN = 1
"""The exit status if two holders were inside at once, or tokens were equal or fell."""

TTL = 3.0
NAMES = ["a", "b", "c", "long"]
"""The last lock is held for long, and renewed; the others change their holders all the time."""
TASKS = 4
"""Of each process; the first one takes the last lock."""
START = 30.0
"""Seconds within which all processes have to start on a busy machine."""
END = 2 * TTL + 15
"""Seconds after the end within which processes have to be gone: the last attempts, and closing the client."""
EMPTYING = 30.0
"""Seconds for which the end waits for a server that is still away."""
SHOWN = 10
"""Violations of each kind that people are shown."""


async def verify(options: argparse.Namespace, output: Output) -> int:
    """Verify a deployment, and print the report. Cancelling it ends the workers and empties the namespace."""
    if settings.url(options).lower().startswith("memory://"):
        raise ConfigError(
            "memory:// is a server inside each process, so there is no deployment to verify: name one with --url"
        )
    namespace = f"{settings.namespace(options)}:verify:{secrets.token_hex(4)}"
    client = settings.connect(options, namespace=namespace, ttl=TTL)
    if client._backend.dialect:  # noqa: SLF001 - not for programs
        raise ConfigError(
            "verify contends for locks of a namespace of its own, and in the format of other libraries there is none: leave dialect= out "
            "of the address; the server is the same"
        )
    async with client:
        capabilities, server = client.capabilities, client._backend.name  # noqa: SLF001 - not for programs
    folder = Path(tempfile.mkdtemp(prefix="aiolock-verify-"))
    keep = False
    try:
        workers = await _contend(options, output, namespace, folder)
        history = _history(folder)
        if not history.holds:
            raise Ended(
                UNAVAILABLE, f"no lock was granted, so nothing is proved: {'; '.join(workers) or 'no error'}"
            )
        report = assess(history, capabilities, TTL)
        keep = not report.kept
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
        await _empty(options, output, namespace)
    exception = _listed(report, capabilities, server)
    if output.json:
        output.document(
            {
                "server": settings.server(options),
                "version": aiolock.__version__,
                "namespace": namespace,
                "began": _began(history).isoformat(),
                "processes": options.processes,
                "promises": sorted(capabilities),
                "listed": exception,
                "histories": str(folder) if keep else None,
                "ended": workers,
                **report.as_json(),
            }
        )
    else:
        _say(options, output, _began(history), report, exception, workers)
        if keep:
            output.line(f"The histories are kept in {folder}")
    return 0 if report.kept else BROKEN


def _history(folder: Path) -> History:
    return load(folder.glob("*.jsonl"))


def _began(history: History) -> datetime:
    """Return the time of day of the first event, by which the report counts its seconds."""
    ago = (time.monotonic_ns() - history.start) / 1e9
    return (datetime.now(UTC) - timedelta(seconds=ago)).astimezone()


# --- workers


class _WorkerProcess:
    """A process that contends."""

    def __init__(self, name: str, folder: Path, recorder: Recorder) -> None:
        self.name = name
        self.history = folder / f"{name}.jsonl"
        self.trouble = ""
        """A sentence about an end that was not in good order."""
        self._log = folder / f"{name}.log"
        self._recorder = recorder

    @property
    def ready(self) -> bool:
        """True once its client is open, or it has ended."""
        return bool(self.trouble) or (self.history.exists() and b'"open"' in self.history.read_bytes())

    async def run(self, given: WorkerSettings, over: asyncio.Event) -> None:
        """Run the process until it ends, which it should not do before the event is set. Cancelling it kills the process."""
        with self._log.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "aiolock.testing.worker"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=errors,
                # Ctrl-C in a terminal is for the command alone.
                start_new_session=True,
            )
        ending, waiting = asyncio.ensure_future(process.wait()), asyncio.ensure_future(over.wait())
        try:
            if process.stdin is None:
                raise AssertionError("the process was started with a pipe")
            # The address may have a password, which the list of processes would show.
            process.stdin.write(json.dumps(asdict(given)).encode() + b"\n")
            await asyncio.wait({ending, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                process.stdin.close()
                await asyncio.wait({ending}, timeout=END)
            if not ending.done():
                self.trouble = f"{self.name} was killed, because it did not end: was it stopped?"
            elif process.returncode:
                self.trouble = f"{self.name} ended with {self._fate(process.returncode)}"
        finally:
            if process.returncode != 0:
                # Its last event is the end of what it believed, whenever it is found dead.
                self._recorder.kill(self.name)
            if process.returncode is None:
                process.kill()
            await ending
            waiting.cancel()

    def _fate(self, status: int) -> str:
        if status < 0:
            return f"signal {Signals(-status).name}"
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return f"status {status}: {lines[-1] if lines else 'it wrote no reason'}"


async def _contend(options: argparse.Namespace, output: Output, namespace: str, folder: Path) -> list[str]:
    """Run the workers; return sentences about those that did not end in good order. Cancelling it kills them."""
    recorder = Recorder(folder / "verify.jsonl", "verify")
    addresses = [str(address) for address in settings.url(options).split()]
    start, over = time.monotonic(), asyncio.Event()
    workers = [
        _WorkerProcess(f"process{number}", folder, recorder) for number in range(1, options.processes + 1)
    ]
    try:
        async with asyncio.TaskGroup() as group:
            for worker in workers:
                given = WorkerSettings(
                    url=addresses if len(addresses) > 1 else addresses[0],
                    namespace=namespace,
                    history=str(worker.history),
                    process=worker.name,
                    seed=f"{namespace}/{worker.name}",
                    names=NAMES,
                    ttls=[TTL],
                    command_timeout=TTL / 3,
                    tasks=TASKS,
                    until=start + START + options.seconds,
                    rate=options.rate / options.processes,
                )
                group.create_task(worker.run(given, over))
            while not all(worker.ready for worker in workers) and time.monotonic() < start + START:  # noqa: ASYNC110 - their histories are files
                await asyncio.sleep(0.1)
            output.message(
                f"{options.processes} processes contend for {len(NAMES)} locks of namespace {namespace} for {options.seconds:g} s; "
                "restart the server, fail it over or cut it off now",
                event="contending",
                namespace=namespace,
            )
            await asyncio.sleep(options.seconds)
            recorder.note("over")
            over.set()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        recorder.close()
    return [worker.trouble for worker in workers if worker.trouble]


async def _empty(options: argparse.Namespace, output: Output, namespace: str) -> None:
    """Delete what is left at the server. Cancelling it leaves that, which ends by itself or with ``aiolock purge``."""
    try:
        async with settings.connect(
            options, namespace=namespace, ttl=TTL, wait_for_server=EMPTYING
        ) as client:
            backend = client._backend  # noqa: SLF001 - not for programs
            if isinstance(backend, Administration):
                await backend.empty()
    except LockError as error:
        output.message(
            f"namespace {namespace} could not be emptied: {error}", event="left", namespace=namespace
        )


# --- the report


def _listed(report: Report, capabilities: Collection[str], server: str) -> str | None:
    """Return the exceptions that the page of the server lists for this; ``None`` if it lists none that can explain all."""
    if not report.overlaps or report.unlisted:
        return None
    sentences = in_words(capabilities, server)
    risks = [one.text for one in sentences if not one.promised and one.capability in SURVIVAL]
    missing = " and ".join(word for word in SURVIVAL if word not in capabilities)
    return f"the page of {server} lists it for a server that does not promise {missing}: {'; '.join(risks)}"


def _say(
    options: argparse.Namespace,
    output: Output,
    began: datetime,
    report: Report,
    exception: str | None,
    workers: Collection[str],
) -> None:
    line = output.line
    title = f"{settings.server(options)}, verified by aiolock {aiolock.__version__}"
    line(output.style(title, "bold"))
    line(
        f"{report.grants} turns of {options.processes} processes in {seconds(report.seconds)} from {began:%Y-%m-%d %H:%M:%S} on, "
        f"{report.rate:.1f} per second."
    )
    line()
    _verdict(output, "two inside at once", report.overlaps)
    if exception is not None:
        line(f"      {exception}")
        line(
            "      check that the server restarted, or another took over, at that time; the status is 1 all the same"
        )
    if report.tokens is None:
        line("  tokens equal or fallen: not judged, because this server does not promise fencing")
    else:
        _verdict(output, "tokens equal or fallen", report.tokens)
    _verdict(output, "told late", report.told_late)
    contradicted = ", ".join(report.contradicted) or "none"
    line(
        f"  capabilities contradicted: {output.style(contradicted, 'red' if report.contradicted else 'green')}"
    )
    if report.forgotten:
        line(f"      {report.forgotten} holds were unknown to the server while their leases ran")
    line()
    line(f"  longest stretch without a grant: {report.stretch:.3f} s, from {report.stretch_at:.1f} s on")
    if report.hand_over is None:
        line("  hand-over: none was seen")
    else:
        took = report.hand_over
        line(
            f"  hand-over: median {took.median:.1f} ms, 99 % within {took.p99:.1f} ms, longest {took.longest:.1f} ms, of {took.count}"
        )
    losses = ", ".join(f"{count} {reason}" for reason, count in report.losses.items()) or "none"
    line(f"  leases lost: {losses}")
    line()
    for one in report.connections:
        line(
            f"  {one.process}: {one.grants} grants, {one.outages} outages of {one.away:.1f} s (longest {one.longest:.1f} s), "
            f"stopped for {one.stopped:.1f} s"
        )
        for text, count in one.errors.items():
            line(f"      {count} times {clean(text)}")
    for text in workers:
        line(f"  {clean(text)}")
    for text in report.defects[:SHOWN]:
        line(f"  a defect, please report it: {clean(text)}")
    line()
    kept = "Exclusion and tokens held." if report.kept else "Exclusion or tokens broke."
    line(output.style(kept, "green" if report.kept else "red"))


def _verdict(output: Output, what: str, found: Sequence[object]) -> None:
    output.line(f"  {what}: {output.style(str(len(found)), 'red' if found else 'green')}")
    for each in found[:SHOWN]:
        output.line(f"      {clean(str(each))}")
    if len(found) > SHOWN:
        output.line(f"      and {len(found) - SHOWN} more")
