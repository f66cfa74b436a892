"""Servers on which locks are experimental: used with a warning, and without a promise that one holder is alone."""

from __future__ import annotations

import inspect
import warnings

from aiolock.errors import ExperimentalWarning

__all__ = ["UNTRIED", "warn_experimental"]

UNTRIED = frozenset({"exclusion", "survives-failover"})
"""Capabilities that a server gets when locks have been run on it."""


def warn_experimental(text: str) -> None:
    """Warn with ``text``, naming the line of the first caller outside of this library."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "aiolock":
        frame, level = frame.f_back, level + 1
    warnings.warn(text, ExperimentalWarning, stacklevel=level + 1)
