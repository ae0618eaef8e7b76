"""Encoding of the scripts' arguments and parsing of their replies.

Pure, so that routers, simulations and benchmarks share one encoding. The header of each script specifies its arguments
and its outcome. The header of `scripts/shared/records.lua` specifies the reply that contains the outcome.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from inflight.common.errors import Reason
from inflight.router.ledger.lua import Argument
from inflight.router.ledger.settings import LedgerSettings
from inflight.router.ledger.types import (
    Adopted,
    Attempt,
    Cancelled,
    CancelOutcome,
    CancelRequested,
    ClassQueue,
    Demand,
    Dropped,
    DropReason,
    Duplicate,
    Ending,
    EstimateAccuracy,
    ExecutorReport,
    ExecutorStanding,
    Explanation,
    HandBackDetails,
    HandBackRefusal,
    HeldSequence,
    LedgerEvent,
    LedgerState,
    Lost,
    Placement,
    PreemptRequested,
    PrefixHolder,
    Queued,
    Refused,
    ReportOutcome,
    Snapshot,
    TakenOver,
    TenantLimits,
    TenantQueue,
    WaitReason,
)

MAX_UINT32, MAX_UINT64 = 2**32 - 1, 2**64 - 1

_LIMITS = struct.Struct("<29d")
_RATES = struct.Struct("<5d")


def submit_args(demand: Demand, settings: LedgerSettings) -> list[Argument]:
    """Returns the arguments of submit.lua for one request."""
    pool = (
        settings.max_queue_requests,
        _limit(settings.max_queue_tokens),
        _limit(settings.max_queue_bytes),
        settings.max_bypass,
        settings.age_ms,
        settings.preempt_for_priority,
        settings.remember_ended_ms,
        settings.tolerated_ttft_ms,
    )
    packed = _LIMITS.pack(*_request_numbers(demand), *_limit_numbers(demand.limits), *pool)
    return [
        demand.request_id,
        demand.tenant,
        packed,
        " ".join(demand.prefix_hashes),
        demand.digest,
        int(demand.is_served),
        demand.adapter,
    ]


def rates_args(tenant: str, limits: TenantLimits, tokens: int, request_id: str, takes: bool) -> list[Argument]:
    """Returns the arguments of rates.lua."""
    return [tenant, request_id, _RATES.pack(*_rate_numbers(limits), tokens), int(takes)]


def settle_args(endings: Iterable[Attempt | Ending]) -> list[Argument]:
    """Returns the arguments of settle.lua."""
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


def report_args(report: ExecutorReport, settings: LedgerSettings) -> list[Argument]:
    """Returns the arguments of report.lua for one report.

    With `preempt_for_priority` the ledger counts seats only. A standby place would not help a request of a higher
    class.
    """
    num_sequences = report.budget_sequences
    if settings.preempt_for_priority and report.seats is not None:
        num_sequences = min(num_sequences, report.seats)
    return [
        report.executor_id,
        report.generation,
        report.seq,
        report.budget_blocks + report.saved_blocks,
        report.total_blocks,
        num_sequences,
        int(report.accepting),
        report.reserve_quantile,
        report.step_ms,
        report.prefill_tokens_per_s,
        int(report.ends_at_reservation),
        report.age_ms,
        b"".join(_packed(report.executor_id, one) for one in report.held),
        report.num_adapter_slots,
        "".join(f" {one.adapter}{'+' if one.is_resident else '-'}" for one in report.adapters),
        _held_adapters(report.held),
    ]


def _packed(executor_id: str, held: HeldSequence) -> bytes:
    """Returns the length (uint16) of the sequence's member of `placements`, the member, and its blocks (double)."""
    member = f"{executor_id}\0{held.attempt}\0{held.request_id}".encode()
    return struct.pack(f"<H{len(member)}sd", len(member), member, held.blocks)


def _held_adapters(held: Sequence[HeldSequence]) -> str:
    return " ".join(one.adapter or "-" for one in held) if any(one.adapter for one in held) else ""


def parse_reports(reply: Reply) -> list[ReportOutcome]:
    """Returns the outcomes of report.lua, in the order of the reports."""
    return [
        ReportOutcome(status == "TAKEN", tuple(Attempt(*pair) for pair in zip(flat[::2], flat[1::2], strict=True)))
        for status, flat in reply.values[0]
    ]


def parse_overdue_reports(reply: Reply) -> list[tuple[str, float]]:
    """Returns the executors whose report is overdue, as found by reap.lua, and the seconds since the last report of
    each."""
    flat = reply.values[0] if reply.values else ()
    return [(executor_id, ms / 1000) for executor_id, ms in zip(flat[::2], flat[1::2], strict=True)]


