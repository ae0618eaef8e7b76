"""A small scheduler, sequences for it, and steps without a device, for the unit tests of the scheduler."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from inflight.executor.engine.runner import PendingStep, StepRunner
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.scheduler import Batching, Scheduler, SchedulerLimits
from inflight.executor.scheduler.sequence import (
    FinishEvent,
    FinishReason,
    Sampling,
    Sequence,
    StepOutcome,
    StepPlan,
    StepResult,
    Stopping,
)
from inflight.executor.scheduler.step_constraint import DraftTerms

BLOCK_SIZE = 4
GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)
STOP_ID = 99


def make_limits(
    *, max_num_sequences: int, num_standby_sequences: int, max_num_tokens: int, context_length: int, **others: Any
) -> SchedulerLimits:
    """Limits of an executor with in-flight batching, chunks and a prefix cache, unless `others` says something else."""
    usual: dict[str, Any] = {"enable_chunked_context": True, "batching": Batching.INFLIGHT, "enable_prefix_cache": True}
    return SchedulerLimits(max_num_sequences, num_standby_sequences, max_num_tokens, context_length, **usual | others)


LIMITS = make_limits(max_num_sequences=2, num_standby_sequences=2, max_num_tokens=8, context_length=64)


def make_scheduler(limits: SchedulerLimits = LIMITS, num_blocks: int = 32) -> Scheduler:
    """A scheduler with an empty pool."""
    return Scheduler(limits, BlockPool(num_blocks, BLOCK_SIZE))


def make_sequence(
    request_id: str,
    prompt: Iterable[int],
    *,
    attempt: int = 1,
    prior_output: Iterable[int] = (),
    max_tokens: int = 4,
    min_tokens: int = 0,
    salt: bytes | None = b"",
    priority: int = 0,
) -> Sequence:
    prompt = list(prompt)
    return Sequence(
        request_id=request_id,
        attempt=attempt,
        token_ids=[*prompt, *prior_output],
        num_prompt_tokens=len(prompt),
        sampling=GREEDY,
        stopping=Stopping(max_tokens, min_tokens, frozenset({STOP_ID})),
        num_reserved_blocks=-(-(len(prompt) + max_tokens) // BLOCK_SIZE),
        cache_salt=salt,
        priority=priority,
    )


def rows_of(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    """Of each row: request, start, tokens, whether it samples."""
    return [(row.sequence.request_id, row.start, row.num_tokens, row.samples) for row in plan.rows]


def retire(scheduler: Scheduler, plan: StepPlan, token_id: int = 1) -> StepOutcome:
    """Retires a plan in which every row that samples yields `token_id`."""
    return scheduler.update(StepResult(plan, tuple(token_id for row in plan.rows if row.samples)))


def step(scheduler: Scheduler, token_id: int = 1) -> StepOutcome:
    """Plans a step and retires it."""
    return retire(scheduler, scheduler.schedule(), token_id)


def run_overlapped(
    scheduler: Scheduler, runner: StepRunner, num_ahead: int = 1, terms: DraftTerms | None = None
) -> None:
    """To the end of everyone held, each step launched before the one before is read, if that one allows it. With
    `num_ahead` 0 it is read first."""
    launched: deque[tuple[StepPlan, PendingStep]] = deque()
    while launched or not scheduler.is_idle:
        plan = scheduler.schedule(terms=terms)
        if plan.sequences:
            launched.append((plan, runner.launch(plan)))
        num_left = num_ahead if plan.sequences and launched[-1][1].allows_next else 0
        while len(launched) > num_left:
            done, pending = launched.popleft()
            scheduler.update(StepResult(done, pending.result(), pending.logprobs()))


def run_until_idle(scheduler: Scheduler) -> list[FinishEvent]:
    """The ends of everyone held, in order."""
    finished: list[FinishEvent] = []
    while not scheduler.is_idle:
        finished.extend(step(scheduler).finished)
    return finished


def ends_of(outcome: StepOutcome) -> list[tuple[str, FinishReason]]:
    """Of each end: request and reason."""
    return [(event.sequence.request_id, event.reason) for event in outcome.finished]
