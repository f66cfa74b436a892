"""Figures of several rounds: medians, spreads, ratios taken round by round, and goals that judge them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

__all__ = ["Goal", "Report", "Series", "alternate", "percentile", "ratio"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Series:
    """One figure, once per round."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float]) -> Series:
        return cls(tuple(values))

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)


def ratio(above: Series, below: Series) -> Series:
    """Round by round, because what has the same number was run at about the same time."""
    return Series.of(a / b if b else math.inf for a, b in zip(above.values, below.values, strict=True))


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which so many percent of the values are."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def alternate(rounds: int, contestants: Sequence[str], play: Callable[[str], T]) -> dict[str, list[T]]:
    """Every contestant once per round, and another one first each time."""
    played: dict[str, list[T]] = {who: [] for who in contestants}
    for number in range(rounds):
        first = number % len(contestants)
        for who in (*contestants[first:], *contestants[:first]):
            played[who].append(play(who))
    return played


@dataclass(slots=True)
class Goal:
    """A ratio (or a figure) and what it must be; the median of the rounds decides."""

    what: str
    value: Series
    must: float
    at_most: bool = False
    """Whether less is better."""
    unit: str = "x"

    @property
    def reached(self) -> bool:
        median = self.value.median
        return median <= self.must if self.at_most else median >= self.must


@dataclass(slots=True)
class Report:
    """What one scenario found out: a table of figures, goals, and what a plot needs."""

    name: str
    title: str
    columns: dict[str, str]
    """Title by key, in order."""
    rows: dict[str, dict[str, Series]] = field(default_factory=dict)
    """By contestant and column; a cell may be missing."""
    goals: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    plot: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    """How long it took."""
    failed: bool = False
    """Whether it ended with an error, and so says nothing."""

    def add(self, who: str, **figures: Iterable[float]) -> None:
        """A row: per column one value of each round."""
        self.rows[who] = {column: Series.of(values) for column, values in figures.items()}

    def compare(
        self, what: str, above: str, below: str, column: str, must: float, *, at_most: bool = False
    ) -> None:
        """A goal for the ratio of two rows."""
        value = ratio(self.rows[above][column], self.rows[below][column])
        self.goals.append(Goal(what, value, must, at_most))

    def mention(self, above: str, below: str, column: str) -> None:
        """Say the ratio of two rows, which no goal judges."""
        value = ratio(self.rows[above][column], self.rows[below][column])
        found = " - ".join(f"{each:.3g}" for each in sorted({value.low, value.median, value.high}))
        self.notes.append(f"{self.columns[column]}, {above} / {below}: {found}.")

    def limit(self, what: str, who: str, column: str, most: float, unit: str) -> None:
        """A goal for a figure that must not be greater."""
        self.goals.append(Goal(what, self.rows[who][column], most, at_most=True, unit=unit))

    def limit_of(self, what: str, value: Series, most: float, unit: str) -> None:
        """A goal for something that is no cell of the table."""
        self.goals.append(Goal(what, value, most, at_most=True, unit=unit))
