"""Adapter slots in the ledger: who is admitted where, what is preferred, and what happens without a slot."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from inflight.common.errors import Reason
from inflight.router.ledger.types import (
    Adopted,
    Attempt,
    Demand,
    Dropped,
    DropReason,
    ExecutorReport,
    HeldSequence,
    PreemptRequested,
    Queued,
    Refused,
    ServedAdapter,
    WaitReason,
)
from tests.support.ledger.store_pool import SETTINGS, StorePool

A, B, C = (letter * 64 for letter in "abc")
ALL = (A, B, C)


def serving(
    store_pool: StorePool,
    executor_id: str = "x",
    *,
    slots: int = 1,
    served: tuple[str, ...] = ALL,
    resident: tuple[str, ...] = (),
    **fields: Any,
) -> ExecutorReport:
    """A report of an executor with adapters."""
    adapters = tuple(ServedAdapter(one, one in resident) for one in served)
    report = store_pool.next_report(executor_id, **fields)
    return dataclasses.replace(report, num_adapter_slots=slots, adapters=adapters)


def demand(request_id: str, adapter: str = "", blocks: int = 1, **fields: Any) -> Demand:
    """A request of class 2 with an adapter."""
    return Demand(request_id, fields.pop("priority_class", 2), blocks, adapter=adapter, **fields)


async def test_slot_is_pinned_until_its_last_request_ends(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(serving(store_pool))
    placed = await a.place_demand(demand("first", A))
    assert placed.adapter == A
    await a.place_demand(demand("same adapter", A))
    await a.queue(demand("other", B))
    await a.place_demand(demand("base model"))

    await a.store.settle([Attempt("first", 1)])
    assert await a.placed() == []
    await a.store.settle([Attempt("same adapter", 1)])

    (event,) = await a.told()
    assert (event.request_id, event.adapter) == ("other", B)  # type: ignore[union-attr]


async def test_explain_names_the_adapter_only_where_seats_and_blocks_are_free(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(serving(store_pool, blocks=4))
    await a.place_demand(demand("first", A))
    await a.queue(demand("other", B))

    explanation = await a.store.explain("other")
    assert explanation is not None
    assert explanation.wait_reason is WaitReason.ADAPTER

    await a.place_demand(demand("base model", blocks=3))
    explanation = await a.store.explain("other")
    assert explanation is not None
    assert explanation.wait_reason is WaitReason.BLOCKS


@pytest.mark.parametrize(
    ("x", "y", "chosen"),
    [
        ({"resident": ()}, {"resident": (A,)}, "y"),  # it need not be loaded there
        ({"resident": (B,)}, {"resident": ()}, "y"),  # nothing need be evicted there
        ({"resident": (B,)}, {"resident": (C,)}, "x"),  # the one with most available blocks
        ({"served": (B,)}, {"resident": (B,)}, "y"),  # the only one that serves it
        ({"slots": 0, "served": ()}, {"resident": (B,)}, "y"),
    ],
)
async def test_executor_is_chosen_by_what_it_would_have_to_load(
    store_pool: StorePool, x: dict[str, Any], y: dict[str, Any], chosen: str
) -> None:
    a = store_pool.router("a")
    await a.store.report(serving(store_pool, "x", blocks=20, **x))
    await a.store.report(serving(store_pool, "y", blocks=10, **y))

    assert (await a.place_demand(demand("r", A))).executor_id == chosen


async def test_much_fuller_executor_is_not_preferred_for_its_adapter(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(serving(store_pool, "x", blocks=10))
    await a.store.report(serving(store_pool, "y", blocks=10, resident=(A,)))
    assert [(await a.place_demand(demand(f"r{i}", A, blocks=2))).executor_id for i in range(3)] == ["y", "y", "x"]


async def test_adapter_that_no_executor_serves_is_unavailable_at_once_and_dropped_in_line(
    store_pool: StorePool,
) -> None:
    a = store_pool.router("a")
    await a.store.report(serving(store_pool, served=(A, B)))
    assert await a.store.submit(demand("early", C)) == Refused(Reason.NO_EXECUTOR, "adapter")
    assert await a.store.submit(demand("large", A, blocks=11)) == Refused(Reason.NEVER_FITS)
    await a.place_demand(demand("first", A))
    await a.queue(demand("waits", B))

    await a.store.report(serving(store_pool, served=(A,)))

    assert await a.told() == [Dropped("waits", DropReason.NEVER_FITS)]


async def test_request_without_a_slot_is_passed_and_then_gets_an_executor_for_itself(store_pool: StorePool) -> None:
    store_pool.settings = dataclasses.replace(SETTINGS, max_bypass=2)
    a = store_pool.router("a")
    await a.store.report(serving(store_pool, sequences=2))
    await a.place_demand(demand("first", A))
    await a.queue(demand("other", B))
    for number in range(2):
        await a.place_demand(demand(f"passes {number}", A))
        await a.store.settle([Attempt(f"passes {number}", 1)])
    await a.queue(demand("passes no more", A))

    await a.store.settle([Attempt("first", 1)])

    assert await a.placed() == ["other"]


async def test_pins_are_restored_from_reports_after_redis_was_emptied(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    held = (HeldSequence("base", 1, 1), HeldSequence("adapted", 3, 1, A))
    await a.store.report(serving(store_pool, held=held))

    await a.queue(demand("other", B))
    await a.place_demand(demand("same", A))
    adopted = await a.store.adopt("adapted")
    assert isinstance(adopted, Adopted)
    assert adopted.placement.adapter == A

    await a.store.settle([Attempt("adapted", 3), Attempt("same", 1)])
    assert await a.placed() == ["other"]


async def test_repeat_by_another_router_keeps_the_adapter_of_the_admission(store_pool: StorePool) -> None:
    a, b = store_pool.router("a"), store_pool.router("b")
    await a.store.report(serving(store_pool))
    await a.place_demand(demand("running", A))
    await a.queue(demand("r", B, digest="d"))

    # Meanwhile the name stands for other content.
    assert await b.store.submit(demand("r", C, digest="d")) == Queued(0)
    await a.store.settle([Attempt("running", 1)])

    (placement,) = await b.told()
    assert placement.adapter == B  # type: ignore[union-attr]


async def test_higher_class_preempts_what_frees_a_slot_for_it(store_pool: StorePool) -> None:
    store_pool.settings = dataclasses.replace(SETTINGS, preempt_for_priority=True)
    a = store_pool.router("a")
    await a.store.report(serving(store_pool))
    await a.place_demand(demand("adapted", A))
    await a.place_demand(demand("base"))
    await store_pool.wait(1)
    await a.place_demand(demand("newest"))  # the first to be asked, but it pins no adapter

    await a.queue(demand("urgent", B, priority_class=1))
    await a.store.reap()

    assert await a.told() == [PreemptRequested("adapted", 1)]
    await a.store.hand_back("adapted", 1, 3, rejected=False, preempted=True, output_tokens=1)
    assert await a.placed() == ["urgent"]


async def test_slots_of_an_executor_that_started_again_are_free(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(serving(store_pool))
    await a.place_demand(demand("r", A))

    await a.store.report(serving(store_pool, generation=2))

    await a.place_demand(demand("other", B))
