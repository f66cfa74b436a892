"""The address of a SQLite file: parse it, without I/O."""

from __future__ import annotations

from urllib.parse import unquote

from aiolock.backends.foreign_parameters import SQLITE
from aiolock.backends.urls import Form, parse
from aiolock.errors import ConfigError, shorten

__all__ = ["path_of"]

_FORM = Form("SQLite", "sqlite:///var/lib/locks/locks.db", ("sqlite",), 0, {}, foreign=SQLITE)


def path_of(url: object) -> str:
    """Return the absolute path of the file that ``url`` names. Raises :class:`ConfigError`."""
    address = parse(_FORM, url, {})
    # SQLAlchemy writes an absolute path with four slashes.
    path = "/" + unquote(address.path, errors="surrogateescape").lstrip("/")
    if address.host_list or address.user or address.password is not None:
        raise ConfigError(f"a file has no host and no user: write three slashes, as in {_FORM.example}")
    if "\0" in path or path.endswith(("/", "/:memory:")):
        raise ConfigError(
            f"the address must name a file by its absolute path, as in {_FORM.example}, not {shorten(path)}; "
            "memory:// is for locks inside one process"
        )
    return path
