"""What the values of options mean, and the sentence for one that means nothing."""

from __future__ import annotations

import argparse
import math

__all__ = ["count", "given", "measurable", "pattern", "permits", "positive", "seconds", "status"]

SHORTEST = 0.01
"""Seconds below which a measurement says nothing."""


def seconds(text: str) -> float:
    """A number of seconds, 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds, such as 10 or 0.5")
    return value


def positive(text: str) -> float:
    """A number of seconds above 0."""
    value = seconds(text)
    if value == 0:
        raise argparse.ArgumentTypeError("it must be more than 0 seconds")
    return value


def measurable(text: str) -> float:
    """A number of seconds in which something can be measured."""
    value = seconds(text)
    if value < SHORTEST:
        raise argparse.ArgumentTypeError(f"it must be at least {SHORTEST:g} seconds")
    return value


def status(text: str) -> int:
    """An exit status."""
    if not text.isdecimal() or int(text) > 255:
        raise argparse.ArgumentTypeError(f"{text!r} is no exit status from 0 to 255")
    return int(text)


def count(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)


def permits(text: str) -> tuple[int, int]:
    """How many permits of how many."""
    count, slash, limit = text.partition("/")
    if not slash or not count.isdecimal() or not limit.isdecimal() or not 1 <= int(count) <= int(limit):
        raise argparse.ArgumentTypeError(f"{text!r} does not say how many of how many, as 1/3 does")
    return int(count), int(limit)


def given(text: str) -> str:
    """What is not empty: an empty one is a variable that somebody forgot to set."""
    if not text:
        raise argparse.ArgumentTypeError("it must not be empty; leave it out for what the environment says")
    return text


def pattern(text: str) -> str:
    """What names are compared with."""
    if not text:
        raise argparse.ArgumentTypeError("it must not be empty; '*' is all names")
    return text
