"""Timelines of requests: the stages of each with their times, bounded, and what each caller may see of them."""

from __future__ import annotations

import json
from typing import Any

from inflight.router.auth.caller import ANYBODY, Caller
from inflight.router.dashboard.history import History
from inflight.router.dashboard.requests import MAX_ENDED, MAX_ENTRIES, RequestLog, Timeline
from inflight.router.dashboard.watching import MAX_TIMELINES, Watching, joined, timeline_as_json
from inflight.router.telemetry.event_log import EventKind, EventLog
from inflight.router.telemetry.events import PlacedAt, RequestEnd, RequestFacts, RequestObservers
from tests.support.clock import Clock

ACME = Caller(tenant="acme")


def followed(log: RequestLog, request_id: str = "one", tenant: str = "acme", model: str = "tiny") -> Timeline:
    """A request that was admitted."""
    facts = RequestFacts(model=model, arrived=log.now_s(), prompt_tokens=40, request_id=request_id, tenant=tenant)
    timeline = log.follow(facts)
    timeline.admitted()
    return timeline


def end(timeline: Timeline, outcome: str = "length") -> None:
    timeline.ended(RequestEnd(outcome, False, 1.0, timeline.output_tokens, 0.5))


def test_timeline_has_every_stage_from_the_queue_to_the_end() -> None:
    clock = Clock()
    log = RequestLog(clock)
    timeline = followed(log)
    clock.now_s += 1
    timeline.placed(PlacedAt("executor-0", 1, 1.0))
    clock.now_s += 0.5
    timeline.boarded(16)
    clock.now_s += 0.25
    timeline.sent(1, None)
    timeline.sent(3, 0.1)
    clock.now_s += 2
    timeline.preempted()
    clock.now_s += 1
    timeline.boarded_again()
    timeline.sent(1, 1.5)
    timeline.moved("lost")
    clock.now_s += 1
    timeline.placed(PlacedAt("executor-1", 2, None))
    timeline.boarded_again()
    timeline.sent(2, 1.0)
    clock.now_s += 1
    end(timeline)
    told = timeline_as_json(timeline, clock.now_s + 3)
    assert [(one["stage"], one["atMs"], one.get("executor"), one.get("why")) for one in told["stages"]] == [
        ("queued", 0, None, None),
        ("placed", 1000, "executor-0", None),
        ("prefill", 1500, "executor-0", None),
        ("decode", 1750, "executor-0", None),
        ("preempted", 3750, "executor-0", None),
        ("prefill", 4750, "executor-0", None),
        ("decode", 4750, "executor-0", None),
        ("queued", 4750, None, "lost"),
        ("placed", 5750, "executor-1", None),
        ("prefill", 5750, "executor-1", None),
        ("decode", 5750, "executor-1", None),
    ]
    assert (told["outcome"], told["durationMs"], told["ageMs"], told["outputTokens"]) == ("length", 6750, 9750, 7)
    assert (told["promptTokens"], told["cachedTokens"]) == (40, 16)


def test_tokens_that_come_with_the_end_are_decoded_and_counted_once() -> None:
    clock = Clock()
    log = RequestLog(clock)
    timeline = followed(log)
    timeline.boarded(0)
    clock.now_s += 1
    timeline.ended(RequestEnd("length", False, 1.0, 5, 0.25))
    timeline.sent(5, None)
    told = timeline_as_json(timeline, clock.now_s)
    assert [(one["stage"], one["atMs"]) for one in told["stages"][-2:]] == [("prefill", 0), ("decode", 750)]
    assert told["outputTokens"] == 5
    assert log.take()[0]["tiny", "acme"].output_tokens == 5


def test_live_requests_and_the_last_that_ended_are_kept() -> None:
    log = RequestLog(Clock())
    running = followed(log, "running")
    for number in range(MAX_ENDED + 5):
        end(followed(log, f"request-{number}"))
    assert log.find("tiny", "acme", "running") is running
    assert log.find("tiny", "acme", "request-4") is None
    assert log.find("tiny", "acme", "request-5") is not None
    assert len(list(log.since(0))) == MAX_ENDED + 1


