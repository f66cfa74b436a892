"""Docstrings, comments and command line texts name their subjects; what does not yet is counted, and only gets less."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import aiolock
from tests import prose

PACKAGE = Path(aiolock.__file__).parent

LIMITS = {"pronouns": 0, "openings": 0}
"""How many of each the package may still have. Lower a limit when the test says so; never raise one."""

COUNTS = {"pronouns": prose.pronouns, "openings": prose.openings}


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
