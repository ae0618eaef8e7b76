"""Records of the steps that the engine loop has retired. Pure data; times are by the loop's clock."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from inflight.executor.scheduler.blocks import BlockPool, HostBlocks, PoolCounts, WindowPool
from inflight.executor.scheduler.prefix_cache import PrefixCache
from inflight.executor.scheduler.sequence import StepPlan
from inflight.executor.scheduler.states import StateCounts
from inflight.executor.scheduler.step_constraint import StepConstraint


class LoopPart(IntEnum):
    """The parts of one iteration of the loop, in their order."""

    INBOX = 0
    PLAN = 1
    LAUNCH = 2
    WAIT = 3
    RETIRE = 4
    PUBLISH = 5


PART_NAMES = tuple(part.name.lower() for part in LoopPart)


class DeviceTimes(NamedTuple):
    """Device times of a step in seconds: waiting for the host (`exposed_s`), then working (`busy_s`)."""

    exposed_s: float
    busy_s: float


NO_TIMES = DeviceTimes(0.0, 0.0)
"""The times of a step that failed."""


class PlanCounts(NamedTuple):
    """Composition of a step. Sequences that verify drafts count as decodes. `boarded_prompt_tokens` are the prompt
    tokens of the sequences that board for the first time."""

    num_decodes: int
    num_prefills: int
    prefill_tokens: int
    num_boarded: int
    num_paused: int
    boarded_prompt_tokens: int
    constraint: StepConstraint

    @classmethod
    def of(cls, plan: StepPlan) -> PlanCounts:
        """Counts a plan at its launch. Later its sequences may have moved to other queues."""
        num_decodes, num_rows = plan.num_decodes + len(plan.drafts), plan.num_rows
        return cls(
            num_decodes,
            num_rows - num_decodes,
            sum(plan.lengths[num_decodes:]) if num_rows > num_decodes else 0,
            len(plan.boarded),
            len(plan.preempted),
            sum(s.num_prompt_tokens for s in plan.boarded if not s.num_preemptions) if plan.boarded else 0,
            plan.constraint,
        )


class HostPrefixCounts(NamedTuple):
    """Prefix blocks in host memory: those there now, and since the start those that were stored, that came back to the
    device and that were dropped to make room; and the prompt tokens found there."""

    num_blocks: int = 0
    stored_blocks: int = 0
    restored_blocks: int = 0
    dropped_blocks: int = 0
    hit_tokens: int = 0


class KvCounts(NamedTuple):
    """KV block counts: free, referenced by sequences, cached without references, findable by hash, reserved, and used
    in host memory by preempted sequences. `query_tokens` and `hit_tokens` were looked up and found in the prefix cache
    since the start, the latter on the device or in host memory. `window` counts the blocks
    of the layers with a sliding window; None if all layers share a pool. `states` counts recurrent states; None if no
    layer has any."""

    free_blocks: int
    used_blocks: int
    evictable_blocks: int
    published_blocks: int
    reserved_blocks: int
    used_host_blocks: int
    query_tokens: int
    hit_tokens: int
    host_prefixes: HostPrefixCounts = HostPrefixCounts()
    window: PoolCounts | None = None
    states: StateCounts | None = None

    @classmethod
    def of(
        cls, pool: BlockPool, host: HostBlocks, cache: PrefixCache, reserved_blocks: int, windows: WindowPool | None
    ) -> KvCounts:
        return cls(
            pool.num_free,
            pool.num_used,
            pool.num_cached,
            pool.num_published,
            reserved_blocks,
            host.num_in_copies,
            cache.num_query_tokens,
            cache.num_hit_tokens,
            HostPrefixCounts(
                host.num_prefix_blocks, host.num_stored, cache.num_restored, host.num_dropped, cache.num_host_hit_tokens
            ),
            None if windows is None else windows.counts(),
        )


class StepRecord(NamedTuple):
    """One step. `part_s` are the seconds that the loop's parts took since the previous record; empty if an engine does
    not measure them. `num_active` sequences have a seat afterwards, `num_queued` have none. A failed step has no
    tokens."""

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
