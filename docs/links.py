"""Looks for dead links in built pages: `python docs/links.py build/docs`. Links to other hosts are not followed."""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The links of a page, and what can be linked to on it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value and name in {"href", "src"} and tag != "use":
                self.links.add(value)
            elif value and name == "id":
                self.anchors.add(value)


def dead(folder: Path) -> list[str]:
    """Return each link to a file or an anchor that does not exist, with the page that has it."""
    pages = {path.resolve(): Page(path) for path in folder.rglob("*.html")}
    found = []
    for path, page in pages.items():
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            known = pages[target].anchors if target in pages else set()
            if not target.exists() or (anchor and target in pages and anchor not in known):
                found.append(f"{path.relative_to(folder.resolve())}: {link}")
    return found


if __name__ == "__main__":
    missing = dead(Path(sys.argv[1]))
    sys.exit("\n".join(["dead links:", *missing]) if missing else 0)
