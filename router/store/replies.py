"""What the scripts return, as types. The other side of the table at the top of `prelude.lua`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import Reason
from router.store.types import (
    CancelAsked,
    Cancelled,
    CancelOutcome,
    Dropped,
    DropReason,
    Duplicate,
    HandBackRefusal,
    Lost,
    Placement,
    Queued,
    Refused,
    RequestState,
    StoreEvent,
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

    @property
    def is_complete(self) -> bool:
        """Whether nothing was left undone."""
        return not (self.missing or self.more or self.status == "AGAIN")


def parse_reply(raw: Sequence[Any]) -> Reply:
    """The reply of any script."""
    outcome, events, missing, more, registered = raw
    pairs = (dict(zip(fields[::2], fields[1::2], strict=True)) for fields in events)
    parsed = tuple(parse_event(fields) for fields in pairs)
    return Reply(outcome[0], tuple(outcome[1:]), parsed, tuple(missing), bool(more), bool(registered))


def parse_event(fields: Mapping[str, Any]) -> StoreEvent:
    """An event, from a reply or from a mailbox."""
    return _EVENTS[fields["kind"]](fields)


def _placement(fields: Mapping[str, Any]) -> Placement:
    return Placement(fields["request_id"], int(fields["attempt"]), fields["executor_id"], int(fields["generation"]))


def _lost(fields: Mapping[str, Any]) -> Lost:
    return Lost(fields["request_id"], int(fields["attempt"]), fields["executor_id"], int(fields["generation"]))


def _dropped(fields: Mapping[str, Any]) -> Dropped:
    return Dropped(fields["request_id"], DropReason(fields["kind"]))


_EVENTS: dict[str, Callable[[Mapping[str, Any]], StoreEvent]] = {
    "placed": _placement,
    "lost": _lost,
    "cancel": lambda fields: CancelAsked(fields["request_id"], int(fields["attempt"])),
    "cancelled": lambda fields: Cancelled(fields["request_id"]),
    DropReason.EXPIRED.value: _dropped,
    DropReason.NEVER_FITS.value: _dropped,
}


def parse_standing(request_id: str, reply: Reply) -> Placement | Queued:
    """How a request stands, from an outcome PLACED or QUEUED."""
    if reply.status == "PLACED":
        attempt, executor_id, generation = reply.values
        return Placement(request_id, attempt, executor_id, generation)
    return Queued(reply.values[0])


def parse_submit(request_id: str, reply: Reply) -> Placement | Queued | Refused | Duplicate:
    """The outcome of submit."""
    if reply.status == "REFUSED":
        return Refused(Reason(reply.values[0]))
    if reply.status == "DUPLICATE":
        return Duplicate(RequestState(reply.values[0]))
    return parse_standing(request_id, reply)


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
