"""The public names are those that are recorded; who changes one says so in the changelog."""

from __future__ import annotations

from tests.public_api import RECORD, documented, missing_from, public


def test_public_names_are_the_recorded_ones():
    names, recorded = public(), set(RECORD.read_text().split())
    assert (sorted(names - recorded), sorted(recorded - names)) == ([], []), (
        "add a line to CHANGELOG.md, then run python -m tests.public_api --write"
    )


def test_the_paths_that_users_import_from_are_among_them():
    modules, classes = documented()
    assert {
        "aiolock",
        "aiolock.aiohttp",
        "aiolock.fastapi",
        "aiolock.mysql",
        "aiolock.portal",
        "aiolock.postgresql",
        "aiolock.starlette",
        "aiolock.testing",
        "aiolock.zookeeper",
    } <= modules
    assert "aiolock.backends.redis.RedisBackend" in classes


def test_a_name_has_to_stand_in_the_changelog_as_a_word():
    assert missing_from(
        "- `Client.lock` and `Lease`", {"aiolock.Lease", "aiolock.Lea", "aiolock.x.lock"}
    ) == ["aiolock.Lea"]
