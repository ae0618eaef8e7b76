"""Limits of a step: what its decodes ask for, what its prompts may take, and the constraint that kept a step from
holding more."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """The decodes of a step: `num_decodes` sequences read the KV of `context` tokens in all. `target_ms` is the
    smallest of their inter-token targets; None: no sequence has one."""

    num_decodes: int
    context: int
    target_ms: float | None


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds that prompt tokens add to a step: for each token, and for each token times the middle of its chunk. A
    chunk of one token counts as a decode, by the tokens that it reads."""

    token_s: float = 0.0
    work_s: float = 0.0
    context_s: float = 0.0

    def of(self, num_tokens: int, position: int) -> float:
        """Returns the seconds of `num_tokens` from `position` on in one step."""
        if num_tokens == 1:
            return self.token_s + self.context_s * (position + 1)
        return self.token_s * num_tokens + self.work_s * num_tokens * (position + num_tokens / 2)

    def fitting(self, num_tokens: int, position: int, seconds: float) -> int:
        """Returns how many of `num_tokens` from `position` on take at most `seconds`."""
        linear = self.token_s + self.work_s * position
        # work_s / 2 * n² + linear * n = seconds
        root = linear + math.sqrt(linear**2 + 2 * self.work_s * max(0.0, seconds))
        num_fitting = num_tokens if root * num_tokens <= 2 * seconds else int(2 * seconds / root)
        while num_fitting > 0 and self.of(num_fitting, position) > seconds:
            num_fitting -= 1
        return num_fitting


@dataclass(frozen=True, slots=True)
class StepCost:
    """Predicted seconds of a step: `fixed_s`, and what its tokens add."""

    fixed_s: float
    tokens: PrefillCost


@dataclass(frozen=True, slots=True)
class CopyCost:
    """Seconds of copying a block between device and host memory, and what computing its tokens would cost."""

    block_s: float = 0.0
    prefill: PrefillCost = PrefillCost()

    def is_cheaper(self, num_blocks: int, block_size: int, position: int) -> bool:
        """Returns whether copying these blocks, which start at `position`, takes less time than computing them."""
        return num_blocks * self.block_s < self.prefill.of(num_blocks * block_size, position)


@dataclass(slots=True)
class PrefillAllowance:
    """What the prompts of a step may still take: `seconds` by `cost`, or `least_tokens` if these are more.

    A block that is copied takes `copy_s`. Tokens that are copied back count like computed ones in `least_tokens`.
    """

    least_tokens: int
    seconds: float = 0.0
    cost: PrefillCost = PrefillCost()
    copy_s: float = 0.0

    def fitting(self, num_tokens: int, position: int) -> int:
        """Returns how many of `num_tokens` from `position` on a prompt may take."""
        num_fitting = self.cost.fitting(num_tokens, position, self.seconds) if self.seconds > 0 else 0
        return max(num_fitting, min(num_tokens, self.least_tokens), 0)

    def take(self, num_tokens: int, position: int) -> None:
        """Counts tokens that a prompt takes. What is left may become negative."""
        self.seconds -= self.cost.of(num_tokens, position)
        self.least_tokens -= num_tokens

    def fitting_copies(self, num_blocks: int) -> int:
        """Returns how many of `num_blocks` blocks may be copied."""
        return min(num_blocks, int(max(0.0, self.seconds) / self.copy_s)) if self.copy_s else num_blocks

    def fitting_restores(self, num_blocks: int, block_size: int) -> int:
        """Returns how many of `num_blocks` blocks may come back from host memory. Each can displace another one, which
        is copied as well."""
        num_least = -(-self.least_tokens // block_size)
        return max(self.fitting_copies(2 * num_blocks) // 2, min(num_blocks, num_least), 0)

    def take_restores(self, num_blocks: int, block_size: int) -> None:
        """Counts blocks that come back from host memory."""
        self.seconds -= 2 * num_blocks * self.copy_s
        self.least_tokens -= num_blocks * block_size


@dataclass(frozen=True, slots=True)
class DraftTerms:
    """What drafts may cost: `time_of_step` predicts the seconds of the step by its tokens, which should stay below
    `longest_s`; None: any. The device waits `host_s` for any step, and `wait_s` more for one that is planned only once
    the one before has retired. `drafts_batch` says whether class batch drafts."""

    time_of_step: Callable[[int], float]
    longest_s: float | None = None
    host_s: float = 0.0
    wait_s: float = 0.0
    drafts_batch: bool = True

    def with_waits(self, num_tokens: int, num_waits: int) -> Callable[[int], float]:
        """Returns the seconds of a step by its tokens, where any beyond `num_tokens` cost so many waits."""
        behind_s = self.host_s + num_waits * self.wait_s
        return lambda number: self.time_of_step(number) + (behind_s if number > num_tokens else self.host_s)

    def fitting(self, num_tokens: int, num_wanted: int) -> int:
        """Returns how many of `num_wanted` tokens may join a step of `num_tokens`."""
        longest_s = self.longest_s
        if longest_s is None:
            return num_wanted
        sizes = range(num_tokens + 1, num_tokens + num_wanted + 1)
        return bisect_right(sizes, longest_s, key=self.time_of_step)


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

    def count(self, constraint: StepConstraint) -> None:
        """Counts a step that is launched."""
        self.newest = constraint
        self._num_steps[constraint] += 1

    @property
    def num_steps(self) -> tuple[tuple[StepConstraint, int], ...]:
        """Steps since the start by constraint, without zeros."""
        return tuple((constraint, count) for constraint, count in self._num_steps.items() if count)