def hand_back_args(request_id: str, attempt: int, max_attempts: int, details: HandBackDetails) -> list[Argument]:
    """Returns the arguments of hand_back.lua for one placement."""
    why = "lost"
    if details.get("preempted"):
        why = "preempted"
    elif details.get("rejected"):
        why = "rejected"
    elif details.get("stood_still"):
        why = "stood_still"
    blocks = details.get("placement_blocks")
    return [
        request_id,
        attempt,
        max_attempts,
        why,
        details.get("output_tokens", 0),
        int(details.get("progressed", False)),
        "" if blocks is None else blocks,
    ]


def verify_args(waiting: Iterable[Attempt]) -> list[Argument]:
    """Returns the arguments of verify.lua."""
    return [value for one in waiting for value in (one.request_id, one.attempt)]


def _request_numbers(demand: Demand) -> tuple[float, ...]:
    return (
        demand.priority_class,
        _limit(demand.deadline_ms),
        demand.blocks,
        demand.blocks if demand.placement_blocks is None else demand.placement_blocks,
        demand.sequences,
        demand.last_attempt,
        demand.prompt_tokens,
        demand.max_tokens,
        demand.output_tokens,
        demand.block_size,
        demand.num_bytes,
        demand.num_choices,
    )


def _limit_numbers(limits: TenantLimits) -> tuple[float, ...]:
    """Returns the numbers of a tenant's limits; infinity is no limit."""
    return (
        limits.weight,
        _limit(limits.max_running),
        _limit(limits.max_queue_requests),
        _limit(limits.max_queue_tokens),
        _limit(limits.max_queue_bytes),
        *_rate_numbers(limits),
    )


def _rate_numbers(limits: TenantLimits) -> tuple[float, ...]:
    """Returns, for requests and for tokens, the milliseconds per unit and the burst; 0 milliseconds is no limit."""
    return (
        0.0 if limits.requests_per_s is None else 1000 / limits.requests_per_s,
        limits.request_burst,
        0.0 if limits.tokens_per_s is None else 1000 / limits.tokens_per_s,
        limits.token_burst,
    )


