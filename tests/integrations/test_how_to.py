"""The tests that the pages about testing show pass, as they stand there, without a server."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.unit.test_docs import ROOT, blocks

NOWHERE = "redis://127.0.0.1:1/0"
"""Nothing listens there."""


@pytest.mark.parametrize("page", ["test-your-code", "fastapi"])
def test_the_tests_of_the_page_pass(tmp_path, page):
    path = ROOT / f"docs/how-to/{page}.md"
    examples = [textwrap.dedent(text) for _, text in blocks(path)]
    # The page of FastAPI begins with a file that has a database, and goes on with other applications.
    program = "\n\n".join(text for text in examples if not text.startswith("# web.py"))
    program = program.partition("from contextlib import asynccontextmanager")[0]
    program = program.replace("redis://127.0.0.1:6379/0", NOWHERE)
    (tmp_path / "test_page.py").write_text("import asyncio\nimport aiolock\n" + program)
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "pytest_aiolock"]
    done = subprocess.run(
        [*argv, "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=Path(ROOT),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{program.count('def test_')} passed" in done.stdout
