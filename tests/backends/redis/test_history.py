"""A minute in which everything goes wrong, and in which nobody is ever wrong about a lock; and that the run could tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from aiolock.testing.history import History, Recorder, load
from tests.faults import verdict
from tests.faults.fenced_store import FencedStore
from tests.faults.program import history
from tests.faults.run import TTLS


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_nobody_is_wrong_in_a_minute_of_kills_stops_broken_links_and_restarts(tmp_path):
    """8 processes, 16 names."""
    words = ("--seconds", "60", "--processes", "8", "--names", "16", "--seed", "1")
    shown = history("tests.faults.run", "redis", *words, ttls=TTLS, keep=tmp_path / "histories")
    assert shown["outside"] == {name: [] for name in shown["outside"]}
    assert shown["violations"] == 0
    # That it was a test: much went wrong, much was granted, and without fencing there was damage.
    assert sum(shown["faults"].values()) >= 50
    assert len(shown["faults"]) >= 15
    assert shown["grants"] >= 1_000
    assert shown["fenced"]["stale"] == 0 < shown["unfenced"]["stale"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nobody_is_wrong_about_locks_of_other_kinds_either(tmp_path):
    """A short one; `python -m tests.faults.run redis --kinds all` is as long as one likes."""
    for seconds in (14, 28, 56):
        words = ("--seconds", f"{seconds}", "--processes", "4", "--names", "9")
        kinds = ("--kinds", "reentrant,read-write,permits")
        keep = tmp_path / f"{seconds}"
        shown = history("tests.faults.run", "redis", *words, *kinds, ttls=TTLS, keep=keep)
        assert shown["outside"] == {name: [] for name in shown["outside"]}
        if sum(shown["faults"].values()) >= 5 and shown["grants"] >= 100:
            break
        # The machine has much else to do: too little happened to say anything.
    assert sum(shown["faults"].values()) >= 5
    assert shown["grants"] >= 100
    assert set(shown["grants_by_mode"]) == {"reentrant", "read", "write", "permits"}


class Story:
    """A history written by hand, in ms."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "story.jsonl"
        self._pens: dict[str, Recorder] = {}

    def note(self, t: float, process: str, kind: str, **fields: object) -> None:
        if process not in self._pens:
            self._pens[process] = Recorder(self._path, process)
        if "until" in fields:
            fields["until"] = int(fields["until"] * 1e6)
        self._pens[process].note(kind, t=int(t * 1e6), **fields)

    def hold(
        self,
        process: str,
        start: float,
        end: float,
        token: int,
        *,
        lost: bool = False,
        until: float = 0,
        mode: str = "mutex",
        permits: int = 1,
    ) -> None:
        number = f"{process}#{token}-{start}"
        about = {"task": "0", "owner": process, "mode": mode, "permits": permits, "timeout": None}
        self.note(start - 1, process, "acquire", id=number, name="x", **about)
        self.note(start, process, "acquire.ret", id=number, result="ok", token=token)
        if lost:
            self.note(end, process, "lost", id=number, until=until or end, reason="expired")
        else:
            self.note(end, process, "release", id=number)
            self.note(end, process, "release.ret", id=number, result="ok")

    def judged(self, folder: Path) -> verdict.Verdict:
        for recorder in self._pens.values():
            recorder.close()
        self._pens.clear()
        return verdict.judge(
            self.history(),
            FencedStore(folder / "store.sock"),
            seed=0,
            ttl=1.0,
            verified=0.5,
            command_timeout=0.3,
            others=[],
            replayed=0,
            capacity={"x": 3},
        )

    def history(self) -> History:
        return load([self._path])


@pytest.fixture
def story(tmp_path):
    return Story(tmp_path)


def wrong(found: verdict.Verdict) -> set[str]:
    return {name for name, sentences in found.outside.items() if sentences}


def test_one_after_the_other_is_right(story, tmp_path):
    story.hold("a", 100, 200, token=1)
    story.hold("b", 201, 300, token=2)
    assert not wrong(story.judged(tmp_path))


def test_two_at_once_are_wrong(story, tmp_path):
    story.hold("a", 100, 200, token=1)
    story.hold("b", 150, 300, token=2)
    assert wrong(story.judged(tmp_path)) == {"exclusion (by own clock)"}


@pytest.mark.parametrize(
    ("one", "other"), [("read", "write"), ("write", "read"), ("write", "write"), ("reentrant", "reentrant")]
)
def test_two_of_other_kinds_that_exclude_each_other_are_wrong(story, tmp_path, one, other):
    story.hold("a", 100, 200, token=1, mode=one)
    story.hold("b", 150, 300, token=2, mode=other)
    assert wrong(story.judged(tmp_path)) == {"exclusion (by own clock)"}


