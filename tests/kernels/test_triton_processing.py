"""The logits stage by the Triton kernels, under the interpreter: bit for bit the reference, and its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from inflight.executor.engine.runner import NO_TOKEN
from inflight.executor.gpu.processing import ROWS, ChangedIds, Processing, name_excluded, row_mask
from inflight.executor.gpu.sampling import CHUNK, draw
from inflight.executor.logits.reference import banned_ids, process_row
from inflight.executor.logits.row import LogitsRow, bits_of, mask_of
from inflight.executor.scheduler.sequence import ALL_EXCLUDED, Processors, Sampling
from inflight.executor.step.sampling import SampleRow, numbers_of, sample
from inflight.executor.step.sampling_columns import SamplingBatch
from tests.kernels.test_triton_sampling import draw_rows

CONTEXT_LENGTH = 64
CPU = torch.device("cpu")
# Smaller than a word of a mask, no multiple of one, a whole chunk, and more than one.
VOCABULARY_SIZES = (7, 45, CHUNK, CHUNK + 37)
PROMPT, OUTPUT = [3, 1, 4, 1, 5, 2, 6, 5, 3, 5], [5, 3, 5, 1, 4, 1, 5, 3, 5]


def row_of(processors: Processors, prompt: Sequence[int], output: Sequence[int], vocabulary_size: int) -> LogitsRow:
    return LogitsRow(processors, [*prompt, *output], len(prompt), CONTEXT_LENGTH, vocabulary_size)


def logits_of(num_rows: int, vocabulary_size: int, seed: int = 0) -> Tensor:
    """Numbers of both signs, zeros, infinities and NaN."""
    logits = torch.randn(num_rows, vocabulary_size, generator=torch.Generator().manual_seed(seed)) * 4
    for i, special in enumerate((0.0, -0.0, float("inf"), float("-inf"), float("nan"))):
        logits[:, (i + torch.arange(num_rows)) % vocabulary_size] = special
    return logits


def changed(logits: Tensor, rows: dict[int, LogitsRow]) -> Tensor:
    processing = Processing(logits.device, logits.shape[1], CONTEXT_LENGTH, ROWS)
    return processing.changed(logits, rows).clone()


def assert_as_the_reference(logits: Tensor, rows: dict[int, LogitsRow]) -> None:
    before = logits.clone()
    expected = numbers_of(logits.float())
    for i, row in rows.items():
        expected[i] = process_row(expected[i], row)
    assert torch.equal(changed(logits, rows), expected)
    assert torch.equal(logits.nan_to_num(nan=77.0), before.nan_to_num(nan=77.0)), "the model's logits are left"


COMBINATIONS = [
    Processors(bias, allowed, repetition, frequency, presence, bad_words, ngram)
    for bias, allowed, repetition, (frequency, presence), bad_words, ngram in product(
        [(), ((1, 2.5), (5, -100.0), (0, 0.1))],
        [frozenset(), frozenset({0, 1, 3, 5, 6})],
        [1.0, 1.3, 0.7],
        [(0.0, 0.0), (0.3, 0.0), (0.0, 0.7), (-0.4, 1.1)],
        [(), ((2,), (3, 5, 6), (5, 4), (1, 4, 1, 5, 3, 5, 0))],
        [0, 1, 3],
    )
]


def assert_every_combination_as_the_reference(vocabulary_size: int, device: torch.device = CPU) -> None:
    """Each combination with another length of output, none included, beside rows that change nothing."""
    logits = logits_of(ROWS, vocabulary_size).to(device)
    for first in range(0, len(COMBINATIONS), ROWS - 2):
        some = COMBINATIONS[first : first + ROWS - 2]
        rows = {
            i + 1: row_of(processors, PROMPT, OUTPUT[: (first + 3 * i) % (len(OUTPUT) + 1)], vocabulary_size)
            for i, processors in enumerate(some)
        }
        assert_as_the_reference(logits, rows)


@pytest.mark.parametrize("vocabulary_size", VOCABULARY_SIZES)
def test_every_combination_is_bit_for_bit_the_reference(vocabulary_size: int) -> None:
    assert_every_combination_as_the_reference(vocabulary_size)


def test_half_precision_is_changed_as_float32() -> None:
    processors = Processors(((2, 0.123),), repetition_penalty=1.1, frequency_penalty=0.3, presence_penalty=0.1)
    logits = logits_of(2, 100).to(torch.bfloat16)
    assert_as_the_reference(logits, {1: row_of(processors, PROMPT, OUTPUT, 100)})


def test_mask_of_a_constraint_is_kept_as_it_is() -> None:
    row = row_of(Processors(bad_words=((40,),)), PROMPT, OUTPUT, 45)
    row.mask = mask = mask_of({7, 31, 32, 40, 44}, 45)
    before = mask.copy()
    assert_as_the_reference(logits_of(1, 45), {0: row})
    assert np.array_equal(mask, before)


def test_tokens_that_are_appended_count() -> None:
    # Given rows of which one has no output yet, and one ends
    vocabulary_size = 45
    processing = Processing(CPU, vocabulary_size, CONTEXT_LENGTH, 4)
    kinds = (
        Processors(((9, 1.0),), repetition_penalty=1.2, frequency_penalty=0.5, no_repeat_ngram_size=2),
        Processors(((9, 1.0), (5, 3.0)), presence_penalty=0.5),
        Processors(repetition_penalty=0.8),
        Processors(((4, -1.0),), bad_words=((9, 9),)),
    )
    rows = {i: row_of(processors, PROMPT, OUTPUT[:i], vocabulary_size) for i, processors in enumerate(kinds)}
    logits = logits_of(4, vocabulary_size)
    for token_id in (9, 9, 5, 44, NO_TOKEN, 0, 9):
        expected = torch.stack([process_row(numbers_of(logits)[i], row) for i, row in rows.items()])
        assert torch.equal(processing.changed(logits, rows), expected)
        for row in rows.values():
            row.append(token_id)


def test_token_that_is_not_read_counts_from_the_inputs_of_the_step() -> None:
    # Given rows whose newest token is among their entries, has only a bias, is new, or concerns no penalty
    kinds = (
        Processors(((9, 1.0),), repetition_penalty=1.2, frequency_penalty=0.5),
        Processors(((9, 1.0), (5, 3.0)), presence_penalty=0.5, frequency_penalty=0.3),
        Processors(repetition_penalty=0.8),
        Processors(((9, -1.0),), frozenset({1, 9, 30})),
    )
    logits = logits_of(4, 600)
    logits[:, 9] = 2.0
    for output in ([], OUTPUT, list(range(40, 90))):
        rows = {i: row_of(processors, PROMPT, output, 600) for i, processors in enumerate(kinds)}
        for newest in (5, 9, 30):
            input_ids = torch.tensor([77, newest, 78], dtype=torch.int32)
            processing = Processing(CPU, 600, CONTEXT_LENGTH, 4)
            ours = processing.changed(logits, rows, dict.fromkeys(range(3), 1), input_ids)
            expected = [
                process_row(numbers_of(logits)[i], row_of(processors, PROMPT, [*output, newest], 600))
                for i, processors in enumerate(kinds)
            ]
            assert torch.equal(ours, torch.stack(expected))


def test_changed_ids_are_forgotten_with_their_row() -> None:
    processing = Processing(CPU, 45, CONTEXT_LENGTH, 4)
    rows = {0: row_of(Processors(repetition_penalty=2.0), PROMPT, [], 45)}
    processing.changed(logits_of(1, 45), rows)
    assert len(processing._changed_ids) == 1
    rows.clear()
    assert len(processing._changed_ids) == 0


def test_a_row_holds_as_many_ids_as_the_limits_allow() -> None:
    # Given a full context of different ids and as many others with a bias, in every row
    vocabulary_size = 4096
    bias = tuple((token_id, 1.0) for token_id in range(1024))
    processors = Processors(bias, repetition_penalty=1.5, no_repeat_ngram_size=1)
    ids = list(range(2000, 2000 + CONTEXT_LENGTH))
    rows = {i: row_of(processors, ids[:10], ids[10:], vocabulary_size) for i in range(ROWS)}
    for row in rows.values():
        row.append(3000)
    assert_as_the_reference(logits_of(ROWS, vocabulary_size), rows)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 19, 20, 100])
def test_banned_ids_are_those_of_the_reference(size: int) -> None:
    vocabulary_size = 7
    words = ((3,), (5, 3), (5, 5, 3), (*OUTPUT, 1), (*PROMPT, *OUTPUT, 2), (3, 5, 0))
    for length in range(len(OUTPUT) + 1):
        row = row_of(Processors(bad_words=words, no_repeat_ngram_size=size), PROMPT, OUTPUT[:length], vocabulary_size)
        mask = row_mask(row, vocabulary_size)
        assert mask is not None
        assert set(np.flatnonzero(~bits_of(mask, vocabulary_size)).tolist()) == banned_ids(row)


def test_a_row_that_changes_nothing_now_has_no_mask_and_no_ids() -> None:
    row = row_of(Processors(bad_words=((1, 2),), frequency_penalty=1.0), PROMPT, [], 45)
    assert row_mask(row, 45) is None
    assert [len(column) for column in ChangedIds(row).columns] == [0, 0, 0]
    assert_as_the_reference(logits_of(1, 45), {0: row})


def test_rows_that_exclude_every_token_are_told_from_those_without_a_number() -> None:
    logits = torch.full((4, CHUNK + 37), float("-inf"))
    logits[1], logits[2, CHUNK + 36], logits[3] = float("nan"), -1.0, 1.0
    token_ids = torch.tensor([NO_TOKEN, NO_TOKEN, NO_TOKEN, 7], dtype=torch.int32)
    name_excluded(logits, token_ids)
    assert token_ids.tolist() == [NO_TOKEN, NO_TOKEN, ALL_EXCLUDED, 7]


def test_tokens_are_those_of_the_torch_sampler() -> None:
    # Given more rows than are changed at once, some greedy, restricted or not changed, and one that allows nothing
    vocabulary_size = 45
    logits = logits_of(2 * ROWS + 5, vocabulary_size, seed=7)
    rows = []
    for i in range(len(logits)):
        is_changed = i % 3 != 0 and not ROWS <= i < 2 * ROWS
        processors = COMBINATIONS[(37 * i) % len(COMBINATIONS)]
        row = row_of(processors, PROMPT, OUTPUT[: i % 9], vocabulary_size) if is_changed else None
        sampling = Sampling(0.4 * (i % 4), (0, 3)[i % 2], (1.0, 0.8)[i % 5 == 0], i, (0.0, 0.1)[i % 7 == 0])
        rows.append(SampleRow(sampling, i, frozenset({6} if i % 4 == 0 else ()), row))
    rows[4] = SampleRow(
        Sampling(1.0, 0, 1.0, 1), 0, frozenset(), row_of(Processors(no_repeat_ngram_size=1), [0, 1], [], 45)
    )
    rows[4].processed.mask = mask_of({0, 1}, vocabulary_size)  # type: ignore[union-attr]

    sampling_batch, draws = SamplingBatch.of(rows), draw_rows(rows)
    token_ids = torch.full((len(rows),), 999_999, dtype=torch.int32)
    draw(logits, draws, token_ids)
    unchanged = token_ids.clone()
    Processing(CPU, vocabulary_size, CONTEXT_LENGTH, len(rows)).draw(logits, draws, sampling_batch, token_ids)

    assert token_ids.tolist() == sample(logits, rows).tolist()
    assert token_ids[4] == NO_TOKEN
    assert token_ids[::3].tolist() == unchanged[::3].tolist()
