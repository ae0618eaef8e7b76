"""Dummy steps, which a runner computes before there is work, to compile kernels and to measure memory.

Every token is written to the spare block, and reads only that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from inflight.common.protocol import MAX_TOP_LOGPROBS
from inflight.executor.kernels.tiling import MIN_ROWS
from inflight.executor.logits.row import LogitsRow
from inflight.executor.scheduler.sequence import Processors, Sampling
from inflight.executor.step.batch import StepBatch
from inflight.executor.step.sampling import SampleRow
from inflight.executor.step.sampling_columns import SamplingBatch

GREEDY_ROW = SampleRow(Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0), output_index=0, banned_ids=frozenset())


def warm_up_lengths(max_num_tokens: int, max_num_sequences: int, context_length: int) -> Iterator[list[int]]:
    """Yields steps with chunks for all kinds of kernels, since tiles depend on powers of two of the tokens. First comes
    the step with the most tokens, and then that with the most sequences."""
    yield _chunks(max_num_tokens, max_num_sequences, context_length)
    # One token would be a decode.
    if num_sequences := min(max_num_sequences, max_num_tokens // 2):
        yield [2] * num_sequences
    num_tokens = MIN_ROWS
    while num_tokens < max_num_tokens:
        yield _chunks(num_tokens, max_num_sequences, context_length)
        num_tokens *= 2


def _chunks(num_tokens: int, max_num_sequences: int, context_length: int) -> list[int]:
    """Returns chunks of so many tokens, or of as many as whole contexts have."""
    return [context_length] * min(num_tokens // context_length, max_num_sequences) or [num_tokens]


def idle_batch(lengths: Sequence[int], table_row: int, block_size: int) -> StepBatch:
    """Makes a batch of sequences with these numbers of new tokens and no others, on the host."""
    num_tokens, num_sequences = sum(lengths), len(lengths)
    starts = np.zeros(num_sequences + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    positions = np.concatenate([np.arange(length) for length in lengths])
    nothing = torch.zeros(0, dtype=torch.int64)
    return StepBatch(
        token_ids=torch.zeros(num_tokens, dtype=torch.int64),
        positions=torch.from_numpy(positions),
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
        query_starts=torch.from_numpy(starts),
        context_lengths=torch.tensor(list(lengths), dtype=torch.int32),
        block_tables=torch.zeros((1, 1), dtype=torch.int32),
        table_rows=torch.full((num_sequences,), table_row, dtype=torch.int32),
        logit_rows=torch.from_numpy(starts[1:].astype(np.int64) - 1),
        carried_rows=nothing,
        carried_from=nothing,
        num_decodes=next((i for i, length in enumerate(lengths) if length != 1), num_sequences),
        block_size=block_size,
    )


def idle_sampling(num_rows: int) -> SamplingBatch:
    return SamplingBatch.of([GREEDY_ROW] * num_rows)


def idle_reporting_sampling(num_rows: int) -> SamplingBatch:
    """Returns rows that report as many log probabilities as there can be."""
    return replace(idle_sampling(num_rows), reporting=tuple((row, MAX_TOP_LOGPROBS) for row in range(num_rows)))


def idle_processed_sampling(vocabulary_size: int) -> SamplingBatch:
    """Returns a row whose logits are changed in every way."""
    row = LogitsRow(Processors(presence_penalty=1.0, bad_words=((0,),)), [0], 0, 1, vocabulary_size)
    return SamplingBatch.of([replace(GREEDY_ROW, processed=row)])
