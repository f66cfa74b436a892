"""The server, the namespace, the label and the lock that the options of a command name."""

from __future__ import annotations

import argparse
import os
import pwd
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiolock
from aiolock.backends import redact
from aiolock.core.present import caller_of
from aiolock.errors import ConfigError, Redacted, forgets_arguments, shorten
from aiolock.lock import Lock

__all__ = ["connect", "label", "local_file", "lock", "locks", "namespace", "server", "url"]


def url(options: argparse.Namespace, default: str | None = None) -> Redacted:
    """Return the address of ``--local``, ``--url`` or ``AIOLOCK_URL``; those of several servers are separated by spaces."""
    if options.local:
        return Redacted(f"sqlite://{quote(os.fsencode(local_file()))}")
    given: str | None = options.url or os.environ.get("AIOLOCK_URL") or default
    if given is None:
        raise ConfigError(
            "which server? say it with --url or in AIOLOCK_URL, for example redis://127.0.0.1:6379/0, or --local for a file on "
            "this machine; AIOLOCK_URL keeps a password out of the list of processes"
        )
    return Redacted(given)


def local_file() -> Path:
    """Return the file of ``--local``, whose directory exists then.

    The home is that of the user database: HOME is another one under sudo, and may be missing under cron.
    """
    given = os.environ.get("AIOLOCK_DIR")
    try:
        directory = Path(given) if given else Path(pwd.getpwuid(os.getuid()).pw_dir, ".local/state/aiolock")
        if not directory.is_absolute():
            raise ConfigError(f"AIOLOCK_DIR must be an absolute path, not {shorten(given)}")
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except KeyError:
        raise ConfigError(f"--local: user {os.getuid()} has no home; set AIOLOCK_DIR") from None
    except OSError as error:
        raise ConfigError(f"--local: {error.filename}: {error.strerror}; set AIOLOCK_DIR") from error
    return directory / "locks.db"


def namespace(options: argparse.Namespace) -> str:
    """Return ``--namespace``, ``AIOLOCK_NAMESPACE``, or the default of the library."""
    return options.namespace or os.environ.get("AIOLOCK_NAMESPACE") or "aiolock"


@forgets_arguments
def connect(options: argparse.Namespace, **more: Any) -> aiolock.Client:
    """Return a client that is not open yet; ``more`` goes to :func:`aiolock.connect`."""
    addresses = url(options).split()
    where = addresses if len(addresses) > 1 else url(options)
    return aiolock.connect(where, **{"namespace": namespace(options), "label": options.label, **more})


def label(options: argparse.Namespace) -> str:
    """Return ``--label``, or host and process id."""
    return caller_of(socket.gethostname(), os.getpid()) if options.label is None else options.label


def server(options: argparse.Namespace) -> str:
    """Return the address of the server without its password."""
    return " ".join(map(redact, url(options).split()))


def lock(client: aiolock.Client, options: argparse.Namespace) -> Lock:
    """Return the lock of ``run``."""
    if options.permits is not None:
        count, limit = options.permits
        return client.semaphore(options.name, limit, permits=count)
    if options.shared:
        return client.rwlock(options.name).read()
    return client.rwlock(options.name).write() if options.exclusive else client.lock(options.name)


_LOCKS: dict[str, Callable[[aiolock.Client, str], Lock]] = {
    "lock": lambda client, name: client.lock(name),
    "rw": lambda client, name: client.rwlock(name).read(),
    "sem": lambda client, name: client.semaphore(name, 1),
    "election": lambda client, name: client.election(name).campaign(),
}


def locks(client: aiolock.Client, options: argparse.Namespace) -> list[Lock]:
    """Return a lock to inspect for ``--family``, or one of every family that the name may have."""
    families = _LOCKS if options.family is None else [options.family]
    return [_LOCKS[family](client, options.name) for family in families]
