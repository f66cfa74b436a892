"""The command line, one file per group of commands; nothing here is imported unless ``aiolock`` is run."""

from __future__ import annotations

__all__ = ()
