"""What a step and an executor can take: the numbers that the scheduler is built with."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Batching(Enum):
    """When sequences may board: INFLIGHT at every step, STATIC when everyone has got off."""

    INFLIGHT = "inflight"
    STATIC = "static"


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """`max_num_sequences` are the seats, `num_standby_sequences` more may wait for one, `max_num_tokens` is a step's
    budget, `context_length` bounds prompt and output. Without `enable_chunked_context` a prompt takes one step.
    `num_host_blocks` blocks of host memory, numbered from 0, can keep the KV of who gave up its seat."""

    max_num_sequences: int
    num_standby_sequences: int
    max_num_tokens: int
    context_length: int
    enable_chunked_context: bool
    batching: Batching
    enable_prefix_cache: bool
    num_host_blocks: int = 0

    @property
    def num_seat_rows(self) -> int:
        """Rows of arrays kept by seat. Who is ended in flight keeps its row until the step in flight is retired, while
        somebody else has already boarded: that can be everyone."""
        return 2 * self.max_num_sequences

    def __post_init__(self) -> None:
        if self.max_num_sequences < 1:
            raise ValueError(f"max_num_sequences must be at least 1, not {self.max_num_sequences}")
        if self.num_standby_sequences < 0:
            raise ValueError(f"num_standby_sequences must be at least 0, not {self.num_standby_sequences}")
        # Every seat gets its token in every step; with less, the last seats would wait for the first to end.
        if self.max_num_tokens < self.max_num_sequences:
            least = f"max_num_sequences ({self.max_num_sequences})"
            raise ValueError(f"max_num_tokens must be at least {least}, not {self.max_num_tokens}")
