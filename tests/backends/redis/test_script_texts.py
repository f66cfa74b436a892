"""The texts of the scripts, as proxies check them that route a script by its keys."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from aiolock.backends.redis import commands
from aiolock.backends.redis.commands import load, source
from aiolock.backends.redis.dialects.plain import PlainBackend

KEYLESS = {"TIME", "PUBLISH", "PUBSUB", "CLUSTER"}
"""Commands that take no key."""
CALL = re.compile(r"redis\.p?call\(\s*")
LITERAL = re.compile(r"'([A-Z]+)'(?:\)|, (KEYS\[)?)")
TEXTS = {
    **{name: script.source.decode() for name, script in load().items()},
    **{f"{name} in a cluster": script.source.decode() for name, script in load(cluster=True).items()},
    **{f"{name}, mute": script.source.decode() for name, script in load(mute=True).items()},
    **{name: source(name) for name in ("probe", "publish", "format", "barrier")},
    **{f"plain {name}": script.source.decode() for name, script in PlainBackend.scripts.items()},
}


def test_every_file_is_part_of_a_script():
    folder = files("aiolock.backends.redis").joinpath("lua")
    parts = {file.name.removesuffix(".lua") for file in folder.iterdir() if file.is_file()}
    parts |= {f"dialects/{file.name.removesuffix('.lua')}" for file in folder.joinpath("dialects").iterdir()}
    together = "\n".join(TEXTS.values())
    missing = [name for name in parts if source(name).strip() not in together]
    assert missing == []


@pytest.mark.parametrize("name", TEXTS)
def test_commands_are_literals_and_keys_are_written_as_such(name):
    text = TEXTS[name]
    calls = [LITERAL.match(text, call.end()) for call in CALL.finditer(text)]
    assert calls
    assert len(calls) == text.count("redis.call") + text.count("redis.pcall")
    for call in calls:
        assert call is not None, "the command is no literal"
        assert call[1] in KEYLESS or call[2], call


def test_every_call_of_a_script_has_a_key():
    # A proxy without one does not know where it belongs.
    assert commands.Format("n").question[2] == "1"


@pytest.mark.parametrize("cluster", [False, True])
def test_mute_scripts_publish_nothing(cluster):
    for name, script in load(cluster=cluster, mute=True).items():
        assert not re.search(rb"PUBLISH|PUBSUB|CLUSTER", script.source), name
