"""The runs of the model of the Redis hand-off: each guard that is removed, with the promise that breaks, and the design."""

from __future__ import annotations

from typing import Any

from tests.model.explore import Run
from tests.model.handoff import ANSWERS, COMMANDS, MESSAGES, Handoff
from tests.model.redis_server import Change
from tests.model.replicas import Replicated

__all__ = ["DESIGN", "REMOVALS"]

ONCE, TWICE, THREE = (1, 1), (2, 2), (1, 1, 1)
"""How often the program of each client locks."""

FREE_PATH = "if not f[1] and f[4] == f[5] and not f[6] then"
EXPIRED = "(f[1] and tonumber(f[2]) <= now)"
GIVEN_AGAIN: Change = ("", "published = reached and top or published", "")
UNCOUNTED: tuple[Change, ...] = (
    ("", "redis.pcall('PUBSUB', 'NUMSUB', to .. subscription)[2]", "1"),
    GIVEN_AGAIN,
)
"""The scripts up to format 5: a grant is published first, and taken back where nobody received it; its token is given again."""
ALWAYS: tuple[Change, ...] = (("", "subscribed\n    and string.format(", "string.format("),)
"""A message names a token also where the subscribers are not counted."""
ANYWHERE = ("after connecting", "after subscribing")
"""Clients up to format 5: messages count wherever they come from."""


def without(
    name: str,
    rule: str,
    breaks: str,
    turns: tuple[int, ...] = ONCE,
    *,
    scripts: tuple[Change, ...] = (),
    client: tuple[str, ...] = (),
    fair: int = 0,
    deep: bool = False,
    model: type[Handoff] = Handoff,
    **options: Any,
) -> Run:
    """Return a run with these changes of the scripts, and without these rules of the client."""
    options = {"ticks": 5, "changes": scripts, "removed": client, **options}
    return Run(name, rule, breaks, turns, model, fair, deep, options)


