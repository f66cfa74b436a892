"""The runs of the model: each removed rule with the promise that breaks without it, and the design with all its rules."""

from __future__ import annotations

from typing import Any

from tests.model.explore import Run
from tests.model.lives import LivesModel
from tests.model.rows import Claim, Model

__all__ = ["DESIGN", "REMOVALS"]

ONCE = (Claim(),)
TWICE = (Claim(), Claim())
TWO = ((ONCE,), (ONCE,))
"""Two clients, one lock, a mutex each."""
ALONE = ((ONCE,), ((),))
"""One client with a claim, for leaks that need no other."""
BOTH = ((ONCE, ONCE), (ONCE, ONCE))
"""Two clients and two locks under one session each."""
KEEPS = (((Claim(keep=2),),), (ONCE,))
"""A client that releases with keep, and another one."""
KEPT_TWICE = (((Claim(keep=3),),), (TWICE,))
"""... where the other one tries again, if a reboot ends its first claim."""
BLOCKS = (((Claim(block=2), Claim()),), (ONCE,))
"""A client that takes blocks of tokens."""
READERS = (((Claim("write"),),), ((Claim("read"),),), ((Claim("read"),),))
PERMITS = tuple(((Claim("permits"),),) for _ in range(3))
"""Three clients and a semaphore of two permits."""


def without(
    removed: str,
    rule: str,
    breaks: str,
    claims: tuple = TWO,
    *,
    fair: int = 0,
    deep: bool = False,
    **options: Any,
) -> Run:
    """Return a run without the rules ``removed``, several of them separated by ``+``."""
    rules = tuple(part.strip() for part in removed.split("+"))
    return Run(removed, rule, breaks, claims, Model, fair, deep, {"removed": rules, **options})


