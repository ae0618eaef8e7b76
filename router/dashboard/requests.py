"""Timelines of requests, and counts by model and tenant: a `RequestObserver`.

It keeps live requests and the last that ended.

A timeline has the stages of one request with their times. It has no prompt and no output. A delivery of tokens costs
two additions.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from inflight.common.errors import Reason
from inflight.router.telemetry.events import PlacedAt, RequestEnd, RequestFacts, RequestRecorder

MAX_ENDED = 200
# Live requests beyond this number are counted but have no timeline.
MAX_LIVE = 10_000
MAX_ENTRIES = 64
LEFT = "left"


class Stage(Enum):
    """The stage of a request."""

    QUEUED = "queued"
    """It waits in the queue for a seat and blocks."""
    PLACED = "placed"
    """It is on standby at an executor, without a seat."""
    PREFILL = "prefill"
    """It has a seat; no token of this placement was sent yet."""
    DECODE = "decode"
    """Tokens are sent."""
    PREEMPTED = "preempted"
    """It was preempted and waits on its executor for a seat."""


RUNNING = frozenset({Stage.PREFILL, Stage.DECODE})


@dataclass(slots=True)
class Tally:
    """Counts of one tenant's requests of one model since the last sample, and its live requests."""

    num_live: int = 0
    num_running: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    num_moved: int = 0
    ended: Counter[str] = field(default_factory=Counter)

    def reset(self) -> None:
        """Resets the counts; live requests stay."""
        self.prompt_tokens = self.cached_tokens = self.output_tokens = self.num_moved = 0
        self.ended = Counter()


@dataclass(frozen=True, slots=True)
class Entry:
    """A stage that began at `at_s` on the monotonic clock. `why` says why a request moved."""

    stage: Stage
    at_s: float
    executor_id: str = ""
    why: str = ""


