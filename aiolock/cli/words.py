"""Where the options of ``run`` end and the command begins: a pure function over the words of the command line.

As with flock and env, the first word that is no option and follows NAME begins the command, and so does whatever
follows ``--``. argparse alone would look for options in the command as well.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

__all__ = ["Words", "split"]


class Words(NamedTuple):
    """The words of ``run``, told apart."""

    options: list[str]
    names: list[str]
    """One, unless it was forgotten."""
    command: list[str]


def split(words: Sequence[str], takes_value: Collection[str]) -> Words:
    """Tell options, NAME and command apart; ``takes_value`` are the options that the next word belongs to."""
    options: list[str] = []
    names: list[str] = []
    rest = list(words)
    while rest:
        word = rest[0]
        if word == "--":
            del rest[0]
            if names:
                return Words(options, names, rest)
            # A NAME that looks like an option stands behind a -- of its own.
            names, rest = rest[:1], rest[1:]
        elif word.startswith("-") and word != "-":
            count = 2 if _wants_next(word, takes_value) else 1
            options += rest[:count]
            del rest[:count]
        elif names:
            return Words(options, names, rest)
        else:
            names.append(rest.pop(0))
    return Words(options, names, [])


def _wants_next(word: str, takes_value: Collection[str]) -> bool:
    if word.startswith("--"):
        return word in takes_value
    # -nw3 is -n -w 3, and -nw takes the next word.
    for place, letter in enumerate(word[1:], start=2):
        if f"-{letter}" in takes_value:
            return place == len(word)
    return False
