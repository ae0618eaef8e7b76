"""Commands that other threads put into the engine's inbox."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.executor.scheduler.sequence import FinishReason, Sequence


@dataclass(frozen=True, slots=True)
class SubmitCommand:
    """Offers a sequence."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class PreparedCommand:
    """Lets a submitted sequence board, now that its grammar is compiled, or ends it with an error."""

    sequence: Sequence
    error: str


@dataclass(frozen=True, slots=True)
class CancelCommand:
    """Ends a sequence."""

    request_id: str
    attempt: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class DrainCommand:
    """Refuses new sequences from now on."""


@dataclass(frozen=True, slots=True)
class StopCommand:
    """Ends the thread. Held sequences get no end: their routers see the streams break and place them elsewhere."""


@dataclass(frozen=True, slots=True)
class ListCommand:
    """Requests the list of held sequences."""


Command = SubmitCommand | PreparedCommand | CancelCommand | DrainCommand | StopCommand | ListCommand