REMOVALS = (
    # The scripts.
    without(
        "release: owner",
        "release compares the owner",
        "TAKEN",
        TWICE,
        scripts=(("release", "if f[1] ~= ARGV[1] then return -2 end", "if not f[1] then return -2 end"),),
        faults={"slow": 1},
    ),
    without(
        "leave: owner",
        "leave compares the owner",
        "TAKEN",
        scripts=(
            ("leave", "local window = f[1] == request and 0 or -2\n", "local window = 0\n"),
            ("leave", "elseif f[1] == request then", "elseif f[1] then"),
        ),
        faults={"cut": 1, "slow": 1},
    ),
    without(
        "renew: owner",
        "renew compares the owner",
        "EXCLUSION",
        scripts=(("renew", "if f[1] == request then", "if f[1] then"),),
        faults={"force": 1, "lose": 1},
        ticks=7,
    ),
    without(
        "enter: owner",
        "a lock is free only without an owner",
        "TAKEN",
        scripts=(("enter", FREE_PATH, "if f[4] == f[5] and not f[6] then"),),
    ),
    without(
        "enter: queue",
        "... and without a queue",
        "ORDER",
        THREE,
        scripts=(("enter", FREE_PATH, "if (not f[1] or tonumber(f[2]) <= now) and not f[6] then"),),
        faults={"crash": 1},
        ticks=4,
    ),
    without(
        "enter: tombstone",
        "a request that was given up changes nothing",
        "LATE",
        scripts=(
            ("enter", FREE_PATH, "if not f[1] and f[4] == f[5] then"),
            ("enter", "if f[6] then return {0, -1", "if false then return {0, -1"),
        ),
        faults={"cut": 1, "slow": 1},
    ),
    without(
        "leave: tombstone",
        "... because leave marks it",
        "LATE",
        scripts=(("leave", "if ARGV[3] == '1' then", "if ARGV[3] == '2' then"),),
        faults={"cut": 1, "slow": 1},
    ),
    without(
        "enter: end",
        "enter ends a hold only after its end",
        "TAKEN",
        scripts=(
            ("enter", "(not f[1] or tonumber(f[2]) <= now)", "(not f[1] or tonumber(f[2]) <= now + 1000000)"),
        ),
        faults={"stop": 1},
    ),
    without(
        "heartbeat: end",
        "... and so does heartbeat",
        "TAKEN",
        scripts=(("heartbeat", EXPIRED, "(f[1] and tonumber(f[2]) <= now + 1000000)"),),
        faults={"stop": 1},
    ),
    without(
        "heartbeat: goes on",
        "heartbeat replaces a holder whose time is over",
        "STUCK",
        scripts=(("heartbeat", f"if {EXPIRED} or (not f[1] and f[3] ~= f[4]) then", "if false then"),),
        faults={"crash": 1},
        fair=1,
    ),
    without(
        "enter: full ttl",
        "asking again for one's own grant gives it a full ttl",
        "TAKEN",
        scripts=(
            (
                "enter",
                "    redis.call('HSET', KEYS[1], 'until', now + ARGV[2] * 1000, 'provisional', 0)\n",
                "",
            ),
        ),
        faults={"lose": 1, "stop": 1},
        ticks=8,
    ),
    without(
        "heartbeat: gone",
        "heartbeat reports that a position is gone, so that a lost message is made up for",
        "STUCK",
        scripts=(
            (
                "heartbeat",
                "if broken or handed or tonumber(counted or 0) < tonumber(ARGV[4 + i]) then",
                "if broken then",
            ),
        ),
        faults={"lose": 1},
        fair=1,
    ),
    without(
        "leave: position",
        "leave removes the position",
        "STUCK",
        scripts=(
            (
                "leave",
                "  remove_position(1, f[4], request, mine, redis.call('HGET', KEYS[1], 'p:' .. mine) or '')\n",
                "",
            ),
        ),
        faults={"cancel": 1},
        fair=1,
    ),
    without(
        "tokens: last",
        "a token is above the last one that was given",
        "TOKEN",
        scripts=(("", "math.max(now, (stored or 0) + 1, floor + 1)", "math.max(now, floor + 1)"),),
    ),
    without(
        "tokens: block",
        "... and so is the first of a block",
        "TOKEN",
        TWICE,
        scripts=(("", "return math.max(stored, floor, top - most) + 1, top", "return top - most + 1, top"),),
    ),
    without(
        "tokens: floor",
        "tokens are above the highest that a client has seen, when old data come back",
        "TOKEN",
        TWICE,
        scripts=(
            ("", "math.max(now, (stored or 0) + 1, floor + 1)", "(stored or now) + 1"),
            ("", "math.max(stored, floor, top - most)", "math.max(stored, top - most)"),
        ),
        faults={"restart": 2},
        ticks=3,
    ),
    without(
        "rewind",
        "a hold ends a ttl from now when the clock was set back",
        "STUCK",
        scripts=(("", "if not ttl or ends - now <= ttl * 1000 then return ends end", "do return ends end"),),
        faults={"back": 1, "crash": 1},
        fair=1,
    ),
    without(
        "leave: keep",
        "a lock that is kept is granted to none",
        "KEEP",
        scripts=(("leave", "if f[1] == request and ARGV[4] ~= '0' then", "if false then"),),
        faults={"keep": 1},
    ),
    # The client.
    without(
        "client: from the sending",
        "a hold counts from the sending of its request",
        "TAKEN",
        client=("from the sending",),
        faults={"slow": 1, "stop": 1},
        ticks=7,
    ),
    without(
        "client: age",
        "a pushed grant is believed only if its age is known",
        "TOLD",
        (2, 1),
        client=("of a credible age",),
        faults={"stop": 1},
        ticks=2,
        grain=1,
    ),
    without(
        "client: window, confirms",
        "a pushed grant is believed for its window, and is confirmed",
        "TAKEN",
        THREE,
        client=("confirms", "for the window"),
        faults={"stop": 1},
        ticks=7,
    ),
    without(
        "client: tombstone",
        "leave names a request that may still arrive",
        "LATE",
        client=("tombstone",),
        faults={"cut": 1, "slow": 1},
    ),
    without(
        "client: remembers a loss",
        "a loss that is reported before the grant makes that grant none",
        "EXCLUSION",
        client=("remembers a loss",),
        faults={"force": 1, "slow": 1},
    ),
    without(
        "client: empties the inbox",
        "a grant that was both pushed and answered leaves nothing in the inbox",
        "UNHEARD",
        client=("empties the inbox",),
        faults={"ask": 1},
        slow=(0, ANSWERS | MESSAGES),
        ticks=2,
    ),
    without(
        "client: not while it holds",
        "... and none is pushed to a hold that is in use",
        "UNHEARD",
        client=("not while it holds",),
        faults={"ask": 1, "late": 1},
        slow=(0, ANSWERS | MESSAGES),
        ticks=2,
    ),
    # Two servers.
    without(
        "format 5",
        "whether a waiter can be reached is asked before it is granted the lock, and messages count only from the server of the commands",
        "TOLD with equal tokens",
        (2, 1),
        scripts=UNCOUNTED,
        client=ANYWHERE,
        feeds=(0, 1),
        grain=1,
        ticks=0,
    ),
    without(
        "format 5, after a failover",
        "... also where the subscription was left behind",
        "TOLD",
        THREE,
        scripts=UNCOUNTED,
        client=ANYWHERE,
        faults={"switch": 1},
    ),
    without(
        "push: names no token",
        "where subscribers are not counted, a message names no token",
        "TOLD:",
        (2, 1),
        scripts=ALWAYS,
        client=ANYWHERE,
        feeds=(0, 1),
        counts=False,
        grain=1,
        ticks=0,
    ),
    without(
        "serve: published",
        "a token that was published is used up",
        "TOLD with equal tokens",
        (2, 1),
        scripts=(*ALWAYS, GIVEN_AGAIN),
        client=ANYWHERE,
        feeds=(0, 1),
        counts=False,
        grain=1,
        ticks=0,
    ),
    without(
        "client: after connecting",
        "a message counts only from the server of the commands: an earlier primary may go on",
        "EXCLUSION",
        (2, 1),
        client=("after connecting",),
        deep=True,
        faults={"split": 1, "slow": 1},
        slow=(COMMANDS, 0),
        ticks=0,
    ),
    without(
        "client: a channel for each subscription",
        "without INFO, a client counts its present subscription alone: the server may not have noticed the end of an earlier one",
        "EXCLUSION",
        (2, 1),
        client=("a channel for each subscription",),
        deep=True,
        faults={"split": 1, "slow": 1},
        slow=(COMMANDS, 0),
        ghosts=(None, 1),
        info=False,
        ticks=0,
    ),
    without(
        "client: after subscribing",
        "... whichever connection came up last",
        "EXCLUSION",
        (2, 1),
        client=("after subscribing",),
        deep=True,
        faults={"split": 1, "astray": 1, "slow": 1},
        slow=(COMMANDS, 0),
        ticks=0,
    ),
    # A replica that lags.
    without(
        "replicas: none",
        "a failover loses writes: without replicas= two are inside",
        "TOLD",
        faults={"switch": 1},
        model=Replicated,
        ticks=0,
        replicas=False,
    ),
    without(
        "replicas: after the answers",
        "a barrier is sent after the answers that it covers",
        "TOLD",
        client=("after the answers",),
        faults={"switch": 1},
        model=Replicated,
        grain=0,
        ticks=0,
    ),
    without(
        "replicas: one server",
        "... at the server that gave them",
        "TOLD",
        client=("one server",),
        faults={"split": 1},
        model=Replicated,
        ticks=0,
    ),
    without(
        "replicas: renewals wait",
        "a renewal counts after a barrier",
        "TAKEN",
        client=("renewals wait",),
        faults={"switch": 1},
        model=Replicated,
        ticks=3,
    ),
    without(
        "replicas: pushes only wake",
        "a grant that was pushed is entered after its confirmation and a barrier",
        "TOLD",
        (2, 2),
        client=("pushes only wake",),
        faults={"switch": 1, "cancel": 1},
        model=Replicated,
        ticks=1,
    ),
    without(
        "replicas: remembers a loss until then",
        "a loss that is reported before the barrier makes the grant none",
        "TOLD",
        client=("remembers a loss until then",),
        faults={"force": 1},
        model=Replicated,
        ticks=0,
    ),
)