REMOVALS = (
    without(
        "verification",
        "(1) a renewal reads the versions of all rows in which the client holds or waits",
        "EXCLUSION",
        ttl=2,
        faults={"delete": 1},
        tokens=False,
    ),
    without(
        "every row",
        "(1) ... of all rows, not of one",
        "EXCLUSION",
        (((), ONCE), ((), ONCE)),
        ttl=2,
        faults={"force": 1},
    ),
    without(
        "until after the read",
        "(1) until rises only when a row that has changed was read",
        "EXCLUSION",
        ttl=2,
        faults={"force": 1, "late": 1},
        kinds="R",
        tokens=False,
    ),
    without(
        "read after the heartbeat",
        "(1) ... by a read that was sent after that heartbeat",
        "EXCLUSION",
        deep=True,
        ttl=2,
        faults={"force": 1, "late": 1},
        kinds="R",
        tokens=False,
    ),
    without(
        "ended + clean-up",
        "(2) what a client has ended stands in its session until its removal is known; clean-ups never give up",
        "LEAK",
        ALONE,
        faults={"broken": 1},
    ),
    without(
        "ended + check ended again",
        "(2) after an unflushed release, the id stays until a later flushed write was answered",
        "LEAK",
        ALONE,
        faults={"crash": 1},
    ),
    without(
        "check first",
        "(2) after a reconnect every ended id is checked before a write counts as the later flushed one",
        "LEAK",
        faults={"crash": 1},
    ),
    without(
        "answers of the connection",
        "(2) ... without a reconnect between the answer, as the client hears it, and that write",
        "LEAK",
        ALONE,
        faults={"stop": 1, "crash": 1},
    ),
    without(
        "until of the session",
        "(3) a grant is valid until the end of the session, not for a ttl from its own request",
        "EXCLUSION",
        deep=True,
        ttl=2,
        faults={"stop": 1},
        stops=(0,),
        clock=True,
        busy=False,
    ),
    without(
        "until of the answer",
        "(3) ... and not longer than a ttl from the sending of the request that showed it",
        "EXCLUSION",
        ttl=2,
        faults={"force": 1, "late": 1},
        kinds="W",
    ),
    without(
        "ttl of the row",
        "(4) the ttl is the one written in the session row",
        "EXCLUSION",
        faults={"stop": 1},
        ttl=(3, 2),
    ),
    without(
        "count from the arrival",
        "(4) counted from the arrival of the first answer that shows the version",
        "EXCLUSION",
        ttl=2,
        faults={"late": 1, "stop": 1},
        kinds="Q",
        stops=(0,),
    ),
    without(
        "random versions + caches",
        "(5) the writer chooses versions that never repeat; else caches are dropped on a reconnect",
        "EXCLUSION",
        ((TWICE,), (TWICE,)),
        faults={"crash": 1, "stop": 1},
        tokens=False,
    ),
    without(
        "insert first",
        "(5) an absent row is first inserted empty: a cached absence grants a token twice",
        "TOKEN",
        faults={"purge": 1},
    ),
    without(
        "insert first",
        "(5) an absent row is first inserted empty: a late insert brings a purged hold back",
        "LEAK",
        faults={"broken": 1, "purge": 1, "cancel": 1},
        kinds="W",
        tokens=False,
    ),
    without(
        "only later reads",
        "(5) only a read sent after the newest answer about a row changes what is known of it",
        "FALSE LOSS",
        faults={"late": 1},
        kinds="R",
    ),
    without(
        "purge by version",
        "(6) purge deletes by compare-and-set",
        "EXCLUSION",
        faults={"purge": 1},
        tokens=False,
    ),
    without(
        "purge of kept rows",
        "(6) purge spares a row that is kept",
        "KEEP",
        KEEPS,
        faults={"purge": 1},
        tokens=False,
    ),
    without(
        "purge after a minute",
        "(6) ... and only rows that were not used for longer than a statement takes from its tick to its write",
        "TOKEN",
        statements=True,
        faults={"late": 1, "purge": 1},
        kinds="E",
    ),
    without(
        "absence is observed",
        "(7) a missing session row is a version like any other, observed for a whole ttl",
        "EXCLUSION",
        faults={"delete session": 1},
    ),
    without(
        "ttl in the entry",
        "(7) ... for the ttl of that session, which the entry in the lock row says too",
        "KEEP",
        (((Claim(keep=3),),), (ONCE,)),
        ttl=2,
        faults={"delete session": 1},
    ),
    without(
        "heartbeat",
        "(7) a heartbeat is a compare-and-set, never an insert",
        "EXCLUSION",
        deep=True,
        ttl=2,
        faults={"stop": 1},
        stops=(0,),
    ),
    without(
        "own heartbeats",
        "(7) a client that finds any heartbeat of its own goes on from it",
        "FALSE LOSS",
        faults={"broken": 1},
        kinds="H",
    ),
    without(
        "statements end nothing",
        "(8) statements evaluated at the server never end a foreign hold",
        "EXCLUSION",
        statements=True,
        clock=True,
        busy=False,
        faults={"late": 1},
        kinds="E",
    ),
    without(
        "against what was read",
        "(8) ... and write only against the row that they have read, as a compare-and-set",
        "EXCLUSION",
        statements=True,
        faults={"late": 1},
        kinds="E",
        tokens=False,
    ),
    without(
        "names its heartbeat",
        "(18) a statement names the version of its session row",
        "LEAK",
        ALONE,
        statements=True,
        faults={"broken": 1, "cancel": 1},
        kinds="E",
    ),
    without(
        "session is locked",
        "(18) ... and locks that row until it counts: else its snapshot of it may be older",
        "LEAK",
        ALONE,
        statements=True,
        faults={"broken": 1, "cancel": 1},
        kinds="E",
    ),
    without(
        "heartbeat before the leave",
        "(18) a leave after an unanswered statement follows a heartbeat that was answered",
        "LEAK",
        ALONE,
        statements=True,
        faults={"broken": 1, "cancel": 1},
        kinds="E",
    ),
    without(
        "read after the heartbeat that rules out",
        "(18) ... and a read after that one: the statement may have counted just before",
        "LEAK",
        ALONE,
        statements=True,
        faults={"broken": 1, "cancel": 1},
        kinds="E",
    ),
    without(
        "doubt stays",
        "(18) ... also if a repetition of the statement was answered",
        "LEAK",
        ALONE,
        statements=True,
        faults={"broken": 1},
        kinds="E",
    ),
    without(
        "tick at the server",
        "(15) a statement takes the tick at the server, not the client's",
        "TOKEN",
        statements=True,
        faults={"purge": 1},
    ),
    without(
        "clock in step",
        "(9) an observer that sees the clock of the store step falls back to observation",
        "EXCLUSION",
        clock=True,
        faults={"clock": 1},
    ),
    without(
        "skew",
        "(9) a margin makes up for clocks that run at different rates",
        "EXCLUSION",
        ttl=4,
        skew=1,
        faults={"stop": 1},
        stops=(0,),
    ),
    without(
        "session of its own",
        "(12) a kept hold has a session row of its own, without heartbeats",
        "STUCK",
        KEEPS,
        fair=3,
    ),
    without(
        "ended after the keep",
        "(12) a claim that is released with keep is ended only when the write that keeps it was answered",
        "EXCLUSION",
        KEEPS,
    ),
    without(
        "keep is flushed",
        "(12) the write that keeps a lock is flushed",
        "LEAK",
        KEEPS,
        faults={"crash": 1},
        tokens=False,
    ),
    without(
        "kept over a reboot",
        "(12) a session that keeps a lock ends by its time after a reboot as well, and not with the machine",
        "KEEP",
        KEPT_TWICE,
        faults={"reboot": 1},
        clock=True,
        tokens=False,
    ),
    without(
        "tick",
        "(15) tokens begin at the clock of the store, so that they rise after a purge",
        "TOKEN",
        faults={"purge": 1},
    ),
    without(
        "leave writes",
        "(18) a leave after an unanswered step always writes",
        "LEAK",
        ALONE,
        faults={"broken": 1, "cancel": 1},
        kinds="W",
    ),
    without(
        "leave is flushed",
        "(18) ... flushed, where requests outlive a crash of the store",
        "LEAK",
        ALONE,
        faults={"broken": 1, "cancel": 1, "crash": 1},
        kinds="W",
        survive=True,
    ),
    without(
        "poll",
        "(21) a notification is a hint, polling backs it up",
        "STUCK",
        faults={"mute": 1},
        fair=3,
    ),
)

