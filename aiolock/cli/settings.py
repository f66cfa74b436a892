"""Which server and which namespace a command is about, and the client for it."""

from __future__ import annotations

import argparse
import os
import socket
from typing import Any

import aiolock
from aiolock.backends import redact
from aiolock.errors import ConfigError

__all__ = ["connect", "label", "namespace", "place", "url"]


def url(options: argparse.Namespace, default: str | None = None) -> str:
    """The address of the server: ``--url``, else ``AIOLOCK_URL``. Several that are one, with spaces between them."""
    given: str | None = options.url or os.environ.get("AIOLOCK_URL") or default
    if given is None:
        raise ConfigError(
            "which server? say it with --url or in AIOLOCK_URL, for example redis://127.0.0.1:6379/0; "
            "AIOLOCK_URL keeps a password out of the list of processes"
        )
    return given


def namespace(options: argparse.Namespace) -> str:
    """``--namespace``, else ``AIOLOCK_NAMESPACE``, else the one that programs have by default."""
    given: str = options.namespace or os.environ.get("AIOLOCK_NAMESPACE") or "aiolock"
    return given


def connect(options: argparse.Namespace, **more: Any) -> aiolock.Client:
    """A client as the options say, not yet open; ``more`` goes to :func:`aiolock.connect`."""
    addresses = url(options).split()
    where = addresses if len(addresses) > 1 else url(options)
    return aiolock.connect(where, **{"namespace": namespace(options), "label": label(options), **more})


def label(options: argparse.Namespace) -> str:
    """How people are told who we are: ``--label``, else host and process."""
    given: str | None = options.label
    return f"{socket.gethostname()}:{os.getpid()}" if given is None else given


def place(options: argparse.Namespace) -> str:
    """The address of the server as it may be shown."""
    return " ".join(map(redact, url(options).split()))
