"""Planted bugs: each must be caught by a part of this suite, or that part proves nothing.

A mutant is a small change of the library's text, made while a fresh process imports it; the files stay as they are.
Each has the cheapest check that must fail on it: the schedules, or one unit test.

``python -m tests.mutants`` plants one after the other and prints whether and how fast it was caught; the exit status
is 1 if one was missed. ``--list`` names them, ``--plant NAME`` runs the check of one in this very process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.machinery
import logging
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

__all__ = ["CONTROL", "MUTANTS", "Mutant", "find", "hunt", "plant"]

ROOT = Path(__file__).parent.parent
SEEDS = 400
"""How many schedules have to suffice."""
PATIENCE = 60.0
"""Seconds after which a check is stopped: a hang is nothing that a check has noticed."""
PARTS = 3
"""In how many parts they are planted by those who have the time for one."""
CAUGHT = 3
"""The exit status of a process whose check failed, as it must."""


@dataclass(frozen=True)
class Mutant:
    """One planted bug: in ``module``, ``old`` becomes ``new``."""

    name: str
    module: str
    old: str
    new: str
    check: str = "schedules"
    """The schedules, those of a quorum, or a test as pytest addresses it."""
    begin: int = 0
    """The seed to begin with: shortly before the first that notices it, as long as the worlds are what they are."""

    def applied(self, text: str) -> str:
        """The module with the bug in it."""
        if text.count(self.old) != 1:
            raise RuntimeError(f"{self.name!r} does not fit {self.module} any more")
        return text.replace(self.old, self.new)


WATCHDOG = "tests/unit/test_watchdog.py::"
MACHINE = "tests/unit/test_machine.py::"
QUORUM = "quorum schedules"

MUTANTS = (
    Mutant(
        "the term counts from the reply",
        "aiolock.backends.memory.backend",
        "claim.granted(answer, sent)",
        "claim.granted(answer, self.settings.clock())",
    ),
    Mutant(
        "a clock that stands still during suspend",
        "aiolock.client",
        "        options = _check(namespace, ttl,",
        "        clock = lambda: asyncio.get_running_loop().time()\n        options = _check(namespace, ttl,",
        begin=605,
    ),
    Mutant(
        "renewal goes on after the release",
        "aiolock.queue",
        "at_once and live else None\n        self.runtime.watchdog.discard(term)\n",
        "at_once and live else None\n",
    ),
    Mutant(
        "renewal stops at the first error",
        "aiolock.watchdog",
        "now + term.patience(term.pace / 10, now) * share",
        "math.inf",
        WATCHDOG + "test_unknown_is_not_lost",
    ),
    Mutant(
        "no clean-up after a cancellation",
        "aiolock.queue",
        "            self._term = None\n        self.runtime.clean_up(self._claim)\n        self._end()\n\n    def _clean_up",
        "            self._term = None\n        self._end()\n\n    def _clean_up",
    ),
    Mutant(
        "clean-up under a new owner id",
        "aiolock.queue",
        "            self._term = None\n        self.runtime.clean_up(self._claim)\n        self._end()\n\n    def _clean_up",
        "            self._term = None\n        self.runtime.clean_up(self.runtime.backend.claim(self._bid))\n"
        "        self._end()\n\n    def _clean_up",
    ),
    Mutant(
        "the verdict waits for a pass of the loop",
        "aiolock.watchdog",
        "loop.call_at(due, self._look, ",
        "loop.call_at(due, lambda: loop.call_soon(self._look), ",
        WATCHDOG + "test_work_that_sleeps_through_the_end_of_its_lease_in_a_stop_does_not_go_on",
    ),
    Mutant(
        "a late grant counts",
        "aiolock.queue",
        "if grant is not None and grant.until > (now := clock()):",
        "if grant is not None and (now := clock()):",
        WATCHDOG + "test_a_grant_that_comes_after_its_own_term_is_no_success",
    ),
    Mutant(
        "a dead term is passed on",
        "aiolock.queue",
        "if left <= 0 or certain <= margin(ttl):",
        "if left <= 0:",
        WATCHDOG + "test_a_dead_term_is_not_passed_on",
    ),
    Mutant(
        "a hand-over is lost in a race with a cancellation",
        "aiolock.queue",
        "            given.abandon()",
        "            pass",
        begin=135,
    ),
    Mutant(
        "a cancellation is swallowed by the release",
        "aiolock.runtime",
        "        self.clean_up(claim, keep, lease)\n        return trouble\n",
        "        self.clean_up(claim, keep, lease)\n        return True\n",
    ),
    Mutant(
        "loss is told, but the block is not cancelled",
        "aiolock.arms",
        "            else:\n                arm.fire()",
        "            else:\n                pass",
    ),
    Mutant(
        "a token is handed out twice",
        "aiolock.queue",
        "        term.token = token + 1\n",
        "",
    ),
    Mutant(
        "a request that was given up still counts when it arrives",
        "aiolock.backends.memory.backend",
        "bury = self._doubts > 0",
        "bury = False",
    ),
    Mutant(
        "a reader overtakes a waiting writer",
        "aiolock.backends.memory.machine",
        "if not lock.queue and admits(lock.holds, request, limit):",
        "if admits(lock.holds, request, limit):",
        MACHINE + "test_nobody_enters_past_the_queue",
    ),
    Mutant(
        "a downgrade leaves the hold a write hold at the server",
        "aiolock.backends.memory.machine",
        'hold.request = replace(request, mode="read", block=1)',
        "pass",
        MACHINE + "test_a_downgrade_lets_the_readers_in_who_are_next",
    ),
    Mutant(
        "permits are counted against what is asked for and not against what was set",
        "aiolock.backends.memory.machine",
        "room = request.limit if limit is None else limit",
        "room = request.limit",
        MACHINE + "test_a_limit_that_was_set_lasts_for_a_day",
    ),
    Mutant(
        "several locks are taken in the order in which they were named",
        "aiolock.merging",
        "for key in sorted(by_key)]",
        "for key in by_key]",
        begin=230,
    ),
    Mutant(
        "what came first of several locks is kept when the next is not to be had",
        "aiolock.combine",
        "                        self._in_vain(bid.name, timeout)\n        except BaseException:\n            release(got)",
        "                        self._in_vain(bid.name, timeout)\n        except BaseException:\n            globals().setdefault('kept', []).append(got)",
    ),
    Mutant(
        "a block under several locks is not cancelled when one of them is lost",
        "aiolock.joint",
        "            super().mark_lost(reason)\n            self.fire()",
        "            super().mark_lost(reason)",
        "tests/unit/test_combine.py::test_a_block_is_cancelled_at_once_when_one_of_its_locks_is_lost",
    ),
    Mutant(
        "a step whose answer was lost is carried out again",
        "aiolock.pen",
        "counted = self._doubts.get(self._seen.get(self.id, 0))",
        "counted = None",
        "tests/unit/test_board.py::test_every_count_counts_once_whatever_gets_lost",
    ),
    Mutant(
        "a count with a name counts again",
        "aiolock.latch",
        "if not before or request in seen:",
        "if not before:",
    ),
    Mutant(
        "whoever waits at a latch misses that it opens",
        "aiolock.latch",
        "return None if seen else True",
        "return None",
    ),
    Mutant(
        "a round that was broken counts as passed",
        "aiolock.rounds",
        '    ends = dict(body["broken"])',
        "    ends = {}",
    ),
    Mutant(
        "a party that was cancelled stays inside",
        "aiolock.barrier",
        'visit.leave(f"a party was cancelled ({self._label})")',
        "pass",
        "tests/contract/test_barriers.py::test_a_party_that_is_cancelled_breaks_the_round[memory]",
    ),
    Mutant(
        "a full round is passed without those who are late to answer",
        "aiolock.rounds",
        'all(entry["here"] for entry in body["inside"].values())',
        "True",
        "tests/unit/test_rounds.py",
    ),
    Mutant(
        "a holder does not hear that it is to let go",
        "aiolock.backends.memory.backend",
        "            claim.asked = reason\n            self._notices.put(",
        "            claim.asked = reason\n            str(",
    ),
    Mutant(
        "a forked child renews",
        "aiolock.runtime",
        "alive=lambda: not self.forked and",
        "alive=lambda:",
        WATCHDOG + "test_a_forked_child_never_renews",
    ),
    Mutant(
        "half of the servers are enough",
        "aiolock.backends.quorum.rules",
        "return servers // 2 + 1",
        "return servers // 2",
        QUORUM,
    ),
    Mutant(
        "the longest vote says until when a quorum is certain",
        "aiolock.backends.quorum.rules",
        "ordered[needed - 1] if",
        "ordered[0] if",
        QUORUM,
    ),
    Mutant(
        "a renewal counts that too few servers have heard",
        "aiolock.backends.quorum.holding",
        "        if len(fresh) < self.backend.needed:\n            return None\n",
        "        fresh *= self.backend.needed\n",
        QUORUM,
        begin=20,
    ),
    Mutant(
        "a release leaves one vote behind",
        "aiolock.backends.quorum.holding",
        "for vote in self._votes if vote.known}",
        "for vote in self._votes[1:] if vote.known}",
        QUORUM,
    ),
)

CONTROL = Mutant("a harmless change", "aiolock.watchdog", "LOOK = 0.25\n", "LOOK = 0.2\n")
"""What must not be caught: else the check fails whatever is planted."""


def plant(mutant: Mutant) -> None:
    """From now on, this process imports the changed module."""
    if any(name.partition(".")[0] == "aiolock" for name in sys.modules):
        raise RuntimeError("the library was imported already: plant in a fresh process")
    original = importlib.machinery.SourceFileLoader.get_code

    def get_code(loader: importlib.machinery.SourceFileLoader, name: str) -> CodeType | None:
        if name != mutant.module:
            return original(loader, name)
        path = loader.get_filename(name)
        return compile(mutant.applied(Path(path).read_text()), path, "exec", dont_inherit=True)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def find(name: str) -> Mutant:
    """The one of that name."""
    return next(mutant for mutant in (*MUTANTS, CONTROL) if mutant.name == name)


def check(mutant: Mutant) -> str | None:
    """Run the check of a mutant; what it complained of, or ``None`` if nothing."""
    plant(mutant)
    if mutant.check in {"schedules", QUORUM}:
        from tests import quorum_schedules, schedules

        logging.disable()
        world = quorum_schedules.QuorumWorld if mutant.check == QUORUM else schedules.World
        seeds = range(mutant.begin, mutant.begin + SEEDS)
        return next(iter(schedules.explore(seeds, world=world).violations), None)
    import pytest

    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        status = pytest.main(["-q", "-x", "-p", "no:cacheprovider", str(ROOT / mutant.check)])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"{mutant.check} did not run: {status!r}")
    return f"{mutant.check} failed" if status else None


async def _process(mutant: Mutant) -> tuple[bool, str, float]:
    start = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.mutants",
        "--plant",
        mutant.name,
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(PATIENCE):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.communicate()
        return False, f"did not end within {PATIENCE:g} s", PATIENCE
    told = (out if process.returncode in (0, CAUGHT) else err).decode().strip().splitlines()
    return process.returncode == CAUGHT, (told or ["died without a word"])[-1], time.monotonic() - start


def hunt(mutants: tuple[Mutant, ...] = MUTANTS) -> list[str]:
    """Run every check in a process of its own and print the table; the names of those that were missed."""
    missed = []
    for mutant in mutants:
        caught, told, took = asyncio.run(_process(mutant))
        print(f"{'caught' if caught else 'MISSED'} {took:6.1f} s  {mutant.name}: {told[:150]}", flush=True)
        if not caught:
            missed.append(mutant.name)
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="name them")
    parser.add_argument(
        "--part", type=int, metavar="K", help=f"only every {PARTS}th, from the K-th on (from 0)"
    )
    parser.add_argument("--plant", metavar="NAME", help="run the check of this one in this process")
    options = parser.parse_args()
    if options.list:
        print("\n".join(mutant.name for mutant in MUTANTS))
        return 0
    if options.plant is None:
        return bool(hunt(MUTANTS if options.part is None else MUTANTS[options.part :: PARTS]))
    complaint = check(find(options.plant))
    print(complaint or "nothing was noticed")
    return CAUGHT if complaint else 0


if __name__ == "__main__":
    sys.exit(main())