def test_more_permits_than_there_are_are_wrong_and_readers_together_are_not(story, tmp_path):
    story.hold("a", 100, 200, token=1, mode="read")
    story.hold("b", 150, 300, token=2, mode="read")
    story.hold("a", 400, 500, token=3, mode="permits", permits=2)
    story.hold("b", 450, 600, token=4, mode="permits", permits=1)
    assert not wrong(story.judged(tmp_path))
    story.hold("c", 460, 600, token=5, mode="permits", permits=1)
    assert wrong(story.judged(tmp_path)) == {"exclusion (by own clock)"}


def test_levels_of_one_hold_are_right(story, tmp_path):
    story.hold("a", 100, 300, token=1, mode="reentrant")
    story.hold("a", 150, 200, token=1, mode="reentrant")
    assert not wrong(story.judged(tmp_path))
    story.hold("b", 250, 400, token=1, mode="reentrant")
    assert wrong(story.judged(tmp_path)) == {"exclusion (by own clock)", "tokens"}


@pytest.mark.parametrize("fault", [verdict.RESTART, verdict.DELETED])
def test_two_at_once_after_a_restart_are_counted_inside_of_the_exception(story, tmp_path, fault):
    story.hold("a", 100, 200, token=1)
    story.note(140, "injector", "down", target=fault)
    story.note(145, "injector", "up", target=fault)
    story.hold("b", 150, 300, token=2)
    found = story.judged(tmp_path)
    assert not wrong(found)
    assert found.inside["exclusion (by own clock)"] == 1


def test_two_at_once_long_after_a_restart_are_wrong(story, tmp_path):
    story.note(140, "injector", "down", target=verdict.RESTART)
    story.note(145, "injector", "up", target=verdict.RESTART)
    story.hold("a", 100, 800, token=1)
    story.hold("b", 150, 900, token=2)
    assert wrong(story.judged(tmp_path)) == {"exclusion (by own clock)"}


def test_who_is_told_late_by_a_loop_that_ran_was_told_late(story, tmp_path):
    story.hold("a", 100, 200, token=1, lost=True, until=140)
    story.hold("b", 150, 300, token=2)
    assert wrong(story.judged(tmp_path)) == {"told in time"}


def test_who_is_told_late_by_a_loop_that_did_not_run_knew_it_by_its_clock(story, tmp_path):
    story.hold("a", 100, 200, token=1, lost=True, until=140)
    story.note(120, "a", "stop", target="a", why="lag")
    story.note(199, "a", "cont", target="a", why="lag")
    story.hold("b", 150, 300, token=2)
    assert not wrong(story.judged(tmp_path))


def test_a_clock_that_believes_too_long_is_wrong_however_late_the_loop(story, tmp_path):
    story.hold("a", 100, 200, token=1, lost=True, until=160)
    story.note(120, "a", "stop", target="a", why="lag")
    story.note(199, "a", "cont", target="a", why="lag")
    story.hold("b", 150, 300, token=2)
    assert wrong(story.judged(tmp_path)) == {"exclusion (by own clock)"}


def test_who_is_killed_before_it_is_awake_cannot_be_asked(story, tmp_path):
    story.hold("a", 100, 400, token=1)
    story.note(120, "injector", "stop", target="a")
    story.note(200, "injector", "cont", target="a")
    story.note(201, "a", "open")
    story.note(202, "injector", "kill", target="a")
    story.hold("b", 150, 300, token=2)
    assert not wrong(story.judged(tmp_path))


@pytest.mark.parametrize("token", [5, 4])
def test_tokens_that_repeat_or_fall_are_wrong(story, tmp_path, token):
    story.hold("a", 100, 200, token=5)
    story.hold("b", 201, 300, token=token)
    assert wrong(story.judged(tmp_path)) == {"tokens"}


def test_what_a_worker_complains_of_is_wrong(story, tmp_path):
    story.hold("a", 100, 200, token=1)
    story.note(250, "a", "error", what="Task was destroyed but it is pending!")
    assert wrong(story.judged(tmp_path)) == {"errors"}


def test_what_a_closed_client_still_has_is_wrong(story, tmp_path):
    story.hold("a", 100, 200, token=1)
    story.note(250, "a", "end", tasks=["aiolock-wait"], sockets=0)
    assert wrong(story.judged(tmp_path)) == {"hygiene"}
