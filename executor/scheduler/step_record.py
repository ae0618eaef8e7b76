"""What a step was: the record that the loop leaves of each step that it retires. Pure data, times by its own clock."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from executor.scheduler.blocks import BlockPool
from executor.scheduler.prefix_cache import PrefixCache
from executor.scheduler.sequence import StepPlan
from executor.scheduler.step_constraint import StepConstraint


class LoopPart(IntEnum):
    """The parts of the loop's turn, in their order."""

    INBOX = 0
    PLAN = 1
    LAUNCH = 2
    WAIT = 3
    RETIRE = 4
    PUBLISH = 5


PART_NAMES = tuple(part.name.lower() for part in LoopPart)


class DeviceTimes(NamedTuple):
    """Seconds of a step: the device waited for the host, then it worked."""

    exposed_s: float
    busy_s: float


NO_TIMES = DeviceTimes(0.0, 0.0)
"""Of a step that failed."""


class PlanCounts(NamedTuple):
    """Who is in a step, and what kept it from holding more. `boarded_prompt_tokens` are of the prompts of those that
    board for the first time."""

    num_decodes: int
    num_prefills: int
    prefill_tokens: int
    num_boarded: int
    num_paused: int
    boarded_prompt_tokens: int
    constraint: StepConstraint

    @classmethod
    def of(cls, plan: StepPlan) -> PlanCounts:
        """Of a step that is being launched: later its sequences may be elsewhere."""
        num_decodes, num_rows = plan.num_decodes, plan.num_rows
        return cls(
            num_decodes,
            num_rows - num_decodes,
            sum(plan.lengths[num_decodes:]) if num_rows > num_decodes else 0,
            len(plan.boarded),
            len(plan.preempted),
            sum(s.num_prompt_tokens for s in plan.boarded if not s.num_preemptions) if plan.boarded else 0,
            plan.constraint,
        )


class KvCounts(NamedTuple):
    """KV blocks: that hold nothing, that sequences hold, that nobody holds and that have a prefix, that have a prefix,
    that are promised, of host memory. Tokens looked up in the prefix cache, and found, since the start."""

    free_blocks: int
    used_blocks: int
    evictable_blocks: int
    published_blocks: int
    reserved_blocks: int
    used_host_blocks: int
    query_tokens: int
    hit_tokens: int

    @classmethod
    def of(cls, pool: BlockPool, cache: PrefixCache, reserved_blocks: int, used_host_blocks: int) -> KvCounts:
        """As they are now."""
        return cls(
            pool.num_free,
            pool.num_used,
            pool.num_cached,
            pool.num_published,
            reserved_blocks,
            used_host_blocks,
            cache.num_query_tokens,
            cache.num_hit_tokens,
        )


class StepRecord(NamedTuple):
    """One step. `part_s` are the seconds that the loop's parts have taken since the record before; `num_active` have a
    seat afterwards, `num_queued` have none. A step that failed has brought nothing."""

    step: int
    ended_s: float
    part_s: tuple[float, ...]
    times: DeviceTimes
    plan: PlanCounts
    num_new_tokens: int
    num_finished: int
    num_active: int
    num_queued: int
    kv: KvCounts
