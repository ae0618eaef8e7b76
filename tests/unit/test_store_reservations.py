"""Requests without max_tokens in the ledger: each placement reserves a part, the next one more."""

from __future__ import annotations

import dataclasses

from inflight.router.ledger.types import (
    Attempt,
    Demand,
    Ending,
    ExecutorReport,
    HeldSequence,
    Placement,
    Queued,
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


async def test_executor_that_does_not_end_placements_reserves_the_whole_context(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report("x", blocks=10))

    assert (await a.place_demand(asked("r"))).blocks == 10


async def test_roomiest_executor_may_reserve_all_and_another_a_part(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report("old", blocks=12))
    await a.store.report(extending(store_pool, 12, "new"))
    await a.place("on old", 4)
    await a.place("on new", 6)

    assert await a.place_demand(asked("r")) == Placement("r", 1, "new", 1)


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


async def test_extended_request_waits_at_its_former_place_and_others_run(store_pool: StorePool) -> None:
    a = store_pool.router("a", dataclasses.replace(store_pool.settings, max_bypass=2))
    await a.store.report(extending(store_pool))
    for name in ("first", "second", "third"):
        await a.place_demand(asked(name))
    await a.queue(asked("later"))

    # When the first needs five blocks and has given three back
    assert await extend(a, "first", 1, STEP) == Queued(0)

    # Then what came later runs on those, but not for ever: an end makes room for the first
    assert await a.placed() == ["later"]
    await a.queue(asked("last"))
    await a.store.settle([Attempt("second", 1)])
    assert await a.placed() == ["last"]
    await a.queue(asked("too late"))
    await a.store.settle([Attempt("third", 1)])
    await a.store.settle([Attempt("later", 1)])
    assert await a.placed() == ["first"]


async def test_request_of_a_lost_executor_reserves_what_it_has_and_a_part(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(extending(store_pool))
    await a.place_demand(asked("r"))

    await a.store.hand_back("r", 1, 3, output_tokens=20, progressed=True, placement_blocks=asked("r").blocks_after(20))
    await a.store.report(extending(store_pool))

    assert [one.blocks for one in await a.told() if isinstance(one, Placement)] == [5]


async def test_request_that_only_its_executor_knew_can_be_extended(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(extending(store_pool, held=(HeldSequence("r", 1, 3),)))
    assert await store_pool.reserved_blocks() == {"x": 3}

    placed = await extend(a, "r", 1, STEP)

    assert isinstance(placed, Placement)
    assert placed.blocks == 5


async def test_pool_that_has_forgotten_the_request_reserves_by_its_output(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(extending(store_pool))

    placed = await a.place_demand(asked("r", output=100, last_attempt=3, output_tokens=100, is_served=True))

    assert (placed.attempt, placed.blocks) == (4, 10)


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


async def test_tenant_is_charged_for_each_part(store_pool: StorePool) -> None:
    """Of two tenants that were served as much, the one whose request is extended comes second."""
    a = store_pool.router("a")
    await a.store.report(extending(store_pool))
    await a.place("others", 4)
    for tenant in ("s", "t"):
        await a.place_demand(asked(f"first of {tenant}", tenant))
    for tenant in ("s", "t"):
        await a.queue(asked(f"second of {tenant}", tenant))

    assert isinstance(await extend(a, "first of s", 1, STEP), Queued)

    assert await a.placed() == ["second of t"]
