"""The Lua scripts, one file each; a line ``-- include x`` stands for the code of ``x.lua``."""

from __future__ import annotations

import re
from importlib.resources import files

__all__ = ["clustered", "source"]

_INCLUDE = re.compile(r"^-- include (\w+)\n", re.MULTILINE)
_COMMENTS = re.compile(r"^ *--.*\n", re.MULTILINE)


def source(name: str) -> str:
    """The text that goes to the server: includes filled in, comments left out."""
    text = files(__name__).joinpath(f"{name}.lua").read_text(encoding="utf-8")
    return _COMMENTS.sub("", _INCLUDE.sub(lambda match: source(match[1]), text))


def clustered(text: str) -> str:
    """The same script for a node of a cluster."""
    return text.replace(source("channel"), source("cluster_channel"))
