"""The former path of :mod:`aiolock.metrics`; imports from here go on to work."""

from __future__ import annotations

from aiolock.metrics import SECONDS, SHARES, Distribution, Figures, Histogram, no_losses

__all__ = ["SECONDS", "SHARES", "Distribution", "Figures", "Histogram", "no_losses"]
