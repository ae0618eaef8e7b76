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
from typing import Any, Generic, NamedTuple, ParamSpec

from inflight.common.errors import Reason
from inflight.router.ledger.settings import LedgerSettings
from inflight.router.ledger.types import (
    FIGURES,
    Account,
    AccountUsage,
    Adopted,
    Attempt,
    Cancelled,
    CancelOutcome,
    CancelRequested,
    ChargeOutcome,
    ClassQueue,
    Demand,
    Dropped,
    DropReason,
    Duplicate,
    Ending,
    EstimateAccuracy,
    ExecutorReport,
    ExecutorStanding,
    ExecutorUsage,
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

# Totals are kept for 90 days after the last of their day, and what is counted in them for longer than executors repeat
# it. Accounts of a day and a pool, once for each executor and generation: some 20 MB.
DAY_MS = 86_400_000
USAGE_KEPT_MS = 91 * DAY_MS
COUNTED_KEPT_MS = 4 * DAY_MS
MAX_COUNTED = 100_000

Argument = str | int | float | bytes

P = ParamSpec("P")


class Arguments(Generic[P]):
    """The arguments by which a script gets one item: the name of each in Lua, and how it follows from the item.

    `schema.py` generates a Lua function that reads them by these names, so their order matters only within an item.
    `own` are arguments of their own: `name` is a number, or nil in Lua where it is '', `name?` a boolean, `name$` a
    text. `packed` are numbers in one argument behind them.
    """

    def __init__(
        self, own: Mapping[str, Callable[P, Argument]], packed: Mapping[str, Callable[P, float]] | None = None
    ) -> None:
        self.own = own
        self.packed = packed or {}
        self.layout = "<" + "d" * len(self.packed)

    def of(self, *item: P.args, **named: P.kwargs) -> list[Argument]:
        """Returns the arguments of one item."""
        args = [value(*item, **named) for value in self.own.values()]
        if self.packed:
            args.append(struct.pack(self.layout, *(value(*item, **named) for value in self.packed.values())))
        return args


# For each, infinity is no limit and no deadline, and 0 milliseconds for each request or token are no rate.
SUBMIT = Arguments[Demand, LedgerSettings](
    {
        "id$": lambda demand, _: demand.request_id,
        "tenant$": lambda demand, _: demand.tenant,
        "prefixes$": lambda demand, _: " ".join(demand.prefix_hashes),
        "digest$": lambda demand, _: demand.digest,
        "is_served?": lambda demand, _: int(demand.is_served),
        "adapter$": lambda demand, _: demand.adapter,
    },
    {
        "class": lambda demand, _: demand.priority_class,
        "deadline_in_ms": lambda demand, _: _limit(demand.deadline_ms),
        "total_in_ms": lambda demand, _: _limit(demand.total_ms),
        "blocks": lambda demand, _: demand.blocks,
        "placement_blocks": lambda demand, _: (
            demand.blocks if demand.placement_blocks is None else demand.placement_blocks
        ),
        "sequences": lambda demand, _: demand.sequences,
        "last_attempt": lambda demand, _: demand.last_attempt,
        "prompt": lambda demand, _: demand.prompt_tokens,
        "max": lambda demand, _: demand.max_tokens,
        "output": lambda demand, _: demand.output_tokens,
        "block_size": lambda demand, _: demand.block_size,
        "bytes": lambda demand, _: demand.num_bytes,
        "choices": lambda demand, _: demand.num_choices,
        "weight": lambda demand, _: demand.limits.weight,
        "max_running": lambda demand, _: _limit(demand.limits.max_running),
        "max_requests": lambda demand, _: _limit(demand.limits.max_queue_requests),
        "max_tokens": lambda demand, _: _limit(demand.limits.max_queue_tokens),
        "max_bytes": lambda demand, _: _limit(demand.limits.max_queue_bytes),
        "ms_per_request": lambda demand, _: _ms_per_unit(demand.limits.requests_per_s),
        "request_burst": lambda demand, _: demand.limits.request_burst,
        "ms_per_token": lambda demand, _: _ms_per_unit(demand.limits.tokens_per_s),
        "token_burst": lambda demand, _: demand.limits.token_burst,
        "max_pool_requests": lambda _, settings: settings.max_queue_requests,
        "max_pool_tokens": lambda _, settings: _limit(settings.max_queue_tokens),
        "max_pool_bytes": lambda _, settings: _limit(settings.max_queue_bytes),
        "max_bypass": lambda _, settings: settings.max_bypass,
        "age_ms": lambda _, settings: settings.age_ms,
        "preempts": lambda _, settings: settings.preempt_for_priority,
        "remember_ms": lambda _, settings: settings.remember_ended_ms,
        "tolerated_ttft_ms": lambda _, settings: settings.tolerated_ttft_ms,
    },
)


class _Rated(NamedTuple):
    """A request whose tenant's rates are checked."""

    tenant: str
    limits: TenantLimits
    tokens: int
    request_id: str
    takes: bool


RATES = Arguments[_Rated](
    {
        "tenant$": lambda one: one.tenant,
        "id$": lambda one: one.request_id,
        "takes?": lambda one: int(one.takes),
    },
    {
        "ms_per_request": lambda one: _ms_per_unit(one.limits.requests_per_s),
        "request_burst": lambda one: one.limits.request_burst,
        "ms_per_token": lambda one: _ms_per_unit(one.limits.tokens_per_s),
        "token_burst": lambda one: one.limits.token_burst,
        "tokens": lambda one: one.tokens,
    },
)

SETTLE = Arguments[Ending](
    {
        "id$": lambda ending: ending.request_id,
        "attempt": lambda ending: ending.attempt,
        "computed": lambda ending: _or_empty(ending.computed_tokens),
        "output": lambda ending: _or_empty(ending.output_tokens),
        "by_itself?": lambda ending: int(ending.by_itself),
        "cancelled?": lambda ending: int(ending.cancelled),
    }
)

REPORT = Arguments[ExecutorReport, LedgerSettings](
    {
        "id$": lambda report, _: report.executor_id,
        "seq": lambda report, _: report.seq,
        "accepting?": lambda report, _: int(report.accepting),
        "ends_at_reservation?": lambda report, _: int(report.ends_at_reservation),
        "held$": lambda report, _: b"".join(_packed(report.executor_id, one) for one in report.held),
        "adapters$": lambda report, _: "".join(
            f" {one.adapter}{'+' if one.is_resident else '-'}" for one in report.adapters
        ),
        "held_adapters$": lambda report, _: _held_adapters(report.held),
        "checkpoints$": lambda report, _: _checkpoints(report),
    },
    {
        "generation": lambda report, _: report.generation,
        "budget_blocks": lambda report, _: report.budget_blocks + report.saved_blocks,
        "total_blocks": lambda report, _: report.total_blocks,
        "budget_sequences": lambda report, settings: _num_sequences(report, settings),
        "quantile": lambda report, _: report.reserve_quantile,
        "step_ms": lambda report, _: report.step_ms,
        "prefill_tokens_per_s": lambda report, _: report.prefill_tokens_per_s,
        "output_tokens_per_s": lambda report, _: report.output_tokens_per_s,
        "num_standby": lambda report, _: report.num_standby,
        "age_ms": lambda report, _: report.age_ms,
        "num_adapter_slots": lambda report, _: report.num_adapter_slots,
    },
)


class _HandedBack(NamedTuple):
    """A placement that its owner returns."""

    request_id: str
    attempt: int
    max_attempts: int
    details: HandBackDetails


HAND_BACK = Arguments[_HandedBack](
    {
        "id$": lambda one: one.request_id,
        "attempt": lambda one: one.attempt,
        "max_attempts": lambda one: one.max_attempts,
        "why$": lambda one: _why(one.details),
        "output": lambda one: one.details.get("output_tokens", 0),
        "progressed?": lambda one: int(one.details.get("progressed", False)),
        "blocks": lambda one: _or_empty(one.details.get("placement_blocks")),
    }
)

CANCEL = Arguments[str, bool]({"id$": lambda request_id, _: request_id, "is_own?": lambda _, is_own: int(is_own)})

VERIFY = Arguments[Attempt]({"id$": lambda one: one.request_id, "attempt": lambda one: one.attempt})

ARGUMENTS: Mapping[str, Arguments[...]] = {
    "submit": SUBMIT,
    "rates": RATES,
    "settle": SETTLE,
    "report": REPORT,
    "hand_back": HAND_BACK,
    "cancel": CANCEL,
    "verify": VERIFY,
}
"""The arguments of one item, by script."""


def submit_args(demand: Demand, settings: LedgerSettings) -> list[Argument]:
    """Returns the arguments of submit.lua for one request."""
    return SUBMIT.of(demand, settings)


def rates_args(tenant: str, limits: TenantLimits, tokens: int, request_id: str, takes: bool) -> list[Argument]:
    """Returns the arguments of rates.lua."""
    return RATES.of(_Rated(tenant, limits, tokens, request_id, takes))


def settle_args(endings: Iterable[Attempt | Ending]) -> list[Argument]:
    """Returns the arguments of settle.lua."""
    full = (one if isinstance(one, Ending) else Ending(one.request_id, one.attempt) for one in endings)
    return [arg for ending in full for arg in SETTLE.of(ending)]


def report_args(report: ExecutorReport, settings: LedgerSettings) -> list[Argument]:
    """Returns the arguments of report.lua for one report."""
    return REPORT.of(report, settings)


def hand_back_args(request_id: str, attempt: int, max_attempts: int, details: HandBackDetails) -> list[Argument]:
    """Returns the arguments of hand_back.lua for one placement."""
    return HAND_BACK.of(_HandedBack(request_id, attempt, max_attempts, details))


# The separator of an account's parts, none of which contains it.
_PART = "\0"
_SYSTEM = "system"


def account_name(account: Account) -> str:
    """Returns the name of an account among those of its day."""
    kind = _SYSTEM if account.is_system else str(account.priority_class)
    return _PART.join((kind, account.tenant, account.adapter, account.executor_class))


def parse_account(day: int, name: str) -> Account:
    kind, tenant, adapter, executor_class = name.split(_PART)
    is_system = kind == _SYSTEM
    return Account(day, tenant, 0 if is_system else int(kind), adapter, executor_class, is_system)


def charge_args(usage: ExecutorUsage, totals: Iterable[AccountUsage]) -> list[Argument]:
    """Returns the arguments of charge.lua for accounts of one day."""
    args: list[Argument] = [
        f"{usage.executor_id}{_PART}{usage.generation}",
        USAGE_KEPT_MS,
        COUNTED_KEPT_MS,
        MAX_COUNTED,
    ]
    for one in totals:
        args += [account_name(one.account), struct.pack(f"<{len(FIGURES)}d", *one.figures)]
    return args


def parse_charge(raw: Sequence[Any], totals: Sequence[AccountUsage]) -> ChargeOutcome:
    """Returns the outcome of charge.lua for accounts of one day."""
    num_left_out, added, is_first = raw
    first_days = frozenset({one.account.day for one in totals} if is_first else ())
    booked = tuple(AccountUsage(totals[int(at)].account, tuple(map(int, figures))) for at, figures in added)
    return ChargeOutcome(booked, int(num_left_out), first_days)


def verify_args(waiting: Iterable[Attempt]) -> list[Argument]:
    """Returns the arguments of verify.lua."""
    return [arg for one in waiting for arg in VERIFY.of(one)]


def _num_sequences(report: ExecutorReport, settings: LedgerSettings) -> int:
    """Returns the sequences that the ledger counts. With `preempt_for_priority` these are the seats only: a standby
    place would not help a request of a higher class."""
    if settings.preempt_for_priority and report.seats is not None:
        return min(report.budget_sequences, report.seats)
    return report.budget_sequences


def _why(details: HandBackDetails) -> str:
    if details.get("preempted"):
        return "preempted"
    if details.get("rejected"):
        return "rejected"
    return "stood_still" if details.get("stood_still") else "lost"


def _ms_per_unit(rate_per_s: float | None) -> float:
    return 0.0 if rate_per_s is None else 1000 / rate_per_s


def _limit(value: float | None) -> float:
    return inf if value is None else value


def _or_empty(value: int | None) -> int | str:
    return "" if value is None else value


def _packed(executor_id: str, held: HeldSequence) -> bytes:
    """Returns the length (uint16) of the sequence's member of `placements`, the member, and its blocks (double)."""
    member = f"{executor_id}\0{held.attempt}\0{held.request_id}".encode()
    return struct.pack(f"<H{len(member)}sd", len(member), member, held.blocks)


def _held_adapters(held: Sequence[HeldSequence]) -> str:
    return " ".join(one.adapter or "-" for one in held) if any(one.adapter for one in held) else ""


def _checkpoints(report: ExecutorReport) -> str:
    if report.checkpoints is None:
        return ""
    return f"{'' if report.lists_all_checkpoints else '+'} {''.join(f'{name} ' for name in report.checkpoints)}"


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
