"""Calls of the store in property tests: few names, small pools, tight limits."""

from __future__ import annotations

import dataclasses
import random
from math import ceil
from typing import Any

from hypothesis import strategies as st

from inflight.router.ledger.settings import LedgerSettings
from inflight.router.ledger.types import (
    NO_LIMITS,
    Adopted,
    Attempt,
    Demand,
    ExecutorReport,
    HeldSequence,
    Placement,
    ServedAdapter,
    TenantLimits,
)

ROUTERS = ("a", "b", "c")
EXECUTORS = ("x", "y", "z")
REQUESTS = tuple(f"r:{number}" for number in range(40))
BLOCK_SIZE = 16

# A tenant's limits change now and then.
TENANTS: dict[str, tuple[TenantLimits, ...]] = {
    "plain": (NO_LIMITS,),
    "heavy": (TenantLimits(weight=4), TenantLimits(weight=4), TenantLimits(weight=2)),
    "few": (TenantLimits(max_running=1, weight=0.5), TenantLimits(max_running=2), TenantLimits(max_running=0)),
    "short": (TenantLimits(max_queue_requests=2, max_queue_tokens=150, max_queue_bytes=300),),
    "slow": (
        TenantLimits(requests_per_s=2, request_burst=2, tokens_per_s=100, token_burst=200),
        TenantLimits(requests_per_s=2, request_burst=2, tokens_per_s=100, token_burst=200),
        NO_LIMITS,
    ),
}
PREFIXES = ((), (), ("p",), ("p", "pq"), ("p", "pr"), ("s:16", "st:32"), ("s:16", "su:32", "suv:48"))
DIGESTS = ("", "as asked", "as asked", "otherwise")
ADAPTERS = tuple(letter * 64 for letter in "abcd")
# Most requests have none; no executor of a test serves the last.
ASKED_ADAPTERS = ("",) * 5 + ADAPTERS[:1] * 2 + ADAPTERS
DEADLINES_MS = (None, None, None, 0, 500, 3000, 3_600_000_000)
TOTALS_MS = (None, 500, 3000, 20_000)

pool_settings = st.builds(
    LedgerSettings,
    max_queue_requests=st.sampled_from((6, 10)),
    max_queue_tokens=st.sampled_from((None, 500)),
    max_queue_bytes=st.sampled_from((None, 900)),
    max_bypass=st.integers(0, 3),
    age_ms=st.sampled_from((1000, 4000, 30_000)),
    preempt_for_priority=st.sampled_from((True, True, False)),
    remember_ended_ms=st.sampled_from((20_000, 75_000)),
    tolerated_ttft_ms=st.sampled_from((0, 200, 2000)),
)
WHYS = ("lost", "lost", "stood still", "lost after tokens", "rejected", "preempted")
whys = st.sampled_from(WHYS)


def random_demand(rng: random.Random, request_id: str) -> Demand:
    """A question that a caller may ask."""
    tenant, sequences = rng.choice(sorted(TENANTS)), rng.choice((1, 1, 2))
    prompt_tokens, max_tokens = rng.randint(1, 60), rng.choice((1, 10, 16, 40, 64))
    blocks = sequences * ceil((prompt_tokens + max_tokens) / BLOCK_SIZE)
    # Some are served by several placements, each of which reserves a part.
    least_blocks = sequences * ceil((prompt_tokens + 1) / BLOCK_SIZE)
    return Demand(
        request_id,
        rng.randint(1, 3),
        blocks=blocks,
        placement_blocks=min(blocks, least_blocks + max_tokens % 3) if prompt_tokens % 2 else None,
        sequences=sequences,
        deadline_ms=rng.choice(DEADLINES_MS),
        total_ms=rng.choice(TOTALS_MS),
        last_attempt=rng.choice((0, 0, 0, 2)),
        tenant=tenant,
        limits=rng.choice(TENANTS[tenant]),
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        output_tokens=rng.choice((0, 0, 0, 0, 0, 1)),
        block_size=BLOCK_SIZE,
        num_bytes=rng.randint(0, 200),
        prefix_hashes=rng.choice(PREFIXES),
        digest=rng.choice(DIGESTS),
        is_served=rng.random() < 0.2,
        adapter=rng.choice(ASKED_ADAPTERS),
    )


def served_adapters(number: int) -> dict[str, Any]:
    """Slots and adapters of a report, by any number; a third of the reports have none."""
    if number % 3 == 0:
        return {}
    served = [adapter for i, adapter in enumerate(ADAPTERS[:3]) if number >> i & 1 or i == 0]
    adapters = tuple(ServedAdapter(adapter, number >> i & 8 > 0) for i, adapter in enumerate(served))
    return {"num_adapter_slots": 1 + number % 2, "adapters": adapters}


def kept_states(executor_id: str, number: int) -> dict[str, Any]:
    """The recurrent states of a report, by any number; one executor reports none."""
    if executor_id == EXECUTORS[-1]:
        return {}
    names = tuple(name for i, name in enumerate(("s", "st", "su", "suv")) if number >> i & 4)
    return {"checkpoints": names, "lists_all_checkpoints": number % 4 > 0}


def repeated(rng: random.Random, demand: Demand) -> Demand:
    """The same asked again, by a client or by its router; or, of the same id, something else."""
    return dataclasses.replace(
        demand,
        digest=rng.choice((demand.digest, demand.digest, demand.digest, "otherwise")),
        output_tokens=rng.choice((0, 0, 9)),
        is_served=rng.random() < 0.2,
    )


def random_report(
    rng: random.Random,
    executor_id: str,
    last: ExecutorReport | None,
    placed: tuple[HeldSequence, ...],
    other: Attempt,
) -> ExecutorReport:
    """Of a new generation now and then, holding some of what is placed there, and another."""
    generation, seq = (last.generation, last.seq + 1) if last else (5, 1)
    held = {one.request_id: one for one in placed if rng.random() < 0.7}
    held[other.request_id] = HeldSequence(
        other.request_id, max(1, other.attempt), rng.randint(1, 4), rng.choice(ASKED_ADAPTERS)
    )
    generation += rng.choice((0, 0, 0, 0, 1, -1))
    accepting, quantile = rng.random() < 0.9, rng.choice((1.0, 0.5))
    return ExecutorReport(
        executor_id,
        generation,
        seq,
        9,
        rng.randint(7, 11),
        3,
        accepting,
        tuple(held.values()),
        quantile,
        ends_at_reservation=quantile == 1 and seq % 4 > 0,
        **served_adapters(rng.randrange(64)),
        **kept_states(executor_id, rng.randrange(64)),
    )


demands = st.builds(
    lambda seed, request_id: random_demand(random.Random(seed), request_id),
    st.integers(0, 2**32),
    st.sampled_from(REQUESTS),
)


def is_suspect(result: Any) -> bool:
    """What equality of placements leaves out."""
    placement = result.placement if isinstance(result, Adopted) and not result.ended else result
    return isinstance(placement, Placement) and placement.suspect
