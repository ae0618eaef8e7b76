"""Conversations on a pool with room for one of them at a time, so that each turn's prefix was evicted before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from inflight.executor.engine.runner import StepRunner
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.limits import SchedulerLimits
from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.scheduler.sequence import Sampling, Sequence, Stopping
from inflight.executor.scheduler.step_record import HostPrefixCounts
from tests.support.device.swapping import BLOCK_SIZE
from tests.support.device.swapping import LIMITS as SWAPPING_LIMITS
from tests.support.scheduler.scheduling import run_overlapped

NUM_POOL_BLOCKS = 4
NUM_CONVERSATIONS = 3
LIMITS = replace(SWAPPING_LIMITS, enable_prefix_cache=True, num_host_blocks=12)


def conversations(
    make_runner: Callable[[SchedulerLimits], StepRunner], num_host_blocks: int
) -> tuple[list[list[int]], HostPrefixCounts]:
    """The tokens of each conversation after two turns, and what was copied."""
    limits = replace(LIMITS, num_host_blocks=num_host_blocks)
    runner, scheduler = make_runner(limits), Scheduler(limits, BlockPool(NUM_POOL_BLOCKS, BLOCK_SIZE))
    said = [[(5 + 11 * i + 7 * number) % 83 for i in range(37)] for number in range(NUM_CONVERSATIONS)]
    for turn in range(2):
        for number, prompt in enumerate(said):
            sequence = Sequence(
                request_id=f"{number}/{turn}",
                attempt=1,
                token_ids=[*prompt, number, 3],
                num_prompt_tokens=len(prompt) + 2,
                sampling=Sampling(0.0, 0, 1.0, 0),
                stopping=Stopping(8, 0, frozenset()),
                num_reserved_blocks=-(-(len(prompt) + 10) // BLOCK_SIZE),
                cache_salt=b"salt",
            )
            assert scheduler.offer(sequence) is None
            run_overlapped(scheduler, runner)
            said[number] = list(sequence.token_ids)
    scheduler.check_when_idle()
    runner.close()
    return said, scheduler.kv_counts().host_prefixes
