"""Comparison of CUDA graphs, and of FlashInfer, with the kernels that they replace, before an executor serves.

A graph replays addresses and sizes that were fixed when it was captured. One that was captured wrongly computes without
an error, so each is replayed once on rows with contexts of their own, and its logits and tokens are compared with those
of the same step launched kernel by kernel. FlashInfer is compared on such rows, too, and timed on the largest chunks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from inflight.common.model_source import ModelError
from inflight.executor.attention.backend import StepAttention
from inflight.executor.attention.flashinfer import FlashInfer, Timing, Verdict, decide
from inflight.executor.gpu.device_step import DeviceStep, GraphedStep
from inflight.executor.gpu.graphs import Bucket, Graph
from inflight.executor.gpu.idle import idle_sampling
from inflight.executor.gpu.step_layout import StepLayout
from inflight.executor.gpu.table_entries import TableEntries
from inflight.executor.kernels.tiling import SPAN_KEYS
from inflight.executor.scheduler.limits import SchedulerLimits
from inflight.executor.scheduler.sequence import PlanRow, Sampling, StepPlan, Stopping
from inflight.executor.scheduler.sequence import Sequence as Row
from inflight.executor.step.batch import StepBatch, pack

# Relative distance of logits of the same kernels. cuBLAS may choose another algorithm under capture, which rounds
# otherwise: half precision differs by far less than a wrong context or weight would.
TOLERANCE = {torch.float32: 1e-4}
TOLERANCE_OF_HALF = 0.05
# Other kernels round otherwise in every layer, as in the self-check of a model, whose tolerance this is.
TOLERANCE_OF_OTHER_KERNELS = 0.25
# Timed steps of a chunk, in each way.
REPETITIONS = 5
# The longest context of a timed chunk, in chunks.
MAX_CHUNKS = 4
# Rows of the compared step with decodes and chunks.
MIXED_ROWS = 8
GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)


@dataclass(frozen=True, slots=True)
class Trial:
    """A step of some of the trial rows; `seats` are the rows of their block tables."""

    plan: StepPlan
    seats: Sequence[int]

    def pack(self, block_size: int) -> StepBatch:
        batch = pack(self.plan, block_size)
        return replace(batch, table_rows=torch.tensor(self.seats, dtype=torch.int32))


@dataclass(frozen=True, slots=True)
class TrialRows:
    """Sequences that have blocks of the pool for themselves, so that no two rows of a step write to one slot."""

    sequences: Sequence[Row]

    @classmethod
    def of(cls, most: int, num_blocks: int, block_size: int, context_length: int, vocabulary_size: int) -> TrialRows:
        """Makes at most `most` sequences in the blocks 1 to `num_blocks`.

        Their contexts have different lengths and end within a block. The first has several spans of keys if blocks and
        context suffice, so that a decode's splits have work.
        """
        num_rows = min(most, num_blocks)
        longest = min(context_length, block_size * (1 + num_blocks - num_rows), SPAN_KEYS + block_size // 2)
        lengths = [longest] + [min(context_length, 2 + 5 * row % (block_size - 1)) for row in range(1, num_rows)]
        sequences, next_block = [], 1
        for row, length in enumerate(lengths):
            sequence = _sequence([(11 * row + 7 * place + 1) % vocabulary_size for place in range(length)])
            last_block = next_block + -(-length // block_size)
            sequence.block_table = list(range(next_block, last_block))
            next_block = last_block
            sequences.append(sequence)
        return cls(sequences)

    @classmethod
    def of_one(cls, num_tokens: int, block_size: int, vocabulary_size: int) -> TrialRows:
        """Makes one sequence, in the blocks from 1 on."""
        sequence = _sequence([(7 * place + 1) % vocabulary_size for place in range(num_tokens)])
        sequence.block_table = list(range(1, 1 + -(-num_tokens // block_size)))
        return cls([sequence])

    def entries(self, max_blocks: int, first_rows: Sequence[int] = (0,)) -> TableEntries:
        """Returns the block tables, in the rows of the first seats, counted from each of `first_rows`."""
        places = [
            (first_row + seat) * max_blocks + index
            for first_row in first_rows
            for seat, sequence in enumerate(self.sequences)
            for index in range(len(sequence.block_table))
        ]
        blocks = [block for _ in first_rows for sequence in self.sequences for block in sequence.block_table]
        return TableEntries(np.array(places, np.int64), np.array(blocks, np.int64))

    def prefills(self, max_tokens: int) -> Iterator[Trial]:
        """Yields steps that compute all tokens except the last of each sequence."""
        for seat, sequence in enumerate(self.sequences):
            for start in range(0, sequence.num_tokens - 1, max_tokens):
                length = min(max_tokens, sequence.num_tokens - 1 - start)
                yield Trial(StepPlan.of([PlanRow(sequence, start, length, False)]), [seat])

    def fill(self, bucket: Bucket) -> Trial:
        """Returns a step in which as many sequences as the bucket holds yield a token.

        In a bucket that is not of decodes, the later half decodes. The others compute as many of their last tokens as
        the bucket holds; the first token of each is left out, so that chunks have a prefix.
        """
        seats = list(range(min(bucket.num_sequences, len(self.sequences))))
        lengths = [1] * len(seats)
        if not bucket.is_decodes:
            num_chunks = -(-len(seats) // 2)
            num_left = bucket.num_tokens - len(seats)
            for seat in range(num_chunks):
                added = min(num_left, self.sequences[seat].num_tokens - 2)
                lengths[seat] += added
                num_left -= added
            seats = seats[num_chunks:] + seats[:num_chunks]
        return Trial(StepPlan.of(self._last(seat, lengths[seat]) for seat in seats), seats)

    def chunk(self, start: int, length: int) -> Trial:
        """Returns a step of a chunk of the first sequence."""
        return Trial(StepPlan.of([PlanRow(self.sequences[0], start, length, True)]), [0])

    def _last(self, seat: int, length: int) -> PlanRow:
        sequence = self.sequences[seat]
        return PlanRow(sequence, sequence.num_tokens - length, length, True)


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """Logits `[R, vocabulary]` of a step whose rows sample greedily, and the tokens that it drew, `[R]`."""

    logits: Tensor
    token_ids: Tensor


class TrialSteps:
    """Steps of trial rows, in the blocks of a pool that is not used yet."""

    def __init__(self, step: DeviceStep, rows: TrialRows) -> None:
        self.rows = rows
        self._step = step
        self._entries = rows.entries(step.buffers.max_blocks, step.buffers.first_table_rows)

    def prefill(self, max_tokens: int) -> None:
        """Computes the KV of all tokens except the last of each sequence."""
        for trial in self.rows.prefills(max_tokens):
            self.launch(trial)

    def rewind(self, trial: Trial, max_tokens: int) -> None:
        """Computes recurrent states up to the first position of each row: those that went on do not go back."""
        if self._step.recurrent_states is None:
            return
        rows: list[PlanRow] = []
        seats: list[int] = []

        def compute() -> None:
            if rows:
                self.launch(Trial(StepPlan.of(rows), list(seats)))
            rows.clear()
            seats.clear()

        for sequence, seat, end in zip(trial.plan.sequences, trial.seats, trial.plan.starts, strict=True):
            for start in range(0, end, max_tokens):
                length = min(max_tokens, end - start)
                if start or sum(row.num_tokens for row in rows) + length > max_tokens:
                    compute()
                rows.append(PlanRow(sequence, start, length, False))
                seats.append(seat)
        compute()

    def launch(
        self, trial: Trial, layout: StepLayout | None = None, flashinfer: FlashInfer | None = None
    ) -> StepResult:
        """Computes a step kernel by kernel, in its own layout unless another one is given."""
        self.prepared(trial, layout, flashinfer)()
        return self.take_result(trial.plan.num_sampled)

    def prepared(
        self, trial: Trial, layout: StepLayout | None = None, flashinfer: FlashInfer | None = None
    ) -> Callable[[], object]:
        """Uploads a step. Returns what computes it, in its own layout unless another one is given."""
        batch, num_yields = trial.pack(self._step.block_size), trial.plan.num_sampled
        num_decodes, attention = batch.num_decodes, None
        if layout is None:
            sizes = (batch.num_tokens, batch.num_sequences, num_yields)
            layout = self._step.layout(*sizes)
            attention = None if flashinfer is None else self._plan(flashinfer, batch)
        else:
            num_decodes = layout.num_sequences
        self.upload(batch, layout)
        return partial(self._step.compute, layout, num_decodes, attention)

    def upload(self, batch: StepBatch, layout: StepLayout) -> None:
        """Uploads a step in a layout."""
        self._step.buffers.upload(layout, batch, idle_sampling(len(batch.logit_rows)), self._entries)

    def take_result(self, num_rows: int) -> StepResult:
        """Copies logits and tokens of the newest step, and overwrites them, so that a step that writes none is
        noticed."""
        self._step.gather_logits(num_rows)
        logits, token_ids = self._step.logits[:num_rows], self._step.buffers.sampled_ids[:num_rows]
        result = StepResult(logits.clone(), token_ids.clone())
        self._step.overwrite_result()
        return result

    def _plan(self, flashinfer: FlashInfer, batch: StepBatch) -> StepAttention | None:
        # The packed tables are the trial's own: row i is that of sequence i of the plan.
        return flashinfer.plan(replace(batch, table_rows=torch.arange(batch.num_sequences, dtype=torch.int32)))


class GraphCheck:
    """Comparison of graphs with kernels."""

    def __init__(self, step: DeviceStep, graphed: GraphedStep, limits: SchedulerLimits) -> None:
        self._block_size, self._graphed, self._limits = step.block_size, graphed, limits
        self._steps = TrialSteps(step, _mixed_rows(step, limits, limits.max_num_sequences))

    def run(self, graphs: Mapping[Bucket, Graph]) -> None:
        """Compares a replay of each graph with the same step launched kernel by kernel, which has no padding except in
        buckets of decodes.

        Raises:
            ModelError: a graph computes something else.
        """
        steps = self._steps
        steps.prefill(self._limits.max_num_tokens)
        for bucket, graph in graphs.items():
            trial = steps.rows.fill(bucket)
            form = self._graphed.form_in(bucket, trial.plan.num_sampled)
            steps.rewind(trial, self._limits.max_num_tokens)
            launched = steps.launch(trial, form.layout if bucket.is_decodes else None)
            steps.rewind(trial, self._limits.max_num_tokens)
            steps.upload(trial.pack(self._block_size), form.layout)
            self._graphed.replay(graph, form)
            if reason := difference(launched, steps.take_result(trial.plan.num_sampled)):
                raise ModelError(
                    f"the CUDA graph of {bucket} does not compute what its kernels compute: {reason}; "
                    "start with enable_cuda_graphs=false, and report this"
                )


class AttentionCheck:
    """Comparison of FlashInfer with the kernels: results of a step with decodes and chunks, of a prompt's first chunk
    and of its last, and times of the latter two."""

    def __init__(self, step: DeviceStep, limits: SchedulerLimits) -> None:
        self._step, self._max_tokens = step, limits.max_num_tokens
        self._mixed = TrialSteps(step, _mixed_rows(step, limits, min(MIXED_ROWS, limits.max_num_sequences)))
        num_tokens = min(limits.context_length, _num_blocks(step) * step.block_size)
        num_tokens = min(num_tokens, MAX_CHUNKS * self._max_tokens)
        self._long = TrialSteps(step, TrialRows.of_one(num_tokens, step.block_size, step.logits.shape[1]))

    def run(self, flashinfer: FlashInfer) -> Verdict:
        """Compares, times and decides. Every slot of the pool is NaN before, and 0 afterwards.

        Raises:
            ModelError: FlashInfer is required and cannot be used.
        """
        failure, timings = None, []
        try:
            failure = self._difference(flashinfer)
            if failure is None:
                timings = [self._timing(flashinfer, trial) for trial in self._chunks()]
        except Exception as error:  # it compiles kernels at their first use, and its errors are of many types
            failure = f"{type(error).__name__}: {error}"
        finally:
            self._fill_pool(0.0)
        return decide(failure, timings, is_required=flashinfer.is_required)

    def _difference(self, flashinfer: FlashInfer) -> str | None:
        num_rows = len(self._mixed.rows.sequences)
        mixed = self._mixed.rows.fill(Bucket(self._max_tokens, num_rows, False))
        for steps, trials in ((self._mixed, [mixed]), (self._long, self._chunks())):
            # What a block held before must not reach a result.
            self._fill_pool(float("nan"))
            steps.prefill(self._max_tokens)
            for trial in trials:
                expected, found = steps.launch(trial), steps.launch(trial, flashinfer=flashinfer)
                if reason := difference(expected, found, TOLERANCE_OF_OTHER_KERNELS):
                    return f"in a step of {len(trial.seats)} sequences {reason}"
        return None

    def _timing(self, flashinfer: FlashInfer, trial: Trial) -> Timing:
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(REPETITIONS):
            for way, taken in zip((None, flashinfer), times, strict=True):
                taken.append(_time_s(self._step.logits.device, self._long.prepared(trial, flashinfer=way)))
        num_tokens = trial.plan.lengths[0]
        return Timing(num_tokens, trial.plan.starts[0] + num_tokens, *times)

    def _chunks(self) -> Sequence[Trial]:
        """Returns the first chunk and the last."""
        num_tokens = self._long.rows.sequences[0].num_tokens
        length = min(self._max_tokens, num_tokens)
        return [self._long.rows.chunk(0, length), self._long.rows.chunk(num_tokens - length, length)]

    def _fill_pool(self, value: float) -> None:
        for kv in self._step.kv:
            kv.keys.fill_(value)
            kv.values.fill_(value)


def _mixed_rows(step: DeviceStep, limits: SchedulerLimits, most: int) -> TrialRows:
    sizes = (_num_blocks(step), step.block_size, limits.context_length, step.logits.shape[1])
    rows = TrialRows.of(most, *sizes)
    if step.recurrent_states is not None:
        for slot, sequence in enumerate(rows.sequences):
            sequence.state_slot = slot
    return rows


def _num_blocks(step: DeviceStep) -> int:
    """Returns the blocks that every layer has."""
    return min(kv.num_blocks for kv in step.kv) - 1


def _time_s(device: torch.device, compute: Callable[[], object]) -> float:
    """Returns the seconds that a step takes, on a GPU by its own clock."""
    if device.type != "cuda":
        began_s = time.perf_counter()
        compute()
        return time.perf_counter() - began_s
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    compute()
    ended.record()
    ended.synchronize()
    took_s: float = began.elapsed_time(ended) / 1000
    return took_s


def difference(launched: StepResult, replayed: StepResult, tolerance_of_half: float = TOLERANCE_OF_HALF) -> str | None:
    """Returns how a replay differs from the same step launched kernel by kernel, in words; None if it does not, except
    for rounding.

    A row may choose another token only if the margin between both is within the rounding.
    """
    expected, found = launched.logits.float(), replayed.logits.float()
    tolerance = TOLERANCE.get(launched.logits.dtype, tolerance_of_half)
    norms = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    distance = float(((found - expected).norm(dim=-1) / norms).max())
    if not distance <= tolerance:  # NaN is no distance
        return f"its logits differ by {distance:.2g}"
    largest = found.amax(-1)
    ids = replayed.token_ids.long()
    is_id = (ids >= 0) & (ids < found.shape[1])
    drawn = found.gather(1, ids.clamp(0, found.shape[1] - 1)[:, None])[:, 0]
    if not bool((is_id & (drawn == largest)).all()):
        return "it draws a token that is not the likeliest of its logits"
    margins = expected.amax(-1) - expected.gather(1, ids[:, None])[:, 0]
    widest = float((margins / (norms / expected.shape[1] ** 0.5)).max())
    if not widest <= tolerance:
        return f"it chooses another token where the margin is {widest:.2g} standard deviations"
    return None


def _sequence(token_ids: list[int]) -> Row:
    return Row("graph-check", 1, token_ids, len(token_ids), GREEDY, Stopping(1, 0, frozenset()), 0, None)
