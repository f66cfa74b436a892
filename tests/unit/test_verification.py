"""The report of `aiolock verify`, from histories that are told by hand."""

from __future__ import annotations

import argparse
import io
from datetime import UTC, datetime
from typing import Any

from aiolock.cli.output import Output
from aiolock.cli.verify import _listed, _say
from aiolock.testing.history import History
from aiolock.testing.verification import Report, assess

EVERYTHING = {"exclusion", "fencing", "no-eviction", "survives-restart", "survives-failover"}
VOLATILE = {"exclusion", "fencing"}
TTL = 1.0


class Story:
    """A history, in milliseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.holds = 0

    def note(self, t: float, kind: str, process: str, **fields: Any) -> Story:
        self.events.append({"t": int(t * 1_000_000), "process": process, "kind": kind, **fields})
        return self

    def hold(
        self,
        process: str,
        call: float,
        start: float,
        end: float,
        token: int,
        lost: str = "",
        until: float = 0,
    ) -> Story:
        """A hold that was released, or lost for a reason; by its own clock it had ended at `until`."""
        self.holds += 1
        number = f"{process}#{self.holds}"
        about = {
            "name": "x",
            "task": "0",
            "owner": f"{process}/0",
            "mode": "mutex",
            "permits": 1,
            "timeout": None,
        }
        self.note(call, "acquire", process, id=number, **about)
        self.note(start, "acquire.ret", process, id=number, result="ok", token=token)
        if lost:
            self.note(end, "lost", process, id=number, reason=lost, until=int((until or end) * 1_000_000))
        return self.note(end + lost.count("") / 100, "release", process, id=number)

    def outage(self, process: str, start: float, end: float) -> Story:
        self.note(start, "connection", process, what="lost", address="s", seconds=None)
        return self.note(end, "connection", process, what="back", address="s", seconds=(end - start) / 1000)

    def judged(self, capabilities: set[str]) -> Report:
        return assess(History(self.events), capabilities, TTL)


def two_inside() -> Story:
    return Story().hold("a", 0, 10, 100, 1).hold("b", 20, 60, 150, 2)


def test_turns_one_after_the_other_are_kept():
    report = Story().hold("a", 0, 10, 100, 1).hold("b", 20, 103, 150, 2).judged(EVERYTHING)
    assert report.kept
    assert report.contradicted == report.overlaps == report.tokens == report.told_late == []
    assert report.hand_over
    assert (report.hand_over.count, round(report.hand_over.median)) == (1, 3)
    assert (round(report.stretch_at, 3), round(report.stretch, 3)) == (0.01, 0.093)
    assert [one.grants for one in report.connections] == [1, 1]


def test_two_inside_break_exclusion():
    report = two_inside().judged(EVERYTHING)
    assert not report.kept
    assert report.contradicted == ["exclusion"]
    [overlap] = report.overlaps
    assert (overlap.holders, overlap.tokens) == (("a", "b"), (1, 2))
    assert (round(overlap.at, 3), round(overlap.seconds, 3)) == (0.06, 0.04)
    assert report.unlisted == 1


def test_an_outage_explains_them_only_where_the_server_may_forget_and_only_near_it():
    assert two_inside().outage("b", 30, 40).judged(VOLATILE).unlisted == 0
    assert two_inside().outage("b", 30, 40).judged(EVERYTHING).unlisted == 1
    assert two_inside().outage("b", 2_000, 2_100).judged(VOLATILE).unlisted == 1
    assert two_inside().judged(VOLATILE).unlisted == 1


def test_a_stopped_holder_is_not_inside_once_its_lease_has_ended():
    story = Story().hold("a", 0, 10, 900, 1, lost="expired", until=200).hold("b", 20, 300, 400, 2)
    story.note(50, "stop", "a", target="a", why="lag").note(899, "cont", "a", target="a", why="lag")
    report = story.judged(EVERYTHING)
    assert report.kept
    assert report.told_late == []
    assert round(report.connections[0].stopped, 3) == 0.849


def test_a_holder_that_runs_and_is_told_after_the_next_grant_is_told_late():
    report = (
        Story()
        .hold("a", 0, 10, 900, 1, lost="expired", until=200)
        .hold("b", 20, 300, 400, 2)
        .judged(EVERYTHING)
    )
    assert report.kept
    assert len(report.told_late) == 1


def test_a_killed_holder_is_inside_until_its_last_event():
    story = Story().note(
        5, "acquire", "a", id="a#1", name="x", task="0", owner="a/0", mode="mutex", permits=1, timeout=None
    )
    story.note(10, "acquire.ret", "a", id="a#1", result="ok", token=1).note(500, "kill", "verify", target="a")
    assert story.hold("b", 20, 60, 150, 2).judged(EVERYTHING).kept


def test_tokens_that_repeat_or_fall_break_fencing_where_it_is_promised():
    for token in (7, 6):
        story = Story().hold("a", 0, 10, 20, 7).hold("b", 30, 40, 50, token)
        report = story.judged(EVERYTHING)
        assert not report.kept
        assert report.tokens
        assert report.contradicted == ["fencing"]
        unfenced = story.judged({"exclusion"})
        assert unfenced.kept
        assert unfenced.tokens is None


def test_a_hold_that_the_server_forgot_contradicts_what_would_have_kept_it():
    story = Story().hold("a", 0, 10, 100, 1, lost="revoked")
    assert story.judged(EVERYTHING).contradicted == ["no-eviction"]
    assert story.outage("a", 40, 60).judged(EVERYTHING).contradicted == [
        "survives-restart",
        "survives-failover",
    ]
    assert story.judged(VOLATILE).contradicted == []
    assert story.judged(VOLATILE).forgotten == 1
    late = Story().hold("a", 0, 10, 100, 1, lost="revoked", until=90)
    assert late.judged(EVERYTHING).forgotten == 0, "its lease had ended by its own clock"


def test_connections_say_what_they_saw():
    story = Story().hold("a", 0, 10, 20, 1).outage("a", 30, 80).outage("a", 100, 120)
    for t in (31, 32):
        story.note(t, "trouble", "a", error="BackendUnavailable", what="away")
    [one] = story.judged(EVERYTHING).connections
    assert (one.outages, round(one.away, 3), round(one.longest, 3)) == (2, 0.07, 0.05)
    assert one.errors == {"BackendUnavailable: away": 2}
    assert story.judged(EVERYTHING).as_json()["connections"][0]["errors"] == [
        {"error": "BackendUnavailable: away", "count": 2}
    ]


def said(report: Report, capabilities: set[str]) -> str:
    options = argparse.Namespace(url="redis://:hunter2@host/0", local=False, processes=2)
    output = Output(out=io.StringIO(), err=io.StringIO())
    exception = _listed(report, capabilities, "Redis")
    _say(
        options,
        output,
        datetime(2026, 11, 28, tzinfo=UTC),
        report,
        exception,
        ["process2 ended with signal SIGKILL"],
    )
    return output.out.getvalue()


def test_people_are_told_the_exception_beside_the_verdict():
    story = two_inside().outage("b", 30, 40).note(41, "trouble", "b", error="BackendUnavailable", what="away")
    text = said(story.judged(VOLATILE), VOLATILE)
    assert "hunter2" not in text
    assert (
        "two inside at once: 1\n      'x' was held by a (token 1) and b (token 2) at once, for 40.0 ms from 0.060 s\n"
        in text
    )
    assert (
        "the page of Redis lists it for a server that does not promise survives-restart and survives-failover"
        in text
    )
    assert "the status is 1 all the same" in text
    assert "capabilities contradicted: exclusion" in text
    assert "1 times BackendUnavailable: away" in text
    assert "process2 ended with signal SIGKILL" in text
    assert text.endswith("Exclusion or tokens broke.\n")


def test_people_are_told_of_no_exception_where_none_can_explain_it():
    for story, capabilities in ((two_inside(), VOLATILE), (two_inside().outage("b", 30, 40), EVERYTHING)):
        text = said(story.judged(capabilities), capabilities)
        assert "two inside at once: 1" in text
        assert "lists it" not in text
    calm = said(Story().hold("a", 0, 10, 20, 1).judged({"exclusion"}), {"exclusion"})
    assert "tokens equal or fallen: not judged" in calm
    assert "hand-over: none was seen" in calm
    assert calm.endswith("Exclusion and tokens held.\n")
