"""Count wording that hides what a sentence is about, in docstrings, comments and command line texts of the package, and in pages.

A sentence has a subject, a verb and a standard noun: it names the owner, caller, client or process instead of
"whoever". tests/unit/test_prose.py keeps the counts below a limit, tests/architecture.py prints the share of words.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Text", "first_person", "names", "openings", "pages", "pronouns", "terms", "texts", "words"]

PRONOUNS = re.compile(
    r"\b(?:whoever|whomever|nobody|somebody|everybody|anybody|anyone)\b|\bof ours\b", re.IGNORECASE
)

FIRST_PERSON = re.compile(r"\b(?:we|us|ours?)\b", re.IGNORECASE)

TERMS = re.compile(
    r"\b(?:a|an|the|one|two|each|every|another|last|first|next|latest|between) looks?\b|\blooks? again\b"
    r"|(?<!`)\bbeats?\b(?!`)|\bwants?\b|\b(?:hears?|heard)\b|\bcertain[ _]until\b",
    re.IGNORECASE,
)
"""Words for which the field has a term: read, check, poll, heartbeat, receive, expires_at. A name in backticks is one of data."""

PARTS = {
    "beat",
    "beats",
    "bury",
    "hear",
    "heard",
    "hears",
    "ours",
    "place",
    "placed",
    "places",
    "said",
    "wants",
}
PARTS |= {"look", "looked", "looking", "looks"}
"""The same as parts of a name in the code."""

OPENINGS = re.compile(r"(?:What|Who|Whether|How|Which)\b")
"""First words of docstrings and of headers of statements that describe a concept without naming it."""

HEADER = re.compile(r"(?:-- (?!name: |include ).*\n?[ \t]*)+")
"""Comments of SQL and Lua on lines that follow each other, without the lines that programs read."""

WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")


@dataclass(frozen=True)
class Text:
    """One docstring, comment line or string, with the place where it begins."""

    kind: str
    path: Path
    line: int
    text: str


def texts(package: Path) -> Iterator[Text]:
    """Yield docstrings (also those of attributes), comments (also those of SQL and Lua), and the strings of the command line."""
    for path in sorted(package.rglob("*.py")):
        source = path.read_text()
        tree = ast.parse(source)
        docstrings = set()
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                docstrings.add(node.value)
                yield Text("docstring", path, node.lineno, node.value.value)
        if path.relative_to(package).parts[0] == "cli":
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
                    yield Text("command line", path, node.lineno, node.value)
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield Text("comment", path, token.start[0], token.string.lstrip("#").strip())
    for path in sorted([*package.rglob("*.sql"), *package.rglob("*.lua")]):
        source = path.read_text()
        for header in HEADER.finditer(source):
            text = re.sub(r"^[ \t]*-- ", "", header[0], flags=re.MULTILINE)
            yield Text("header", path, source.count("\n", 0, header.start()) + 1, text.strip())


GENERATED = re.compile(r"<!-- (?:figures|goals|conditions).*?<!-- end -->", re.DOTALL)
"""Parts of pages that benchmarks/pages.py writes."""


def pages(root: Path) -> Iterator[Text]:
    """Yield each line of the documentation, without the figures that a program writes."""
    for path in sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md")]):
        text = GENERATED.sub(lambda match: "\n" * match[0].count("\n"), path.read_text())
        for number, line in enumerate(text.split("\n"), start=1):
            yield Text("page", path, number, line)


def pronouns(text: Text) -> list[str]:
    """Return the words of a text that stand for an owner, caller or process without naming it."""
    return PRONOUNS.findall(text.text)


def first_person(text: Text) -> list[str]:
    """Return the words of a text that stand for the client, the session or the project without naming it."""
    return FIRST_PERSON.findall(text.text)


def terms(text: Text) -> list[str]:
    """Return the words of a text for which the field has a term."""
    return TERMS.findall(text.text)


def names(package: Path) -> Iterator[Text]:
    """Yield each name in the code that has one of `PARTS` between its underscores."""
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for field in ("name", "id", "attr", "arg"):
                name = getattr(node, field, None)
                if isinstance(name, str) and not PARTS.isdisjoint(name.lower().split("_")):
                    yield Text("name", path, getattr(node, "lineno", 0), name)


def openings(text: Text) -> list[str]:
    """Return the first word of a docstring or header if it is one of `OPENINGS`, in a list."""
    return (
        OPENINGS.findall(text.text.strip())[:1]
        if text.kind in ("docstring", "header") and OPENINGS.match(text.text.strip())
        else []
    )


def words(text: Text) -> int:
    """Count the words of a text."""
    return len(WORD.findall(text.text))
