"""What a model makes of a whole prompt: an embedding or a score, from hidden states after the final norm. Pure.

    kind     rows that it needs     result
    LAST     the last               that row
    MEAN     all                    their mean
    SCORE    the last               sigmoid(row · weights + bias)

As in sentence-transformers, an embedding is then divided by its length if the model's files say so. Dimensions that are
not wanted are cut off before that.

Rows of a chunk are summed in float64, and so are the sums of chunks. So a mean depends on how its prompt was divided
into chunks only as far as the rows do.
"""

from __future__ import annotations

import math
import operator
from array import array
from dataclasses import dataclass
from enum import Enum

# What torch's `normalize` divides shorter rows by.
MIN_LENGTH = 1e-12


class PoolingKind(Enum):
    LAST = "last"
    MEAN = "mean"
    SCORE = "score"


@dataclass(frozen=True, slots=True, eq=False)
class Pooling:
    """How a model pools. `hidden_size` are the numbers of a row. SCORE has `weights[hidden_size]`. A model that
    `is_only` pooling does not generate."""

    kind: PoolingKind
    hidden_size: int
    is_normalized: bool = False
    is_only: bool = False
    weights: tuple[float, ...] = ()
    bias: float = 0.0

    @property
    def size(self) -> int:
        """Numbers of a result."""
        return 1 if self.kind is PoolingKind.SCORE else self.hidden_size

    @property
    def needs_all_rows(self) -> bool:
        """Whether the hidden states of all tokens are needed, so that no prefix may come from the cache."""
        return self.kind is PoolingKind.MEAN


@dataclass(slots=True, eq=False)
class PooledOutput:
    """The result of one sequence, which grows with its chunks. `dimensions` 0 keeps all. The first `num_planned` tokens
    need no further row: they are in `total`, the sum of the rows so far in float64, or in steps in flight."""

    pooling: Pooling
    dimensions: int = 0
    num_planned: int = 0
    total: array[float] | None = None

    def rows_of_chunk(self, start: int, end: int, num_tokens: int) -> tuple[int, int]:
        """Returns the positions `[first, last)` whose rows are needed of a chunk `[start, end)` of a prompt of
        `num_tokens`; none if they are equal."""
        if self.pooling.needs_all_rows:
            return max(start, self.num_planned), end
        return (end - 1, end) if end == num_tokens > self.num_planned else (end, end)

    def add(self, rows_sum: array[float]) -> None:
        """Adds the sum `[hidden_size]` of the rows of a chunk, in float64."""
        total = self.total
        self.total = rows_sum if total is None else array("d", map(operator.add, total, rows_sum))

    @property
    def is_finite(self) -> bool:
        """Whether all numbers so far are finite. They are not if the model computes NaN or infinity."""
        return self.total is None or math.isfinite(sum(self.total))

    def values(self, num_tokens: int) -> array[float]:
        """Returns the result, in float32, for a prompt of `num_tokens`, all rows of which were added."""
        assert self.total is not None
        pooling, row = self.pooling, self.total
        if pooling.kind is PoolingKind.SCORE:
            return array("f", (_sigmoid(math.fsum(map(operator.mul, row, pooling.weights)) + pooling.bias),))
        row = row[: self.dimensions] if self.dimensions else row
        divisor = float(num_tokens) if pooling.kind is PoolingKind.MEAN else 1.0
        if pooling.is_normalized:
            divisor *= max(math.sqrt(math.fsum(map(operator.mul, row, row))) / divisor, MIN_LENGTH)
        return array("f", (number / divisor for number in row))


def _sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit)) if logit > 0 else math.exp(logit) / (1 + math.exp(logit))