def _limit(value: float | None) -> float:
    return inf if value is None else value


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply of one script. `status` and `values` are its outcome. `scripts/shared/records.lua` describes the other
    fields."""

    status: str
    values: tuple[Any, ...]
    events: tuple[LedgerEvent, ...]
    missing: tuple[str, ...]
    more: bool
    registered: bool
    now_ms: int

    @property
    def is_complete(self) -> bool:
        """Whether the script did all its work."""
        return not (self.missing or self.more or self.status == "AGAIN")


def parse_reply(raw: Sequence[Any]) -> Reply:
    """Parses the reply of any script."""
    outcome, events, missing, more, registered, now_ms = raw
    pairs = (dict(zip(fields[::2], fields[1::2], strict=True)) for fields in events)
    parsed = tuple(parse_event(fields) for fields in pairs)
    return Reply(outcome[0], tuple(outcome[1:]), parsed, tuple(missing), bool(more), bool(registered), now_ms)


def parse_outcomes(reply: Reply) -> list[Reply]:
    """Returns the reply of a script that handles several requests as one reply for each, with its outcome."""
    return [replace(reply, status=outcome[0], values=tuple(outcome[1:])) for outcome in reply.values[0]]


def parse_event(fields: Mapping[str, Any]) -> LedgerEvent:
    """Parses an event of a reply or a mailbox."""
    return _EVENTS[fields["kind"]](fields)


def _number(fields: Mapping[str, Any], name: str, most: int = MAX_UINT32) -> int:
    """Returns a number of an event. Raises `ValueError` if messages to executors cannot carry it."""
    number = int(fields[name])
    if not 0 <= number <= most:
        raise ValueError(f"{name} is {number}")
    return number


def _placement(fields: Mapping[str, Any]) -> Placement:
    return Placement(
        fields["request_id"],
        _number(fields, "attempt"),
        fields["executor_id"],
        _number(fields, "generation", MAX_UINT64),
        # Events that an older router of the same format wrote may lack these fields.
        _number(fields, "blocks") if "blocks" in fields else 0,
        fields.get("suspect") == "1",
        fields.get("adapter", ""),
    )


def _lost(fields: Mapping[str, Any]) -> Lost:
    attempt, generation = _number(fields, "attempt"), _number(fields, "generation", MAX_UINT64)
    return Lost(fields["request_id"], attempt, fields["executor_id"], generation)


def _dropped(fields: Mapping[str, Any]) -> Dropped:
    return Dropped(fields["request_id"], DropReason(fields["kind"]), fields.get("adapter", ""))


_EVENTS: dict[str, Callable[[Mapping[str, Any]], LedgerEvent]] = {
    "placed": _placement,
    "lost": _lost,
    "cancel": lambda fields: CancelRequested(fields["request_id"], _number(fields, "attempt")),
    "preempt": lambda fields: PreemptRequested(fields["request_id"], _number(fields, "attempt")),
    "cancelled": lambda fields: Cancelled(fields["request_id"], int(fields["at_ms"]) if "at_ms" in fields else None),
    "taken_over": lambda fields: TakenOver(fields["request_id"], int(fields["at_ms"])),
    DropReason.EXPIRED.value: _dropped,
    DropReason.NEVER_FITS.value: _dropped,
}


def parse_standing(request_id: str, reply: Reply) -> Placement | Queued:
    """Parses an outcome PLACED or QUEUED."""
    if reply.status == "PLACED":
        return _placed(request_id, reply)
    position, wait_ms = reply.values
    return Queued(position, _optional(wait_ms))


def _placed(request_id: str, reply: Reply) -> Placement:
    attempt, executor_id, generation, blocks, suspect, adapter = reply.values
    return Placement(request_id, attempt, executor_id, generation, blocks, bool(suspect), adapter)


def _adopted(request_id: str, reply: Reply) -> Adopted:
    return Adopted(_placed(request_id, reply), ended=reply.status == "ADOPTED_ENDED")


_ADOPTIONS = ("ADOPTED", "ADOPTED_ENDED")


def parse_adopt(request_id: str, reply: Reply) -> Adopted | LedgerState | Refused | None:
    """Returns the outcome of adopt.lua."""
    if reply.status == "TAKEN_OVER":
        return Refused(Reason.TAKEN_OVER)
    if reply.status in _ADOPTIONS:
        return _adopted(request_id, reply)
    return None if reply.status == "UNKNOWN" else LedgerState(reply.status)


def parse_submit(request_id: str, reply: Reply) -> Placement | Queued | Refused | Duplicate | Adopted:
    """Returns the outcome of submit.lua."""
    if reply.status == "REFUSED":
        return _refused(reply)
    if reply.status == "DUPLICATE":
        return Duplicate(LedgerState(reply.values[0]))
    if reply.status in _ADOPTIONS:
        return _adopted(request_id, reply)
    return parse_standing(request_id, reply)


def parse_rates(reply: Reply) -> Refused | None:
    """Returns the outcome of rates.lua; None if the rates allow the request."""
    return _refused(reply) if reply.status == "REFUSED" else None


def _refused(reply: Reply) -> Refused:
    reason, limit, retry_after_ms = reply.values
    return Refused(Reason(reason), limit, _optional(retry_after_ms))


def parse_hand_back(request_id: str, reply: Reply) -> Placement | Queued | HandBackRefusal:
    """Returns the outcome of hand_back.lua. The caller handles DROPPED, for which there is an event."""
    if reply.status in ("PLACED", "QUEUED"):
        return parse_standing(request_id, reply)
    return HandBackRefusal(reply.status)


def parse_cancel(request_id: str, reply: Reply) -> CancelOutcome:
    """Returns the outcome of cancel.lua."""
    if reply.status == "UNKNOWN":
        return CancelOutcome(None)
    state = LedgerState(reply.status)
    if state is LedgerState.ENDED:
        return CancelOutcome(state)
    attempt, executor_id, generation, owner_id, owner_notified = reply.values
    placement = Placement(request_id, attempt, executor_id, generation) if state is LedgerState.PLACED else None
    return CancelOutcome(state, placement, owner_id or None, bool(owner_notified))


def parse_explain(reply: Reply) -> Explanation | None:
    """Returns the outcome of explain.lua."""
    if reply.status == "UNKNOWN":
        return None
    state = LedgerState(reply.status)
    if state is LedgerState.ENDED:
        return Explanation(state)
    attempt, priority_class, tenant, executor_id, ahead, wait_ms, reason, needed, available, passed, *rest = (
        reply.values
    )
    holder_id, prefill_ms, tolerated_ms = rest
    return Explanation(
        state,
        attempt,
        priority_class,
        tenant,
        executor_id or None,
        ahead,
        _optional(wait_ms),
        WaitReason(reason) if reason else None,
        needed,
        available,
        passed,
        PrefixHolder(holder_id, prefill_ms, tolerated_ms) if holder_id else None,
    )


def parse_snapshot(reply: Reply) -> Snapshot:
    """Returns the outcome of snapshot.lua."""
    found = json.loads(reply.values[0])
    return Snapshot(
        tuple(ExecutorStanding(**one) for one in found["executors"]),
        tuple(ClassQueue(*one) for one in found["queues"]),
        EstimateAccuracy(*found["estimates"]),
        tuple(TenantQueue(*one) for one in found["tenant_queues"]),
    )


def _optional(value: int | str) -> int | None:
    return None if value == "" else int(value)