REMOVALS = (
    *REMOVALS,
    without(
        "heartbeats are proved",
        "(22) with a standby, a heartbeat that a read finds counts only when a later one was answered",
        "EXCLUSION",
        deep=True,
        ttl=2,
        clock=True,
        kinds="H",
        faults={"warned": 2, "crash": 1},
        tokens=False,
    ),
    without(
        "grants are proved",
        "(22) ... and so does a grant that a read finds",
        "EXCLUSION",
        faults={"warned": 1, "crash": 1},
        tokens=False,
    ),
)

REMOVALS = (
    *REMOVALS,
    without(
        "heartbeats are proved",
        "(22) ... where others see each write before it is flushed as well",
        "EXCLUSION",
        deep=True,
        ttl=2,
        clock=True,
        kinds="H",
        faults={"shown": 2, "crash": 1},
        tokens=False,
    ),
    without(
        "grants are proved",
        "(22) ... and so does a grant that a read finds there",
        "EXCLUSION",
        faults={"shown": 1, "crash": 1},
        tokens=False,
    ),
    without(
        "own heartbeats",
        "(23) a write that is refused may have counted: its transaction was said to be undone, and the store has repeated it",
        "FALSE LOSS",
        faults={"undone": 1},
        kinds="H",
    ),
    without(
        "rolled back first",
        "(23) the store ends a transaction that has failed before it repeats a part of it, or begins another one",
        "LEAK",
        ALONE,
        faults={"undone": 1, "cancel": 1},
        kinds="W",
    ),
    without(
        "singly",
        "(24) each write is a statement of its own where a server may undo the beginning of a transaction and go on",
        "EXCLUSION",
        faults={"undone": 1},
        kinds="W",
        tokens=False,
    ),
)

LIVES = tuple(
    Run(rule, f"(12) another life of a hold: {rule}", "BELIEF", (), LivesModel, options={"removed": (rule,)})
    for rule in (
        "the server ignores older requests",
        "a renewal prolongs nothing that was extended",
        "an earlier end counts at once",
        "only the answer to the last request counts",
        "a life counts from the sending of its request",
    )
)
REMOVALS = (*REMOVALS, *LIVES)


