"""What other threads tell the loop."""

from __future__ import annotations

from dataclasses import dataclass

from executor.scheduler.sequence import FinishReason, Sequence


@dataclass(frozen=True, slots=True)
class Submitted:
    """Inbox: a sequence wants in."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class CancelCommand:
    """Inbox: a sequence shall end."""

    request_id: str
    attempt: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Draining:
    """Inbox: take no new work."""


@dataclass(frozen=True, slots=True)
class StopCommand:
    """Inbox: end the thread. What is held gets no end: its routers see their streams break and place it elsewhere."""


@dataclass(frozen=True, slots=True)
class Listing:
    """Inbox: say who is held and where each is."""


Command = Submitted | CancelCommand | Draining | StopCommand | Listing
