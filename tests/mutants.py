"""Planted bugs: each must be caught by a part of this suite, or that part proves nothing.

A mutant is a small change of the library's text, made while a fresh process imports it; the files stay as they are.
Each has the cheapest check that must fail on it: the schedules, or one unit test.

``python -m tests.mutants`` plants one after the other and prints whether and how fast it was caught; the exit status
is 1 if one was missed. ``--list`` names them, ``--plant NAME`` runs the check of one in this very process.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.machinery
import logging
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

from tests.pace import pace

__all__ = ["CONTROL", "MUTANTS", "Mutant", "find", "hunt", "plant"]

ROOT = Path(__file__).parent.parent
SEEDS = 400
"""How many schedules have to suffice."""
PATIENCE = 60.0
"""Seconds after which a check is stopped: a hang is nothing that a check has noticed."""
PARTS = 10
"""In how many parts they are planted by those who have the time for one."""
FOREIGN = (
    "asyncio",
    "hypothesis.stateful",
    "pytest",
    "redis.asyncio",
    "aiomysql",
    "asyncpg",
    "anyio",
    "uvloop",
)
"""Imported once, before the processes are forked."""
IMPORTED = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
"""Plugins are among them, whose own assertions need not be explained."""
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
    """The schedules, those of a quorum or of a row store, or a test as pytest addresses it."""
    begin: int = 0
    """The seed to begin with: shortly before the first that notices it, as long as the worlds are what they are."""

    def applied(self, text: str) -> str:
        """The module with the bug in it."""
        if text.count(self.old) != 1:
            raise RuntimeError(f"{self.name!r} does not fit {self.module} any more")
        return text.replace(self.old, self.new)


RENEWAL = "tests/unit/test_renewal.py::"
RULES = "tests/unit/test_rows_rules.py::"
ENGINE = "tests/unit/test_rows_engine.py::"
LEASES = "tests/backends/etcd/test_leases.py::"
ETCD = "tests/backends/etcd/test_store.py::"
MONGODB = "tests/backends/mongodb/test_store.py::"
MEMCACHED = "tests/backends/memcached/test_store.py::"
LIVENESS = "tests/unit/test_rows_liveness.py::"
LOCKROW = "tests/unit/test_rows_lockrow.py::"
ENTERING = "tests/backends/postgresql/test_entering.py::"
STORE = "tests/backends/postgresql/test_store.py::"
CONFIRMATION = "tests/backends/postgresql/test_confirmation.py::"
LENDING = "tests/backends/postgresql/test_transaction_lock.py::"
LATE = "tests/contract/test_lifetimes.py::test_a_late_copy_of_an_older_request_changes_nothing"
QUORUM = "quorum schedules"
ROWS = "rows schedules"

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
        "        ttl = check_ttl(ttl)\n",
        "        ttl = check_ttl(ttl)\n        clock = lambda: asyncio.get_running_loop().time()\n",
        begin=605,
    ),
    Mutant(
        "renewal goes on after the release",
        "aiolock.core.local_queue",
        "        claim = self._claim\n        self.runtime.scheduler.discard(validity)\n",
        "        claim = self._claim\n",
    ),
    Mutant(
        "renewal stops at the first error",
        "aiolock.core.renewal",
        "now + validity.retry_after(validity.pace / 10, now) * share",
        "math.inf",
        RENEWAL + "test_unknown_is_not_lost",
    ),
    Mutant(
        "a hold that is not renewed is prolonged",
        "aiolock.core.renewal",
        "self.renewed, self.claim.fixed, self.end = False, True,",
        "self.end =",
        RENEWAL + "test_a_pushed_hold_that_is_not_renewed_is_confirmed_at_once_and_once",
    ),
    Mutant(
        "verifying prolongs a hold that is not renewed",
        "aiolock.backends.memory.backend",
        "prolong=prolong, present",
        "present",
        "tests/contract/test_loss.py::test_verifying_prolongs_nothing[memory]",
    ),
    Mutant(
        "a hold with grace is given back as soon as it is lost",
        "aiolock.core.renewal",
        "        if not validity.grace:\n",
        "        if True:\n",
        RENEWAL + "test_a_hold_with_grace_is_renewed_in_time_and_lost_so_much_earlier",
    ),
    Mutant(
        "no clean-up after a cancellation",
        "aiolock.core.local_queue",
        "            self._validity = None\n        self.runtime.clean_up(self._claim)\n        self._end()\n\n    def _fail",
        "            self._validity = None\n        self._end()\n\n    def _fail",
    ),
    Mutant(
        "clean-up under a new owner id",
        "aiolock.core.local_queue",
        "            self._validity = None\n        self.runtime.clean_up(self._claim)\n        self._end()\n\n    def _fail",
        "            self._validity = None\n        self.runtime.clean_up(self.runtime.backend.claim(self._request))\n"
        "        self._end()\n\n    def _fail",
    ),
    Mutant(
        "the verdict waits for a pass of the loop",
        "aiolock.core.renewal",
        "loop.call_at(due, self._check_clock, ",
        "loop.call_at(due, lambda: loop.call_soon(self._check_clock), ",
        RENEWAL + "test_work_that_sleeps_through_the_end_of_its_lease_in_a_stop_does_not_go_on",
    ),
    Mutant(
        "a late grant counts",
        "aiolock.core.local_queue",
        "if grant is not None and grant.until - self._request.grace > (now := clock()):",
        "if grant is not None and (now := clock()):",
        RENEWAL + "test_a_grant_that_comes_after_its_own_term_is_no_success",
    ),
    Mutant(
        "a dead term is passed on",
        "aiolock.core.local_queue",
        "if left <= 0 or certain <= margin:",
        "if left <= 0:",
        RENEWAL + "test_a_dead_term_is_not_passed_on",
    ),
    Mutant(
        "a hand-over is lost in a race with a cancellation",
        "aiolock.core.local_queue",
        "            given.abandon()",
        "            pass",
        begin=290,
    ),
    Mutant(
        "a cancellation is swallowed by the release",
        "aiolock.core.runtime",
        "        self.clean_up(claim, keep, disown)\n        return trouble\n",
        "        self.clean_up(claim, keep, disown)\n        return True\n",
    ),
    Mutant(
        "loss is told, but the block is not cancelled",
        "aiolock.core.cancellation",
        "            else:\n                scope.cancel()",
        "            else:\n                pass",
    ),
    Mutant(
        "a token is handed out twice",
        "aiolock.core.local_queue",
        "        validity.token = token + 1\n",
        "",
    ),
    Mutant(
        "a request that was given up still counts when it arrives",
        "aiolock.backends.memory.backend",
        "tombstone = self._unanswered > 0",
        "tombstone = False",
    ),
    Mutant(
        "a reader overtakes a waiting writer",
        "aiolock.backends.rows.rules",
        "if not lock.queue and admits(lock.holds, request, limit):",
        "if admits(lock.holds, request, limit):",
        RULES + "test_nobody_enters_past_the_queue",
    ),
    Mutant(
        "a downgrade leaves the hold a write hold at the server",
        "aiolock.backends.rows.rules",
        'hold.request = replace(request, mode="read", block=1)',
        "pass",
        RULES + "test_a_downgrade_lets_the_readers_in_who_are_next",
    ),
    Mutant(
        "permits are counted against what is asked for and not against what was set",
        "aiolock.backends.rows.rules",
        "room = request.limit if limit is None else limit",
        "room = request.limit",
        RULES + "test_a_limit_that_was_set_lasts_for_a_day",
    ),
    Mutant(
        "several locks are taken in the order in which they were named",
        "aiolock.kinds.multi",
        "for key in sorted(by_key)]",
        "for key in by_key]",
        begin=300,
    ),
    Mutant(
        "what came first of several locks is kept when the next is not to be had",
        "aiolock.kinds.multi",
        "self._in_vain(part.request.name, timeout)\n        except BaseException:\n            release(got)",
        "self._in_vain(part.request.name, timeout)\n        except BaseException:\n            globals().setdefault('kept', []).append(got)",
    ),
    Mutant(
        "a block under several locks is not cancelled when one of them is lost",
        "aiolock.kinds.multi",
        "            super().mark_lost(reason)\n            self.cancel_tasks()",
        "            super().mark_lost(reason)",
        "tests/unit/test_multi.py::test_a_block_is_cancelled_at_once_when_one_of_its_locks_is_lost",
    ),
    Mutant(
        "a step whose answer was lost is carried out again",
        "aiolock.core.register",
        "self._settle(self._doubts.pop(write, {}))",
        "self._doubts.pop(write, {})",
        "tests/unit/test_register.py::test_every_count_counts_once_whatever_gets_lost",
    ),
    Mutant(
        "a count with a name counts again",
        "aiolock.kinds.latch",
        "if not before or request in seen:",
        "if not before:",
        begin=140,
    ),
    Mutant(
        "whoever waits at a latch misses that it opens",
        "aiolock.kinds.latch",
        "return None if seen else True",
        "return None",
    ),
    Mutant(
        "a round that was broken counts as passed",
        "aiolock.kinds.barrier",
        '    ends = dict(body["broken"])',
        "    ends = {}",
    ),
    Mutant(
        "a party that was cancelled stays inside",
        "aiolock.kinds.barrier",
        'party.leave(f"a party was cancelled ({self._label})")',
        "pass",
        "tests/contract/test_barriers.py::test_a_party_that_is_cancelled_breaks_the_round[memory]",
    ),
    Mutant(
        "a full round is passed without those who are late to answer",
        "aiolock.kinds.barrier",
        'all(confirmed for *_, confirmed in after["inside"].values())',
        "True",
        "tests/unit/test_barrier.py",
    ),
    Mutant(
        "a holder does not hear that it is to let go",
        "aiolock.backends.memory.backend",
        "            claim.requested = reason\n            self.events.put(",
        "            claim.requested = reason\n            str(",
    ),
    Mutant(
        "a forked child renews",
        "aiolock.core.runtime",
        "alive=lambda: not self.forked and",
        "alive=lambda:",
        RENEWAL + "test_a_forked_child_never_renews",
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
        "aiolock.backends.quorum.claim",
        "        if len(fresh) < self.members.needed:\n            return None\n",
        "        if not fresh:\n            return None\n        fresh *= self.members.needed\n",
        "tests/unit/test_quorum_rules.py::test_a_renewal_that_one_of_three_servers_has_answered_prolongs_nothing",
    ),
    Mutant(
        "a release leaves one vote behind",
        "aiolock.backends.quorum.claim",
        "for vote in self.votes if vote.known}",
        "for vote in self.votes[1:] if vote.known}",
        QUORUM,
    ),
    Mutant(
        "a hold that was released during a round is renewed again",
        "aiolock.core.renewal",
        "for validity in [validity for validity in those if not validity.over]:",
        "for validity in those:",
        RENEWAL + "test_a_hold_that_is_released_while_other_batches_are_under_way_is_not_renewed_again",
    ),
    Mutant(
        "a wake-up during a request goes to the waiter before it",
        "aiolock.core.inbox",
        "            self._waiter = None\n        return pushed\n",
        "            pass\n        return pushed\n",
        "tests/unit/test_inbox.py::test_a_wake_up_after_take_is_kept_and_does_not_go_to_an_earlier_callback",
    ),
    # Each bracketed rule of the design of rows, by its number there.
    Mutant(
        "(1) a renewal of a row store reads no rows",
        "aiolock.backends.rows.engine",
        "            await self._verify([session])\n",
        "            pass\n",
        ENGINE + "test_a_renewal_reads_the_rows_and_finds_a_hold_that_is_gone",
    ),
    Mutant(
        "(2) ended claims are not mentioned in the session",
        "aiolock.backends.rows.session",
        "self.ended.announce(),",
        "(),",
        ENGINE + "test_a_release_that_does_not_arrive_ends_the_hold_with_the_next_heartbeat",
    ),
    Mutant(
        "(2) a released hold is not looked for after a reconnect",
        "aiolock.backends.rows.engine",
        "                    checking.submit(Leave(claim), session)\n",
        "                    pass\n",
        ENGINE + "test_a_released_hold_that_a_crash_brings_back_is_removed_again",
    ),
    Mutant(
        "(2) a heartbeat after a reconnect lets an ended claim go",
        "aiolock.backends.rows.liveness",
        "self._claims[claim] = ended._replace(connection=None)",
        "pass",
        LIVENESS + "test_after_a_reconnect_an_ended_claim_is_checked_before_a_heartbeat_can_let_it_go",
    ),
    Mutant(
        "(2) a heartbeat sent before the removal was answered lets an ended claim go",
        "aiolock.backends.rows.liveness",
        "if ended.connection == connection and ended.order < sent:",
        "if ended.connection == connection:",
        LIVENESS + "test_an_ended_claim_is_mentioned_until_its_removal_is_durable",
    ),
    Mutant(
        "(2) a session takes any number of ended claims",
        "aiolock.backends.rows.session",
        "return len(self.ended) >= MOST_ENDED",
        "return False",
        ENGINE + "test_new_claims_get_another_session_when_one_has_many_ended_claims",
    ),
    Mutant(
        "(2) a session row grows with the releases under way",
        "aiolock.backends.rows.liveness",
        "itertools.islice(self._claims, MOST_ANNOUNCED)",
        "self._claims",
        LIVENESS + "test_ended_claims_are_announced_in_their_order_as_far_as_the_longest_row_has_room",
    ),
    Mutant(
        "(2) a session that was full stays when no claim names it",
        "aiolock.backends.rows.session",
        "if self._current.get(session.ttl) is not session:\n            self._end",
        "if session.alone:\n            self._end",
        ENGINE + "test_a_session_that_was_full_ends_with_its_last_claim",
    ),
    Mutant(
        "(2) a client has a session for each ttl that it has ever used",
        "aiolock.backends.rows.session",
        "while len(self._unused) > MOST_UNUSED:",
        "while False:",
        ENGINE + "test_a_client_has_some_sessions_for_ttls_that_it_uses_no_more_and_not_one_for_each",
    ),
    Mutant(
        "(2) a claim enters under a session that is about to be deleted",
        "aiolock.backends.rows.session",
        "            session.dead = True\n            deleting",
        "            deleting",
        ENGINE + "test_a_claim_enters_under_another_session_if_the_one_that_it_got_has_ended_meanwhile",
    ),
    Mutant(
        "(2) a session is deleted although a row may show its holds",
        "aiolock.backends.rows.session",
        "left = bool(self.claims) or self.ended.unanswered(self.context.connection)",
        "left = bool(self.claims)",
        ENGINE
        + "test_a_client_that_closes_with_a_hold_in_a_row_declares_its_session_dead[brought back by a crash]",
    ),
    Mutant(
        "(3) a client that is idle sends heartbeats for ever",
        "aiolock.backends.rows.engine",
        " or now - self._busy[session.id] >= session.ttl:",
        ":",
        ENGINE + "test_a_client_that_is_idle_for_a_ttl_sends_no_more_heartbeats",
    ),
    Mutant(
        "(4) a series goes on over a reconnect",
        "aiolock.backends.rows.observer",
        "        self._series.clear()\n        if not",
        "        if not",
        ENGINE + "test_a_takeover_is_counted_anew_after_a_reconnect",
    ),
    Mutant(
        "(3) a grant of a row store counts from its own sending",
        "aiolock.backends.rows.liveness",
        "return expires_at(min(heartbeat, shown), ttl)",
        "return expires_at(shown, ttl)",
        ENGINE + "test_a_grant_ends_with_its_session",
    ),
    Mutant(
        "(3) a late answer of an acquire is believed for the session's ttl",
        "aiolock.backends.rows.liveness",
        "return expires_at(min(heartbeat, shown), ttl)",
        "return expires_at(heartbeat, ttl)",
        LIVENESS + "test_a_hold_is_certain_until_the_earlier_of_heartbeat_and_showing",
    ),
    Mutant(
        "(3) an acquire late in the session sends no heartbeat",
        "aiolock.backends.rows.claim",
        "if session.late or member.unproven else None",
        "if member.unproven else None",
        ENGINE + "test_an_acquire_late_in_the_session_believes_nothing_before_its_heartbeat_is_answered",
    ),
    Mutant(
        "(4) a session is judged by the observer's ttl",
        "aiolock.backends.rows.liveness",
        "        ttl = row.ttl\n",
        "        pass\n",
        LIVENESS + "test_the_ttl_that_counts_is_the_one_in_the_session_row",
    ),
    Mutant(
        "(4) a series is counted from the sending of its first read",
        "aiolock.backends.rows.observer",
        "arrived, changed = context.clock(), False",
        "arrived, changed = flight.sent, False",
        ENGINE + "test_a_takeover_is_counted_from_the_arrival_of_the_first_answer",
    ),
    Mutant(
        "(4) only the session of the first holder is observed",
        "aiolock.backends.rows.writer",
        "return [request for request in self.row.ahead(self._waiting()) if request.session not in own]",
        "return [request for request in self.row.ahead(self._waiting()) if request.session not in own][:1]",
        ENGINE + "test_sessions_of_all_who_are_ahead_are_observed_at_once",
    ),
    Mutant(
        "(4) another version does not begin a series anew",
        "aiolock.backends.rows.liveness",
        "if series is not None and series.version == version:",
        "if series is not None:",
        LIVENESS + "test_a_series_is_counted_from_the_first_answer_that_showed_the_version",
    ),
    Mutant(
        "(7) a grant is believed under a session that the server may have forgotten",
        "aiolock.backends.rows.claim",
        "while member.unproven:",
        "while False:",
        ENGINE + "test_a_server_that_forgets_and_takes_a_missing_session_for_dead_lets_one_in",
    ),
    Mutant(
        "(7) a hold in the row is believed under a session that the server may have forgotten",
        "aiolock.backends.rows.writer",
        "if member.unproven:",
        "if False:",
        ENGINE
        + "test_a_hold_that_is_found_in_the_row_after_a_reconnect_brings_no_grant_before_its_session_is_seen",
    ),
    Mutant(
        "a release waits for the answer to another one of its claim",
        "aiolock.backends.rows.claim",
        "if not self._writer.tries(leave):",
        "if not self._writer.leaves(leave.step.id):",
        ENGINE
        + "test_a_release_that_was_answered_while_none_waited_is_answered_beside_another_one_of_its_claim",
    ),
    Mutant(
        "a hold in the row is believed under a session that is dead",
        "aiolock.backends.rows.writer",
        " or member.session.dead:\n",
        ":\n",
        ENGINE + "test_a_position_under_a_session_that_is_gone_brings_no_grant",
    ),
    Mutant(
        "a grant that was not taken outlives its hold",
        "aiolock.backends.rows.writer",
        "if member.claim.inbox.take() is None:",
        "if True:",
        ENGINE + "test_a_grant_that_no_longer_stands_when_it_is_taken_is_not_believed[the grant and its end]",
    ),
    Mutant(
        "(5) rows are remembered over a reconnect",
        "aiolock.backends.rows.writer",
        '        """Forget the row after a reconnect."""\n        self.version = None\n',
        '        """Forget the row after a reconnect."""\n',
        ENGINE + "test_nothing_that_was_read_before_a_reconnect_is_written_against",
    ),
    Mutant(
        "(5) versions repeat",
        "aiolock.backends.rows.context",
        "return secrets.token_urlsafe(12)",
        "return 'v'",
        ENGINE + "test_a_version_is_never_used_twice",
    ),
    Mutant(
        "(6) a row that is held may be purged",
        "aiolock.backends.rows.lockrow",
        "    if not row.free:\n        return None\n",
        "",
        ENGINE + "test_a_row_that_is_held_waited_for_or_kept_is_never_purged",
    ),
    Mutant(
        "(7) a session whose row is missing is dead at once",
        "aiolock.backends.rows.liveness",
        "if not series.version and expires:",
        "if not series.version:",
        ENGINE + "test_a_missing_session_row_is_observed_for_a_whole_ttl",
    ),
    Mutant(
        "(7) a heartbeat whose answer was lost is a loss",
        "aiolock.backends.rows.session",
        "        if self.context.store.reads_prove and (sent := self._sent.get(content.heartbeat)) is not None:\n"
        "            self._answered(*sent, row)\n",
        "        if content.heartbeat == self._number:\n            self.dead = True\n            return 0\n",
        ENGINE + "test_a_heartbeat_whose_answer_was_lost_counts_by_its_number",
    ),
    Mutant(
        "a heartbeat that a read finds is believed although a standby may lack it",
        "aiolock.backends.rows.session",
        "if self.context.store.reads_prove and (sent",
        "if (sent",
        ENGINE + "test_a_heartbeat_that_a_read_finds_counts_only_when_a_later_one_was_answered",
    ),
    Mutant(
        "a grant that a read finds is believed although a standby may lack it",
        "aiolock.backends.rows.context",
        "if self.store.reads_prove or (self.store.in_order and not doubt):",
        "if self.store.reads_prove or self.connection:",
        ENGINE + "test_a_grant_that_another_client_has_written_is_believed_after_one_flushed_write",
    ),
    Mutant(
        "an own grant that a read finds is believed although it may not be flushed",
        "aiolock.backends.rows.context",
        "(self.store.in_order and not doubt)",
        "self.store.in_order",
        ENGINE + "test_a_read_is_proved_by_a_write_that_was_sent_after_its_answer_on_the_same_connection",
    ),
    Mutant(
        "a write that was answered before a read proves what it has shown",
        "aiolock.backends.rows.context",
        " and read.order < order",
        "",
        ENGINE + "test_a_read_is_proved_by_a_write_that_was_sent_after_its_answer_on_the_same_connection",
    ),
    Mutant(
        "a release that a read finds is one although a standby may lack it",
        "aiolock.backends.rows.writer",
        "if version == self.version and self.context.store.reads_prove:",
        "if version == self.version:",
        ENGINE + "test_a_release_that_was_warned_is_written_again_before_it_is_one",
    ),
    Mutant(
        "a session stays dead although its death was undone",
        "aiolock.backends.rows.observer",
        "            self.context.liveness.dead.clear()\n",
        "            pass\n",
        ENGINE + "test_a_session_whose_death_was_undone_counts_again",
    ),
    Mutant(
        "(7) a waiting claim moves on under a dead session",
        "aiolock.backends.rows.claim",
        "if member is not None and not member.session.dead:",
        "if member is not None:",
        ENGINE + "test_a_client_that_was_declared_dead_loses_its_holds_and_enters_anew",
    ),
    Mutant(
        "(8) a statement enters whatever has become of the row that it has read",
        "aiolock.backends.postgresql.schema",
        'text.replace("{table}", self.table)',
        'text.replace("{table}", self.table)'
        '.replace("r.ctid = f.place AND r.key = $1 AND r.version = f.version", "r.key = $1")'
        '.replace("r.ctid = m.place AND ", "")',
        ENTERING + "test_a_statement_that_waited_would_not_enter_by_an_older_snapshot",
    ),
    Mutant(
        "(8) a statement enters a lock that is waited for",
        "aiolock.backends.postgresql.schema",
        'text.replace("{table}", self.table)',
        """text.replace("{table}", self.table).replace('(}|,"f"', '(}|,"q".*|,"f"')""",
        ENTERING + "test_a_row_that_is_not_free_stays_as_it_is",
    ),
    Mutant(
        "(8) the end of a session is counted from an old reading of the shared clock",
        "aiolock.backends.rows.liveness",
        "clock.seconds + (sent - read) * (1 + DRIFT) + ttl",
        "clock.seconds + ttl",
        LIVENESS + "test_no_heartbeat_ends_what_an_earlier_one_has_promised",
    ),
    Mutant(
        "(6) a purge deletes the sessions that a lock row names",
        "aiolock.backends.rows.backend",
        "return await self.store.purge(prefix, idle, named)",
        "return await self.store.purge(prefix, idle)",
        ENGINE + "test_a_purge_leaves_the_sessions_of_dead_holders_and_kept_times_that_have_ended[n/-kept]",
    ),
    Mutant(
        "(8) a client that was idle for hours ends its session by the reading of then",
        "aiolock.backends.rows.session",
        "read_clock = self._old_clock\n",
        "read_clock = False\n",
        ENGINE + "test_a_client_that_dies_after_hours_without_a_request_is_followed_after_its_ttl[a hold]",
    ),
    Mutant(
        "(9) a clock that was stepped is trusted",
        "aiolock.backends.rows.liveness",
        "return self._stepped is None or now - self._stepped >= ttl",
        "return True",
        LIVENESS + "test_a_clock_that_was_stepped_is_not_trusted_for_a_ttl",
    ),
    Mutant(
        "(9) readings of different boots are compared",
        "aiolock.backends.rows.liveness",
        "    if end.boot != clock.boot:\n        return _rebooted(end, clock)\n",
        "",
        LIVENESS + "test_another_boot_is_dead_and_another_time_namespace_is_observed",
    ),
    Mutant(
        "(9) a lock that is kept ends with the run of the machine",
        "aiolock.backends.rows.liveness",
        "if _rebooted(row.expires, clock) and row.kept is not None:",
        "if False:",
        LIVENESS + "test_a_kept_session_of_an_earlier_run_of_the_machine_ends_by_the_wall_clock",
    ),
    Mutant(
        "(9) a lock that is kept ends by the wall clock in the run of the machine that kept it",
        "aiolock.backends.rows.liveness",
        "if _rebooted(row.expires, clock) and row.kept is not None:",
        "if row.kept is not None:",
        LIVENESS + "test_a_kept_session_of_an_earlier_run_of_the_machine_ends_by_the_wall_clock",
    ),
    Mutant(
        "(9) a lock that is kept begins its time anew after a reboot",
        "aiolock.backends.rows.liveness",
        "    left = remaining(row, clock, wall)\n",
        "    left = row.ttl\n",
        LIVENESS + "test_a_kept_session_is_continued_with_what_is_left_and_never_with_more_than_its_ttl",
    ),
    Mutant(
        "(9) readings of different time namespaces are compared",
        "aiolock.backends.rows.liveness",
        "return end.zone == clock.zone and clock",
        "return clock",
        LIVENESS + "test_another_boot_is_dead_and_another_time_namespace_is_observed",
    ),
    Mutant(
        "(9) the shared clock ends a session without a margin",
        "aiolock.backends.rows.liveness",
        "clock.seconds > end.seconds + margin(ttl)",
        "clock.seconds > end.seconds",
        LIVENESS + "test_the_shared_clock_proves_an_end_only_past_a_margin_and_while_it_is_trusted",
    ),
    Mutant(
        "(12) a hold that is not prolonged lives as long as its session",
        "aiolock.backends.rows.claim",
        "if self.request.life == math.inf:",
        "if True:",
        ENGINE + "test_a_hold_that_is_not_prolonged_has_a_session_of_its_own_that_ends_with_it",
    ),
    Mutant(
        "(12) heartbeats go on for a hold that is not prolonged",
        "aiolock.backends.rows.engine",
        "session.dead or session.rests or context.closed",
        "session.dead or context.closed",
        ENGINE + "test_a_request_with_a_life_of_its_own_is_kept_alive_while_it_waits_and_not_after_that",
    ),
    Mutant(
        "an older request to extend a hold wins",
        "aiolock.backends.rows.rules",
        "        if number > hold.extension:\n",
        "        if True:\n",
        LATE + "[memory-mutex]",
    ),
    Mutant(
        "a late renewal undoes an extension",
        "aiolock.backends.rows.rules",
        "        if not self.extension:\n",
        "        if True:\n",
        LATE + "[memory-mutex]",
    ),
    # Lives of holds that are not renewed, in the schedules.
    Mutant(
        "a late or overtaken request to extend a hold counts",
        "aiolock.backends.rows.rules",
        "        if number > hold.extension:\n",
        "        if True:\n",
    ),
    Mutant(
        "a late confirmation undoes an extension",
        "aiolock.backends.rows.rules",
        "        if not self.extension:\n",
        "        if True:\n",
        begin=100,
    ),
    Mutant(
        "another life counts from the answer",
        "aiolock.core.renewal",
        "validity.extended(number, end, grant, self._clock())",
        "validity.extended(number, math.inf, replace(grant, until=expires_at(self._clock(), seconds)), self._clock())",
    ),
    Mutant(
        "the answer to a request to extend counts although another has followed",
        "aiolock.core.renewal",
        "if number == self.extensions:",
        "if True:",
    ),
    Mutant(
        "a later end counts before the server has answered",
        "aiolock.core.renewal",
        "        self.end = min(self.end, end)\n        self.until = min(self.until, self.end - self.grace)\n",
        "        self.end = end\n        self.until = self.end - self.grace\n",
    ),
    Mutant(
        "an earlier end counts when the server has answered",
        "aiolock.core.renewal",
        "        self.end = min(self.end, end)\n        self.until = min(self.until, self.end - self.grace)\n",
        "",
    ),
    Mutant(
        "one of several servers that is away counts for the locks of all",
        "aiolock.core.logs",
        "        if not self._known <= self.open.keys():\n",
        "        if not self.open:\n",
        "tests/unit/test_logs.py::test_a_client_is_without_servers_when_all_are_away_that_it_had_reached",
    ),
    Mutant(
        "an error of a try is that of all who wait behind it",
        "aiolock.core.local_queue",
        "            if wait or not self._waiters:\n",
        "            if True:\n",
        "tests/unit/test_local_queue.py::test_an_error_of_a_try_is_its_own",
    ),
    Mutant(
        "a hold that was released is extended, and watched",
        "aiolock.lease",
        "        if hold.open:\n            await work\n",
        "        if True:\n            await work\n",
        "tests/unit/test_lease.py::test_a_request_to_extend_that_is_not_answered_does_not_watch_a_hold_that_was_released",
    ),
    Mutant(
        "(12) another life is not written into the row of its session",
        "aiolock.backends.rows.session",
        "            self._next_ttl = ttl\n",
        "            self.ttl = ttl\n",
        ROWS,
    ),
    Mutant(
        "a heartbeat that was not sent because of a reconnect is no error",
        "aiolock.backends.rows.session",
        "                if self.dead:\n                    return\n            edit",
        "                if self.dead or self._version is None:\n                    return\n            edit",
        ENGINE + "test_another_life_is_granted_in_full_although_the_connection_is_lost_again_and_again",
    ),
    Mutant(
        "a verification ends before a hold was shown",
        "aiolock.backends.rows.engine",
        "        while changed:\n",
        "        for _ in range(3):\n",
        ENGINE + "test_another_life_is_granted_in_full_although_the_connection_is_lost_again_and_again",
    ),
    Mutant(
        "an answer to an older request to extend raises the end",
        "aiolock.core.renewal",
        "if number == self.extensions:",
        "if True:",
        RENEWAL + "test_the_answer_to_an_older_request_to_extend_raises_nothing",
    ),
    Mutant(
        "a hold that is to end earlier ends then when the server has answered",
        "aiolock.core.renewal",
        "        self.end = min(self.end, end)\n        self.until = min(self.until, self.end - self.grace)\n",
        "",
        RENEWAL + "test_an_earlier_end_counts_before_the_request_is_sent_and_its_answer_raises_nothing",
    ),
    Mutant(
        "(15) tokens begin anew with a row that was deleted",
        "aiolock.backends.rows.lockrow",
        "top = max(last + 1, source.floor + 1, source.tick)",
        "top = last + 1",
        ENGINE + "test_tokens_rise_over_purge_deletion_and_reopening",
    ),
    Mutant(
        "(15) the highest token that was seen is forgotten at reopening",
        "aiolock.backends.rows.backend",
        "other.floor = self.context.floor",
        "other.floor = 0",
        ENGINE + "test_tokens_rise_over_purge_deletion_and_reopening",
    ),
    Mutant(
        "(15) a hold is inserted into a row that is absent",
        "aiolock.backends.rows.writer",
        "        if not self.version:\n            return await self._insert()\n",
        "",
        ENGINE + "test_a_hold_is_written_only_against_a_row_that_is_there",
    ),
    Mutant(
        "(18) a leave after an unanswered request writes nothing if it finds nothing",
        "aiolock.backends.rows.writer",
        "            doubt=self.doubt,\n",
        "            doubt=False,\n",
        ENGINE + "test_a_late_copy_of_a_request_that_was_given_up_changes_nothing",
    ),
    Mutant(
        "(18) a request that was withdrawn follows its own leave",
        "aiolock.backends.rows.writer",
        "{each: None for each in self._pending if not each.withdrawn}",
        "dict(self._pending)",
        ENGINE + "test_a_request_that_was_withdrawn_while_its_write_lost_a_race_is_not_sent_again",
    ),
    Mutant(
        "(18) the leave after an unanswered request is not flushed",
        "aiolock.backends.rows.lockrow",
        "work.changed = work.durable = True\n    notify",
        "work.changed = True\n    notify",
        ENGINE + "test_a_leave_after_an_unanswered_request_is_flushed",
    ),
    Mutant(
        "(18) a statement names no version of its session",
        "aiolock.backends.postgresql.schema",
        'text.replace("{table}", self.table)',
        'text.replace("{table}", self.table).replace(" AND s.version = $8", " AND $8 <> s.key")',
        ENTERING + "test_a_statement_that_arrives_after_the_next_heartbeat_does_not_enter",
    ),
    Mutant(
        "(18) a statement does not lock the row of its session",
        "aiolock.backends.postgresql.schema",
        'text.replace("{table}", self.table)',
        'text.replace("{table}", self.table).replace("FOR SHARE OF s SKIP LOCKED", "")',
        ENTERING + "test_a_heartbeat_does_not_overtake_a_statement_that_has_entered_and_is_not_committed",
    ),
    Mutant(
        "(18) a claim leaves without a heartbeat after an unanswered statement",
        "aiolock.backends.rows.writer",
        "return bool(self.doubted) and not self.session.dead",
        "return False",
        ENGINE + "test_a_late_copy_of_a_statement_that_was_given_up_changes_nothing",
    ),
    Mutant(
        "(18) the row is not read again after the heartbeat that rules copies out",
        "aiolock.backends.rows.writer",
        '            member.doubted = ""\n        self.version = None\n',
        '            member.doubted = ""\n',
        ENGINE + "test_a_copy_of_a_statement_that_counts_just_before_the_heartbeat_is_removed",
    ),
    Mutant(
        "(18) a repetition that was answered rules out the first copy of a statement",
        "aiolock.backends.rows.writer",
        "            context.flushed(flight)\n        self.learn(",
        '            context.flushed(flight)\n            member.doubted = ""\n        self.learn(',
        ENGINE + "test_a_late_copy_of_a_statement_whose_repetition_was_answered_changes_nothing",
    ),
    Mutant(
        "(18) a request that is refused after an unanswered statement is forgotten",
        "aiolock.backends.rows.claim",
        "        if member.doubtful:\n",
        "        if False:\n",
        ENGINE + "test_a_late_copy_of_a_statement_whose_repetition_was_refused_changes_nothing",
    ),
    Mutant(
        "a statement enters a semaphore and writes no limit",
        "aiolock.backends.rows.writer",
        'return None if member.request.mode == "permits" else',
        "return",
        ENGINE + "test_the_limit_of_a_semaphore_is_written_with_its_first_permit",
    ),
    Mutant(
        "(15) tokens of a statement begin anew with a row that was deleted",
        "aiolock.backends.postgresql.schema",
        'text.replace("{table}", self.table)',
        'text.replace("{table}", self.table).replace("$6::int8 + 1, (extract", "0 * $6::int8, (extract")',
        ENTERING + "test_the_value_is_that_of_the_rules",
    ),
    Mutant(
        "(19) a request fills the row to its end",
        "aiolock.backends.rows.lockrow",
        "        if fits:\n            self._length += length",
        "        fits = True\n        if fits:\n            self._length += length",
        ENGINE + "test_a_request_waits_outside_a_full_row_and_who_leaves_can",
    ),
    Mutant(
        "(19) one client fills the whole row",
        "aiolock.backends.rows.lockrow",
        "share = 1 if self._own < FEW else SHARE",
        "share = 1",
        LOCKROW + "test_one_client_leaves_room_to_the_others",
    ),
    Mutant(
        "(19) a short request overtakes a long one for which there is no room",
        "aiolock.backends.rows.lockrow",
        "if self._over or not",
        "if not",
        LOCKROW + "test_no_request_overtakes_one_for_which_there_is_no_room",
    ),
    Mutant(
        "(19) a request that waits outside the row is forgotten there",
        "aiolock.backends.rows.writer",
        "list(self._outside.values())",
        "list[Enter]()",
        ENGINE + "test_those_outside_enter_in_their_order_once_there_is_room",
    ),
    Mutant(
        "(19) a request outside enters for a session that is dead",
        "aiolock.backends.rows.writer",
        "        self._outside.pop(member.id, None)\n        if member.state in _WAITS:\n            member.claim.inbox.wake(WakeReason.LAPSED)\n",
        "        pass\n",
        ENGINE + "test_a_claim_outside_enters_anew_when_its_session_is_dead",
    ),
    Mutant(
        "(20) a row of another format is overwritten",
        "aiolock.backends.rows.lockrow",
        "    if value[:1] != FORMAT:\n        raise UnknownFormat(value)\n    try:\n        content = json.loads(value[1:])\n        holds",
        "    if value[:1] != FORMAT:\n        return LockRow()\n    try:\n        content = json.loads(value[1:])\n        holds",
        ENGINE + "test_a_row_of_another_format_is_refused_and_can_be_replaced_by_force",
    ),
    Mutant(
        "(20) fields that are not known are dropped",
        "aiolock.backends.rows.lockrow",
        "content: dict[str, Any] = dict(row.extra)",
        "content: dict[str, Any] = {}",
        ENGINE + "test_unknown_fields_are_kept",
    ),
    Mutant(
        "(21) a row is read only when a notification comes",
        "aiolock.backends.rows.observer",
        "        for row in changed:\n            row.serve()\n",
        "",
        ENGINE + "test_a_waiter_whose_notification_was_lost_finds_its_grant_by_polling",
    ),
    Mutant(
        "(15) a block of tokens begins below those that a lost row has given",
        "aiolock.backends.rows.lockrow",
        "if last else top",
        "if True else top",
        LIVENESS + "test_tokens_rise_above_the_row_the_client_and_the_store",
    ),
    Mutant(
        "a lost race counts as silence of the server",
        "aiolock.backends.rows.claim",
        "if not wait or not entering.lost_races:",
        "if True:",
        ENGINE + "test_a_lost_race_is_no_silence",
    ),
    Mutant(
        "who has lost races for a command timeout does not hear that it got in",
        "aiolock.backends.rows.claim",
        "                entering.future.add_done_callback(lambda _: self.inbox.wake(WakeReason.ANSWERED))\n",
        "",
        ENGINE + "test_a_lost_race_is_no_silence",
    ),
    Mutant(
        "those who lose races pause no longer the more there are",
        "aiolock.backends.rows.writer",
        "unit=max(took, SHORTEST_PAUSE))",
        "unit=SHORTEST_PAUSE)",
        ENGINE + "test_a_crowd_that_asks_at_once_gets_in_by_few_attempts_each",
    ),
    Mutant(
        "a release waits behind a request that lost races",
        "aiolock.backends.rows.writer",
        "            settle(self._end_pause, None)\n",
        "            pass\n",
        ENGINE + "test_a_release_does_not_wait_behind_requests_that_lost_races",
    ),
    Mutant(
        "an answer that was overtaken proves a loss",
        "aiolock.backends.rows.writer",
        "if flight.order <= self._newest_answer or flight.connection",
        "if flight.connection",
        ENGINE + "test_an_answer_that_was_overtaken_proves_no_loss",
    ),
    Mutant(
        "a symbolic link to the file may be turned",
        "aiolock.backends.sqlite.connection",
        "else [*beside, given]",
        "else beside",
        "tests/backends/sqlite/test_files.py::"
        "test_a_symbolic_link_that_is_turned_leads_every_client_to_the_same_file[True-directory]",
    ),
    Mutant(
        "a copy that is put over the file leaves the holds in it alone",
        "aiolock.backends.sqlite.store",
        "if replaced:",
        "if False:",
        "tests/backends/sqlite/test_locks.py::"
        "test_a_file_that_goes_away_costs_its_holders_their_locks_within_a_renewal[a copy]",
    ),
    Mutant(
        "(5) a version is good on another connection than the one that read it",
        "aiolock.backends.memcached.store",
        "int(generation) != connection.generation",
        "not generation",
        MEMCACHED + "test_a_version_is_good_on_the_connection_only_that_read_it",
    ),
    Mutant(
        "an item expires within the last second of its ttl, when the server skips one",
        "aiolock.backends.memcached.protocol",
        "seconds = ceil(ttl) + 2",
        "seconds = ceil(ttl) + 1",
        MEMCACHED + "test_a_row_lives_for_its_ttl_when_the_clock_of_the_server_skips_a_second",
    ),
    Mutant(
        "an insertion replaces what is there",
        "aiolock.backends.memcached.protocol",
        'else "ME"',
        'else "MS"',
        MEMCACHED + "test_an_insertion_sees_the_rows_of_other_clients",
    ),
    Mutant(
        "(5) a version of etcd is good on another connection than the one that read it",
        "aiolock.backends.etcd.store",
        "int(connected) != generation",
        "not generation",
        ETCD + "test_a_version_is_good_on_the_connection_only_that_read_it",
    ),
    Mutant(
        "(7) the key of a session is written with a lease that was granted long ago",
        "aiolock.backends.etcd.leases",
        "if not self._lasts(lease, ttl):",
        "if not lease.id:",
        LEASES + "test_heartbeats_are_written_with_leases_that_are_never_renewed",
    ),
    Mutant(
        "an insertion into etcd replaces what is there",
        "aiolock.backends.etcd.store",
        "txn([unchanged(edit.key, revision)], [change, *notes])",
        "txn([unchanged(edit.key, revision)] if revision else [], [change, *notes])",
        ETCD + "test_an_insertion_sees_the_rows_of_other_clients",
    ),
    Mutant(
        "a row of etcd lives on a lease that ends before its ttl",
        "aiolock.backends.etcd.leases",
        "return lease.until >= self._clock() + min(ttl, LONGEST)",
        "return lease.until >= self._clock()",
        LEASES + "test_heartbeats_are_written_with_leases_that_are_never_renewed",
    ),
    Mutant(
        "a document of MongoDB is replaced whatever its version",
        "aiolock.backends.mongodb.store",
        'condition = {"_id": edit.key, "v": edit.expected}',
        'condition = {"_id": edit.key, **({} if edit.expected else {"v": ""})}',
        MONGODB + "test_a_row_is_written_only_against_its_version",
    ),
    Mutant(
        "a write to MongoDB waits for no majority",
        "aiolock.backends.mongodb.store",
        'DURABLE = {"w": "majority", "j": True}',
        'DURABLE = {"w": 1}',
        MONGODB + "test_a_write_waits_for_the_journals_of_a_majority_and_carries_no_number_of_a_retry",
    ),
    Mutant(
        "a read from MongoDB is not linearizable",
        "aiolock.backends.mongodb.store",
        'LINEARIZABLE = {"level": "linearizable"}',
        'LINEARIZABLE = {"level": "majority"}',
        MONGODB + "test_a_batch_of_reads_is_one_request",
    ),
    Mutant(
        "(5) a write to MongoDB that a lost connection has overtaken counts",
        "aiolock.backends.mongodb.connection",
        "if write and losses != self._losses:",
        "if False:",
        MONGODB + "test_a_write_during_which_a_connection_is_lost_raises_and_a_read_does_not",
    ),
    Mutant(
        "a collection of MongoDB that was dropped is empty",
        "aiolock.backends.mongodb.store",
        "        if mark is None:\n            raise",
        "        if mark is None:\n            return\n            raise",
        MONGODB + "test_a_collection_that_is_dropped_is_told_until_a_client_is_opened",
    ),
    Mutant(
        "tokens do not follow the writes of a replica set",
        "aiolock.backends.mongodb.store",
        "min(32 * time.inc, (1 << 22) - 1)",
        "0",
        MONGODB + "test_ticks_rise_with_each_write_and_over_deletions",
    ),
    Mutant(
        "tokens do not follow the writes at the server",
        "aiolock.backends.memcached.store",
        "+ TOKENS * int(answer.cas)",
        "",
        MEMCACHED + "test_ticks_rise_with_each_write_at_the_server",
    ),
    Mutant(
        "(20) rows of an unknown format are not named",
        "aiolock.backends.rows.backend",
        "if self._opened:",
        "if False:",
        ENGINE + "test_rows_of_another_format_are_listed_and_diagnosed",
    ),
    Mutant(
        "a release by force under a token ends whatever is there by then",
        "aiolock.backends.rows.backend",
        "ForceOne(owner)",
        "Force()",
        ENGINE + "test_a_hold_that_ends_between_the_look_and_its_release_by_force_costs_the_next_nothing",
    ),
    Mutant(
        "a kept lock has the token of its last holder",
        "aiolock.backends.rows.rules",
        "return not self.kept and first <= token <= last",
        "return first <= token <= last",
        "tests/contract/test_inspection.py::test_a_release_by_force_under_a_token_ends_that_hold_alone[memory]",
    ),
    Mutant(
        "(20) a lock of an unknown format is not listed",
        "aiolock.backends.rows.backend",
        "sorted(used | unknown)",
        "sorted(used)",
        ENGINE + "test_rows_of_another_format_are_listed_and_diagnosed",
    ),
    Mutant(
        "(20) a row of an unknown format is replaced unnoticed",
        "aiolock.backends.rows.writer",
        "isinstance(each.step, Force) or result\n",
        "result\n",
        ENGINE + "test_a_row_of_another_format_is_refused_and_can_be_replaced_by_force",
    ),
    # Transactions of callers.
    Mutant(
        "a hold is confirmed by a row that is not locked",
        "aiolock.backends.postgresql.confirmation",
        'statements("share_free"), claim.key',
        'statements("share_free").replace(" FOR SHARE SKIP LOCKED", ""), claim.key',
        CONFIRMATION + "test_no_other_client_enters_before_the_commit",
    ),
    Mutant(
        "a hold is confirmed although the row does not show it",
        "aiolock.backends.rows.claim",
        "return self._hold_in(value) is not None",
        "return True",
        CONFIRMATION + "test_a_hold_of_another_client_is_not_taken_for_its_own",
    ),
    Mutant(
        "a hold is confirmed in a transaction that writes nothing",
        "aiolock.backends.sqlite.confirmation",
        'LOCK = "UPDATE main.aiolock SET version = version WHERE 0"',
        'LOCK = "SELECT 1"',
        "tests/backends/sqlite/test_confirmation.py::test_a_transaction_that_only_reads_is_made_one_that_writes",
    ),
    Mutant(
        "any transaction counts as the one that has the lock",
        "aiolock.backends.postgresql.transaction_lock",
        'return found not in {None, "0"}',
        "return True",
        LENDING + "test_looking_back_does_not_disturb_the_next_transaction",
    ),
    Mutant(
        "a lock on another server counts",
        "aiolock.backends.postgresql.caller",
        'here["place"] != there["place"]',
        'not here["place"]',
        LENDING + "test_another_server_or_database_is_noticed_before_anything_is_locked",
    ),
    Mutant(
        "a wait that was given up keeps what it got",
        "aiolock.backends.postgresql.caller",
        'f"ROLLBACK TO SAVEPOINT {name}; RELEASE SAVEPOINT {name}"',
        'f"RELEASE SAVEPOINT {name}"',
        LENDING + "test_work_of_the_transaction_stays_when_the_wait_is_over",
    ),
    Mutant(
        "a row that is locked holds up the other rows",
        "aiolock.backends.postgresql.store",
        "                if code == LOCKED and len(edits) == 1:\n"
        "                    # Nearly always by another writer, whose version comes first.\n"
        "                    return [None]\n",
        "                if code == LOCKED:\n                    return [None] * len(edits)\n",
        STORE + "test_a_row_that_a_transaction_keeps_locked_is_not_written_and_holds_up_no_other",
    ),
    Mutant(
        "(21) a notification without room keeps a write that has met a locked row from being made",
        "aiolock.backends.postgresql.store",
        "elif code == NO_ROOM_TO_NOTIFY and any(",
        "elif code == NO_ROOM_TO_NOTIFY and not skip and any(",
        STORE + "test_a_locked_row_and_a_notification_without_room_cost_no_other_edit",
    ),
)

CONTROL = Mutant("a harmless change", "aiolock.core.renewal", "CHECK_EVERY = 0.25\n", "CHECK_EVERY = 0.2\n")
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
    if mutant.check in {"schedules", QUORUM, ROWS}:
        from tests.simulation import quorum, rows, world

        logging.disable()
        kind = {QUORUM: quorum.QuorumWorld, ROWS: rows.RowWorld}.get(mutant.check, world.World)
        seeds = range(mutant.begin, mutant.begin + SEEDS)
        return next(iter(world.explore(seeds, world=kind).violations), None)
    import pytest

    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        status = pytest.main(["-q", "-x", "-p", "no:cacheprovider", *IMPORTED, str(ROOT / mutant.check)])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"{mutant.check} did not run: {status!r}")
    return f"{mutant.check} failed" if status else None


def _process(mutant: Mutant) -> tuple[bool, str, float]:
    """Check in a forked process, which need not import again what is not ours."""
    start, limit = time.monotonic(), int(PATIENCE * pace())
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(write, 1)
        os.dup2(write, 2)
        signal.alarm(limit)
        status = 1
        try:
            complaint = check(mutant)
            print(complaint or "nothing was noticed", flush=True)
            status = CAUGHT if complaint else 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read, errors="replace") as told:
        lines = told.read().strip().splitlines()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status == -signal.SIGALRM:
        return False, f"did not end within {limit} s", time.monotonic() - start
    return status == CAUGHT, (lines or ["died without a word"])[-1], time.monotonic() - start


def hunt(mutants: tuple[Mutant, ...] = MUTANTS) -> list[str]:
    """Run every check in a process of its own and print the table; the names of those that were missed."""
    for name in FOREIGN:
        importlib.import_module(name)
    missed = []
    for mutant in mutants:
        caught, told, took = _process(mutant)
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
