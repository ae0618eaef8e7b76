"""One choice of a request on this executor, and what a step does with it. Pure data.

A sequence's tokens are its prompt followed by its output. `num_computed` of them have their KV in the blocks of
`block_table`, or will have when the steps in flight are through; the scheduler lets it chase `num_tokens`, which counts
the tokens that those steps will yield. Plans and tokens are columns, not an object for each row: a step is made and
retired hundreds of times per second. Nothing here knows of time, devices or gRPC.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

from executor.scheduler.step_constraint import StepConstraint


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    PREEMPTED = "preempted"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 keep every token."""

    temperature: float
    top_k: int
    top_p: float
    seed: int


@dataclass(frozen=True, slots=True)
class Stopping:
    """When the sequence ends. `stop_token_ids` holds the model's end-of-sequence ids too, unless they are ignored."""

    max_tokens: int
    min_tokens: int
    stop_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely a token was, as a natural logarithm, and the likeliest tokens in its place, likeliest first."""

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


NO_LOGPROBS: Mapping[int, TokenLogprobs] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class HostCopy:
    """The KV of a preempted sequence in host memory: `host_blocks[i]` holds what block `first_index + i` of its table
    held. Together with the blocks before, of which others hold a reference, that is the KV of `num_computed` tokens."""

    first_index: int
    host_blocks: list[int]
    num_computed: int


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence that waits or runs.

    `token_ids[:num_prompt_tokens]` is the prompt, the rest output (output of earlier placements included).
    `block_table[i]` is the block that holds positions `[i * block_size, (i + 1) * block_size)`. `num_reserved_blocks`
    is what the ledger promised; `cache_salt` None keeps it out of the prefix cache. `length_limit` is the number of
    tokens at which it ends at the latest. `seat` numbers its rows in arrays that are kept between steps.
    `num_in_flight` steps that are not retired have a row of it; `num_pending` of them will yield a token.

    Of two `priority` values the larger is served first; `deadline_ms` is by the engine's clock, and here only compared.
    `arrival` counts who came in. The rest is of who was preempted: `num_lost_tokens` had their KV when that happened
    last, `host_copy` is what is left of it, and it has been away for `num_steps_away`. For `num_twin_steps` it waited
    for the prefix that another computes.

    With `num_top_logprobs` the likeliest so many tokens are reported with each token that is sampled here, by offset in
    `logprobs`. None reports nothing.
    """

    request_id: str
    attempt: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: Sampling
    stopping: Stopping
    num_reserved_blocks: int
    cache_salt: bytes | None
    num_computed: int = 0
    num_cached_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    length_limit: int = 0
    seat: int | None = None
    num_in_flight: int = 0
    num_pending: int = 0
    priority: int = 0
    deadline_ms: int | None = None
    arrival: int = 0
    num_preemptions: int = 0
    num_lost_tokens: int = 0
    num_steps_away: int = 0
    host_copy: HostCopy | None = None
    num_twin_steps: int = 0
    num_top_logprobs: int | None = None
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, those included that steps in flight will yield."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that are known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def seat_row(self) -> int:
        """The row of its seat in arrays. Raises where it has none: such an index would mean every row."""
        if self.seat is None:
            raise RuntimeError(f"{self.request_id} is in a step and has no seat")
        return self.seat


class PlanRow(NamedTuple):
    """What a step does with one sequence: compute positions `[start, start + num_tokens)`.

    `samples` says whether the row's last position yields the next token; a prefill chunk that is not the last of its
    prompt does not. `carries` says that the row's one input token comes from the step before, which is in flight.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    carries: bool = False

    @property
    def output_index(self) -> int:
        """The index of the token that the row yields among the sequence's output tokens."""
        return self.start + self.num_tokens - self.sequence.num_prompt_tokens


class Restored(NamedTuple):
    """The KV of the positions from `start` up to `end` comes back from host memory into `blocks`, the first of which
    is block `start // block_size` of the sequence's table."""

    sequence: Sequence
    start: int
    end: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step in columns; see `PlanRow`. The first `num_decodes` rows have one token and yield one. `boarded` for it,
    `grown` got blocks for it, `preempted` gave up their seat for it. `constraint` kept it from holding more.

    Before anything else the device copies blocks, in this order: for each pair of `swaps_out` a device block to a host
    block, then for each pair of `swaps_in` a host block to a device block. `swapped` are the sequences whose KV it is;
    `restored` says which positions of theirs come back.

    A plan is a transaction: it takes effect for all of `touched` or, when its step fails, those end.
    """

    sequences: list[Sequence]
    starts: list[int]
    lengths: list[int]
    samples: list[bool]
    carries: list[bool]
    num_decodes: int = 0
    boarded: tuple[Sequence, ...] = ()
    grown: tuple[Sequence, ...] = ()
    preempted: tuple[Sequence, ...] = ()
    swaps_out: tuple[tuple[int, int], ...] = ()
    swaps_in: tuple[tuple[int, int], ...] = ()
    swapped: tuple[Sequence, ...] = ()
    constraint: StepConstraint = StepConstraint.NO_WORK
    restored: tuple[Restored, ...] = ()

    @classmethod
    def of(cls, rows: Iterable[PlanRow]) -> StepPlan:
        """A plan of these rows, outside any scheduler."""
        rows = list(rows)
        is_decode = [row.num_tokens == 1 and row.samples for row in rows]
        return cls(
            [row.sequence for row in rows],
            [row.start for row in rows],
            [row.num_tokens for row in rows],
            [row.samples for row in rows],
            [row.carries for row in rows],
            [*is_decode, False].index(False),
        )

    @property
    def rows(self) -> tuple[PlanRow, ...]:
        """The rows, made anew: for those who read a plan rarely."""
        columns = (self.sequences, self.starts, self.lengths, self.samples, self.carries)
        return tuple(PlanRow(*row) for row in zip(*columns, strict=True))

    @property
    def touched(self) -> tuple[Sequence, ...]:
        """Every sequence of which the plan changes something on the device, each once: rows, block tables, sampling
        parameters, KV that moves. A sequence may board without a row."""
        return tuple(dict.fromkeys(chain(self.sequences, self.boarded, self.grown, self.swapped)))

    @property
    def num_rows(self) -> int:
        """Sequences in the step."""
        return len(self.sequences)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the device returned: the sampled token ids of the rows that sample, in the order of the plan's rows, and by
    number of such a row the log probabilities of those that report them. The id is None where the row's logits hold
    no number to choose: each is NaN, -inf or banned."""

    plan: StepPlan
    sampled_ids: tuple[int | None, ...]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)

    def keep_logprobs(self) -> None:
        """Leaves them with their sequences, which do not have the tokens yet."""
        if not self.logprobs:
            return
        sampling = [s for s, samples in zip(self.plan.sequences, self.plan.samples, strict=True) if samples]
        for row, values in self.logprobs.items():
            if self.sampled_ids[row] is not None:
                sampling[row].logprobs[sampling[row].num_output_tokens] = values


@dataclass(slots=True)
class NewTokens:
    """The output tokens that a step yields, in columns; an offset is the index among the sequence's output tokens."""

    sequences: list[Sequence] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.token_ids)

    def __iter__(self) -> Iterator[tuple[Sequence, int, int]]:
        return zip(self.sequences, self.offsets, self.token_ids, strict=True)


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """The end of a sequence. By the time it is handed out what was promised to it can be promised to others; its blocks
    come free then too, or with the step in flight that still has a row of it."""

    sequence: Sequence
    reason: FinishReason
    stop_token_id: int | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step means for the streams: tokens, then ends."""

    tokens: NewTokens
    finished: tuple[FinishEvent, ...]
