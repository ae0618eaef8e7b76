"""Limits of a step: the demand of prompts, and the constraint that kept a step from holding more."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class PrefillDemand:
    """Load of a step: `num_decodes` sequences decode with `decode_context` tokens of context in all. `num_behind`
    sequences with a seat, or with one available, wait for their first token, and the shortest of them continues at
    `position`."""

    num_decodes: int
    decode_context: int
    num_behind: int
    position: int


class StepConstraint(Enum):
    """What kept a step from holding more.

    - NO_WORK: a seat was free, and no sequence here waited for it.
    - SEATS: every seat was taken.
    - BLOCKS: the next sequence lacked KV blocks.
    - TOKENS: the step's token budget was spent.
    - PACE: prompts were cut short to keep the time between tokens.
    - STATIC_BATCH: the static batch was still running.
    - TWIN: the next sequence waits for a prefix that another one is computing.
    """

    NO_WORK = "no_work"
    SEATS = "seats"
    BLOCKS = "blocks"
    TOKENS = "tokens"
    PACE = "pace"
    STATIC_BATCH = "static_batch"
    TWIN = "twin"


class StepBounds:
    """Counts steps by their constraint."""

    def __init__(self) -> None:
        self.newest: StepConstraint | None = None
        self._num_steps = dict.fromkeys(StepConstraint, 0)

    def note(self, constraint: StepConstraint) -> None:
        """Counts a step that is launched."""
        self.newest = constraint
        self._num_steps[constraint] += 1

    @property
    def num_steps(self) -> tuple[tuple[StepConstraint, int], ...]:
        """Steps since the start by constraint, without zeros."""
        return tuple((constraint, count) for constraint, count in self._num_steps.items() if count)
