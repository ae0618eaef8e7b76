"""Counts and times of vLLM's steps, as reports, metrics and `WatchSteps` have them.

A step is what was published together: steps whose output was not taken in between count as one, and have the mean of
their times. vLLM tells how long neither its device nor its host worked, so a step's time is that between two of them
while there is work. Pure: times come from a clock, in seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest

from inflight.executor.engine.output import EngineStatus, ReportedSequence
from inflight.executor.scheduler.sequence import Sequence
from inflight.executor.scheduler.step_constraint import StepBounds, StepConstraint
from inflight.executor.scheduler.step_record import DeviceTimes, KvCounts, PlanCounts, StepRecord
from inflight.executor.speculation.counts import DraftCounts
from inflight.executor.vllm.backend import StepStats

# Weight of the newest step: about the last 20 count.
SMOOTHING = 0.05
# A step that compiles something takes seconds. It counts as at most so many times slower than the others, and is
# forgotten with the first step that is so many times faster.
FAR = 8.0
LONG_S = 1.0


@dataclass(slots=True)
class StepWork:
    """What the steps since the last publication did. `num_active` is the number of sequences that got tokens."""

    num_steps: int = 0
    num_active: int = 0
    num_new_tokens: int = 0
    num_boarded: int = 0
    boarded_prompt_tokens: int = 0
    num_prompt_tokens: int = 0
    num_query_tokens: int = 0
    num_hit_tokens: int = 0
    num_preemptions: int = 0
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()

    def add(self, other: StepWork) -> None:
        """Adds the work of other steps."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.drafted = _sums(self.drafted, other.drafted)
        self.accepted = _sums(self.accepted, other.accepted)


_COUNTS = tuple(name for name in StepWork.__slots__ if name not in ("drafted", "accepted"))


class Work:
    """Collects `StepWork`."""

    def __init__(self) -> None:
        self._now = StepWork()

    def board(self, sequence: Sequence) -> None:
        """Adds a sequence that got its first token here."""
        self._now.num_boarded += 1
        self._now.boarded_prompt_tokens += sequence.num_prompt_tokens

    def produce(self, num_tokens: int) -> None:
        """Adds the tokens of a sequence."""
        self._now.num_active += 1
        self._now.num_new_tokens += num_tokens

    def step(self, stats: StepStats) -> None:
        """Adds a step."""
        self._now.add(
            StepWork(
                num_steps=1,
                num_prompt_tokens=stats.num_prompt_tokens,
                num_query_tokens=stats.num_query_tokens,
                num_hit_tokens=stats.num_hit_tokens,
                num_preemptions=stats.num_preemptions,
                drafted=stats.drafted,
                accepted=stats.accepted,
            )
        )

    def take(self) -> StepWork:
        """Returns what has been collected since the last step, and begins again if there was one. Tokens that come
        before vLLM's statistics of their step wait for these."""
        taken = self._now
        if taken.num_steps:
            self._now = StepWork()
        return taken


@dataclass(frozen=True, slots=True)
class Standing:
    """Where the engine stands after a step: its blocks and sequences. `published_blocks` are in the prefix cache, in
    use or not."""

    total_blocks: int
    used_blocks: int
    published_blocks: int
    overrun_blocks: int
    reserved_blocks: int
    max_num_sequences: int
    num_standby: int
    num_running: int
    num_waiting: int
    num_preempted: int
    waiting_prefill_tokens: int
    held: tuple[ReportedSequence, ...]
    draining: bool

    @property
    def cached_blocks(self) -> int:
        """Blocks in the prefix cache that no sequence uses, at least: not all that are in use need be in the cache."""
        return max(0, self.published_blocks - self.used_blocks)

    @property
    def constraint(self) -> StepConstraint:
        """What keeps the batch from being larger."""
        if self.num_running >= self.max_num_sequences:
            return StepConstraint.SEATS
        return StepConstraint.BLOCKS if self.num_waiting or self.num_preempted else StepConstraint.NO_WORK


