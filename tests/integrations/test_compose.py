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

WORDS = {
    "service": {"command", "depends_on", "entrypoint", "environment", "healthcheck", "hostname", "image", "init",
                "network_mode", "ports", "tmpfs"},
    "healthcheck": {"interval", "retries", "start_interval", "start_period", "test", "timeout"},
}  # fmt: skip
"""What Compose knows, of which it refuses everything else."""

VOLUMES = {
    "etcd": {"/etcd-data"},
    "redis": {"/data"},
    "mariadb": {"/var/lib/mysql"},
    "memcached": set(),
    "mongo": {"/data/db", "/data/configdb"},
    "mysql": {"/var/lib/mysql"},
    "postgres": {"/var/lib/postgresql"},
    "zookeeper": {"/data", "/datalog", "/logs"},
}
"""Where the images keep what they write: without something else there, every start leaves an anonymous volume behind."""


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


@pytest.mark.parametrize("path", [*FILES, FOLDER / "all.yml"], ids=lambda path: path.stem)
def test_compose_knows_every_word(path):
    document = yaml.safe_load(path.read_text())
    assert {word for word in document if not word.startswith("x-")} in ({"services"}, {"include"})
    for service in document.get("services", {}).values():
        assert set(service) <= WORDS["service"]
        assert set(service["healthcheck"]) <= WORDS["healthcheck"]
        for words in (service.get("command"), service.get("entrypoint")):
            # A list: a text would be split into words by Compose.
            assert words is None or all(isinstance(word, str) for word in words)
            assert not isinstance(words, str)
        assert all(isinstance(value, str) for value in service.get("environment", {}).values())
        for key in ("interval", "timeout", "start_period", "start_interval"):
            assert re.fullmatch(r"\d+s", service["healthcheck"].get(key, "1s"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_images_are_pinned_and_what_they_write_ends_with_them(path):
    for name, service in services(path).items():
        match = re.fullmatch(r"(?:\$\{\w+:-)?(?:[a-z.]+/)*([a-z]+):v?\d[\w.-]*\}?", service["image"])
        assert match, f"{name}: {service['image']}"
        assert "volumes" not in service
        assert set(service.get("tmpfs", [])) == VOLUMES[match[1]], name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_shared_network_belongs_to_a_service_that_opens_its_ports(path):
    known = services(path)
    for service in known.values():
        if mode := service.get("network_mode"):
            owner = mode.removeprefix("service:")
            assert known[owner]["ports"]
            # Compose refuses a host name, and ports, for who shares the network of another.
            assert not {"ports", "hostname"} & set(service)


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
