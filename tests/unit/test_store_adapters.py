"""Adapter slots in the ledger: who is admitted where, what is preferred, and what happens without a slot."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from inflight.router.ledger.types import (
    Attempt,
    Demand,
    ExecutorReport,
    ServedAdapter,
)
from tests.support.ledger.store_pool import StorePool

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
