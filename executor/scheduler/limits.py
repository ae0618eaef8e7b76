"""Limits and policies that the scheduler is built with."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Batching(Enum):
    """When sequences may board: INFLIGHT at every step, STATIC when the whole batch has ended."""

    INFLIGHT = "inflight"
    STATIC = "static"


class SchedulerPolicy(Enum):
    """How much KV is guaranteed to a running sequence: with GUARANTEED_NO_EVICT all that it can need, with
    MAX_UTILIZATION what it is likely to need, so that more sequences run at once and some are preempted. The names are
    TensorRT-LLM's."""

    GUARANTEED_NO_EVICT = "guaranteed_no_evict"
    MAX_UTILIZATION = "max_utilization"


@dataclass(frozen=True, slots=True)
class PreemptionCost:
    """Cost per token of restoring KV: computing it again, or copying it one way between device and host.

    Only the ratio counts. SmolLM2-135M on two cores takes 168 µs to compute a token and 4.5 µs to copy it (measured); a
    model of 8 billion parameters on a large GPU about 25 µs and 2.6 µs (by its size and the speed of the link). A tenth
    fits the second and is cautious for the first.
    """

    recompute_token: float = 1.0
    swap_token: float = 0.1


@dataclass(frozen=True, slots=True)
class Overcommit:
    """Settings by which max_utilization keeps preemptions rare.

    Shares of the pool: `watermark` stays free when a sequence boards beside others. After a preemption no new sequence
    boards until the preempted ones have boarded again and `margin` is free as well. (A watermark of 5 % alone took
    another engine from 1065 to 187 preemptions on one trace. Here reservations bound the load already, and 2 % covers
    what they miss.) A sequence that has been preempted for `max_steps_away` steps is handed back, so that another
    executor can take it.
    """

    cost: PreemptionCost = PreemptionCost()
    watermark: float = 0.02
    margin: float = 0.05
    max_steps_away: int = 200


@dataclass(frozen=True, slots=True)
class InterTokenTargets:
    """The inter-token target of sequences that bring none, by priority class, in milliseconds; 0 is none.

    A reader takes 5 to 10 tokens per second. The default of standard is the faster of these, that of interactive twice
    as fast.
    """

    interactive_ms: float = 50.0
    standard_ms: float = 100.0
    batch_ms: float = 0.0

    def of(self, priority: int) -> float | None:
        """Returns the target of a class that is above (1), at (0) or below (-1) standard."""
        return {1: self.interactive_ms, 0: self.standard_ms, -1: self.batch_ms}[priority] or None


@dataclass(frozen=True, slots=True)
class KvWindow:
    """The KV pool of the layers with a sliding window: the largest window, the pool's blocks, and how many sequences
    may hold some of them at a time (`inflight.common.kv_size.WindowSize`)."""

    num_tokens: int
    num_blocks: int
    max_sequences: int


@dataclass(frozen=True, slots=True)
class StateLimits:
    """The memory of recurrent layers: slots, one for each sequence that may hold one at a time, and checkpoints, which
    are at multiples of `grid_tokens` (`inflight.executor.scheduler.states`). `end_token_ids` end the messages of
    prompts. `num_host_slots` slots of host memory keep the state of preempted sequences beside host blocks; the KV of
    `slot_tokens` tokens takes as much memory as a slot."""

    num_slots: int
    num_checkpoints: int
    grid_tokens: int
    end_token_ids: frozenset[int] = frozenset()
    num_host_slots: int = 0
    slot_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of a step and of the executor.

    `max_num_sequences` are the seats, and `num_standby_sequences` more may wait for one. `max_num_tokens` is the token
    budget of a step, `context_length` bounds prompt and output. Without `enable_chunked_context` a prompt takes one
    step. `num_host_blocks` blocks of host memory, numbered from 0, keep the KV of preempted sequences and, with
    `enable_prefix_cache`, prefixes that are evicted from the pool. A sequence waits at most `max_prefix_wait_steps`
    steps for another one that computes the prefix it needs. A step verifies at most `max_drafts` drafted tokens of a
    sequence. `kv_window` is set if layers with a sliding window have a pool of their own; then there are no host
    blocks. `states` is set if layers are recurrent; then host blocks keep no prefixes.
    """

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
    max_prefix_wait_steps: int = 64
    max_drafts: int = 0
    kv_window: KvWindow | None = None
    states: StateLimits | None = None

    @property
    def num_host_slots(self) -> int:
        """Slots of recurrent state in host memory."""
        return 0 if self.states is None else self.states.num_host_slots

    @property
    def is_overcommitted(self) -> bool:
        """Whether reservations may be smaller than the need. A static batch always runs to its end."""
        return self.policy is SchedulerPolicy.MAX_UTILIZATION and self.batching is Batching.INFLIGHT

    @property
    def max_step_tokens(self) -> int:
        """Most tokens of a step. Without chunked prefill a prompt takes one step, however long it is."""
        return self.max_num_tokens if self.enable_chunked_context else max(self.max_num_tokens, self.context_length)

    @property
    def max_num_yields(self) -> int:
        """Most positions of a step that yield a token: one of each sequence, and one for each of its drafts."""
        return min(self.max_num_sequences * (1 + self.max_drafts), self.max_step_tokens)

    @property
    def num_seat_rows(self) -> int:
        """Rows of arrays kept by seat. A sequence that ends in flight keeps its row until that step retires, while
        another one has already boarded. All seats can be in that state at once."""
        return 2 * self.max_num_sequences

    def __post_init__(self) -> None:
        if self.max_num_sequences < 1:
            raise ValueError(f"max_num_sequences must be at least 1, not {self.max_num_sequences}")
        if self.kv_window is not None and self.num_host_blocks:
            raise ValueError("host blocks need one KV pool for all layers")
        if self.states is not None and self.num_host_blocks and not self.states.num_host_slots:
            raise ValueError("host blocks need host slots for recurrent state")
        if self.num_standby_sequences < 0:
            raise ValueError(f"num_standby_sequences must be at least 0, not {self.num_standby_sequences}")
        # Every seat gets its token in every step. With less, the last seats would wait for the first to end.
        if self.max_num_tokens < self.max_num_sequences:
            least = f"max_num_sequences ({self.max_num_sequences})"
            raise ValueError(f"max_num_tokens must be at least {least}, not {self.max_num_tokens}")
