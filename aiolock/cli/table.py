"""Tables for terminals: columns as wide as what stands in them, within the width that there is."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from aiolock.info import Holder

__all__ = ["age", "cut", "lay_out", "seconds", "width"]

GAP = "  "
SLIM = 4
"""Columns of a terminal that every column of a table keeps."""


def width(text: str) -> int:
    """How many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    columns = 0
    for char in text:
        if not unicodedata.combining(char):
            columns += 2 if unicodedata.east_asian_width(char) in "WF" else 1
    return columns


def cut(text: str, most: int) -> str:
    """A text in at most so many columns; what was left out is an ellipsis."""
    if width(text) <= most:
        return text
    taken = ""
    for char in text:
        if width(taken + char) > most - 1:
            break
        taken += char
    return f"{taken}…" if most > 0 else ""


def lay_out(
    rows: Sequence[Sequence[str]],
    *,
    most: int | None = None,
    right: Sequence[int] = (),
    spare: Sequence[int] = (),
) -> list[str]:
    """Lines for ``rows``, the first of which is the head.

    :param most: the columns of the terminal; the widest columns of the table give way first.
    :param right: the columns of the table, from 0, that stand on the right.
    :param spare: the columns of the table that are left out, one after another, where there is not room for all.
    """
    if not rows:
        return []
    widths = {place: max(width(row[place]) for row in rows) for place in range(len(rows[0]))}
    if most is not None:
        for place in spare:
            if _total(widths) <= most:
                break
            del widths[place]
        while _total(widths) > most and max(widths.values()) > SLIM:
            widths[max(widths, key=lambda place: widths[place])] -= 1
    lines = []
    for row in rows:
        cells = []
        for place, columns in widths.items():
            text = cut(row[place], columns)
            pad = " " * (columns - width(text))
            cells.append(pad + text if place in right else text + pad)
        line = GAP.join(cells).rstrip()
        lines.append(line if most is None else cut(line, most))
    return lines


def _total(widths: Mapping[int, int]) -> int:
    return sum(widths.values()) + len(GAP) * (len(widths) - 1)


def seconds(value: float) -> str:
    """A duration as people say it: ``0.4 s``, ``12 s``, ``3 m 05 s``, ``2 h 10 m``, ``3 d 4 h``."""
    value = max(0.0, value)
    if value < 9.95:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02} m"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def age(holder: Holder) -> float:
    """For how many seconds somebody has been inside, as far as clocks here and there agree."""
    return max(0.0, (datetime.now(UTC) - holder.since).total_seconds())