def design(
    name: str,
    turns: tuple[int, ...] = ONCE,
    *,
    fair: int = 5,
    model: type[Handoff] = Handoff,
    **options: Any,
) -> Run:
    """Return a run with all rules."""
    return Run(name, "all rules", "", turns, model, fair, options=options)


def confirmed(name: str, turns: tuple[int, ...] = ONCE, *, fair: int = 0, **options: Any) -> Run:
    """Return a run with all rules and a replica that lags; what a failover loses stays until its ttl, so few schedules are fair."""
    return design(name, turns, fair=fair, model=Replicated, **options)


DESIGN = (
    design("no fault, every message on its own", grain=0, ticks=3),
    design("no fault, answers and messages on their own", TWICE, grain=1, ticks=4),
    design("three clients", (2, 1, 1), ticks=4),
    design("slow, cut, cancel", faults={"slow": 1, "cut": 1, "cancel": 1}),
    design("two slow channels, repeated requests", faults={"slow": 2, "late": 1}, ticks=5),
    design("lost messages", (1, 2), faults={"lose": 2}, ticks=8),
    design("a subscription ends, a message is lost", faults={"subscription": 1, "lose": 1}),
    design("crash, a message is lost", TWICE, faults={"crash": 1, "lose": 1}, ticks=8),
    design("crash, three clients", THREE, faults={"crash": 1}),
    design("stop, a message is lost", (1, 2), faults={"stop": 1, "lose": 1}, ticks=9),
    design("stop, three clients", THREE, faults={"stop": 1}),
    design("stop, cut, slow", faults={"stop": 1, "slow": 1, "cut": 1}),
    design("stop, answers and messages on their own", (2, 1), fair=0, grain=1, faults={"stop": 1}, ticks=2),
    design("crash, slow: what a dead client sent is late", (1, 2), faults={"crash": 1, "slow": 1}, ticks=7),
    design("force, a message is lost", TWICE, faults={"force": 1, "lose": 1}, ticks=7),
    design("force, slow, cut", faults={"force": 1, "slow": 1, "cut": 1}),
    design("force, answers and messages on their own", grain=1, faults={"force": 1, "late": 1}, ticks=3),
    design("ask, late, answers and messages on their own", grain=1, faults={"ask": 1, "late": 1}, ticks=3),
    design("keep, cut, slow", faults={"keep": 1, "cut": 1, "slow": 1}),
    design("hand-overs inside", (2, 1), others=2),
    design("the clock is set back, crash", faults={"back": 1, "crash": 1}),
    design("the clock is set back, stop", faults={"back": 1, "stop": 1}, ticks=7),
    design("clocks a per cent apart, stop", rates=(0.99, 1.01), faults={"stop": 1, "lose": 1}, ticks=8),
    design("tries beside waits, slow", TWICE, tries=True, faults={"slow": 1}, ticks=4),
    design("restart with old data", TWICE, fair=0, faults={"restart": 2}, ticks=5),
    design("a subscription ends, cut, slow", faults={"subscription": 1, "cut": 1, "slow": 1}, ticks=5),
    design(
        "everything is late: cut, cancel, slow", grain=2, faults={"cut": 1, "cancel": 1, "slow": 1}, ticks=4
    ),
    design("subscribed at a replica", THREE, feeds=(0, 1, 0), ticks=4),
    design("failover, three clients", THREE, faults={"switch": 1}, ticks=4),
    design("failover, slow", faults={"switch": 1, "slow": 1}),
    design("failover, answers and messages on their own", grain=1, faults={"switch": 1}, ticks=3),
    design("failover, subscribed at a replica", faults={"switch": 1, "subscription": 1, "astray": 1}),
    design("failover, the primary goes on, three clients", THREE, faults={"split": 1}, ticks=4),
    design("failover, the primary goes on, slow", faults={"split": 1, "slow": 1}),
    design("failover, the primary goes on, on their own", grain=1, faults={"split": 1}, ticks=3),
    design("failover, the primary goes on, astray", faults={"split": 1, "subscription": 1, "astray": 1}),
    design("failover without INFO, astray", info=False, faults={"switch": 1, "subscription": 1, "astray": 1}),
    design("the primary goes on, without INFO", THREE, info=False, faults={"split": 1}, ticks=4),
    design(
        "the primary goes on, without INFO, astray",
        info=False,
        faults={"split": 1, "subscription": 1, "astray": 1},
    ),
    design(
        "the primary goes on, without INFO, still counted at the other",
        (2, 1),
        info=False,
        faults={"split": 1, "slow": 1},
        slow=(COMMANDS, 0),
        ghosts=(None, 1),
        ticks=0,
    ),
    design("subscribers are not counted", counts=False, faults={"switch": 1, "lose": 1}),
    design("subscribers are not counted, at a replica", THREE, counts=False, feeds=(0, 1, 0), ticks=4),
    design("the primary goes on, not counted", THREE, counts=False, faults={"split": 1}, ticks=4),
    design("write locks, three clients", THREE, family="many_", ticks=4),
    design("write locks, slow, cut, cancel", family="many_", faults={"slow": 1, "cut": 1, "cancel": 1}),
    design("write locks, force, slow", family="many_", faults={"force": 1, "slow": 1}),
    design("write locks, failover", THREE, family="many_", faults={"switch": 1}, ticks=4),
    design("write locks, the primary goes on", family="many_", faults={"split": 1, "slow": 1}, ticks=4),
    confirmed("replicas, no fault", fair=5, ticks=4),
    confirmed("replicas, two turns, too few", TWICE, fair=5, faults={"few": 1}, ticks=4),
    confirmed("replicas, failover", TWICE, faults={"switch": 1}, ticks=5),
    confirmed("replicas, failover, three clients", THREE, faults={"switch": 1}, ticks=4),
    confirmed("replicas, failover, too few, cancel", faults={"switch": 1, "few": 1, "cancel": 1}, ticks=5),
    confirmed("replicas, failover, slow", faults={"switch": 1, "slow": 1}, ticks=5),
    confirmed("replicas, failover, stop", faults={"switch": 1, "stop": 1}, ticks=7),
    confirmed("replicas, failover, force", faults={"switch": 1, "force": 1}, ticks=5),
    confirmed("replicas, failover, cut, slow", faults={"switch": 1, "cut": 1, "slow": 1}, ticks=4),
    confirmed("replicas, failover, messages are lost", (2, 1), faults={"switch": 1, "lose": 2}, ticks=5),
    confirmed("replicas, failover, on their own", grain=1, faults={"switch": 1}, ticks=3),
    confirmed("replicas, the primary goes on", TWICE, faults={"split": 1}, ticks=5),
    confirmed("replicas, the primary goes on, slow", faults={"split": 1, "slow": 1}, ticks=5),
    confirmed("replicas, the primary goes on, three clients", THREE, faults={"split": 1}, ticks=4),
    confirmed("replicas, write locks, failover", family="many_", faults={"switch": 1}, ticks=5),
)
