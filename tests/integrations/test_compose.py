"""The compose files say what their README says: servers with health checks, on loopback ports of their own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import aiolock

FOLDER = Path(__file__).parents[2] / "compose"
FILES = sorted(path for path in FOLDER.glob("*.yml") if path.name != "all.yml")
README = (FOLDER / "README.md").read_text()


def services(path: Path) -> dict[str, dict[str, Any]]:
    return yaml.safe_load(path.read_text())["services"]


def published(path: Path) -> list[int]:
    """The ports on this machine that a file opens; each one must say that it is for this machine alone."""
    ports: list[int] = []
    for service in services(path).values():
        for mapping in service.get("ports", []):
            match = re.fullmatch(r"127\.0\.0\.1:(\d+)(?:-(\d+))?:(\d+)(?:-(\d+))?", mapping)
            assert match, f"{path.name}: {mapping}"
            first, last, inside, inside_last = (int(port) if port else None for port in match.groups())
            assert (last or first) - first == (inside_last or inside) - inside
            ports += range(first, (last or first) + 1)
    return ports


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_service_has_an_image_and_a_health_check(path):
    for name, service in services(path).items():
        assert service["image"], name
        check = service["healthcheck"]
        assert check["test"][0] in ("CMD", "CMD-SHELL"), name
        assert {"interval", "timeout", "retries"} <= set(check), name
        for other, condition in service.get("depends_on", {}).items():
            assert other in services(path)
            assert condition == {"condition": "service_healthy"}


def test_all_of_them_can_run_at_the_same_time():
    included = yaml.safe_load((FOLDER / "all.yml").read_text())["include"]
    assert sorted(included) == [path.name for path in FILES]
    ports = [port for path in FILES for port in published(path)]
    assert len(ports) == len(set(ports))
    names = [name for path in FILES for name in services(path)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_readme_and_the_file_give_the_address_whose_ports_are_open(path):
    [line] = [line for line in README.splitlines() if f"]({path.name})" in line]
    url = re.search(r"`([a-z+]+://\S+)`", line).group(1)
    assert url in path.read_text()
    assert {int(port) for port in re.findall(r":(\d+)", url)} <= set(published(path))
    if "not supported yet" in line:
        with pytest.raises(aiolock.ConfigError):
            aiolock.connect(url)
    else:
        aiolock.connect(url)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_a_shell_in_a_container_expands_is_not_expanded_by_compose(path):
    """Compose replaces $NAME by what it knows itself, silently by nothing; only images are meant that way."""
    text = re.sub(r"\$\{REDIS_IMAGE:-[^}]+\}", "", path.read_text())
    assert re.findall(r"(?<!\$)\$(?!\$)\S*", text) == []
