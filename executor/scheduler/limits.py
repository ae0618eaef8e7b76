"""What a step and an executor can take: the numbers that the scheduler is built with."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Batching(Enum):
    """When sequences may board: INFLIGHT at every step, STATIC when everyone has got off."""

    INFLIGHT = "inflight"
    STATIC = "static"


class SchedulerPolicy(Enum):
    """What is promised to who boards: GUARANTEED_NO_EVICT its KV to the end, MAX_UTILIZATION what it is likely to need,
    so that more sequences run at once and some are preempted. The names are TensorRT-LLM's."""

    GUARANTEED_NO_EVICT = "guaranteed_no_evict"
    MAX_UTILIZATION = "max_utilization"


@dataclass(frozen=True, slots=True)
class PreemptionCost:
    """What it costs to get KV back, per token: to compute it once more, or to copy it one way between device and host.

    Only the ratio counts. SmolLM2-135M on two cores takes 168 µs to compute a token and 4.5 µs to copy it (measured); a
    model of 8 billion parameters on a large GPU about 25 µs and 2.6 µs (by its size and the speed of the link). A tenth
    is right for the second and careful for the first.
    """

    recompute_token: float = 1.0
    swap_token: float = 0.1


@dataclass(frozen=True, slots=True)
class Overcommit:
    """How max_utilization keeps preemptions rare.

    Shares of the pool: `watermark` stays free when somebody boards beside others, and after a preemption nobody new
    boards until the preempted are back and `margin` is free as well. (A watermark of 5 % alone took another engine from
    1065 to 187 preemptions on one trace; here reservations hold the line already, and 2 % covers what they miss.) Who
    has been away for `max_steps_away` steps is handed back for another executor to take.
    """

    cost: PreemptionCost = PreemptionCost()
    watermark: float = 0.02
    margin: float = 0.05
    max_steps_away: int = 200


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """`max_num_sequences` are the seats, `num_standby_sequences` more may wait for one, `max_num_tokens` is a step's
    budget, `context_length` bounds prompt and output. Without `enable_chunked_context` a prompt takes one step.
    `num_host_blocks` blocks of host memory, numbered from 0, keep the KV of preempted sequences; for `max_twin_steps` a
    sequence waits for one that computes the prefix it wants."""

    max_num_sequences: int
    num_standby_sequences: int
    max_num_tokens: int
    context_length: int
    enable_chunked_context: bool
    batching: Batching
    enable_prefix_cache: bool
    policy: SchedulerPolicy = SchedulerPolicy.GUARANTEED_NO_EVICT
    num_host_blocks: int = 0
    overcommit: Overcommit = Overcommit()
    max_twin_steps: int = 64

    @property
    def is_overcommitted(self) -> bool:
        """Whether reservations may be smaller than the need. A static batch always runs to its end."""
        return self.policy is SchedulerPolicy.MAX_UTILIZATION and self.batching is Batching.INFLIGHT

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
