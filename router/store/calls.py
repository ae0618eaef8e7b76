"""The arguments of the scripts, behind the caller's name: the other side of each script's header.

Pure, so that a router, a simulation and a benchmark send the same.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from math import inf

from router.store.lua import Argument
from router.store.settings import StoreSettings
from router.store.types import Attempt, Demand, Ending, ExecutorReport, TenantLimits

_LIMITS = struct.Struct("<26d")
_RATES = struct.Struct("<5d")


def submit_args(demand: Demand, settings: StoreSettings) -> list[Argument]:
    """Of submit.lua."""
    pool = (
        settings.max_queue_requests,
        _limit(settings.max_queue_tokens),
        _limit(settings.max_queue_bytes),
        settings.max_bypass,
        settings.age_ms,
        settings.preempt_for_priority,
        settings.remember_ended_ms,
    )
    packed = _LIMITS.pack(*_request_numbers(demand), *_limit_numbers(demand.limits), *pool)
    return [
        demand.request_id,
        demand.tenant,
        packed,
        " ".join(demand.prefix_hashes),
        demand.digest,
        int(demand.is_served),
    ]


def rates_args(tenant: str, limits: TenantLimits, tokens: int, request_id: str, takes: bool) -> list[Argument]:
    """Of rates.lua."""
    return [tenant, request_id, _RATES.pack(*_rate_numbers(limits), tokens), int(takes)]


def settle_args(endings: Iterable[Attempt | Ending]) -> list[Argument]:
    """Of settle.lua."""
    args: list[Argument] = []
    for one in endings:
        ending = one if isinstance(one, Ending) else Ending(one.request_id, one.attempt)
        args += (
            ending.request_id,
            ending.attempt,
            "" if ending.computed_tokens is None else ending.computed_tokens,
            "" if ending.output_tokens is None else ending.output_tokens,
            int(ending.by_itself),
            int(ending.cancelled),
        )
    return args


def report_args(report: ExecutorReport, settings: StoreSettings) -> list[Argument]:
    """Of report.lua.

    Where others give way to a higher class nobody stands by: a place on an executor that is no seat would be no help.
    """
    num_sequences = report.budget_sequences
    if settings.preempt_for_priority and report.seats is not None:
        num_sequences = min(num_sequences, report.seats)
    args: list[Argument] = [
        report.executor_id,
        report.generation,
        report.seq,
        report.budget_blocks,
        report.total_blocks,
        num_sequences,
        int(report.accepting),
        report.reserve_quantile,
        report.step_ms,
        report.prefill_tokens_per_s,
    ]
    for one in report.held:
        args += (one.request_id, one.attempt, one.blocks)
    return args


def hand_back_args(
    request_id: str,
    attempt: int,
    max_attempts: int,
    *,
    rejected: bool,
    preempted: bool,
    output_tokens: int,
    progressed: bool = False,
    stood_still: bool = False,
) -> list[Argument]:
    """Of hand_back.lua."""
    why = "preempted" if preempted else "rejected" if rejected else "stood_still" if stood_still else "lost"
    return [request_id, attempt, max_attempts, why, output_tokens, int(progressed)]


def verify_args(waiting: Iterable[Attempt]) -> list[Argument]:
    """Of verify.lua."""
    return [value for one in waiting for value in (one.request_id, one.attempt)]


def _request_numbers(demand: Demand) -> tuple[float, ...]:
    return (
        demand.priority_class,
        _limit(demand.deadline_ms),
        demand.blocks,
        demand.sequences,
        demand.last_attempt,
        demand.prompt_tokens,
        demand.max_tokens,
        demand.output_tokens,
        demand.block_size,
        demand.num_bytes,
    )


def _limit_numbers(limits: TenantLimits) -> tuple[float, ...]:
    """A rate becomes the milliseconds that one takes; 0 is no limit."""
    return (
        limits.weight,
        _limit(limits.max_running),
        _limit(limits.max_queue_requests),
        _limit(limits.max_queue_tokens),
        _limit(limits.max_queue_bytes),
        *_rate_numbers(limits),
    )


def _rate_numbers(limits: TenantLimits) -> tuple[float, ...]:
    return (
        0.0 if limits.requests_per_s is None else 1000 / limits.requests_per_s,
        limits.request_burst,
        0.0 if limits.tokens_per_s is None else 1000 / limits.tokens_per_s,
        limits.token_burst,
    )


def _limit(value: float | None) -> float:
    return inf if value is None else value
