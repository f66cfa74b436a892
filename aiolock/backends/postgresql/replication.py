"""Decide whether every standby that may take over has what the client was told: a pure function of the server's settings."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from aiolock.errors import shorten

__all__ = ["Replication", "gap", "synchronous"]

_TOKEN = re.compile(r'"(?:[^"]|"")*"|[(),]|[^\s(),"]+')
ANY_NAME = "*"
NO_STANDBYS = {"pg_basebackup", "pg_receivewal"}
"""Programs of PostgreSQL that copy what the server writes, and cannot take over."""


class Replication(NamedTuple):
    """The state of the replication of a server, as it is when a connection is opened."""

    names: str
    """The setting ``synchronous_standby_names``."""
    followers: Sequence[str] = ()
    """The names (``application_name``) of those that follow the server, except subscribers of a publication."""


def synchronous(names: str) -> tuple[int, frozenset[str]]:
    """Return for how many standbys a commit waits, and which ones the setting lists, in small letters as the server compares them."""
    tokens = _TOKEN.findall(names)
    number = 1
    if "(" in tokens:
        # [FIRST | ANY] number (name, …)
        start = tokens.index("(")
        number, tokens = int(tokens[start - 1]), tokens[start + 1 :]
    listed = (token for token in tokens if token not in {"(", ")", ","})
    return number, frozenset(_unquoted(token).lower() for token in listed)


def _unquoted(token: str) -> str:
    return token[1:-1].replace('""', '"') if token.startswith('"') else token


def gap(replication: Replication, *, furthest: bool) -> str:
    """Return why a standby that takes over may lack a commit that was answered; an empty text if each of them has it.

    :param furthest: whether the operator has declared that the standby which has most takes over.
    """
    number, listed = synchronous(replication.names)
    if not listed:
        return "it is empty: a commit waits for no standby"
    if furthest:
        return ""
    if ANY_NAME in listed:
        return "it contains *: a commit waits for some standby, and another one may take over"
    if number < len(listed):
        return f"a commit waits for {number} of the {len(listed)} standbys that it lists, and another one may take over"
    following = Counter(name.lower() for name in replication.followers if name not in NO_STANDBYS)
    if others := sorted((following - Counter(listed)).elements()):
        return f"a standby that it does not list follows the server, and may take over: {', '.join(map(shorten, others))}"
    return ""