def test_request_that_is_preempted_without_end_has_a_bounded_timeline() -> None:
    log = RequestLog(Clock())
    timeline = followed(log)
    for _ in range(500):
        timeline.boarded_again()
        timeline.preempted()
    assert len(timeline.entries) == MAX_ENTRIES
    assert timeline_as_json(timeline, 0)["numLeftOut"] == 1001 - MAX_ENTRIES


def test_request_never_admitted_leaves_no_trace() -> None:
    log = RequestLog(Clock())
    record = RequestObservers([log]).follow(RequestFacts(model="tiny", request_id="one", tenant="acme"))
    record.ended("cancelled", 0, None)
    assert list(log.since(0)) == []
    assert log.take() == ({}, {})


def test_counts_of_a_tenant_with_nothing_live_are_forgotten() -> None:
    log = RequestLog(Clock())
    end(followed(log, tenant="gone"))
    followed(log, tenant="here")
    assert len(log.take()[0]) == 2
    assert list(log.take()[0]) == [("tiny", "here")]


def test_watcher_gets_everything_first_and_then_what_is_new() -> None:
    clock = Clock()
    watching = Watching(History(), EventLog(clock), RequestLog(clock), clock)
    watching.history.add(995.0, 5.0, {})
    watching.events.executor_linked("executor-0", "tiny")
    timeline = followed(watching.requests)
    seen, first = watching.since(None, ANYBODY)
    told = json.loads(first.text() or b"")
    assert told["samples"][0]["ageMs"] == 5000
    assert told["history"]["maxSamples"] == 180
    assert [one["text"] for one in told["events"]] == ["executor-0 joined"]
    assert [one["id"] for one in told["requests"]] == ["one"]
    seen, nothing = watching.since(seen, ANYBODY)
    assert nothing.text() is None
    watching.history.add(1000.0, 5.0, {})
    timeline.placed(PlacedAt("executor-0", 1, 0.0))
    _, news = watching.since(seen, ANYBODY)
    told = json.loads(news.text() or b"")
    assert sorted(told) == ["requests", "samples"]
    assert told["requests"][0]["stages"][-1]["stage"] == "placed"


def test_caller_sees_its_own_requests_and_no_private_events() -> None:
    watching = Watching()
    followed(watching.requests, "mine", "acme")
    followed(watching.requests, "theirs", "globex")
    watching.events.executor_lost("executor-0", "tiny", 3)
    watching.events.executor_lost("executor-9", "hidden", 3)
    watching.events.add(EventKind.ADMISSION_REFUSED, detail="line 3")
    for caller, ids, kinds in (
        (ACME, ["mine"], ["executor_lost", "executor_lost"]),
        (Caller("acme", models=frozenset({"tiny"})), ["mine"], ["executor_lost"]),
        (Caller("acme", models=frozenset({"other"})), [], []),
        (ANYBODY, ["theirs", "mine"], ["executor_lost", "executor_lost", "admission_refused"]),
    ):
        _, news = watching.since(None, caller)
        assert [one["id"] for one in news.requests] == ids
        assert [one["kind"] for one in news.events] == kinds
    assert watching.timeline("tiny", "globex", "theirs", ACME) is None
    assert watching.timeline("tiny", "acme", "mine", ACME) is not None


def test_first_line_has_no_more_timelines_than_the_page_lists() -> None:
    watching = Watching()
    for number in range(MAX_TIMELINES + 50):
        followed(watching.requests, f"request-{number}")
    _, news = watching.since(None, ANYBODY)
    assert len(news.requests) == MAX_TIMELINES
    assert news.requests[0]["id"] == f"request-{MAX_TIMELINES + 49}"


def test_line_of_statistics_keeps_its_fields_beside_the_boards() -> None:
    statistics: dict[str, Any] = json.loads(joined(b'{"routerId":"r"}\n', b'{"events":[]}'))
    assert statistics == {"routerId": "r", "board": {"events": []}}
    assert json.loads(joined(b"{}\n", b"{}")) == {"board": {}}
    assert joined(b'{"a":1}\n', None) == b'{"a":1}\n'
