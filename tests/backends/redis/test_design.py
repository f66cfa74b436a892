"""The way of a free acquire through the files, as docs/topics/design.md tells it."""

from __future__ import annotations

import re
from pathlib import Path

import aiolock
from tests.architecture import trace

PAGE = Path(__file__).parents[3] / "docs" / "topics" / "design.md"


def test_the_page_names_each_file_of_a_free_acquire_once_in_order(server):
    section = PAGE.read_text(encoding="utf-8").partition("all the way\n")[2].partition("\n## ")[0]
    told = re.findall(r"^\| `(\S+\.py)` \|", section, re.MULTILINE)
    calls = trace(Path(aiolock.__file__).parent, server.url)
    assert told == list(dict.fromkeys(file for file, _ in calls))
