"""Loggers of the package: a log call never raises, and the fields of its records have a prefix.

Filters, handlers and the LogRecord factory belong to the application and may raise. Renewal, loss and clean-up must
go on then, so the error is printed to standard error, as ``logging`` does with those of handlers.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from typing import TYPE_CHECKING, Any

__all__ = ["PREFIX", "Log", "get_logger"]

PREFIX = "aiolock_"
"""Precedes every key of ``extra``: a record has attributes of other libraries and of the application as well."""

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


class Log(_Adapter):
    """A logger with the methods of :class:`logging.Logger`, none of which raises an :class:`Exception`."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a message; the keys of ``extra`` get the prefix."""
        try:
            if not self.logger.isEnabledFor(level):
                return
            if extra := kwargs.get("extra"):
                kwargs["extra"] = {PREFIX + key: value for key, value in extra.items()}
            # The frame of this method is not the caller that the record names.
            self.logger.log(level, msg, *args, stacklevel=2, **kwargs)
        except Exception:  # noqa: BLE001 - raised by code of the application
            if logging.raiseExceptions and sys.stderr is not None:
                with contextlib.suppress(Exception):
                    traceback.print_exc()


def get_logger(name: str) -> Log:
    """Return the logger of that name."""
    return Log(logging.getLogger(name), None)