class Timeline(RequestRecorder):
    """One request."""

    __slots__ = (
        "_log",
        "_tally",
        "cached_tokens",
        "end",
        "ended_s",
        "entries",
        "executor_id",
        "facts",
        "is_kept",
        "num_left_out",
        "num_resumed",
        "outcome",
        "output_tokens",
        "revision",
        "stage",
    )

    def __init__(self, log: RequestLog, facts: RequestFacts) -> None:
        self.facts = facts
        self.entries: list[Entry] = []
        self.stage: Stage | None = None
        self.executor_id = ""
        self.output_tokens = facts.prior_tokens
        self.cached_tokens = 0
        self.num_resumed = 0
        # Number of entries dropped from the middle of a long timeline.
        self.num_left_out = 0
        self.outcome: str | None = None
        self.end: RequestEnd | None = None
        self.ended_s: float | None = None
        self.revision = 0
        self.is_kept = False
        self._log = log
        self._tally = Tally()

    def admitted(self) -> None:
        self._tally = self._log.tally_of(self.facts)
        self._tally.num_live += 1
        self._log.keep(self)
        self._enter(Stage.QUEUED, at_s=self.facts.arrived)

    def placed(self, placed: PlacedAt) -> None:
        self.executor_id = placed.executor_id
        self._enter(Stage.PLACED)

    def boarded(self, cached_tokens: int) -> None:
        self.cached_tokens = cached_tokens
        self._tally.prompt_tokens += self.facts.prompt_tokens
        self._tally.cached_tokens += cached_tokens
        self._enter(Stage.PREFILL)

    def boarded_again(self) -> None:
        self._enter(Stage.PREFILL)

    def sent(self, num_tokens: int, interval_s: float | None) -> None:
        self._tally.output_tokens += num_tokens
        if self.outcome is not None:
            return  # its end, which counts all of them, was heard of before they were sent
        self.output_tokens += num_tokens
        if self.stage is not Stage.DECODE:
            self._enter(Stage.DECODE)

    def preempted(self) -> None:
        self._enter(Stage.PREEMPTED)

    def moved(self, why: str) -> None:
        self._tally.num_moved += 1
        self._enter(Stage.QUEUED, why=why)

    def extended(self) -> None:
        self._enter(Stage.QUEUED)

    def resumed(self) -> None:
        self.num_resumed += 1
        self._log.changed(self)

    def ended(self, end: RequestEnd) -> None:
        if end.output_tokens > self.output_tokens and self.entries:
            # Tokens that arrived with the end.
            began_s = self._log.now_s() - (end.decode_s or 0.0)
            self._enter(Stage.DECODE, at_s=max(began_s, self.entries[-1].at_s))
        self.output_tokens = end.output_tokens
        self.end = end
        self._tally.ended[end.outcome] += 1
        self._close(end.outcome)

    def left(self) -> None:
        self._close(LEFT)

    def _enter(self, stage: Stage, why: str = "", at_s: float | None = None) -> None:
        if self.outcome is not None or stage is self.stage:
            return
        self._tally.num_running += (stage in RUNNING) - (self.stage in RUNNING)
        self.stage = stage
        if not self.is_kept:
            return
        executor_id = "" if stage is Stage.QUEUED else self.executor_id
        self.entries.append(Entry(stage, self._log.now_s() if at_s is None else at_s, executor_id, why))
        if len(self.entries) > MAX_ENTRIES:
            del self.entries[MAX_ENTRIES // 2]
            self.num_left_out += 1
        self._log.changed(self)

    def _close(self, outcome: str) -> None:
        if self.outcome is not None or self.stage is None:
            return
        self._tally.num_running -= self.stage in RUNNING
        self._tally.num_live -= 1
        self.outcome = outcome
        self.ended_s = self._log.now_s()
        self._log.close(self)


Key = tuple[str, str, str]


def _key(facts: RequestFacts) -> Key:
    return facts.model, facts.tenant, facts.request_id


class RequestLog:
    """Live requests, and the most recently ended ones. Implements
    `inflight.router.telemetry.events.RequestObserver`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.now_s = clock
        self._tallies: dict[tuple[str, str], Tally] = {}
        self._refused: Counter[str] = Counter()
        # In order of the last change.
        self._kept: OrderedDict[int, Timeline] = OrderedDict()
        self._by_key: dict[Key, Timeline] = {}
        self._ended: deque[Timeline] = deque()
        self._revision = 0

    @property
    def newest(self) -> int:
        """The number of the newest change; 0: none."""
        return self._revision

    def follow(self, facts: RequestFacts) -> Timeline:
        return Timeline(self, facts)

    def refused(self, model: str, priority_class: str, reason: Reason) -> None:
        self._refused[model] += 1

    def find(self, model: str, tenant: str, request_id: str) -> Timeline | None:
        """Returns the newest timeline of a request; None if this router has none."""
        return self._by_key.get((model, tenant, request_id))

    def since(self, revision: int) -> Iterator[Timeline]:
        """Timelines that changed after the change of that number, newest change first."""
        for timeline in reversed(self._kept.values()):
            if timeline.revision <= revision:
                return
            yield timeline

    def take(self) -> tuple[dict[tuple[str, str], Tally], Counter[str]]:
        """Returns counts by model and tenant, and refusals by model, since the last call. Forgets tenants without live
        requests."""
        taken: dict[tuple[str, str], Tally] = {}
        for key, tally in list(self._tallies.items()):
            taken[key] = Tally(
                tally.num_live,
                tally.num_running,
                tally.prompt_tokens,
                tally.cached_tokens,
                tally.output_tokens,
                tally.num_moved,
                tally.ended,
            )
            tally.reset()
            if tally.num_live == 0:
                del self._tallies[key]
        refused, self._refused = self._refused, Counter()
        return taken, refused

    # Called by timelines.

    def tally_of(self, facts: RequestFacts) -> Tally:
        """Returns the counts that a request belongs to."""
        return self._tallies.setdefault((facts.model, facts.tenant), Tally())

    def keep(self, timeline: Timeline) -> None:
        """Counts an admitted request."""
        if len(self._kept) - len(self._ended) >= MAX_LIVE:
            return
        timeline.is_kept = True
        self._by_key[_key(timeline.facts)] = timeline

    def changed(self, timeline: Timeline) -> None:
        """A timeline has changed."""
        if timeline.is_kept:
            self._revision += 1
            timeline.revision = self._revision
            self._kept[id(timeline)] = timeline
            self._kept.move_to_end(id(timeline))

    def close(self, timeline: Timeline) -> None:
        """Moves a request to the ended ones."""
        if not timeline.is_kept:
            return
        self.changed(timeline)
        self._ended.append(timeline)
        if len(self._ended) > MAX_ENDED:
            self._drop(self._ended.popleft())

    def _drop(self, timeline: Timeline) -> None:
        del self._kept[id(timeline)]
        if self._by_key.get(_key(timeline.facts)) is timeline:
            del self._by_key[_key(timeline.facts)]
