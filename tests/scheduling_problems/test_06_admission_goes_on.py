"""Problem 6: admission stops for good, while the engine reports that all is well."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from inflight.executor.scheduler.limits import Overcommit, SchedulerPolicy
from inflight.executor.scheduler.scheduler import Batching, SchedulerLimits
from inflight.router.ledger.types import Attempt, Demand, Placement
from tests.scheduling_problems.served_line import Asked, open_line
from tests.support.ledger.store_pool import SETTINGS, StorePool
from tests.support.scheduler.scheduling import LIMITS, make_scheduler, make_sequence, retire

CROWDED = replace(
    LIMITS,
    max_num_sequences=4,
    num_standby_sequences=2,
    max_num_tokens=16,
    policy=SchedulerPolicy.MAX_UTILIZATION,
    overcommit=Overcommit(watermark=0.02, margin=0.05, max_steps_away=20),
)


def test_parked_ones_never_count_as_running() -> None:
    """Who was preempted has no seat and no blocks, and does not keep others from theirs."""
    scheduler = make_scheduler(replace(CROWDED, max_num_sequences=2), num_blocks=7)
    for name in "ab":
        sequence = make_sequence(name, [1, 2], max_tokens=22, salt=None)
        sequence.num_reserved_blocks = 2
        assert scheduler.offer(sequence) is None
    while not scheduler.num_preempted:
        retire(scheduler, scheduler.schedule())

    assert (scheduler.num_running, scheduler.num_preempted, scheduler.num_waiting) == (1, 1, 0)
    assert scheduler.pool.num_used == sum(len(s.block_table) for s in scheduler.held() if s.seat is not None)
    # The one that is left ends, and the parked one is computed at once
    while scheduler.num_held == 2:
        assert retire(scheduler, scheduler.schedule()).tokens.token_ids
    (parked,) = scheduler.held()
    assert [row.sequence for row in scheduler.schedule().rows] == [parked]


@pytest.mark.parametrize("batching", list(Batching))
@pytest.mark.parametrize("policy", list(SchedulerPolicy))
async def test_while_work_exists_every_step_computes_some(
    store_pool: StorePool, policy: SchedulerPolicy, batching: Batching
) -> None:
    """Through ledger and scheduler: `run` fails at a step that computes nothing, and if a request is not served."""
    limits: SchedulerLimits = replace(CROWDED, policy=policy, batching=batching)
    line = await open_line(store_pool, make_scheduler(limits, num_blocks=20))
    numbers = random.Random(3)
    await line.learn(Asked("usual", prompt_tokens=8, output_tokens=4, max_tokens=24))
    for i in range(24):
        await line.submit(Asked(f"r{i}", numbers.randint(1, 24), numbers.randint(1, 24), 24))

    await line.run(24, max_turns=500)
    assert sorted(line.ended) == sorted(line.asked)
    assert await store_pool.reserved_blocks() == {"x": 0}
    assert await store_pool.num_waiting() == 0


async def test_who_waits_to_be_handed_back_takes_no_seat_in_the_ledger(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(sequences=1))
    await a.place("stuck", 10)
    # Its executor does not know it: it is lost, and its owner does nothing about it
    await store_pool.wait(2001)
    await a.store.report(store_pool.next_report(sequences=1))

    assert await store_pool.reserved_blocks() == {"x": 0}
    assert await a.store.submit(Demand("other", 2, blocks=10)) == Placement("other", 1, "x", 1)


async def test_room_kept_for_one_that_leaves_is_there_for_the_others(store_pool: StorePool) -> None:
    a = store_pool.router("a", replace(SETTINGS, max_bypass=1))
    await a.store.report(store_pool.next_report(blocks=10))
    await a.place("running", 6)
    await a.queue(Demand("large", 2, blocks=8))
    await a.place("small", 1)
    for i in range(3):
        await a.queue(Demand(f"held up {i}", 2, blocks=1))

    await a.store.cancel("large")
    assert await a.placed() == ["held up 0", "held up 1", "held up 2"]
    for request_id in ("running", "small", "held up 0", "held up 1", "held up 2"):
        await a.store.settle([Attempt(request_id, 1)])
    assert (await a.place("whole", 10)).executor_id == "x"
