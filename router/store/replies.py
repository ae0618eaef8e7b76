"""What the scripts return, as types. The other side of the table at the top of `scripts/shared/records.lua`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import Reason
from router.store.snapshot import ClassQueue, EstimateQuality, ExecutorStanding, Snapshot, TenantLine
from router.store.types import (
    Adopted,
    CancelAsked,
    Cancelled,
    CancelOutcome,
    Dropped,
    DropReason,
    Duplicate,
    Explanation,
    HandBackRefusal,
    Lost,
    Placement,
    PreemptAsked,
    Queued,
    Refused,
    RequestState,
    StoreEvent,
    TakenOver,
    WaitReason,
)


@dataclass(frozen=True, slots=True)
class Reply:
    """One script's reply. `status` and `values` are its outcome."""

    status: str
    values: tuple[Any, ...]
    events: tuple[StoreEvent, ...]
    missing: tuple[str, ...]
    more: bool
    registered: bool
    now_ms: int

    @property
    def is_complete(self) -> bool:
        """Whether nothing was left undone."""
        return not (self.missing or self.more or self.status == "AGAIN")


def parse_reply(raw: Sequence[Any]) -> Reply:
    """The reply of any script."""
    outcome, events, missing, more, registered, now_ms = raw
    pairs = (dict(zip(fields[::2], fields[1::2], strict=True)) for fields in events)
    parsed = tuple(parse_event(fields) for fields in pairs)
    return Reply(outcome[0], tuple(outcome[1:]), parsed, tuple(missing), bool(more), bool(registered), now_ms)


def parse_event(fields: Mapping[str, Any]) -> StoreEvent:
    """An event, from a reply or from a mailbox."""
    return _EVENTS[fields["kind"]](fields)


def _placement(fields: Mapping[str, Any]) -> Placement:
    return Placement(
        fields["request_id"],
        int(fields["attempt"]),
        fields["executor_id"],
        int(fields["generation"]),
        # What mail of an older router of the same format may lack.
        int(fields.get("blocks", 0)),
        fields.get("suspect") == "1",
    )


def _lost(fields: Mapping[str, Any]) -> Lost:
    return Lost(fields["request_id"], int(fields["attempt"]), fields["executor_id"], int(fields["generation"]))


def _dropped(fields: Mapping[str, Any]) -> Dropped:
    return Dropped(fields["request_id"], DropReason(fields["kind"]))


_EVENTS: dict[str, Callable[[Mapping[str, Any]], StoreEvent]] = {
    "placed": _placement,
    "lost": _lost,
    "cancel": lambda fields: CancelAsked(fields["request_id"], int(fields["attempt"])),
    "preempt": lambda fields: PreemptAsked(fields["request_id"], int(fields["attempt"])),
    "cancelled": lambda fields: Cancelled(fields["request_id"], int(fields["at_ms"]) if "at_ms" in fields else None),
    "taken_over": lambda fields: TakenOver(fields["request_id"], int(fields["at_ms"])),
    DropReason.EXPIRED.value: _dropped,
    DropReason.NEVER_FITS.value: _dropped,
}


def parse_standing(request_id: str, reply: Reply) -> Placement | Queued:
    """How a request stands, from an outcome PLACED or QUEUED."""
    if reply.status == "PLACED":
        return _placed(request_id, reply)
    position, wait_ms = reply.values
    return Queued(position, _optional(wait_ms))


def _placed(request_id: str, reply: Reply) -> Placement:
    attempt, executor_id, generation, blocks, suspect = reply.values
    return Placement(request_id, attempt, executor_id, generation, blocks, bool(suspect))


def _adopted(request_id: str, reply: Reply) -> Adopted:
    return Adopted(_placed(request_id, reply), ended=reply.status == "ADOPTED_ENDED")


_ADOPTIONS = ("ADOPTED", "ADOPTED_ENDED")


def parse_adopt(request_id: str, reply: Reply) -> Adopted | RequestState | None:
    """The outcome of adopt."""
    if reply.status in _ADOPTIONS:
        return _adopted(request_id, reply)
    return None if reply.status == "UNKNOWN" else RequestState(reply.status)


def parse_submit(request_id: str, reply: Reply) -> Placement | Queued | Refused | Duplicate | Adopted:
    """The outcome of submit."""
    if reply.status == "REFUSED":
        return _refused(reply)
    if reply.status == "DUPLICATE":
        return Duplicate(RequestState(reply.values[0]))
    if reply.status in _ADOPTIONS:
        return _adopted(request_id, reply)
    return parse_standing(request_id, reply)


def parse_rates(reply: Reply) -> Refused | None:
    """The outcome of rates; None where they would take the request."""
    return _refused(reply) if reply.status == "REFUSED" else None


def _refused(reply: Reply) -> Refused:
    reason, limit, retry_after_ms = reply.values
    return Refused(Reason(reason), limit, _optional(retry_after_ms))


def parse_hand_back(request_id: str, reply: Reply) -> Placement | Queued | HandBackRefusal:
    """The outcome of hand_back; DROPPED comes as an event."""
    if reply.status in ("PLACED", "QUEUED"):
        return parse_standing(request_id, reply)
    return HandBackRefusal(reply.status)


def parse_cancel(request_id: str, reply: Reply) -> CancelOutcome:
    """The outcome of cancel."""
    if reply.status == "UNKNOWN":
        return CancelOutcome(None)
    state = RequestState(reply.status)
    if state is RequestState.ENDED:
        return CancelOutcome(state)
    attempt, executor_id, generation, owner_id, told = reply.values
    placement = Placement(request_id, attempt, executor_id, generation) if state is RequestState.PLACED else None
    return CancelOutcome(state, placement, owner_id or None, bool(told))


def parse_explain(reply: Reply) -> Explanation | None:
    """The outcome of explain."""
    if reply.status == "UNKNOWN":
        return None
    state = RequestState(reply.status)
    if state is RequestState.ENDED:
        return Explanation(state)
    attempt, priority_class, tenant, executor_id, ahead, wait_ms, reason, needed, available, passed = reply.values
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
    )


def parse_snapshot(reply: Reply) -> Snapshot:
    """The outcome of snapshot."""
    found = json.loads(reply.values[0])
    return Snapshot(
        tuple(ExecutorStanding(**one) for one in found["executors"]),
        tuple(ClassQueue(*one) for one in found["queues"]),
        EstimateQuality(*found["estimates"]),
        tuple(TenantLine(*one) for one in found["lines"]),
    )


def _optional(value: int | str) -> int | None:
    return None if value == "" else int(value)
