"""Sequences and step plans: one choice of a request on this executor, and what a step does with it. Pure data.

A sequence's tokens are its prompt followed by its output. `num_computed` of them have their KV in the blocks of
`block_table`, or will have when the steps in flight have retired. `num_tokens` includes the tokens that those steps
will yield. Plans and tokens are columns, not an object for each row, because a step is planned and retired hundreds of
times per second. Nothing here depends on time, devices or gRPC.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from inflight.common.protocol import PrefixName
from inflight.executor.pooling.pooled import PooledOutput
from inflight.executor.scheduler.blocks import WindowTable
from inflight.executor.scheduler.step_constraint import StepConstraint
from inflight.executor.speculation.proposer import Proposer

Id = TypeVar("Id", int, int | None)


class FinishReason(Enum):
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    PREEMPTED = "preempted"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Processors:
    """Changes of the logits before a token is chosen; see executor/logits/reference.py. The defaults change nothing.

    `bias` are pairs of a token id and what is added to its logit, each id once. Empty `allowed_ids` allow all.
    `bad_words` are sequences of ids, none of them empty.
    """

    bias: tuple[tuple[int, float], ...] = ()
    allowed_ids: frozenset[int] = frozenset()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    bad_words: tuple[tuple[int, ...], ...] = ()
    no_repeat_ngram_size: int = 0


NO_PROCESSORS = Processors()


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is sampled. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 keep every token."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class Stopping:
    """When the sequence ends. `stop_token_ids` includes the model's end-of-sequence ids, unless they are ignored."""

    max_tokens: int
    min_tokens: int
    stop_token_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log probability of a token (natural logarithm), and the most likely tokens at its position, likeliest
    first. `rank` is one more than the number of tokens that are likelier."""

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]
    rank: int = 0


NO_LOGPROBS: Mapping[int, TokenLogprobs] = MappingProxyType({})

# In place of a sampled id: the row's request excludes every token that the model could choose.
ALL_EXCLUDED = -2
# The priority of class batch.
BATCH_PRIORITY = -1
# Placements after which a sequence of class batch keeps its seat, so that it ends however many others come. The ledger
# has the same bound (`states.lua`).
MAX_YIELDING_ATTEMPTS = 8


@dataclass(slots=True, eq=False)
class Constraint:
    """The form that the output must have; see executor/logits/grammar.py.

    `grammar` is text in llguidance's format and `key` its SHA-256. `compiled` is the compiled grammar (an `LLMatcher`
    that is only copied), None until it is ready. Where the grammar accepts the output, the `eos_token_ids` are allowed
    and end it; with `ignores_eos` only where nothing else is allowed.

    The thread that computes masks writes the rest. By the newest numbers of output tokens, `accepts` says whether the
    grammar accepts that output, and `errors` why no token can follow it; what is written behind a draft that turns out
    wrong is written again before it is read. `is_slow` says that a mask took long; then nothing is drafted.
    """

    grammar: str
    key: bytes
    eos_token_ids: frozenset[int]
    ignores_eos: bool = False
    compiled: Any = None
    accepts: dict[int, bool] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    is_slow: bool = False

    def is_unfinished(self, reason: FinishReason, num_output_tokens: int, stop_token_id: int | None) -> bool:
        """Returns whether the output ended before the grammar accepted it. A stop token of the request is not part of
        the output. A stop string cuts the text within what the grammar describes."""
        if reason is FinishReason.STOP_STRING:
            return True
        if reason is FinishReason.LENGTH:
            return not self.accepts.get(num_output_tokens, False)
        if reason is FinishReason.STOP_TOKEN and stop_token_id not in self.eos_token_ids:
            return not self.accepts.get(num_output_tokens - 1, False)
        return False


@dataclass(frozen=True, slots=True)
class HostCopy:
    """The KV of a preempted sequence in host memory. `host_blocks[i]` holds the content of block `first_index + i` of
    its table. With the blocks before, to which other sequences hold references, it is the KV of `num_computed`
    tokens. `host_slot` has the recurrent state behind them; None without recurrent layers."""

    first_index: int
    host_blocks: list[int]
    num_computed: int
    host_slot: int | None = None


@dataclass(frozen=True, slots=True)
class HostPrefix:
    """The blocks of a sequence's prefix that come back from host memory, in order. The last one ends at position
    `end`."""

    host_blocks: list[int]
    end: int


class StateLoad(NamedTuple):
    """A checkpoint that is copied to a sequence's slot of recurrent state: that of its first `position` tokens."""

    checkpoint: int
    slot: int
    position: int


