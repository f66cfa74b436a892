"""``aiolock doctor``: what this deployment really promises, what it does not, and what would raise it."""

from __future__ import annotations

import argparse
import secrets

import aiolock
from aiolock.cli import settings
from aiolock.cli.output import Output, clean
from aiolock.cli.promises import Sentence, in_words
from aiolock.client import Client
from aiolock.clock import system_clock
from aiolock.errors import BackendError, BackendUnavailable
from aiolock.info import Finding, Level

__all__ = ["doctor"]

LOOKS = 5
"""Round trips that are measured."""

UNHEALTHY = 1
"""The exit status if something is wrong; that of a server which cannot be reached is another."""

COLOURS = {Level.OK: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.ERROR: "red"}


async def doctor(options: argparse.Namespace, output: Output) -> int:
    """Look, and say what was found."""
    client = settings.connect(options)
    sentences: list[Sentence] = []
    trip = None
    try:
        await client.open()
    except BackendUnavailable:
        raise
    except BackendError as error:
        # It says no. Whatever can be found out all the same may be why.
        findings = await _after(client, error)
    else:
        try:
            trip = await _round_trip(client)
            # Advice is about this kind of server.
            sentences = in_words(client.capabilities, client._backend.name)  # noqa: SLF001 - not for programs
            findings = await client.diagnose()
        finally:
            await client.aclose()
    bad = [finding for finding in findings if finding.level is Level.ERROR]
    if output.json:
        output.document(
            {
                "server": settings.place(options),
                "version": aiolock.__version__,
                "healthy": not bad,
                "round_trip_ms": trip,
                "promises": [sentence.word for sentence in sentences if sentence.promised],
                "missing": [sentence.word for sentence in sentences if not sentence.promised],
                "findings": [_as_json(finding) for finding in findings],
            }
        )
    else:
        _say(options, output, trip, sentences, findings)
    return UNHEALTHY if bad else 0


async def _after(client: Client, error: BackendError) -> list[Finding]:
    """What can be found out about a server that refused; raises ``error`` if there is nothing."""
    try:
        findings = await client.diagnose()
    except aiolock.LockError:
        raise error from None
    if not findings:
        raise error
    return [Finding(Level.ERROR, "connection", str(error)), *findings]


async def _round_trip(client: Client) -> float:
    """The median round trip in milliseconds."""
    lock = client.lock(f"doctor-{secrets.token_hex(4)}")
    took = []
    for _ in range(LOOKS):
        start = system_clock()
        await lock.inspect()
        took.append(system_clock() - start)
    return round(1000 * sorted(took)[LOOKS // 2], 3)


def _as_json(finding: Finding) -> dict[str, str]:
    return {
        "level": finding.level.value,
        "subject": finding.subject,
        "text": finding.text,
        "advice": finding.advice,
    }


def _say(
    options: argparse.Namespace,
    output: Output,
    trip: float | None,
    sentences: list[Sentence],
    findings: list[Finding],
) -> None:
    output.line(
        output.style(f"{settings.place(options)}, seen from here by aiolock {aiolock.__version__}", "bold")
    )
    if trip is not None:
        output.line(f"A round trip takes {trip:g} ms (median of {LOOKS}).")
    for promised, title in ((True, "Promised"), (False, "Not promised")):
        told = [sentence for sentence in sentences if sentence.promised is promised]
        if told:
            output.line(f"\n{output.style(title, 'bold')}")
        for sentence in told:
            output.line(
                f"  {output.style(sentence.word, 'green' if promised else 'yellow')}: {sentence.text}"
            )
            if sentence.advice:
                output.line(f"      to raise it: {sentence.advice}")
    if findings:
        output.line(f"\n{output.style('Found', 'bold')}")
    for finding in findings:
        level = output.style(finding.level.value, COLOURS[finding.level])
        output.line(f"  {level}  {clean(finding.subject)}: {clean(finding.text)}")
        if finding.advice:
            output.line(f"      better: {clean(finding.advice)}")
    output.line(f"\n{_verdict(findings)}")


def _verdict(findings: list[Finding]) -> str:
    errors = sum(finding.level is Level.ERROR for finding in findings)
    warnings = sum(finding.level is Level.WARNING for finding in findings)
    if errors:
        return f"Not healthy: {errors} error(s), {warnings} warning(s)."
    if warnings:
        return f"Usable, with {warnings} warning(s)."
    return "Healthy."
