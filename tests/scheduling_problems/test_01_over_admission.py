"""Problem 1: a request is admitted when the first chunk of its prompt fits; too many are admitted and recomputed."""

from __future__ import annotations

from dataclasses import replace

from inflight.executor.scheduler.limits import SchedulerPolicy
from inflight.executor.scheduler.scheduler import Refusal, Scheduler
from inflight.executor.scheduler.sequence import Sequence
from tests.scheduling_problems.served_line import Asked, open_line
from tests.support.ledger.store_pool import StorePool
from tests.support.scheduler.scheduling import BLOCK_SIZE, LIMITS, make_scheduler, make_sequence, step

MANY_SEATS = replace(LIMITS, max_num_sequences=8, num_standby_sequences=0, max_num_tokens=16, context_length=128)
OVERCOMMITTED = replace(MANY_SEATS, policy=SchedulerPolicy.MAX_UTILIZATION)
FIRST_CHUNK_BLOCKS = 16 // BLOCK_SIZE


def long_prompt(request_id: str, num_reserved_blocks: int) -> Sequence:
    """A prompt of 64 tokens, four steps long, that the ledger believes to need so little."""
    sequence = make_sequence(request_id, range(64), max_tokens=8, salt=None)
    sequence.num_reserved_blocks = num_reserved_blocks
    return sequence


def test_no_request_is_admitted_on_its_first_chunk_alone() -> None:
    for limits in (MANY_SEATS, OVERCOMMITTED):
        scheduler = make_scheduler(limits, num_blocks=64)

        assert scheduler.offer(long_prompt("a", FIRST_CHUNK_BLOCKS)) is Refusal.INVALID


def test_whole_prompt_has_its_blocks_before_its_first_chunk_is_computed() -> None:
    """Where more is promised than there is, too: of two prompts the second waits until it fits as a whole."""
    scheduler = make_scheduler(OVERCOMMITTED, num_blocks=40)
    first, second = long_prompt("first", 17), long_prompt("second", 17)
    assert scheduler.offer(first) is None
    step(scheduler)
    assert len(first.block_table) == 64 // BLOCK_SIZE + 1
    for _ in range(3):
        step(scheduler)

    # When what is left is enough for twice the second one's first chunk
    taken = scheduler.pool.allocate(scheduler.pool.num_available - 2 * FIRST_CHUNK_BLOCKS)
    assert scheduler.offer(second) is None
    step(scheduler)

    assert second.block_table == []
    scheduler.pool.release(taken or [])
    step(scheduler)
    assert second.seat is not None


async def test_ledger_promises_no_executor_more_long_prompts_than_it_holds_whole(store_pool: StorePool) -> None:
    line = await open_line(store_pool, make_scheduler(MANY_SEATS, num_blocks=40))
    for i in range(6):
        await line.submit(Asked(f"r{i}", prompt_tokens=64, output_tokens=8, max_tokens=8))

    assert await store_pool.reserved_blocks() == {"x": 36}
    assert await store_pool.num_waiting() == 4
    await line.run(6, max_turns=80)


async def test_crowd_of_long_prompts_loses_hardly_any_work(store_pool: StorePool) -> None:
    """Forty prompts for a pool that holds seven of them, their outputs up to twice as long as usual."""
    scheduler = Scheduler(replace(OVERCOMMITTED, max_num_sequences=16), make_scheduler(num_blocks=128).pool)
    line = await open_line(store_pool, scheduler)
    await line.learn(Asked("usual", prompt_tokens=64, output_tokens=10, max_tokens=40))
    for i in range(40):
        await line.submit(Asked(f"r{i}", prompt_tokens=64, output_tokens=8 + 3 * (i % 5), max_tokens=40))

    await line.run(40, max_turns=600)
    assert scheduler.num_recomputed_tokens <= 0.1 * scheduler.num_computed_tokens