@dataclass(slots=True)
class Resources:
    """What a sequence or an account has used; `inflight.executor.engine.accounting` counts it. The fields are those of
    the protocol's `ResourceUsage`, times in nanoseconds."""

    busy_ns: int = 0
    seat_ns: int = 0
    block_ns: int = 0
    computed_prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    wasted_draft_tokens: int = 0
    recomputed_tokens: int = 0

    def add(self, other: Resources) -> None:
        """Adds what another one has used."""
        self.busy_ns += other.busy_ns
        self.seat_ns += other.seat_ns
        self.block_ns += other.block_ns
        self.computed_prompt_tokens += other.computed_prompt_tokens
        self.cached_prompt_tokens += other.cached_prompt_tokens
        self.output_tokens += other.output_tokens
        self.wasted_draft_tokens += other.wasted_draft_tokens
        self.recomputed_tokens += other.recomputed_tokens


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence that waits or runs.

    `token_ids[:num_prompt_tokens]` is the prompt, the rest output (output of earlier placements included).
    `block_table[i]` is the block that holds positions `[i * block_size, (i + 1) * block_size)`. `num_reserved_blocks`
    is what the ledger reserved. `window_table` has its blocks in the pool of the layers with a sliding window, if there
    is one and the sequence has boarded. A `cache_salt` of None keeps the sequence out of the prefix cache.
    `length_limit` is the number of tokens at which it ends here at the latest: its request's end or, without
    overcommitting, that of its reservation. `seat` is its row in arrays that are kept between steps.
    `num_in_flight` steps that are not retired have a row of it; `num_pending` of them will yield a token.

    `num_cached_tokens` were found in the prefix cache when it boarded for the first time, `num_host_tokens` of them in
    host memory. `host_prefix` is set while the plans do not yet copy back all that was found there.

    With recurrent layers, `state_slot` is its slot of their state while it is boarded, and `state_load` the checkpoint
    that the plan which boards it has to load there. The first `branch_tokens` tokens had their KV in the prefix cache
    then. No state of the first `num_passed_states` tokens or fewer is to be saved any more. `newest_state` is the hash
    of the prefix of the last state of its output that was kept, and `kept_states` are those of all states of its
    prefixes that were kept, shortest first. `state_positions` are those of its prompt whose state is kept, and
    `state_name` names its prefixes; None until they are needed.

    The larger `priority` is served first. `inter_token_target_ms` is the longest step that it should decode in; None:
    any. `deadline_ms` is by the engine's clock and only compared here. `arrival` is
    its position in the order of acceptance. After a preemption, `num_lost_tokens` is the number of tokens that had KV,
    `host_copy` the KV that was copied to the host, and `num_steps_away` the steps since. `num_prefix_wait_steps` counts
    the steps that it waited for a prefix that another sequence was computing, `num_passed_tokens` the prompt tokens of
    later sequences that were computed ahead of its own.

    `num_top_logprobs` is the number of likeliest tokens to report with each sampled token; None reports nothing.
    `logprobs` holds the reports by output offset.

    `num_prompt_logprobs` is the same for each token of the prompt after the first. `prompt_logprobs[i]` belongs to
    prompt token `i + 1`, which row `i` predicts. It only grows, so a preemption loses none. `num_scored` counts those
    rows and the ones in flight; at least `min(num_computed, num_prompt_tokens - 1)` where the prompt is scored.

    A step verifies at most `max_drafts` drafted tokens of it, which its `proposer` drafts.

    `adapter_hash` is the content hash of its LoRA adapter, empty for the base model, and `adapter_slot` the slot that
    the adapter is in, None until it is loaded. The adapter stays there until the sequence has ended.

    With `pooled` it yields no token: it leaves its seat with the step that computes the last of its prompt, and ends
    when that step retires.

    `tenant` and `adapter_name` are what it is charged to. `used` is what it has used, None until it has ended.

    With `exact_resume` the engine must continue output of earlier placements as if it had produced it. Our own always
    does.
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
    num_host_tokens: int = 0
    host_prefix: HostPrefix | None = None
    block_table: list[int] = field(default_factory=list)
    window_table: WindowTable | None = None
    block_hashes: list[bytes] = field(default_factory=list)
    state_slot: int | None = None
    state_load: StateLoad | None = None
    branch_tokens: int = 0
    num_passed_states: int = 0
    newest_state: bytes | None = None
    kept_states: list[bytes] = field(default_factory=list)
    state_positions: tuple[int, ...] | None = None
    state_name: PrefixName | None = None
    length_limit: int = 0
    seat: int | None = None
    num_in_flight: int = 0
    num_pending: int = 0
    priority: int = 0
    inter_token_target_ms: float | None = None
    deadline_ms: int | None = None
    arrival: int = 0
    num_preemptions: int = 0
    num_lost_tokens: int = 0
    num_steps_away: int = 0
    host_copy: HostCopy | None = None
    num_prefix_wait_steps: int = 0
    num_passed_tokens: int = 0
    num_top_logprobs: int | None = None
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    num_prompt_logprobs: int | None = None
    num_scored: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    processors: Processors = NO_PROCESSORS
    constraint: Constraint | None = None
    max_drafts: int = 0
    proposer: Proposer | None = None
    adapter_hash: bytes = b""
    adapter_slot: int | None = None
    pooled: PooledOutput | None = None
    tenant: str = ""
    adapter_name: str = ""
    used: Resources | None = None
    exact_resume: bool = False

    @property
    def is_batch(self) -> bool:
        """Whether it is of class batch, which gives way to the others."""
        return self.priority <= BATCH_PRIORITY

    @property
    def gives_way(self) -> bool:
        """Whether it gives up its seat to a sequence of another class that waits for one."""
        return self.is_batch and self.attempt <= MAX_YIELDING_ATTEMPTS

    @property
    def is_ready(self) -> bool:
        """Whether it may board: its grammar is compiled and its adapter loaded, as far as it has them."""
        is_compiled = self.constraint is None or self.constraint.compiled is not None
        return is_compiled and (not self.adapter_hash or self.adapter_slot is not None)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, including those that steps in flight will yield."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_uncomputed(self) -> int:
        """Tokens that steps still have to compute. What comes back from host memory is not computed."""
        num_known = self.num_computed if self.host_prefix is None else max(self.num_computed, self.host_prefix.end)
        return self.num_tokens - num_known

    @property
    def num_shared_tokens(self) -> int:
        """Tokens whose blocks were found in the pool when it boarded, and may be in use by others."""
        return self.num_cached_tokens - self.num_host_tokens

    @property
    def num_output_tokens(self) -> int:
        """Output tokens that are known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_overrun_blocks(self) -> int:
        """Blocks that it uses beyond those reserved for it."""
        return max(0, len(self.block_table) - self.num_reserved_blocks)

    @property
    def num_unscored(self) -> int:
        """Rows of the prompt whose logits are still needed for log probabilities."""
        return 0 if self.num_prompt_logprobs is None else self.num_prompt_tokens - 1 - self.num_scored

    @property
    def num_reusable_tokens(self) -> int:
        """Tokens, from the first, whose KV need not be computed if it is found. The last token yields the next one, and
        rows whose logits or hidden states are needed have to be computed."""
        if self.pooled is not None and self.pooled.pooling.needs_all_rows:
            return self.pooled.num_planned
        return self.num_scored if self.num_unscored else self.num_tokens - 1

    @property
    def seat_row(self) -> int:
        """The row of its seat in arrays. Raises without a seat, because None as an index would select every row."""
        if self.seat is None:
            raise RuntimeError(f"{self.request_id} is in a step and has no seat")
        return self.seat


class PlanRow(NamedTuple):
    """What a step does with one sequence: it computes positions `[start, start + num_tokens)`.

    `samples` says whether the row's last position yields the next token; a prefill chunk that is not the last of its
    prompt does not. `carries` says that the row's one input token comes from the previous step, which is in flight.
    `drafts` are tokens that may follow the known ones: the row computes them behind its one known token, and each
    position yields a token.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    carries: bool = False
    drafts: tuple[int, ...] = ()

    @property
    def output_index(self) -> int:
        """The index of the first token that the row yields among the sequence's output tokens."""
        return self.start + self.num_tokens - len(self.drafts) - self.sequence.num_prompt_tokens


