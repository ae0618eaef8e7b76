"""Operational events of a router: a bounded log of events of executors, Redis and the admission file.

Each kind is defined once, in `EventKind`. Events that repeat are counted in one entry, so that a preemption storm does
not push everything else out. Nothing is added in the path of a token. `EventLog.add` may be called from any thread.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from inflight.common.time_of_day import unix_ms
from inflight.router.ledger.types import LedgerCall

MAX_EVENTS = 200
# Executors whose last state is remembered; the one that reported least recently is forgotten first.
MAX_EXECUTORS = 4096
# Events of a kind that repeats are counted in one entry for so long.
MERGE_S = 30.0


class Severity(Enum):
    """How much an event matters to an operator."""

    GOOD = "good"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class _Meaning:
    name: str
    severity: Severity
    # The event's text; `count` includes its noun.
    text: str
    # Visible to operators only.
    is_private: bool = False
    # Repetitions within `MERGE_S` are counted in one entry.
    is_merged: bool = False


class EventKind(Enum):
    """Every kind of event, with its one definition."""

    EXECUTOR_JOINED = _Meaning("executor_joined", Severity.GOOD, "{subject} joined")
    """This router has linked an executor for the first time since it started."""
    EXECUTOR_BACK = _Meaning("executor_back", Severity.GOOD, "{subject} is back")
    """This router has reconnected to an executor that it had lost."""
    EXECUTOR_LOST = _Meaning("executor_lost", Severity.ERROR, "{subject} lost, {requests} moved")
    """The stream to an executor broke. Counts this router's requests that went back to the queue."""
    EXECUTOR_DRAINING = _Meaning("executor_draining", Severity.WARNING, "{subject} takes no new work")
    """An executor reports that it drains, or that its engine has stalled."""
    EXECUTOR_ACCEPTING = _Meaning("executor_accepting", Severity.GOOD, "{subject} takes new work again")
    """An executor that accepted no new work accepts it again."""
    ENGINE_STALLED = _Meaning(
        "engine_stalled", Severity.ERROR, "{subject}: engine stalled, the watchdog returned {requests}", is_merged=True
    )
    """An executor's watchdog returned sequences because the engine has stalled."""
    PREEMPTIONS = _Meaning("preemptions", Severity.WARNING, "{subject} preempted {sequences}", is_merged=True)
    """An executor preempted running sequences, because blocks ran out or for a higher class."""
    REDIS_UNAVAILABLE = _Meaning("redis_unavailable", Severity.ERROR, "Redis is unavailable", is_private=True)
    """A call of the ledger failed after one that succeeded."""
    REDIS_AVAILABLE = _Meaning("redis_available", Severity.GOOD, "Redis is available again", is_private=True)
    """A call of the ledger succeeded after one that failed."""
    ADMISSION_LOADED = _Meaning("admission_loaded", Severity.NOTE, "the admission file was reloaded", is_private=True)
    """A changed admission file is in force."""
    ADMISSION_REFUSED = _Meaning(
        "admission_refused", Severity.ERROR, "the admission file was refused{detail}", is_private=True
    )
    """A changed admission file is invalid; the previous rules stay in force."""


@dataclass(frozen=True, slots=True)
class Event:
    """One entry. `entry_id` stays the same while repetitions are counted; `number` grows with every change. `at_ms` is
    the router's time of day, for display only."""

    entry_id: int
    number: int
    kind: EventKind
    at_s: float
    at_ms: int
    subject: str = ""
    model: str = ""
    count: int = 0
    detail: str = ""

    @property
    def text(self) -> str:
        """Returns the entry's text."""
        return self.kind.value.text.format(
            subject=self.subject,
            requests=_counted(self.count, "request"),
            sequences=_counted(self.count, "sequence"),
            detail=f": {self.detail}" if self.detail else "",
        )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


@dataclass(slots=True)
class _Known:
    """The last report of an executor."""

    is_draining: bool = False
    num_preemptions: int | None = None


