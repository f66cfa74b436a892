"""The rounds of a barrier as pure functions over its document: who is inside, who is alive, and how a round ended.

A round ends in one of two ways. It is *passed* when all parties are inside and then every client that has some has
written once more: who died before the last one came does not answer this roll call, and a party of yesterday is not
counted today. It is *broken* when a party gives up, or when others see for its ttl that its beat does not change. Either
way the next round begins. Who watches measures by its own clock, so nobody's clock has to be right.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from aiolock.errors import ConfigError, shorten

__all__ = [
    "MISSED",
    "PASSED",
    "Sightings",
    "arrive",
    "beat",
    "broken",
    "complete",
    "dead",
    "full",
    "leave",
    "outcome",
    "refuse",
    "short",
]

Body = dict[str, Any]
"""``parties``, ``round`` (a number), ``inside`` (client → ``ids`` of its parties, ``beat``, ``ttl``, ``label``, ``here``),
``broken`` (the last rounds that were, each with the reason)."""

ENDS = 32
"""How many broken rounds are remembered."""

LABEL = 24
"""Bytes of a label in the document, so that 500 clients fit whatever their labels are."""

REASON = 60
"""Bytes of a reason in the document."""

PASSED = ""
MISSED = -1
"""The round of a party that was not the last, and so did not come."""
Sightings = dict[str, tuple[int, float]]
"""Which beat of a client was seen last, and when it was seen first, by one's own clock."""


def _opened(body: Body, name: str, parties: int) -> Body:
    if not body:
        return {"parties": parties, "round": 1, "inside": {}, "broken": []}
    if body["parties"] != parties:
        raise ConfigError(
            f"barrier {shorten(name)} has {body['parties']} parties, not {parties}: everybody has to name the same number; "
            "for another one, take another name"
        )
    return body


def short(text: str, most: int = LABEL) -> str:
    """The beginning of a text that takes at most ``most`` bytes in the document, where other letters than ASCII take six."""
    while len(json.dumps(text)) - 2 > most:
        text = text[: min(len(text) - 1, most)]
    return text


def inside(body: Body) -> int:
    """How many parties are inside."""
    if not body:
        return 0
    return sum(len(entry["ids"]) for entry in body["inside"].values())


def full(body: Body) -> bool:
    """Whether all parties are inside, so that the roll is called."""
    return bool(body) and inside(body) >= body["parties"]


def _ended(body: Body, why: str) -> Body:
    ends = [*body["broken"], [body["round"], short(why, REASON)]][-ENDS:] if why else body["broken"]
    return {**body, "round": body["round"] + 1, "inside": {}, "broken": ends}


def _called(body: Body) -> Body:
    """The round is passed once every client has answered the roll call."""
    if full(body) and all(entry["here"] for entry in body["inside"].values()):
        return _ended(body, PASSED)
    return body


def arrive(
    body: Body, name: str, parties: int, me: str, party: int, ttl: float, label: str
) -> tuple[Body | None, tuple[int, int]]:
    """One more party of client ``me``: the number of the round, and how many were inside before."""
    body = _opened(body, name, parties)
    before = inside(body)
    entry = body["inside"].get(me)
    if entry is not None and party in entry["ids"]:
        return None, (body["round"], before - 1)
    if full(body):
        # The roll is being called: who comes now is of the next round, and asks again when this one has ended.
        return None, (0, 0)
    before_me: Body = {"ids": [], "beat": 0} if entry is None else entry
    ids, beats = [*before_me["ids"], party], before_me["beat"] + 1
    mine = {"ids": ids, "beat": beats, "ttl": ttl, "label": label, "here": False}
    body = {**body, "inside": {**body["inside"], me: mine}}
    if full(body):
        mine["here"] = True
    return _called(body), (body["round"], before)


def complete(
    body: Body, name: str, parties: int, me: str, party: int, ttl: float, label: str
) -> tuple[Body | None, tuple[int, int]]:
    """As :func:`arrive`, for a party that comes only if it is the last; else the round is :data:`MISSED`."""
    body = _opened(body, name, parties)
    entry = body["inside"].get(me)
    here = entry is not None and party in entry["ids"]
    if not here and inside(body) != parties - 1:
        return None, (MISSED, inside(body))
    return arrive(body, name, parties, me, party, ttl, label)


def beat(body: Body, me: str) -> tuple[Body | None, None]:
    """Client ``me`` is alive, and answers the roll call if there is one."""
    if not body or me not in body["inside"]:
        return None, None
    entry = body["inside"][me]
    entry = {**entry, "beat": entry["beat"] + 1, "here": full(body)}
    return _called({**body, "inside": {**body["inside"], me: entry}}), None


def leave(body: Body, me: str, parties: set[int], why: str) -> tuple[Body | None, None]:
    """Parties of client ``me`` give up: the round is broken if one of them is inside."""
    if not body or me not in body["inside"] or not parties.intersection(body["inside"][me]["ids"]):
        return None, None
    return _ended(body, why), None


def refuse(body: Body, number: int) -> tuple[Body | None, None]:
    """There is no room for all parties of a round, so it cannot be completed: it is broken for those who are inside."""
    if not body or body["round"] != number or not body["inside"]:
        return None, None
    return _ended(body, "there is no room for another party"), None


def broken(body: Body, gone: Mapping[str, int]) -> tuple[Body | None, None]:
    """Clients that are still inside with the very beat with which they were found dead: the round is broken."""
    if not body:
        return None, None
    found = [client for client, last in gone.items() if body["inside"].get(client, {}).get("beat") == last]
    if not found:
        return None, None
    labels = ", ".join(sorted(body["inside"][client]["label"] for client in found))
    return _ended(body, f"nothing was heard of {labels}"), None


def dead(body: Body, me: str, sightings: Sightings, now: float) -> dict[str, int]:
    """The other clients whose beat has not changed for their ttl, each with that beat; ``sightings`` is kept up to date."""
    clients = body["inside"] if body else {}
    for client in [client for client in sightings if client not in clients]:
        del sightings[client]
    gone = {}
    for client, entry in clients.items():
        last, since = sightings.get(client, (-1, now))
        if entry["beat"] != last:
            sightings[client] = (entry["beat"], now)
        elif client != me and now - since >= entry["ttl"]:
            gone[client] = last
    return gone


def outcome(body: Body, number: int) -> str | None:
    """Why the round of that number was broken; empty if it was passed, ``None`` if it is still going on."""
    if not body or body["round"] < number:
        return "the server has forgotten it"
    if body["round"] == number:
        return None
    ends = dict(body["broken"])
    if number in ends:
        return str(ends[number])
    if len(ends) == ENDS and number < min(ends):
        return "this party was away for so long that nobody remembers how the round ended"
    return PASSED
