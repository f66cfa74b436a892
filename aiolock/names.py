"""Which names are valid, and how they travel: injective encodings for the places that servers put them."""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache

from aiolock.errors import ConfigError, InvalidName, shorten

__all__ = ["check_label", "check_name", "check_namespace", "digest", "escape", "unescape"]

MAX_BYTES = 1024

# The hash tag of a Redis key must be ours, keys must print on one line, and `%` is the escape itself.
_UNSAFE = re.compile(r"[%{}\x00-\x1f\x7f-\x9f\u2028\u2029]")
_ESCAPED = re.compile(r"%([0-9a-f]{2,4});")
_NAMESPACE = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


def check_name(name: object) -> str:
    """Return ``name`` if it may name a lock, else raise :class:`InvalidName`.

    A name is a non-empty ``str`` of at most 1,024 UTF-8 bytes without lone surrogates; what characters it is
    made of does not matter.
    """
    if not isinstance(name, str):
        raise InvalidName(f"a lock's name must be a str, not {type(name).__name__}: {shorten(name)}")
    if not name:
        raise InvalidName("a lock's name must not be empty")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise InvalidName(
            f"a lock's name must be valid Unicode without lone surrogates: {shorten(name)}"
        ) from None
    if size > MAX_BYTES:
        raise InvalidName(
            f"a lock's name must have at most {MAX_BYTES} UTF-8 bytes, this one has {size}: {shorten(name)}"
        )
    # Exactly a str: a subclass may format itself as something else, as members of `class Name(str, Enum)` do.
    return str.__str__(name)


def check_namespace(namespace: object) -> str:
    """Return ``namespace`` if it may prefix every key, path and row, else raise :class:`ConfigError`."""
    if not isinstance(namespace, str) or not _NAMESPACE.fullmatch(namespace):
        raise ConfigError(
            f"namespace must be 1 to 64 characters of A-Z a-z 0-9 _ . : -, not {shorten(namespace)}"
        )
    return str.__str__(namespace)


def check_label(label: object) -> str:
    """Return ``label`` if people can read it on one line, else raise :class:`ConfigError`."""
    if not isinstance(label, str) or not label or not label.isprintable() or len(label.encode()) > 256:
        raise ConfigError(
            f"label must be 1 to 256 bytes of printable text that tells people who holds, not {shorten(label)}"
        )
    return str.__str__(label)


@lru_cache(maxsize=4096)
def escape(name: str) -> str:
    """A name as part of a key: readable, injective, without braces, percent signs and control characters."""
    return _UNSAFE.sub(lambda match: f"%{ord(match[0]):02x};", name)


def unescape(text: str) -> str:
    """The name that :func:`escape` made ``text`` from."""
    return _ESCAPED.sub(lambda match: chr(int(match[1], 16)), text)


def digest(name: str) -> str:
    """A name as 40 lower-case hexadecimal digits, for servers with short or case-blind names."""
    return hashlib.blake2b(name.encode(), digest_size=20).hexdigest()
