"""Requests without max_tokens in the ledger: each placement reserves a part, the next one more."""

from __future__ import annotations

import dataclasses

from inflight.router.ledger.types import (
    Attempt,
    Demand,
    Ending,
    ExecutorReport,
    Placement,
    TenantLimits,
)
from tests.support.ledger.store_pool import RouterSide, StorePool

BLOCK_SIZE, PROMPT, CONTEXT, STEP = 16, 16, 160, 32
"""Ten blocks to the end of the context; three for prompt and the first part."""


def asked(request_id: str, tenant: str = "t", output: int = 0, **fields: object) -> Demand:
    demand = Demand(
        request_id,
        2,
        blocks=CONTEXT // BLOCK_SIZE,
        tenant=tenant,
        prompt_tokens=PROMPT,
        max_tokens=CONTEXT - PROMPT,
        block_size=BLOCK_SIZE,
        reservation_tokens=STEP,
        **fields,  # type: ignore[arg-type]
    )
    return dataclasses.replace(demand, placement_blocks=demand.blocks_after(output))


def extending(pool: StorePool, blocks: int = 10, executor_id: str = "x", **fields: object) -> ExecutorReport:
    report = pool.next_report(executor_id, blocks=blocks, **fields)  # type: ignore[arg-type]
    return dataclasses.replace(report, ends_at_reservation=True)


async def extend(a: RouterSide, request_id: str, attempt: int, output: int) -> object:
    """Its placement has used its reservation."""
    blocks = asked(request_id).blocks_after(output)
    return await a.store.hand_back(
        request_id, attempt, 1, preempted=True, output_tokens=output, progressed=True, placement_blocks=blocks
    )


def test_demand_counts_the_blocks_of_output_and_one_part_more() -> None:
    demand = asked("r")
    assert [demand.blocks_after(output) for output in (0, 1, 16, 32, 112, 140)] == [3, 4, 4, 5, 10, 10]
    assert dataclasses.replace(demand, reservation_tokens=None).blocks_after(0) == 10


async def test_pool_of_one_context_runs_several_requests_at_once(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(extending(store_pool))

    placed = [await a.place_demand(asked(f"r{number}")) for number in range(3)]

    assert [one.blocks for one in placed] == [3, 3, 3]
    await a.queue(asked("one too many"))


async def test_next_placement_reserves_more_and_is_no_failed_attempt(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(extending(store_pool))
    await a.place_demand(asked("r"))

    blocks = []
    for attempt in range(1, 5):
        placed = await extend(a, "r", attempt, STEP * attempt)
        assert placed == Placement("r", attempt + 1, "x", 1, suspect=False)
        assert isinstance(placed, Placement)
        blocks.append(placed.blocks)

    assert blocks == [5, 7, 9, 10]
    assert await store_pool.reserved_blocks() == {"x": 10}
    await a.store.settle([Attempt("r", 5)])
    assert await store_pool.reserved_blocks() == {"x": 0}


async def test_queue_limits_and_rates_count_what_is_reserved(store_pool: StorePool) -> None:
    limits = TenantLimits(tokens_per_s=10, token_burst=100, max_queue_tokens=48)
    a = store_pool.router("a")
    await a.store.report(extending(store_pool))

    # Given two of 48 tokens of a burst of 100
    for name in ("r0", "r1"):
        await a.place_demand(asked(name, limits=limits))
    refused = await a.store.submit(asked("r2", limits=limits))
    assert getattr(refused, "limit", None) == "tenant tokens_per_s"

    # When one of them reserves 32 more and ends, then what it did not use comes back: 56 and 48 were used
    await extend(a, "r0", 1, STEP)
    await a.store.settle([Ending("r0", 2, 16, 40), Ending("r1", 1, 16, 32)])
    await store_pool.wait(5199)
    await a.store.report(extending(store_pool))
    assert getattr(await a.store.submit(asked("r3", limits=limits)), "retry_after_ms", None) == 1
    await store_pool.wait(1)
    await a.place_demand(asked("r3", limits=limits))
