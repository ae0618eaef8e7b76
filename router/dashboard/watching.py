"""The dashboard's data besides the statistics: history, events and timelines of requests, as JSON.

A watcher gets everything with its first line and the changes with every later line, so that skipped lines lose nothing.
Visibility is that of `GetStats`: the caller's models, its own requests and tenant by name, and the sum over other
tenants. Events of Redis and of the admission file are for operators.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from inflight.router.auth.caller import Caller, sees_model
from inflight.router.dashboard.history import (
    EXECUTOR_FIELDS,
    MODEL_FIELDS,
    NUM_SAMPLES,
    SAMPLE_S,
    TENANT_FIELDS,
    History,
    Sample,
    sample_as_json,
)
from inflight.router.dashboard.requests import Entry, RequestLog, Timeline
from inflight.router.telemetry.event_log import Event, EventLog

# Timelines per line: as many as the page lists.
MAX_TIMELINES = 200


@dataclass(frozen=True, slots=True)
class Seen:
    """The position of a watcher: what it was sent so far."""

    sample: int = 0
    event: int = 0
    revision: int = 0


@dataclass(frozen=True, slots=True)
class Update:
    """The changes for a watcher. `text` encodes samples as JSON, in a thread."""

    caller: Caller
    is_first: bool
    now_s: float
    samples: list[Sample]
    events: list[dict[str, Any]]
    requests: list[dict[str, Any]]

    def text(self) -> bytes | None:
        """Returns the JSON object; None without changes."""
        content: dict[str, Any] = {}
        if self.is_first:
            fields = {"model": MODEL_FIELDS, "executor": EXECUTOR_FIELDS, "tenant": TENANT_FIELDS}
            content["history"] = {"sampleSeconds": SAMPLE_S, "maxSamples": NUM_SAMPLES, "fields": fields}
        if self.samples:
            content["samples"] = [self._sample(sample) for sample in self.samples]
        content |= {name: new for name, new in (("events", self.events), ("requests", self.requests)) if new}
        return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() if content else None

    def _sample(self, sample: Sample) -> dict[str, Any]:
        return sample_as_json(
            sample, self.now_s, lambda model: sees_model(self.caller, model), lambda tenant: _sees(self.caller, tenant)
        )


@dataclass(frozen=True, slots=True)
class Watching:
    """The sources."""

    history: History = field(default_factory=History)
    events: EventLog = field(default_factory=EventLog)
    requests: RequestLog = field(default_factory=RequestLog)
    clock: Callable[[], float] = time.monotonic

    def since(self, seen: Seen | None, caller: Caller) -> tuple[Seen, Update]:
        """Returns the changes since then; None: everything."""
        before = seen or Seen()
        now_s = self.clock()
        events = [_event(event) for event in self.events.since(before.event) if _sees_event(caller, event)]
        changed = (one for one in self.requests.since(before.revision) if _sees_timeline(caller, one))
        requests = [timeline_as_json(one, now_s) for one in islice(changed, MAX_TIMELINES)]
        now_seen = Seen(self.history.newest, self.events.newest, self.requests.newest)
        return now_seen, Update(caller, seen is None, now_s, self.history.since(before.sample), events, requests)

    def timeline(self, model: str, tenant: str, request_id: str, caller: Caller) -> dict[str, Any] | None:
        """Returns one timeline; None if this router has none that the caller may see."""
        found = self.requests.find(model, tenant, request_id)
        if found is None or not _sees_timeline(caller, found):
            return None
        return timeline_as_json(found, self.clock())


def _sees(caller: Caller, tenant: str) -> bool:
    return caller.is_operator or tenant == caller.tenant


def _sees_event(caller: Caller, event: Event) -> bool:
    if event.kind.value.is_private:
        return caller.is_operator
    return not event.model or sees_model(caller, event.model)


def _sees_timeline(caller: Caller, timeline: Timeline) -> bool:
    return sees_model(caller, timeline.facts.model) and _sees(caller, timeline.facts.tenant)


def _event(event: Event) -> dict[str, Any]:
    return {
        "id": event.entry_id,
        "atMs": event.at_ms,
        "kind": event.kind.value.name,
        "severity": event.kind.value.severity.value,
        "subject": event.subject,
        "model": event.model,
        "count": event.count,
        "text": event.text,
    }


def timeline_as_json(timeline: Timeline, now_s: float) -> dict[str, Any]:
    """Returns a timeline as JSON. Times of stages are milliseconds from the request's arrival."""
    facts, arrived_s = timeline.facts, timeline.facts.arrived
    content: dict[str, Any] = {
        "id": facts.request_id,
        "tenant": facts.tenant,
        "model": facts.model,
        "class": facts.priority_class,
        "revision": timeline.revision,
        "ageMs": _ms(now_s - arrived_s),
        "promptTokens": facts.prompt_tokens,
        "cachedTokens": timeline.cached_tokens,
        "outputTokens": timeline.output_tokens,
        "stages": [_entry(entry, arrived_s) for entry in timeline.entries],
    }
    if timeline.num_left_out:
        content["numLeftOut"] = timeline.num_left_out
    if timeline.num_resumed:
        content["numResumed"] = timeline.num_resumed
    if timeline.ended_s is not None:
        content["durationMs"] = _ms(timeline.ended_s - arrived_s)
        content["outcome"] = timeline.outcome
        content["isError"] = timeline.end is not None and timeline.end.is_error
    return content


def _entry(entry: Entry, arrived_s: float) -> dict[str, Any]:
    stage: dict[str, Any] = {"stage": entry.stage.value, "atMs": _ms(entry.at_s - arrived_s)}
    if entry.executor_id:
        stage["executor"] = entry.executor_id
    if entry.why:
        stage["why"] = entry.why
    return stage


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)


def joined(line: bytes, extra: bytes | None) -> bytes:
    """Returns a line of statistics with the watcher's part under `board`."""
    if extra is None:
        return line
    statistics = line.rstrip().removesuffix(b"}")
    comma = b"" if statistics == b"{" else b","
    return statistics + comma + b'"board":' + extra + b"}\n"
