"""The tests that the page about testing shows pass, as they stand there."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

from tests.unit.test_docs import ROOT, blocks


def test_the_tests_of_the_page_pass(tmp_path):
    page = ROOT / "docs/how-to/test-your-code.md"
    program = "\n\n".join(textwrap.dedent(text) for _, text in blocks(page))
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
