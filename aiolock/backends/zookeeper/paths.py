"""Where a lock is in the tree: one node per name, readable, injective, and accepted by ZooKeeper."""

from __future__ import annotations

from urllib.parse import quote, unquote

__all__ = ["component", "name_of", "parents"]


def component(name: str) -> str:
    """A name as one part of a path: as in a URL, with ``%2F`` for a slash; readable for what is readable there."""
    text = quote(name, safe=" !$&'()*+,:;=@")
    if text in (".", ".."):
        return text.replace(".", "%2E")
    # ZooKeeper's own, at the root.
    return "%7Aookeeper" if text == "zookeeper" else text


def name_of(text: str) -> str:
    """The name that :func:`component` made ``text`` from."""
    return unquote(text)


def parents(path: str) -> list[str]:
    """Every node on the way to ``path``, from the root, itself included."""
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(2, len(parts) + 1)]