NO_DRAFTS: Mapping[int, tuple[int, ...]] = MappingProxyType({})


class ScoredRows(NamedTuple):
    """The positions `[start, end)` of a plan's row whose logits give the log probability of the prompt's next token."""

    row: int
    sequence: Sequence
    start: int
    end: int

    @property
    def target_ids(self) -> list[int]:
        """The prompt's tokens that these positions predict."""
        return self.sequence.token_ids[self.start + 1 : self.end + 1]


class PooledRows(NamedTuple):
    """The positions `[start, end)` of a plan's row whose hidden states the sequence's `pooled` needs."""

    row: int
    sequence: Sequence
    start: int
    end: int


class StateSave(NamedTuple):
    """The recurrent state after the first `position` tokens, which a plan's row saves to a checkpoint."""

    row: int
    sequence: Sequence
    position: int
    checkpoint: int


class Restored(NamedTuple):
    """KV of positions `[start, end)` that is copied back from host memory into `blocks`, of which the first is block
    `start // block_size` of the sequence's table."""

    sequence: Sequence
    start: int
    end: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step in columns; see `PlanRow`. The first `num_decodes` rows have one token and yield one. Behind them are
    the rows that verify `drafts`, given by row, and then those of prompts. `boarded`, `grown` and `preempted` are the
    sequences that boarded, got blocks or lost their seat for this step. `constraint` kept it from holding more.
    `scored` are the rows that score their prompt, at most MAX_PROMPT_LOGPROB_ROWS positions in all; none of these
    positions yields a token.

    First of all the device copies blocks, in this order: for each pair of `swaps_out` a device block to a host block,
    then for each pair of `swaps_in` a host block to a device block. `swapped` are the sequences that own this KV;
    `restored` says which positions of theirs come back. `stored` are the hashes of the evicted prefix blocks that go
    out; they belong to no sequence. Slots of recurrent state are copied in the same way: for each pair of
    `state_swaps_out` a slot to a host slot, then for each pair of `state_swaps_in` a host slot to a slot.

    Recurrent states are loaded from checkpoints before the rows are computed, and saved with them: `state_loads` and
    `state_saves`. `pooled` are the rows whose hidden states are needed.

    A plan is a transaction: it takes effect for all of `touched`, or, when its step fails, those end.
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
    stored: tuple[bytes, ...] = ()
    scored: tuple[ScoredRows, ...] = ()
    drafts: Mapping[int, tuple[int, ...]] = field(default_factory=lambda: NO_DRAFTS)
    state_loads: tuple[StateLoad, ...] = ()
    state_saves: tuple[StateSave, ...] = ()
    pooled: tuple[PooledRows, ...] = ()
    state_swaps_out: tuple[tuple[int, int], ...] = ()
    state_swaps_in: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, rows: Iterable[PlanRow]) -> StepPlan:
        """Makes a plan of these rows, outside any scheduler."""
        rows = list(rows)
        is_decode = [row.num_tokens == 1 and row.samples for row in rows]
        return cls(
            [row.sequence for row in rows],
            [row.start for row in rows],
            [row.num_tokens for row in rows],
            [row.samples for row in rows],
            [row.carries for row in rows],
            [*is_decode, False].index(False),
            drafts={index: row.drafts for index, row in enumerate(rows) if row.drafts},
        )

    @property
    def rows(self) -> tuple[PlanRow, ...]:
        """The rows as objects, made on each access, for code that reads a plan rarely."""
        columns = (self.sequences, self.starts, self.lengths, self.samples, self.carries)
        return tuple(PlanRow(*row, self.drafts.get(i, ())) for i, row in enumerate(zip(*columns, strict=True)))

    @property
    def touched(self) -> tuple[Sequence, ...]:
        """Every sequence whose state on the device the plan changes, each once: rows, block tables, sampling
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

    @property
    def num_sampled(self) -> int:
        """Token ids that the step samples."""
        return sum(self.samples) + (sum(map(len, self.drafts.values())) if self.drafts else 0)


def accepted_ids(drafts: tuple[int, ...], sampled_ids: Iterable[Id]) -> list[Id]:
    """Returns the sampled ids up to the first that is not equal to its draft, which is the last one that counts: those
    behind it follow a token that was not sampled."""
    accepted = []
    for token_id, draft in zip(sampled_ids, (*drafts, None), strict=True):
        accepted.append(token_id)
        if token_id != draft:
            break
    return accepted


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results from the device: the sampled token ids of the rows that sample, in the order of the plan's rows, and the
    log probabilities by index among those ids. A row with drafts has an id for each of its positions. Behind them
    follow the positions that score a prompt, in the order of the plan. An id is None where the row has no usable logit,
    only NaN and -inf, and `ALL_EXCLUDED` where the request's bans left none. `pooled` are the sums of the hidden states
    of each of the plan's `pooled`, in their order."""

    plan: StepPlan
    sampled_ids: tuple[int | None, ...]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    pooled: tuple[array[float], ...] = ()

    def keep_pooled(self, ended: Container[Sequence]) -> None:
        """Adds the hidden states to their sequences, except to those of `ended` ones."""
        for rows, rows_sum in zip(self.plan.pooled, self.pooled, strict=True):
            if rows.sequence not in ended and rows.sequence.pooled is not None:
                rows.sequence.pooled.add(rows_sum)

    def keep_prompt_logprobs(self, ended: Container[Sequence]) -> None:
        """Stores the log probabilities of prompts in their sequences, unless the result has none. Those of `ended`
        sequences are dropped: an earlier step of such a sequence may have failed, so that its positions are missing."""
        if not self.logprobs:
            return
        row = len(self.sampled_ids)
        for scored in self.plan.scored:
            end = row + scored.end - scored.start
            if scored.sequence not in ended:
                scored.sequence.prompt_logprobs += [self.logprobs[each] for each in range(row, end)]
            row = end