class EventLog:
    """The newest events, oldest first."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, time_of_day_ms: Callable[[], int] = unix_ms
    ) -> None:
        self._clock = clock
        self._time_of_day_ms = time_of_day_ms
        self._lock = threading.Lock()
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._number = 0
        self._executors: OrderedDict[tuple[str, str], _Known] = OrderedDict()
        self._redis_is_up = True

    @property
    def newest(self) -> int:
        """The number of the newest change; 0: none."""
        return self._number

    def since(self, number: int) -> list[Event]:
        """Returns events newer than the change of that number, oldest first."""
        with self._lock:
            return [event for event in self._events if event.number > number]

    def add(self, kind: EventKind, subject: str = "", model: str = "", count: int = 0, detail: str = "") -> None:
        """Adds an event, or increments the entry of a repeated one."""
        with self._lock:
            self._number += 1
            now_s = self._clock()
            event = Event(
                self._number, self._number, kind, now_s, self._time_of_day_ms(), subject, model, count, detail
            )
            before = self._to_merge(event) if kind.value.is_merged else None
            if before is not None:
                self._events.remove(before)
                # The first one starts the merging interval.
                event = replace(before, number=self._number, at_ms=event.at_ms, count=before.count + count)
            self._events.append(event)

    def _to_merge(self, event: Event) -> Event | None:
        for one in self._events:
            is_same = (one.kind, one.subject, one.model) == (event.kind, event.subject, event.model)
            if is_same and event.at_s - one.at_s < MERGE_S:
                return one
        return None

    # Events of executors.

    def executor_linked(self, executor_id: str, model: str) -> None:
        """An executor is linked."""
        is_known = (model, executor_id) in self._executors
        self._remember(executor_id, model, _Known())
        self.add(EventKind.EXECUTOR_BACK if is_known else EventKind.EXECUTOR_JOINED, executor_id, model)

    def executor_lost(self, executor_id: str, model: str, num_requests: int) -> None:
        """An executor is lost, and so many of this router's requests return to the queue."""
        self.add(EventKind.EXECUTOR_LOST, executor_id, model, num_requests)

    def executor_reported(self, executor_id: str, model: str, *, is_draining: bool, num_preemptions: int) -> None:
        """An executor has reported."""
        known = self._executors.get((model, executor_id))
        if known is None:
            known = self._remember(executor_id, model, _Known())
        if is_draining != known.is_draining:
            known.is_draining = is_draining
            kind = EventKind.EXECUTOR_DRAINING if is_draining else EventKind.EXECUTOR_ACCEPTING
            self.add(kind, executor_id, model)
        before, known.num_preemptions = known.num_preemptions, num_preemptions
        if before is not None and num_preemptions > before:
            self.add(EventKind.PREEMPTIONS, executor_id, model, num_preemptions - before)

    def engine_stalled(self, executor_id: str, model: str) -> None:
        """An executor's watchdog returned a request."""
        self.add(EventKind.ENGINE_STALLED, executor_id, model, 1)

    def _remember(self, executor_id: str, model: str, known: _Known) -> _Known:
        self._executors[model, executor_id] = known
        self._executors.move_to_end((model, executor_id))
        if len(self._executors) > MAX_EXECUTORS:
            self._executors.popitem(last=False)
        return known

    # Events of the router itself.

    def ledger_called(self, call: LedgerCall) -> None:
        """A call of the ledger has finished."""
        if call.succeeded != self._redis_is_up:
            self._redis_is_up = call.succeeded
            self.add(EventKind.REDIS_AVAILABLE if call.succeeded else EventKind.REDIS_UNAVAILABLE)

    def admission_file_read(self, problem: str | None) -> None:
        """The admission file has changed and is in force, or is invalid."""
        if problem is None:
            self.add(EventKind.ADMISSION_LOADED)
        else:
            self.add(EventKind.ADMISSION_REFUSED, detail=problem)
