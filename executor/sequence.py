"""One choice of a request on this executor, and what a step does with it. Pure data.

A sequence's tokens are its prompt followed by its output. `num_computed` of them have their KV in the blocks of
`block_table`; the scheduler lets it chase `num_tokens`. Nothing here knows of time, devices or gRPC.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
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


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence that waits or runs.

    `token_ids[:num_prompt_tokens]` is the prompt, the rest output (output of earlier placements included).
    `block_table[i]` is the block that holds positions `[i * block_size, (i + 1) * block_size)`.
    `num_reserved_blocks` is what the ledger promised; `cache_salt` None keeps it out of the prefix cache.
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

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens so far."""
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class PlanRow:
    """What a step does with one sequence: compute positions `[start, start + num_tokens)`.

    `samples` says whether the row's last position yields the next token; a prefill chunk that is not the last of its
    prompt does not. `output_index` is the index of that token among the sequence's output tokens.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    output_index: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: its rows, decodes first, and the sequences that boarded for it."""

    rows: tuple[PlanRow, ...]
    boarded: tuple[Sequence, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(row.num_tokens for row in self.rows)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the device returned: the sampled token ids of the rows that sample, in the order of the plan's rows."""

    plan: StepPlan
    sampled_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One new output token, at `offset` among the sequence's output tokens."""

    sequence: Sequence
    offset: int
    token_id: int


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """The end of a sequence. By the time it is handed out its blocks are released."""

    sequence: Sequence
    reason: FinishReason
    stop_token_id: int | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a step means for the streams: tokens, then ends."""

    tokens: tuple[TokenEvent, ...]
    finished: tuple[FinishEvent, ...]
