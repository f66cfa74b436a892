"""Looks up in built pages what people search for: `python docs/search.py build/docs`.

The index of the built pages is read as the search box reads it. A page counts as found if it has all words, and one of them in
a heading: pages that have words in their text alone stand behind these.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import snowballstemmer

WANTED = {
    "once": {"how-to/decorators", "how-to/cron"},
    "stuck": {"how-to/administrators", "how-to/cron"},
    "job hangs": {"how-to/administrators", "how-to/cron"},
    "who holds": {"how-to/administrators"},
    "lock stuck": {"how-to/administrators"},
    "scheduled job": {"how-to/cron"},
    "prometheus": {"how-to/observe"},
    "redlock": {"backends/quorum"},
    "redisson": {"topics/comparison"},
    "kleppmann": {"topics/kleppmann"},
    "jepsen": {"topics/kleppmann"},
    "select for update": {"topics/methods"},
}
"""What people type into the search box, and the pages that answer."""


class Index:
    """The search index of built pages."""

    def __init__(self, folder: Path) -> None:
        text = (folder / "searchindex.js").read_text()
        index = json.loads(text[text.index("{") : text.rindex("}") + 1])
        self._names: list[str] = index["docnames"]
        self._headings: dict[str, int | list[int]] = index["titleterms"]
        self._text: dict[str, int | list[int]] = index["terms"]
        [stopwords] = re.findall(
            r"stopwords = new Set\((\[.*?\])\)", (folder / "_static/language_data.js").read_text()
        )
        self._ignored = set(json.loads(stopwords))
        self._stemmer = snowballstemmer.stemmer("english")

    def found(self, query: str) -> set[str]:
        """Return the pages that have all words of the query, and one of them in a heading."""
        words = [self._stemmer.stemWord(word) for word in query.split() if word not in self._ignored]
        if not words:
            return set()
        headed = [self._pages(self._headings, word) for word in words]
        there = [pages | self._pages(self._text, word) for pages, word in zip(headed, words, strict=True)]
        return set.intersection(*there) & set.union(*headed)

    def _pages(self, terms: dict[str, int | list[int]], word: str) -> set[str]:
        numbers = terms.get(word, [])
        return {self._names[number] for number in ([numbers] if isinstance(numbers, int) else numbers)}


if __name__ == "__main__":
    index = Index(Path(sys.argv[1]))
    missing = [
        f"{query!r} does not find {page}"
        for query, pages in WANTED.items()
        for page in sorted(pages - index.found(query))
    ]
    sys.exit("\n".join(missing) if missing else 0)
