"""What is published is complete: the wheel has all that the package reads, and the sdist builds the same wheel."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def build(source: Path, folder: Path, target: str) -> Path:
    """Build with the backend of the environment, without isolation and so without a network."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", folder],
        cwd=source,
        check=True,
        capture_output=True,
        timeout=150,
    )
    [built] = folder.iterdir()
    return built


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    return build(ROOT, tmp_path_factory.mktemp("sdist"), "sdist")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return contents(build(ROOT, tmp_path_factory.mktemp("wheel"), "wheel"))


def test_the_wheel_has_every_file_of_the_package(wheel):
    files = {
        path.relative_to(ROOT).as_posix(): path.read_bytes()
        for path in (ROOT / "aiolock").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert "aiolock/py.typed" in files
    for kind in (".lua", ".sql"):
        assert [name for name in files if name.endswith(kind)], kind
    installed = {name: content for name, content in wheel.items() if ".dist-info/" not in name}
    beside = ("aiolock_command.py", "pytest_aiolock.py")
    assert installed == files | {name: (ROOT / name).read_bytes() for name in beside}


def test_the_sdist_builds_the_same_wheel(sdist, wheel, tmp_path):
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    [source] = (tmp_path / "unpacked").iterdir()
    (tmp_path / "wheel").mkdir()
    assert contents(build(source, tmp_path / "wheel", "wheel")) == wheel


def test_the_sdist_has_what_a_packager_needs(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "SECURITY.md",
        "tests/conftest.py",
        "docs/index.md",
    } <= names
    assert not [
        name for name in names if name.startswith((".venv", "build/", "dist/")) or name.endswith(".pyc")
    ]


def test_the_metadata_say_where_the_project_lives(wheel):
    [metadata] = [message_from_bytes(text) for name, text in wheel.items() if name.endswith("/METADATA")]
    urls = dict(url.split(", ") for url in metadata.get_all("Project-URL"))
    assert {"Homepage", "Documentation", "Changelog", "Issues"} <= urls.keys()
    for page in ("SECURITY.md", "CODE_OF_CONDUCT.md", ".github/ISSUE_TEMPLATE/config.yml"):
        assert urls["Homepage"] + "/security/advisories/new" in (ROOT / page).read_text(), page
    assert metadata["License-Expression"] == "MIT"


def test_the_index_can_follow_the_links_of_the_readme(wheel):
    [metadata] = [message_from_bytes(text) for name, text in wheel.items() if name.endswith("/METADATA")]
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload(decode=True).decode()
    links = re.findall(r"\]\(([^)]+)\)|src(?:set)?=\"([^\"]+)\"", text)
    assert len(links) > 30
    for link, picture in links:
        assert re.match(r"https://|#", link or picture), link or picture


def test_the_workflows_run_what_is_there():
    workflows = {
        path.name: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").iterdir()
    }
    assert {"check.yml", "packages.yml", "publish.yml"} <= workflows.keys()
    check = workflows["check.yml"]["jobs"]["check"]
    supported = {
        classifier.rpartition(" ")[2]
        for classifier in PROJECT["classifiers"]
        if classifier.startswith("Programming Language :: Python :: 3.")
    }
    assert supported <= set(check["strategy"]["matrix"]["python"])
    assert {"run": ".ci/run"} in check["steps"]
    for name, workflow in workflows.items():
        assert workflow["permissions"] == {"contents": "read"}, name
        for job in workflow["jobs"].values():
            if used := job.get("uses"):
                assert (ROOT / used).is_file(), used
    # Only the job that publishes may speak for the project at the index.
    assert workflows["publish.yml"]["jobs"]["publish"]["permissions"] == {"id-token": "write"}


def test_the_forms_can_be_read():
    for form in (ROOT / ".github/ISSUE_TEMPLATE").iterdir():
        assert isinstance(yaml.safe_load(form.read_text()), dict), form