def design(name: str, claims: tuple = TWO, *, fair: int = 0, **options: Any) -> Run:
    """Return a run with all rules."""
    return Run(name, "all rules", "", claims, Model, fair, options=options)


DESIGN = (
    design("a client is stopped", fair=50, faults={"stop": 1}),
    design("purge, a late write, a cancelled claim", faults={"broken": 1, "purge": 1, "cancel": 1}, fair=100),
    design("blocks of tokens, purge, stop", BLOCKS, faults={"purge": 1, "stop": 1}),
    design("crash, requests outlive it", faults={"broken": 1, "crash": 1, "cancel": 1}, survive=True),
    design("a session row is deleted", faults={"delete session": 1, "stop": 1}, fair=100),
    design("sessions of different ttl", faults={"delete session": 1, "stop": 1}, ttl=(3, 2)),
    design("a lock row is deleted", faults={"delete": 1, "stop": 1}, fair=100),
    design("release by force, late writes and reads", faults={"force": 1, "late": 1}, kinds="WR"),
    design("late heartbeats and observations, stop", faults={"stop": 1, "late": 1}, kinds="HQD", stops=(0,)),
    design(
        "clock of the store, idle clients", faults={"stop": 1, "broken": 1}, kinds="H", clock=True, busy=False
    ),
    design("the clock of the store steps", faults={"clock": 1, "stop": 1}, clock=True),
    design("an observer's clock is fast", ttl=4, skew=1, margin=1, faults={"stop": 1}, fair=100),
    design("keep, crash, broken connection", KEEPS, faults={"crash": 1, "broken": 1}, fair=100),
    design("keep, stop, purge", KEEPS, faults={"stop": 1, "purge": 1}, fair=100),
    design("keep, reboot", KEPT_TWICE, faults={"reboot": 1, "stop": 1}, clock=True, fair=100),
    design("a reboot while claims wait", ((TWICE,), (TWICE,)), faults={"reboot": 1}, clock=True, fair=100),
    design("keep, a session row is deleted", KEEPS, faults={"delete session": 1, "late": 1}),
    design("permits, stop", PERMITS, faults={"stop": 1}, fair=200),
    design("permits, force, crash", PERMITS, faults={"force": 1, "crash": 1}),
    design("a writer and two readers, stop", READERS, faults={"stop": 1}),
    design("two locks, crash, broken connection", BOTH, faults={"crash": 1, "broken": 1}, fair=200),
    design("two locks, force, stop", BOTH, faults={"force": 1, "stop": 1}),
    design("statements, stop", faults={"stop": 1}, statements=True, fair=50),
    design(
        "statements, crash, requests outlive it",
        faults={"broken": 1, "crash": 1, "cancel": 1},
        survive=True,
        statements=True,
    ),
    design("statements, purge, late", faults={"purge": 1, "late": 1, "cancel": 1}, statements=True),
    design(
        "statements, a session row is deleted", faults={"delete session": 1, "broken": 1}, statements=True
    ),
    design("statements, a writer and two readers", READERS, faults={"broken": 1}, statements=True),
    design("statements, permits", PERMITS, faults={"broken": 1}, statements=True),
    design("statements, keep", KEEPS, faults={"stop": 1, "crash": 1}, statements=True),
    Run("other lives of a hold, late, lost and repeated", "all rules", "", (), LivesModel),
    design("a standby takes over, warned writes", faults={"warned": 2, "crash": 1}, clock=True, fair=100),
    design(
        "each write is shown before it is flushed",
        faults={"shown": 1, "crash": 1, "stop": 1},
        clock=True,
        fair=100,
    ),
    design(
        "each write is shown before it is flushed, force, a broken connection",
        faults={"shown": 1, "crash": 1, "force": 1, "broken": 1},
    ),
    design("each write is shown before it is flushed, keep", KEEPS, faults={"shown": 1, "crash": 1}),
    design(
        "transactions are undone, late writes, a cancelled claim",
        faults={"undone": 2, "late": 1, "cancel": 1},
        kinds="WHD",
        fair=100,
    ),
    design("transactions are undone, keep, crash", KEEPS, faults={"undone": 1, "crash": 1}, fair=100),
    design(
        "a standby takes over, statements, force",
        faults={"warned": 1, "crash": 1, "force": 1},
        statements=True,
    ),
)
