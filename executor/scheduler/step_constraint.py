"""What limits a step: the demand of prompts, and the constraint that kept a step from holding more."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class PrefillDemand:
    """Who computes, and who waits to: `num_behind` sequences with a seat, or one to be had, want a first token. The
    first of them goes on at `position`."""

    num_decodes: int
    decode_context: int
    num_behind: int
    position: int


class StepConstraint(Enum):
    """NO_WORK: a seat was free, and nothing here waited for it. SEATS: every seat was taken. BLOCKS: none was left for
    who waits. TOKENS: the step's budget was spent. PACE: prompts were cut short to keep the time between tokens.
    STATIC_BATCH: one still ran. TWIN: who waits wants the prefix that another is computing."""

    NO_WORK = "no_work"
    SEATS = "seats"
    BLOCKS = "blocks"
    TOKENS = "tokens"
    PACE = "pace"
    STATIC_BATCH = "static_batch"
    TWIN = "twin"


class StepBounds:
    """Counts steps by what bound them."""

    def __init__(self) -> None:
        self.newest: StepConstraint | None = None
        self._num_steps = dict.fromkeys(StepConstraint, 0)

    def note(self, constraint: StepConstraint) -> None:
        """Takes in a step that is launched."""
        self.newest = constraint
        self._num_steps[constraint] += 1

    @property
    def num_steps(self) -> tuple[tuple[StepConstraint, int], ...]:
        """Steps since the start, of each constraint that bound any."""
        return tuple((constraint, count) for constraint, count in self._num_steps.items() if count)
