"""Docstrings, comments, command line texts and pages name their subjects; what does not yet is counted, and only gets less."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import aiolock
from tests import prose

PACKAGE = Path(aiolock.__file__).parent

LIMITS = {"pronouns": 0, "first_person": 0, "openings": 0, "terms": 0}
"""How many of each the package may still have. Lower a limit when the test says so; never raise one."""

COUNTS = {
    "pronouns": prose.pronouns,
    "first_person": prose.first_person,
    "openings": prose.openings,
    "terms": prose.terms,
}


@pytest.mark.parametrize("name", LIMITS)
def test_unnamed_subjects_only_get_fewer(name, capsys):
    found = Counter()
    examples = []
    for text in prose.texts(PACKAGE):
        if words := COUNTS[name](text):
            found[text.path.relative_to(PACKAGE)] += len(words)
            examples.append(f"{text.path.relative_to(PACKAGE.parent)}:{text.line}: {', '.join(words)}")
    total = found.total()
    assert total <= LIMITS[name], "\n".join(
        [f"{total} {name}, {LIMITS[name]} are allowed; say who or what it is", *examples]
    )
    if total < LIMITS[name]:
        most = ", ".join(f"{path} {count}" for path, count in found.most_common(5))
        with capsys.disabled():
            print(f"\n{name}: {total}, so the limit of {LIMITS[name]} can be lowered to it; most in: {most}")


def test_names_are_terms_of_the_field():
    assert [f"{name.path}:{name.line}: {name.text}" for name in prose.names(PACKAGE)] == []


ROOT = Path(__file__).parents[2]

IN_PAGES = 0
"""How many pronouns the documentation may have. Lower it when the test says so; never raise it."""


def test_pages_name_their_subjects():
    found = [(text, words) for text in prose.pages(ROOT) if (words := prose.pronouns(text))]
    lines = [f"{text.path.relative_to(ROOT)}:{text.line}: {', '.join(words)}" for text, words in found]
    count = sum(len(words) for _, words in found)
    assert count <= IN_PAGES, "\n".join(
        [f"{count} pronouns, {IN_PAGES} are allowed; say who or what it is", *lines]
    )
    assert count == IN_PAGES, f"the limit of {IN_PAGES} can be lowered to {count}"


def test_pages_are_read_without_the_parts_that_a_program_writes(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/page.md").write_text(
        "Whoever\n<!-- figures: a/b -->\nnobody\n<!-- end -->\n```python\nx = 1  # anybody\n```\n"
    )
    texts = list(prose.pages(tmp_path))
    assert [(text.line, word) for text in texts for word in prose.pronouns(text)] == [
        (1, "Whoever"),
        (6, "anybody"),
    ]


def test_names_and_texts_with_private_words_are_found(tmp_path):
    (tmp_path / "words.py").write_text(
        '"""Wait for the next look: a beat is heard. It looks like data, and is looked up: ``beat``, a heartbeat."""\n'
        "class Look: pass\n"
        "def heartbeat(self, outlook): self._next_look = self.heard_of\n"
    )
    assert [word for text in prose.texts(tmp_path) for word in prose.terms(text)] == [
        "next look",
        "beat",
        "heard",
    ]
    assert sorted(name.text for name in prose.names(tmp_path)) == ["Look", "_next_look", "heard_of"]


def test_each_kind_of_text_is_read(tmp_path):
    (tmp_path / "cli").mkdir()
    (tmp_path / "cli" / "words.py").write_text(
        '"""What it is."""\n'
        "value = 1  # nobody reads a comment of ours\n"
        '"""How many."""\n'
        'print(f"{value} for anyone")\n'
        'name = "Somebody\'s"\n'
    )
    (tmp_path / "words.py").write_text('def whoever(): """Return whomever."""\ntext = "everybody"\n')
    texts = list(prose.texts(tmp_path))
    assert [word for text in texts for word in prose.openings(text)] == ["What", "How"]
    assert sorted(word for text in texts for word in prose.pronouns(text)) == [
        "Somebody",
        "anyone",
        "nobody",
        "of ours",
        "whomever",
    ]


def test_comments_of_sql_and_lua_are_read(tmp_path):
    (tmp_path / "words.sql").write_text(
        "-- name: what\n-- Which one wakes us.\n-- Whether it is there.\nSELECT '-'  -- how we ask\n\n-- name: who\nSELECT 1\n"
    )
    (tmp_path / "words.lua").write_text("-- include whoever\nlocal x = 1\n  -- Ours is a - b.\nreturn x\n")
    texts = list(prose.texts(tmp_path))
    assert [(text.path.suffix, text.line, text.text) for text in texts] == [
        (".lua", 3, "Ours is a - b."),
        (".sql", 2, "Which one wakes us.\nWhether it is there."),
        (".sql", 4, "how we ask"),
    ]
    assert [prose.openings(text) for text in texts] == [[], ["Which"], []]
    assert [prose.first_person(text) for text in texts] == [["Ours"], ["us"], ["we"]]
