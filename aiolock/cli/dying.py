"""Ending by a signal, as shells expect of whoever was ended by one.

A shell that runs a script goes on after Ctrl-C if the program in the foreground only has the status 130: it may have used the
keys for something of its own, as editors do. It stops if the program died of the signal, and if the shell has got it too.
"""

from __future__ import annotations

import os
import signal
from signal import Signals

__all__ = ["DEADLY", "die"]

DEADLY = (Signals.SIGINT, Signals.SIGQUIT)
"""What a terminal sends to the whole job that is in the foreground."""


def die(number: Signals, *, job: bool) -> None:
    """End by that signal; returns only if that is not possible.

    :param job: our group has not got it, because the terminal was lent to the command.
    """
    if number is Signals.SIGQUIT:
        import resource  # noqa: PLC0415 - needed only here

        # It is the command of which somebody may want a memory dump.
        _, hard = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    if job:
        os.killpg(os.getpgrp(), number)
    os.kill(os.getpid(), number)