@dataclass(slots=True)
class NewTokens:
    """The output tokens that a step yields, in columns. An offset is the index among the sequence's output tokens."""

    sequences: list[Sequence] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.token_ids)

    def __iter__(self) -> Iterator[tuple[Sequence, int, int]]:
        return zip(self.sequences, self.offsets, self.token_ids, strict=True)


@dataclass(frozen=True, slots=True)
class FinishEvent:
    """The end of a sequence. Its reservation is free by now. Its blocks are too, unless a step in flight still has a
    row of it."""

    sequence: Sequence
    reason: FinishReason
    stop_token_id: int | None = None
    error: str = ""
    constraint_unfinished: bool = False

    @property
    def pooled(self) -> array[float]:
        """The embedding or the score, in float32; empty if the sequence has none, or did not come to its end."""
        sequence = self.sequence
        if sequence.pooled is None or self.reason is not FinishReason.LENGTH:
            return array("f")
        return sequence.pooled.values(sequence.num_prompt_tokens)

    @classmethod
    def of(
        cls, sequence: Sequence, reason: FinishReason, stop_token_id: int | None = None, error: str = ""
    ) -> FinishEvent:
        """Makes the event of a sequence whose tokens are all known."""
        constraint = sequence.constraint
        is_unfinished = constraint is not None and constraint.is_unfinished(
            reason, sequence.num_output_tokens, stop_token_id
        )
        return cls(sequence, reason, stop_token_id, error, is_unfinished)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The result of a step for the streams: log probabilities of prompts, tokens, then ends."""

    tokens: NewTokens
    finished: tuple[FinishEvent, ...]
    scored: tuple[ScoredRows, ...] = ()