class StepCounts:
    """Totals since the start, and smoothed speeds. A step computes at most `max_num_tokens`."""

    def __init__(self, clock: Callable[[], float], max_num_tokens: int) -> None:
        self._clock = clock
        self._max_num_tokens = max_num_tokens
        self._total = StepWork()
        self._bounds = StepBounds()
        # When the newest step ended, or work came to an idle engine; None while it is idle.
        self._since_s: float | None = None
        self._newest_s = 0.0
        self._step_s = self._prefill_tokens_per_s = self._elapsed_s = 0.0

    @property
    def num_steps(self) -> int:
        """Steps since the start."""
        return self._total.num_steps

    def wake(self) -> None:
        """Records that there is work."""
        if self._since_s is None:
            self._since_s = self._clock()

    def rest(self) -> None:
        """Records that there is no work."""
        self._since_s = None

    def add(self, work: StepWork, standing: Standing) -> None:
        """Adds a step."""
        now_s, total = self._clock(), self._total
        self._newest_s = 0.0 if self._since_s is None else max(0.0, now_s - self._since_s)
        self._since_s = now_s if standing.held else None
        self._elapsed_s += self._newest_s
        if self._newest_s:
            self._observe_speeds(work)
        work.num_steps = 1
        total.add(work)
        self._bounds.count(standing.constraint)

    def _observe_speeds(self, work: StepWork) -> None:
        step_s = self._newest_s / work.num_steps
        # Reports may come at once after each other: only a step that took seconds is forgotten.
        is_over = self._step_s > max(LONG_S, FAR * step_s)
        self._step_s = _smoothed(self._step_s, step_s, restart=is_over)
        # vLLM counts a prompt in the step of its last chunk.
        rate = min(work.num_prompt_tokens / work.num_steps, self._max_num_tokens) / step_s
        if rate:
            self._prefill_tokens_per_s = _smoothed(self._prefill_tokens_per_s, rate, restart=is_over)

    def status(self, standing: Standing) -> EngineStatus:
        """Returns the status."""
        total = self._total
        return EngineStatus(
            budget_blocks=max(0, standing.total_blocks - standing.overrun_blocks),
            saved_blocks=0,
            total_blocks=standing.total_blocks,
            used_blocks=standing.used_blocks,
            cached_blocks=standing.cached_blocks,
            budget_sequences=standing.max_num_sequences + standing.num_standby,
            num_running=standing.num_running,
            num_waiting=standing.num_waiting,
            waiting_prefill_tokens=standing.waiting_prefill_tokens,
            held=standing.held,
            draining=standing.draining,
            step_ms=self._step_s * 1000,
            prefill_tokens_per_s=self._prefill_tokens_per_s,
            num_steps=total.num_steps,
            num_output_tokens=total.num_new_tokens,
            exposed_host_ms=None,
            device_busy_fraction=None,
            device_busy_s=None,
            elapsed_s=self._elapsed_s,
            num_preempted=standing.num_preempted,
            num_preemptions=total.num_preemptions,
            computed_tokens=total.num_prompt_tokens + total.num_new_tokens,
            recomputed_tokens=0,
            used_host_blocks=0,
            reserve_quantile=1.0,
            constraint=self._bounds.newest,
            bounds=self._bounds.num_steps,
            kv=self._kv(standing),
            drafts=DraftCounts(total.drafted, total.accepted),
        )

    def record(self, work: StepWork, num_finished: int, num_paused: int, standing: Standing) -> StepRecord:
        """Returns the record of the step that was added last."""
        plan = PlanCounts(
            num_decodes=max(0, work.num_active - work.num_boarded),
            num_prefills=work.num_boarded,
            prefill_tokens=work.num_prompt_tokens,
            num_boarded=work.num_boarded,
            num_paused=num_paused,
            boarded_prompt_tokens=work.boarded_prompt_tokens,
            constraint=standing.constraint,
        )
        return StepRecord(
            self._total.num_steps,
            self._clock(),
            (),  # vLLM does not say them
            DeviceTimes(0.0, self._newest_s),
            plan,
            work.num_new_tokens,
            num_finished,
            standing.num_running,
            standing.num_waiting + standing.num_preempted,
            self._kv(standing),
        )

    def _kv(self, standing: Standing) -> KvCounts:
        return KvCounts(
            free_blocks=standing.total_blocks - standing.used_blocks - standing.cached_blocks,
            used_blocks=standing.used_blocks,
            evictable_blocks=standing.cached_blocks,
            published_blocks=standing.published_blocks,
            reserved_blocks=standing.reserved_blocks,
            used_host_blocks=0,
            query_tokens=self._total.num_query_tokens,
            hit_tokens=self._total.num_hit_tokens,
        )


def _smoothed(old: float, new: float, *, restart: bool) -> float:
    if not old or restart:
        return new
    return old + SMOOTHING * (max(old / FAR, min(old * FAR, new)) - old)


def _sums(some: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(one + other for one, other in zip_longest(some, others, fillvalue=0))
